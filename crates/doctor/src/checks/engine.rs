//! Is the engine there, and is it the one that the frontend thinks it is?

use kvasir_upstream::EngineKind;

use crate::advice::{engine, keep_prefixes, kvasir, resize, with_block_size};
use crate::finding::Verdict;
use crate::observations::{Observations, ProbeError};

/// The oldest vLLM whose events are known to be read, as (major, minor).
const OLDEST: (u32, u32) = (0, 9);

pub(super) fn reachable(observed: &Observations) -> Verdict {
    let address = &observed.target.endpoint;
    let port = address.port.to_string();
    match &observed.models {
        Ok(took) => Verdict::pass(format!("answers in {} ms", took.as_millis())),
        Err(silence @ ProbeError::Unreachable(_)) => {
            let listen = ["--host", "0.0.0.0", "--port", port.as_str()];
            let elsewhere = "or name the place where it does listen: --worker http://HOST:PORT";
            Verdict::fail(
                silence.to_string(),
                vec![
                    engine(&listen, "start it, and let it listen there"),
                    kvasir(&[], elsewhere),
                ],
            )
        }
        Err(silence @ ProbeError::Insecure(_)) => {
            let text = "a file with the authority that vouches for the engine, in PEM";
            Verdict::fail(
                silence.to_string(),
                vec![kvasir(&["--worker-tls-ca-path", "FILE"], text)],
            )
        }
        Err(silence @ ProbeError::TimedOut(_)) => {
            let text = "it takes connections and does not answer: look at its log, restart it";
            Verdict::fail(silence.to_string(), vec![engine(&[], text)])
        }
        Err(ProbeError::Status(status @ (401 | 403), _)) => {
            let words = format!("{address},api-key-file=FILE");
            let text = "a file with the key that the engine was started with (--api-key)";
            let why = format!("it answers {status}: it asks for a key, or for another one");
            Verdict::fail(why, vec![kvasir(&["--worker", &words], text)])
        }
        Err(silence) => {
            let scheme = if address.tls { "https" } else { "http" };
            let root = format!("{scheme}://{}", address.authority());
            let text = "no OpenAI server answers at /v1/models under this address";
            Verdict::fail(
                silence.to_string(),
                vec![kvasir(&["--worker", &root], text)],
            )
        }
    }
}

pub(super) fn model(observed: &Observations) -> Verdict {
    let served: Vec<&str> = observed
        .facts
        .models
        .iter()
        .map(|m| m.name.as_str())
        .collect();
    let Some(first) = served.first() else {
        return Verdict::fail("it serves no model", vec![engine(&[], "load a model")]);
    };
    match &observed.target.model {
        Some(wanted) if !served.contains(&wanted.as_str()) => Verdict::fail(
            format!("it serves {}, not {wanted}", served.join(", ")),
            vec![
                engine(&["--served-model-name", wanted], "serve it under that name"),
                kvasir(&["--model-name", first], "or ask for the name that it has"),
            ],
        ),
        _ => Verdict::pass(served.join(", ")),
    }
}

pub(super) fn version(observed: &Observations) -> Verdict {
    let Some(version) = &observed.facts.version else {
        return match &observed.version {
            Err(silence) => Verdict::skip(format!("not reported ({silence})")),
            Ok(()) => Verdict::skip("not reported"),
        };
    };
    let is_vllm = matches!(observed.facts.kind, EngineKind::Vllm | EngineKind::Unknown);
    match major_minor(version) {
        Some(found) if is_vllm && found < OLDEST => Verdict::fail(
            format!("{version} is older than 0.9, whose events are the first that are known"),
            vec![engine(&[], "upgrade it")],
        ),
        _ => Verdict::pass(match observed.facts.kind {
            EngineKind::Vllm | EngineKind::Unknown => version.clone(),
            kind => format!("{} {version}", kind.name()),
        }),
    }
}

fn major_minor(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
    let found = (parts.next()??, parts.next()??);
    // `0.1.dev123` is how a build from source without tags calls itself.
    (found != (0, 1)).then_some(found)
}

pub(super) fn block_size(observed: &Observations) -> Verdict {
    let Some(size) = observed.true_block_size() else {
        return match observed.configured_block_size() {
            Some(configured) => Verdict::pass(format!(
                "{configured} as configured; the engine does not report it"
            )),
            None => {
                let why = match &observed.metrics {
                    Ok(()) => "neither the engine's metrics nor anybody else say it".to_owned(),
                    Err(silence) => {
                        format!("nobody says it; the engine has no metrics ({silence})")
                    }
                };
                let text = "give its own --block-size, if it is not 16";
                Verdict::fail(why, vec![with_block_size(observed, 16, text)])
            }
        };
    };
    let advice = vec![with_block_size(
        observed,
        size,
        "tell the frontend the truth",
    )];
    if let Some(configured) = observed.configured_block_size()
        && configured != size
    {
        return Verdict::fail(
            format!("the engine has {size}, the frontend is configured with {configured}"),
            advice,
        );
    }
    if let Some(own) = observed.facts.block_size.filter(|own| *own != size) {
        return Verdict::fail(
            format!("its events have {size}, the engine itself says {own}"),
            advice,
        );
    }
    let others = observed.peers_block_size.as_ref();
    let others = others.filter(|(others, _)| *others != size);
    match (observed.target.index_block_size, others) {
        (Some(index), _) if index == size => Verdict::pass(size.to_string()),
        (_, Some((others, one))) => Verdict::fail(
            format!("{size}, while {one} has {others}: one model has one index, of one block size"),
            vec![resize(observed, *others, "as most of its peers have it")],
        ),
        (Some(index), None) => Verdict::fail(
            format!("{size}, while the frontend's index of this model has {index}"),
            vec![kvasir(
                &["--kv-cache-block-size", &size.to_string()],
                "or leave it out and restart the frontend: it finds the engines' size",
            )],
        ),
        (None, None) => Verdict::pass(size.to_string()),
    }
}

pub(super) fn prefix_caching(observed: &Observations) -> Verdict {
    let mut twice = observed
        .ranks
        .iter()
        .filter_map(|r| r.repeated_prompt.as_ref().ok());
    let hit = twice.any(|t| t.reported.unwrap_or(0) > 0);
    match observed.facts.prefix_caching {
        Some(true) => Verdict::pass("on"),
        Some(false) => Verdict::fail(
            "off: nothing is kept, so nothing can be found again",
            vec![keep_prefixes(observed)],
        ),
        None if hit => Verdict::pass("on: a repeated prompt was found again"),
        None => Verdict::skip("the engine does not say"),
    }
}
