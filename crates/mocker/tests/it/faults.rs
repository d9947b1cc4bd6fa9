//! Each fault does what it says, to whom it says, and can be taken back.

use std::time::{Duration, Instant};

use crate::client::serve;

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"max_tokens\":8}";
const STREAM: &str =
    "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"max_tokens\":8,\"stream\":true}";

/// Events that arrived whole.
fn events(body: &str) -> usize {
    body.matches("\n\n").count()
}

#[tokio::test]
async fn refuse_closes_without_a_word() {
    let served = serve(&["refuse:count=2"]).await;
    for body in [BODY, STREAM] {
        assert!(served.ask("POST", CHAT, body).await.is_none());
    }
    assert_eq!(served.post(CHAT, BODY).await.status, 200);
}

#[tokio::test]
async fn stall_never_answers() {
    let served = serve(&["stall"]).await;
    let timeout = Duration::from_millis(300);
    assert!(
        tokio::time::timeout(timeout, served.ask("POST", CHAT, BODY))
            .await
            .is_err()
    );
    assert_eq!(
        served.ask("GET", "/health", "").await.map(|got| got.status),
        Some(200)
    );
    served.ask("DELETE", "/mock/faults", "").await;
    assert_eq!(served.post(CHAT, BODY).await.status, 200);
}

#[tokio::test]
#[expect(
    clippy::disallowed_methods,
    reason = "real sockets, real time; only a lower bound is asserted"
)]
async fn slow_delays_every_piece() {
    let served = serve(&["slow=20"]).await;
    let began = Instant::now();
    let got = served.post(CHAT, STREAM).await;
    let events = events(&got.body) as u64;
    assert!(
        got.complete && events >= 3,
        "the role, the answer, the end: {got:?}"
    );
    assert!(
        began.elapsed() >= Duration::from_millis(20 * events),
        "{:?}",
        began.elapsed()
    );
}

/// The role and three tokens, then the connection is cut between two events.
#[tokio::test]
async fn die_cuts_between_events() {
    let served = serve(&["die=3"]).await;
    let got = served.post(CHAT, STREAM).await;
    assert!(!got.complete, "{}", got.body);
    assert!(
        got.body.ends_with("\n\n") && events(&got.body) <= 4,
        "{}",
        got.body
    );
    assert!(!got.body.contains("[DONE]"));
    assert!(
        served.ask("POST", CHAT, BODY).await.is_none(),
        "a whole answer dies with its connection"
    );
}

#[tokio::test]
async fn cut_breaks_inside_an_event() {
    let served = serve(&["cut=3"]).await;
    let got = served.post(CHAT, STREAM).await;
    assert!(!got.complete && !got.body.ends_with("\n\n"), "{}", got.body);
    let whole = served.post(CHAT, BODY).await;
    assert!(!whole.complete && serde_json::from_str::<serde_json::Value>(&whole.body).is_err());
}

#[tokio::test]
async fn status_answers_with_it() {
    let served = serve(&["status=503:count=1", "status=429:count=1"]).await;
    let codes = [
        served.post(CHAT, BODY).await.status,
        served.post(CHAT, STREAM).await.status,
    ];
    assert_eq!(codes, [503, 429]);
    assert_eq!(served.post(CHAT, BODY).await.status, 200);
}

/// Faults by the control route: bad ones are refused, good ones strike and are listed.
#[tokio::test]
async fn faults_come_and_go_on_command() {
    let served = serve(&[]).await;
    for bad in [
        "",
        "{}",
        "{\"fault\":\"explode\"}",
        "{\"faults\":[\"stall\",3]}",
    ] {
        assert_eq!(served.post("/mock/faults", bad).await.status, 400, "{bad}");
    }
    let set = served
        .post("/mock/faults", "{\"faults\":[\"status=500:share=0.5\"]}")
        .await;
    assert_eq!(set.body, "{\"faults\":[\"status=500:share=0.5\"]}");
    let mut failed = 0;
    for _ in 0..40 {
        failed += u32::from(served.post(CHAT, BODY).await.status == 500);
    }
    assert!(
        (8..=32).contains(&failed),
        "{failed} of 40 at a share of a half"
    );
    let none = served
        .ask("DELETE", "/mock/faults", "")
        .await
        .map(|got| got.body);
    assert_eq!(none.as_deref(), Some("{\"faults\":[]}"));
}

/// A restart cuts what runs and forgets the cache.
#[tokio::test]
async fn restart_begins_empty() {
    let served = serve(&[]).await;
    let long = format!(
        "{{\"messages\":[{{\"role\":\"user\",\"content\":\"{}\"}}],\"max_tokens\":2}}",
        "more ".repeat(60)
    );
    served.post(CHAT, &long).await;
    let cached = |body: &str| body.contains("\"cached_tokens\":0");
    assert!(!cached(&served.post(CHAT, &long).await.body));
    let endless = long.replace(
        "\"max_tokens\":2",
        "\"max_tokens\":1500,\"ignore_eos\":true,\"stream\":true",
    );
    let (cut, _) = tokio::join!(served.post(CHAT, &endless), async {
        while served
            .server
            .worker()
            .status()
            .map(|s| s.load.running)
            .sum::<u32>()
            == 0
        {
            tokio::task::yield_now().await;
        }
        assert_eq!(served.post("/mock/restart", "").await.status, 200);
    });
    assert!(!cut.complete);
    assert!(cached(&served.post(CHAT, &long).await.body));
    let status = served
        .ask("GET", "/mock/status", "")
        .await
        .map(|got| got.body)
        .unwrap_or_default();
    assert!(status.contains("\"admitted\":1,"), "{status}");
}
