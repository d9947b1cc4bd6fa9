//! Clients: each takes the next request, behaves as the plan says, and has the answer judged.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvasir_types::Rng;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::judge::{Verdict, judge};
use crate::plan::{Ask, ClientFault, Leaving, rng};
use crate::response::{Response, ResponseReader};
use crate::world::World;

/// An answer has this long to come.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// A client that sent garbage waits this long for what the router says to it.
const GARBAGE_WAIT: Duration = Duration::from_millis(150);
/// A router that is short of descriptors may close connections without an answer, and this long after.
const SCARCE: Duration = Duration::from_secs(8);
/// The receive buffer of a slow reader.
const SLOW_BUFFER: u32 = 4096;
/// Bytes of an answer that a violation shows.
const SHOWN: usize = 600;

/// One client; it ends when there are no requests left.
pub(crate) async fn run(world: Arc<World>, router: SocketAddr) {
    let mut client = Client {
        world,
        router,
        kept: None,
    };
    while let Some(n) = client.world.take() {
        let ask = Ask::new(client.world.seed, n, client.world.has_faults());
        client.request(&ask).await;
    }
}

struct Client {
    world: Arc<World>,
    router: SocketAddr,
    /// A connection whose last answer was read to its end.
    kept: Option<Connection>,
}

/// How much of an answer is read, and how fast.
#[derive(Clone, Copy, Default)]
struct Reading {
    /// Leaves after so many bytes.
    bytes_max: Option<usize>,
    /// Reads so many at a time.
    slow: Option<usize>,
}

impl Client {
    async fn request(&mut self, ask: &Ask) {
        let mut rng = rng(self.world.seed, ask.n, 200);
        match ask.client {
            ClientFault::Pipelined(more) => self.pipelined(ask, more).await,
            ClientFault::Garbage => self.garbage(&mut rng).await,
            ClientFault::HalfBody(part, leaving) => {
                let bytes = message(ask, false);
                let count = bytes.len() as u64 * part / 1000;
                let Some(mut connection) = self.connect(None).await else {
                    return;
                };
                let _ = connection.stream.write_all(&bytes[..count as usize]).await;
                tokio::time::sleep(Duration::from_millis(rng.below(100))).await;
                connection.leave(leaving);
                self.world.count("client: left with half a body");
            }
            ClientFault::SlowReader(bytes) => {
                let slow = Reading {
                    slow: Some(bytes),
                    ..Reading::default()
                };
                let connection = self.connect(Some(SLOW_BUFFER)).await;
                self.whole(ask, connection, &message(ask, false), slow)
                    .await;
            }
            ClientFault::CancelAtByte(bytes, leaving) => {
                let reading = Reading {
                    bytes_max: Some(bytes),
                    ..Reading::default()
                };
                self.cancelled(ask, ANSWER_MAX, reading, leaving).await;
            }
            ClientFault::CancelAfter(time, leaving) => {
                self.cancelled(ask, time, Reading::default(), leaving).await;
            }
            ClientFault::Dribbled => self.dribbled(ask, &mut rng).await,
            ClientFault::HalfClose => self.half_closed(ask).await,
            ClientFault::Chunked | ClientFault::None => {
                let bytes = message(ask, ask.client == ClientFault::Chunked);
                let connection = self.kept_or_new().await;
                self.whole(ask, connection, &bytes, Reading::default())
                    .await;
            }
        }
    }

    /// Sends a request and waits for all of the answer.
    async fn whole(
        &mut self,
        ask: &Ask,
        connection: Option<Connection>,
        bytes: &[u8],
        reading: Reading,
    ) {
        let Some(mut connection) = connection else {
            return;
        };
        let sent = connection.stream.write_all(bytes).await;
        let mut got = connection.read(reading).await;
        // A kept connection may be closed at any moment: then nothing was read, and it is sent again on a new one.
        if connection.used && matches!(&got, Ok(None) | Err(Trouble::Io(_))) {
            self.world.count("client: kept connection was closed");
            let Some(fresh) = self.connect(None).await else {
                return;
            };
            connection = fresh;
            let _ = connection.stream.write_all(bytes).await;
            got = connection.read(reading).await;
            return self.judged(ask, connection, got, false);
        }
        drop(sent);
        self.judged(ask, connection, got, true);
    }

