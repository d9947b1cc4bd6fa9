//! No body and no answer keeps a serving thread to itself.

use std::path::Path;
use std::time::Duration;

use kvasir_router::{RouterConfig, RouterMode};
use kvasir_text::ModelFolders;

use crate::engine::{DONE, FIRST, LAST, STREAM_HEAD, Step, chunk, stream, unary};
use crate::rig::{ASK_STREAM, CHAT, Probe, Rig, Setup, in_time};

/// What no handler computes longer than at a stretch.
const STRETCH_MAX: Duration = Duration::from_millis(50);
/// Bytes of the long bodies: those of the default limit, or what a pool that is not optimised reads in a second. What is
/// left on the serving threads is moving bytes, which is as fast there.
const BYTES: usize = if cfg!(debug_assertions) {
    1536 << 10
} else {
    44 << 20
};
const COMPLETIONS: &str = "/v1/completions";

/// A part again and again, up to about [`BYTES`].
fn many(part: &str) -> String {
    let times = BYTES / (part.len() + 1);
    let mut all = String::with_capacity(BYTES);
    for at in 0..times {
        all.push_str(if at > 0 { "," } else { "" });
        all.push_str(part);
    }
    all
}

fn filled(part: &str) -> String {
    part.repeat(BYTES / part.len())
}

