//! `kvasir demo --processes`: each mock engine in a process of its own, found through a folder, as workers of a fleet are.
//!
//! Answers one question: how do frontend and engines of the demo meet when they share nothing but this machine? Engines announce
//! themselves in a temporary folder, take requests over TCP and publish over ZeroMQ, all on loopback; nothing has to be installed.
//!
//! What always holds: no engine outlives the demo, however it ends: each ends when the pipe to it is closed.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use kvasir_config::{Environment, Invocation, Settings, keys};
use kvasir_frontend::{App, Fleet, ServedModel};
use kvasir_tasks::RuntimeThreads;
use kvasir_text::TextFiles;

use super::{CACHE_TOKENS, CONTEXT_LENGTH};
use crate::planes;
use crate::sockets::InnerSockets;
use crate::upgrade::Handed;
use crate::wiring::{self, Failure};

/// Longest wait until all engines serve.
const START_MAX: Duration = Duration::from_secs(60);
/// Longest wait until an engine that was told so has ended.
const END_MAX: Duration = Duration::from_secs(5);
/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The engines' processes and the folder where they meet. Dropped, both go at once.
pub(super) struct Processes {
    engines: Vec<Child>,
    folder: PathBuf,
    /// The frontend's side; events are applied by its threads.
    _fleet: Fleet,
}

impl Processes {
    /// Starts the engines and a fleet that finds them; the model, once all of them serve it.
    pub(super) async fn start(
        app: &Arc<App>,
        settings: &Settings,
        events: RuntimeThreads,
        model: &str,
        block_size: u32,
    ) -> Result<(Self, Arc<ServedModel>), Failure> {
        let folder = std::env::temp_dir().join(format!("kvasir-demo-{}", std::process::id()));
        let words = planes_words(&folder.join("kv"));
        let setup = wiring::router_setup(settings)?;
        let fleet = Fleet::new(app.fleet_context(), setup).with_event_threads(events);
        let planes = planes_settings(&words)?;
        let fleet = planes::with_planes(
            fleet,
            &planes,
            app.tasks(),
            &Handed::default(),
            &mut InnerSockets::default(),
        )
        .await?;
        let mut this = Self {
            engines: Vec::new(),
            folder,
            _fleet: fleet.clone(),
        };
        write_model(&this.folder.join("model"))?;
        fleet.start();
        planes::discover(&fleet, &planes, app.tasks())?;
        let count = settings.get(keys::WORKERS);
        let (prefill, decode) = match settings.get(keys::DISAGG) {
            true => split(count),
            false => (0, count),
        };
        let modes = [("prefill", prefill), ("decode", decode)];
        for (mode, count) in modes.map(|(mode, count)| match prefill {
            0 => ("agg", count),
            _ => (mode, count),
        }) {
            for _ in 0..count {
                let engine = this.engine(&words, model, block_size, mode)?;
                this.engines.push(engine);
            }
        }
        let counts = (prefill as usize, decode as usize);
        let served = this.until_served(app, model, counts).await?;
        Ok((this, served))
    }

    fn engine(
        &self,
        planes: &[OsString],
        model: &str,
        block_size: u32,
        mode: &str,
    ) -> Result<Child, Failure> {
        let blocks = CACHE_TOKENS / block_size.max(1);
        let spawned = Command::new(std::env::current_exe()?)
            .arg("mocker")
            .args(planes)
            .arg("--model-path")
            .arg(self.folder.join("model"))
            .args(["--model-name", model, "--workers", "1", "--speedup", "1"])
            .args(["--disaggregation-mode", mode])
            .args(["--block-size", &block_size.to_string()])
            .args(["--num-blocks", &blocks.to_string()])
            .args(["--max-model-len", &CONTEXT_LENGTH.to_string()])
            .args(["--log-level", "warn", "--until-stdin-closes"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn();
        spawned.map_err(|error| format!("a mock engine cannot be started: {error}").into())
    }

    /// Lets the engines take back what they announced, and end.
    pub(super) async fn end(mut self) {
        for engine in &mut self.engines {
            drop(engine.stdin.take());
        }
        let looks = END_MAX.as_millis() / LOOK_EVERY.as_millis();
        for _ in 0..looks {
            let runs = |engine: &mut Child| matches!(engine.try_wait(), Ok(None));
            if !self.engines.iter_mut().any(runs) {
                return;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Waits until so many workers compute prompts for others, and so many serve the model.
    async fn until_served(
        &mut self,
        app: &App,
        model: &str,
        (prefill, count): (usize, usize),
    ) -> Result<Arc<ServedModel>, Failure> {
        let looks = START_MAX.as_millis() / LOOK_EVERY.as_millis();
        for _ in 0..looks {
            let pools = app.prefill_pools().all();
            let in_pools: usize = pools.iter().map(|pool| pool.specs().len()).sum();
            if let Some(model) = app.models().get(model)
                && model.specs().len() == count
                && in_pools == prefill
            {
                return Ok(model);
            }
            for engine in &mut self.engines {
                if let Ok(Some(status)) = engine.try_wait() {
                    return Err(format!("a mock engine ended ({status}); the log says why").into());
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Err("the mock engines did not come; the log says why".into())
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for engine in &mut self.engines {
            let _ = engine.kill();
            let _ = engine.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// How many of so many engines compute prompts, and how many answer: at least one of each.
pub(super) fn split(workers: u32) -> (u32, u32) {
    let workers = workers.max(2);
    (workers / 2, workers - workers / 2)
}

/// What puts a process on the demo's planes.
fn planes_words(kv: &Path) -> Vec<OsString> {
    let mut words: Vec<OsString> = vec!["--file-kv".into(), kv.into()];
    let rest = [
        ("--discovery-backend", "file"),
        ("--request-plane", "tcp"),
        ("--event-plane", "zmq"),
        ("--tcp-rpc-host", "127.0.0.1"),
    ];
    words.extend(
        rest.iter()
            .flat_map(|(flag, value)| [(*flag).into(), (*value).into()]),
    );
    words
}

/// The same, as a frontend reads it.
fn planes_settings(words: &[OsString]) -> Result<Settings, Failure> {
    let args = std::iter::once("frontend".into()).chain(words.iter().cloned());
    let read_file = |_: &Path| Err(std::io::Error::other("no file"));
    match kvasir_config::parse(args, &Environment::default(), read_file) {
        Ok(Invocation::Run(run)) => Ok(run.settings),
        Ok(Invocation::Print(_)) => Err("the demo's own options are no options".into()),
        Err(error) => Err(error.to_string().into()),
    }
}

/// The model that the binary carries, as files that engines read and name in their cards.
fn write_model(folder: &Path) -> Result<(), Failure> {
    fs::create_dir_all(folder)?;
    let files = TextFiles::builtin();
    fs::write(folder.join("tokenizer.json"), &files.tokenizer)?;
    for (name, bytes) in [
        ("tokenizer_config.json", &files.tokenizer_config),
        ("config.json", &files.config),
        ("chat_template.jinja", &files.chat_template),
    ] {
        if let Some(bytes) = bytes {
            fs::write(folder.join(name), bytes)?;
        }
    }
    Ok(())
}
