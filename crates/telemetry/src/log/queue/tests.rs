//! Does a reader that stops keep anybody waiting, and is every line either written or counted?

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

use super::*;

/// Long enough for a loaded machine; no test waits for it unless it fails.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A reader that takes a write only when it is told to.
struct Reader {
    /// One message lets one write pass.
    turns: mpsc::Receiver<io::Result<()>>,
    /// Says that a write has come and waits.
    arrived: mpsc::Sender<()>,
    seen: Arc<Mutex<Vec<u8>>>,
}

impl Write for Reader {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = self.arrived.send(());
        self.turns.recv().unwrap_or(Ok(()))?;
        self.seen.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Rig {
    queue: Arc<Queue>,
    turns: mpsc::Sender<io::Result<()>>,
    arrived: mpsc::Receiver<()>,
    seen: Arc<Mutex<Vec<u8>>>,
}

fn rig(bytes_max: usize, tell: fn(u64)) -> Rig {
    rig_with(bytes_max, Duration::ZERO, tell)
}

fn rig_with(bytes_max: usize, pause: Duration, tell: fn(u64)) -> Rig {
    let (turns, turn) = mpsc::channel();
    let (arrives, arrived) = mpsc::channel();
    let seen = Arc::default();
    let reader = Reader {
        turns: turn,
        arrived: arrives,
        seen: Arc::clone(&seen),
    };
    Rig {
        queue: Queue::start(reader, bytes_max, pause, tell).unwrap(),
        turns,
        arrived,
        seen,
    }
}

impl Rig {
    /// Logs a line that stays with the reader until `turns` lets it pass.
    fn stall(&self) {
        self.queue.push(b"first\n");
        self.arrived.recv_timeout(TIMEOUT).unwrap();
    }

    /// Lets everything pass and returns what was written.
    fn end(self) -> String {
        let Self {
            queue, turns, seen, ..
        } = self;
        drop(turns);
        assert!(queue.flush(TIMEOUT));
        String::from_utf8(seen.lock().unwrap().clone()).unwrap()
    }
}

#[test]
fn a_stalled_reader_costs_lines_and_no_time() {
    static TOLD: AtomicU64 = AtomicU64::new(0);
    let rig = rig(100, |lines| {
        TOLD.fetch_add(lines, Ordering::SeqCst);
    });
    rig.stall();
    for at in 0..1000 {
        rig.queue.push(format!("line {at:04}\n").as_bytes());
    }
    assert!(!rig.queue.flush(Duration::ZERO));
    let counter = IntCounter::new("dropped", "lines").unwrap();
    rig.queue.count_in(counter.clone());
    // 6 bytes are with the reader; 9 lines of 10 bytes fit beside them.
    assert_eq!(counter.get(), 991);
    rig.queue.push(b"one more\n\n");
    assert_eq!(counter.get(), 992);
    let seen = rig.end();
    assert_eq!(seen.lines().count(), 10);
    assert!(seen.ends_with("line 0008\n"), "{seen}");
    assert_eq!(TOLD.load(Ordering::SeqCst), 992);
}

#[test]
fn what_ends_a_process_has_room_of_its_own() {
    let rig = rig(6, |_| {});
    rig.stall();
    rig.queue.push(b"dropped\n");
    rig.queue.push_urgent(b"error: why\n");
    rig.queue.push_urgent(&vec![b'x'; URGENT_ROOM]);
    assert_eq!(rig.end(), "first\nerror: why\n");
}

#[test]
fn lines_that_a_closed_reader_refuses_are_counted_and_later_ones_pass() {
    static TOLD: AtomicU64 = AtomicU64::new(0);
    let rig = rig(100, |lines| {
        TOLD.fetch_add(lines, Ordering::SeqCst);
    });
    let counter = IntCounter::new("dropped", "lines").unwrap();
    rig.queue.count_in(counter.clone());
    rig.stall();
    rig.turns.send(Err(ErrorKind::BrokenPipe.into())).unwrap();
    assert!(rig.queue.flush(TIMEOUT));
    assert_eq!(counter.get(), 1);
    assert_eq!(TOLD.load(Ordering::SeqCst), 0, "nobody could read it");
    rig.queue.push(b"second\n");
    assert_eq!(rig.end(), "second\n");
    assert_eq!(TOLD.load(Ordering::SeqCst), 1);
}

#[test]
fn a_reader_that_is_full_and_does_not_block_is_asked_again() {
    let rig = rig(100, |_| {});
    rig.stall();
    rig.turns.send(Err(ErrorKind::WouldBlock.into())).unwrap();
    rig.turns.send(Err(ErrorKind::Interrupted.into())).unwrap();
    assert_eq!(rig.end(), "first\n");
}

/// The first line is written and the pause after it has begun.
fn in_pause(pause: Duration) -> Rig {
    let rig = rig_with(400, pause, |_| {});
    rig.stall();
    rig.turns.send(Ok(())).unwrap();
    while rig.queue.lock().busy {
        std::thread::yield_now();
    }
    rig
}

/// Longer than any test waits.
const NEVER_ENDS: Duration = Duration::from_secs(600);

#[test]
fn lines_of_a_pause_are_written_together() {
    let rig = in_pause(NEVER_ENDS);
    for at in 0..5 {
        rig.queue.push(format!("line {at}\n").as_bytes());
    }
    assert!(rig.arrived.try_recv().is_err(), "a line did not wait");
    let queue = Arc::clone(&rig.queue);
    let flusher = std::thread::spawn(move || queue.flush(TIMEOUT));
    rig.arrived.recv_timeout(TIMEOUT).unwrap();
    rig.turns.send(Ok(())).unwrap();
    assert!(flusher.join().unwrap());
    assert!(rig.arrived.try_recv().is_err(), "more than one write");
    assert_eq!(rig.end(), "first\nline 0\nline 1\nline 2\nline 3\nline 4\n");
}

#[test]
fn a_pause_ends_by_itself() {
    let rig = in_pause(Duration::from_millis(1));
    rig.queue.push(b"second\n");
    rig.arrived.recv_timeout(TIMEOUT).unwrap();
    assert_eq!(rig.end(), "first\nsecond\n");
}

#[test]
fn what_is_urgent_and_a_filling_buffer_end_the_pause() {
    let urgent = in_pause(NEVER_ENDS);
    urgent.queue.push(b"second\n");
    urgent.queue.push_urgent(b"why\n");
    urgent.arrived.recv_timeout(TIMEOUT).unwrap();
    assert_eq!(urgent.end(), "first\nsecond\nwhy\n");

    let filling = in_pause(NEVER_ENDS);
    filling.queue.push(&[b'x'; 100]);
    assert!(filling.arrived.try_recv().is_err(), "a quarter is no hurry");
    filling.queue.push(b"\n");
    filling.arrived.recv_timeout(TIMEOUT).unwrap();
    assert_eq!(filling.end().len(), "first\n".len() + 101);
}
