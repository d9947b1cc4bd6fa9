//! Against Dynamo 1.6.1: what it refused we refuse with its text, what it took we take, and our answers have
//! the shape of its answers.

use bytes::BytesMut;
use kvasir_openai::{
    AnswerHead, AnswerParts, ApiError, BusyThreshold, BusyUpdate, ChatRequest, Choice,
    CompletionRequest, Endpoint, Event, EventParser, HeaderHints, ModelInfo, ResponseNvext,
    StreamWriter, Timing, Unknown, Usage, WorkerIds, busy_thresholds, live, models, not_ready,
    write_annotation, write_done, write_unary,
};
use kvasir_types::{FinishReason, RequestId};
use serde_json::Value;

use crate::{Case, case, cases};

fn parse(case: &Case) -> Option<Result<(), ApiError>> {
    let body = case.body.as_bytes();
    match &*case.request {
        "POST /v1/chat/completions" => Some(ChatRequest::parse(body, Unknown::Refuse).map(|_| ())),
        "POST /v1/completions" => Some(CompletionRequest::parse(body, Unknown::Refuse).map(|_| ())),
        _ => None,
    }
}

/// Dynamo's documentation names three fields that its frontend refuses: we take them.
const WE_TAKE: [&str; 3] = [
    "err_agent_hint_unknown",
    "err_agent_hint_weight",
    "nvext_session_control",
];

#[test]
fn what_it_took_we_take() {
    let mut taken = 0;
    for case in cases("dynamo-http") {
        let refused_for_its_body = case.status == 400
            && (case.answer.contains("Failed to deserialize")
                || case.answer.contains("Validation: "));
        if refused_for_its_body && !WE_TAKE.contains(&&*case.name) {
            continue;
        }
        if let Some(result) = parse(&case) {
            assert_eq!(result, Ok(()), "{}", case.name);
            taken += 1;
        }
    }
    assert!(taken > 40, "{taken}");
}

/// Texts are equal but for what we add: the field's name before the text, and the exact column.
#[test]
fn what_it_refused_we_refuse_with_its_text() {
    let mut refused = 0;
    for case in cases("dynamo-http") {
        if case.status != 400 || WE_TAKE.contains(&&*case.name) {
            continue;
        }
        let Some(Err(error)) = parse(&case) else {
            continue;
        };
        let theirs: Value = serde_json::from_str(&case.answer).unwrap();
        let ours: Value = serde_json::from_slice(&error.to_body()).unwrap();
        assert_eq!(ours["type"], theirs["type"], "{}", case.name);
        assert_eq!(ours["code"], theirs["code"]);
        let theirs = theirs["message"].as_str().unwrap();
        let ours = ours["message"].as_str().unwrap();
        assert_eq!(reduce(ours), reduce(theirs), "{}: {ours}", case.name);
        refused += 1;
    }
    assert_eq!(refused, 11);
}

/// Without position, without a field's name before the text, without the list of accepted names.
fn reduce(message: &str) -> String {
    let head = message.split(" at line ").next().unwrap();
    let head = head.split(", expected one of").next().unwrap();
    let fields = ["max_tokens: ", "messages: ", "nvext: "];
    fields
        .iter()
        .fold(head.to_owned(), |text, field| text.replace(field, ""))
}

fn no_nulls(value: &Value) -> Value {
    match value {
        Value::Object(map) => map
            .iter()
            .filter(|(_, v)| !v.is_null())
            .map(|(k, v)| (k.clone(), no_nulls(v)))
            .collect(),
        Value::Array(list) => list.iter().map(no_nulls).collect(),
        other => other.clone(),
    }
}

fn head<'a>(endpoint: Endpoint, answer: &'a Value) -> AnswerHead<'a> {
    let id = answer["id"].as_str().unwrap();
    AnswerHead {
        endpoint,
        id: RequestId::parse(id.split_once('-').unwrap().1).unwrap(),
        model: answer["model"].as_str().unwrap(),
        created: answer["created"].as_u64().unwrap(),
    }
}

