//! Do the engine's events reach us, and can missed ones be had again?

use kvasir_transport::SourceFault;
use kvasir_upstream::{EngineKind, EventSource};

use crate::advice::{engine, publish, publish_elsewhere, with_free_sockets, with_sockets};
use crate::finding::{Advice, Outcome, Verdict};
use crate::observations::{Observations, ProbeError, RankProbe, ReplayProbe};

/// The verdict of the first rank that is not well, else of the first; ranks are named where there are several.
fn over_ranks(observed: &Observations, judge: impl Fn(&RankProbe) -> Verdict) -> Verdict {
    let several = observed.ranks.len() > 1;
    let mut verdicts: Vec<(u32, Verdict)> = observed
        .ranks
        .iter()
        .map(|rank| (rank.rank, judge(rank)))
        .collect();
    let worst = |outcome| move |(_, v): &(u32, Verdict)| v.outcome == outcome;
    let at = verdicts.iter().position(worst(Outcome::Fail));
    let at = at.or_else(|| verdicts.iter().position(worst(Outcome::Skip)));
    if verdicts.is_empty() {
        return Verdict::skip("no rank was looked at");
    }
    let (rank, mut verdict) = verdicts.swap_remove(at.unwrap_or(0));
    if several {
        verdict.why = match verdict.outcome {
            Outcome::Pass => format!("{} ranks; rank 0: {}", observed.ranks.len(), verdict.why),
            Outcome::Fail | Outcome::Skip => format!("rank {rank}: {}", verdict.why),
        };
    }
    verdict
}

pub(super) fn socket(observed: &Observations) -> Verdict {
    over_ranks(observed, |rank| match (&rank.source, &rank.link) {
        (None, _) => unpublished(observed),
        (Some(source), Ok(())) => Verdict::pass(source.events.clone()),
        (Some(source), Err(fault)) => unlinked(observed, rank.rank, source, fault),
    })
}

/// No event socket is known.
fn unpublished(observed: &Observations) -> Verdict {
    if observed.facts.kind == EngineKind::TensorRt {
        return Verdict::skip(
            "it has no event socket: its cache is predicted from what it is sent",
        );
    }
    match &observed.event_route {
        Ok(()) => {
            let text = "let it publish; it then says itself where";
            Verdict::fail(
                "the engine publishes no events",
                vec![publish(observed, text)],
            )
        }
        Err(silence) => {
            let why = format!("the engine does not say where its events are ({silence})");
            let there = "name the sockets, as this engine does not";
            Verdict::fail(
                why,
                vec![
                    publish(observed, "let it publish, if it does not yet"),
                    with_free_sockets(observed, there),
                ],
            )
        }
    }
}

fn unlinked(
    observed: &Observations,
    rank: u32,
    source: &EventSource,
    fault: &SourceFault,
) -> Verdict {
    let why = format!("{}: {fault}", source.events);
    if let Some(advice) = other_sockets(observed, rank, source) {
        return Verdict::fail(why, vec![advice]);
    }
    let swapped = matches!(fault, SourceFault::Protocol(_));
    if let Some(replay) = source.replay.as_ref().filter(|_| swapped) {
        let other = EventSource {
            events: replay.clone(),
            replay: Some(source.events.clone()),
            topic: String::new(),
        };
        let text = "that is no socket that publishes: events and replay may be swapped";
        return Verdict::fail(why, vec![with_sockets(observed, &other, text)]);
    }
    let text = "let it publish on all interfaces, and open the port on the way from here";
    let mut advice = publish(observed, text);
    for arg in &mut advice.args {
        *arg = arg.replace("tcp://localhost:", "tcp://*:");
        if !["localhost", "127.0.0.1"].contains(&observed.target.endpoint.host.as_str()) {
            *arg = arg.replace("tcp://127.0.0.1:", "tcp://*:");
        }
    }
    Verdict::fail(why, vec![advice])
}

/// The engine's own sockets, if the operator named others.
fn other_sockets(observed: &Observations, rank: u32, source: &EventSource) -> Option<Advice> {
    observed.target.worker.events.publish()?;
    let own = observed.own_source(rank)?;
    if own.events == source.events && (own.replay.is_none() || own.replay == source.replay) {
        return None;
    }
    let first = observed.own_source(0).unwrap_or(own);
    let text = "these are the engine's own; what it is told are somebody else's";
    Some(with_sockets(observed, &first, text))
}

