//! Which handler a path and a method name.

use http::Method;

/// Routes that only engines know; their bodies pass unread.
const ENGINE_PATHS: [&str; 22] = [
    "/classify",
    "/detokenize",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/classify",
    "/v1/embeddings",
    "/v1/images/edits",
    "/v1/images/generations",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/pooling",
    "/v1/rerank",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/score",
    "/v1/videos",
    "/v2/rerank",
];

/// Paths of the routes that users may move (`DYN_HTTP_SVC_*_PATH`).
#[derive(Clone, Debug)]
pub struct Paths {
    /// Chat completions.
    pub chat: String,
    /// Text completions.
    pub completions: String,
    /// The list of models; one model is below it.
    pub models: String,
    /// Readiness.
    pub health: String,
    /// Liveness.
    pub live: String,
    /// Prometheus.
    pub metrics: String,
}

impl Default for Paths {
    fn default() -> Self {
        Self {
            chat: "/v1/chat/completions".into(),
            completions: "/v1/completions".into(),
            models: "/v1/models".into(),
            health: "/health".into(),
            live: "/live".into(),
            metrics: "/metrics".into(),
        }
    }
}

/// What a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// A chat completion.
    Chat,
    /// A text completion.
    Completions,
    /// A route that only engines know.
    Engine,
    /// The list of models.
    Models,
    /// One model; its id may contain slashes.
    Model(String),
    /// Whether one model can answer.
    ModelReady(String),
    /// Readiness.
    Health,
    /// Liveness.
    Live,
    /// Prometheus.
    Metrics,
    /// When workers count as busy.
    BusyThreshold,
    /// Who serves what.
    Workers,
    /// The latest decisions.
    Decisions,
    /// Why one request went where it went.
    Decision(String),
}

impl Route {
    /// Whether anybody may ask, even where keys are needed: what orchestrators and scrapers look at.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self, Self::Health | Self::Live | Self::Metrics)
    }

    /// Whether it is for operators alone.
    #[must_use]
    pub fn is_admin(&self) -> bool {
        matches!(
            self,
            Self::BusyThreshold | Self::Workers | Self::Decisions | Self::Decision(_)
        )
    }
}

/// Why there is no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoute {
    /// No such path.
    NotFound,
    /// The path is there for other methods.
    Method(&'static str),
}

impl Paths {
    /// Finds the route.
    pub fn find(&self, method: &Method, path: &str) -> Result<Route, NoRoute> {
        let (route, allowed) = self.by_path(path).ok_or(NoRoute::NotFound)?;
        let fits = match allowed {
            "POST" => method == Method::POST,
            "GET,POST" => method == Method::GET || method == Method::POST,
            _ => method == Method::GET || method == Method::HEAD,
        };
        if fits {
            Ok(route)
        } else {
            Err(NoRoute::Method(allowed))
        }
    }

    fn by_path(&self, path: &str) -> Option<(Route, &'static str)> {
        let posts = [
            (&self.chat, Route::Chat),
            (&self.completions, Route::Completions),
        ];
        let gets = [
            (&self.models, Route::Models),
            (&self.health, Route::Health),
            (&self.live, Route::Live),
            (&self.metrics, Route::Metrics),
        ];
        if let Some((_, route)) = posts.into_iter().find(|(p, _)| *p == path) {
            return Some((route, "POST"));
        }
        if let Some((_, route)) = gets.into_iter().find(|(p, _)| *p == path) {
            return Some((route, "GET,HEAD"));
        }
        match path {
            "/busy_threshold" => return Some((Route::BusyThreshold, "GET,POST")),
            "/workers" => return Some((Route::Workers, "GET,HEAD")),
            "/decisions" => return Some((Route::Decisions, "GET,HEAD")),
            _ => {}
        }
        if let Some(id) = path.strip_prefix("/decisions/") {
            return Some((Route::Decision(percent_decode(id)), "GET,HEAD"));
        }
        if ENGINE_PATHS.contains(&path) {
            return Some((Route::Engine, "POST"));
        }
        let id = path
            .strip_prefix(&*self.models)?
            .strip_prefix('/')
            .filter(|id| !id.is_empty())?;
        let id = percent_decode(id);
        let route = match id.strip_suffix("/ready").filter(|id| !id.is_empty()) {
            Some(id) => Route::ModelReady(id.to_owned()),
            None => Route::Model(id),
        };
        Some((route, "GET,HEAD"))
    }
}

/// Undoes percent-encoding; what is not valid stays as it is.
fn percent_decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while let Some(&byte) = bytes.get(i) {
        let hex = |at: usize| bytes.get(at).and_then(|b| char::from(*b).to_digit(16));
        match (byte, hex(i + 1), hex(i + 2)) {
            (b'%', Some(high), Some(low)) => {
                out.push((high * 16 + low) as u8);
                i += 3;
            }
            _ => {
                out.push(byte);
                i += 1;
            }
        }
    }
    String::from_utf8(out).unwrap_or_else(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(method: &str, path: &str) -> Result<Route, NoRoute> {
        Paths::default().find(&method.parse().unwrap(), path)
    }

    #[test]
    fn paths_and_methods_choose_the_route() {
        assert_eq!(find("POST", "/v1/chat/completions"), Ok(Route::Chat));
        assert_eq!(
            find("GET", "/v1/chat/completions"),
            Err(NoRoute::Method("POST"))
        );
        assert_eq!(find("HEAD", "/health"), Ok(Route::Health));
        assert_eq!(find("POST", "/metrics"), Err(NoRoute::Method("GET,HEAD")));
        assert_eq!(find("GET", "/v1/models"), Ok(Route::Models));
        assert_eq!(find("GET", "/v1/models/"), Err(NoRoute::NotFound));
        assert_eq!(find("GET", "/v1/modelsx"), Err(NoRoute::NotFound));
        assert_eq!(find("POST", "/v1/embeddings"), Ok(Route::Engine));
        assert_eq!(find("GET", "/nope"), Err(NoRoute::NotFound));
    }

    #[test]
    fn a_model_id_may_contain_slashes_and_escapes() {
        assert_eq!(
            find("GET", "/v1/models/org/name"),
            Ok(Route::Model("org/name".into()))
        );
        assert_eq!(
            find("GET", "/v1/models/org%2Fname"),
            Ok(Route::Model("org/name".into()))
        );
        assert_eq!(
            find("GET", "/v1/models/a/b/ready"),
            Ok(Route::ModelReady("a/b".into()))
        );
        assert_eq!(
            find("GET", "/v1/models/ready"),
            Ok(Route::Model("ready".into()))
        );
        assert_eq!(
            find("GET", "/v1/models/%zz%ff"),
            Ok(Route::Model("%zz%ff".into()))
        );
    }

    #[test]
    fn moved_paths_leave_their_old_place() {
        let paths = Paths {
            chat: "/chat".into(),
            ..Paths::default()
        };
        assert_eq!(paths.find(&Method::POST, "/chat"), Ok(Route::Chat));
        assert_eq!(
            paths.find(&Method::POST, "/v1/chat/completions"),
            Err(NoRoute::NotFound)
        );
    }
}
