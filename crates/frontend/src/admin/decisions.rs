//! `/decisions`: why requests went where they went, and what came of it.

use std::collections::{HashMap, HashSet};

use http::StatusCode;
use kvasir_openai::ApiError;
use kvasir_router::{DecidingTerm, Decision, Router};
use kvasir_types::{RequestId, WorkerId};
use serde_json::{Value, json};

use crate::App;
use crate::http::reply::{self, Reply};
use crate::http::routes::percent_decode;
use crate::models::{Models, ServedModel, model_of_prefill_pool};

/// What is said of a request that nobody knows, or knows no more.
const NO_DECISION: &str = "no decision about this request is remembered; the latest ones are kept";
/// Decisions in one answer.
const DECISIONS_MAX: usize = 100;
/// What a query may be.
const QUERY: &str = "The query may have model=NAME, worker=ID, limit=1 to 100, role=any for those about prefill workers, too, and \
    outcome= one of ok, failed, rejected, cancelled, running";

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Ok,
    Failed,
    Rejected,
    Cancelled,
    Running,
}

impl Ending {
    fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "ok" => Self::Ok,
            "failed" => Self::Failed,
            "rejected" => Self::Rejected,
            "cancelled" => Self::Cancelled,
            "running" => Self::Running,
            _ => return None,
        })
    }

    fn of(status: Option<u16>) -> Self {
        match status {
            None => Self::Running,
            Some(..400) => Self::Ok,
            Some(499) => Self::Cancelled,
            Some(429 | 503 | 529) => Self::Rejected,
            Some(_) => Self::Failed,
        }
    }
}

/// Which decisions are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Asked {
    model: Option<String>,
    worker: Option<WorkerId>,
    outcome: Option<Ending>,
    limit: usize,
    /// Those about workers that compute prompts for others, too.
    with_prefill: bool,
}

impl Asked {
    fn parse(query: &str) -> Result<Self, ApiError> {
        let mut asked = Self {
            model: None,
            worker: None,
            outcome: None,
            limit: DECISIONS_MAX,
            with_prefill: false,
        };
        let bad = || ApiError::bad_request(QUERY);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').ok_or_else(bad)?;
            let value = percent_decode(&value.replace('+', " "));
            match name {
                "model" => asked.model = Some(value),
                "worker" => asked.worker = Some(WorkerId(value.parse().map_err(|_| bad())?)),
                "outcome" => asked.outcome = Some(Ending::parse(&value).ok_or_else(bad)?),
                "role" if value == "any" => asked.with_prefill = true,
                "limit" => {
                    let limit = value.parse().map_err(|_| bad())?;
                    asked.limit = Some(limit)
                        .filter(|limit| (1..=DECISIONS_MAX).contains(limit))
                        .ok_or_else(bad)?;
                }
                _ => return Err(bad()),
            }
        }
        Ok(asked)
    }

    fn has(&self, of_router: &ServedModel, decision: &Decision, status: Option<u16>) -> bool {
        let model = decision.model.as_deref().unwrap_or(&of_router.name);
        let model = model_of_prefill_pool(model);
        let winner = decision.winner.map(|(rank, _)| rank.worker);
        self.model.as_deref().is_none_or(|asked| asked == model)
            && self.worker.is_none_or(|asked| Some(asked) == winner)
            && self.outcome.is_none_or(|asked| asked == Ending::of(status))
    }
}

/// `GET /decisions`: the latest, newest first; only those that the query asks for.
pub(crate) fn decisions(app: &App, query: Option<&str>) -> Reply {
    let asked = match Asked::parse(query.unwrap_or_default()) {
        Ok(asked) => asked,
        Err(error) => return reply::error(&error),
    };
    let mut statuses: HashMap<RequestId, u16> = HashMap::new();
    if asked.outcome.is_some() {
        let outcomes = app.observer().outcomes();
        outcomes.since(0, |ended| {
            statuses.insert(ended.id, ended.status);
        });
    }
    let mut rows: Vec<(kvasir_types::Time, Value)> = Vec::new();
    let mut seen = HashSet::new();
    let mut routers = app.models().of_routers();
    if asked.with_prefill {
        routers.extend(app.prefill_pools().of_routers());
    }
    for model in routers {
        model.host.ask(|router| {
            let is_asked = |d: &&Decision| asked.has(&model, d, statuses.get(&d.id).copied());
            for decision in router.decisions().filter(is_asked).take(asked.limit) {
                let mut row = decision_row(app, &model, router, decision);
                // What came of a request is what its last worker made of it.
                let superseded = !seen.insert((model.is_prefill_pool(), decision.id));
                row["superseded"] = superseded.into();
                if superseded {
                    row["outcome"] = Value::Null;
                }
                rows.push((decision.at, row));
            }
        });
    }
    rows.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    rows.truncate(asked.limit);
    let rows: Vec<Value> = rows.into_iter().map(|(_, row)| row).collect();
    reply::json(StatusCode::OK, json!({ "decisions": rows }).to_string())
}

