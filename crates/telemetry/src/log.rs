//! How log lines look and where they go: standard error, as text or as JSON.

use std::io::IsTerminal;

use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

/// The form of a log line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// For a person.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts logging. `filter` is a level (`info`) or a list of them by module (`info,kvasir_router=debug`);
/// an error says which part of it is wrong. A second call changes nothing.
pub fn init(filter: &str, format: Format) -> Result<(), String> {
    let targets: Targets = filter.parse().map_err(|error| {
        format!(
            "`{filter}` is not a log filter ({error}); try `info` or `info,kvasir_router=debug`"
        )
    })?;
    let registry = tracing_subscriber::registry();
    let ansi = std::io::stderr().is_terminal();
    let _already_set = match format {
        Format::Text => {
            let layer = fmt::layer().with_writer(std::io::stderr).with_ansi(ansi);
            registry
                .with(layer.with_target(false).with_filter(targets))
                .try_init()
        }
        Format::Json => {
            let layer = fmt::layer()
                .json()
                .flatten_event(true)
                .with_writer(std::io::stderr);
            registry.with(layer.with_filter(targets)).try_init()
        }
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_filter_is_named() {
        let error = init("kvasir=loud", Format::Text).unwrap_err();
        assert!(error.contains("`kvasir=loud`"), "{error}");
        assert!(init("warn,kvasir_router=debug", Format::Text).is_ok());
    }
}
