//! What a client says to the router, in the router's words.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use kvasir_openai::{HeaderHints, Nvext, SessionControl};
use kvasir_router::{Arrival, Constraints, Hints, Overrides, Pin, SessionAction, SessionRequest};
use kvasir_types::{DpRank, RequestId, WorkerId};

/// Header names and values as [`HeaderHints::read`] takes them.
pub(crate) fn header_pairs(headers: &HeaderMap) -> impl Iterator<Item = (&str, &str)> {
    headers
        .iter()
        .filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?)))
}

/// An arrival with everything that `nvext` and the headers say; what the index holds comes later.
pub(crate) fn arrival(id: RequestId, isl: usize, nvext: &Nvext, headers: &HeaderHints) -> Arrival {
    let mut arrival = Arrival::new(id, u32::try_from(isl).unwrap_or(u32::MAX));
    arrival.pin = Pin {
        worker: nvext
            .decode_worker_id
            .or(nvext.backend_instance_id)
            .map(WorkerId),
        rank: nvext.dp_rank.map(DpRank),
    };
    let shared = |text: &String| Arc::<str>::from(text.as_str());
    arrival.constraints = Constraints {
        required_taints: nvext.constraints.required.iter().map(shared).collect(),
        preferred_taints: nvext
            .constraints
            .preferred
            .iter()
            .map(|(t, w)| (shared(t), *w))
            .collect(),
        ..Constraints::default()
    };
    arrival.hints = Hints {
        priority: nvext.hints.priority,
        latency_sensitivity: nvext.hints.latency_sensitivity,
        strict_priority: nvext.hints.strict_priority.unwrap_or(0),
        osl: nvext.hints.osl,
    };
    // What a request says to the router itself beats the hint of its agent.
    let (own, hints) = (&nvext.overrides, &nvext.hints);
    arrival.overrides = Overrides {
        overlap_score_credit: own.overlap_score_credit.or(hints.overlap_credit),
        overlap_score_weight: own.overlap_score_weight.or(hints.overlap_weight),
        prefill_load_scale: own.prefill_load_scale,
        router_temperature: own.router_temperature,
        assume_kv_reuse: own.assume_kv_reuse,
        track_prefill_tokens: own.track_prefill_tokens,
        shared_cache_multiplier: own.shared_cache_multiplier,
    };
    arrival.session = session(nvext.session.as_ref(), headers);
    arrival.policy_class = headers.policy_class.as_ref().map(shared);
    arrival
}

/// `session_control` beats the session header.
fn session(control: Option<&SessionControl>, headers: &HeaderHints) -> Option<SessionRequest> {
    let Some(control) = control else {
        let id = headers.session.id.as_deref()?;
        return Some(SessionRequest {
            id: id.into(),
            action: SessionAction::Header,
        });
    };
    let timeout = Duration::from_secs(control.timeout_secs);
    let action = match control.action {
        None => SessionAction::Use,
        Some(kvasir_openai::SessionAction::Bind) => SessionAction::Bind { timeout },
        Some(kvasir_openai::SessionAction::Open) => SessionAction::Open { timeout },
        Some(kvasir_openai::SessionAction::Close) => SessionAction::Close,
    };
    Some(SessionRequest {
        id: control.session_id.as_str().into(),
        action,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: RequestId = RequestId(1);

    fn of(nvext: &str, headers: &[(&str, &str)]) -> Arrival {
        let mut nvext = Nvext::parse(nvext).unwrap();
        let headers = HeaderHints::read(headers.iter().copied());
        headers.apply(&mut nvext);
        arrival(ID, 10, &nvext, &headers)
    }

    #[test]
    fn a_header_pin_beats_the_body() {
        let body = r#"{"backend_instance_id": 3, "dp_rank": 1}"#;
        assert_eq!(
            of(body, &[]).pin,
            Pin {
                worker: Some(WorkerId(3)),
                rank: Some(DpRank(1))
            }
        );
        let pinned = of(body, &[("x-dynamo-worker-instance-id", "9")]);
        assert_eq!(pinned.pin.worker, Some(WorkerId(9)));
    }

    #[test]
    fn hints_and_overrides_arrive() {
        let arrival = of(
            r#"{"agent_hints": {"priority": 5, "osl": 64, "kv_overlap_score_credit": 0.5}}"#,
            &[("x-dynamo-request-strict-priority", "2")],
        );
        assert_eq!(arrival.hints.priority, Some(5));
        assert_eq!(
            (arrival.hints.osl, arrival.hints.strict_priority),
            (Some(64), 2)
        );
        assert_eq!(arrival.overrides.overlap_score_credit, Some(0.5));
    }

    #[test]
    fn router_config_override_reaches_the_router_and_beats_hints() {
        let arrival = of(
            r#"{"agent_hints": {"kv_overlap_score_credit": 0.5, "kv_overlap_score_weight": 7},
                "router_config_override": {"overlap_score_credit": 0.25, "prefill_load_scale": 2,
                "router_temperature": 0.5, "assume_kv_reuse": false, "track_prefill_tokens": false,
                "shared_cache_multiplier": 0.1}}"#,
            &[],
        );
        let expected = Overrides {
            overlap_score_credit: Some(0.25),
            overlap_score_weight: Some(7.0),
            prefill_load_scale: Some(2.0),
            router_temperature: Some(0.5),
            assume_kv_reuse: Some(false),
            track_prefill_tokens: Some(false),
            shared_cache_multiplier: Some(0.1),
        };
        assert_eq!(arrival.overrides, expected);
    }

    #[test]
    fn session_control_beats_the_session_header() {
        let header = [("x-dynamo-session-id", "h")];
        assert_eq!(of("{}", &[]).session, None);
        let by_header = of("{}", &header).session.unwrap();
        assert_eq!(
            (&*by_header.id, by_header.action),
            ("h", SessionAction::Header)
        );
        let control = r#"{"session_control": {"session_id": "s", "action": "bind", "timeout": 9}}"#;
        let bound = of(control, &header).session.unwrap();
        let timeout = Duration::from_secs(9);
        assert_eq!(
            (&*bound.id, bound.action),
            ("s", SessionAction::Bind { timeout })
        );
    }
}