    /// Judges an answer that was waited for, and keeps the connection if it may be used again.
    fn judged(
        &mut self,
        ask: &Ask,
        mut connection: Connection,
        got: Result<Option<Response>, Trouble>,
        once: bool,
    ) {
        let world = Arc::clone(&self.world);
        let tell = |what: &str, more: String| world.violation(what, format!("{ask:?}{more}"));
        let response = match got {
            Ok(Some(response)) => response,
            Ok(None) | Err(Trouble::Io(_)) if world.was_scarce(SCARCE) => {
                return world.count("client: closed without an answer, descriptors scarce");
            }
            Ok(None) => return tell("the connection was closed without an answer", String::new()),
            Err(Trouble::Io(error)) => {
                return tell("an error instead of an answer", error.to_string());
            }
            Err(Trouble::Bad(what)) => return tell(&what, String::new()),
            Err(Trouble::Late) => return tell("no end within a minute", String::new()),
        };
        match judge(ask, &response, true) {
            Ok(verdict) => {
                if verdict == Verdict::Whole && once {
                    world.answered(ask.n);
                }
                world.count(format!("answer: {verdict:?}"));
            }
            Err(what) => {
                let head = format!("{} {:?}", response.status, response.headers);
                let body = String::from_utf8_lossy(&response.body);
                let start = body.len().saturating_sub(SHOWN);
                let start = (start..=body.len()).find(|at| body.is_char_boundary(*at));
                let end = body.get(start.unwrap_or(0)..).unwrap_or_default();
                tell(&what, format!("\n    {head}\n    …{end}"));
            }
        }
        if connection.reader.has_surplus() {
            tell("bytes after the end of the answer", String::new());
        } else if response.whole && !response.closes {
            connection.used = true;
            self.kept = Some(connection);
        }
    }

    /// Leaves after a time or some bytes. What came until then is judged as the beginning that it is.
    async fn cancelled(&mut self, ask: &Ask, time: Duration, reading: Reading, leaving: Leaving) {
        let Some(mut connection) = self.connect(None).await else {
            return;
        };
        let bytes = message(ask, false);
        let exchange = async {
            connection.stream.write_all(&bytes).await.ok()?;
            connection.read(reading).await.ok().flatten()
        };
        let got = tokio::time::timeout(time, exchange).await.ok().flatten();
        let got = got.or_else(|| connection.reader.end());
        let verdict = match got.as_ref().map(|response| judge(ask, response, false)) {
            None => "client: left before the answer".to_owned(),
            Some(Ok(verdict)) => format!("client: left, had {verdict:?}"),
            Some(Err(what)) => {
                return self.world.violation(&what, format!("{ask:?}"));
            }
        };
        self.world.count(verdict);
        connection.leave(leaving);
    }

    /// Sends several requests before it reads. Answers come in their order.
    async fn pipelined(&mut self, first: &Ask, more: u64) {
        let mut asks = vec![first.clone()];
        for n in (0..more).map_while(|_| self.world.take()) {
            asks.push(Ask::new(self.world.seed, n, false));
        }
        let bytes: Vec<u8> = asks.iter().flat_map(|ask| message(ask, false)).collect();
        let Some(mut connection) = self.connect(None).await else {
            return;
        };
        let _ = connection.stream.write_all(&bytes).await;
        let last = asks.len() - 1;
        for (at, ask) in asks.iter().enumerate() {
            let got = connection.read(Reading::default()).await;
            // After an answer that ends the connection the rest is unanswered.
            if at > 0 && matches!(&got, Ok(None) | Err(Trouble::Io(_))) {
                return self.world.count("client: pipelined, connection ended");
            }
            let ends = !matches!(&got, Ok(Some(response)) if response.whole && !response.closes);
            if at == last || ends {
                return self.judged(ask, connection, got, true);
            }
            self.judged_in_line(ask, &got);
        }
    }

