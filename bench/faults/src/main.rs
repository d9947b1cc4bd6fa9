//! Does every answer belong to its request, has each one end, and is nothing left behind, whatever engines and clients do?
//!
//! Starts the real `kvasir frontend` before fake engines and sends requests whose clients and engines fail in ways that are
//! drawn from a seed ([`plan`]); on top of that engines die, drain, stall and fall ill as a whole, and descriptors run out
//! ([`fate`]). Answers are judged by what they say ([`judge`]): each token names its request, its place and the checksum of
//! the prompt.
//!
//! The seed fixes what each request does, not when: timing is the machine's.

#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program of its own: its tasks end with it, it measures time and it reports to a terminal"
)]

mod client;
mod engine;
mod fate;
mod judge;
mod plan;
mod response;
mod router;
mod run;
mod script;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

const USAGE: &str = "\
kvasir-faults --binary PATH [--requests N] [--seed N] [--clients N] [--engines N] [--descriptors N] [--log FILE]
  --binary       the kvasir binary under test
  --requests     requests with faults, 100000 unless given; a fiftieth more without faults follows
  --seed         draws what each request does; printed, from the clock unless given
  --clients      requests at a time, 96 unless given
  --engines      fake engines, 8 unless given
  --descriptors  `ulimit -n` of the router, 512 unless given
  --log          where the router's log goes, kvasir-faults.log in the folder for temporary files unless given";

/// What a run is made of.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) binary: PathBuf,
    pub(crate) requests: u64,
    pub(crate) seed: u64,
    pub(crate) clients: u64,
    pub(crate) engines: u8,
    pub(crate) descriptors: u64,
    pub(crate) log: PathBuf,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let clock = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut options = Self {
            binary: PathBuf::new(),
            requests: 100_000,
            seed: clock.map_or(0, |time| time.subsec_nanos().into()),
            clients: 96,
            engines: 8,
            descriptors: 512,
            log: std::env::temp_dir().join("kvasir-faults.log"),
        };
        while let Some(name) = args.next() {
            let value = args.next().ok_or(format!("{name} needs a value"))?;
            let number = || {
                value
                    .parse::<u64>()
                    .map_err(|_| format!("{name}: {value} is no number"))
            };
            match name.as_str() {
                "--binary" => options.binary = value.into(),
                "--log" => options.log = value.into(),
                "--requests" => options.requests = number()?,
                "--seed" => options.seed = number()?,
                "--clients" => options.clients = number()?.clamp(1, 1000),
                "--engines" => options.engines = number()?.clamp(2, 100) as u8,
                "--descriptors" => options.descriptors = number()?,
                _ => return Err(format!("{name} is unknown")),
            }
        }
        match options.binary.is_file() {
            true => Ok(options),
            false => Err(format!(
                "--binary {}: no such file",
                options.binary.display()
            )),
        }
    }
}

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("kvasir-faults: {error}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    match runtime.and_then(|runtime| runtime.block_on(run::run(&options))) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("kvasir-faults: {error}");
            ExitCode::FAILURE
        }
    }
}
