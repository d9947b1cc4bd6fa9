//! `kvasir upgrade`: a running frontend starts its own command anew and hands over to it.

use std::time::Duration;

use http::Method;
use kvasir_config::{Origin, Run, keys};
use serde_json::Value;

use super::client::Client;
use super::show;
use crate::wiring::Failure;

/// A new process may read large tokenizers and a large index before it serves.
const PATIENCE: Duration = Duration::from_secs(180);

/// Asks, waits, and says which process serves now.
pub(super) async fn run(run: &Run) -> Result<(), Failure> {
    let settings = &run.settings;
    let patience = match *settings.origin(keys::TIMEOUT_SECS) == Origin::Default {
        true => PATIENCE,
        false => settings.get(keys::TIMEOUT_SECS),
    };
    let client = Client::waiting(settings, patience)?;
    let answer = client.send(&Method::POST, "/upgrade", None).await;
    let answer = answer.map_err(|error| match error.is_not_found() {
        true => Failure::from(client.without("/upgrade")),
        false => error.into(),
    })?;
    show(run, &answer, |answer| {
        let number = |name: &str| answer.get(name).map_or(String::new(), Value::to_string);
        let (new, old) = (number("pid"), number("replaced_pid"));
        format!("process {new} serves; process {old} ends when what it has is done\n")
    });
    Ok(())
}
