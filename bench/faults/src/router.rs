//! The program under test: the real binary, with few descriptors, its log read line by line.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;

use crate::world::World;

/// It has this long to listen.
const START_MAX: Duration = Duration::from_secs(60);
/// A page has this long to come.
const PAGE_MAX: Duration = Duration::from_secs(20);

/// What the log says beside the ends of requests.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) lines: u64,
    pub(crate) bytes: u64,
    pub(crate) warnings: u64,
    pub(crate) errors: u64,
    /// Lines of a panic.
    pub(crate) panics: Vec<String>,
}

/// The running router.
pub(crate) struct Router {
    child: Child,
    pub(crate) address: SocketAddr,
    log: Arc<Mutex<Log>>,
    reader: Option<JoinHandle<()>>,
}

impl Router {
    /// Starts `binary` before the engines, with so many descriptors; its log goes to `file`, too.
    pub(crate) fn start(
        binary: &Path,
        engines: &[SocketAddr],
        descriptors: u64,
        file: &Path,
        world: &Arc<World>,
    ) -> io::Result<Self> {
        let mut command = Command::new("sh");
        command
            .args(["-c", "ulimit -n \"$0\" && exec \"$@\""])
            .arg(descriptors.to_string())
            .arg(binary)
            .args(["frontend", "--http-host", "127.0.0.1", "--http-port", "0"])
            .args([
                "--migration-limit",
                "3",
                "--graceful-shutdown-grace-period-secs",
                "0",
            ]);
        for engine in engines {
            command.args(["--worker", &format!("http://{engine}")]);
        }
        let (reader, writer) = io::pipe()?;
        command
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer);
        let child = command.spawn()?;
        drop(command);
        let log = Arc::new(Mutex::new(Log::default()));
        let (found, address) = mpsc::channel();
        let (kept, seen) = (Arc::clone(&log), Arc::clone(world));
        let mut copy = io::BufWriter::new(std::fs::File::create(file)?);
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(reader).lines().map_while(Result::ok) {
                let _ = writeln!(copy, "{line}");
                if let Some(address) = address_in(&line) {
                    let _ = found.send(address);
                }
                read_line(&line, &kept, &seen);
            }
        });
        let router = |address| Self {
            child,
            address,
            log,
            reader: Some(reader),
        };
        match address.recv_timeout(START_MAX) {
            Ok(address) => Ok(router(address)),
            Err(_) => Err(io::Error::other(format!(
                "the router does not listen; see {}",
                file.display()
            ))),
        }
    }

    /// One of its pages.
    pub(crate) fn page(&self, path: &str) -> io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&self.address, PAGE_MAX)?;
        stream.set_read_timeout(Some(PAGE_MAX))?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: router\r\nconnection: close\r\n\r\n"
        )?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let (_, body) = text.split_once("\r\n\r\n").unwrap_or_default();
        Ok(body.to_owned())
    }

    /// Sum of a metric over its labels.
    pub(crate) fn metric(page: &str, name: &str) -> f64 {
        let values = page.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let value = rest
                .starts_with(['{', ' '])
                .then(|| rest.rsplit(' ').next())??;
            value.parse::<f64>().ok()
        });
        values.sum()
    }

    /// Workers that serve and are neither down nor draining, and the requests booked on all.
    pub(crate) fn workers(&self) -> io::Result<(usize, u64)> {
        let page: Value = serde_json::from_str(&self.page("/workers")?)?;
        let rows = page["workers"].as_array().cloned().unwrap_or_default();
        let well = rows.iter().filter(|row| {
            row["state"] == "serving" && row["down"] == false && row["draining"] == false
        });
        let ranks = rows
            .iter()
            .filter_map(|row| row["ranks"].as_array())
            .flatten();
        let parts = [
            "active_requests",
            "active_decode_blocks",
            "active_prefill_tokens",
        ];
        let booked = ranks.flat_map(|rank| parts.map(|part| rank[part].as_u64().unwrap_or(0)));
        Ok((well.count(), booked.sum()))
    }

    /// Resident memory in KiB, and open descriptors.
    pub(crate) fn usage(&self) -> io::Result<(u64, u64)> {
        let process = format!("/proc/{}", self.child.id());
        let status = std::fs::read_to_string(format!("{process}/status"))?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = resident.and_then(|text| text.split_whitespace().next()?.parse().ok());
        let descriptors = std::fs::read_dir(format!("{process}/fd"))?.count();
        Ok((kib.unwrap_or(0), descriptors as u64))
    }

    /// Asks it to end; its exit code, and its log.
    pub(crate) fn stop(mut self) -> io::Result<(Option<i32>, Log)> {
        let asked = Command::new("kill")
            .arg(self.child.id().to_string())
            .status()?;
        if !asked.success() {
            self.child.kill()?;
        }
        let code = self.child.wait()?.code();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((code, std::mem::take(&mut log)))
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

/// The address that it says it listens on.
fn address_in(line: &str) -> Option<SocketAddr> {
    let (_, rest) = line.split_once("address=")?;
    rest.split_whitespace().next()?.parse().ok()
}

fn read_line(line: &str, log: &Mutex<Log>, world: &World) {
    let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
    log.lines += 1;
    log.bytes += line.len() as u64 + 1;
    log.warnings += u64::from(line.contains(" WARN "));
    log.errors += u64::from(line.contains(" ERROR "));
    if line.contains("panicked") {
        log.panics.push(line.to_owned());
    }
    let Some((_, rest)) = line.split_once("client_request=\"r") else {
        return;
    };
    let Some((n, _)) = rest.split_once('"') else {
        return;
    };
    let ends = ["request done", "request failed", "client left"];
    if let Ok(n) = n.parse()
        && ends.iter().any(|end| line.contains(end))
    {
        world.ended(n);
    }
}
