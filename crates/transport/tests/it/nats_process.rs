//! A real NATS server. Where there is none, tests that need it say so and test nothing.

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use kvasir_tasks::Tasks;
use kvasir_transport::nats::{NatsLink, NatsOptions};

/// A NATS server, for as long as it is held.
pub(crate) struct NatsProcess {
    process: Child,
    pub(crate) port: u16,
    args: Vec<String>,
}

impl NatsProcess {
    /// None, and a line that says so, if there is no such program.
    pub(crate) fn start() -> Option<Self> {
        Self::start_with(&[])
    }

    #[expect(clippy::print_stdout, reason = "what is skipped is said")]
    pub(crate) fn start_with(args: &[&str]) -> Option<Self> {
        let port = free_port();
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        match spawn(port, &args) {
            Ok(process) => Some(Self {
                process,
                port,
                args,
            }),
            Err(error) => {
                println!(
                    "SKIPPED: nats-server cannot be run ({error}): nothing over NATS is tested"
                );
                None
            }
        }
    }

    pub(crate) fn options(&self) -> NatsOptions {
        NatsOptions {
            servers: vec![format!("nats://127.0.0.1:{}", self.port)],
            ..NatsOptions::default()
        }
    }

    /// A connection of its own, as another process has.
    pub(crate) fn link(&self, tasks: &Tasks) -> NatsLink {
        NatsLink::new(&self.options(), tasks).unwrap()
    }

    /// Ends the server at once.
    pub(crate) fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Starts it again, at the same place.
    pub(crate) fn revive(&mut self) {
        self.process = spawn(self.port, &self.args).unwrap();
    }
}

/// A port that nobody listens on, and that no connection of another test is given: a server that is started again finds it free.
fn free_port() -> u16 {
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    loop {
        let taken = TAKEN.fetch_add(1, Ordering::Relaxed);
        let number = std::process::id().wrapping_mul(37).wrapping_add(taken);
        let port = 12_000 + (number % 20_000) as u16;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

fn spawn(port: u16, args: &[String]) -> std::io::Result<Child> {
    let mut command = Command::new("nats-server");
    command.args(["-a", "127.0.0.1", "-p", &port.to_string()]);
    command.args(args);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()
}

impl Drop for NatsProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