fn usage(answer: &Value) -> Option<Usage> {
    let usage = answer["usage"].as_object()?;
    Some(Usage {
        prompt_tokens: usage["prompt_tokens"].as_u64()?,
        completion_tokens: usage["completion_tokens"].as_u64()?,
        cached_tokens: answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64(),
    })
}

fn nvext(answer: &Value) -> ResponseNvext {
    let ids = |key: &str| -> Option<Vec<u32>> {
        let list = answer["nvext"][key].as_array()?;
        Some(list.iter().map(|id| id.as_u64().unwrap() as u32).collect())
    };
    let worker = &answer["nvext"]["worker_id"];
    let timing = &answer["nvext"]["timing"];
    let rank = |key: &str| worker[key].as_u64().map(|r| r as u32);
    ResponseNvext {
        worker_id: worker.is_object().then(|| WorkerIds {
            prefill_worker_id: worker["prefill_worker_id"].as_u64(),
            prefill_dp_rank: rank("prefill_dp_rank"),
            decode_worker_id: worker["decode_worker_id"].as_u64(),
            decode_dp_rank: rank("decode_dp_rank"),
        }),
        token_ids: ids("token_ids"),
        completion_token_ids: ids("completion_token_ids"),
        timing: timing.is_object().then(|| Timing {
            request_received_ms: timing["request_received_ms"].as_u64().unwrap(),
            prefill_wait_time_ms: timing["prefill_wait_time_ms"].as_f64(),
            prefill_time_ms: timing["prefill_time_ms"].as_f64(),
            ttft_ms: timing["ttft_ms"].as_f64(),
            total_time_ms: timing["total_time_ms"].as_f64(),
            kv_hit_rate: timing["kv_hit_rate"].as_f64(),
            router_queue_depth: timing["router_queue_depth"].as_u64(),
            kv_transfer_estimated_latency_ms: timing["kv_transfer_estimated_latency_ms"].as_f64(),
        }),
        ..ResponseNvext::default()
    }
}

fn reason(choice: &Value) -> Option<FinishReason> {
    match choice["finish_reason"].as_str()? {
        "length" => Some(FinishReason::Length),
        _ => Some(FinishReason::Stop),
    }
}

/// Reads each recorded whole answer into our types and writes it again.
#[test]
fn whole_answers_have_its_shape() {
    let mut seen = 0;
    for case in cases("dynamo-http") {
        let chat = case.request == "POST /v1/chat/completions";
        if case.status != 200
            || !case.answer.starts_with('{')
            || !(chat || case.request == "POST /v1/completions")
            || case.name == "fault_silent"
        {
            continue;
        }
        let theirs: Value = serde_json::from_str(&case.answer).unwrap();
        let choices: Vec<Choice> = theirs["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|c| Choice {
                parts: AnswerParts::text(
                    if chat {
                        &c["message"]["content"]
                    } else {
                        &c["text"]
                    }
                    .as_str()
                    .unwrap_or_default()
                    .to_owned(),
                ),
                finish: reason(c),
                logprobs: None,
            })
            .collect();
        let endpoint = if chat {
            Endpoint::Chat
        } else {
            Endpoint::Completions
        };
        let mut out = BytesMut::new();
        write_unary(
            &mut out,
            &head(endpoint, &theirs),
            &choices,
            usage(&theirs).as_ref(),
            &nvext(&theirs),
        );
        let ours: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(no_nulls(&ours), no_nulls(&theirs), "{}", case.name);
        if chat {
            assert_eq!(
                std::str::from_utf8(&out).unwrap(),
                case.answer,
                "{}",
                case.name
            );
        }
        seen += 1;
    }
    assert!(seen > 20, "{seen}");
}

fn events(text: &str) -> Vec<Event> {
    let mut parser = EventParser::new(1 << 20);
    parser.push(bytes::Bytes::copy_from_slice(text.as_bytes()));
    let mut events = Vec::new();
    while let Some(event) = parser.next_event().unwrap() {
        events.push(event);
    }
    assert!(parser.take_rest().is_empty());
    events
}

