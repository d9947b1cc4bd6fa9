//! How many files this process may open, and how many of those clients may have.
//!
//! What always holds: clients never get more than half of what is left beside our own, so that each of them can have an engine's
//! answer. A limit that the system lets us raise is raised at the start.

use std::sync::OnceLock;

use kvasir_config::{Settings, keys};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Files that we open ourselves: listeners, threads, event sockets, logs, snapshots.
const OWN: u64 = 64;
/// Connections that clients have at least, however few files may be opened.
const CLIENTS_MIN: u64 = 8;
/// Connections that clients have at most unless the operator says more.
const CLIENTS_MAX: u64 = 32_768;

/// How many files may be open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OpenFiles {
    /// When we started.
    before: u64,
    now: u64,
}

static OPEN_FILES: OnceLock<OpenFiles> = OnceLock::new();

/// Raises the limit of open files as far as the system allows. Does so once.
pub(crate) fn raise_limit() {
    open_files();
}

fn open_files() -> OpenFiles {
    let number = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
    *OPEN_FILES.get_or_init(|| {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        let raised = Rlimit {
            current: maximum,
            maximum,
        };
        let is_raised = current != maximum && setrlimit(Resource::Nofile, raised).is_ok();
        OpenFiles {
            before: number(current),
            now: number(if is_raised { maximum } else { current }),
        }
    })
}

/// How many connections clients may have.
pub(crate) fn client_connections(settings: &Settings) -> usize {
    let asked = settings.get(keys::HTTP_CONNECTIONS_MAX);
    let share = share(open_files().now, asked.map(u64::from));
    usize::try_from(share).unwrap_or(usize::MAX)
}

/// What clients get of so many files, if they are to have `asked` connections.
fn share(open_files: u64, asked: Option<u64>) -> u64 {
    let half = (open_files.saturating_sub(OWN) / 2).max(CLIENTS_MIN);
    asked.unwrap_or(CLIENTS_MAX).min(half)
}

/// Says how many files may be open, and what clients get of them.
pub(crate) fn say(settings: &Settings) {
    let OpenFiles { before, now } = open_files();
    let clients = client_connections(settings);
    tracing::info!(
        limit = now,
        raised_from = (before != now).then_some(before),
        client_connections = clients,
        "open files"
    );
    if let Some(asked) = settings.get(keys::HTTP_CONNECTIONS_MAX)
        && asked as usize > clients
    {
        tracing::warn!(
            asked,
            client_connections = clients,
            open_files = now,
            "--http-connections-max is more than this process may open files for, with one for the engine of each client; \
             raise the limit of open files (ulimit -n)"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_leave_as_many_files_to_engines() {
        assert_eq!(share(256, None), 96);
        assert_eq!(share(1024, None), 480);
        assert_eq!(share(1 << 20, None), CLIENTS_MAX);
        assert_eq!(share(u64::MAX, None), CLIENTS_MAX);
        assert_eq!(share(20, None), CLIENTS_MIN);
        assert_eq!(share(256, Some(10)), 10);
        assert_eq!(share(256, Some(200)), 96);
        assert_eq!(share(1 << 20, Some(100_000)), 100_000);
    }

    #[test]
    fn the_limit_is_raised_to_what_the_system_allows() {
        raise_limit();
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        assert_eq!(current, maximum);
        assert!(open_files().before <= open_files().now);
    }
}
