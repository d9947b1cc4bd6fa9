//! One row: a default and the values that are allowed.

/// Seconds beyond which a duration is surely a mistake: a thousand years.
pub const SECONDS_MAX: f64 = 31_536_000_000.0;

/// Which values a setting may have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Range {
    /// Every value of its type.
    Type,
    /// A whole number in `min..=max`.
    Whole {
        /// Least allowed.
        min: u64,
        /// Greatest allowed.
        max: u64,
    },
    /// A finite number in `min..=max`.
    Number {
        /// Least allowed.
        min: f64,
        /// Greatest allowed; infinity when there is no bound.
        max: f64,
        /// Whether `min` itself is refused.
        above_min: bool,
    },
}

impl Range {
    /// Whether a number is in the range. Every number is in the range of another type.
    ///
    /// ```
    /// use kvasir_options::router;
    /// let share = router::ROUTER_KV_OVERLAP_SCORE_CREDIT.range;
    /// assert!(share.allows(1.0) && !share.allows(1.5) && !share.allows(f64::NAN));
    /// ```
    #[must_use]
    pub fn allows(&self, value: f64) -> bool {
        match *self {
            Self::Number {
                min,
                max,
                above_min,
            } => {
                let inside = value >= min && value <= max;
                value.is_finite() && inside && !(above_min && value == min)
            }
            Self::Type | Self::Whole { .. } => true,
        }
    }
}

/// A setting: its default and its range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row<T> {
    /// The default.
    pub default: T,
    /// The default as one would type it; `None` is unset.
    pub text: Option<&'static str>,
    /// Which values are allowed.
    pub range: Range,
}

impl<T> Row<T> {
    pub(crate) const fn new(default: T, text: &'static str) -> Self {
        Self {
            default,
            text: Some(text),
            range: Range::Type,
        }
    }

    /// Narrows a whole number to `min..=max`.
    pub(crate) const fn whole(mut self, min: u64, max: u64) -> Self {
        self.range = Range::Whole { min, max };
        self
    }

    /// Narrows a number to `min..=max`.
    pub(crate) const fn between(mut self, min: f64, max: f64) -> Self {
        self.range = Range::Number {
            min,
            max,
            above_min: false,
        };
        self
    }

    /// A number that is not negative.
    pub(crate) const fn not_negative(self) -> Self {
        self.between(0.0, f64::INFINITY)
    }

    /// Narrows a number to above zero.
    pub(crate) const fn positive(mut self) -> Self {
        self.range = Range::Number {
            min: 0.0,
            max: f64::INFINITY,
            above_min: true,
        };
        self
    }

    /// A duration in seconds.
    pub(crate) const fn seconds(self) -> Self {
        self.between(0.0, SECONDS_MAX)
    }
}

impl<T> Row<Option<T>> {
    pub(crate) const fn unset() -> Self {
        Self {
            default: None,
            text: None,
            range: Range::Type,
        }
    }
}

/// A row from one literal: value and text cannot differ.
macro_rules! row {
    (None) => {
        $crate::row::Row::unset()
    };
    (Some($default:literal)) => {
        $crate::row::Row::new(Some($default), stringify!($default))
    };
    ($default:literal) => {
        $crate::row::Row::new($default, stringify!($default))
    };
    ($default:literal as f64) => {
        $crate::row::Row::new($default as f64, stringify!($default))
    };
    ($choice:ident::$variant:ident) => {
        $crate::row::Row::new($choice::$variant, $choice::$variant.name())
    };
}
pub(crate) use row;

#[cfg(test)]
mod tests {
    use super::*;

    /// At and beyond both ends, and what is no number.
    #[test]
    fn a_range_takes_its_ends_and_nothing_beyond() {
        let share: Row<f64> = row!(0.5).between(0.0, 1.0);
        for (value, allowed) in [
            (0.0, true),
            (1.0, true),
            (-1e-9, false),
            (1.0 + 1e-9, false),
            (f64::NAN, false),
        ] {
            assert_eq!(share.range.allows(value), allowed, "{value}");
        }
        let positive: Row<Option<f64>> = row!(None).positive();
        assert!(positive.range.allows(f64::MIN_POSITIVE) && positive.range.allows(f64::MAX));
        assert!(!positive.range.allows(0.0) && !positive.range.allows(f64::INFINITY));
    }

    #[test]
    fn value_and_text_of_a_default_come_from_one_literal() {
        let row: Row<Option<f64>> = row!(Some(16.0));
        assert_eq!((row.default, row.text), (Some(16.0), Some("16.0")));
        let row: Row<Option<u64>> = row!(None);
        assert_eq!((row.default, row.text), (None, None));
        let row: Row<bool> = row!(true);
        assert_eq!((row.default, row.text), (true, Some("true")));
    }
}
