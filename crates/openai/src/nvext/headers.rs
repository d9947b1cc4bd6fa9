//! The header forms of `nvext`.
//!
//! Answers one question: what do a request's headers say about its placement? A header beats the body. A
//! value that does not parse is as if it had not been sent, so a proxy's stray header never fails a request.

use crate::nvext::Nvext;

/// Longest header value that is kept.
const VALUE_BYTES_MAX: usize = 1024;
/// Headers of request metadata that are kept.
const META_MAX: usize = 64;

/// What the headers of one request say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderHints {
    /// Pins the worker (`x-dynamo-worker-instance-id`).
    pub worker: Option<u64>,
    /// Pins the prefill worker.
    pub prefill_worker: Option<u64>,
    /// Pins the data-parallel rank.
    pub dp_rank: Option<u32>,
    /// Pins the prefill rank.
    pub prefill_dp_rank: Option<u32>,
    /// `x-dynamo-request-priority`.
    pub priority: Option<i32>,
    /// `x-dynamo-request-strict-priority`.
    pub strict_priority: Option<u32>,
    /// `x-tenant-id`: the cache namespace.
    pub tenant: Option<String>,
    /// `x-dynamo-meta-policy-class`.
    pub policy_class: Option<String>,
    /// Session headers, of any dialect.
    pub session: SessionHeaders,
    /// `x-dynamo-meta-*`, names without the prefix, in order.
    pub meta: Vec<(String, String)>,
}

/// Which session a request belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionHeaders {
    /// The session.
    pub id: Option<String>,
    /// The session that started it.
    pub parent: Option<String>,
    /// This is its last request.
    pub is_final: bool,
}

const META_PREFIX: &str = "x-dynamo-meta-";

impl HeaderHints {
    /// Reads lower-case header names and their values; what is not ours is passed over.
    ///
    /// ```
    /// # use kvasir_openai::HeaderHints;
    /// let hints = HeaderHints::read([("x-dp-rank", "2"), ("x-dynamo-request-priority", "soon")]);
    /// assert_eq!((hints.dp_rank, hints.priority), (Some(2), None));
    /// ```
    pub fn read<'a>(headers: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut hints = Self::default();
        let mut agent = SessionHeaders::default();
        for (name, value) in headers {
            if name.starts_with("x-") || name == "thread-id" {
                let value = value.trim();
                if value.len() <= VALUE_BYTES_MAX {
                    hints.one(&mut agent, name, value);
                }
            }
        }
        let own = &mut hints.session;
        own.id = own.id.take().or(agent.id);
        own.parent = own.parent.take().or(agent.parent);
        hints
    }

    fn one(&mut self, agent: &mut SessionHeaders, name: &str, value: &str) {
        match name {
            "x-dynamo-worker-instance-id" => set(&mut self.worker, value),
            "x-dynamo-prefill-instance-id" => set(&mut self.prefill_worker, value),
            "x-dynamo-dp-rank" => set(&mut self.dp_rank, value),
            "x-dynamo-prefill-dp-rank" => set(&mut self.prefill_dp_rank, value),
            "x-worker-instance-id" => alias(&mut self.worker, value),
            "x-prefill-instance-id" => alias(&mut self.prefill_worker, value),
            "x-dp-rank" | "x-data-parallel-rank" => alias(&mut self.dp_rank, value),
            "x-prefill-dp-rank" => alias(&mut self.prefill_dp_rank, value),
            "x-dynamo-request-priority" => set(&mut self.priority, value),
            "x-dynamo-request-strict-priority" => set(&mut self.strict_priority, value),
            "x-tenant-id" => self.tenant = text(value),
            "x-dynamo-session-id" => self.session.id = text(value),
            "x-dynamo-parent-session-id" => self.session.parent = text(value),
            "x-dynamo-session-final" => self.session.is_final = truthy(value),
            "x-claude-code-agent-id" => agent.id = text(value).or(agent.id.take()),
            "x-claude-code-session-id" | "thread-id" | "x-session-id" if agent.id.is_none() => {
                agent.id = text(value);
            }
            "x-claude-code-parent-agent-id"
            | "x-codex-parent-thread-id"
            | "x-parent-session-id" => {
                agent.parent = text(value);
            }
            _ => self.metadata(name, value),
        }
    }

    fn metadata(&mut self, name: &str, value: &str) {
        let Some(key) = name.strip_prefix(META_PREFIX) else {
            return;
        };
        if key == "policy-class" {
            self.policy_class = text(value);
        }
        if self.meta.len() < META_MAX {
            self.meta.push((key.to_owned(), value.to_owned()));
        }
    }

    /// Lays these hints over the body's. Session headers stay apart: they bind by use, not by an action.
    pub fn apply(&self, nvext: &mut Nvext) {
        if let Some(worker) = self.worker {
            nvext.backend_instance_id = Some(worker);
            nvext.decode_worker_id = Some(worker);
        }
        over(&mut nvext.prefill_worker_id, self.prefill_worker);
        over(&mut nvext.dp_rank, self.dp_rank);
        over(&mut nvext.prefill_dp_rank, self.prefill_dp_rank);
        over(&mut nvext.hints.priority, self.priority);
        over(&mut nvext.hints.strict_priority, self.strict_priority);
        if self.tenant.is_some() {
            nvext.cache_salt.clone_from(&self.tenant);
        }
    }
}

fn over<T>(slot: &mut Option<T>, header: Option<T>) {
    if header.is_some() {
        *slot = header;
    }
}

fn set<T: std::str::FromStr>(slot: &mut Option<T>, value: &str) {
    over(slot, value.parse().ok());
}

/// An older name, which the newer one beats whatever their order.
fn alias<T: std::str::FromStr>(slot: &mut Option<T>, value: &str) {
    if slot.is_none() {
        *slot = value.parse().ok();
    }
}

fn text(value: &str) -> Option<String> {
    (!value.is_empty()).then(|| value.to_owned())
}

fn truthy(value: &str) -> bool {
    ["1", "true", "yes", "on"]
        .iter()
        .any(|t| value.eq_ignore_ascii_case(t))
}
