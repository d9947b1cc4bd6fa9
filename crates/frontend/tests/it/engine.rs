//! Engines that do as they are told: raw bytes, pauses, deaths.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvasir_tasks::Tasks;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;

/// A write that takes this long is held up by its reader.
const HELD_UP: Duration = Duration::from_millis(300);

/// What an engine does for one request.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Sends bytes.
    Write(Vec<u8>),
    /// Waits for a permit of [`Stage::gate`].
    Gate,
    /// Waits so long.
    Pause(Duration),
    /// Waits until the peer hangs up.
    Hang,
    /// Sends this again and again until the peer is slow to take it.
    Flood(Vec<u8>),
    /// Closes the connection.
    Close,
    /// Closes the connection with a reset.
    Reset,
}

/// A request as an engine got it.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) port: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Seen {
    /// All values of a header, in order.
    pub(crate) fn header(&self, name: &str) -> Vec<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines
            .filter(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, v)| v)
            .collect()
    }
}

/// What several engines play together: the first request that reaches any of them gets the first script.
pub(crate) struct Stage {
    scripts: Mutex<VecDeque<Vec<Step>>>,
    /// Whether `/tokenize` is played too; otherwise engines do not have it.
    pub(crate) tokenizes: AtomicBool,
    seen: Mutex<Vec<Seen>>,
    /// What engines answer to `/metrics`; without it they do not know the route.
    pub(crate) metrics: Mutex<Option<String>>,
    /// Other pages that engines have.
    pub(crate) pages: Mutex<BTreeMap<&'static str, String>>,
    /// What the engine at a port keeps, beside the pages of all.
    pub(crate) kept: Mutex<BTreeMap<(u16, &'static str), &'static str>>,
    /// What the engine at a port answers to `/health`; without it, that route is unknown.
    pub(crate) health: Mutex<BTreeMap<u16, &'static [u8]>>,
    /// What the engine at a port answers to every request, instead of a script.
    pub(crate) always: Mutex<BTreeMap<u16, &'static [u8]>>,
    /// Ports of engines that say nothing to whatever comes.
    frozen: Mutex<BTreeSet<u16>>,
    /// Questions about health until now.
    pub(crate) checked: AtomicUsize,
    /// What the engine at a port answers when it is asked for one token; [`ok`] without it.
    pub(crate) tokens: Mutex<BTreeMap<u16, &'static [u8]>>,
    /// Questions for one token until now.
    pub(crate) asked_token: AtomicUsize,
    /// Lets [`Step::Gate`] pass.
    pub(crate) gate: Semaphore,
    /// Connections that are open now.
    open: AtomicUsize,
    /// Peers that hung up on a [`Step::Hang`] or [`Step::Flood`].
    pub(crate) hung_up: Semaphore,
    /// Bytes that a [`Step::Flood`] could send before it was held up.
    pub(crate) flooded: AtomicUsize,
    /// A [`Step::Flood`] was held up.
    pub(crate) held_up: Notify,
}

impl Stage {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            scripts: Mutex::default(),
            tokenizes: AtomicBool::new(false),
            seen: Mutex::default(),
            metrics: Mutex::default(),
            pages: Mutex::default(),
            kept: Mutex::default(),
            health: Mutex::default(),
            always: Mutex::default(),
            frozen: Mutex::default(),
            checked: AtomicUsize::new(0),
            tokens: Mutex::default(),
            asked_token: AtomicUsize::new(0),
            gate: Semaphore::new(0),
            open: AtomicUsize::new(0),
            hung_up: Semaphore::new(0),
            flooded: AtomicUsize::new(0),
            held_up: Notify::new(),
        })
    }

    /// The next request is answered by these steps; without a script it is answered [`ok`].
    pub(crate) fn play(&self, script: Vec<Step>) {
        self.scripts.lock().unwrap().push_back(script);
    }

    /// Every request until now.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// From now on the engine at this port says nothing to whatever comes.
    pub(crate) fn freeze(&self, port: u16) {
        self.frozen.lock().unwrap().insert(port);
    }

    /// All engines speak again.
    pub(crate) fn thaw(&self) {
        self.frozen.lock().unwrap().clear();
    }

    /// Connections that are open now.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }

    fn metrics_answer(&self) -> Vec<u8> {
        let page = self.metrics.lock().unwrap();
        page.as_deref().map_or(NOT_FOUND.to_vec(), unary)
    }

    fn page(&self, port: u16, path: &str) -> Vec<u8> {
        if let Some(kept) = self.kept.lock().unwrap().get(&(port, path)) {
            return unary(kept);
        }
        let pages = self.pages.lock().unwrap();
        let page = pages.get(path.split('?').next().unwrap_or_default());
        page.map_or(NOT_FOUND.to_vec(), |page| unary(page))
    }

    /// The model `m`, unless there is another page.
    fn models(&self) -> Vec<u8> {
        let pages = self.pages.lock().unwrap();
        unary(pages.get("/v1/models").map_or(MODELS, String::as_str))
    }

    fn health_answer(&self, port: u16) -> Vec<u8> {
        self.checked.fetch_add(1, Ordering::SeqCst);
        let health = self.health.lock().unwrap();
        health.get(&port).copied().unwrap_or(NOT_FOUND).to_vec()
    }

    fn token_answer(&self, port: u16) -> Vec<u8> {
        self.asked_token.fetch_add(1, Ordering::SeqCst);
        let tokens = self.tokens.lock().unwrap();
        let answer = tokens.get(&port).map(|answer| answer.to_vec());
        answer.unwrap_or_else(|| unary(ANSWER))
    }

    fn next(&self, port: u16) -> Vec<Step> {
        if let Some(answer) = self.always.lock().unwrap().get(&port) {
            return vec![Step::Write(answer.to_vec())];
        }
        let next = self.scripts.lock().unwrap().pop_front();
        next.unwrap_or_else(|| vec![ok()])
    }
}

