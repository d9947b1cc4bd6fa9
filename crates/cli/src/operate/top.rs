//! `kvasir top`: looks at a running frontend again and again, on a screen of its own.
//!
//! What always holds: the terminal is left as it was found, whatever ends the view; where the output is no
//! terminal there is one frame and no escape code. `q` leaves, as Ctrl-C does.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use kvasir_config::{Run, keys};
use kvasir_telemetry::Clock;
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr,
};
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};

use super::client::Client;
use super::print;
use super::view::{Counts, Look};
use super::workers;
use crate::wiring::Failure;

/// Where the size of a terminal cannot be found out.
const DEFAULT_SIZE: (usize, usize) = (80, 24);
/// A screen of its own, without a cursor; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// To the upper left corner, before a frame; to the end of the line and of the screen is cleared as it is drawn.
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";
/// Between two looks at the keyboard.
const KEYS_EVERY: Duration = Duration::from_millis(50);
/// How to leave.
const HINT: &str = "  q leaves";

/// Watches until a signal; once, where nobody watches.
pub(super) async fn run(client: &Client, run: &Run) -> Result<(), Failure> {
    let clock = Clock::new();
    let terminal = std::io::stdout().is_terminal();
    let first = look(client, clock).await?;
    if run.settings.get(keys::JSON) {
        print(&format!("{:#}\n", first.to_json()));
        return Ok(());
    }
    if run.settings.get(keys::ONCE) || !terminal {
        let width = if terminal { size().0 } else { usize::MAX };
        print(&(first.frame(client.url(), None, width).join("\n") + "\n"));
        return Ok(());
    }
    watch(client, clock, first, run.settings.get(keys::INTERVAL)).await
}

/// Asks everything that a frame shows.
async fn look(client: &Client, clock: Clock) -> Result<Look, Failure> {
    let workers = workers::list(client).await?;
    let decisions = client.get("/decisions").await.unwrap_or(Value::Null);
    let shadows = client.get("/shadow").await.unwrap_or(Value::Null);
    let counts = client.page("/metrics").await.ok();
    Ok(Look {
        workers,
        decisions,
        shadows,
        counts: counts.map(|page| Counts::read(&page)),
        unix_ms: clock.unix_millis(clock.now()),
    })
}

async fn watch(client: &Client, clock: Clock, first: Look, every: Duration) -> Result<(), Failure> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    let mut resized = signal(SignalKind::window_change())?;
    let screen = Screen::enter();
    let keys = Keys::listen();
    let (mut before, mut now, mut trouble) = (None, first, None);
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ticks.tick().await;
    loop {
        screen.draw(&frame(client, &now, before.as_ref(), trouble.as_deref()));
        let next = async {
            ticks.tick().await;
            look(client, clock).await
        };
        let looked = tokio::select! {
            looked = next => looked,
            () = keys.quit() => return Ok(()),
            _ = resized.recv() => continue,
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
            _ = hang_up.recv() => return Ok(()),
        };
        match looked {
            Ok(look) => {
                before = Some(std::mem::replace(&mut now, look));
                trouble = None;
            }
            // It may come back: the last frame stays, with a word about it.
            Err(error) => trouble = Some(error.to_string()),
        }
    }
}

fn frame(client: &Client, now: &Look, before: Option<&Look>, trouble: Option<&str>) -> Vec<String> {
    let (width, height) = size();
    let mut lines = now.frame(client.url(), before, width);
    if let Some(head) = lines.first_mut()
        && head.chars().count() + HINT.len() <= width
    {
        head.push_str(HINT);
    }
    if let Some(trouble) = trouble {
        let line = format!("! {trouble}");
        lines.insert(1, line.chars().take(width).collect());
    }
    lines.truncate(height);
    lines
}

/// Columns and lines of the terminal.
fn size() -> (usize, usize) {
    match rustix::termios::tcgetwinsize(std::io::stdout()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col.into(), size.ws_row.into()),
        _ => DEFAULT_SIZE,
    }
}

/// Keys that are pressed while the view is there; none where standard input is no terminal.
struct Keys {
    /// How the terminal was before.
    before: Option<Termios>,
}

impl Keys {
    /// Lets keys come one by one and unseen; signals stay what they are.
    fn listen() -> Self {
        let Ok(before) = tcgetattr(std::io::stdin()) else {
            return Self { before: None };
        };
        let mut each = before.clone();
        each.local_modes
            .remove(LocalModes::ICANON | LocalModes::ECHO);
        // A read brings what is there and does not wait.
        each.special_codes[SpecialCodeIndex::VMIN] = 0;
        each.special_codes[SpecialCodeIndex::VTIME] = 0;
        let set = tcsetattr(std::io::stdin(), OptionalActions::Now, &each);
        Self {
            before: set.is_ok().then_some(before),
        }
    }

    /// Waits for `q`.
    async fn quit(&self) {
        if self.before.is_none() {
            return std::future::pending().await;
        }
        let mut keys = [0; 64];
        loop {
            let count = rustix::io::read(std::io::stdin(), &mut keys).unwrap_or(0);
            if keys.iter().take(count).any(|key| b"qQ".contains(key)) {
                return;
            }
            tokio::time::sleep(KEYS_EVERY).await;
        }
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, before);
        }
    }
}

/// The terminal while the view has it.
struct Screen;

impl Screen {
    fn enter() -> Self {
        print(ENTER);
        Self
    }

    fn draw(&self, lines: &[String]) {
        let mut out = String::from(HOME);
        for (at, line) in lines.iter().enumerate() {
            if at > 0 {
                out.push_str("\r\n");
            }
            out.push_str(line);
            out.push_str(CLEAR_LINE);
        }
        out.push_str(CLEAR_BELOW);
        print(&out);
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let mut out = std::io::stdout();
        let _ = out.write_all(LEAVE.as_bytes()).and_then(|()| out.flush());
    }
}