pub(super) fn arrive(observed: &Observations) -> Verdict {
    over_ranks(observed, |rank| {
        if rank.source.is_none() || rank.link.is_err() {
            return Verdict::skip("no event socket");
        }
        if let Err(silence) = &rank.repeated_prompt {
            return refused(silence);
        }
        let events = &rank.events;
        if let Some(error) = events.refused.as_ref().filter(|_| events.blocks == 0) {
            let text = "an engine release that is not known: report it with its version";
            return Verdict::fail(
                format!("messages come and cannot be read: {error}"),
                vec![engine(&[], text)],
            );
        }
        if events.batches == 0 {
            return silent(observed, rank);
        }
        let predicted = rank
            .repeated_prompt
            .as_ref()
            .ok()
            .and_then(|t| t.predicted)
            .unwrap_or(0);
        if predicted == 0 && observed.block_size_fits() {
            let why = "events come, and none is about the prompt that was sent";
            let other = rank.source.as_ref();
            let other = other.and_then(|source| other_sockets(observed, rank.rank, source));
            let text = "its sockets are another engine's: give each engine on a host its own ports";
            return Verdict::fail(
                why,
                vec![other.unwrap_or_else(|| publish_elsewhere(observed, text))],
            );
        }
        let after = events.after.unwrap_or_default().as_millis();
        let batches = match events.batches {
            1 => "1 batch".to_owned(),
            count => format!("{count} batches"),
        };
        Verdict::pass(format!("{batches}, {after} ms after the first answer"))
    })
}

fn refused(silence: &ProbeError) -> Verdict {
    Verdict::fail(
        format!("the test request failed: {silence}"),
        vec![engine(
            &[],
            "make it answer /v1/completions; its log says more",
        )],
    )
}

/// Connected, asked, answered, and no event.
fn silent(observed: &Observations, rank: &RankProbe) -> Verdict {
    if observed.facts.prefix_caching == Some(false) {
        return Verdict::skip("prefix caching is off, so there is nothing to tell");
    }
    let why = "the socket is there, a request was answered, and no event came";
    if let Some(source) = &rank.source
        && let Some(advice) = other_sockets(observed, rank.rank, source)
    {
        return Verdict::fail(why, vec![advice]);
    }
    match rank.replay {
        ReplayProbe::Answered { batches, .. } if batches > 0 => {
            let text = "look for a proxy between here and the engine that holds live messages back";
            Verdict::fail(
                format!("{why}, though the replay has {batches}"),
                vec![engine(&[], text)],
            )
        }
        _ => {
            let text = "its publisher is stuck: restart the engine";
            Verdict::fail(why, vec![engine(&[], text)])
        }
    }
}

pub(super) fn replay(observed: &Observations) -> Verdict {
    over_ranks(observed, |rank| {
        let Some(source) = &rank.source else {
            return Verdict::skip("no event socket");
        };
        if rank.link.is_err() {
            return Verdict::skip("no event socket");
        }
        let shown = source.replay.as_deref().unwrap_or("");
        match &rank.replay {
            ReplayProbe::Skipped => Verdict::skip("not asked"),
            ReplayProbe::Unknown => unreplayed(
                observed,
                rank.rank,
                "there is none: a lost event costs the whole cache view",
            ),
            ReplayProbe::Failed(fault) => {
                unreplayed(observed, rank.rank, &format!("{shown}: {fault}"))
            }
            ReplayProbe::TimedOut(timeout) => {
                let why = format!("{shown}: no answer within {} s", timeout.as_secs_f64());
                unreplayed(observed, rank.rank, &why)
            }
            ReplayProbe::Answered {
                has_last: Some(false),
                ..
            } => {
                let why = format!("{shown} answers without the batch that came last");
                unreplayed(observed, rank.rank, &why)
            }
            ReplayProbe::Answered { .. } => Verdict::pass(shown.to_owned()),
        }
    })
}

fn unreplayed(observed: &Observations, rank: u32, why: &str) -> Verdict {
    let told = observed.target.worker.events.publish().is_some();
    if let Some(own) = observed
        .own_source(rank)
        .filter(|own| told && own.replay.is_some())
    {
        let first = observed.own_source(0).unwrap_or(own);
        let text = "this is the engine's own replay socket";
        return Verdict::fail(why, vec![with_sockets(observed, &first, text)]);
    }
    Verdict::fail(why, vec![publish(observed, "give it a replay socket")])
}
