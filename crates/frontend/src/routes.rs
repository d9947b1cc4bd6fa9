//! Which handler a path and a method name: the one table of routes.
//!
//! What always holds: a route that is not in the table does not exist, and `/openapi.json` is made from it.

use std::borrow::Cow;

use http::Method;

/// Routes that only engines know; their bodies pass unread.
const ENGINE_PATHS: &[&str] = &[
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
    "/v1/images/edits",
    "/v1/images/generations",
    "/v1/pooling",
    "/v1/rerank",
    "/v1/score",
    "/v1/videos",
    "/v2/rerank",
];

/// Where engines have the routes that may be elsewhere here.
const EMBEDDINGS: &str = "/v1/embeddings";
const RESPONSES: &str = "/v1/responses";
const RESPONSE_TOKENS: &str = "/v1/responses/input_tokens";
/// Anthropic's, and where its tokens are counted.
pub(crate) const MESSAGES: &str = "/v1/messages";
const MESSAGE_TOKENS: &str = "/v1/messages/count_tokens";

/// Paths of the routes that users may move (`DYN_HTTP_SVC_*_PATH`).
#[derive(Clone, Debug)]
pub struct Paths {
    /// Chat completions.
    pub chat: String,
    /// Text completions.
    pub completions: String,
    /// Embeddings.
    pub embeddings: String,
    /// Responses; the count of their tokens is below.
    pub responses: String,
    /// Anthropic's messages, where they are served (`--enable-anthropic-api`); the count of their tokens is below.
    pub messages: Option<String>,
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
            embeddings: EMBEDDINGS.into(),
            responses: RESPONSES.into(),
            messages: None,
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
    /// A route that only engines know, by its path there; none where that is the client's.
    Engine(Option<&'static str>),
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
    /// This table, for programs.
    OpenApi,
    /// When workers count as busy.
    BusyThreshold,
    /// Who serves what; one more.
    Workers,
    /// One worker, by its id or its URL.
    Worker(String),
    /// What the index holds.
    Dump,
    /// The latest decisions.
    Decisions,
    /// Why one request went where it went.
    Decision(String),
}

/// Whom a route is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Anybody, even where keys are needed, at every door: what orchestrators and scrapers look at.
    Anyone,
    /// Those with a key, where keys are needed.
    Clients,
    /// Operators.
    Operators,
}

/// Why there is no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoute {
    /// No such path.
    NotFound,
    /// The path is there for other methods.
    Method(&'static str),
}

