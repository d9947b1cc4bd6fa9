//! Columns that line up, and fit the terminal: what matters least is left out first.

use super::text;

/// Spaces between two columns.
const GAP: usize = 2;

/// Where the cells of a column stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Align {
    Left,
    Right,
}

/// One column.
#[derive(Clone, Debug)]
struct Column {
    title: &'static str,
    align: Align,
    /// Columns of a higher rank are left out first; 0 never is.
    rank: u8,
    cells: Vec<String>,
}

/// A table, column by column.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    columns: Vec<Column>,
}

impl Table {
    /// Adds a column to the right. `rank` 0 always stays; the others go when room is short, the highest first.
    pub(super) fn column(
        &mut self,
        title: &'static str,
        align: Align,
        rank: u8,
        cells: impl IntoIterator<Item = String>,
    ) {
        self.columns.push(Column {
            title,
            align,
            rank,
            cells: cells.into_iter().map(|cell| text::plain(&cell)).collect(),
        });
    }

    /// The lines, no wider than `width` characters.
    pub(super) fn lines(mut self, width: usize) -> Vec<String> {
        while self.width() > width {
            let least = self.columns.iter().enumerate().max_by_key(|(_, c)| c.rank);
            match least {
                Some((at, column)) if column.rank > 0 => self.columns.remove(at),
                _ => break,
            };
        }
        let rows = self
            .columns
            .iter()
            .map(|c| c.cells.len())
            .max()
            .unwrap_or(0);
        let title = self.line(|column| column.title);
        let row = |at: usize| self.line(|column| column.cells.get(at).map_or("", String::as_str));
        std::iter::once(title)
            .chain((0..rows).map(row))
            .map(|line| cut(&line, width))
            .collect()
    }

    fn width(&self) -> usize {
        let gaps = self.columns.len().saturating_sub(1) * GAP;
        gaps + self.columns.iter().map(Column::width).sum::<usize>()
    }

    fn line<'t>(&'t self, cell: impl Fn(&'t Column) -> &'t str) -> String {
        let mut out = String::new();
        for (at, column) in self.columns.iter().enumerate() {
            if at > 0 {
                out.extend(std::iter::repeat_n(' ', GAP));
            }
            let (cell, width) = (cell(column), column.width());
            match column.align {
                Align::Left => out.push_str(&format!("{cell:<width$}")),
                Align::Right => out.push_str(&format!("{cell:>width$}")),
            }
        }
        out.truncate(out.trim_end().len());
        out
    }
}

impl Column {
    fn width(&self) -> usize {
        let cells = self.cells.iter().map(|cell| cell.chars().count());
        cells.max().unwrap_or(0).max(self.title.chars().count())
    }
}

/// A line cut to `width` characters.
pub(super) fn cut(line: &str, width: usize) -> String {
    line.chars().take(width).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::default();
        let cells = |cells: [&str; 2]| cells.map(str::to_owned);
        table.column("ID", Align::Left, 0, cells(["a", "long one"]));
        table.column("URL", Align::Left, 2, cells(["http://a", "http://b"]));
        table.column("LOAD", Align::Right, 1, cells(["1", "22"]));
        table
    }

    #[test]
    fn columns_line_up() {
        let expected = [
            "ID        URL       LOAD",
            "a         http://a     1",
            "long one  http://b    22",
        ];
        assert_eq!(table().lines(80), expected);
    }

    #[test]
    fn what_matters_least_goes_first_and_the_rest_is_cut() {
        assert_eq!(table().lines(23)[1], "a            1");
        assert_eq!(table().lines(13)[1..], ["a", "long one"]);
        assert_eq!(table().lines(4)[2], "long");
        assert_eq!(table().lines(0), ["", "", ""]);
    }
}
