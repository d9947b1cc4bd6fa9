//! How log lines look and where they go: standard error, as text or as JSON.
//!
//! An event becomes a line on the thread that logs ([`subscriber`], [`text`], [`json`]). Nobody who logs waits for a
//! reader: lines go through a bounded queue to one thread ([`queue`]), which writes many at once, and what does not fit
//! is dropped, counted ([`count_drops`]) and told. Before the process ends, [`flush`] gives what waits a short while to
//! leave. A line is one line whatever its fields hold.

mod digits;
mod json;
mod queue;
mod subscriber;
mod text;

use std::io::IsTerminal;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use prometheus::IntCounter;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use queue::Queue;
use subscriber::LineSubscriber;

/// Most bytes of log lines that wait for their reader: some 20,000 lines.
pub const QUEUE_BYTES_MAX: usize = 4 << 20;
/// Shortest time between two writes, and so the longest that a line waits for those that are written with it.
pub const WRITE_PAUSE: Duration = Duration::from_millis(20);
/// How long [`flush`] and a panic wait for a reader that does not read.
pub const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

static QUEUE: OnceLock<Arc<Queue>> = OnceLock::new();

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
    let targets = targets(filter)?;
    let queue = to_stderr().map_err(|error| format!("the log's thread did not start: {error}"))?;
    let ansi = std::io::stderr().is_terminal();
    let sink = move |line: &str| queue.push(line.as_bytes());
    let lines = LineSubscriber::new(format, ansi, sink);
    let _already_set = lines.with(targets).try_init();
    Ok(())
}

/// Libraries that log each attempt to reach a server that is away. What it means is logged here, once.
const REPEATING: [&str; 1] = ["async_nats"];

/// Which lines are written. At `info` the lines of libraries that repeat themselves are not, unless they are asked for by name.
fn targets(filter: &str) -> Result<Targets, String> {
    let mut targets: Targets = filter.parse().map_err(|error| {
        format!(
            "`{filter}` is not a log filter ({error}); try `info` or `info,kvasir_router=debug`"
        )
    })?;
    if targets.default_level() == Some(LevelFilter::INFO) {
        for library in REPEATING.iter().filter(|name| !filter.contains(**name)) {
            targets = targets.with_target(*library, LevelFilter::WARN);
        }
    }
    Ok(targets)
}

/// The process's queue to standard error; the first call starts it.
fn to_stderr() -> std::io::Result<Arc<Queue>> {
    if let Some(queue) = QUEUE.get() {
        return Ok(Arc::clone(queue));
    }
    let started = Queue::start(
        std::io::stderr(),
        QUEUE_BYTES_MAX,
        WRITE_PAUSE,
        tell_dropped,
    )?;
    let queue = QUEUE.get_or_init(|| started);
    Ok(Arc::clone(queue))
}

fn tell_dropped(lines: u64) {
    tracing::warn!(
        lines,
        "log lines dropped: standard error was not read fast enough"
    );
}

/// Sends the words of panics the way of the log: the standard hook would wait for a reader that may never come.
pub fn take_panics() {
    std::panic::set_hook(Box::new(tell_panic));
}

fn tell_panic(info: &std::panic::PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("<unnamed>");
    let trace = std::backtrace::Backtrace::capture();
    let trace = match trace.status() {
        std::backtrace::BacktraceStatus::Captured => format!("stack backtrace:\n{trace}"),
        _ => "note: RUST_BACKTRACE=1 shows where from".to_owned(),
    };
    say(&format!("thread '{name}' {info}\n{trace}"));
    // The main thread's panic ends the process. Others are caught, and must not make their thread wait for a reader.
    if name == "main" {
        flush();
    }
}

/// Writes a text of its own to standard error, behind the log lines so far: why a process ends. It goes through
/// the log's queue once there is one; [`flush`] waits for it.
pub fn say(text: &str) {
    let text = format!("{}\n", text.trim_end());
    match QUEUE.get() {
        Some(queue) => queue.push_urgent(text.as_bytes()),
        None => {
            let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
        }
    }
}

/// Waits until all lines so far are written, for [`FLUSH_TIMEOUT`] at most. Whether they are.
pub fn flush() -> bool {
    QUEUE.get().is_none_or(|queue| queue.flush(FLUSH_TIMEOUT))
}

/// Counts dropped lines here too, those so far included.
pub fn count_drops(counter: &IntCounter) {
    if let Some(queue) = QUEUE.get() {
        queue.count_in(counter.clone());
    }
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

    #[test]
    fn libraries_that_repeat_themselves_are_heard_if_asked_for() {
        let is_heard = |filter: &str, level| {
            let targets = targets(filter).unwrap();
            targets.would_enable("async_nats::connector", &level)
        };
        use tracing::Level;
        assert!(!is_heard("info", Level::INFO) && is_heard("info", Level::WARN));
        assert!(!is_heard("info,kvasir_router=debug", Level::INFO));
        assert!(is_heard("debug", Level::INFO) && is_heard("info,async_nats=info", Level::INFO));
        assert!(!is_heard("error", Level::WARN));
    }

    #[test]
    fn a_filter_switches_lines_off_by_level_and_by_target() {
        static SEEN: std::sync::Mutex<String> = std::sync::Mutex::new(String::new());
        let sink = |line: &str| SEEN.lock().unwrap().push_str(line);
        let filter: Targets = "warn,loud=debug,loud::quiet=off".parse().unwrap();
        let lines = LineSubscriber::new(Format::Text, false, sink).with(filter);
        tracing::subscriber::with_default(lines, || {
            tracing::info!("a");
            tracing::warn!("b");
            tracing::debug!(target: "loud::part", "c");
            tracing::trace!(target: "loud::part", "d");
            tracing::error!(target: "loud::quiet", "e");
        });
        let seen = SEEN.lock().unwrap();
        let ends: Vec<_> = seen.lines().map(|line| &line[28..]).collect();
        assert_eq!(ends, [" WARN b", "DEBUG c"]);
    }
}