/// One listening engine; dropped, it is dead.
pub(crate) struct Engine {
    pub(crate) address: SocketAddr,
    tasks: Tasks,
    open: Arc<AtomicUsize>,
    draining: CancellationToken,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

impl Engine {
    pub(crate) async fn start(stage: &Arc<Stage>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self::on(listener, stage)
    }

    /// An engine at an address that another had before.
    pub(crate) async fn restart(address: SocketAddr, stage: &Arc<Stage>) -> Self {
        Self::on(TcpListener::bind(address).await.unwrap(), stage)
    }

    fn on(listener: TcpListener, stage: &Arc<Stage>) -> Self {
        let address = listener.local_addr().unwrap();
        let (tasks, stage) = (Tasks::new(), Arc::clone(stage));
        let spawner = tasks.clone();
        let open = Arc::new(AtomicUsize::new(0));
        let here = Arc::clone(&open);
        let draining = CancellationToken::new();
        let drains = draining.clone();
        tasks.spawn(async move {
            let accept = async || listener.accept().await.ok();
            while let Some(Some((stream, _))) = drains.run_until_cancelled(accept()).await {
                let (stage, drains) = (Arc::clone(&stage), drains.clone());
                let guard = Open::enter(&stage, &here);
                spawner.spawn(async move {
                    let _guard = guard;
                    serve(stream, address.port(), &stage, &drains).await;
                });
            }
        });
        Self {
            address,
            tasks,
            open,
            draining,
        }
    }

    /// It closes its listener and its idle connections, and goes on with what it has.
    pub(crate) fn drain(&self) {
        self.draining.cancel();
    }

    /// Connections to it that are open now.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }

