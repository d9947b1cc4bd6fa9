//! How are numbers and times written into a line without `fmt`'s machinery?
//!
//! A request's line has some ten numbers and a time; `write!` takes a hundred instructions for each.

use std::time::Duration;

/// Appends `value` in decimal.
pub(super) fn push_number(out: &mut String, mut value: u64) {
    let mut digits = [b'0'; 20];
    let mut from = digits.len();
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (value % 10) as u8;
        value /= 10;
        from -= 1;
        if value == 0 {
            break;
        }
    }
    push_ascii(out, digits.get(from..).unwrap_or_default());
}

/// Appends a time since 1970 as RFC 3339 has it, in microseconds: `2026-11-15T14:09:08.123456Z`.
pub(super) fn push_time(out: &mut String, unix: Duration) {
    let seconds = unix.as_secs();
    let (year, month, day) = date(seconds / 86_400);
    let mut text = *b"0000-00-00T00:00:00.000000Z";
    put(&mut text[0..4], year);
    put(&mut text[5..7], month);
    put(&mut text[8..10], day);
    put(&mut text[11..13], seconds / 3600 % 24);
    put(&mut text[14..16], seconds / 60 % 60);
    put(&mut text[17..19], seconds % 60);
    put(&mut text[20..26], unix.subsec_micros().into());
    push_ascii(out, &text);
}

/// Fills `digits` with the last digits of `value`.
fn put(digits: &mut [u8], mut value: u64) {
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (value % 10) as u8;
        value /= 10;
    }
}

/// Year, month and day of a day since 1970, in the Gregorian calendar. A year of it begins in March, so that the day
/// that some years have more is their last.
fn date(days: u64) -> (u64, u64, u64) {
    const DAYS_400_YEARS: u64 = 146_097;
    // 1 March of the year 0 to 1 January 1970.
    let days = days + 719_468;
    let (era, day) = (days / DAYS_400_YEARS, days % DAYS_400_YEARS);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 {
        from_march + 3
    } else {
        from_march - 9
    };
    let year = era * 400 + year + u64::from(month <= 2);
    (year, month, day_of_month)
}

fn push_ascii(out: &mut String, bytes: &[u8]) {
    out.push_str(std::str::from_utf8(bytes).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_display() {
        for value in [0, 1, 9, 10, 99, 100, 4_498_868_147_645_755, u64::MAX] {
            let mut out = String::from("x=");
            push_number(&mut out, value);
            assert_eq!(out, format!("x={value}"));
        }
    }

    #[test]
    fn times_are_right_around_leap_days_and_turns_of_the_year() {
        for (seconds, micros, expected) in [
            (0, 0, "1970-01-01T00:00:00.000000Z"),
            (951_782_399, 999_999, "2000-02-28T23:59:59.999999Z"),
            (951_782_400, 0, "2000-02-29T00:00:00.000000Z"),
            (951_868_800, 1, "2000-03-01T00:00:00.000001Z"),
            (1_735_689_599, 5, "2024-12-31T23:59:59.000005Z"),
            (1_735_689_600, 0, "2025-01-01T00:00:00.000000Z"),
            (1_794_751_748, 123_456, "2026-11-15T14:09:08.123456Z"),
            (4_107_542_399, 0, "2100-02-28T23:59:59.000000Z"),
            (4_107_542_400, 0, "2100-03-01T00:00:00.000000Z"),
        ] {
            let mut out = String::new();
            push_time(&mut out, Duration::new(seconds, micros * 1000 + 999));
            assert_eq!(out, expected);
        }
    }

    /// Each day of 800 years follows the one before it.
    #[test]
    fn no_day_is_left_out() {
        let mut last = date(0);
        for day in 1..292_194 {
            let (year, month, of_month) = date(day);
            let next = match last {
                (y, m, d) if (year, month) == (y, m) => of_month == d + 1,
                (y, 12, 31) => (year, month, of_month) == (y + 1, 1, 1),
                (y, m, d) => (year, month, of_month) == (y, m + 1, 1) && d >= 28,
            };
            assert!(next, "{last:?} then {:?}", (year, month, of_month));
            last = (year, month, of_month);
        }
        assert_eq!(last, (2769, 12, 31));
    }
}
