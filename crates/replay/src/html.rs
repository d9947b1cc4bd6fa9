//! The report as one page: tables and plots in one file, without scripts and without a network.

use std::fmt::Write;

use kvasir_sim::RunReport;

use crate::compare::{Column, Comparison, LoadLevel, title};
use crate::svg::{Axis, Line, Plot, Scale, escape};
use crate::table::ratio;
use crate::{Plan, RunResult};

/// Colours and type, the same as the dashboard's.
const BASE: &str = include_str!("../../../dashboard/base.css");
/// What only this page has.
const STYLE: &str = include_str!("page.css");
/// Colours that people with any kind of sight tell apart; the dashes help where there are more policies,
/// and on paper.
const COLORS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b5b5b",
];
const DASHES: [&str; 3] = ["", "7 4", "2 3"];
/// Points of a load curve.
const LOAD_POINTS: usize = 160;
const WIDE: (f64, f64) = (560.0, 320.0);
const SMALL: (f64, f64) = (380.0, 200.0);

/// The page.
#[must_use]
pub fn html_report(plan: &Plan, comparison: &Comparison, finished: &[RunResult]) -> String {
    let mut body = format!(
        "<header><h1>Replay: {}</h1><p>{}</p>{}</header>\n",
        escape(plan.traces.first().map_or("", |trace| trace.name.as_str())),
        escape(&comparison.subtitle),
        legend(plan)
    );
    body += &verdict(comparison);
    for (at, level) in comparison.levels.iter().enumerate() {
        body += &section(plan, comparison, finished, at, level);
    }
    if plan.paces.len() > 1 {
        let plot = throughput_latency(plan, comparison).render();
        body += &format!(
            "<section><h2>Throughput against latency</h2>\n{}</section>\n",
            figure(
                "throughput-latency",
                "Each point is a level of load; lower and further right is better.",
                &plot
            )
        );
    }
    body += &definitions();
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>Replay: {}</title>\n<style>\n{BASE}{STYLE}</style></head>\n<body>\n{body}</body></html>\n",
        escape(plan.traces.first().map_or("", |trace| trace.name.as_str()))
    )
}

/// Which way to split engines is best, where that was asked.
fn verdict(comparison: &Comparison) -> String {
    if comparison.verdict.is_empty() {
        return String::new();
    }
    let lines: String = comparison
        .verdict
        .iter()
        .map(|line| format!("<li>{}</li>", escape(line)))
        .collect();
    format!("<section><h2>Who computes prompts</h2>\n<ul>{lines}</ul></section>\n")
}

fn look(policy: usize) -> (&'static str, &'static str) {
    (
        COLORS[policy % COLORS.len()],
        DASHES[policy / COLORS.len() % DASHES.len()],
    )
}

fn legend(plan: &Plan) -> String {
    let mut text = String::from("<ul class=\"legend\">");
    for (at, policy) in plan.policies.iter().enumerate() {
        let (color, dash) = look(at);
        let _ = write!(
            text,
            "<li><svg viewBox=\"0 0 28 10\" aria-hidden=\"true\"><path d=\"M0 5L28 5\" stroke=\"{color}\" \
             stroke-width=\"3\" stroke-dasharray=\"{dash}\"/></svg>{}</li>",
            escape(&policy.name)
        );
    }
    text + "</ul>"
}

fn section(
    plan: &Plan,
    comparison: &Comparison,
    finished: &[RunResult],
    pace: usize,
    level: &LoadLevel,
) -> String {
    let runs: Vec<(usize, &RunReport)> = finished
        .iter()
        .filter(|run| run.pace == pace && run.seed == 0)
        .map(|run| (run.policy, &run.report))
        .collect();
    let mut text = format!("<section><h2>{}</h2>\n", escape(&title(plan.paces[pace])));
    text += &html_table(level, comparison.baseline);
    text += "<div class=\"plots\">";
    text += &figure(
        &format!("ttft-cdf-{pace}"),
        "Share of requests whose first token came within the time.",
        &ttft_cdf(&runs, level).render(),
    );
    text += &figure(
        &format!("hits-{pace}"),
        "Share of prompt tokens found in the cache, over the run; dotted: unbounded cache.",
        &hits(&runs, plan, level).render(),
    );
    text += "</div>\n<h3>Requests in each engine over time</h3><div class=\"loads\">";
    let highest = runs
        .iter()
        .flat_map(|(_, run)| loads(run).into_iter().flatten());
    let top = highest.fold(1.0, |most, (_, load)| f64::max(most, load));
    for (policy, run) in &runs {
        let name = format!("loads-{pace}-{policy}");
        text += &figure(
            &name,
            &escape(&run.policy),
            &load_plot(run, top, *policy).render(),
        );
    }
    text + "</div></section>\n"
}

