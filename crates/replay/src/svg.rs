//! Line plots as SVG text: two axes, a few lines, nothing that needs a script.

use std::fmt::Write;

/// Space for the axes around the plot, in pixels: left, right, top, bottom.
const MARGIN: [f64; 4] = [58.0, 14.0, 12.0, 44.0];
/// Ticks that an axis aims for.
const TICKS: f64 = 5.0;

/// How an axis is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    /// Evenly.
    Linear,
    /// By powers of ten; values of 0 or less are put at its start.
    Log,
}

/// One axis.
#[derive(Clone, Debug)]
pub(crate) struct Axis {
    pub(crate) label: &'static str,
    pub(crate) scale: Scale,
    pub(crate) from: f64,
    pub(crate) to: f64,
}

impl Axis {
    /// An even axis from 0 to a little past the largest of `values`.
    pub(crate) fn from_zero(label: &'static str, values: impl Iterator<Item = f64>) -> Self {
        let largest = values.filter(|v| v.is_finite()).fold(0.0, f64::max);
        let to = if largest > 0.0 { largest * 1.05 } else { 1.0 };
        Self {
            label,
            scale: Scale::Linear,
            from: 0.0,
            to,
        }
    }

    /// An axis by powers of ten that holds all positive `values`.
    pub(crate) fn log(label: &'static str, values: impl Iterator<Item = f64>) -> Self {
        let (mut least, mut largest) = (f64::INFINITY, 0.0f64);
        for value in values.filter(|v| v.is_finite() && *v > 0.0) {
            (least, largest) = (least.min(value), largest.max(value));
        }
        if largest <= 0.0 {
            (least, largest) = (1.0, 10.0);
        }
        let to = if largest > least {
            largest * 1.05
        } else {
            least * 10.0
        };
        Self {
            label,
            scale: Scale::Log,
            from: least * 0.95,
            to,
        }
    }

    /// Where a value lies, 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => (value - self.from) / (self.to - self.from),
            Scale::Log => {
                let value = value.max(self.from);
                (value / self.from).log10() / (self.to / self.from).log10()
            }
        };
        share.clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => linear_ticks(self.from, self.to),
            Scale::Log => log_ticks(self.from, self.to),
        }
    }
}

fn linear_ticks(from: f64, to: f64) -> Vec<f64> {
    let raw = (to - from) / TICKS;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|n| n * power)
        .find(|step| *step >= raw);
    let step = step.unwrap_or(power);
    let first = (from / step).ceil() as i64;
    let last = (to / step).floor() as i64;
    (first..=last).map(|n| n as f64 * step).collect()
}

fn log_ticks(from: f64, to: f64) -> Vec<f64> {
    let decades = (to / from).log10();
    let parts: &[f64] = if decades > 3.0 {
        &[1.0]
    } else {
        &[1.0, 2.0, 5.0]
    };
    let first = from.log10().floor() as i32;
    let last = to.log10().ceil() as i32;
    let all = (first..=last).flat_map(|power| parts.iter().map(move |n| n * 10f64.powi(power)));
    all.filter(|tick| (from..=to).contains(tick)).collect()
}

/// One line of a plot.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) color: &'static str,
    pub(crate) dash: &'static str,
    pub(crate) width: f64,
    /// Whether each point is marked.
    pub(crate) marks: bool,
    pub(crate) points: Vec<(f64, f64)>,
}

/// A plot.
#[derive(Clone, Debug)]
pub(crate) struct Plot {
    /// What it shows, for readers who cannot see it.
    pub(crate) description: String,
    pub(crate) size: (f64, f64),
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) lines: Vec<Line>,
}

impl Plot {
    pub(crate) fn render(&self) -> String {
        let (width, height) = self.size;
        let mut svg = format!(
            "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">\n",
            escape(&self.description)
        );
        self.axes(&mut svg);
        for line in &self.lines {
            self.line(line, &mut svg);
        }
        svg + "</svg>\n"
    }

    fn x(&self, value: f64) -> f64 {
        MARGIN[0] + self.x.place(value) * (self.size.0 - MARGIN[0] - MARGIN[1])
    }

    fn y(&self, value: f64) -> f64 {
        let height = self.size.1 - MARGIN[2] - MARGIN[3];
        MARGIN[2] + (1.0 - self.y.place(value)) * height
    }

