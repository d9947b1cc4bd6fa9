//! An engine that is under our control: it serves the model, and fails as the plan or its fate says.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::plan::{ATTEMPTS_MAX, Ask, EngineFault, MODEL, answer, engine_fault, rng};
use crate::script::{Job, Step};
use crate::world::World;

/// Bodies longer than this are refused before they are read, now and then.
const EARLY_BYTES: usize = 10_000;
const EARLY: &[u8] = b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\nconnection: close\r\n\r\nbusy";

/// How an engine is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Condition {
    /// It takes connections.
    pub(crate) listens: bool,
    /// Times that it was killed: all connections of before are reset.
    pub(crate) kills: u64,
    /// Times that it closed its idle connections.
    pub(crate) drains: u64,
    /// It says nothing.
    pub(crate) stalled: bool,
    /// It answers requests with this status.
    pub(crate) sick: Option<u16>,
    /// Its core is dead: streams end with an error event, requests get 500 at once, it is not well.
    pub(crate) core_dead: bool,
}

/// One engine.
pub(crate) struct Engine {
    pub(crate) address: SocketAddr,
    condition: watch::Sender<Condition>,
    /// Requests that it got.
    turns: AtomicU64,
    world: Arc<World>,
}

impl Engine {
    /// An engine at an address of its own: while it is down nobody else gets its port.
    pub(crate) async fn start(place: u8, world: Arc<World>) -> io::Result<Arc<Self>> {
        let listener =
            TcpListener::bind((std::net::Ipv4Addr::new(127, 0, 7, 1 + place), 0)).await?;
        let condition = Condition {
            listens: true,
            ..Condition::default()
        };
        let engine = Arc::new(Self {
            address: listener.local_addr()?,
            condition: watch::Sender::new(condition),
            turns: AtomicU64::new(0),
            world,
        });
        tokio::spawn(Arc::clone(&engine).listen(Some(listener)));
        Ok(engine)
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Condition)) {
        self.condition.send_modify(change);
    }

    pub(crate) fn condition(&self) -> Condition {
        *self.condition.borrow()
    }

    async fn listen(self: Arc<Self>, mut listener: Option<TcpListener>) {
        let mut follows = self.condition.subscribe();
        loop {
            if !follows.borrow_and_update().listens {
                listener = None;
            } else if listener.is_none() {
                listener = TcpListener::bind(self.address).await.ok();
            }
            let Some(listener) = &listener else {
                let pause = tokio::time::sleep(Duration::from_millis(20));
                tokio::select! { _ = follows.changed() => {}, () = pause => {} }
                continue;
            };
            tokio::select! {
                _ = follows.changed() => {}
                accepted = listener.accept() => {
                    if let Ok((stream, _)) = accepted {
                        tokio::spawn(Arc::clone(&self).connection(stream));
                    }
                }
            }
        }
    }

    async fn connection(self: Arc<Self>, stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        let mut follows = self.condition.subscribe();
        let born = follows.borrow_and_update().kills;
        let mut peer = Peer {
            stream,
            inbox: Vec::new(),
        };
        let reset = tokio::select! {
            biased;
            _ = follows.wait_for(|now| now.kills != born) => true,
            reset = self.serve(&mut peer) => reset,
        };
        if reset {
            let _ = SockRef::from(&peer.stream).set_linger(Some(Duration::ZERO));
        }
    }

    /// Answers requests; whether the connection is to be reset.
    async fn serve(&self, peer: &mut Peer) -> bool {
        let mut follows = self.condition.subscribe();
        let born = follows.borrow_and_update().drains;
        loop {
            let head = tokio::select! {
                _ = follows.wait_for(|now| now.drains != born) => return false,
                head = peer.head() => head,
            };
            let Some(head) = head else { return false };
            let end = match head.path.as_str() {
                "/v1/chat/completions" | "/v1/completions" => self.generate(peer, &head).await,
                path => self.page(peer, path, head.length).await,
            };
            match end {
                Ok(End::Kept) => {}
                Ok(End::Closed) | Err(_) => return false,
                Ok(End::Reset) => return true,
            }
            if follows.borrow().drains != born {
                return false;
            }
        }
    }

    async fn page(&self, peer: &mut Peer, path: &str, length: usize) -> io::Result<End> {
        peer.body(length).await?;
        let models = format!(
            r#"{{"object":"list","data":[{{"id":"{MODEL}","object":"model","max_model_len":100000}}]}}"#
        );
        let (status, body) = match path {
            "/v1/models" => (200, models.as_str()),
            "/health" if self.condition().core_dead => (503, ""),
            "/health" => (200, ""),
            _ => (404, "{}"),
        };
        let length = body.len();
        let answer = format!(
            "HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        self.write(peer, answer.as_bytes()).await?;
        Ok(End::Kept)
    }

    async fn generate(&self, peer: &mut Peer, head: &Head) -> io::Result<End> {
        let world = &self.world;
        let turn = self.turns.fetch_add(1, Ordering::Relaxed);
        if head.length > EARLY_BYTES && turn.is_multiple_of(8) && world.has_faults() {
            world.count("engine: EarlyStatus");
            peer.stream.write_all(EARLY).await?;
            return Ok(End::Closed);
        }
        let body = peer.body(head.length).await?;
        let Some(job) = self.job(head, &body) else {
            let probe = plain_answer();
            self.write(peer, &probe).await?;
            world.count("engine: a request of the router's own");
            return Ok(End::Kept);
        };
        let attempt = world.attempt(job.n).unwrap_or(0);
        if attempt >= ATTEMPTS_MAX {
            world.violation("too many attempts", format!("request {}, {attempt}", job.n));
        }
        let now = self.condition();
        if now.core_dead || now.sick.is_some() {
            let status = now.sick.unwrap_or(500);
            self.write(peer, &job.refusal(status)).await?;
            return Ok(End::Kept);
        }
        let ask = Ask::new(world.seed, job.n, true);
        let fault = match world.has_faults() {
            true => engine_fault(world.seed, &ask, attempt),
            false => EngineFault::None,
        };
        world.count(format!("engine: {}", name(fault)));
        let mut rng = rng(world.seed, job.n, 100 + u64::from(attempt));
        let steps = job.script(fault, &mut rng);
        self.play(peer, &job, steps).await
    }

    /// What a body asks for; `None` if it is none of the clients'.
    fn job(&self, head: &Head, body: &[u8]) -> Option<Job> {
        let world = &self.world;
        let Ok(body) = serde_json::from_slice::<Value>(body) else {
            let body = String::from_utf8_lossy(body);
            world.violation(
                "an engine got a body that is not JSON",
                format!("{body:.300}"),
            );
            return None;
        };
        let chat = head.path.contains("chat");
        let (prompt, said) = match chat {
            true => {
                let text = |message: &Value| message["content"].as_str().map(str::to_owned);
                let messages = body["messages"].as_array()?;
                let said = messages.get(1).and_then(text).unwrap_or_default();
                (text(messages.first()?)?, said)
            }
            false => {
                let whole = body["prompt"].as_str()?;
                let (prompt, said) = whole.split_at(whole.rfind('|')? + 1);
                (prompt.to_owned(), said.to_owned())
            }
        };
        let n: u64 = prompt.strip_prefix('q')?.split_once('|')?.0.parse().ok()?;
        let ask = Ask::new(world.seed, n, true);
        let from = said.matches(' ').count() as u32;
        let tokens = body["max_tokens"].as_u64().unwrap_or(0) as u32;
        if prompt != ask.prompt() {
            world.violation("a prompt came changed", format!("request {n}"));
        }
        if said != answer(&prompt, n, from) {
            world.violation(
                "continued from text that it did not have",
                format!("request {n}: {said:.300}"),
            );
        }
        if from + tokens != ask.tokens {
            let wanted = ask.tokens;
            world.violation(
                "continued for the wrong number of tokens",
                format!("request {n}: {tokens} after {from} of {wanted}"),
            );
        }
        Some(Job {
            n,
            chat,
            stream: body["stream"].as_bool().unwrap_or(false),
            usage: body["stream_options"]["include_usage"]
                .as_bool()
                .unwrap_or(false),
            prompt,
            from,
            to: from + tokens,
            echo: head.request_id.clone(),
        })
    }

    async fn play(&self, peer: &mut Peer, job: &Job, steps: Vec<Step>) -> io::Result<End> {
        let mut after_event = false;
        for step in steps {
            if job.stream && self.condition().core_dead {
                // In the midst of an event there is nothing more to say.
                if after_event {
                    self.write(peer, &job.error_end()).await?;
                }
                return Ok(End::Closed);
            }
            match step {
                Step::Write(bytes) => {
                    self.write(peer, &bytes).await?;
                    after_event = bytes.ends_with(b"\n\n\r\n");
                }
                Step::Sleep(time) if time.is_zero() => tokio::task::yield_now().await,
                Step::Sleep(time) => tokio::time::sleep(time).await,
                Step::Hang => {
                    peer.left().await;
                    return Ok(End::Closed);
                }
                Step::Close => return Ok(End::Closed),
                Step::Reset => return Ok(End::Reset),
                Step::Idle(time, bytes) => {
                    if tokio::time::timeout(time, peer.fill()).await.is_err() {
                        peer.stream.write_all(bytes).await?;
                        return Ok(End::Closed);
                    }
                }
            }
        }
        Ok(End::Kept)
    }

    /// Writes, unless the engine is stalled: then when that is over.
    async fn write(&self, peer: &mut Peer, bytes: &[u8]) -> io::Result<()> {
        if self.condition().stalled {
            let mut follows = self.condition.subscribe();
            let _ = follows.wait_for(|now| !now.stalled).await;
        }
        peer.stream.write_all(bytes).await
    }
}

