//! From text to a value, and back.
//!
//! Answers: is this text a value of that kind, and which one? Flags, variables, file and policy
//! strings all come through [`parse`], so a bad value gets the same message wherever it stood.
//!
//! Invariants: no NaN, no infinity, nothing out of its range becomes a [`Value`].
//!
//! Elsewhere: which kind an option has (`table`), who set it (`settings`).

use std::path::PathBuf;
use std::time::Duration;

pub use kvasir_options::Choice;
use kvasir_options::SECONDS_MAX;

/// A checked value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Nothing was given and there is no default, or `none` was given.
    Unset,
    /// A switch.
    Bool(bool),
    /// A whole number.
    Int(u64),
    /// A finite number.
    Float(f64),
    /// A text or path.
    Text(String),
    /// One of the names of a choice, in its canonical spelling.
    Choice(&'static str),
    /// Values of a repeatable option, in the order given.
    List(Vec<String>),
}

/// What a text must look like.
#[derive(Debug)]
pub struct TextRule {
    /// Completes "give …" in messages.
    pub expects: &'static str,
    /// Name of the value in help.
    pub metavar: &'static str,
    /// Whether the text is of that form.
    pub accepts: fn(&str) -> bool,
}

/// The kinds of single values.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// Yes or no.
    Bool,
    /// A whole number in `min..=max`.
    Int {
        /// Least allowed.
        min: u64,
        /// Greatest allowed.
        max: u64,
    },
    /// A finite number in `min..=max`.
    Float {
        /// Least allowed.
        min: f64,
        /// Greatest allowed; infinity when there is no bound.
        max: f64,
        /// Whether `min` itself is refused.
        above_min: bool,
    },
    /// A size: bytes, or with a unit such as `GiB`.
    Bytes,
    /// A text of some form.
    Text(&'static TextRule),
    /// A path on this machine.
    Path,
    /// One of several names.
    Choice(&'static [Choice]),
}

impl Kind {
    pub(crate) const fn metavar(&self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::Int { .. } => "N",
            Self::Float { .. } => "X",
            Self::Bytes => "SIZE",
            Self::Text(rule) => rule.metavar,
            Self::Path => "PATH",
            Self::Choice(_) => "NAME",
        }
    }

    /// Completes the sentence "give …".
    pub fn expects(&self) -> String {
        match *self {
            Self::Bool => "true or false (also 1/0, yes/no, on/off)".into(),
            Self::Int { min, max: u64::MAX } => format!("a whole number, at least {min}"),
            Self::Int { min, max } => format!("a whole number from {min} to {max}"),
            Self::Float {
                min,
                max,
                above_min,
            } => expects_number(min, max, above_min),
            Self::Bytes => "a size such as 1073741824 or 1GiB".into(),
            Self::Text(rule) => rule.expects.into(),
            Self::Path => "a path".into(),
            Self::Choice(choices) => {
                let names: Vec<_> = choices.iter().map(|choice| choice.name).collect();
                format!("one of {}", names.join(", "))
            }
        }
    }

    /// The allowed values in the few characters of a table cell.
    pub fn brief(&self) -> String {
        match *self {
            Self::Bool => "true, false".into(),
            Self::Int {
                min: 0,
                max: u64::MAX,
            } => "whole number".into(),
            Self::Int { min, max: u64::MAX } => format!("whole number ≥ {min}"),
            Self::Int { min, max } => format!("{min}..{max}"),
            Self::Float {
                min,
                max,
                above_min,
            } => match (min.is_finite(), max.is_finite()) {
                (true, true) if max < SECONDS_MAX => format!("{min}..{max}"),
                (true, _) => format!("number {} {min}", if above_min { ">" } else { "≥" }),
                (false, _) => "number".into(),
            },
            Self::Bytes => "size".into(),
            Self::Text(_) => "text".into(),
            Self::Path => "path".into(),
            Self::Choice(choices) => {
                let names: Vec<_> = choices.iter().map(|choice| choice.name).collect();
                names.join(", ")
            }
        }
    }
}

fn expects_number(min: f64, max: f64, above_min: bool) -> String {
    match (min.is_finite(), max.is_finite(), above_min) {
        (true, true, true) => format!("a number above {min}, at most {max}"),
        (true, true, false) => format!("a number from {min} to {max}"),
        (true, false, true) => format!("a finite number above {min}"),
        (true, false, false) => format!("a finite number, at least {min}"),
        (false, ..) => "a finite number".into(),
    }
}

