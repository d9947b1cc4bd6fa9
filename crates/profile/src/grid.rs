//! A measured surface over two integer axes, read by interpolation.
//!
//! Rows may have different columns (large batches of long contexts do not fit the memory, so nobody
//! measured them). Inside the measurements a reading is bilinear; outside, the nearest two columns or
//! rows are continued in a straight line, and never below the nearest measurement.

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// The row: new tokens, or sequences in the batch.
    pub row: u32,
    /// The column: tokens of context.
    pub context: u32,
    /// Milliseconds.
    pub ms: f64,
}

impl Point {
    /// A measurement of `ms` milliseconds.
    #[must_use]
    pub const fn new(row: u32, context: u32, ms: f64) -> Self {
        Self { row, context, ms }
    }
}

/// Why measurements are invalid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GridError {
    /// There are none.
    #[error("a profile needs at least one measurement of each kind")]
    Empty,
    /// A time is negative, infinite or not a number.
    #[error("the time measured at ({row}, {context}) is {ms}; it must be a number of milliseconds")]
    BadTime {
        /// The row of the measurement.
        row: u32,
        /// Its column.
        context: u32,
        /// The measured time.
        ms: f64,
    },
    /// Two measurements of one point.
    #[error("({row}, {context}) is measured twice")]
    Twice {
        /// The row of the measurement.
        row: u32,
        /// Its column.
        context: u32,
    },
}

#[derive(Clone, Debug)]
struct Row {
    at: f64,
    columns: Vec<(f64, f64)>,
}

/// A surface of milliseconds.
#[derive(Clone, Debug)]
pub(crate) struct Grid {
    rows: Vec<Row>,
}

impl Grid {
    pub(crate) fn new(points: &[Point]) -> Result<Self, GridError> {
        let mut sorted = points.to_vec();
        sorted.sort_by_key(|p| (p.row, p.context));
        let mut rows: Vec<Row> = Vec::new();
        for &Point { row, context, ms } in &sorted {
            if !ms.is_finite() || ms < 0.0 {
                return Err(GridError::BadTime { row, context, ms });
            }
            let (at, column) = (f64::from(row), (f64::from(context), ms));
            match rows.last_mut().filter(|r| r.at == at) {
                Some(r) if r.columns.last().is_some_and(|c| c.0 == column.0) => {
                    return Err(GridError::Twice { row, context });
                }
                Some(r) => r.columns.push(column),
                None => rows.push(Row {
                    at,
                    columns: vec![column],
                }),
            }
        }
        if rows.is_empty() {
            return Err(GridError::Empty);
        }
        Ok(Self { rows })
    }

    /// The first row.
    pub(crate) fn first_row(&self) -> f64 {
        self.rows.first().map_or(0.0, |r| r.at)
    }

    /// The smallest measured time.
    pub(crate) fn min_ms(&self) -> f64 {
        let all = self.rows.iter().flat_map(|r| r.columns.iter().map(|c| c.1));
        all.fold(f64::INFINITY, f64::min)
    }

    /// The surface at (`row`, `context`).
    pub(crate) fn at(&self, row: f64, context: f64) -> f64 {
        let (low, high) = bracket(&self.rows, row, |r| r.at);
        match (low, high) {
            (Some(a), Some(b)) => line(row, (a.at, a.at(context)), (b.at, b.at(context))),
            (Some(only), None) | (None, Some(only)) => only.at(context),
            (None, None) => 0.0,
        }
    }
}

impl Row {
    fn at(&self, context: f64) -> f64 {
        let (low, high) = bracket(&self.columns, context, |c| c.0);
        match (low, high) {
            (Some(&a), Some(&b)) => line(context, a, b),
            (Some(only), None) | (None, Some(only)) => only.1,
            (None, None) => 0.0,
        }
    }
}

/// The two neighbours of `x`; past an end, the two nearest to that end; of one item, that item.
fn bracket<T>(items: &[T], x: f64, key: impl Fn(&T) -> f64) -> (Option<&T>, Option<&T>) {
    if items.len() < 2 {
        return (items.first(), None);
    }
    let after = items.partition_point(|item| key(item) <= x);
    let high = after.clamp(1, items.len() - 1);
    (items.get(high - 1), items.get(high))
}

/// The straight line through two points, read at `x`; before the first point it stays flat, after the
/// second it never falls.
fn line(x: f64, (x0, y0): (f64, f64), (x1, y1): (f64, f64)) -> f64 {
    if x <= x0 {
        return y0;
    }
    let slope = (y1 - y0) / (x1 - x0);
    if x > x1 {
        return y1 + slope.max(0.0) * (x - x1);
    }
    y0 + slope * (x - x0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid() -> Grid {
        Grid::new(&[
            Point::new(1, 0, 2.0),
            Point::new(1, 10, 4.0),
            Point::new(3, 0, 6.0),
            Point::new(3, 10, 8.0),
            Point::new(5, 0, 10.0),
        ])
        .unwrap()
    }

    #[test]
    fn measurements_come_back_and_lie_on_lines_between() {
        let grid = grid();
        assert_eq!(grid.at(1.0, 10.0), 4.0);
        assert_eq!(grid.at(2.0, 5.0), 5.0);
        assert_eq!(grid.at(5.0, 0.0), 10.0);
    }

    /// Flat before the first measurement, straight on after the last; a row with one column is flat.
    #[test]
    fn outside_the_measurements_lines_go_on() {
        let grid = grid();
        assert_eq!(grid.at(0.0, 0.0), 2.0);
        assert_eq!(grid.at(1.0, 20.0), 6.0);
        assert_eq!(grid.at(7.0, 0.0), 14.0);
        assert_eq!(grid.at(5.0, 50.0), 10.0);
        let falling = Grid::new(&[Point::new(1, 0, 5.0), Point::new(1, 1, 4.0)]).unwrap();
        assert_eq!(falling.at(1.0, 100.0), 4.0);
    }

    #[test]
    fn bad_measurements_are_refused() {
        assert_eq!(Grid::new(&[]).unwrap_err(), GridError::Empty);
        let twice = [Point::new(1, 0, 2.0), Point::new(1, 0, 3.0)];
        assert!(matches!(
            Grid::new(&twice),
            Err(GridError::Twice { row: 1, context: 0 })
        ));
        for ms in [f64::NAN, -1.0, f64::INFINITY] {
            assert!(matches!(
                Grid::new(&[Point::new(1, 0, ms)]),
                Err(GridError::BadTime { .. })
            ));
        }
    }
}
