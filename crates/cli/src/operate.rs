//! Commands that ask a running frontend: `kvasir why`, `kvasir workers`, `kvasir top`, `kvasir health`, `kvasir upgrade`;
//! `kvasir doctor` asks it for its workers.
//!
//! They read the admin routes that anybody can read with `curl`, and show the same data for people; `--json`
//! prints it as it came. A frontend that cannot be asked is an error of one line that says what to do.

mod client;
mod health;
mod page;
mod table;
mod text;
mod top;
mod upgrade;
mod view;
mod why;
mod workers;

use std::io::Write;

use kvasir_config::{Command, Run, Settings, keys};
use kvasir_doctor::{ListedWorker, read_workers};
use serde_json::Value;

use crate::wiring::Failure;
use client::Client;

/// Runs the command.
pub(crate) async fn run(run: &Run) -> Result<(), Failure> {
    if run.command == Command::Upgrade {
        return upgrade::run(run).await;
    }
    let client = Client::new(&run.settings)?;
    match run.command {
        Command::Why => why::run(&client, run).await,
        Command::Workers => workers::run(&client, run).await,
        Command::Health => health::run(&client, run).await,
        _ => top::run(&client, run).await,
    }
}

/// The engine servers of the frontend at `--url`.
pub(crate) async fn engines(settings: &Settings) -> Result<Vec<ListedWorker>, Failure> {
    let client = Client::new(settings)?;
    let answer = workers::list(&client).await?;
    let url = client.url();
    match read_workers(&answer) {
        Some(found) if !found.is_empty() => Ok(found),
        Some(_) => Err(format!(
            "{url} has no engine server to look at (kvasir workers lists what it has); name engines with --worker URL"
        )
        .into()),
        None => Err(format!("{url} lists no workers: is it a Kvasir frontend?").into()),
    }
}

/// Prints an answer as JSON where that was asked for, else as `text` makes it.
fn show(run: &Run, answer: &Value, text: impl FnOnce(&Value) -> String) {
    if run.settings.get(keys::JSON) {
        print(&format!("{answer:#}\n"));
    } else {
        print(&text(answer));
    }
}

/// Writes to standard output; a reader that went away is no error.
fn print(text: &str) {
    let mut out = std::io::stdout();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
