//! Token workers that fail in every way: what the client sees, and what is left booked.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvasir_frontend::{App, AppOptions, ServedModel, Server, TokenSources, WorkerLink};
use kvasir_host::{ModelSpec, RouterSetup};
use kvasir_index::IndexOptions;
use kvasir_router::{RouterConfig, RouterMode, WorkerSpec};
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, MetricOptions, Metrics};
use kvasir_text::TextModel;
use kvasir_transport::{AnswerStep, Call, MemoryPlane, PlaneError};
use kvasir_types::{
    FinishReason, Likelihood, Token, TokenItem, TokenRequest, TransportKind, WorkerId,
};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Longest that any step of a test may take.
const TIMEOUT: Duration = Duration::from_secs(20);

/// How a worker fails.
type PlaneFault = fn(WorkerId) -> PlaneError;

/// What a worker does with a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Act {
    /// Answers with this many tokens.
    Answer(u32),
    /// Vanishes after this many tokens.
    DieAfter(u32),
    /// Says that it is full.
    Full,
    /// Says that the request cannot be.
    Reject,
    /// Its engine fails.
    Fail,
    /// Fails so.
    Say(PlaneFault),
    /// Sends one token and then nothing, until the client leaves.
    Stall,
}

/// What the workers say, and in which form the model's card says that they do.
pub(crate) struct Said {
    pub(crate) text: &'static str,
    pub(crate) tools: Option<&'static str>,
    pub(crate) reasoning: Option<&'static str>,
}

impl Default for Said {
    fn default() -> Self {
        Self {
            text: "one two three four five six seven eight",
            tools: None,
            reasoning: None,
        }
    }
}

pub(crate) struct Fixture {
    server: Server,
    pub(crate) app: Arc<App>,
    pub(crate) model: Arc<ServedModel>,
    /// Requests that each worker got, by id from 1.
    got: Arc<Vec<AtomicUsize>>,
    /// Requests that were cancelled while a worker stalled.
    cancelled: Arc<AtomicUsize>,
    /// The text of the answers' tokens.
    words: Arc<Mutex<Vec<Token>>>,
    /// Every request that a worker got.
    pub(crate) seen: Arc<Mutex<Vec<TokenRequest>>>,
}

impl Fixture {
    /// A server with one worker per act; with `mode` `RoundRobin` worker 1 is asked first.
    async fn start(acts: &[Act], mode: RouterMode) -> Self {
        Self::with(acts, mode, AppOptions::default()).await
    }

    pub(crate) async fn with(acts: &[Act], mode: RouterMode, options: AppOptions) -> Self {
        Self::set_up(acts, mode, options, false, &Said::default()).await
    }

    /// A server with as many workers as acts; the first request that reaches any of them gets the first act.
    pub(crate) async fn scripted(acts: &[Act], options: AppOptions) -> Self {
        Self::set_up(
            acts,
            RouterMode::RoundRobin,
            options,
            true,
            &Said::default(),
        )
        .await
    }

    /// A server with one worker whose answers have this text.
    pub(crate) async fn saying(said: &Said, options: AppOptions) -> Self {
        let act = Act::Answer(u32::MAX);
        Self::set_up(&[act], RouterMode::RoundRobin, options, false, said).await
    }

    async fn set_up(
        acts: &[Act],
        mode: RouterMode,
        options: AppOptions,
        in_order: bool,
        said: &Said,
    ) -> Self {
        let metrics = Metrics::new(&MetricOptions::default()).unwrap();
        let app = App::new(options, metrics, Clock::new(), Tasks::new());
        let text = Arc::new(TextModel::builtin().unwrap());
        let words = text.encode_chat(said.text).unwrap();
        let plane = MemoryPlane::new();
        let config = RouterConfig {
            router_mode: mode,
            ..RouterConfig::default()
        };
        let spec = ModelSpec {
            name: "m".into(),
            block_size: 16,
            context_length: 4096,
            parent: None,
            migration_limit: 0,
        };
        let setup = RouterSetup::new(config, IndexOptions::default());
        let model = setup.make(&spec, None, app.context());
        let tokens = TokenSources::from(Some(text));
        let tokens = tokens.with_formats("m", said.tools, said.reasoning);
        let model = ServedModel::new(model, tokens, TransportKind::Plane);
        app.models().insert(Arc::clone(&model));
        let fixture = Self {
            server: Server::start(Arc::clone(&app), ([127, 0, 0, 1], 0).into())
                .await
                .unwrap(),
            app: Arc::clone(&app),
            model,
            got: Arc::new((0..=acts.len()).map(|_| AtomicUsize::new(0)).collect()),
            cancelled: Arc::default(),
            words: Arc::new(Mutex::new(words)),
            seen: Arc::default(),
        };
        for (id, act) in (1..).zip(acts) {
            let acts = if in_order { acts } else { &[*act] };
            fixture.add_worker(&app, &plane, id, acts.to_vec());
        }
        fixture
    }

