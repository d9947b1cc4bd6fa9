//! `kvasir health`: can this frontend serve? For probes that have no HTTP client of their own, as in an image without a shell.

use kvasir_config::{Run, keys};

use super::client::Client;
use super::print;
use crate::wiring::Failure;

/// Prints what the page says; one that does not answer 200 is an error.
pub(super) async fn run(client: &Client, run: &Run) -> Result<(), Failure> {
    let path = if run.settings.get(keys::LIVE) {
        "/live"
    } else {
        "/health"
    };
    let page = client.page(path).await?;
    if run.settings.get(keys::JSON) {
        print(&format!("{}\n", page.trim()));
    } else {
        print(&format!("{}{path}: 200\n", client.url()));
    }
    Ok(())
}