/// `GET /decisions/{id}`: why a request went where it went. The id may have its `chatcmpl-` still on, and
/// may be the client's own (`x-request-id`).
pub(crate) fn decision(app: &App, id: &str) -> Reply {
    let bare = id
        .strip_prefix("chatcmpl-")
        .or_else(|| id.strip_prefix("cmpl-"))
        .unwrap_or(id);
    // Clients' own names may look like our ids.
    let named = |name| app.observer().outcomes().named(name);
    let requests = [RequestId::parse(bare), named(id), named(bare)];
    for request in requests.into_iter().flatten() {
        if let Some(mut row) = explained(app, app.models(), request) {
            add_origin(app, &mut row);
            if let Some(mut prefill) = explained(app, app.prefill_pools(), request) {
                add_origin(app, &mut prefill);
                prefill["outcome"] = Value::Null;
                row["prefill"] = prefill;
            }
            return reply::json(StatusCode::OK, row.to_string());
        }
    }
    reply::error(&ApiError::new(404, NO_DECISION))
}

/// Says where the worker that won came from.
fn add_origin(app: &App, row: &mut Value) {
    let worker = row.pointer("/winner/0/worker").and_then(Value::as_u64);
    let member = worker.and_then(|worker| app.members().get(WorkerId(worker)));
    if let Some(member) = member {
        row["winner_sources"] = super::workers::sources(&member);
        row["winner_address"] = super::workers::plane_address(&member).into();
    }
}

fn explained(app: &App, models: &Models, request: RequestId) -> Option<Value> {
    let models = models.of_routers();
    models.iter().find_map(|model| {
        model.host.ask(|router| {
            let decision = router.explain(request)?;
            let mut row = decision_row(app, model, router, decision);
            let learned = decision.winner.and_then(|(rank, _)| router.learned(rank));
            row["learned"] = learned
                .map(|times| super::workers::learned_row(&times))
                .into();
            Some(row)
        })
    })
}

/// `of_router` is a model of the router that decided.
fn decision_row(app: &App, of_router: &ServedModel, router: &Router, decision: &Decision) -> Value {
    let mut row = serde_json::to_value(decision).unwrap_or_default();
    let asked = decision.model.as_deref();
    let asked = asked.and_then(|name| app.models().get(name));
    let model = asked.as_deref().unwrap_or(of_router);
    if let Some(fields) = row.as_object_mut() {
        let name = decision.model.as_deref().unwrap_or(&model.name);
        fields.insert("model".into(), model_of_prefill_pool(name).into());
        let role = of_router.is_prefill_pool().then_some("prefill");
        fields.insert("role".into(), role.into());
        let deciding = decision.deciding_term().map(DecidingTerm::name);
        fields.insert("deciding".into(), deciding.into());
        fields.insert(
            "at_unix_ms".into(),
            Value::from(app.clock().unix_millis(decision.at)),
        );
        if let (Some(shadow), Some((policy, _))) = (&decision.shadow, router.shadow())
            && let Some(said) = fields.get_mut("shadow")
        {
            said["policy"] = policy.into();
            said["name"] = shadow.rank.to_string().into();
            said["url"] = model.url_of(shadow.rank.worker).into();
        }
        let mode = router.config().router_mode.name();
        fields.insert("router_mode".into(), mode.into());
        let formulas: Vec<String> = decision.formulas().map(|f| f.to_string()).collect();
        fields.insert("formulas".into(), Value::from(formulas));
        let url = |candidate: &kvasir_router::Candidate| model.url_of(candidate.rank.worker);
        let urls: Vec<Option<String>> = decision.candidates.iter().map(url).collect();
        fields.insert("candidate_urls".into(), Value::from(urls));
        // Ids have 64 bits, of which a browser's numbers hold 53.
        let name = |candidate: &kvasir_router::Candidate| candidate.rank.to_string();
        let names: Vec<String> = decision.candidates.iter().map(name).collect();
        fields.insert("candidate_names".into(), Value::from(names));
        let winner = decision.winner.map(|(rank, _)| rank.to_string());
        fields.insert("winner_name".into(), Value::from(winner));
        let excluded = decision.excluded.named.iter();
        let excluded: Vec<String> = excluded.map(|(rank, _)| rank.to_string()).collect();
        fields.insert("excluded_names".into(), Value::from(excluded));
        fields.insert("block_size".into(), Value::from(model.block_size));
        let ended = app.observer().outcomes().of(decision.id);
        fields.insert("outcome".into(), ended.map(|e| e.to_json()).into());
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_names_what_it_wants_and_nothing_else() {
        let parsed = Asked::parse("model=a%2Fb+c&worker=7&outcome=failed&limit=5").unwrap();
        let expected = Asked {
            model: Some("a/b c".into()),
            worker: Some(WorkerId(7)),
            outcome: Some(Ending::Failed),
            limit: 5,
            with_prefill: false,
        };
        assert_eq!(parsed, expected);
        assert_eq!(Asked::parse("").unwrap().limit, DECISIONS_MAX);
        assert!(Asked::parse("role=any").unwrap().with_prefill);
        for wrong in [
            "limit=0",
            "limit=101",
            "outcome=x",
            "worker=x",
            "x=1",
            "role=prefill",
            "model",
        ] {
            assert!(Asked::parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(Ending::of(None), Ending::Running);
        assert_eq!(Ending::of(Some(503)), Ending::Rejected);
    }
}
