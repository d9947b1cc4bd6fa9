//! How do log lines reach a reader that may be slow, or never read again?
//!
//! Whoever logs copies its line into a buffer under a short lock and goes on; one thread writes the buffer out, at
//! most once in a pause. It wakes by itself at the end of a pause, so while much is logged nobody wakes it; the first
//! line after a quiet while does, and is written at once. Urgent lines, a flush and a buffer that fills end a pause.
//! Invariants: at most `bytes_max` bytes wait or are being written (urgent lines may go [`URGENT_ROOM`] beyond); a
//! line is kept whole or dropped whole; every dropped line is counted once and told once, after the lines before it.

use std::cell::Cell;
use std::io::{self, ErrorKind, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus::IntCounter;

/// Bytes kept free for lines that tell of drops, panics and ends.
const URGENT_ROOM: usize = 64 << 10;
/// A buffer that is full by one in so many parts is written before the pause ends.
const HURRY_SHARE: usize = 4;
/// How long to wait where a writer is full and does not block.
const FULL_PAUSE: Duration = Duration::from_millis(20);

thread_local! {
    /// Set on the thread that writes: what it logs itself is about drops, and is not dropped.
    static IS_WRITER: Cell<bool> = const { Cell::new(false) };
}

/// Lines on their way.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    /// Something waits to be written.
    more: Condvar,
    /// Nothing waits.
    idle: Condvar,
    bytes_max: usize,
    pause: Duration,
}

#[derive(Debug, Default)]
struct State {
    pending: Vec<u8>,
    lines: u64,
    /// Bytes that the thread took and has not written yet.
    writing: usize,
    /// Whether the thread is between taking lines and having told what was dropped.
    busy: bool,
    /// Whether the thread looks for lines again without being woken.
    awake: bool,
    /// What waits is not to wait for the end of the pause.
    hurry: bool,
    /// Callers that wait for everything to be written.
    flushers: usize,
    /// Dropped and not told yet.
    untold: u64,
    /// Dropped before there was a counter.
    uncounted: u64,
    counter: Option<IntCounter>,
}

impl State {
    fn drop_lines(&mut self, lines: u64) {
        self.untold += lines;
        match &self.counter {
            Some(counter) => counter.inc_by(lines),
            None => self.uncounted += lines,
        }
    }
}

impl Queue {
    /// Starts the thread that writes to `out` for as long as the process lives, with a `pause` after each write. It
    /// calls `tell` with the number of dropped lines once writing goes on.
    pub(super) fn start(
        out: impl Write + Send + 'static,
        bytes_max: usize,
        pause: Duration,
        tell: fn(u64),
    ) -> io::Result<Arc<Self>> {
        let queue = Arc::new(Self {
            state: Mutex::default(),
            more: Condvar::new(),
            idle: Condvar::new(),
            bytes_max,
            pause,
        });
        let lines = Arc::clone(&queue);
        std::thread::Builder::new()
            .name("log".into())
            .spawn(move || {
                IS_WRITER.set(true);
                let mut out = out;
                let mut batch = Vec::new();
                loop {
                    lines.write_some(&mut out, &mut batch, tell);
                    lines.pause();
                }
            })?;
        Ok(queue)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one line, or drops it.
    pub(super) fn push(&self, line: &[u8]) {
        let room = if IS_WRITER.get() { URGENT_ROOM } else { 0 };
        self.push_within(line, self.bytes_max + room, false);
    }

    /// Takes a line that has room of its own and does not wait for others.
    pub(super) fn push_urgent(&self, line: &[u8]) {
        self.push_within(line, self.bytes_max + URGENT_ROOM, true);
    }

    fn push_within(&self, line: &[u8], bytes_max: usize, urgent: bool) {
        let mut state = self.lock();
        if state.writing + state.pending.len() + line.len() > bytes_max {
            state.drop_lines(1);
            return;
        }
        let was_empty = state.pending.is_empty();
        state.pending.extend_from_slice(line);
        state.lines += 1;
        let hurry = urgent || state.pending.len() > self.bytes_max / HURRY_SHARE;
        let hurries = hurry && !state.hurry;
        state.hurry |= hurry;
        let wakes = hurries || (was_empty && !state.awake);
        drop(state);
        if wakes {
            self.more.notify_one();
        }
    }

    /// Waits for lines and writes them out.
    fn write_some(&self, out: &mut impl Write, batch: &mut Vec<u8>, tell: fn(u64)) {
        let mut state = self.lock();
        state.awake = false;
        let empty = |state: &mut State| state.pending.is_empty();
        let waited = self.more.wait_while(state, empty);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.awake = true;
        state.hurry = false;
        batch.clear();
        std::mem::swap(batch, &mut state.pending);
        let lines = std::mem::take(&mut state.lines);
        state.writing = batch.len();
        state.busy = true;
        drop(state);
        let written = write_all(out, batch);
        let mut state = self.lock();
        state.writing = 0;
        // Where nothing can be written, what was dropped is told later.
        let untold = match written {
            Ok(()) => std::mem::take(&mut state.untold),
            Err(_) => {
                state.drop_lines(lines);
                0
            }
        };
        drop(state);
        if untold > 0 {
            tell(untold);
        }
        let mut state = self.lock();
        state.busy = false;
        let idle = state.pending.is_empty();
        drop(state);
        if idle {
            self.idle.notify_all();
        }
    }

    /// Lets lines gather.
    fn pause(&self) {
        let gathers = |state: &mut State| !state.hurry && state.flushers == 0;
        let waited = self
            .more
            .wait_timeout_while(self.lock(), self.pause, gathers);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits until nothing waits to be written, for `timeout` at most. Whether that came.
    pub(super) fn flush(&self, timeout: Duration) -> bool {
        if IS_WRITER.get() {
            return false;
        }
        let unfinished = |state: &mut State| state.busy || !state.pending.is_empty();
        let mut state = self.lock();
        state.flushers += 1;
        self.more.notify_one();
        let (mut state, _) = self
            .idle
            .wait_timeout_while(state, timeout, unfinished)
            .unwrap_or_else(PoisonError::into_inner);
        state.flushers -= 1;
        !state.busy && state.pending.is_empty()
    }

    /// From now on drops are counted there; those so far are added.
    pub(super) fn count_in(&self, counter: IntCounter) {
        let mut state = self.lock();
        counter.inc_by(std::mem::take(&mut state.uncounted));
        state.counter = Some(counter);
    }
}

/// Writes everything, waiting also where the other end says "full" instead of blocking.
fn write_all(out: &mut impl Write, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match out.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                std::thread::park_timeout(FULL_PAUSE)
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
