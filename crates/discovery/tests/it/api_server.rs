//! An API server for tests: the part of the public list and watch contract that followers rely on, and its faults on command.
//!
//! Every change has a version. A list says as of which version it is, in pages if it is told to; a watch tells all that follows a
//! version, in pieces of any size, or says that the version is gone.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

pub(crate) const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices";
pub(crate) const WORKERS: &str = "/apis/nvidia.com/v1alpha1/namespaces/ns/dynamoworkermetadatas";
pub(crate) const PODS: &str = "/api/v1/namespaces/ns/pods";

/// Which request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    List,
    /// A page of a list that is not its first.
    NextPage,
    Watch,
    Change,
}

/// What happens to the next request that fits.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// It is answered with this status, and with a `Retry-After` if there is one.
    Status(u16, Option<u32>),
    /// A watch begins, and its first event is an error of this code.
    ErrorEvent(u16),
}

/// A request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) query: BTreeMap<String, String>,
    pub(crate) at: std::time::Instant,
}

impl Seen {
    pub(crate) fn is_watch(&self) -> bool {
        self.on() == On::Watch
    }

    fn on(&self) -> On {
        match &*self.method {
            "GET" if self.query.contains_key("watch") => On::Watch,
            "GET" if self.query.contains_key("continue") => On::NextPage,
            "GET" => On::List,
            _ => On::Change,
        }
    }
}

#[derive(Default)]
struct Content {
    version: u64,
    /// Versions below are forgotten.
    oldest: u64,
    objects: BTreeMap<(String, String), Value>,
    log: Vec<(u64, String, Value)>,
    faults: VecDeque<(String, On, Fault)>,
    seen: Vec<Seen>,
    token: Option<String>,
    page: usize,
    piece: usize,
}

/// The server. It ends when it is dropped.
pub(crate) struct ApiServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
    running: Option<JoinHandle<()>>,
}

struct Shared {
    content: Mutex<Content>,
    /// Woken by every change; the number is how often watches were told to end.
    wake: watch::Sender<(u64, u64)>,
}

impl Shared {
    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap()
    }
}

impl ApiServer {
    pub(crate) async fn start() -> Self {
        Self::start_with(None).await
    }

