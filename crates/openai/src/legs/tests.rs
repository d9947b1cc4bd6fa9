//! The bodies of both legs, against those that real vLLM servers took.

use serde_json::Value;

use super::*;

/// One exchange with a real server.
#[derive(serde::Deserialize)]
struct Exchange {
    case: String,
    leg: String,
    request: Value,
    status: u16,
    response: String,
}

fn recorded() -> Vec<Exchange> {
    let lines = include_str!("../../../../testdata/vllm-disagg/exchanges.jsonl").lines();
    lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The client's body of an exchange: what the answering server got, without what the other had said.
fn of_client(decode: &Exchange) -> Bytes {
    let mut body = decode.request.clone();
    body.as_object_mut().unwrap().remove("kv_transfer_params");
    body.to_string().into()
}

/// Which route it went to.
fn api(exchange: &Exchange) -> LegApi {
    match exchange.case.starts_with("responses") {
        true => LegApi::Responses,
        false => LegApi::Completions,
    }
}

fn json(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap()
}

/// Where a prompt is, as the answer of its engine says.
fn told(answer: &str) -> Option<String> {
    PrefillAnswer::read(answer.as_bytes()).transfer_params
}

/// Exchanges in which both servers answered well, first the prompt's.
fn pairs() -> Vec<(Exchange, Exchange)> {
    let mut all = recorded().into_iter().peekable();
    let mut pairs = Vec::new();
    while let Some(first) = all.next() {
        let is_pair = |next: &Exchange| next.case == first.case && next.leg == "decode";
        if first.leg == "prefill"
            && first.status == 200
            && let Some(second) = all.next_if(is_pair)
        {
            pairs.push((first, second));
        }
    }
    assert!(pairs.len() > 10);
    pairs
}

#[test]
fn legs_are_those_that_real_servers_took() {
    for (prefill, decode) in pairs() {
        let (case, body) = (&prefill.case, of_client(&decode));
        let mut ours = json(&prefill_leg(&body, api(&prefill)).unwrap());
        let mut theirs = prefill.request.clone();
        for fields in [&mut ours, &mut theirs] {
            let fields = fields.as_object_mut().unwrap();
            // Nothing is kept that nobody will ask for.
            fields.remove("store");
            // What makes no difference: the default, and what of the one token is asked for.
            fields.retain(|key, value| !(key == "stream" && value == &Value::Bool(false)));
            for key in ["logprobs", "top_logprobs", "prompt_logprobs"] {
                fields.remove(key);
            }
        }
        assert_eq!(ours, theirs, "{case}");
        let params = told(&prefill.response).unwrap();
        assert_eq!(
            json(&decode_leg(&body, &params).unwrap()),
            decode.request,
            "{case}"
        );
    }
}

#[test]
fn what_is_refused_of_a_prefill_is_left_out_of_it() {
    let refused = recorded()
        .into_iter()
        .filter(|e| e.leg == "prefill" && e.status == 400);
    let mut seen = 0;
    for exchange in refused {
        let leg = json(&prefill_leg(&exchange.request.to_string().into(), api(&exchange)).unwrap());
        assert!(leg.get("stream_options").is_none() && leg.get("min_tokens").is_none());
        seen += 1;
    }
    assert_eq!(seen, 2);
}

#[test]
fn only_one_answer_from_a_prompt_alone_is_transferred() {
    let fits =
        |endpoint, body: &str| is_transferable(&Scan::parse(body.as_bytes()).unwrap(), endpoint);
    let completions = |body: &str| fits(Endpoint::Completions, body);
    for body in [
        r#"{"prompt":"a"}"#,
        r#"{"prompt":["a"],"n":1,"best_of":1,"echo":false}"#,
        r#"{"prompt":[1,2,3],"logprobs":2}"#,
        r#"{"prompt":[[1,2]],"prompt_logprobs":null}"#,
    ] {
        assert!(completions(body), "{body}");
    }
    for body in [
        r#"{"prompt":["a","b"]}"#,
        r#"{"prompt":[[1],[2]]}"#,
        r#"{"prompt":"a","n":2}"#,
        r#"{"prompt":"a","best_of":2}"#,
        r#"{"prompt":"a","echo":true}"#,
        r#"{"prompt":"a","prompt_logprobs":1}"#,
    ] {
        assert!(!completions(body), "{body}");
    }
    assert!(fits(
        Endpoint::Chat,
        r#"{"messages":[],"prompt":["a","b"]}"#
    ));
}

#[test]
fn an_answer_without_a_transfer_has_none() {
    let recorded = recorded();
    let no_params = recorded.iter().find(|e| e.case == "prefill_no_params");
    assert_eq!(told(&no_params.unwrap().response), None);
    for answer in [
        "",
        "{}",
        r#"{"kv_transfer_params":null}"#,
        r#"{"kv_transfer_params":{ }}"#,
        r#"{"kv_transfer_params":"x"}"#,
        r#"{"choices":[{"kv_transfer_params":{"a":1}}]}"#,
    ] {
        assert_eq!(told(answer), None, "{answer}");
    }
}

#[test]
fn both_sglang_engines_get_the_same_meeting() {
    let body = Bytes::from_static(br#"{"messages":[], "stream":true}"#);
    let mut fields = BootstrapFields {
        host: "10.0.0.1",
        port: 8998,
        room: u64::MAX >> 1,
        prefill_rank: None,
    };
    assert_eq!(
        bootstrap_leg(&body, fields).unwrap(),
        r#"{"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":9223372036854775807,"messages":[], "stream":true}"#
    );
    (fields.host, fields.prefill_rank) = ("fd00::1", Some(3));
    let leg = json(&bootstrap_leg(&body, fields).unwrap());
    assert_eq!(leg["bootstrap_host"], "[fd00::1]");
    assert_eq!(leg["disagg_prefill_dp_rank"], 3);
}

#[test]
fn a_response_is_handed_over_if_its_prompt_is_in_its_body() {
    let fits = |body: &str| is_response_transferable(&Scan::parse(body.as_bytes()).unwrap());
    for body in [
        r#"{"input":"a"}"#,
        r#"{"input":[],"tools":[{"type":"function","name":"f"}],"background":false,"previous_response_id":null}"#,
    ] {
        assert!(fits(body), "{body}");
    }
    for body in [
        r#"{"input":"a","previous_response_id":"resp_1"}"#,
        r#"{"input":"a","background":true}"#,
        r#"{"input":"a","tools":[{"type":"web_search"}]}"#,
        r#"{"input":"a","tools":7}"#,
    ] {
        assert!(!fits(body), "{body}");
    }
}

/// What is put in front without reading the body is what reading it finds.
#[test]
fn fields_are_set_alike_with_and_without_reading() {
    let bodies = [
        r#"{"prompt":"a"}"#,
        " { \n \"prompt\" : \"a\\n\", \"n\": 1 } ",
        r#"{}"#,
        r#" { } "#,
        r#"{"kv_transfer_params":{"remote_port":2},"prompt":"a"}"#,
        r#"{"kv\u005ftransfer_params":{"remote_port":2},"prompt":"a"}"#,
        r#"{"prompt":"say kv_transfer_params"}"#,
        r#"{"prompt":"\u00e4"}"#,
    ];
    for body in bodies {
        let body = Bytes::from_static(body.as_bytes());
        let object = Object::parse(&body).unwrap();
        let read = Edits::of(&object).set(TRANSFER, "{\"a\":1}").apply(&body);
        let set = decode_leg(&body, "{\"a\":1}").unwrap();
        assert_eq!(set, read);
        assert_eq!(json(&set)["kv_transfer_params"]["a"], 1);
    }
    for body in ["", "[]", "null", "{", "{1}"] {
        assert_eq!(decode_leg(&Bytes::from(body), "{}"), None, "{body}");
    }
}

proptest::proptest! {
    /// The quick reading of a prompt's answer is the careful one, or none.
    #[test]
    fn both_readings_of_a_prompts_answer_agree(
        fields in proptest::collection::vec((0usize..4, 0usize..9), 0..5),
    ) {
        const NAMES: [&str; 4] = ["usage", "kv_transfer_params", "id", "x"];
        const VALUES: [&str; 9] = [
            "null",
            "{}",
            "{ }",
            "7",
            "[1,2]",
            "\"\\\"usage\\\":{}\"",
            "{\"prompt_tokens\":7,\"prompt_tokens_details\":{\"cached_tokens\":3}}",
            "{\"remote_port\":1}",
            "{\"prompt_tokens\":-7}",
        ];
        let fields: Vec<String> = fields
            .iter()
            .map(|(name, value)| format!("\"{}\" : {}", NAMES[*name], VALUES[*value]))
            .collect();
        let answer = format!("{{{}}}", fields.join(" , "));
        if let Some(quick) = PrefillAnswer::find(answer.as_bytes()) {
            let usage = find_usage(answer.as_bytes()).map(|c| c.usage).unwrap_or_default();
            let transfer_params = transfer_params(answer.as_bytes());
            proptest::prop_assert_eq!(quick, PrefillAnswer { transfer_params, usage });
        }
    }
}