/// Reads one value of `kind`; `None` when the text is not one.
///
/// ```
/// use kvasir_config::{Kind, Value, parse_value};
/// let share = Kind::Float { min: 0.0, max: 1.0, above_min: false };
/// assert_eq!(parse_value(&share, "0.5"), Some(Value::Float(0.5)));
/// assert_eq!(parse_value(&share, "NaN"), None);
/// ```
pub fn parse(kind: &Kind, text: &str) -> Option<Value> {
    let trimmed = text.trim();
    match *kind {
        Kind::Bool => parse_bool(trimmed).map(Value::Bool),
        Kind::Int { min, max } => {
            let number = trimmed.parse::<u64>().ok()?;
            (min..=max).contains(&number).then_some(Value::Int(number))
        }
        Kind::Float {
            min,
            max,
            above_min,
        } => {
            let number = trimmed.parse::<f64>().ok()?;
            let inside = number >= min && number <= max && !(above_min && number == min);
            // Adding zero turns -0 into 0, so that it prints and divides as people expect.
            (number.is_finite() && inside).then_some(Value::Float(number + 0.0))
        }
        Kind::Bytes => parse_bytes(trimmed).map(Value::Int),
        Kind::Text(rule) => {
            (!trimmed.is_empty() && (rule.accepts)(text)).then(|| Value::Text(text.into()))
        }
        Kind::Path => (!text.is_empty() && !text.contains('\0')).then(|| Value::Text(text.into())),
        Kind::Choice(choices) => {
            let spelled = trimmed.to_ascii_lowercase().replace('_', "-");
            let found = choices
                .iter()
                .find(|choice| choice.name.replace('_', "-") == spelled)?;
            Some(Value::Choice(found.name))
        }
    }
}

fn parse_bool(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Some(true),
        "" | "0" | "false" | "no" | "off" => Some(false),
        _ => None,
    }
}

/// Units of sizes; a longer suffix comes before a shorter one.
const UNITS: &[(&str, u64)] = &[
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
];

fn parse_bytes(text: &str) -> Option<u64> {
    let unit = UNITS.iter().find(|(suffix, _)| text.ends_with(suffix));
    let (digits, factor) = match unit {
        Some((suffix, factor)) => (text.strip_suffix(suffix)?.trim_end(), *factor),
        None => (text, 1),
    };
    digits.parse::<u64>().ok()?.checked_mul(factor)
}

impl Value {
    /// The value as one would type it; `none` when unset.
    pub fn text(&self) -> String {
        match self {
            Self::Unset => "none".into(),
            Self::Bool(yes) => yes.to_string(),
            Self::Int(number) => number.to_string(),
            // Debug keeps the point, so that a whole number of seconds still reads as a number.
            Self::Float(number) => format!("{number:?}"),
            Self::Text(text) => text.clone(),
            Self::Choice(name) => (*name).into(),
            Self::List(items) if items.is_empty() => "none".into(),
            Self::List(items) => items.join(" "),
        }
    }
}

/// Types in which a setting can be read.
pub trait SettingType: Sized {
    /// Kind of the option, before a row narrows its range.
    const KIND: Kind;
    /// Whether the option can be unset.
    const NULLABLE: bool = false;
    /// Whether the option is repeatable.
    const REPEATED: bool = false;
    /// The value in this type; `None` only for a value of another kind.
    fn read(value: &Value) -> Option<Self>;
}

impl SettingType for bool {
    const KIND: Kind = Kind::Bool;
    fn read(value: &Value) -> Option<Self> {
        if let Value::Bool(yes) = value {
            Some(*yes)
        } else {
            None
        }
    }
}

macro_rules! typed_int {
    ($($int:ty),+) => {$(
        impl SettingType for $int {
            const KIND: Kind = Kind::Int { min: 0, max: <$int>::MAX as u64 };
            fn read(value: &Value) -> Option<Self> {
                if let Value::Int(number) = value { Self::try_from(*number).ok() } else { None }
            }
        }
    )+};
}
typed_int!(u16, u32, u64, usize);

