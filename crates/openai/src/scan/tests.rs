//! Tests of the scanner: recorded and random bodies.

use expect_test::{Expect, expect};
use proptest::prelude::*;

use super::*;

fn check(body: &str, change: impl Fn(&mut Edits<'_, '_>), want: &Expect) {
    let body = Bytes::copy_from_slice(body.as_bytes());
    let scan = Scan::parse(&body).unwrap();
    let mut edits = scan.edit();
    change(&mut edits);
    let out = edits.apply(&body);
    want.assert_eq(std::str::from_utf8(&out).unwrap());
    serde_json::from_slice::<serde::de::IgnoredAny>(&out).unwrap();
}

/// Only the named field and one comma go, wherever it stands; spacing and odd values stay.
#[test]
fn a_field_is_cut_with_its_comma() {
    let cut = |e: &mut Edits<'_, '_>| {
        e.remove("nvext");
    };
    let tests = [
        (r#"{"nvext":{}, "a":1e400}"#, expect![[r#"{"a":1e400}"#]]),
        (
            r#"{ "a" : 1 , "nvext" : {"x":[1,"}"]} }"#,
            expect![[r#"{ "a" : 1 }"#]],
        ),
        (r#"{"a":1,"nvext":2,"nvext":3}"#, expect![[r#"{"a":1}"#]]),
        (
            r#"{"nvext":2,"nv\u0065xt":3,"b":[ ]}"#,
            expect![[r#"{"b":[ ]}"#]],
        ),
        (r#"{"nvext":2}"#, expect!["{}"]),
        (r#"{"a":{"nvext":1}}"#, expect![[r#"{"a":{"nvext":1}}"#]]),
    ];
    for (body, want) in &tests {
        check(body, cut, want);
    }
}

#[test]
fn usage_is_asked_for_without_touching_other_options() {
    let ask = |e: &mut Edits<'_, '_>| {
        e.ask_usage(false);
    };
    let tests = [
        (
            r#"{"a":1}"#,
            expect![[r#"{"stream_options":{"include_usage":true},"a":1}"#]],
        ),
        (
            r#"{}"#,
            expect![[r#"{"stream_options":{"include_usage":true}}"#]],
        ),
        (
            r#"{"stream_options":null}"#,
            expect![[r#"{"stream_options":{"include_usage":true}}"#]],
        ),
        (
            r#"{"stream_options":"bad","a":1}"#,
            expect![[r#"{"stream_options":"bad","a":1}"#]],
        ),
        (
            r#"{"stream_options": { }}"#,
            expect![[r#"{"stream_options": {"include_usage":true }}"#]],
        ),
        (
            r#"{"stream_options": {"include_usage": false, "x": 1}}"#,
            expect![[r#"{"stream_options": {"include_usage": true, "x": 1}}"#]],
        ),
        (
            r#"{"stream_options": {"x": 1}}"#,
            expect![[r#"{"stream_options": {"include_usage":true,"x": 1}}"#]],
        ),
    ];
    for (body, want) in &tests {
        check(body, ask, want);
    }
}

#[test]
fn changes_combine() {
    check(
        r#"{"nvext":{"cache_salt":"s"},"model":"m","priority":1}"#,
        |e| {
            e.remove("nvext")
                .set("priority", "5")
                .set("cache_salt", "\"s\"")
                .ask_usage(false);
        },
        &expect![[
            r#"{"cache_salt":"s","stream_options":{"include_usage":true},"model":"m","priority":5}"#
        ]],
    );
    check(
        r#"{"nvext":{"cache_salt":"s"}}"#,
        |e| {
            e.remove("nvext").set("cache_salt", "\"s\"");
        },
        &expect![[r#"{"cache_salt":"s"}"#]],
    );
}

#[test]
fn odd_values_are_absent_not_errors() {
    let body = br#"{"model":7,"stream":"yes","n":"x","prompt":{"a":1},"max_tokens":3,"max_completion_tokens":null,"messages":null,"cache_salt":""}"#;
    let scan = Scan::parse(body).unwrap();
    assert_eq!(scan.model(), None);
    assert!(!scan.stream());
    assert_eq!((scan.n(), scan.max_tokens()), (1, Some(3)));
    assert_eq!(scan.prompts(), None);
    assert_eq!(scan.messages(), None);
    assert_eq!(scan.cache_salt(), None);
}

#[test]
fn the_last_of_two_counts() {
    let scan = Scan::parse(br#"{"model":"a","mod\u0065l":"b\n"}"#).unwrap();
    assert_eq!(scan.model().as_deref(), Some("b\n"));
}

fn json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        any::<String>().prop_map(Into::into),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
            proptest::collection::btree_map("[a-z\"\\\\]{0,3}", inner, 0..4)
                .prop_map(|m| m.into_iter().collect()),
        ]
    })
}

proptest! {
    /// Against a JSON tree: removing and setting fields does what it does to the tree.
    #[test]
    fn edits_agree_with_a_tree(
        fields in proptest::collection::btree_map(
            prop_oneof![Just("nvext".to_owned()), Just("priority".to_owned()), any::<String>()],
            json(), 0..6),
        pretty in any::<bool>(),
        priority in any::<i32>(),
    ) {
        let tree: serde_json::Map<_, _> = fields.into_iter().collect();
        let body = if pretty {
            serde_json::to_vec_pretty(&tree).unwrap()
        } else {
            serde_json::to_vec(&tree).unwrap()
        };
        let body = Bytes::from(body);
        let scan = Scan::parse(&body).unwrap();
        prop_assert_eq!(scan.edit().apply(&body), body.clone());
        let mut edits = scan.edit();
        edits.remove("nvext").set("priority", &priority.to_string());
        let out: serde_json::Value = serde_json::from_slice(&edits.apply(&body)).unwrap();
        let mut want = tree;
        want.remove("nvext");
        want.insert("priority".into(), priority.into());
        prop_assert_eq!(out, serde_json::Value::Object(want));
    }

    #[test]
    fn no_bytes_panic(body in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Scan::parse(&body);
    }
}

#[test]
fn a_mistake_in_the_extension_is_placed_in_the_body() {
    let body = b"{\"model\":\"m\",\n \"nvext\":{\"dp_rank\":-1}}";
    let error = crate::Nvext::of_scan(&Scan::parse(body).unwrap()).unwrap_err();
    let message = error.message;
    assert!(message.contains("nvext.dp_rank: "), "{message}");
    assert!(message.ends_with("at line 2 column 22"), "{message}");
    let none = Scan::parse(b"{\"nvext\":null}").unwrap();
    assert_eq!(crate::Nvext::of_scan(&none), Ok(crate::Nvext::default()));
}