    /// Judges an answer that others follow on the same connection.
    fn judged_in_line(&self, ask: &Ask, got: &Result<Option<Response>, Trouble>) {
        let verdict = match got {
            Ok(Some(response)) => judge(ask, response, true),
            _ => Err("no answer".into()),
        };
        match verdict {
            Ok(verdict) => {
                if verdict == Verdict::Whole {
                    self.world.answered(ask.n);
                }
                self.world.count(format!("answer: {verdict:?}"));
            }
            Err(what) => {
                self.world.violation(&what, format!("pipelined {ask:?}"));
            }
        }
    }

    async fn garbage(&mut self, rng: &mut Rng) {
        let Some(mut connection) = self.connect(None).await else {
            return;
        };
        let _ = connection.stream.write_all(&garbage(rng)).await;
        let read = connection.read(Reading::default());
        let got = tokio::time::timeout(GARBAGE_WAIT, read).await;
        let told = match got {
            Ok(Ok(Some(response))) if response.status < 400 => {
                let status = response.status.to_string();
                return self.world.violation("garbage was answered", status);
            }
            Ok(Ok(Some(response))) => format!("client: garbage, {}", response.status),
            Ok(_) => "client: garbage, closed".into(),
            Err(_) => "client: garbage, no answer yet".into(),
        };
        self.world.count(told);
        connection.leave(Leaving::Reset);
    }

    async fn dribbled(&mut self, ask: &Ask, rng: &mut Rng) {
        let bytes = message(ask, rng.below(2) == 0);
        let Some(mut connection) = self.connect(None).await else {
            return;
        };
        let longest = 1 + bytes.len() as u64 / 15;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let count = (1 + rng.below(longest) as usize).min(rest.len());
            if connection.stream.write_all(&rest[..count]).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(rng.below(2))).await;
            rest = &rest[count..];
        }
        let got = connection.read(Reading::default()).await;
        self.judged(ask, connection, got, true);
    }

    /// Ends its side after the request. The router may take that for leaving, or answer.
    async fn half_closed(&mut self, ask: &Ask) {
        let Some(mut connection) = self.connect(None).await else {
            return;
        };
        let _ = connection.stream.write_all(&message(ask, false)).await;
        let _ = connection.stream.shutdown().await;
        match connection.read(Reading::default()).await {
            Ok(Some(response)) => match judge(ask, &response, false) {
                Ok(verdict) => self
                    .world
                    .count(format!("client: half closed, {verdict:?}")),
                Err(what) => {
                    self.world.violation(&what, format!("{ask:?}"));
                }
            },
            _ => self.world.count("client: half closed, no answer"),
        }
    }

    async fn kept_or_new(&mut self) -> Option<Connection> {
        match self.kept.take() {
            Some(kept) => Some(kept),
            None => self.connect(None).await,
        }
    }

    async fn connect(&self, buffer: Option<u32>) -> Option<Connection> {
        match Connection::open(self.router, buffer).await {
            Ok(connection) => Some(connection),
            Err(error) => {
                match self.world.was_scarce(SCARCE) {
                    true => self
                        .world
                        .count("client: cannot connect, descriptors scarce"),
                    false => self
                        .world
                        .violation("a client cannot connect", error.to_string()),
                }
                None
            }
        }
    }
}