    fn add_worker(&self, app: &Arc<App>, plane: &MemoryPlane, id: u64, acts: Vec<Act>) {
        let mut intake = plane.join(WorkerId(id));
        let (got, cancelled) = (Arc::clone(&self.got), Arc::clone(&self.cancelled));
        let words = self.words.lock().unwrap().clone();
        let seen = Arc::clone(&self.seen);
        app.tasks().spawn(async move {
            while let Some(call) = intake.next().await {
                got[id as usize].fetch_add(1, Ordering::SeqCst);
                let (said, act) = {
                    let mut seen = seen.lock().unwrap();
                    seen.push(call.request.clone());
                    let first = seen.iter().find(|other| other.id == call.request.id);
                    let said = call.request.tokens.len() - first.unwrap().tokens.len();
                    (said, acts[(seen.len() - 1).min(acts.len() - 1)])
                };
                play(act, call, said as u32, &words, &cancelled).await;
            }
        });
        let link = WorkerLink::plane("memory", "m", Arc::new(plane.clone()));
        self.model.join(WorkerSpec::new(WorkerId(id)), link);
    }

    pub(crate) fn asked(&self) -> Vec<usize> {
        self.got
            .iter()
            .skip(1)
            .map(|n| n.load(Ordering::SeqCst))
            .collect()
    }

