//! Numbers and times as people read them.

use std::time::Duration;

use serde_json::Value;

/// Stands for what is not known.
pub(super) const UNKNOWN: &str = "-";

/// A whole number with its thousands apart.
pub(super) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number of blocks or of cost: one digit after the point, and none where that is 0.
pub(super) fn amount(number: f64) -> String {
    let text = format!("{number:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// A span in milliseconds, or in seconds from ten on.
pub(super) fn span(ms: f64) -> String {
    match ms {
        ..10.0 => format!("{ms:.1} ms"),
        ..10_000.0 => format!("{ms:.0} ms"),
        _ => format!("{:.1} s", ms / 1e3),
    }
}

/// A share of a whole in percent; unknown of nothing.
pub(super) fn share(part: f64, whole: f64) -> String {
    match whole > 0.0 {
        true => format!("{:.0}%", 100.0 * part / whole),
        false => UNKNOWN.to_owned(),
    }
}

/// A moment in UTC: `2026-11-15 07:40:12.345`.
pub(super) fn moment(unix_ms: u64) -> String {
    let (days, ms) = (unix_ms / 86_400_000, unix_ms % 86_400_000);
    let (year, month, day) = civil(days);
    let (hour, minute) = (ms / 3_600_000, ms / 60_000 % 60);
    let (second, ms) = (ms / 1000 % 60, ms % 1000);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{ms:03}")
}

/// How long ago, roughly.
pub(super) fn ago(span: Duration) -> String {
    match span.as_secs() {
        secs @ ..120 => format!("{secs} s ago"),
        secs @ ..7200 => format!("{} min ago", secs / 60),
        secs => format!("{} h ago", secs / 3600),
    }
}

/// Year, month and day of the day number `days` since 1970, in the Gregorian calendar. Years are counted
/// from March, so that the leap day is a year's last.
fn civil(days: u64) -> (u64, u64, u64) {
    const ERA_DAYS: u64 = 146_097;
    let since_0000_03 = days + 719_468;
    let (era, day_of_era) = (since_0000_03 / ERA_DAYS, since_0000_03 % ERA_DAYS);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

/// A field as a number.
pub(super) fn number(value: &Value, field: &str) -> Option<f64> {
    value.get(field)?.as_f64()
}

/// A field as a whole number.
pub(super) fn whole(value: &Value, field: &str) -> Option<u64> {
    value.get(field)?.as_u64()
}

/// A field as text for a cell: what a terminal would obey is taken out.
pub(super) fn cell(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => UNKNOWN.to_owned(),
        Some(Value::String(text)) => plain(text),
        Some(other) => plain(&other.to_string()),
    }
}

/// A path segment whatever the user typed.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                out.push(char::from(byte));
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// A text without control characters.
pub(super) fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(amount(3.0), "3");
        assert_eq!(amount(3.26), "3.3");
        assert_eq!(span(3.21), "3.2 ms");
        assert_eq!(span(321.4), "321 ms");
        assert_eq!(span(12_345.0), "12.3 s");
        assert_eq!(
            (share(1.0, 4.0), share(0.0, 0.0)),
            ("25%".into(), "-".into())
        );
        assert_eq!(ago(Duration::from_secs(125)), "2 min ago");
    }

    #[test]
    fn days_are_those_of_the_calendar() {
        assert_eq!(moment(0), "1970-01-01 00:00:00.000");
        assert_eq!(moment(951_782_399_999), "2000-02-28 23:59:59.999");
        assert_eq!(moment(951_782_400_000), "2000-02-29 00:00:00.000");
        assert_eq!(moment(4_107_542_400_000), "2100-03-01 00:00:00.000");
        assert_eq!(moment(1_794_728_412_345), "2026-11-15 07:40:12.345");
    }

    #[test]
    fn a_cell_obeys_nobody() {
        assert_eq!(plain("a\x1b[2Jb\n"), "a[2Jb");
    }

    #[test]
    fn what_is_typed_is_one_path_segment() {
        assert_eq!(escaped("chatcmpl-1f.~_"), "chatcmpl-1f.~_");
        assert_eq!(escaped("a/../b?c#\u{e9}"), "a%2F..%2Fb%3Fc%23%C3%A9");
    }
}
