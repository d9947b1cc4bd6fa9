//! `nvext`: the extension object of a request and of an answer.
//!
//! Answers one question: what did the client say to the router beside the prompt? Unknown fields are refused
//! and the accepted names listed. Everything is optional and an empty object asks for nothing.

pub(crate) mod answer;
pub(crate) mod headers;
pub(crate) mod lift;

use std::collections::BTreeMap;

pub use answer::{Extra, ResponseNvext, Timing, WorkerIds};
pub use headers::SessionHeaders;
use kvasir_types::Token;
use serde::Deserialize;

use crate::object::Object;
use crate::scan::Scan;
use crate::strict::Reader;
use crate::{ApiError, JsonText};

/// Seconds that a session stays bound when the client names none.
pub(crate) const SESSION_TIMEOUT_SECS: u64 = 300;
/// Bytes of a session's id: routers keep it for as long as the session is bound.
pub(crate) const SESSION_ID_BYTES_MAX: usize = 1024;
/// Taints in one request.
const TAINTS_MAX: usize = 256;
/// Annotations or extra fields in one request.
const NAMES_MAX: usize = 64;
/// The annotation that asks where a request would go.
const QUERY_ONLY: &str = "query_instance_id";

const FIELDS: &[&str] = &[
    "greed_sampling",
    "use_raw_prompt",
    "annotations",
    "backend_instance_id",
    "token_data",
    "max_thinking_tokens",
    "cache_salt",
    "extra_fields",
    "metadata_upload",
    "prefill_worker_id",
    "decode_worker_id",
    "dp_rank",
    "prefill_dp_rank",
    "agent_hints",
    "request_timestamp_ms",
    "routing_constraints",
    "router",
    "router_config_override",
    "session_control",
];

const OVERRIDE_FIELDS: &[&str] = &[
    "overlap_score_credit",
    "prefill_load_scale",
    "router_temperature",
    "assume_kv_reuse",
    "track_prefill_tokens",
    "shared_cache_multiplier",
    "overlap_score_weight",
];

const HINT_FIELDS: &[&str] = &[
    "priority",
    "strict_priority",
    "osl",
    "speculative_prefill",
    "latency_sensitivity",
    "kv_overlap_score_credit",
    "kv_overlap_score_weight",
];

/// What a client says to the router. Headers are laid over it with [`crate::HeaderHints::apply`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Nvext {
    /// Out-of-band events wanted before the answer.
    pub annotations: Vec<String>,
    /// This worker and no other.
    pub backend_instance_id: Option<u64>,
    /// This worker for the prompt.
    pub prefill_worker_id: Option<u64>,
    /// This worker for the answer.
    pub decode_worker_id: Option<u64>,
    /// This data-parallel rank.
    pub dp_rank: Option<u32>,
    /// This rank for the prompt.
    pub prefill_dp_rank: Option<u32>,
    /// The prompt as tokens, in place of template and tokenizer.
    pub token_data: Option<Vec<Token>>,
    /// What the answer's `nvext` should hold.
    pub extra: Extra,
    /// How the request wants to be placed.
    pub hints: AgentHints,
    /// Settings of the router for this request alone.
    pub overrides: RouterOverrides,
    /// Bind, open or close a session.
    pub session: Option<SessionControl>,
    /// Cache namespace; empty is none.
    pub cache_salt: Option<String>,
    /// Draw the likeliest token always.
    pub greedy: bool,
    /// Take the last user message as the prompt, without the chat template.
    pub raw_prompt: bool,
    /// Most tokens of thinking.
    pub max_thinking_tokens: Option<u32>,
    /// When the client sent it, Unix milliseconds.
    pub request_timestamp_ms: Option<u64>,
    /// Which workers are allowed, which preferred.
    pub constraints: RoutingConstraints,
    /// Parameters of a custom policy, as JSON text.
    pub router: Option<JsonText>,
    /// Passed on to workers that upload results, as JSON text.
    pub metadata_upload: Option<JsonText>,
}

/// How a request wants to be placed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentHints {
    /// Seconds that the request is moved ahead in the queue, when positive.
    pub priority: Option<i32>,
    /// The older name of `priority`; used when that is absent.
    pub latency_sensitivity: Option<f64>,
    /// A tier above which no amount of waiting lifts a lower one.
    pub strict_priority: Option<u32>,
    /// Expected length of the answer in tokens.
    pub osl: Option<u32>,
    /// Warm the predicted next prompt after this turn.
    pub speculative_prefill: bool,
    /// How much a cached block counts for this request, 0 to 1.
    pub overlap_credit: Option<f64>,
    /// The older form of `overlap_credit`: a weight from 0 up.
    pub overlap_weight: Option<f64>,
}

impl AgentHints {
    /// Seconds by which the request jumps the queue; 0 for none.
    #[must_use]
    pub fn priority_jump(&self) -> f64 {
        let hint = self.priority.map(f64::from);
        hint.or(self.latency_sensitivity).unwrap_or(0.0).max(0.0)
    }
}