    /// Nothing is booked and nothing waits; news may take a moment to arrive.
    pub(crate) async fn assert_idle(&self) {
        let idle = async {
            while !self.model.host.ask(|router| router.is_idle()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, idle)
            .await
            .expect("something stays booked");
    }

    pub(crate) async fn post(&self, body: &Value) -> (u16, String) {
        let mut stream = self.connect(body).await;
        let mut all = Vec::new();
        let read = stream.read_to_end(&mut all);
        tokio::time::timeout(TIMEOUT, read)
            .await
            .expect("no end")
            .unwrap();
        let text = String::from_utf8(all).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (
            head.split(' ').nth(1).unwrap().parse().unwrap(),
            body.to_owned(),
        )
    }

    async fn connect(&self, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(self.server.address()).await.unwrap();
        let body = body.to_string();
        let request = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }
}

/// Plays `act` for a request whose answer has `said` tokens already.
async fn play(act: Act, call: Call, said: u32, words: &[Token], cancelled: &AtomicUsize) {
    let item = |at: u32, last: bool| TokenItem {
        tokens: vec![words[at as usize % words.len()]],
        cached_tokens: (at == 0).then_some(0),
        finish: last.then_some(FinishReason::Stop),
        logprobs: match call.request.sampling.logprobs {
            Some(_) => vec![Likelihood {
                logprob: -0.5,
                top: words.iter().map(|word| (*word, -1.5)).collect(),
            }],
            None => Vec::new(),
        },
        ..TokenItem::default()
    };
    let worker = WorkerId(0);
    match act {
        Act::Answer(count) => {
            let all = call.request.sampling.max_tokens.min(words.len() as u32);
            let count = if count == u32::MAX { all } else { count };
            for at in said..count {
                call.reply.push(item(at, at + 1 == count));
            }
        }
        Act::DieAfter(count) => {
            for at in said..said + count {
                call.reply.push(item(at, false));
                // Let the reader take it before the end comes.
                tokio::task::yield_now().await;
            }
        }
        Act::Full => call.reply.fail(PlaneError::Overloaded(worker)),
        Act::Reject => call
            .reply
            .fail(PlaneError::Rejected("top_k is too large".into())),
        Act::Fail => call.reply.fail(PlaneError::Engine("out of memory".into())),
        Act::Say(error) => call.reply.fail(error(worker)),
        Act::Stall => {
            call.reply.push(item(0, false));
            call.reply.closed().await;
            cancelled.fetch_add(1, Ordering::SeqCst);
        }
    }
}

pub(crate) fn ask(stream: bool) -> Value {
    serde_json::json!({
        "model": "m", "stream": stream, "messages": [{"role": "user", "content": "count, please"}],
    })
}

#[tokio::test]
async fn a_worker_that_dies_before_its_first_token_is_replaced() {
    for stream in [false, true] {
        let fixture =
            Fixture::start(&[Act::DieAfter(0), Act::Answer(4)], RouterMode::RoundRobin).await;
        for _ in 0..2 {
            let (status, body) = fixture.post(&ask(stream)).await;
            assert_eq!(status, 200, "{body}");
            assert!(body.contains("\"stop\""), "{body}");
        }
        assert!(
            fixture.asked()[0] >= 1 && fixture.asked()[1] == 2,
            "{:?}",
            fixture.asked()
        );
        fixture.assert_idle().await;
    }
}

/// One client's tools are refused in words, and the others' short texts are read as before.
#[tokio::test]
async fn tools_beyond_all_measure_stop_nobody() {
    let fixture = Fixture::start(&[Act::Answer(4)], RouterMode::RoundRobin).await;
    let schema = |values: Value| {
        let mut body = ask(false);
        body["tools"] = serde_json::json!([{"type": "function",
            "function": {"name": "f", "parameters": {"x": values}}}]);
        body
    };
    let many = schema(vec![Value::Object(serde_json::Map::new()); 200_000].into());
    let long = schema("x".repeat(2 << 20).into());
    for (body, told) in [(many, "131072 JSON values"), (long, "`tools`")] {
        let (status, said) = fixture.post(&body).await;
        assert_eq!(status, 400, "{said}");
        assert!(said.contains(told), "{said}");
        let (status, said) = fixture.post(&ask(false)).await;
        assert_eq!(status, 200, "{said}");
    }
    fixture.assert_idle().await;
}

#[tokio::test]
async fn a_full_worker_is_passed_over_and_a_full_fleet_is_an_overload() {
    let fixture = Fixture::start(&[Act::Full, Act::Answer(3)], RouterMode::RoundRobin).await;
    assert_eq!(fixture.post(&ask(false)).await.0, 200);
    let fixture = Fixture::start(&[Act::Full, Act::Full], RouterMode::RoundRobin).await;
    let (status, body) = fixture.post(&ask(true)).await;
    assert_eq!(status, 503);
    assert!(
        body.contains("All workers are busy, please retry later"),
        "{body}"
    );
    fixture.assert_idle().await;
}

#[tokio::test]
async fn a_refusal_is_the_clients_and_is_not_tried_elsewhere() {
    let fixture = Fixture::start(&[Act::Reject, Act::Reject], RouterMode::RoundRobin).await;
    let (status, body) = fixture.post(&ask(false)).await;
    assert_eq!(status, 400);
    assert!(body.contains("top_k is too large"), "{body}");
    assert_eq!(fixture.asked().iter().sum::<usize>(), 1);
    fixture.assert_idle().await;
}

#[tokio::test]
async fn an_engines_failure_tells_nothing_of_its_inside() {
    let fixture = Fixture::start(&[Act::Fail], RouterMode::RoundRobin).await;
    let (status, body) = fixture.post(&ask(false)).await;
    assert_eq!(status, 500);
    assert!(!body.contains("memory"), "{body}");
    assert!(
        body.contains(r#""details":{"backend_status":500}"#),
        "{body}"
    );
    fixture.assert_idle().await;
}

/// What a frontend of Dynamo 1.6.1 answered when its worker failed so, recorded with a worker that breaks the protocol.
#[tokio::test]
async fn faults_of_a_plane_have_the_recorded_answers() {
    let refused = |worker| PlaneError::Refused {
        worker,
        why: "unknown endpoint x".into(),
    };
    let not_started = |worker| PlaneError::NotStarted {
        worker,
        why: "prologue says no".into(),
    };
    let no_ack = |worker| PlaneError::Timeout {
        worker,
        step: AnswerStep::Ack,
    };
    let broken = |worker| PlaneError::Protocol {
        worker,
        why: "an item behind the mark of the last one came out of order".into(),
    };
    let unavailable =
        r#"{"message":"Service temporarily unavailable","type":"Service Unavailable","code":503}"#;
    let rows: [(PlaneFault, u16, &str); 6] = [
        (refused, 503, unavailable),
        (not_started, 503, unavailable),
        (PlaneError::Disconnected, 503, unavailable),
        (
            no_ack,
            504,
            r#"{"message":"Request deadline exceeded","type":"Gateway Timeout","code":504}"#,
        ),
        (
            broken,
            500,
            r#"{"message":"Internal server error","type":"Internal Server Error","code":500}"#,
        ),
        (
            |_| PlaneError::Rejected("public text".into()),
            400,
            r#"{"message":"public text","type":"Bad Request","code":400}"#,
        ),
    ];
    for (error, status, body) in rows {
        let fixture = Fixture::start(&[Act::Say(error)], RouterMode::RoundRobin).await;
        let found = fixture.post(&ask(false)).await;
        assert_eq!((found.0, found.1.as_str()), (status, body));
        fixture.assert_idle().await;
    }
}

#[tokio::test]
async fn dead_workers_all_round_is_unavailable() {
    let fixture = Fixture::start(
        &[Act::DieAfter(0), Act::DieAfter(0)],
        RouterMode::RoundRobin,
    )
    .await;
    let (status, body) = fixture.post(&ask(true)).await;
    assert_eq!(status, 503);
    assert!(body.contains("Service temporarily unavailable"), "{body}");
    fixture.assert_idle().await;
}

#[tokio::test]
async fn a_worker_that_dies_mid_stream_ends_it_with_an_error_frame() {
    let fixture = Fixture::start(&[Act::DieAfter(3)], RouterMode::RoundRobin).await;
    let (status, body) = fixture.post(&ask(true)).await;
    assert_eq!(status, 200);
    assert!(body.contains("data: {\"error\":{"), "{body}");
    assert!(body.contains("data: [DONE]\n\n"), "{body}");
    assert!(!body.contains("\"finish_reason\":\"stop\""), "{body}");
    fixture.assert_idle().await;

    let fixture = Fixture::start(&[Act::DieAfter(3)], RouterMode::RoundRobin).await;
    let (status, _) = fixture.post(&ask(false)).await;
    assert_eq!(status, 503, "half an answer must not look whole");
    fixture.assert_idle().await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_the_worker_and_frees_its_place() {
    for stream in [true, false] {
        let fixture = Fixture::start(&[Act::Stall], RouterMode::Kv).await;
        let connection = fixture.connect(&ask(stream)).await;
        let asked = async {
            while fixture.asked() != [1] {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, asked).await.unwrap();
        assert!(!fixture.model.host.ask(|router| router.is_idle()));
        drop(connection);
        fixture.assert_idle().await;
        let cancelled = async {
            while fixture.cancelled.load(Ordering::SeqCst) == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, cancelled)
            .await
            .expect("the worker goes on for nobody");
    }
}

#[tokio::test]
async fn several_choices_share_a_fate() {
    let fixture = Fixture::start(&[Act::Answer(4), Act::Answer(4)], RouterMode::RoundRobin).await;
    let mut body = ask(true);
    body["n"] = 4.into();
    let (status, text) = fixture.post(&body).await;
    assert_eq!(status, 200);
    for index in 0..4 {
        assert!(
            text.contains(&format!("{{\"index\":{index},\"delta\":{{}}")),
            "{text}"
        );
    }
    assert_eq!(fixture.asked(), [2, 2]);
    fixture.assert_idle().await;

    let fixture = Fixture::start(&[Act::Answer(4), Act::DieAfter(2)], RouterMode::RoundRobin).await;
    let mut body = ask(false);
    body["n"] = 2.into();
    assert_eq!(fixture.post(&body).await.0, 503);
    fixture.assert_idle().await;
}

#[tokio::test]
async fn a_drain_finishes_what_runs_and_refuses_what_comes() {
    let fixture = Fixture::start(&[Act::Stall], RouterMode::RoundRobin).await;
    let running = fixture.connect(&ask(true)).await;
    let started = async {
        while fixture.asked() != [1] {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, started).await.unwrap();
    let address = fixture.server.address();
    let model = Arc::clone(&fixture.model);
    let shut_down = fixture.server.shut_down(TIMEOUT);
    tokio::pin!(shut_down);
    // While it drains new work is refused, and health says why.
    let health = tokio::select! {
        text = health_while_draining(address) => text,
        _ = &mut shut_down => panic!("it did not wait for the running stream"),
    };
    assert!(health.starts_with("HTTP/1.1 503"), "{health}");
    drop(running);
    assert_eq!(shut_down.await, 0, "a request was cut off");
    assert!(model.host.ask(|router| router.is_idle()));
}

async fn health_while_draining(address: SocketAddr) -> String {
    loop {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = "GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        if text.contains("draining") {
            return text;
        }
    }
}

/// Everything that a client may say about drawing reaches the worker.
#[tokio::test]
async fn a_worker_is_told_how_to_draw() {
    let fixture = Fixture::start(&[Act::Answer(2)], RouterMode::RoundRobin).await;
    let mut body = ask(false);
    let wishes = serde_json::json!({
        "temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "frequency_penalty": 1.0,
        "presence_penalty": -1.0, "repetition_penalty": 1.5, "logit_bias": {"5": 2.0, "9": -100.0},
        "guided_regex": "a+", "seed": 11, "stop_token_ids": [3], "logprobs": true, "top_logprobs": 2,
    });
    for (key, value) in wishes.as_object().unwrap() {
        body[key] = value.clone();
    }
    assert_eq!(fixture.post(&body).await.0, 200);
    let sampling = fixture.seen.lock().unwrap()[0].sampling.clone();
    assert_eq!(
        (sampling.temperature, sampling.top_p),
        (Some(0.5), Some(0.75))
    );
    assert_eq!((sampling.top_k, sampling.min_p), (Some(7), Some(0.25)));
    assert_eq!(
        (sampling.frequency_penalty, sampling.presence_penalty),
        (Some(1.0), Some(-1.0))
    );
    assert_eq!(sampling.repetition_penalty, Some(1.5));
    assert_eq!(sampling.logit_bias, [(5, 2.0), (9, -100.0)]);
    assert_eq!(sampling.guided.as_deref(), Some(r#"{"regex":"a+"}"#));
    assert_eq!((sampling.seed, sampling.logprobs), (Some(11), Some(2)));
    assert!(sampling.stop_tokens.contains(&3));
    let mut odd = ask(false);
    odd["logit_bias"] = serde_json::json!({"five": 1});
    let (status, answer) = fixture.post(&odd).await;
    assert_eq!(status, 400);
    assert!(answer.contains("no token id"), "{answer}");
    fixture.assert_idle().await;
}

/// How likely each token was is told once for each, streamed or whole, with no more alternatives than asked for.
#[tokio::test]
async fn likelihoods_reach_the_client() {
    for stream in [true, false] {
        let fixture = Fixture::start(&[Act::Answer(3)], RouterMode::RoundRobin).await;
        let mut body = ask(stream);
        body["logprobs"] = true.into();
        body["top_logprobs"] = 2.into();
        let (status, answer) = fixture.post(&body).await;
        assert_eq!(status, 200);
        assert_eq!(answer.matches("\"logprob\":-0.5").count(), 3, "{answer}");
        assert_eq!(answer.matches("\"logprob\":-1.5").count(), 6, "{answer}");
        assert!(answer.contains("\"token\":\" two\""), "{answer}");
        let (_, plain) = fixture.post(&ask(stream)).await;
        assert!(!plain.contains("-0.5"), "{plain}");
        fixture.assert_idle().await;
    }
}
