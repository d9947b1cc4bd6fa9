//! A client that writes and reads raw HTTP/1.1.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// An answer as it came over the wire.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
    /// The body came to the end that its head promised.
    pub(crate) whole: bool,
}

impl Answer {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines
            .find(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, v)| v)
    }
}

/// A connection to the door.
pub(crate) struct Client {
    stream: TcpStream,
    unread: Vec<u8>,
}

impl Client {
    pub(crate) async fn connect(to: SocketAddr) -> Self {
        let stream = TcpStream::connect(to).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self {
            stream,
            unread: Vec::new(),
        }
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Sends as long as the other side takes it.
    pub(crate) async fn try_send(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.stream.write_all(bytes.as_ref()).await;
    }

    pub(crate) async fn post(&mut self, path: &str, headers: &str, body: impl AsRef<[u8]>) {
        let body = body.as_ref();
        let mut request = format!(
            "POST {path} HTTP/1.1\r\nhost: door\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        request.extend_from_slice(body);
        self.send(request).await;
    }

    /// Posts as long as the other side takes it, on a connection that ends with the answer.
    pub(crate) async fn try_post(&mut self, path: &str, body: impl AsRef<[u8]>) {
        let body = body.as_ref();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: door\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.try_send(head).await;
        self.try_send(body).await;
    }

    /// Reads until `end` has come; false if the connection ended before.
    pub(crate) async fn read_until(&mut self, end: &str) -> bool {
        loop {
            if self.unread.windows(end.len()).any(|w| w == end.as_bytes()) {
                return true;
            }
            if self.more().await == 0 {
                return false;
            }
        }
    }

    async fn more(&mut self) -> usize {
        self.stream.read_buf(&mut self.unread).await.unwrap_or(0)
    }

    /// Reads one answer.
    pub(crate) async fn answer(&mut self) -> Answer {
        assert!(
            self.read_until("\r\n\r\n").await,
            "no answer: {:?}",
            self.unread
        );
        let end = self
            .unread
            .windows(4)
            .position(|w| w == b"\r\n\r\n")
            .unwrap()
            + 4;
        let head = String::from_utf8(self.unread.drain(..end).collect()).unwrap();
        let status = head[9..12].parse().unwrap();
        let lower = head.to_lowercase();
        let length = lower
            .lines()
            .find_map(|l| l.strip_prefix("content-length: "));
        let (body, whole) = match length {
            Some(length) => self.sized(length.parse().unwrap()).await,
            None if lower.contains("transfer-encoding: chunked") => self.chunked().await,
            None => (Vec::new(), true),
        };
        Answer {
            status,
            head,
            body,
            whole,
        }
    }

    async fn sized(&mut self, length: usize) -> (Vec<u8>, bool) {
        while self.unread.len() < length && self.more().await > 0 {}
        let whole = self.unread.len() >= length;
        let end = length.min(self.unread.len());
        (self.unread.drain(..end).collect(), whole)
    }

    async fn chunked(&mut self) -> (Vec<u8>, bool) {
        let mut body = Vec::new();
        loop {
            if !self.read_until("\r\n").await {
                return (body, false);
            }
            let end = self.unread.windows(2).position(|w| w == b"\r\n").unwrap();
            let size: Vec<u8> = self.unread.drain(..end + 2).collect();
            let size = usize::from_str_radix(std::str::from_utf8(&size[..end]).unwrap(), 16);
            let (data, whole) = self.sized(size.unwrap() + 2).await;
            if !whole {
                return (body, false);
            }
            body.extend_from_slice(&data[..data.len() - 2]);
            if data.len() == 2 {
                return (body, true);
            }
        }
    }

    /// Takes what has come up to and with `end`; what came if the connection ended before.
    pub(crate) async fn take_until(&mut self, end: &str) -> String {
        self.read_until(end).await;
        let found = self
            .unread
            .windows(end.len())
            .position(|w| w == end.as_bytes());
        let taken = found.map_or(self.unread.len(), |at| at + end.len());
        String::from_utf8(self.unread.drain(..taken).collect()).unwrap()
    }

    /// Whether the other side has closed.
    pub(crate) async fn closed(&mut self) -> bool {
        self.more().await == 0
    }
}