fn figure(id: &str, caption: &str, svg: &str) -> String {
    format!("<figure id=\"{id}\">{svg}<figcaption>{caption}</figcaption></figure>\n")
}

fn html_table(level: &LoadLevel, baseline: usize) -> String {
    let mut text = String::from("<table><thead><tr><th>policy</th>");
    for column in Column::ALL {
        let [first, second] = column.heading();
        let _ = write!(text, "<th>{first}<br>{second}</th>");
    }
    text += "</tr></thead><tbody>\n";
    for (at, row) in level.rows.iter().enumerate() {
        let _ = write!(text, "<tr><th>{}</th>", escape(&row.policy));
        for (column, value) in row.values.iter().enumerate() {
            let base = level.rows.get(baseline).filter(|_| at != baseline);
            let base = base.filter(|base| base.completed > 0);
            let base = base.and_then(|base| base.values.get(column));
            if row.completed == 0 {
                text += "<td>-</td>";
                continue;
            }
            let class = match level.is_best(row, column) {
                true => " class=\"best\"",
                false => "",
            };
            let shown = Column::ALL
                .get(column)
                .map_or_else(String::new, |c| c.show(*value));
            let ratio = base.map_or_else(String::new, |base| ratio(*value, *base));
            let _ = write!(text, "<td{class}>{shown}<small>{ratio}</small></td>");
        }
        text += "</tr>\n";
    }
    text + "</tbody></table>\n"
}

fn policy_line(policy: usize, name: &str, points: Vec<(f64, f64)>) -> Line {
    let (color, dash) = look(policy);
    Line {
        name: name.to_owned(),
        color,
        dash,
        width: 2.0,
        marks: false,
        points,
    }
}

fn ttft_cdf(runs: &[(usize, &RunReport)], level: &LoadLevel) -> Plot {
    let line = |(policy, run): &(usize, &RunReport)| {
        let last = run.ttft_cdf.len().saturating_sub(1).max(1) as f64;
        let points = run
            .ttft_cdf
            .iter()
            .enumerate()
            .map(|(at, ms)| (*ms, at as f64 / last));
        policy_line(*policy, &run.policy, points.collect())
    };
    Plot {
        description: format!("Distribution of time to first token, {}", level.title),
        size: WIDE,
        x: Axis::log(
            "time to first token, ms",
            runs.iter().flat_map(|(_, r)| r.ttft_cdf.iter().copied()),
        ),
        y: Axis {
            label: "share of requests",
            scale: Scale::Linear,
            from: 0.0,
            to: 1.0,
        },
        lines: runs.iter().map(line).collect(),
    }
}

fn hits(runs: &[(usize, &RunReport)], plan: &Plan, level: &LoadLevel) -> Plot {
    let longest = runs
        .iter()
        .map(|(_, run)| run.duration_s)
        .fold(0.0, f64::max);
    let line = |(policy, run): &(usize, &RunReport)| {
        let parts = run.hits.len().max(1) as f64;
        let middle = |at: usize| (at as f64 + 0.5) / parts * run.duration_s;
        let points = run
            .hits
            .iter()
            .enumerate()
            .filter_map(|(at, hits)| Some((middle(at), (*hits)?)));
        policy_line(*policy, &run.policy, points.collect())
    };
    let ideal = Line {
        name: "unbounded cache".to_owned(),
        color: "#888888",
        dash: "2 3",
        width: 1.5,
        marks: false,
        points: vec![(0.0, plan.ideal_hit_share), (longest, plan.ideal_hit_share)],
    };
    let shares = runs
        .iter()
        .flat_map(|(_, run)| run.hits.iter().flatten().copied());
    Plot {
        description: format!("Cache hit share over time, {}", level.title),
        size: WIDE,
        x: Axis::from_zero("virtual time, s", std::iter::once(longest)),
        y: Axis::from_zero("hit share", shares.chain([plan.ideal_hit_share])),
        lines: runs.iter().map(line).chain([ideal]).collect(),
    }
}

