//! The process that takes over, as its parent sees it: how it is started, and how it ended.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use tokio::time::Instant;

use super::TAKE_OVER;

/// One that fails has so long to exit by itself.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// Between two looks whether it has.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The command that this process was started with, again. Its program is looked up anew: it may be another file by now.
/// An error comes with the program's name.
pub(super) fn spawn(stdin: UnixStream) -> Result<Child, (String, io::Error)> {
    let mut words = std::env::args_os();
    let program = words.next().unwrap_or_else(|| "kvasir".into());
    let mut command = Command::new(&program);
    command.args(words).env(TAKE_OVER, "1");
    command.stdin(Stdio::from(OwnedFd::from(stdin)));
    let named = |cause| (program.to_string_lossy().into_owned(), cause);
    command.spawn().map_err(named)
}

/// How a process ended.
pub(super) enum Exit {
    /// It exited, or was killed.
    Status(ExitStatus),
    /// It did not, and was ended.
    Stuck,
    Unknown(io::Error),
}

impl Exit {
    pub(super) fn text(&self) -> String {
        match self {
            Self::Status(status) => status.to_string(),
            Self::Stuck => "it closed its end of the hand-over".to_owned(),
            Self::Unknown(error) => error.to_string(),
        }
    }

    /// Whether it was told to end, or had handed over itself: a frontend exits with 0 then, with 1 if it cut something off.
    pub(super) fn is_orderly(&self) -> bool {
        matches!(self, Self::Status(status) if matches!(status.code(), Some(0 | 1)))
    }
}

/// How a process that is about to end ended.
pub(super) async fn exit_of(child: &mut Child) -> Exit {
    let deadline = Instant::now() + EXIT_TIMEOUT;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Exit::Status(status),
            Ok(None) if Instant::now() < deadline => tokio::time::sleep(LOOK_EVERY).await,
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Exit::Stuck;
            }
            Err(error) => return Exit::Unknown(error),
        }
    }
}
