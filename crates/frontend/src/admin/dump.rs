//! `GET /dump`: what the index holds, as the events that would make it.
//!
//! The shape is that of Dynamo's standalone indexer, so that its tools and peers can read it. For looking and
//! comparing: the answer is some 100 bytes a block, and is written while it is read. What always holds: one dump is under
//! way at a time; it holds the blocks of one rank and [`PARTS_MAX`] parts, however large the index and however slow its
//! reader; an answer that could not be completed is cut, never ended.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response};
use kvasir_host::dump_index;
use kvasir_openai::ApiError;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::App;
use crate::http::reply::{self, ByteSource, Cut, Reply, ReplyBody};
use crate::models::ServedModel;

/// The group that a fleet without groups is.
const GROUP: &str = "default";
/// Parts that wait for the client.
const PARTS_MAX: usize = 4;
/// Bytes of a part, about.
const PART_BYTES: usize = 64 << 10;
/// What is said while another is under way.
const ONE_AT_A_TIME: &str = "A dump of the index is under way already, and there is one at a time; ask again when it has ended";

/// Answers with the indexes of all routers, each under the name that it has.
pub(crate) fn answer(app: &App) -> Reply {
    let Ok(turn) = Arc::clone(app.dump_turn()).try_acquire_owned() else {
        app.http().limit_reached("dumps");
        return reply::error(&ApiError::new(503, ONE_AT_A_TIME));
    };
    let models = app.models().of_routers();
    let (sender, parts) = mpsc::channel(PARTS_MAX);
    tokio::task::spawn_blocking(move || write(&models, sender, turn));
    let mut reply = Response::new(ReplyBody::stream(Box::new(DumpBody { parts })));
    let json = HeaderValue::from_static("application/json");
    reply.headers_mut().insert(CONTENT_TYPE, json);
    reply
}

/// A part of the answer, or its end.
enum Part {
    Bytes(Bytes),
    End,
}

/// The answer, as it is written.
struct DumpBody {
    parts: mpsc::Receiver<Part>,
}

impl ByteSource for DumpBody {
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        Poll::Ready(match ready!(self.parts.poll_recv(cx)) {
            Some(Part::Bytes(bytes)) => Some(Ok(bytes)),
            Some(Part::End) => None,
            None => Some(Err(Cut)),
        })
    }
}

/// Writes the whole answer, on a thread that may wait. Ends early when nobody reads any more.
fn write(models: &[Arc<ServedModel>], to: mpsc::Sender<Part>, turn: OwnedSemaphorePermit) {
    let mut page = Page {
        to,
        part: Vec::with_capacity(PART_BYTES),
    };
    // The only error is that the reader left.
    if page.models(models).is_ok() {
        // Before the end is told: whoever has heard it may ask again.
        drop(turn);
        let _ = page.send(Part::End);
    }
}

/// The JSON text, handed over in parts.
struct Page {
    to: mpsc::Sender<Part>,
    part: Vec<u8>,
}

impl Page {
    fn models(&mut self, models: &[Arc<ServedModel>]) -> io::Result<()> {
        let mut before = '{';
        for model in models {
            let name = Value::from(format!("{}:{GROUP}", model.host.name()));
            let block_size = model.block_size;
            let head = format!("{before}{name}:{{\"block_size\":{block_size},\"events\":[");
            self.text(head.as_bytes())?;
            dump_index(model.host.index(), |text| self.text(text))?;
            self.text(b"]}")?;
            before = ',';
        }
        self.text(if models.is_empty() { b"{}" } else { b"}" })?;
        self.flush()
    }

    fn text(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.part.extend_from_slice(bytes);
        match self.part.len() < PART_BYTES {
            true => Ok(()),
            false => self.flush(),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        let next = Vec::with_capacity(PART_BYTES);
        let part = std::mem::replace(&mut self.part, next);
        self.send(Part::Bytes(part.into()))
    }

    fn send(&mut self, part: Part) -> io::Result<()> {
        let gone = |_| io::ErrorKind::BrokenPipe.into();
        self.to.blocking_send(part).map_err(gone)
    }
}