/// Settings of the router that a request changes for itself (`router_config_override`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterOverrides {
    /// How much a cached block counts, 0 to 1.
    pub overlap_score_credit: Option<f64>,
    /// Weight of prompt work against decode load, from 0 up.
    pub prefill_load_scale: Option<f64>,
    /// The older form of both: the scale, and at 0 the credit, too.
    pub overlap_score_weight: Option<f64>,
    /// 0 takes the cheapest worker.
    pub router_temperature: Option<f64>,
    /// Whether equal blocks of running requests are the same blocks.
    pub assume_kv_reuse: Option<bool>,
    /// Whether its prompt counts as load.
    pub track_prefill_tokens: Option<bool>,
    /// How much a block in a shared cache counts, 0 to 1.
    pub shared_cache_multiplier: Option<f64>,
}

/// A session and what is to be done with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionControl {
    /// The client's name for the session; never empty.
    pub session_id: String,
    /// Absent: use the binding that exists.
    pub action: Option<SessionAction>,
    /// Seconds without a request after which the binding ends.
    pub timeout_secs: u64,
}

/// What to do with a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionAction {
    /// Bind and tell the worker.
    Open,
    /// Bind in the router alone.
    Bind,
    /// End the binding and tell the worker.
    Close,
}

/// Which workers are allowed and which preferred, by their taints.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoutingConstraints {
    /// A worker must have all of these.
    pub required: Vec<String>,
    /// Having one of these counts this much.
    pub preferred: Vec<(String, f64)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawConstraints {
    #[serde(default)]
    required_taints: Option<Vec<String>>,
    #[serde(default)]
    preferred_taints: Option<BTreeMap<String, f64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSession {
    session_id: String,
    #[serde(default)]
    action: Option<SessionAction>,
    #[serde(default)]
    timeout: Option<u64>,
}

impl Nvext {
    /// Takes the `nvext` field of a body; absent or `null` is an empty one.
    pub(crate) fn take(body: &mut Reader<'_, '_>) -> Result<Self, ApiError> {
        let Some((text, at)) = body.raw("nvext") else {
            return Ok(Self::default());
        };
        Self::read(body.body(), at, text)
    }

    /// Reads the text of an `nvext` value.
    ///
    /// # Errors
    /// 400 with the field, what was expected, and the names that are accepted.
    pub fn parse(text: &str) -> Result<Self, ApiError> {
        Self::read(text, 0, text)
    }

    /// Reads that of a scanned body; absent or `null` is an empty one.
    ///
    /// # Errors
    /// As [`Nvext::parse`], with line and column in the body.
    pub fn of_scan(scan: &Scan<'_>) -> Result<Self, ApiError> {
        let field = scan.object().get("nvext");
        let Some(field) = field.filter(|field| field.value != "null") else {
            return Ok(Self::default());
        };
        Self::read(scan.object().body(), field.span.start, field.value)
    }

    fn read<'a>(body: &'a str, at: usize, text: &'a str) -> Result<Self, ApiError> {
        let object = Object::parse_str(text).map_err(|e| e.shift(body, at, "nvext"))?;
        let mut r = Reader::nested(body, at, &object, "nvext")?;
        let nvext = Self {
            annotations: names(&mut r, "annotations")?,
            backend_instance_id: r.take("backend_instance_id")?,
            prefill_worker_id: r.take("prefill_worker_id")?,
            decode_worker_id: r.take("decode_worker_id")?,
            dp_rank: r.take("dp_rank")?,
            prefill_dp_rank: r.take("prefill_dp_rank")?,
            token_data: r.take("token_data")?,
            extra: Extra::from_names(&names(&mut r, "extra_fields")?),
            hints: AgentHints::take(&mut r)?,
            overrides: RouterOverrides::take(&mut r)?,
            session: r.take::<RawSession>("session_control")?.map(Into::into),
            cache_salt: r.take::<String>("cache_salt")?.filter(|s| !s.is_empty()),
            greedy: r.take("greed_sampling")?.unwrap_or(false),
            raw_prompt: r.take("use_raw_prompt")?.unwrap_or(false),
            max_thinking_tokens: r.take("max_thinking_tokens")?,
            request_timestamp_ms: r.take::<f64>("request_timestamp_ms")?.map(|ms| ms as u64),
            constraints: RoutingConstraints::take(&mut r)?,
            router: r.json("router"),
            metadata_upload: r.json("metadata_upload"),
        };
        r.finish_listing(FIELDS)?;
        nvext.check()?;
        Ok(nvext)
    }

    fn check(&self) -> Result<(), ApiError> {
        if self.token_data.as_ref().is_some_and(Vec::is_empty) {
            return Err(ApiError::validation("nvext.token_data cannot be empty"));
        }
        let session = self.session.as_ref().map(|s| s.session_id.as_str());
        if session.is_some_and(str::is_empty) {
            return Err(ApiError::validation(
                "nvext.session_control.session_id cannot be empty",
            ));
        }
        if session.is_some_and(|id| id.len() > SESSION_ID_BYTES_MAX) {
            return Err(ApiError::validation(format!(
                "nvext.session_control.session_id is longer than {SESSION_ID_BYTES_MAX} bytes"
            )));
        }
        self.overrides.check()?;
        self.hints.check()
    }

    /// Whether the client only asks where the request would go.
    #[must_use]
    pub fn query_only(&self) -> bool {
        self.annotations
            .iter()
            .any(|a| a.split(':').next() == Some(QUERY_ONLY))
    }

    /// Whether annotation `name` is wanted.
    #[must_use]
    pub fn wants(&self, name: &str) -> bool {
        self.annotations.iter().any(|a| a == name)
    }

    /// The worker that must serve the answer, if the client pinned one.
    #[must_use]
    pub fn pinned_worker(&self) -> Option<u64> {
        self.backend_instance_id.or(self.decode_worker_id)
    }
}