/// The worst bodies that are known: where they go, what they are, and whether the engine (or a token worker's reader) is to
/// see them.
fn corpus() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let chat = |inner: &str| format!(r#"{{"model":"m","messages":[{inner}]}}"#).into_bytes();
    let said = |text: &str| chat(&format!(r#"{{"role":"user","content":"{text}"}}"#));
    let prompt = |inner: &str| format!(r#"{{"model":"m","prompt":{inner}}}"#).into_bytes();
    let nvext = |inner: &str| {
        format!(r#"{{"model":"m","prompt":"a","messages":[{{"role":"user","content":"a"}}],"nvext":{{{inner}}}}}"#)
            .into_bytes()
    };
    let fields = || -> String {
        let numbered = (0..BYTES / 16).map(|n| format!(r#""f{n:08}":1,"#));
        numbered.collect()
    };
    let mut all = vec![
        ("ids", COMPLETIONS, prompt(&format!("[{}]", many("1")))),
        (
            "large ids",
            COMPLETIONS,
            prompt(&format!("[{}]", many("4294967295"))),
        ),
        (
            "lists of ids",
            COMPLETIONS,
            prompt(&format!("[{}]", many("[1]"))),
        ),
        (
            "texts",
            COMPLETIONS,
            prompt(&format!("[{}]", many("\"a\""))),
        ),
        (
            "one text",
            COMPLETIONS,
            prompt(&format!("\"{}\"", filled("word "))),
        ),
        (
            "escapes",
            COMPLETIONS,
            prompt(&format!("\"{}\"", filled("\\u00e9"))),
        ),
        (
            "token data",
            CHAT,
            nvext(&format!(r#""token_data":[{}]"#, many("1"))),
        ),
        (
            "token data",
            COMPLETIONS,
            nvext(&format!(r#""token_data":[{}]"#, many("1"))),
        ),
        (
            "annotations",
            CHAT,
            nvext(&format!(r#""annotations":[{}]"#, many("\"a\""))),
        ),
        (
            "unknown extension",
            CHAT,
            nvext(&format!(r#""x":[{}]"#, many("\"a\""))),
        ),
        (
            "messages",
            CHAT,
            chat(&many(r#"{"role":"user","content":"a"}"#)),
        ),
        ("empty messages", CHAT, chat(&many("{}"))),
        ("one content", CHAT, said(&filled("word "))),
        ("no spaces", CHAT, said(&filled("x"))),
        ("escaped content", CHAT, said(&filled("\\n"))),
        (
            "parts",
            CHAT,
            chat(&format!(
                r#"{{"role":"user","content":[{}]}}"#,
                many(r#"{"type":"text","text":"a"}"#)
            )),
        ),
        (
            "nesting",
            CHAT,
            chat(&format!("{}{}", filled("["), "]".repeat(BYTES))),
        ),
        ("nested objects", CHAT, chat(&filled(r#"{"a":"#))),
        (
            "fields",
            CHAT,
            format!(r#"{{{}"model":"m"}}"#, fields()).into_bytes(),
        ),
        (
            "equal fields",
            CHAT,
            format!(r#"{{{},"model":"m"}}"#, many(r#""model":"m""#)).into_bytes(),
        ),
        (
            "tools",
            CHAT,
            format!(r#"{{"model":"m","messages":[],"tools":[{}]}}"#, many("{}")).into_bytes(),
        ),
        (
            "unknown model",
            CHAT,
            format!(r#"{{"model":"{}"}}"#, filled("m")).into_bytes(),
        ),
        ("blanks", CHAT, filled(" ").into_bytes()),
        ("lines", CHAT, filled("\n").into_bytes()),
        ("no JSON", CHAT, vec![0xff; BYTES]),
        (
            "embeddings",
            "/v1/embeddings",
            format!(r#"{{"model":"m","input":[{}]}}"#, many("1")).into_bytes(),
        ),
        (
            "responses",
            "/v1/responses",
            format!(r#"{{"model":"m","input":"{}"}}"#, filled("a ")).into_bytes(),
        ),
        ("messages api", "/v1/messages", chat(&many("{}"))),
        (
            "a worker",
            "/workers",
            format!(r#"{{"url":"{}"}}"#, filled("x")).into_bytes(),
        ),
    ];
    // The same, broken off: they are refused at their very end.
    let broken: Vec<_> = all
        .iter()
        .map(|(name, path, body)| (*name, *path, body[..body.len() - 1].to_vec()))
        .collect();
    all.extend(broken.into_iter().step_by(3));
    all
}

fn kv_setup(probe: &Probe) -> Setup {
    Setup {
        router: RouterConfig {
            router_mode: RouterMode::Kv,
            ..RouterConfig::default()
        },
        probe: Some(probe.clone()),
        ..Setup::usual()
    }
}

/// Sends the corpus and gives what took longer than it may.
async fn worst_of(rig: &Rig, probe: &Probe) -> Vec<String> {
    let mut late = Vec::new();
    for (name, path, body) in corpus() {
        probe.take();
        let mut client = rig.client().await;
        client.try_post(path, body).await;
        // One that is refused early may not be read to its end.
        let answered = in_time(name, client.read_until("\r\n\r\n")).await;
        let stretch = probe.take();
        if stretch > STRETCH_MAX {
            late.push(format!("{name} to {path}: {stretch:?}"));
        }
        if answered {
            let answer = client.answer().await;
            assert!(answer.status != 500, "{name} to {path}: {}", answer.text());
        }
    }
    late
}

#[tokio::test]
async fn no_body_holds_up_a_serving_thread() {
    let probe = Probe::default();
    let rig = Rig::with(1, kv_setup(&probe)).await;
    let late = worst_of(&rig, &probe).await;
    assert!(late.is_empty(), "{late:#?}");
    rig.at_rest().await;
}

#[tokio::test]
async fn nor_does_one_that_has_to_be_tokenized() {
    let probe = Probe::default();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../text/src/builtin");
    let folders = ModelFolders::load(folder.to_str()).unwrap();
    let rig = Rig::with_fleet(1, kv_setup(&probe), |fleet| {
        fleet.with_model_folders(folders)
    })
    .await;
    let late = worst_of(&rig, &probe).await;
    assert!(late.is_empty(), "{late:#?}");
    rig.at_rest().await;
}

/// The request for the rest of an answer is as long as the one that broke off.
#[tokio::test]
async fn nor_does_one_whose_answer_goes_on_elsewhere() {
    let probe = Probe::default();
    let mut setup = kv_setup(&probe);
    setup.options.migration.limit = 1;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../text/src/builtin");
    let folders = ModelFolders::load(folder.to_str()).unwrap();
    let rig = Rig::with_fleet(2, setup, |fleet| fleet.with_model_folders(folders)).await;
    let message = r#"{"role":"user","content":"a"}"#;
    let chat = format!(
        r#"{{"model":"m","stream":true,"messages":[{}]}}"#,
        many(message)
    );
    let ids = format!(r#"{{"model":"m","stream":true,"prompt":[{}]}}"#, many("1"));
    let mut late = Vec::new();
    for (name, path, body) in [("messages", CHAT, chat), ("ids", COMPLETIONS, ids)] {
        let said = match path {
            CHAT => FIRST.to_owned(),
            _ => FIRST.replace(
                "\"delta\":{\"role\":\"assistant\",\"content\":\"h\u{e9}\"}",
                "\"text\":\"h\u{e9}\"",
            ),
        };
        let first = [STREAM_HEAD.as_bytes(), &chunk(said.as_bytes())].concat();
        rig.stage.play(vec![Step::Write(first), Step::Close]);
        rig.stage.play(vec![stream(&[
            said.as_bytes(),
            LAST.as_bytes(),
            DONE.as_bytes(),
        ])]);
        let before = rig.stage.seen().len();
        probe.take();
        let answer = in_time(name, rig.post(path, body)).await;
        let stretch = probe.take();
        assert!(answer.text().ends_with(DONE), "{name}: {}", answer.text());
        assert_eq!(
            rig.stage.seen().len() - before,
            2,
            "{name}: {}",
            answer.text()
        );
        if stretch > STRETCH_MAX {
            late.push(format!("{name}: {stretch:?}"));
        }
    }
    assert!(late.is_empty(), "{late:#?}");
    rig.at_rest().await;
}

/// Engines are not trusted either: events of one byte, chunks of one byte.
#[tokio::test]
async fn no_answer_holds_up_a_serving_thread() {
    const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n";
    let size = BYTES / 2;
    let sized = |body: String| {
        let head = format!("{HEAD}content-length: {}\r\n\r\n", body.len());
        vec![Step::Write([head, body].concat().into_bytes())]
    };
    let chunked = |chunk: &str| {
        let chunks = chunk.repeat(size / chunk.len());
        let head = format!("{HEAD}transfer-encoding: chunked\r\n\r\n");
        vec![Step::Write(
            [&head, &*chunks, "0\r\n\r\n"].concat().into_bytes(),
        )]
    };
    // As long as an event may be that is looked into, or what takes as long where nothing is optimised.
    let longest = if cfg!(debug_assertions) {
        256 << 10
    } else {
        4 << 20
    };
    let lines = format!("data: {{}}\n{}\n", "data:\n".repeat(longest / 6 - 10));
    let answers = [
        ("line ends", sized("\n".repeat(size))),
        ("carriage returns", sized("\r".repeat(size))),
        ("empty events", sized("data:\n\n".repeat(size / 7))),
        ("comments", sized(":\n\n".repeat(size / 3))),
        ("one event of many lines", sized(lines)),
        ("chunks of a line end", chunked("1\r\n\n\r\n")),
        ("chunks of an event", chunked("7\r\ndata:\n\n\r\n")),
        (
            "a unary answer",
            vec![Step::Write(unary(&"[1],".repeat(size / 4)))],
        ),
    ];
    let probe = Probe::default();
    let rig = Rig::with(1, kv_setup(&probe)).await;
    let mut late = Vec::new();
    for (name, answer) in answers {
        rig.stage.play(answer);
        probe.take();
        let answer = in_time(name, rig.post(CHAT, ASK_STREAM)).await;
        let stretch = probe.take();
        assert_eq!(answer.status, 200, "{name}");
        if stretch > STRETCH_MAX {
            late.push(format!("{name}: {stretch:?}"));
        }
    }
    assert!(late.is_empty(), "{late:#?}");
}