impl SettingType for f64 {
    const KIND: Kind = Kind::Float {
        min: 0.0,
        max: f64::INFINITY,
        above_min: false,
    };
    fn read(value: &Value) -> Option<Self> {
        if let Value::Float(number) = value {
            Some(*number)
        } else {
            None
        }
    }
}

/// A span in seconds, fractions allowed.
impl SettingType for Duration {
    const KIND: Kind = Kind::Float {
        min: 0.0,
        max: SECONDS_MAX,
        above_min: false,
    };
    fn read(value: &Value) -> Option<Self> {
        let Value::Float(seconds) = value else {
            return None;
        };
        Self::try_from_secs_f64(*seconds).ok()
    }
}

/// A size in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl SettingType for Bytes {
    const KIND: Kind = Kind::Bytes;
    fn read(value: &Value) -> Option<Self> {
        if let Value::Int(bytes) = value {
            Some(Self(*bytes))
        } else {
            None
        }
    }
}

/// Any text that is not blank.
pub(crate) const ANY_TEXT: TextRule = TextRule {
    expects: "a text that is not empty",
    metavar: "TEXT",
    accepts: |_| true,
};

impl SettingType for String {
    const KIND: Kind = Kind::Text(&ANY_TEXT);
    fn read(value: &Value) -> Option<Self> {
        if let Value::Text(text) = value {
            Some(text.clone())
        } else {
            None
        }
    }
}

impl SettingType for PathBuf {
    const KIND: Kind = Kind::Path;
    fn read(value: &Value) -> Option<Self> {
        if let Value::Text(text) = value {
            Some(text.into())
        } else {
            None
        }
    }
}

impl SettingType for Vec<String> {
    const KIND: Kind = Kind::Text(&ANY_TEXT);
    const REPEATED: bool = true;
    fn read(value: &Value) -> Option<Self> {
        match value {
            Value::List(items) => Some(items.clone()),
            Value::Unset => Some(Vec::new()),
            _ => None,
        }
    }
}

impl<T: SettingType> SettingType for Option<T> {
    const KIND: Kind = T::KIND;
    const NULLABLE: bool = true;
    fn read(value: &Value) -> Option<Self> {
        match value {
            Value::Unset => Some(None),
            other => T::read(other).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_units_and_refuse_overflow() {
        let size = |text| parse(&Kind::Bytes, text);
        assert_eq!(size("4096"), Some(Value::Int(4096)));
        assert_eq!(size("4GiB"), Some(Value::Int(4 << 30)));
        assert_eq!(size("2 MB"), Some(Value::Int(2_000_000)));
        assert_eq!(size("7B"), Some(Value::Int(7)));
        for bad in ["", "GiB", "-1", "1.5GiB", "99999999999TiB", "4gib"] {
            assert_eq!(size(bad), None, "{bad}");
        }
    }

    #[test]
    fn numbers_are_finite_and_negative_zero_is_zero() {
        let any = Kind::Float {
            min: 0.0,
            max: f64::INFINITY,
            above_min: false,
        };
        for bad in [
            "NaN", "nan", "inf", "-inf", "infinity", "1e999", "", "1,5", "0x10",
        ] {
            assert_eq!(parse(&any, bad), None, "{bad}");
        }
        let Some(Value::Float(zero)) = parse(&any, "-0") else {
            panic!("-0 is zero")
        };
        assert!(zero.is_sign_positive());
    }

    #[test]
    fn an_exclusive_bound_refuses_itself_only() {
        let above = Kind::Float {
            min: 0.0,
            max: f64::INFINITY,
            above_min: true,
        };
        assert_eq!(parse(&above, "0"), None);
        assert_eq!(parse(&above, "5e-324"), Some(Value::Float(5e-324)));
    }

    #[test]
    fn switches_know_the_eight_words_and_the_empty_one() {
        for (text, yes) in [
            ("1", true),
            (" TRUE ", true),
            ("Yes", true),
            ("on", true),
            ("", false),
            ("0", false),
        ] {
            assert_eq!(parse(&Kind::Bool, text), Some(Value::Bool(yes)), "{text}");
        }
        for bad in ["2", "y", "enabled", "truee"] {
            assert_eq!(parse(&Kind::Bool, bad), None, "{bad}");
        }
    }
}
