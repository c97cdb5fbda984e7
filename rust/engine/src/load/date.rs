//! Dates as chat templates ask for them.

use std::time::{SystemTime, UNIX_EPOCH};

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
/// From the weekday of 1 January 1970 on.
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// The directives of `strftime` that templates use, in UTC. Others stay as they are written.
pub(super) fn strftime(format: &str, now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    let (days, seconds) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let month_name = MONTHS.get(month as usize - 1).copied().unwrap_or_default();
    let day_name = DAYS.get((days % 7) as usize).copied().unwrap_or_default();
    let short = |name: &str| name.chars().take(3).collect::<String>();
    let mut result = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            result.push(character);
            continue;
        }
        let piece = match characters.next() {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('B') => month_name.to_owned(),
            Some('b') => short(month_name),
            Some('A') => day_name.to_owned(),
            Some('a') => short(day_name),
            Some('H') => format!("{:02}", seconds / 3600),
            Some('M') => format!("{:02}", seconds / 60 % 60),
            Some('S') => format!("{:02}", seconds % 60),
            Some('%') | None => "%".to_owned(),
            Some(other) => format!("%{other}"),
        };
        result.push_str(&piece);
    }
    result
}

/// Year, month and day of a day since 1970, in the Gregorian calendar.
fn civil(days: u64) -> (u64, u64, u64) {
    // Years are counted from March, so that the leap day is the last of its year; 719468 days lead from the year 0.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_written_as_python_does() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(strftime("%d %b %Y", at(1_709_164_800)), "29 Feb 2024");
        let last_second = at(1_735_689_599);
        assert_eq!(strftime("%A %B %d, %y %H:%M:%S %% %q", last_second), "Tuesday December 31, 24 23:59:59 % %q");
        assert_eq!(strftime("%Y-%m-%d %a %", at(0)), "1970-01-01 Thu %");
    }
}
