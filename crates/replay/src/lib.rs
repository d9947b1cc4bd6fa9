//! `kvasir replay`: several policies on one trace, compared.
//!
//! Answers one question: which settings are best for this traffic? Options become a [`Plan`], its runs are
//! simulated in parallel, and the results become a table, a JSON file and an HTML page with plots.
//!
//! Invariants: the numbers are the same whatever the number of threads, wall time aside; the table, the
//! JSON and the page show the same numbers; nothing is written before all runs have ended.
//!
//! Elsewhere: the simulation (`kvasir-sim`), names and ranges of options (`kvasir-config`).

mod compare;
mod html;
mod json;
mod plan;
mod progress;
mod runs;
mod split;
mod svg;
mod table;

pub use compare::{Column, Comparison, LoadLevel, Row};
pub use html::html_report;
pub use json::json_report;
pub use plan::{Plan, ReplayError, RouterWiring, engine_config};
pub use runs::{RunResult, run_all};
pub use split::Split;
pub use table::text_table;

use std::io::{IsTerminal, Write};

use kvasir_config::Settings;

/// Runs the replay: writes the table to standard output, the reports to their files, and
/// draws progress on standard error if that is a terminal.
pub fn run(settings: &Settings, wiring: &RouterWiring<'_>) -> Result<(), ReplayError> {
    let plan = Plan::from_settings(settings, wiring)?;
    let terminal = std::io::stderr().is_terminal();
    let finished = run_all(&plan, terminal)?;
    let comparison = Comparison::new(&plan, &finished);
    if let Some(path) = &plan.json {
        write_file(path, &json_report(&plan, &finished))?;
    }
    if let Some(path) = &plan.html {
        write_file(path, &html_report(&plan, &comparison, &finished))?;
    }
    // A closed pipe is not an error.
    let _ = std::io::stdout().write_all(text_table(&comparison).as_bytes());
    Ok(())
}

fn write_file(path: &std::path::Path, text: &str) -> Result<(), ReplayError> {
    std::fs::write(path, text).map_err(|cause| ReplayError::Write {
        path: path.into(),
        cause,
    })
}
