//! Which handler a path and a method name: the one table of routes.
//!
//! What always holds: a route that is not in the table does not exist, and `/openapi.json` is made from it.

use std::borrow::Cow;

use http::Method;

/// Routes that only engines know; their bodies pass unread. Running a request there twice does no harm.
const IDEMPOTENT_PATHS: &[&str] = &[
    "/classify",
    "/detokenize",
    "/generate",
    "/inference/v1/generate",
    "/invocations",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/classify",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/images/edits",
    "/v1/images/generations",
    "/v1/pooling",
    "/v1/rerank",
    "/v1/score",
    "/v2/rerank",
];

/// The same where an engine may store something: such a request is not run twice.
const STATEFUL_PATHS: &[&str] = &[
    "/v1/batches",
    "/v1/files",
    "/v1/videos",
    "/v1/videos/stream",
];

/// Whether running a request to this path of an engine twice does no harm.
pub(crate) fn is_idempotent(path: &str) -> bool {
    let moved = [EMBEDDINGS, RESPONSE_TOKENS, MESSAGES, MESSAGE_TOKENS];
    IDEMPOTENT_PATHS.contains(&path) || moved.contains(&path)
}

/// Where engines have the routes that may be elsewhere here.
const EMBEDDINGS: &str = "/v1/embeddings";
pub(crate) const RESPONSES: &str = "/v1/responses";
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
    /// Something that one engine keeps, at this path of its own.
    Stored(String),
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
    /// What this is.
    Root,
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
    /// How the latest decisions would have gone with other weights.
    WhatIf,
    /// Which sessions are bound, and where.
    Sessions,
    /// What is set, and who set it.
    Settings,
    /// The operators' page, or a file of it.
    Dashboard(String),
    /// What keeps the page up to date.
    DashboardStream,
    /// What another policy would have done.
    Shadow,
    /// Another process is to take over.
    Upgrade,
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
    /// Anybody where operators are served: their page, which holds nothing until it is given their token.
    Page,
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

/// What one engine keeps under an id, and perhaps parts of it below.
const fn kept(place: Place, name: &'static str, make: fn(String) -> Route) -> Row {
    Row {
        place,
        tail: Tail::Name(name),
        audience: Audience::Clients,
        allow: "GET,HEAD,DELETE",
        make,
        operations: SOUGHT_AND_DELETED,
    }
}

const SOUGHT_AND_DELETED: &[Operation] = &[
    get(
        "Asked of all workers at once; one that has it answers",
        "Any",
    ),
    Operation {
        method: "delete",
        ..get("Asked of one worker after another until one has it", "Any")
    },
];

/// A change of something that one engine keeps.
const SOUGHT: Operation = Operation {
    takes: None,
    ..post(
        "Asked of one worker after another until one has it",
        "Any",
        "Any",
    )
};

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
        Place::At("/"),
        Audience::Anyone,
        |_| Route::Root,
        &[get("What this is, and where to look next", "Any")],
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
    read(
        Place::At("/shadow"),
        Audience::Operators,
        |_| Route::Shadow,
        &[get(
            "What the shadow policy would have done, by the time model",
            "Shadows",
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
    Row {
        audience: Audience::Operators,
        ..posted(
            Place::At("/what_if"),
            |_| Route::WhatIf,
            &[post(
                "How the latest decisions would have gone with other weights",
                "WhatIfRequest",
                "WhatIf",
            )],
        )
    },
    Row {
        audience: Audience::Operators,
        ..posted(
            Place::At("/upgrade"),
            |_| Route::Upgrade,
            &[Operation {
                takes: None,
                ..post(
                    "Start this server's command anew and let it take over, without a lost request",
                    "Any",
                    "Upgrade",
                )
            }],
        )
    },
    read(
        Place::At("/sessions"),
        Audience::Operators,
        |_| Route::Sessions,
        &[get("The sessions that are bound, and where", "Sessions")],
    ),
    read(
        Place::At("/settings"),
        Audience::Operators,
        |_| Route::Settings,
        &[get(
            "What is set, and who set it; secrets are hidden",
            "Any",
        )],
    ),
    read(
        Place::At("/dashboard/stream"),
        Audience::Operators,
        |_| Route::DashboardStream,
        &[get(
            "All that the dashboard shows, then what changes each second; `last-event-id` goes on from there",
            "EventStream",
        )],
    ),
    read(
        Place::At("/dashboard"),
        Audience::Page,
        |_| Route::Dashboard(String::new()),
        &[get("The dashboard, a page for browsers", "Page")],
    ),
    Row {
        tail: Tail::Name("file"),
        ..read(
            Place::At("/dashboard"),
            Audience::Page,
            Route::Dashboard,
            &[get("A file of the dashboard", "Page")],
        )
    },
    posted(
        Place::Each(IDEMPOTENT_PATHS),
        |_| Route::Engine(None),
        &[PASSED],
    ),
    posted(
        Place::Each(STATEFUL_PATHS),
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
        tail: Tail::NameThen("response_id", "/cancel"),
        ..posted(
            Place::Moved(|p| &p.responses),
            |id| Route::Stored([RESPONSES, "/", &id, "/cancel"].concat()),
            &[SOUGHT],
        )
    },
    kept(Place::Moved(|p| &p.responses), "response_id", |id| {
        Route::Stored([RESPONSES, "/", &id].concat())
    }),
    Row {
        tail: Tail::NameThen("batch_id", "/cancel"),
        ..posted(
            Place::At("/v1/batches"),
            |id| Route::Stored(["/v1/batches/", &id, "/cancel"].concat()),
            &[SOUGHT],
        )
    },
    kept(Place::At("/v1/batches"), "batch_id", |id| {
        Route::Stored(["/v1/batches/", &id].concat())
    }),
    kept(Place::At("/v1/files"), "file_id", |id| {
        Route::Stored(["/v1/files/", &id].concat())
    }),
    kept(Place::At("/v1/videos"), "video_id", |id| {
        Route::Stored(["/v1/videos/", &id].concat())
    }),
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
pub(crate) fn percent_decode(text: &str) -> String {
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
mod tests;