    pub(crate) async fn start_with(tls: Option<TlsAcceptor>) -> Self {
        let content = Content {
            version: 100,
            page: usize::MAX,
            piece: usize::MAX,
            ..Content::default()
        };
        let shared = Arc::new(Shared {
            content: Mutex::new(content),
            wake: watch::channel((100, 0)).0,
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut server = Self {
            shared,
            address: listener.local_addr().unwrap(),
            tls,
            running: None,
        };
        server.run(listener);
        server
    }

    pub(crate) fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    fn run(&mut self, listener: TcpListener) {
        let (shared, tls) = (Arc::clone(&self.shared), self.tls.clone());
        self.running = Some(tokio::spawn(async move {
            // Dropped with this task: so ends every connection.
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let (shared, tls) = (Arc::clone(&shared), tls.clone());
                connections.spawn(async move {
                    let _ = match tls {
                        None => serve(socket, &shared).await,
                        Some(tls) => match tls.accept(socket).await {
                            Ok(socket) => serve(socket, &shared).await,
                            Err(error) => Err(error),
                        },
                    };
                });
            }
        }));
    }

    /// It is away, with all its connections.
    pub(crate) async fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.abort();
            let _ = running.await;
        }
    }

    /// It is back, where it was.
    pub(crate) async fn restart(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.run(listener);
    }

    pub(crate) fn put(&self, collection: &str, mut object: Value) {
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let mut content = self.shared.content();
        let key = (collection.to_owned(), name);
        let kind = match content.objects.contains_key(&key) {
            true => "MODIFIED",
            false => "ADDED",
        };
        content.version += 1;
        object["metadata"]["resourceVersion"] = json!(content.version.to_string());
        content.objects.insert(key, object.clone());
        content.tell(collection, kind, &object);
        drop(content);
        self.wake();
    }

    pub(crate) fn delete(&self, collection: &str, name: &str) {
        let mut content = self.shared.content();
        content.remove(collection, name);
        drop(content);
        self.wake();
    }

    pub(crate) fn get(&self, collection: &str, name: &str) -> Option<Value> {
        let key = (collection.to_owned(), name.to_owned());
        self.shared.content().objects.get(&key).cloned()
    }

    /// All watches hear that nothing else happened up to now.
    pub(crate) fn bookmark(&self) {
        let mut content = self.shared.content();
        content.version += 1;
        let object = json!({"metadata": {"resourceVersion": content.version.to_string()}});
        content.tell("", "BOOKMARK", &object);
        drop(content);
        self.wake();
    }

    /// What happened so far is forgotten: a watch can begin from now on only. Those that run hear what they have not heard yet.
    pub(crate) fn forget(&self) {
        let mut content = self.shared.content();
        content.oldest = content.version;
    }

    /// All watches end as if their time were over.
    pub(crate) fn end_watches(&self) {
        self.shared.wake.send_modify(|(_, ends)| *ends += 1);
    }

    /// The next request of this kind for `path` meets a fault.
    pub(crate) fn fail(&self, path: &str, on: On, fault: Fault) {
        let mut content = self.shared.content();
        content.faults.push_back((path.to_owned(), on, fault));
    }

    /// Lists come in pages of so many, watches in pieces of so many bytes.
    pub(crate) fn cut_into(&self, page: usize, piece: usize) {
        let mut content = self.shared.content();
        (content.page, content.piece) = (page, piece);
    }

    /// Whoever does not show this token is refused.
    pub(crate) fn ask_for_token(&self, token: &str) {
        self.shared.content().token = Some(token.to_owned());
    }

    pub(crate) fn seen(&self, path: &str) -> Vec<Seen> {
        let content = self.shared.content();
        let seen = content.seen.iter().filter(|seen| seen.path == path);
        seen.cloned().collect()
    }

    /// How often it was listed from the beginning.
    pub(crate) fn lists(&self, path: &str) -> usize {
        let seen = self.seen(path);
        seen.iter().filter(|seen| seen.on() == On::List).count()
    }

    fn wake(&self) {
        let version = self.shared.content().version;
        self.shared.wake.send_modify(|(known, _)| *known = version);
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            running.abort();
        }
    }
}

impl Content {
    fn tell(&mut self, collection: &str, kind: &str, object: &Value) {
        let event = json!({"type": kind, "object": object});
        self.log.push((self.version, collection.to_owned(), event));
    }

    fn remove(&mut self, collection: &str, name: &str) -> bool {
        let key = (collection.to_owned(), name.to_owned());
        let Some(mut object) = self.objects.remove(&key) else {
            return false;
        };
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.tell(collection, "DELETED", &object);
        true
    }

    fn fault(&mut self, path: &str, on: On) -> Option<Fault> {
        let mut faults = self.faults.iter();
        let at = faults.position(|(of, kind, _)| of == path && *kind == on)?;
        self.faults.remove(at).map(|(_, _, fault)| fault)
    }

    /// A page, and where the next begins.
    fn list(&self, path: &str, query: &BTreeMap<String, String>) -> Value {
        let limit = query.get("limit").map_or(500, |text| text.parse().unwrap());
        let limit = self.page.min(limit);
        let from: usize = query.get("continue").map_or(0, |text| {
            text.split(':').next_back().unwrap().parse().unwrap()
        });
        let of_path = self.objects.iter().filter(|((of, _), _)| of == path);
        let objects = of_path.map(|(_, object)| object);
        let matching: Vec<&Value> = objects.filter(|object| fits(object, query)).collect();
        let page: Vec<&&Value> = matching.iter().skip(from).take(limit).collect();
        let next = match from + page.len() < matching.len() {
            true => format!("{}:{}", self.version, from + page.len()),
            false => String::new(),
        };
        json!({"kind": "List", "metadata": {"resourceVersion": self.version.to_string(), "continue": next},
            "items": page})
    }
}

