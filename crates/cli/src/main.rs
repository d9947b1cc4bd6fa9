//! The one binary: finds the command and runs it. Nothing here that a second binary would need.

mod allocator;
mod cluster;
mod demo;
mod descriptors;
mod doctor;
mod endpoint_meters;
mod index_peers;
mod mocker;
mod operate;
mod planes;
mod router;
mod serve;
mod services;
mod shared_cache;
mod sockets;
mod system_status;
mod traces;
mod upgrade;
mod wiring;

use std::io::Write;
use std::process::ExitCode;

use kvasir_config::{Command, Environment, Invocation, Run, Settings, keys};
use kvasir_telemetry::log;
use kvasir_upstream::read_bounded_text;

/// Longest configuration file.
const CONFIG_BYTES_MAX: u64 = 4 << 20;
/// The code of a command line, variable or file that is wrong.
const BAD_CONFIG: u8 = 2;

fn main() -> ExitCode {
    kvasir_text::after_loading(allocator::give_back);
    let code = run();
    log::flush();
    code
}

fn run() -> ExitCode {
    let args = std::env::args_os().skip(1);
    let read_file = |path: &std::path::Path| read_bounded_text(path, CONFIG_BYTES_MAX);
    match kvasir_config::parse(args, &Environment::from_process(), read_file) {
        Ok(Invocation::Print(text)) => print(&text),
        Ok(Invocation::Run(run)) => start(&run),
        Err(error) => complain(&error, BAD_CONFIG),
    }
}

fn start(run: &Run) -> ExitCode {
    let filter: String = match run.command {
        // It says itself what it finds; the parts that it uses would say the same in their words.
        Command::Doctor => "error".to_owned(),
        _ => run.settings.get(keys::LOG_LEVEL),
    };
    if let Err(error) = log::init(&filter, wiring::log_format(&run.settings)) {
        return complain(&format!("error: --log-level: {error}"), BAD_CONFIG);
    }
    log::take_panics();
    for notice in &run.notices {
        tracing::warn!("{notice}");
    }
    if let Err(error) = dump(&run.settings) {
        return complain(&error, 1);
    }
    if run.command == Command::Replay {
        return replay(&run.settings);
    }
    descriptors::raise_limit();
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return complain(&format!("error: the runtime did not start: {error}"), 1),
    };
    let outcome = runtime.block_on(async {
        match run.command {
            Command::Doctor => return doctor::run(&run.settings).await,
            Command::Demo => demo::run(&run.settings).await,
            Command::Mocker => mocker::run(&run.settings).await,
            Command::Indexer | Command::SlotTracker | Command::Select => {
                services::run(run.command, &run.settings).await
            }
            Command::Router => router::run(&run.settings).await,
            Command::Why | Command::Workers | Command::Top | Command::Health | Command::Upgrade => {
                operate::run(run).await
            }
            _ => serve::run(&run.settings).await,
        }
        .map(|()| ExitCode::SUCCESS)
    });
    // A file that is still being read, on a thread that waits for a disk, keeps nobody from ending.
    runtime.shutdown_background();
    match outcome {
        Ok(code) => code,
        Err(error) => {
            let code = match wiring::is_bad_config(&error) {
                true => BAD_CONFIG,
                false => 1,
            };
            complain(&format!("error: {error}"), code)
        }
    }
}

/// Writes the settings to the file of `--dump-config-to`.
fn dump(settings: &Settings) -> Result<(), String> {
    let Some(path) = settings.get(keys::DUMP_CONFIG_TO) else {
        return Ok(());
    };
    std::fs::write(&path, settings.to_json())
        .map_err(|error| format!("error: --dump-config-to {}: {error}", path.display()))
}

/// Simulates, with routers wired as the server's are.
fn replay(settings: &Settings) -> ExitCode {
    let router = |of: &Settings, block_size| {
        let setup = wiring::router_setup(of).map_err(|error| error.to_string())?;
        Ok((setup.config("", block_size), setup.index))
    };
    match kvasir_replay::run(settings, &router) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error @ kvasir_replay::ReplayError::Policy(_)) => complain(&error, error.exit_code()),
        Err(error) => complain(&format!("error: {error}"), error.exit_code()),
    }
}

/// Writes to standard output; a reader that went away is no error.
fn print(text: &str) -> ExitCode {
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

fn complain(message: &dyn std::fmt::Display, code: u8) -> ExitCode {
    log::say(&message.to_string());
    ExitCode::from(code)
}