/// Reads each recorded stream frame by frame and writes it again: chat byte for byte, completions but for
/// the `null`s that clients want and the peer leaves out.
#[test]
fn streams_have_its_shape() {
    let mut frames = 0;
    for case in cases("dynamo-http") {
        if case.status != 200
            || !case.answer.contains("data: ")
            || case.name == "fault_comments_stream"
        {
            continue;
        }
        let chat = case.request == "POST /v1/chat/completions";
        let endpoint = if chat {
            Endpoint::Chat
        } else {
            Endpoint::Completions
        };
        let mut writer = None;
        for event in events(&case.answer) {
            let mut out = BytesMut::new();
            write_again(&event, endpoint, &mut writer, &mut out);
            if chat {
                assert_eq!(out, event.raw, "{}", case.name);
            } else {
                let read = |raw: &[u8]| -> Value {
                    let raw = events(std::str::from_utf8(raw).unwrap());
                    no_nulls(&serde_json::from_slice(&raw[0].data().unwrap()).unwrap_or_default())
                };
                assert_eq!(read(&out), read(&event.raw), "{}", case.name);
            }
            frames += 1;
        }
    }
    assert!(frames > 50, "{frames}");
}

fn write_again(
    event: &Event,
    endpoint: Endpoint,
    writer: &mut Option<StreamWriter>,
    out: &mut BytesMut,
) {
    if let Some(name) = event.name() {
        let raw = std::str::from_utf8(&event.raw).unwrap();
        let comment = raw.lines().nth(1).unwrap().strip_prefix(": ").unwrap();
        return write_annotation(out, name, &serde_json::from_str::<String>(comment).unwrap());
    }
    if event.is_done() {
        return write_done(out);
    }
    let theirs: Value = serde_json::from_slice(&event.data().unwrap()).unwrap();
    if let Some(error) = theirs["error"].as_object() {
        let status = error["code"].as_u64().unwrap() as u16;
        let message = error["message"].as_str().unwrap().to_owned();
        return ApiError::new(status, message).write_frame(out);
    }
    let writer = writer.get_or_insert_with(|| StreamWriter::new(&head(endpoint, &theirs), 1));
    let nvext = nvext(&theirs);
    let Some(choice) = theirs["choices"].get(0) else {
        return writer.usage(out, &usage(&theirs).unwrap(), &nvext);
    };
    let text = match endpoint {
        Endpoint::Chat => choice["delta"]["content"].as_str(),
        Endpoint::Completions => choice["text"].as_str().filter(|t| !t.is_empty()),
    };
    match (text, reason(choice)) {
        (Some(text), None) => {
            let parts = AnswerParts::text(text.to_owned());
            writer.parts(out, 0, &parts, None, &nvext);
        }
        (None, Some(reason)) => writer.finish(out, 0, reason, &nvext),
        (None, None) => writer.query(out, &nvext),
        (Some(_), Some(_)) => panic!("text and finish reason in one frame"),
    }
}

#[test]
fn error_bodies_are_its_bodies() {
    let same = |error: ApiError, name: &str| {
        let theirs = case("dynamo-http", name);
        assert_eq!(error.status, theirs.status, "{name}");
        assert_eq!(
            std::str::from_utf8(&error.to_body()).unwrap(),
            theirs.answer,
            "{name}"
        );
    };
    same(ApiError::model_not_found(), "err_unknown_model");
    same(ApiError::media_type(), "err_no_content_type");
    // We say which worker, after its words.
    let theirs = case("dynamo-http", "err_pin_unknown_worker").answer;
    let ours = ApiError::invalid_pin("worker 7 is not there").to_body();
    let ours = std::str::from_utf8(&ours).unwrap();
    assert_eq!(ours.replace(": worker 7 is not there", ""), theirs);
    same(ApiError::not_ready(), "drain_chat");
    same(ApiError::unavailable(), "fault_close_mid");
    same(ApiError::deadline(), "fault_no_ack");
    same(
        ApiError::backend(500, "secret", 503),
        "fault_error_item_unknown",
    );
    same(
        ApiError::backend(400, "public text", 503),
        "fault_error_item_invalid",
    );
    same(ApiError::route_not_found("GET", "/nope"), "not_found");
    assert_eq!(
        ApiError::body_too_large(45).message,
        "Request body exceeds the limit of 45 MB set by --http-body-limit-mb (DYN_HTTP_BODY_LIMIT_MB)"
    );
}