fn name(fault: EngineFault) -> String {
    let text = format!("{fault:?}");
    text.split('(').next().unwrap_or_default().to_owned()
}

fn plain_answer() -> Vec<u8> {
    let body = format!(
        r#"{{"id":"p","object":"text_completion","created":1,"model":"{MODEL}","choices":[{{"index":0,"text":"a","message":{{"role":"assistant","content":"a"}},"finish_reason":"length"}}],"usage":{{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}}}"#
    );
    let length = body.len();
    format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
}

/// What becomes of a connection after an answer.
#[derive(Debug, PartialEq)]
enum End {
    Kept,
    Closed,
    Reset,
}

struct Head {
    path: String,
    length: usize,
    request_id: Option<String>,
}

/// The router's end of a connection.
struct Peer {
    stream: TcpStream,
    inbox: Vec<u8>,
}

impl Peer {
    /// Reads more; whether more came.
    async fn fill(&mut self) -> bool {
        matches!(self.stream.read_buf(&mut self.inbox).await, Ok(1..))
    }

    /// Waits until the router leaves.
    async fn left(&mut self) {
        let mut bytes = [0; 1024];
        while let Ok(1..) = self.stream.read(&mut bytes).await {}
    }

    async fn head(&mut self) -> Option<Head> {
        loop {
            let mut fields = [httparse::EMPTY_HEADER; 64];
            let mut head = httparse::Request::new(&mut fields);
            if let httparse::Status::Complete(end) = head.parse(&self.inbox).ok()? {
                let field = |name: &str| {
                    let field = head
                        .headers
                        .iter()
                        .find(|f| f.name.eq_ignore_ascii_case(name))?;
                    Some(String::from_utf8_lossy(field.value).into_owned())
                };
                let head = Head {
                    path: head.path?.to_owned(),
                    length: field("content-length")
                        .and_then(|l| l.parse().ok())
                        .unwrap_or(0),
                    request_id: field("x-request-id"),
                };
                self.inbox.drain(..end);
                return Some(head);
            }
            if !self.fill().await {
                return None;
            }
        }
    }

    async fn body(&mut self, length: usize) -> io::Result<Vec<u8>> {
        while self.inbox.len() < length {
            if !self.fill().await {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(self.inbox.drain(..length).collect())
    }
}