/// Where a row's paths are.
pub(crate) enum Place {
    /// Where the user put it.
    Moved(fn(&Paths) -> &str),
    /// Below that, if it is served at all.
    Below(fn(&Paths) -> Option<&str>, &'static str),
    /// Always there.
    At(&'static str),
    /// Always at each of these.
    Each(&'static [&'static str]),
}

/// What follows a row's path.
#[derive(Clone, Copy)]
pub(crate) enum Tail {
    /// Nothing.
    None,
    /// A name, which may contain slashes; the word is the name of the parameter.
    Name(&'static str),
    /// A name and this.
    NameThen(&'static str, &'static str),
}

/// What can be done with a row's path.
pub(crate) struct Operation {
    /// The method, in lower case.
    pub(crate) method: &'static str,
    /// One line about it.
    pub(crate) summary: &'static str,
    /// What is sent, as a name in `openapi::schemas`.
    pub(crate) takes: Option<&'static str>,
    /// What comes back, as a status and a name in `openapi::schemas`.
    pub(crate) gives: (u16, &'static str),
}

/// One row of the table.
pub(crate) struct Row {
    pub(crate) place: Place,
    pub(crate) tail: Tail,
    pub(crate) audience: Audience,
    /// The methods, as `allow` names them. `HEAD` goes wherever `GET` does.
    pub(crate) allow: &'static str,
    make: fn(String) -> Route,
    pub(crate) operations: &'static [Operation],
}

const fn get(summary: &'static str, gives: &'static str) -> Operation {
    Operation {
        method: "get",
        summary,
        takes: None,
        gives: (200, gives),
    }
}

const fn post(summary: &'static str, takes: &'static str, gives: &'static str) -> Operation {
    Operation {
        method: "post",
        summary,
        takes: Some(takes),
        gives: (200, gives),
    }
}

/// A route that is read.
const fn read(
    place: Place,
    audience: Audience,
    make: fn(String) -> Route,
    operations: &'static [Operation],
) -> Row {
    Row {
        place,
        tail: Tail::None,
        audience,
        allow: "GET,HEAD",
        make,
        operations,
    }
}

/// A route that a client posts to.
const fn posted(place: Place, make: fn(String) -> Route, operations: &'static [Operation]) -> Row {
    Row {
        place,
        tail: Tail::None,
        audience: Audience::Clients,
        allow: "POST",
        make,
        operations,
    }
}

/// What is done with a request that only engines understand.
const PASSED: Operation = post("Passed to a worker by load, unread", "Any", "Any");

/// The table; the first row that fits is the route.
pub(crate) const ROWS: &[Row] = &[
    posted(
        Place::Moved(|p| &p.chat),
        |_| Route::Chat,
        &[post("Answer a chat", "ChatRequest", "Completion")],
    ),
    posted(
        Place::Moved(|p| &p.completions),
        |_| Route::Completions,
        &[post("Continue a text", "CompletionRequest", "Completion")],
    ),
    read(
        Place::Moved(|p| &p.models),
        Audience::Clients,
        |_| Route::Models,
        &[get("The models that are served", "Models")],
    ),
    read(
        Place::Moved(|p| &p.health),
        Audience::Anyone,
        |_| Route::Health,
        &[get("Whether requests are taken, and by whom", "Health")],
    ),
    read(
        Place::Moved(|p| &p.live),
        Audience::Anyone,
        |_| Route::Live,
        &[get("Whether the process is alive", "Live")],
    ),
    read(
        Place::Moved(|p| &p.metrics),
        Audience::Anyone,
        |_| Route::Metrics,
        &[get("Metrics for Prometheus", "Text")],
    ),
    read(
        Place::At("/openapi.json"),
        Audience::Anyone,
        |_| Route::OpenApi,
        &[get("This description", "Any")],
    ),
    Row {
        allow: "GET,HEAD,POST",
        ..read(
            Place::At("/busy_threshold"),
            Audience::Operators,
            |_| Route::BusyThreshold,
            &[
                get("When workers count as busy, by model", "BusyThresholds"),
                post(
                    "Change when workers of a model count as busy, or read it",
                    "BusyThreshold",
                    "BusyThreshold",
                ),
            ],
        )
    },
    Row {
        allow: "GET,HEAD,POST",
        ..read(
            Place::At("/workers"),
            Audience::Operators,
            |_| Route::Workers,
            &[
                get("The workers: state, models, load", "Workers"),
                Operation {
                    gives: (201, "Worker"),
                    ..post(
                        "Add a worker, or change what is said about one",
                        "NewWorker",
                        "Worker",
                    )
                },
            ],
        )
    },
    read(
        Place::At("/dump"),
        Audience::Operators,
        |_| Route::Dump,
        &[get(
            "What the index holds, as the events that would make it",
            "Any",
        )],
    ),
    Row {
        tail: Tail::Name("worker"),
        allow: "DELETE",
        ..read(
            Place::At("/workers"),
            Audience::Operators,
            Route::Worker,
            &[Operation {
                method: "delete",
                summary: "Let a worker end what it has, then remove it; with `force` at once",
                takes: None,
                gives: (202, "Worker"),
            }],
        )
    },
    read(
        Place::At("/decisions"),
        Audience::Operators,
        |_| Route::Decisions,
        &[get(
            "The latest routing decisions, newest first",
            "Decisions",
        )],
    ),
    Row {
        tail: Tail::Name("request_id"),
        ..read(
            Place::At("/decisions"),
            Audience::Operators,
            Route::Decision,
            &[get("Why a request went where it went", "Decision")],
        )
    },
    posted(
        Place::Each(ENGINE_PATHS),
        |_| Route::Engine(None),
        &[PASSED],
    ),
    posted(
        Place::Moved(|p| &p.embeddings),
        |_| Route::Engine(Some(EMBEDDINGS)),
        &[PASSED],
    ),
    posted(
        Place::Moved(|p| &p.responses),
        |_| Route::Engine(Some(RESPONSES)),
        &[PASSED],
    ),
    posted(
        Place::Below(|p| Some(&p.responses), "/input_tokens"),
        |_| Route::Engine(Some(RESPONSE_TOKENS)),
        &[PASSED],
    ),
    posted(
        Place::Below(|p| p.messages.as_deref(), ""),
        |_| Route::Engine(Some(MESSAGES)),
        &[PASSED],
    ),
    posted(
        Place::Below(|p| p.messages.as_deref(), "/count_tokens"),
        |_| Route::Engine(Some(MESSAGE_TOKENS)),
        &[PASSED],
    ),
    Row {
        tail: Tail::NameThen("model", "/ready"),
        ..read(
            Place::Moved(|p| &p.models),
            Audience::Clients,
            Route::ModelReady,
            &[get("Whether one model can answer", "Any")],
        )
    },
    Row {
        tail: Tail::Name("model"),
        ..read(
            Place::Moved(|p| &p.models),
            Audience::Clients,
            Route::Model,
            &[get("One model", "Model")],
        )
    },
];

impl Place {
    /// Where it is.
    pub(crate) fn paths<'p>(&self, paths: &'p Paths) -> Vec<Cow<'p, str>> {
        match self {
            Self::Moved(of) => vec![of(paths).into()],
            Self::Below(of, end) => of(paths)
                .map(|base| [base, end].concat().into())
                .into_iter()
                .collect(),
            Self::At(path) => vec![(*path).into()],
            Self::Each(list) => list.iter().map(|path| (*path).into()).collect(),
        }
    }

