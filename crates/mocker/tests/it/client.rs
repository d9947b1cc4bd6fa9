//! A plain HTTP client, and a mock server to ask.
#![expect(clippy::unwrap_used, reason = "what fails here is a failed test")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvasir_engine::EngineConfig;
use kvasir_mocker::{
    HttpPart, MockAdapter, MockServer, MockServerOptions, Observer, SideChannel, Worker,
    WorkerOptions, answers_in_words,
};
use kvasir_profile::{Constants, StepTimes};
use kvasir_tasks::Tasks;
use kvasir_text::TextModel;
use kvasir_types::WorkerId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A server that serves `tiny-qwen` in steps of 1 ms.
pub(crate) struct Served {
    pub(crate) server: MockServer,
    pub(crate) tasks: Tasks,
}

pub(crate) async fn serve(faults: &[&str]) -> Served {
    serve_with(faults, true).await
}

/// With or without cached tokens in `usage`.
pub(crate) async fn serve_with(faults: &[&str], prompt_tokens_details: bool) -> Served {
    serve_as(Tasks::new(), faults, prompt_tokens_details, HttpPart::Whole).await
}

/// With a KV connector, under this name.
pub(crate) async fn serve_part(engine_id: &str) -> Served {
    let tasks = Tasks::new();
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let side = SideChannel::open_at(loopback, engine_id.to_owned(), &tasks).await;
    let part = HttpPart::Connector {
        side: side.unwrap(),
        per_token: Duration::ZERO,
    };
    serve_as(tasks, &[], true, part).await
}

async fn serve_as(
    tasks: Tasks,
    faults: &[&str],
    prompt_tokens_details: bool,
    part: HttpPart,
) -> Served {
    let text = Arc::new(TextModel::builtin().unwrap());
    let engine = EngineConfig {
        block_size: 32,
        num_blocks: 151,
        max_model_len: 2048,
        max_num_seqs: 8,
        times: StepTimes::Constant(Constants {
            step_ms: 1.0,
            ..Constants::default()
        }),
        ..EngineConfig::default()
    };
    let options = WorkerOptions {
        engine,
        ranks: 1,
        answer: answers_in_words(&text).unwrap(),
    };
    let observer: Arc<dyn Observer> = Arc::new(());
    let worker = Worker::spawn(&tasks, WorkerId(1), options, &observer).unwrap();
    let options = MockServerOptions {
        model: "tiny-qwen".into(),
        root: "model".to_owned(),
        text,
        faults: faults.iter().map(|fault| fault.parse().unwrap()).collect(),
        seed: 7,
        prompt_tokens_details,
        adapters: vec![MockAdapter::read("sql=/loras/sql")],
        part,
    };
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let server = MockServer::start(&tasks, loopback, worker, options)
        .await
        .unwrap();
    Served { server, tasks }
}

/// An answer as bytes came; `complete` if it ended as it said it would.
#[derive(Clone, Debug)]
pub(crate) struct Got {
    pub(crate) status: u16,
    pub(crate) body: String,
    pub(crate) complete: bool,
}

impl Served {
    /// Waits until nobody listens any more.
    pub(crate) async fn until_gone(&self) {
        let wait = async {
            while TcpStream::connect(self.server.address()).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), wait)
            .await
            .unwrap();
    }

    pub(crate) async fn ask(&self, method: &str, path: &str, body: &str) -> Option<Got> {
        self.ask_with(method, path, "content-type: application/json\r\n", body)
            .await
    }

    pub(crate) async fn post(&self, path: &str, body: &str) -> Got {
        self.ask("POST", path, body).await.unwrap()
    }

    /// `None` if the server hung up without an answer.
    pub(crate) async fn ask_with(
        &self,
        method: &str,
        path: &str,
        headers: &str,
        body: &str,
    ) -> Option<Got> {
        let mut stream = TcpStream::connect(self.server.address()).await.unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(body.as_bytes()).await.unwrap();
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes).await;
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n")?;
        let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap();
        let chunked = head
            .to_ascii_lowercase()
            .contains("transfer-encoding: chunked");
        let (body, complete) = match chunked {
            true => unchunk(body),
            false => (body.to_owned(), true),
        };
        Some(Got {
            status,
            body,
            complete,
        })
    }
}

fn unchunk(mut rest: &str) -> (String, bool) {
    let mut body = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        if size == 0 {
            return (body, true);
        }
        let Some(chunk) = after.get(..size) else {
            body += after;
            break;
        };
        body += chunk;
        rest = after.get(size + 2..).unwrap_or_default();
    }
    (body, false)
}
