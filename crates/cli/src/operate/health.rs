//! `kvasir health`: can this frontend serve? For probes that have no HTTP client of their own, as in an image without a shell.

use kvasir_config::{Run, keys};
use serde_json::Value;

use super::client::Client;
use super::{print, text};
use crate::wiring::Failure;

/// Prints what the page says; one that does not answer 200 is an error that says why.
pub(super) async fn run(client: &Client, run: &Run) -> Result<(), Failure> {
    let path = if run.settings.get(keys::LIVE) {
        "/live"
    } else {
        "/health"
    };
    let (status, page) = client.status(path).await?;
    if run.settings.get(keys::JSON) {
        print(&format!("{}\n", page.trim()));
    }
    let told = format!("{}{path}: {}{}", client.url(), status.as_u16(), why(&page));
    if !status.is_success() {
        return Err(told.into());
    }
    if !run.settings.get(keys::JSON) {
        print(&format!("{told}\n"));
    }
    Ok(())
}

/// What a frontend that is not ready waits for, where its page says so.
fn why(page: &str) -> String {
    let page: Value = serde_json::from_str(page).unwrap_or_default();
    match page.get("stage").and_then(Value::as_str) {
        Some(stage) => format!(", {}", text::plain(&stage.replace('_', " "))),
        None => String::new(),
    }
}