    fn axes(&self, svg: &mut String) {
        let (left, right) = (MARGIN[0], self.size.0 - MARGIN[1]);
        let (top, bottom) = (MARGIN[2], self.size.1 - MARGIN[3]);
        for tick in self.y.ticks() {
            let at = self.y(tick);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{left}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                left - 6.0,
                at + 4.0,
                short(tick)
            );
        }
        for tick in self.x.ticks() {
            let at = self.x(tick);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{top}\" y2=\"{bottom}\"/>\
                 <text class=\"tick\" x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                bottom + 16.0,
                short(tick)
            );
        }
        let (middle, centre) = ((left + right) / 2.0, (top + bottom) / 2.0);
        let _ = writeln!(
            svg,
            "<text class=\"label\" x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text class=\"label\" transform=\"translate(14 {centre:.1}) rotate(-90)\" \
             text-anchor=\"middle\">{}</text>",
            self.size.1 - 8.0,
            escape(self.x.label),
            escape(self.y.label)
        );
    }

    fn line(&self, line: &Line, svg: &mut String) {
        let mut path = String::new();
        let mut last = (f64::NAN, f64::NAN);
        let points = || {
            line.points
                .iter()
                .filter(|(x, y)| x.is_finite() && y.is_finite())
        };
        for (x, y) in points() {
            let at = (self.x(*x), self.y(*y));
            if (at.0 - last.0).abs() < 0.05 && (at.1 - last.1).abs() < 0.05 {
                continue;
            }
            let pen = if path.is_empty() { 'M' } else { 'L' };
            let _ = write!(path, "{pen}{:.1} {:.1}", at.0, at.1);
            last = at;
        }
        let _ = writeln!(
            svg,
            "<path class=\"line\" d=\"{path}\" stroke=\"{}\" stroke-width=\"{}\" \
             stroke-dasharray=\"{}\"><title>{}</title></path>",
            line.color,
            line.width,
            line.dash,
            escape(&line.name)
        );
        for (x, y) in points().filter(|_| line.marks) {
            let _ = writeln!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\" fill=\"{}\"><title>{}: {}, {}</title></circle>",
                self.x(*x),
                self.y(*y),
                line.color,
                escape(&line.name),
                short(*x),
                short(*y)
            );
        }
    }
}

/// A number in few characters.
pub(crate) fn short(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if size == 0.0 => "0".to_owned(),
        s if s >= 1e6 => trim(format!("{:.1}", value / 1e6)) + "M",
        s if s >= 1e4 => trim(format!("{:.0}", value / 1e3)) + "k",
        s if s >= 100.0 => format!("{value:.0}"),
        s if s >= 1.0 => trim(format!("{value:.1}")),
        _ => trim(format!("{value:.3}")),
    }
}

fn trim(text: String) -> String {
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Text that cannot become markup.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(linear_ticks(0.0, 10.5), [0.0, 5.0, 10.0]);
        assert_eq!(linear_ticks(0.0, 1.05), [0.0, 0.5, 1.0]);
        assert_eq!(log_ticks(90.0, 1100.0), [100.0, 200.0, 500.0, 1000.0]);
        assert_eq!(log_ticks(0.9, 2e4), [1.0, 10.0, 100.0, 1000.0, 10_000.0]);
    }

    #[test]
    fn numbers_are_short() {
        let shown = [0.0, 0.05, 0.5, 1.0, 2.5, 99.0, 512.0, 20_000.0, 1.5e6].map(short);
        assert_eq!(
            shown,
            ["0", "0.05", "0.5", "1", "2.5", "99", "512", "20k", "1.5M"]
        );
    }

    #[test]
    fn names_cannot_become_markup() {
        let line = Line {
            name: "<script>\"'&\n".to_owned(),
            color: "#000",
            dash: "",
            width: 1.0,
            marks: true,
            points: vec![(0.0, 1.0), (1.0, f64::NAN)],
        };
        let plot = Plot {
            description: "<b>".to_owned(),
            size: (100.0, 100.0),
            x: Axis::from_zero("x", [].into_iter()),
            y: Axis::log("y", [].into_iter()),
            lines: vec![line],
        };
        let svg = plot.render();
        assert!(
            !svg.contains("<script") && !svg.contains("<b>") && !svg.contains("NaN"),
            "{svg}"
        );
    }
}
