//! Answers with and without words of transfers, whole and in pieces, against a reading of the whole JSON.

use proptest::prelude::*;
use serde_json::{Map, Value as Json, json};

use super::*;

/// What comes out of an answer in these pieces.
fn piecewise<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut filter = TransferFilter::default();
    let mut out = Vec::new();
    for piece in pieces {
        out.extend_from_slice(&filter.push(Bytes::copy_from_slice(piece)));
        assert!(filter.held.len() <= HELD_MAX + 1);
    }
    out.extend_from_slice(&filter.finish());
    out
}

fn shown(answer: &str) -> String {
    let bytes = answer.as_bytes();
    let whole = without_transfer(bytes).map_or(bytes.to_vec(), |out| out.to_vec());
    for size in [1, 2, 3, 7, 64] {
        assert_eq!(piecewise(bytes.chunks(size)), whole, "{size}: {answer}");
    }
    String::from_utf8(whole).unwrap()
}

#[test]
fn no_answer_speaks_of_a_transfer() {
    for (said, expected) in [
        (
            r#"{"choices":[{"text":"a","disaggregated_params": {"x":[1,"}"]}}],"kv_transfer_params" : {"remote_block_ids":[[1]]}}"#,
            r#"{"choices":[{"text":"a","disaggregated_params": null}],"kv_transfer_params" : null}"#,
        ),
        // As events of responses and of messages have it.
        (
            "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"kv_transfer_params\":{\"remote_host\":\"10.0.0.1\"}}}\n\ndata: {}\n\n",
            "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"kv_transfer_params\":null}}\n\ndata: {}\n\n",
        ),
        (
            "data: {\"type\":\"message_start\",\"message\":{\"disaggregated_params\":[{}]}}\n\n",
            "data: {\"type\":\"message_start\",\"message\":{\"disaggregated_params\":null}}\n\n",
        ),
        // An error that repeats what its engine was sent.
        (
            r#"{"detail":[{"input":{"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":[7, 8] ,"disagg_prefill_dp_rank":0}}]}"#,
            r#"{"detail":[{"input":{"bootstrap_host":null,"bootstrap_port":null,"bootstrap_room":null ,"disagg_prefill_dp_rank":null}}]}"#,
        ),
        (
            r#"[{"ec_transfer_params":"a\"}b"},{"kv_transfer_params":true}]"#,
            r#"[{"ec_transfer_params":null},{"kv_transfer_params":null}]"#,
        ),
    ] {
        assert_eq!(shown(said), expected);
    }
}

#[test]
fn what_only_looks_like_it_goes_on_as_it_is() {
    for said in [
        r#"{"choices":[],"kv_transfer_params":null,"ec_transfer_params" :  null}"#,
        r#"{"choices":[{"text":"the \"kv_transfer_params\":{} field, and \\\"bootstrap_room\":1"}]}"#,
        r#"{"names":["kv_transfer_params","bootstrap_room"],"my_kv_transfer_params":{"a":1},"kv_transfer_params2":{}}"#,
        r#"{"text":"bootstrap_room"}"#,
        r#"{"text":"cut off \"kv_tra"#,
        "data: [DONE]\n\n",
        r#"{"k"#,
        "\"",
        "",
    ] {
        assert_eq!(without_transfer(said.as_bytes()), None, "{said}");
        assert_eq!(shown(said), said);
    }
}

#[test]
fn an_answer_that_is_cut_off_in_a_transfer_tells_none_of_it() {
    let answer = r#"{"a":1,"kv_transfer_params":{"remote_host":"10.0.0.1"}}"#;
    for end in 0..answer.len() {
        let out = String::from_utf8(piecewise([&answer.as_bytes()[..end]])).unwrap();
        assert!(!out.contains("remote"), "{out}");
    }
}

#[test]
fn a_piece_without_them_is_not_copied() {
    let piece = Bytes::from_static(br#"data: {"choices":[{"delta":{"content":"x"}}]}"#);
    let out = TransferFilter::default().push(piece.clone());
    assert_eq!(out.as_ptr(), piece.as_ptr());
}

#[test]
fn an_error_may_name_them_in_its_text() {
    assert!(names_transfer(b"'input': {'kv_transfer_params': {}}"));
    assert!(names_transfer(b"bootstrap_room is taken"));
    assert!(!names_transfer(b"max_tokens is too large"));
}

/// The same by reading the whole JSON.
fn nulled(json: &Json) -> Json {
    match json {
        Json::Object(fields) => {
            let of = |(key, value): (&String, &Json)| match is_transfer(key) {
                true => (key.clone(), Json::Null),
                false => (key.clone(), nulled(value)),
            };
            Json::Object(fields.iter().map(of).collect())
        }
        Json::Array(items) => Json::Array(items.iter().map(nulled).collect()),
        other => other.clone(),
    }
}

fn key() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("kv_transfer_params".to_owned()),
        Just("bootstrap_room".to_owned()),
        Just("disagg_prefill_dp_rank".to_owned()),
        Just("disaggregated_params".to_owned()),
        Just("kv_transfer_param".to_owned()),
        Just("choices".to_owned()),
        "[a-e_\"\\\\{:,]{0,6}",
    ]
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-d\"\\\\{}:, \n]{0,12}",
        key().prop_map(|key| format!("\"{key}\":{{"))
    ]
}

fn answer() -> impl Strategy<Value = Json> {
    let leaf = prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::from),
        any::<i32>().prop_map(Json::from),
        text().prop_map(Json::from),
    ];
    leaf.prop_recursive(4, 40, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Json::from),
            prop::collection::vec((key(), inner), 0..5)
                .prop_map(|fields| Json::Object(fields.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

proptest! {
    #[test]
    fn any_answer_in_any_pieces(json in answer(), pretty in any::<bool>(), cuts in prop::collection::vec(0_usize..400, 0..8)) {
        let json = json!({ "answer": json });
        let write = |json: &Json| if pretty { serde_json::to_string_pretty(json) } else { serde_json::to_string(json) };
        let (said, expected) = (write(&json).unwrap(), write(&nulled(&json)).unwrap());
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(said.len())).chain([0, said.len()]).collect();
        cuts.sort_unstable();
        let pieces = cuts.windows(2).map(|ends| &said.as_bytes()[ends[0]..ends[1]]);
        prop_assert_eq!(String::from_utf8(piecewise(pieces)).unwrap(), &expected[..]);
        prop_assert_eq!(shown(&said), expected);
    }
}