/// Whether an object has the labels that are asked for.
fn fits(object: &Value, query: &BTreeMap<String, String>) -> bool {
    let Some(selector) = query.get("labelSelector") else {
        return true;
    };
    selector.split(',').all(|pair| {
        let (name, value) = pair.split_once('=').unwrap();
        object["metadata"]["labels"][name] == value
    })
}

async fn serve(
    mut socket: impl AsyncRead + AsyncWrite + Unpin,
    shared: &Shared,
) -> std::io::Result<()> {
    let mut unread = Vec::new();
    loop {
        let Some((method, target, headers, body)) = request(&mut socket, &mut unread).await? else {
            return Ok(());
        };
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let query: BTreeMap<String, String> = query
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(name, value)| (name.to_owned(), decode(value)))
            .collect();
        let seen = Seen {
            method: method.clone(),
            path: path.to_owned(),
            query: query.clone(),
            at: std::time::Instant::now(),
        };
        let on = seen.on();
        let (fault, wanted) = {
            let mut content = shared.content();
            content.seen.push(seen);
            (content.fault(path, on), content.token.clone())
        };
        let shown = headers.get("authorization");
        if wanted.is_some_and(|token| shown != Some(&format!("Bearer {token}"))) {
            answer(&mut socket, 401, None, &status(401, "Unauthorized")).await?;
            continue;
        }
        let error = match fault {
            Some(Fault::Status(code, after)) => {
                answer(&mut socket, code, after, &status(code, "as told")).await?;
                continue;
            }
            Some(Fault::ErrorEvent(code)) => Some(code),
            None => None,
        };
        if on == On::Watch {
            if !watch_from(&mut socket, shared, path, &query, error).await? {
                return Ok(());
            }
            continue;
        }
        let (code, body) = change(shared, &method, path, &query, &body);
        answer(&mut socket, code, None, &body).await?;
    }
}

/// Everything but a watch.
fn change(
    shared: &Shared,
    method: &str,
    path: &str,
    query: &BTreeMap<String, String>,
    body: &[u8],
) -> (u16, Value) {
    let mut content = shared.content();
    let (collection, name) = path.rsplit_once('/').unwrap();
    let answer = match method {
        "GET" => match query.get("continue") {
            Some(from)
                if from.split(':').next().unwrap().parse::<u64>().unwrap() < content.oldest =>
            {
                (410, status(410, "the list is too old"))
            }
            _ => (200, content.list(path, query)),
        },
        "PATCH" => {
            let mut object: Value = serde_json::from_slice(body).unwrap();
            assert_eq!(object["metadata"]["name"], name);
            content.version += 1;
            object["metadata"]["resourceVersion"] = json!(content.version.to_string());
            object["metadata"]["uid"] = json!("u");
            let key = (collection.to_owned(), name.to_owned());
            let kind = match content.objects.insert(key, object.clone()) {
                Some(_) => "MODIFIED",
                None => "ADDED",
            };
            content.tell(collection, kind, &object);
            (200, object)
        }
        "DELETE" => match content.remove(collection, name) {
            true => (200, status(200, "")),
            false => (404, status(404, "not found")),
        },
        _ => (405, status(405, "not here")),
    };
    let version = content.version;
    drop(content);
    shared.wake.send_modify(|(known, _)| *known = version);
    answer
}