/// For each engine, its load over time in few points.
fn loads(run: &RunReport) -> Vec<Vec<(f64, f64)>> {
    let samples = &run.series.loads;
    let engines = samples.iter().map(Vec::len).max().unwrap_or(0);
    let group = samples.len().div_ceil(LOAD_POINTS).max(1);
    let step = run.series.step.as_secs_f64();
    let curve = |engine: usize| {
        let mean = |(at, part): (usize, &[Vec<u32>])| {
            let loads = part
                .iter()
                .map(|loads| f64::from(loads.get(engine).copied().unwrap_or(0)));
            let middle = (at * group) as f64 + (part.len() - 1) as f64 / 2.0;
            (middle * step, loads.sum::<f64>() / part.len() as f64)
        };
        samples.chunks(group).enumerate().map(mean).collect()
    };
    (0..engines).map(curve).collect()
}

fn load_plot(run: &RunReport, top: f64, policy: usize) -> Plot {
    let curves = loads(run);
    let last = curves.iter().flatten().map(|(x, _)| *x).fold(0.0, f64::max);
    let line = |(engine, points): (usize, Vec<(f64, f64)>)| Line {
        width: 1.1,
        dash: "",
        ..policy_line(policy, &format!("engine {engine}"), points)
    };
    Plot {
        description: format!("Requests in each engine over time under {}", run.policy),
        size: SMALL,
        x: Axis::from_zero("virtual time, s", std::iter::once(last)),
        y: Axis::from_zero("requests", std::iter::once(top)),
        lines: curves.into_iter().enumerate().map(line).collect(),
    }
}

fn throughput_latency(plan: &Plan, comparison: &Comparison) -> Plot {
    let at = |wanted: Column| {
        Column::ALL
            .iter()
            .position(|column| *column == wanted)
            .unwrap_or(0)
    };
    let (tokens, ttft) = (at(Column::Throughput), at(Column::TtftMean));
    let line = |(policy, of): (usize, &kvasir_sim::Policy)| {
        let rows = comparison
            .levels
            .iter()
            .filter_map(|level| level.rows.get(policy));
        let points =
            rows.filter_map(|row| Some((*row.values.get(tokens)?, *row.values.get(ttft)?)));
        Line {
            marks: true,
            ..policy_line(policy, &of.name, points.collect())
        }
    };
    let lines: Vec<Line> = plan.policies.iter().enumerate().map(line).collect();
    let points = || lines.iter().flat_map(|line| line.points.iter().copied());
    Plot {
        description: "Mean time to first token against tokens per second".to_owned(),
        size: WIDE,
        x: Axis::from_zero("output tokens per second", points().map(|p| p.0)),
        y: Axis::log("mean time to first token, ms", points().map(|p| p.1)),
        lines,
    }
}

fn definitions() -> String {
    "<footer><h2>What the columns are</h2><dl>\
     <dt>TTFT</dt><dd>from a request's arrival at the router to its first token, queues included</dd>\
     <dt>ITL</dt><dd>each gap between two tokens of one answer</dd>\
     <dt>E2E</dt><dd>from arrival to the last token</dd>\
     <dt>queue</dt><dd>from arrival to entering an engine's batch</dd>\
     <dt>good</dt><dd>requests completed within the service level, of all</dd>\
     <dt>hits</dt><dd>prompt tokens found in the chosen engine's cache, of all</dd>\
     <dt>max/mean</dt><dd>requests in the fullest engine over the mean, averaged over the run</dd>\
     <dt>pre-empted</dt><dd>requests thrown out of a full engine's batch and computed again</dd>\
     </dl><p>Virtual time: engines are models with measured step times. Trust differences more than \
     values.</p></footer>\n"
        .to_owned()
}