impl AgentHints {
    fn take(nvext: &mut Reader<'_, '_>) -> Result<Self, ApiError> {
        let Some((text, at)) = nvext.raw("agent_hints") else {
            return Ok(Self::default());
        };
        let body = nvext.body();
        let object = Object::parse_str(text).map_err(|e| e.shift(body, at, "nvext.agent_hints"))?;
        let mut r = Reader::nested(body, at, &object, "nvext.agent_hints")?;
        let hints = Self {
            priority: r.take("priority")?,
            latency_sensitivity: r.take("latency_sensitivity")?,
            strict_priority: r.take("strict_priority")?,
            osl: r.take("osl")?,
            speculative_prefill: r.take("speculative_prefill")?.unwrap_or(false),
            overlap_credit: r.take("kv_overlap_score_credit")?,
            overlap_weight: r.take("kv_overlap_score_weight")?,
        };
        r.finish_listing(HINT_FIELDS)?;
        Ok(hints)
    }

    fn check(&self) -> Result<(), ApiError> {
        crate::options::range("kv_overlap_score_credit", self.overlap_credit, 0.0..=1.0)?;
        crate::options::range(
            "kv_overlap_score_weight",
            self.overlap_weight,
            0.0..=f64::MAX,
        )
    }
}

impl RouterOverrides {
    fn take(nvext: &mut Reader<'_, '_>) -> Result<Self, ApiError> {
        const NAME: &str = "nvext.router_config_override";
        let Some((text, at)) = nvext.raw("router_config_override") else {
            return Ok(Self::default());
        };
        let body = nvext.body();
        let object = Object::parse_str(text).map_err(|e| e.shift(body, at, NAME))?;
        let mut r = Reader::nested(body, at, &object, NAME)?;
        let overrides = Self {
            overlap_score_credit: r.take("overlap_score_credit")?,
            prefill_load_scale: r.take("prefill_load_scale")?,
            overlap_score_weight: r.take("overlap_score_weight")?,
            router_temperature: r.take("router_temperature")?,
            assume_kv_reuse: r.take("assume_kv_reuse")?,
            track_prefill_tokens: r.take("track_prefill_tokens")?,
            shared_cache_multiplier: r.take("shared_cache_multiplier")?,
        };
        r.finish_listing(OVERRIDE_FIELDS)?;
        Ok(overrides)
    }

    fn check(&self) -> Result<(), ApiError> {
        use crate::options::range;
        let (share, positive) = (0.0..=1.0, 0.0..=f64::MAX);
        range(
            "overlap_score_credit",
            self.overlap_score_credit,
            share.clone(),
        )?;
        range(
            "shared_cache_multiplier",
            self.shared_cache_multiplier,
            share,
        )?;
        range(
            "prefill_load_scale",
            self.prefill_load_scale,
            positive.clone(),
        )?;
        range(
            "overlap_score_weight",
            self.overlap_score_weight,
            positive.clone(),
        )?;
        range("router_temperature", self.router_temperature, positive)
    }
}

impl From<RawSession> for SessionControl {
    fn from(raw: RawSession) -> Self {
        Self {
            session_id: raw.session_id,
            action: raw.action,
            timeout_secs: raw.timeout.unwrap_or(SESSION_TIMEOUT_SECS),
        }
    }
}

impl RoutingConstraints {
    fn take(nvext: &mut Reader<'_, '_>) -> Result<Self, ApiError> {
        let Some(raw) = nvext.take::<RawConstraints>("routing_constraints")? else {
            return Ok(Self::default());
        };
        let required = raw.required_taints.unwrap_or_default();
        let preferred: Vec<_> = raw.preferred_taints.into_iter().flatten().collect();
        if required.len() + preferred.len() > TAINTS_MAX {
            return Err(ApiError::validation(format_args!(
                "nvext.routing_constraints may name {TAINTS_MAX} taints"
            )));
        }
        Ok(Self {
            required,
            preferred,
        })
    }

    /// Whether every worker will do equally.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.required.is_empty() && self.preferred.is_empty()
    }
}

fn names(r: &mut Reader<'_, '_>, key: &str) -> Result<Vec<String>, ApiError> {
    let names: Vec<String> = r.take(key)?.unwrap_or_default();
    if names.len() > NAMES_MAX {
        return Err(ApiError::validation(format_args!(
            "nvext.{key} may hold {NAMES_MAX} names, got {}",
            names.len()
        )));
    }
    Ok(names)
}
