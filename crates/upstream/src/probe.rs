//! Asking an engine server everything that it tells about itself.

use bytes::Bytes;
use http::{Request, Uri};

use crate::{Bounds, Facts, Pool, UpstreamError};

impl Pool {
    /// The body of a page.
    pub async fn get(&self, path: &'static str, bounds: Bounds) -> Result<Bytes, UpstreamError> {
        let mut request = Request::new(Bytes::new());
        *request.uri_mut() = Uri::from_static(path);
        self.ask_ok(request, bounds).await
    }

    /// Asks for every page. Only `/v1/models` must be answered. One that a busy engine does not send in time says what
    /// it said before, which is in `known`; one that it refuses says nothing.
    pub async fn facts(&self, known: &Facts, bounds: Bounds) -> Result<Facts, UpstreamError> {
        let mut facts = Facts::default();
        facts.read_models(&self.get("/v1/models", bounds).await?);
        match self.get("/version", bounds).await {
            Ok(body) => facts.read_version(&body),
            Err(UpstreamError::Status(_)) => {}
            Err(_) => facts.version.clone_from(&known.version),
        }
        match self.get("/metrics", bounds).await {
            Ok(page) => facts.read_metrics(&String::from_utf8_lossy(&page)),
            Err(UpstreamError::Status(_)) => {}
            Err(_) => facts.keep_metrics(known),
        }
        match self.get("/kv_event_sources", bounds).await {
            Ok(body) => facts.read_event_sources(&body),
            Err(UpstreamError::Status(_)) => {}
            Err(_) => facts.events.clone_from(&known.events),
        }
        Ok(facts)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use super::*;
    use crate::{WorkerAddress, WorkerTls};

    /// Long enough for a page on this machine, short enough to wait for four times.
    const BOUNDS: Bounds = Bounds {
        patience: Duration::from_millis(200),
        answer_bytes_max: 1 << 20,
    };

    /// What becomes of the question for one page; all others are answered.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Turn {
        Answer,
        Stall(&'static str),
        Refuse(&'static str),
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
            _ => recorded!("kv_event_sources.json"),
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
        let told = Arc::clone(&turn);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let told = Arc::clone(&told);
                std::thread::spawn(move || serve(stream, &told));
            }
        });
        let address = WorkerAddress::parse(&url).unwrap();
        (Pool::new(address, WorkerTls::default()), turn)
    }

    /// What a real vLLM says, less one page.
    fn without(known: &Facts, path: &str) -> Facts {
        let mut facts = known.clone();
        match path {
            "/version" => facts.version = None,
            "/metrics" => facts.keep_metrics(&Facts::default()),
            _ => facts.events.clear(),
        }
        facts
    }

    #[tokio::test]
    async fn a_page_that_does_not_come_says_what_it_said_and_one_that_is_refused_says_nothing() {
        let (pool, turn) = engine();
        let known = pool.facts(&Facts::default(), BOUNDS).await.unwrap();
        assert_eq!((known.block_size, known.events.len()), (Some(32), 1));
        for path in ["/version", "/metrics", "/kv_event_sources"] {
            *turn.lock().unwrap() = Turn::Stall(path);
            assert_eq!(pool.facts(&known, BOUNDS).await.unwrap(), known, "{path}");
            let fresh = pool.facts(&Facts::default(), BOUNDS).await.unwrap();
            assert_eq!(fresh, without(&known, path), "{path}");
            *turn.lock().unwrap() = Turn::Refuse(path);
            let refused = pool.facts(&known, BOUNDS).await.unwrap();
            assert_eq!(refused, without(&known, path), "{path}");
        }
        for failing in [Turn::Stall("/v1/models"), Turn::Refuse("/v1/models")] {
            *turn.lock().unwrap() = failing;
            assert!(pool.facts(&known, BOUNDS).await.is_err(), "{failing:?}");
        }
    }
}
