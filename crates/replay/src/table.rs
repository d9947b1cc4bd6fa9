//! The table on the terminal.

use crate::compare::{Column, Comparison, LoadLevel, Row};

/// Space between columns.
const GAP: usize = 2;

/// The comparison as text, at most as wide as it must be: `*` marks the best of a column, the line below
/// a policy its ratio to the baseline.
#[must_use]
pub fn text_table(comparison: &Comparison) -> String {
    let mut text = format!("{}\n", comparison.subtitle);
    for level in &comparison.levels {
        text += &format!("\n{}\n", level.title);
        text += &level_text(level, comparison.baseline);
    }
    let baseline = comparison
        .levels
        .first()
        .and_then(|l| l.rows.get(comparison.baseline));
    if let Some(row) = baseline {
        text += &format!("\n* best of its column · ×: relative to {}\n", row.policy);
    }
    if !comparison.verdict.is_empty() {
        text += &format!("\n{}\n", comparison.verdict.join("\n"));
    }
    text
}

fn level_text(level: &LoadLevel, baseline: usize) -> String {
    let mut lines: Vec<Vec<String>> = Vec::new();
    for part in 0..2 {
        let headings = Column::ALL
            .iter()
            .map(|column| column.heading()[part].to_owned());
        lines.push(std::iter::once(String::new()).chain(headings).collect());
    }
    for (at, row) in level.rows.iter().enumerate() {
        lines.push(values(level, row));
        let base = level.rows.get(baseline).filter(|_| at != baseline);
        if let Some(base) = base.filter(|base| base.completed > 0 && row.completed > 0) {
            lines.push(ratios(row, base));
        }
    }
    let mut text = aligned(&lines);
    for row in level.rows.iter().filter(|row| row.lost > 0) {
        text += &format!(
            "  {}: {} requests were not completed\n",
            row.policy, row.lost
        );
    }
    text
}

fn values(level: &LoadLevel, row: &Row) -> Vec<String> {
    let cell = |(at, (column, value)): (usize, (&Column, &f64))| {
        if row.completed == 0 {
            return "-".to_owned();
        }
        let star = match level.is_best(row, at) {
            true => "*",
            false => "",
        };
        format!("{star}{}", column.show(*value))
    };
    let cells = Column::ALL.iter().zip(&row.values).enumerate().map(cell);
    std::iter::once(row.policy.clone()).chain(cells).collect()
}

fn ratios(row: &Row, base: &Row) -> Vec<String> {
    let cells = row
        .values
        .iter()
        .zip(&base.values)
        .map(|(value, base)| ratio(*value, *base));
    std::iter::once(String::new()).chain(cells).collect()
}

/// A ratio in few characters; nothing where there is none to tell.
pub(crate) fn ratio(value: f64, base: f64) -> String {
    let ratio = value / base;
    match ratio {
        _ if !ratio.is_finite() => String::new(),
        r if r >= 99.95 => format!("×{r:.0}"),
        r if r >= 9.995 => format!("×{r:.1}"),
        r => format!("×{r:.2}"),
    }
}

/// Columns of equal width, the first flush left.
fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |at: usize| {
        let cells = lines.iter().filter_map(|line| line.get(at));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let mut row = String::from("  ");
        for (at, (cell, width)) in line.iter().zip(&widths).enumerate() {
            let space = width.saturating_sub(cell.chars().count());
            match at {
                0 => row += &format!("{cell}{}", " ".repeat(space)),
                _ => row += &format!("{}{cell}", " ".repeat(space + GAP)),
            }
        }
        text += row.trim_end();
        text += "\n";
    }
    text
}
