//! Dates in prompts.
//!
//! Answers one question: what does `strftime_now("%d %b %Y")` print at a given second? The second is passed in.

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

struct Moment {
    year: i64,
    month: i64,
    day: i64,
    day_of_year: i64,
    weekday: usize,
    second_of_day: i64,
}

/// The civil date of a Unix second, by the calendar's cycle of 400 years that begins in March.
fn moment(unix: i64) -> Moment {
    let days = unix.div_euclid(86_400);
    let from_march = days + 719_468;
    let era = from_march.div_euclid(146_097);
    let day_of_era = from_march.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_march_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_march_year + 2) / 153;
    let month = if march_month < 10 {
        march_month + 3
    } else {
        march_month - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let day_of_year = if month > 2 {
        day_of_march_year + 60 + i64::from(leap)
    } else {
        day_of_march_year - 305
    };
    Moment {
        year,
        month,
        day: day_of_march_year - (153 * march_month + 2) / 5 + 1,
        day_of_year,
        weekday: days.rem_euclid(7) as usize,
        second_of_day: unix.rem_euclid(86_400),
    }
}

/// Formats `unix` (seconds) with the directives that templates use; an unknown one stays as it is.
pub(crate) fn format(unix: i64, pattern: &str) -> String {
    let moment = moment(unix);
    let mut out = String::with_capacity(pattern.len() + 16);
    let mut chars = pattern.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('-') => {
                let field = chars.next().and_then(|d| directive(&moment, d));
                let field = field.unwrap_or_default();
                let bare = field.trim_start_matches(['0', ' ']);
                out.push_str(if bare.is_empty() { "0" } else { bare });
            }
            Some('%') => out.push('%'),
            Some(d) => match directive(&moment, d) {
                Some(field) => out.push_str(&field),
                None => out.extend(['%', d]),
            },
            None => out.push('%'),
        }
    }
    out
}

fn directive(m: &Moment, directive: char) -> Option<String> {
    let month = MONTHS
        .get(m.month as usize - 1)
        .copied()
        .unwrap_or_default();
    let day = DAYS.get(m.weekday).copied().unwrap_or_default();
    let (hour, minute, second) = (
        m.second_of_day / 3600,
        m.second_of_day / 60 % 60,
        m.second_of_day % 60,
    );
    Some(match directive {
        'Y' => m.year.to_string(),
        'y' => format!("{:02}", m.year.rem_euclid(100)),
        'm' => format!("{:02}", m.month),
        'd' => format!("{:02}", m.day),
        'e' => format!("{:2}", m.day),
        'j' => format!("{:03}", m.day_of_year),
        'B' => month.to_owned(),
        'b' | 'h' => month.get(..3)?.to_owned(),
        'A' => day.to_owned(),
        'a' => day.get(..3)?.to_owned(),
        'H' => format!("{hour:02}"),
        'I' => format!("{:02}", (hour + 11) % 12 + 1),
        'M' => format!("{minute:02}"),
        'S' => format!("{second:02}"),
        'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
        'F' => format!("{}-{:02}-{:02}", m.year, m.month, m.day),
        'T' => format!("{hour:02}:{minute:02}:{second:02}"),
        'Z' => "UTC".to_owned(),
        'z' => "+0000".to_owned(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::format;

    #[test]
    fn dates() {
        let all = "%Y-%m-%d %H:%M:%S %A %B %j %I%p %y %-d %b %e %%";
        assert_eq!(
            format(1_794_712_338, all),
            "2026-11-15 03:12:18 Sunday November 319 03AM 26 15 Nov 15 %"
        );
        assert_eq!(
            format(951_782_399, "%F %T %a %j"),
            "2000-02-28 23:59:59 Mon 059"
        );
        assert_eq!(format(951_782_400, "%F %a %j"), "2000-02-29 Tue 060");
        assert_eq!(format(978_220_800, "%F %j"), "2000-12-31 366");
        assert_eq!(format(1_709_251_200, "%d %b %Y, %j"), "01 Mar 2024, 061");
        assert_eq!(format(-1, "%F %T %A"), "1969-12-31 23:59:59 Wednesday");
        assert_eq!(format(0, "%Q %"), "%Q %");
    }
}
