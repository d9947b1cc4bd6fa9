//! The one tokio runtime of a process whose `main` is not ours.
//!
//! What always holds: it begins with the first thing that needs it; a process that was forked from one that had it is refused, since its
//! threads are not there; the lock here is held for no longer than a look.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_tasks::Tasks;
use tokio::runtime::{Builder, Handle, Runtime};

use crate::EmbedError;

/// Threads of the runtime; sockets and hashing need few.
const THREADS_MAX: usize = 4;
/// Longest time that its end waits for what runs.
const SHUTDOWN: Duration = Duration::from_secs(2);

struct ProcessRuntime {
    pid: u32,
    runtime: Runtime,
    tasks: Tasks,
}

static PROCESS: Mutex<Option<ProcessRuntime>> = Mutex::new(None);

fn process() -> MutexGuard<'static, Option<ProcessRuntime>> {
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where tasks run; begun if it has not been.
pub fn runtime() -> Result<(Handle, Tasks), EmbedError> {
    let mut held = process();
    let pid = std::process::id();
    match &*held {
        Some(known) if known.pid == pid => {
            return Ok((known.runtime.handle().clone(), known.tasks.clone()));
        }
        Some(_) => return Err(EmbedError::Forked),
        None => {}
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = Builder::new_multi_thread()
        .worker_threads(cores.clamp(1, THREADS_MAX))
        .thread_name("kvasir")
        .enable_all()
        .build()
        .map_err(EmbedError::Threads)?;
    let begun = ProcessRuntime {
        pid,
        runtime,
        tasks: Tasks::new(),
    };
    let parts = (begun.runtime.handle().clone(), begun.tasks.clone());
    *held = Some(begun);
    Ok(parts)
}

/// Where tasks run, if that has begun in this process and not ended.
pub(crate) fn running() -> Option<(Handle, Tasks)> {
    let held = process();
    let known = held.as_ref()?;
    let is_own = known.pid == std::process::id();
    is_own.then(|| (known.runtime.handle().clone(), known.tasks.clone()))
}

/// A runtime on its way to the end.
pub struct EndingRuntime(ProcessRuntime);

impl EndingRuntime {
    /// Stops what runs, and waits for it no longer than two seconds.
    pub fn wait(self) {
        self.0.tasks.stop();
        self.0.runtime.shutdown_timeout(SHUTDOWN);
    }
}

/// Takes the runtime away, if this process has begun one.
#[must_use]
pub fn end_runtime() -> Option<EndingRuntime> {
    let ended = process().take()?;
    if ended.pid != std::process::id() {
        // Its threads are the parent's: nothing is there to be waited for.
        std::mem::forget(ended);
        return None;
    }
    Some(EndingRuntime(ended))
}

/// Tasks that run now, for tests.
#[must_use]
pub fn task_count() -> usize {
    process().as_ref().map_or(0, |known| known.tasks.len())
}