/// Says whether the connection goes on.
async fn watch_from(
    socket: &mut (impl AsyncRead + AsyncWrite + Unpin),
    shared: &Shared,
    path: &str,
    query: &BTreeMap<String, String>,
    error: Option<u16>,
) -> std::io::Result<bool> {
    assert_eq!(query["allowWatchBookmarks"], "true");
    assert!(query["timeoutSeconds"].parse::<u32>().unwrap() > 0);
    let mut version: u64 = query["resourceVersion"].parse().unwrap();
    let mut wake = shared.wake.subscribe();
    let ends = wake.borrow().1;
    let (is_gone, piece) = {
        let content = shared.content();
        (version < content.oldest, content.piece)
    };
    if is_gone {
        let said = status(410, "too old resource version");
        answer(socket, 410, None, &said).await?;
        return Ok(true);
    }
    socket
        .write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        .await?;
    if let Some(code) = error {
        let event = json!({"type": "ERROR", "object": status(code, "as told")});
        send(socket, &format!("{event}\n"), piece).await?;
        socket.write_all(b"0\r\n\r\n").await?;
        return Ok(true);
    }
    loop {
        // Marked as seen before the log is read: what comes later wakes.
        let has_ended = wake.borrow_and_update().1 > ends;
        let (lines, last) = {
            let content = shared.content();
            let news = content.log.iter().filter(|(at, of, event)| {
                let is_bookmark = of.is_empty();
                *at > version && (is_bookmark || (of == path && fits(&event["object"], query)))
            });
            let lines: Vec<String> = news.map(|(_, _, event)| format!("{event}\n")).collect();
            (lines, content.version)
        };
        version = last;
        // Several events in one piece, or one event in several.
        if !lines.is_empty() {
            send(socket, &lines.concat(), piece).await?;
        }
        if has_ended {
            socket.write_all(b"0\r\n\r\n").await?;
            return Ok(true);
        }
        let mut nothing = [0u8; 1];
        tokio::select! {
            changed = wake.changed() => if changed.is_err() { return Ok(false) },
            _ = socket.read(&mut nothing) => return Ok(false),
        }
    }
}

async fn send(
    socket: &mut (impl AsyncWrite + Unpin),
    text: &str,
    piece: usize,
) -> std::io::Result<()> {
    for part in text.as_bytes().chunks(piece.min(1 << 20)) {
        let head = format!("{:x}\r\n", part.len());
        socket.write_all(head.as_bytes()).await?;
        socket.write_all(part).await?;
        socket.write_all(b"\r\n").await?;
        socket.flush().await?;
    }
    Ok(())
}

async fn answer(
    socket: &mut (impl AsyncWrite + Unpin),
    code: u16,
    after: Option<u32>,
    body: &Value,
) -> std::io::Result<()> {
    let body = body.to_string();
    let after = after.map_or_else(String::new, |secs| format!("retry-after: {secs}\r\n"));
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {code} X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{after}\r\n"
    );
    socket.write_all(head.as_bytes()).await?;
    socket.write_all(body.as_bytes()).await?;
    socket.flush().await
}

fn status(code: u16, message: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "code": code, "message": message})
}

type Request = (String, String, BTreeMap<String, String>, Vec<u8>);

/// The next request of a connection; none at its end.
async fn request(
    socket: &mut (impl AsyncRead + Unpin),
    unread: &mut Vec<u8>,
) -> std::io::Result<Option<Request>> {
    loop {
        let end = unread.windows(4).position(|bytes| bytes == b"\r\n\r\n");
        if let Some(end) = end {
            let head = String::from_utf8(unread[..end].to_vec()).unwrap();
            let mut lines = head.split("\r\n");
            let mut words = lines.next().unwrap().split(' ');
            let (method, target) = (words.next().unwrap(), words.next().unwrap());
            let headers: BTreeMap<String, String> = lines
                .filter_map(|line| line.split_once(": "))
                .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
                .collect();
            let length = headers.get("content-length");
            let length: usize = length.map_or(0, |text| text.parse().unwrap());
            if unread.len() >= end + 4 + length {
                let body = unread[end + 4..end + 4 + length].to_vec();
                let request = (method.to_owned(), target.to_owned(), headers, body);
                unread.drain(..end + 4 + length);
                return Ok(Some(request));
            }
        }
        let mut piece = [0u8; 4096];
        match socket.read(&mut piece).await? {
            0 => return Ok(None),
            read => unread.extend_from_slice(&piece[..read]),
        }
    }
}

fn decode(text: &str) -> String {
    let mut out = Vec::new();
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'%' => {
                let hex = [bytes.next().unwrap(), bytes.next().unwrap()];
                let hex = std::str::from_utf8(&hex).unwrap();
                out.push(u8::from_str_radix(hex, 16).unwrap());
            }
            byte => out.push(byte),
        }
    }
    String::from_utf8(out).unwrap()
}
