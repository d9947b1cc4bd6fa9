//! Reads the pages on which an engine server describes itself.

use std::borrow::Cow;

use bytes::Bytes;
use http::header::VIA;
use http::{Request, StatusCode, Uri};

use crate::{Bounds, EngineKind, Facts, Pool, ServerInfo, UpstreamError};

impl Pool {
    /// The body of a page.
    pub async fn get(&self, path: &'static str, bounds: Bounds) -> Result<Bytes, UpstreamError> {
        let mut request = Request::new(Bytes::new());
        *request.uri_mut() = Uri::from_static(path);
        if let Some(via) = self.via() {
            request.headers_mut().insert(VIA, via.clone());
        }
        self.fetch_ok(request, bounds).await
    }

    /// Reads every page. Only `/v1/models` is required. Where another page times out or fails, what it said before stays, as given in
    /// `known`; a page that the engine does not have is left out. `told_events`: an operator gave the address of its cache events.
    pub async fn facts(
        &self,
        known: &Facts,
        told_events: bool,
        bounds: Bounds,
    ) -> Result<Facts, UpstreamError> {
        let mut facts = Facts::default();
        facts.read_models(&self.get("/v1/models", bounds).await?);
        match self.get("/version", bounds).await {
            Ok(body) => facts.read_version(&body),
            Err(error) if is_absent(&error) => {}
            Err(_) => facts.version.clone_from(&known.version),
        }
        match self.get("/metrics", bounds).await {
            Ok(page) => facts.read_metrics(&page_text(&page), known),
            Err(error) if is_absent(&error) => {}
            Err(_) => facts.keep_metrics(known),
        }
        match self.get("/kv_event_sources", bounds).await {
            Ok(body) => facts.read_event_sources(&body),
            Err(error) if is_absent(&error) => {}
            Err(_) => facts.events.clone_from(&known.events),
        }
        facts.info = self.server_info(&known.info, facts.kind, bounds).await;
        facts.merge_info(told_events);
        Ok(facts)
    }

    /// Reads the page of settings once: they do not change while an engine runs.
    async fn server_info(
        &self,
        known: &ServerInfo,
        kind: EngineKind,
        bounds: Bounds,
    ) -> ServerInfo {
        if let Some(known) = known.left_alone() {
            return known;
        }
        let mut answer = self.get("/server_info?config_format=json", bounds).await;
        if answer.as_ref().is_err_and(is_absent) && kind != EngineKind::Vllm {
            answer = self.get("/get_server_info", bounds).await;
        }
        match answer {
            Ok(body) => ServerInfo {
                is_read: true,
                ..ServerInfo::read(&body)
            },
            Err(error) if is_absent(&error) => ServerInfo {
                is_read: true,
                ..ServerInfo::default()
            },
            Err(_) => known.failed(),
        }
    }
}

/// A page as text; invalid UTF-8 is replaced. Valid pages are borrowed: metrics of a hundred workers are five megabytes every
/// two seconds.
#[must_use]
pub fn page_text(page: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(page) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => String::from_utf8_lossy(page),
    }
}