/// A request as bytes, its body in one piece or in chunks.
pub(crate) fn message(ask: &Ask, chunked: bool) -> Vec<u8> {
    let body = ask.body();
    let path = if ask.chat {
        "chat/completions"
    } else {
        "completions"
    };
    let framing = match chunked {
        true => "transfer-encoding: chunked".to_owned(),
        false => format!("content-length: {}", body.len()),
    };
    let n = ask.n;
    let mut bytes = format!("POST /v1/{path} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\nx-request-id: r{n}\r\n{framing}\r\n\r\n").into_bytes();
    if !chunked {
        bytes.extend(body);
        return bytes;
    }
    for part in body.chunks(1 + body.len() / 3) {
        bytes.extend(format!("{:x}\r\n", part.len()).into_bytes());
        bytes.extend_from_slice(part);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes.extend_from_slice(b"0\r\n\r\n");
    bytes
}

fn garbage(rng: &mut Rng) -> Vec<u8> {
    const POST: &str =
        "POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n";
    match rng.below(9) {
        0 => (0..1 + rng.below(400))
            .map(|_| rng.next_u64() as u8)
            .collect(),
        1 => b"GET / HTTP/9.9\r\n\r\n".to_vec(),
        2 => format!("{POST}content-length: -1\r\n\r\n").into_bytes(),
        3 => format!("{POST}content-length: 5\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")
            .into_bytes(),
        4 => format!("{POST}content-length: 9\r\n\r\n{{\"model\":").into_bytes(),
        5 => format!("{POST}content-length: 30\r\n\r\n{{\"model\":\"nobody\",\"messages\":1}}")
            .into_bytes(),
        6 => b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
        7 => format!("{POST}x: {}\r\n\r\n", "y".repeat(300_000)).into_bytes(),
        _ => format!("{POST}content-length: 3\r\ncontent-length: 4\r\n\r\nabcd").into_bytes(),
    }
}

/// Why there is no answer.
#[derive(Debug)]
enum Trouble {
    Io(io::Error),
    /// It is not HTTP.
    Bad(String),
    /// It took too long.
    Late,
}

struct Connection {
    stream: TcpStream,
    reader: ResponseReader,
    /// It had an answer already.
    used: bool,
}

impl Connection {
    async fn open(router: SocketAddr, buffer: Option<u32>) -> io::Result<Self> {
        let socket = TcpSocket::new_v4()?;
        if let Some(bytes) = buffer {
            socket.set_recv_buffer_size(bytes)?;
        }
        let connect = tokio::time::timeout(ANSWER_MAX, socket.connect(router));
        let stream = connect.await.map_err(|_| io::ErrorKind::TimedOut)??;
        let _ = stream.set_nodelay(true);
        Ok(Self {
            stream,
            reader: ResponseReader::default(),
            used: false,
        })
    }

    /// The next response, as far as it is wanted. `None`: the connection ended before it began.
    async fn read(&mut self, reading: Reading) -> Result<Option<Response>, Trouble> {
        match tokio::time::timeout(ANSWER_MAX, self.read_on(reading)).await {
            Ok(got) => got,
            Err(_) => Err(Trouble::Late),
        }
    }

    async fn read_on(&mut self, reading: Reading) -> Result<Option<Response>, Trouble> {
        let mut bytes = vec![0; reading.slow.unwrap_or(16 << 10)];
        let mut count = 0;
        loop {
            if let Some(response) = self.reader.next().map_err(Trouble::Bad)? {
                return Ok(Some(response));
            }
            if reading.bytes_max.is_some_and(|max| count >= max) {
                return Ok(self.reader.end());
            }
            match self.stream.read(&mut bytes).await {
                Ok(0) => return Ok(self.reader.end()),
                Ok(more) => {
                    count += more;
                    self.reader.feed(&bytes[..more]);
                }
                // What came before a reset is judged.
                Err(error) => return self.reader.end().map(Some).ok_or(Trouble::Io(error)),
            }
            if reading.slow.is_some() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }

    fn leave(self, leaving: Leaving) {
        if leaving == Leaving::Reset {
            let _ = SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
        }
    }
}