    /// What follows it in `path`, if that begins so.
    fn strip<'a>(&self, paths: &Paths, path: &'a str, tail: Tail) -> Option<&'a str> {
        let of = |base: &str| {
            let rest = path.strip_prefix(base)?;
            match tail {
                Tail::None => rest.is_empty().then_some(rest),
                _ => rest.strip_prefix('/').filter(|rest| !rest.is_empty()),
            }
        };
        match self {
            Self::Moved(place) => of(place(paths)),
            Self::Below(place, end) => {
                let base = path.strip_suffix(end)?;
                (base == place(paths)?).then_some("")
            }
            Self::At(place) => of(place),
            Self::Each(list) => list.iter().find_map(|place| of(place)),
        }
    }
}

impl Row {
    fn route(&self, paths: &Paths, path: &str) -> Option<Route> {
        let rest = self.place.strip(paths, path, self.tail)?;
        let name = match self.tail {
            Tail::None => String::new(),
            Tail::Name(_) => percent_decode(rest),
            Tail::NameThen(_, then) => {
                let name = percent_decode(rest);
                let name = name.strip_suffix(then).filter(|name| !name.is_empty())?;
                name.to_owned()
            }
        };
        Some((self.make)(name))
    }

    fn allows(&self, method: &Method) -> bool {
        self.allow
            .split(',')
            .any(|allowed| allowed == method.as_str())
    }
}

impl Paths {
    /// Finds the route, and whom it is for.
    pub fn find(&self, method: &Method, path: &str) -> Result<(Route, Audience), NoRoute> {
        for row in ROWS {
            if let Some(route) = row.route(self, path) {
                return match row.allows(method) {
                    true => Ok((route, row.audience)),
                    false => Err(NoRoute::Method(row.allow)),
                };
            }
        }
        Err(NoRoute::NotFound)
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
        let found = Paths::default().find(&method.parse().unwrap(), path);
        found.map(|(route, _)| route)
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
        assert_eq!(
            find("POST", "/v1/embeddings"),
            Ok(Route::Engine(Some("/v1/embeddings")))
        );
        assert_eq!(find("POST", "/rerank"), Ok(Route::Engine(None)));
        assert_eq!(find("POST", "/v1/messages"), Err(NoRoute::NotFound));
        assert_eq!(find("GET", "/nope"), Err(NoRoute::NotFound));
        assert_eq!(find("GET", "/workers/"), Err(NoRoute::NotFound));
        assert_eq!(find("DELETE", "/workers/7"), Ok(Route::Worker("7".into())));
        assert_eq!(
            find("DELETE", "/workers/http%3A%2F%2Fa%3A1"),
            Ok(Route::Worker("http://a:1".into()))
        );
        assert_eq!(find("GET", "/workers/7"), Err(NoRoute::Method("DELETE")));
        assert_eq!(
            find("DELETE", "/workers"),
            Err(NoRoute::Method("GET,HEAD,POST"))
        );
    }

    #[test]
    fn what_a_row_says_it_does_it_allows() {
        for row in ROWS {
            let mut methods: Vec<String> = Vec::new();
            for operation in row.operations {
                methods.push(operation.method.to_uppercase());
                if operation.method == "get" {
                    methods.push("HEAD".into());
                }
            }
            assert_eq!(row.allow, methods.join(","));
        }
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
        let find = |path| paths.find(&Method::POST, path).map(|(route, _)| route);
        assert_eq!(find("/chat"), Ok(Route::Chat));
        assert_eq!(find("/v1/chat/completions"), Err(NoRoute::NotFound));
    }

    /// Engines have the route at its usual place, wherever it is here.
    #[test]
    fn routes_of_engines_move_with_what_is_below_them() {
        let paths = Paths {
            embeddings: "/emb".into(),
            responses: "/answers".into(),
            messages: Some("/anthropic".into()),
            ..Paths::default()
        };
        let find = |path| paths.find(&Method::POST, path).map(|(route, _)| route);
        for (ours, theirs) in [
            ("/emb", "/v1/embeddings"),
            ("/answers", "/v1/responses"),
            ("/answers/input_tokens", "/v1/responses/input_tokens"),
            ("/anthropic", "/v1/messages"),
            ("/anthropic/count_tokens", "/v1/messages/count_tokens"),
        ] {
            assert_eq!(find(ours), Ok(Route::Engine(Some(theirs))));
            assert_eq!(find(theirs), Err(NoRoute::NotFound));
        }
        let listed = |paths: &Paths| -> Vec<String> {
            let all = ROWS.iter().flat_map(|row| row.place.paths(paths));
            all.map(Cow::into_owned).collect()
        };
        assert!(listed(&paths).contains(&"/anthropic/count_tokens".to_owned()));
        assert!(
            !listed(&Paths::default())
                .iter()
                .any(|path| path.contains("messages"))
        );
    }
}
