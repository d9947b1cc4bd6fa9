//! A page of metrics, as far as the view needs it: sums of series by name and labels.

/// One line of the page.
#[derive(Debug)]
struct Series<'p> {
    name: &'p str,
    /// What stands between the braces.
    labels: &'p str,
    value: f64,
}

/// The page.
#[derive(Debug)]
pub(super) struct Page<'p> {
    series: Vec<Series<'p>>,
}

impl<'p> Page<'p> {
    /// Reads the text form of Prometheus; lines that are none are left out.
    pub(super) fn read(text: &'p str) -> Self {
        Self {
            series: text.lines().filter_map(read_line).collect(),
        }
    }

    /// The sum over all series whose name ends with `name` and that carry all of `labels`. Prefixes can be
    /// chosen (`--metrics-prefix`), so that only the end of a name is known.
    pub(super) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let fits = |series: &&Series<'_>| {
            series.name.ends_with(name)
                && labels.iter().all(|(label, value)| series.has(label, value))
        };
        self.series
            .iter()
            .filter(fits)
            .map(|series| series.value)
            .sum()
    }
}

impl Series<'_> {
    fn has(&self, label: &str, value: &str) -> bool {
        let wanted = format!("{label}=\"{value}\"");
        // A label's value that holds a comma is cut there; none of those that are asked for does.
        self.labels.split(',').any(|pair| pair == wanted)
    }
}

fn read_line(line: &str) -> Option<Series<'_>> {
    if line.starts_with('#') {
        return None;
    }
    let (head, value) = line.rsplit_once(' ')?;
    let (name, labels) = match head.split_once('{') {
        Some((name, labels)) => (name, labels.strip_suffix('}')?),
        None => (head, ""),
    };
    Some(Series {
        name,
        labels,
        value: value.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_summed_by_the_end_of_their_name() {
        let page = "# HELP x y\na_done_total{model=\"m, n\",status=\"success\"} 3\n\
                    b_done_total{status=\"error\"} 2\nplain 1.5\nbroken{ 1\nnot a number\n";
        let page = Page::read(page);
        assert_eq!(page.sum("_done_total", &[]), 5.0);
        assert_eq!(page.sum("_done_total", &[("status", "success")]), 3.0);
        assert_eq!(page.sum("plain", &[]), 1.5);
        assert_eq!(page.sum("absent", &[]), 0.0);
    }
}