    /// As `--worker` takes it.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

/// One open connection.
struct Open {
    stage: Arc<Stage>,
    engine: Arc<AtomicUsize>,
}

impl Open {
    fn enter(stage: &Arc<Stage>, engine: &Arc<AtomicUsize>) -> Self {
        stage.open.fetch_add(1, Ordering::SeqCst);
        engine.fetch_add(1, Ordering::SeqCst);
        Self {
            stage: Arc::clone(stage),
            engine: Arc::clone(engine),
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.stage.open.fetch_sub(1, Ordering::SeqCst);
        self.engine.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn serve(mut stream: TcpStream, port: u16, stage: &Stage, drains: &CancellationToken) {
    stream.set_nodelay(true).unwrap();
    let mut buffer = Vec::new();
    loop {
        let request = read_request(&mut stream, &mut buffer);
        let Some(Some((head, body))) = drains.run_until_cancelled(request).await else {
            return;
        };
        if stage.frozen.lock().unwrap().contains(&port) {
            while stream.read(&mut [0; 64]).await.is_ok_and(|n| n > 0) {}
            return;
        }
        if head.starts_with("GET") {
            let answer = match head.split(' ').nth(1) {
                Some("/v1/models") => stage.models(),
                Some("/metrics") => stage.metrics_answer(),
                Some("/health") => stage.health_answer(port),
                path => stage.page(port, path.unwrap_or_default()),
            };
            stream.write_all(&answer).await.unwrap_or(());
            continue;
        }
        if head.starts_with("POST /tokenize ") && !stage.tokenizes.load(Ordering::SeqCst) {
            stream.write_all(NOT_FOUND).await.unwrap_or(());
            continue;
        }
        if is_for_token(&body) {
            let answer = stage.token_answer(port);
            stream.write_all(&answer).await.unwrap_or(());
            continue;
        }
        stage.seen.lock().unwrap().push(Seen { port, head, body });
        for step in stage.next(port) {
            match step {
                Step::Write(bytes) => stream.write_all(&bytes).await.unwrap_or(()),
                Step::Gate => stage.gate.acquire().await.unwrap().forget(),
                Step::Pause(span) => tokio::time::sleep(span).await,
                Step::Close => return,
                Step::Reset => return stream.set_zero_linger().unwrap(),
                Step::Hang => {
                    while stream.read(&mut [0; 64]).await.is_ok_and(|n| n > 0) {}
                    return stage.hung_up.add_permits(1);
                }
                Step::Flood(bytes) => return flood(stream, &bytes, stage).await,
            }
        }
    }
}

/// Whether a body asks for one token, as the fleet does of a worker that answers with errors.
fn is_for_token(body: &[u8]) -> bool {
    let body = String::from_utf8_lossy(body);
    let is_prompt = body.contains(r#""prompt":"1""#) || body.contains(r#""content":"1""#);
    is_prompt && body.contains(r#""max_tokens":1,"#)
}

async fn flood(mut stream: TcpStream, bytes: &[u8], stage: &Stage) {
    loop {
        match tokio::time::timeout(HELD_UP, stream.write_all(bytes)).await {
            Ok(Ok(())) => stage.flooded.fetch_add(bytes.len(), Ordering::SeqCst),
            Ok(Err(_)) => return stage.hung_up.add_permits(1),
            Err(_) => break,
        };
    }
    stage.held_up.notify_one();
    while stream.read(&mut [0; 64]).await.is_ok_and(|n| n > 0) {}
    stage.hung_up.add_permits(1);
}

async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<(String, Vec<u8>)> {
    loop {
        if let Some(end) = buffer.windows(4).position(|w| w == b"\r\n\r\n") {
            let head = String::from_utf8(buffer[..end + 4].to_vec()).unwrap();
            let length = head.to_lowercase().lines().find_map(|line| {
                line.strip_prefix("content-length: ")
                    .map(|n| n.parse::<usize>().unwrap())
            });
            let whole = end + 4 + length.unwrap_or(0);
            if buffer.len() >= whole {
                let body = buffer[end + 4..whole].to_vec();
                buffer.drain(..whole);
                return Some((head, body));
            }
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
}

const MODELS: &str = r#"{"object":"list","data":[{"id":"m","max_model_len":4096}]}"#;
const NOT_FOUND: &[u8] = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";

/// A short answer in one piece.
pub(crate) fn ok() -> Step {
    Step::Write(unary(ANSWER))
}

/// The answer of [`ok`].
pub(crate) const ANSWER: &str = r#"{"id":"chatcmpl-1","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}"#;

pub(crate) fn unary(body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}")
        .into_bytes()
}

/// The head of a stream.
pub(crate) const STREAM_HEAD: &str = "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";

pub(crate) fn chunk(data: &[u8]) -> Vec<u8> {
    let mut out = format!("{:x}\r\n", data.len()).into_bytes();
    out.extend_from_slice(data);
    out.extend_from_slice(b"\r\n");
    out
}

/// A stream of these pieces, each a chunk of its own, and its end.
pub(crate) fn stream(pieces: &[&[u8]]) -> Step {
    let mut out = STREAM_HEAD.as_bytes().to_vec();
    for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
        out.extend(chunk(piece));
    }
    out.extend_from_slice(b"0\r\n\r\n");
    Step::Write(out)
}

/// The head of a stream and its first event.
pub(crate) fn first_event() -> Step {
    let mut out = STREAM_HEAD.as_bytes().to_vec();
    out.extend(chunk(FIRST.as_bytes()));
    Step::Write(out)
}

pub(crate) const FIRST: &str = "data: {\"id\":\"1\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"h\u{e9}\"},\"finish_reason\":null}]}\n\n";
pub(crate) const LAST: &str =
    "data: {\"id\":\"1\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
pub(crate) const USAGE: &str = "data: {\"id\":\"1\",\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2,\"total_tokens\":9,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n";
pub(crate) const DONE: &str = "data: [DONE]\n\n";