/// The overload body of Dynamo's documentation, byte for byte.
#[test]
fn the_overload_body_is_the_mandatory_one() {
    assert_eq!(
        &ApiError::overloaded(503).to_body()[..],
        br#"{"message":"Service temporarily unavailable: All workers are busy, please retry later","type":"service_unavailable","code":503}"#
    );
}

#[test]
fn busy_threshold_answers_are_its_answers() {
    let mut state = BusyThreshold {
        model: "m".into(),
        ..BusyThreshold::default()
    };
    let steps = [
        "busy_post_read",
        "busy_post_set_decode",
        "busy_post_set_prefill",
        "busy_post_set_frac",
        "busy_post_null",
    ];
    for name in steps {
        let theirs = case("dynamo-http", name);
        state.merge(&BusyUpdate::parse(theirs.body.as_bytes()).unwrap());
        let mut out = BytesMut::new();
        state.write(&mut out);
        assert_eq!(std::str::from_utf8(&out).unwrap(), theirs.answer, "{name}");
    }
    assert_eq!(
        busy_thresholds(&[state]),
        case("dynamo-http", "busy_get_after").answer
    );
    let refused = [
        "busy_post_bad_json",
        "busy_post_bad_type",
        "busy_post_negative",
        "busy_post_no_model",
        "busy_post_out_of_range",
    ];
    for name in refused {
        let theirs = case("dynamo-http", name);
        let error = BusyUpdate::parse(theirs.body.as_bytes()).unwrap_err();
        assert_eq!(error.status, theirs.status, "{name}");
        assert_eq!(error.to_body(), theirs.answer, "{name}");
    }
    let unknown = case("dynamo-http", "busy_post_unknown_set");
    assert_eq!(
        kvasir_openai::BusyError::unknown_model("zz").to_body(),
        unknown.answer
    );
}

#[test]
fn probes_and_models_are_its_answers() {
    assert_eq!(live(), case("dynamo-http", "live").answer);
    assert_eq!(
        not_ready("draining"),
        case("dynamo-http", "drain_health").answer
    );
    // Without workers it says that it is healthy; we say that nothing can be asked, so that balancers look elsewhere.
    let nobody = kvasir_openai::Health::default();
    assert!(!nobody.is_ready());
    let ours = String::from_utf8(nobody.to_body().to_vec()).unwrap();
    let theirs = case("dynamo-http", "noworker_health").answer;
    let not_ready = r#""not_ready","stage":"no_workers","message":"Service is not ready""#;
    assert_eq!(ours.replace(not_ready, r#""healthy""#), theirs);
    assert_eq!(models(&[]), case("dynamo-http", "noworker_models").answer);
    let model = ModelInfo {
        id: "m".into(),
        created: 1_794_712_338,
        context_window: 0,
        max_output_tokens: None,
    };
    let ours = String::from_utf8(models(&[model]).to_vec()).unwrap();
    let theirs = case("dynamo-http", "models").answer;
    assert_eq!(ours.replace("kvasir", "nvidia"), theirs);
}

/// The recorded header forms, and one that does not parse and so says nothing.
#[test]
fn headers_beat_the_body() {
    let read = |name: &str| {
        let case = case("dynamo-http", name);
        HeaderHints::read(case.headers.iter().map(|(k, v)| (&**k, &**v)))
    };
    let hints = read("chat_meta_headers");
    let body = case("dynamo-http", "chat_meta_headers").body;
    let mut request = ChatRequest::parse(body.as_bytes(), Unknown::Refuse).unwrap();
    assert_eq!(request.nvext.cache_salt.as_deref(), Some("s1"));
    hints.apply(&mut request.nvext);
    assert_eq!(request.nvext.cache_salt.as_deref(), Some("acme"));
    assert_eq!(hints.meta, [("team".to_owned(), "blue".to_owned())]);
    assert_eq!(read("err_pin_bad_header").worker, None);
}