/// Whether the server does not have the page, or does not let us read it.
fn is_absent(error: &UpstreamError) -> bool {
    matches!(error, UpstreamError::Status(status) if status.is_client_error() || *status == StatusCode::NOT_IMPLEMENTED)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use super::*;
    use crate::{WorkerTls, parse_url};

    /// Long enough for a page on this machine, short enough to wait for four times.
    const BOUNDS: Bounds = Bounds {
        timeout: Duration::from_millis(200),
        answer_bytes_max: 1 << 20,
    };

    const INFO: &str = "/server_info?config_format=json";

    /// How the server treats one page; all others are answered.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Turn {
        Answer,
        Stall(&'static str),
        Refuse(&'static str),
        Fail(&'static str),
    }

    fn page(path: &str) -> &'static str {
        macro_rules! recorded {
            ($name:literal) => {
                include_str!(concat!("../../../testdata/vllm-facts/", $name))
            };
        }
        match path {
            "/v1/models" => recorded!("models.json"),
            "/version" => recorded!("version.json"),
            "/metrics" => recorded!("metrics.txt"),
            "/kv_event_sources" => recorded!("kv_event_sources.json"),
            _ => r#"{"vllm_config":{"scheduler_config":{"max_num_batched_tokens":512}}}"#,
        }
    }

    /// Serves one connection until it is closed.
    fn serve(mut stream: TcpStream, turn: &Mutex<Turn>) -> Option<()> {
        loop {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).ok()?;
                head.push(byte[0]);
            }
            let head = String::from_utf8(head).ok()?;
            let path = head.split(' ').nth(1)?;
            let turn = *turn.lock().unwrap();
            let (status, body) = match turn {
                Turn::Stall(stalled) if stalled == path => continue,
                Turn::Refuse(refused) if refused == path => ("404 Not Found", ""),
                Turn::Fail(failed) if failed == path => ("500 Internal Server Error", "no"),
                _ => ("200 OK", page(path)),
            };
            let length = body.len();
            write!(
                stream,
                "HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}"
            )
            .ok()?;
        }
    }

    fn engine() -> (Pool, Arc<Mutex<Turn>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let turn = Arc::new(Mutex::new(Turn::Answer));
        let shared = Arc::clone(&turn);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let turn = Arc::clone(&shared);
                std::thread::spawn(move || serve(stream, &turn));
            }
        });
        let address = parse_url(&url).unwrap();
        (Pool::new(address, WorkerTls::default()), turn)
    }

    /// What a real vLLM says, less one page.
    fn without(known: &Facts, path: &str) -> Facts {
        let mut facts = known.clone();
        match path {
            "/version" => facts.version = None,
            "/metrics" => {
                facts.keep_metrics(&Facts::default());
                facts.merge_info(false);
            }
            INFO => {
                facts.max_batched_tokens = None;
                facts.info = ServerInfo::default();
            }
            _ => facts.events.clear(),
        }
        facts
    }

    /// A page that fails is asked for again after one probe, then two, four and so on, and as soon as the engine is
    /// another.
    #[tokio::test]
    async fn a_settings_page_that_fails_is_asked_for_less_and_less_often() {
        let (pool, turn) = engine();
        *turn.lock().unwrap() = Turn::Fail(INFO);
        let (mut known, mut asked) = (Facts::default(), Vec::new());
        for probe in 0..40 {
            let failures = known.info.failures;
            known = pool.facts(&known, false, BOUNDS).await.unwrap();
            if known.info.failures > failures {
                asked.push(probe);
            }
        }
        assert_eq!(asked, [0, 2, 5, 10, 19, 36]);
        *turn.lock().unwrap() = Turn::Answer;
        let fresh = pool.facts(&Facts::default(), false, BOUNDS).await.unwrap();
        assert!(fresh.info.is_read);
        for failures in 0..100 {
            let failed = ServerInfo {
                failures,
                ..ServerInfo::default()
            };
            assert!((1..=64).contains(&failed.failed().pause), "{failures}");
        }
    }

    #[tokio::test]
    async fn a_failed_page_keeps_its_last_facts_and_a_refused_page_gives_none() {
        let (pool, turn) = engine();
        let known = pool.facts(&Facts::default(), false, BOUNDS).await.unwrap();
        assert_eq!((known.block_size, known.events.len()), (Some(32), 1));
        assert_eq!(known.max_batched_tokens, Some(512));
        for path in ["/version", "/metrics", "/kv_event_sources"] {
            *turn.lock().unwrap() = Turn::Fail(path);
            assert_eq!(
                pool.facts(&known, false, BOUNDS).await.unwrap(),
                known,
                "{path}"
            );
            *turn.lock().unwrap() = Turn::Stall(path);
            assert_eq!(
                pool.facts(&known, false, BOUNDS).await.unwrap(),
                known,
                "{path}"
            );
            let fresh = pool.facts(&Facts::default(), false, BOUNDS).await.unwrap();
            assert_eq!(fresh, without(&known, path), "{path}");
            *turn.lock().unwrap() = Turn::Refuse(path);
            let refused = pool.facts(&known, false, BOUNDS).await.unwrap();
            assert_eq!(refused, without(&known, path), "{path}");
        }
        for (turned, is_read) in [(Turn::Fail(INFO), false), (Turn::Refuse(INFO), true)] {
            *turn.lock().unwrap() = turned;
            assert_eq!(
                pool.facts(&known, false, BOUNDS).await.unwrap(),
                known,
                "once is enough"
            );
            let mut expected = without(&known, INFO);
            expected.info.is_read = is_read;
            if !is_read {
                expected.info = expected.info.failed();
            }
            let fresh = pool.facts(&Facts::default(), false, BOUNDS).await.unwrap();
            assert_eq!(fresh, expected, "{turned:?}");
        }
        for failing in [Turn::Stall("/v1/models"), Turn::Refuse("/v1/models")] {
            *turn.lock().unwrap() = failing;
            assert!(
                pool.facts(&known, false, BOUNDS).await.is_err(),
                "{failing:?}"
            );
        }
    }
}
