//! Is the engine there, and is it the one that the frontend thinks it is?

use kvasir_upstream::EngineKind;

use crate::advice::{engine, keep_prefixes, kvasir, resize, with_block_size};
use crate::finding::Verdict;
use crate::world::{Silence, World};

/// The oldest vLLM whose events are known to be read, as (major, minor).
const OLDEST: (u32, u32) = (0, 9);

pub(super) fn reachable(world: &World) -> Verdict {
    let address = &world.told.endpoint;
    let port = address.port.to_string();
    match &world.models {
        Ok(took) => Verdict::pass(format!("answers in {} ms", took.as_millis())),
        Err(silence @ Silence::Unreachable(_)) => {
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
        Err(silence @ Silence::Insecure(_)) => {
            let text = "a file with the authority that vouches for the engine, in PEM";
            Verdict::fail(
                silence.to_string(),
                vec![kvasir(&["--worker-tls-ca-path", "FILE"], text)],
            )
        }
        Err(silence @ Silence::TimedOut(_)) => {
            let text = "it takes connections and does not answer: look at its log, restart it";
            Verdict::fail(silence.to_string(), vec![engine(&[], text)])
        }
        Err(Silence::Status(status @ (401 | 403), _)) => {
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

pub(super) fn model(world: &World) -> Verdict {
    let served: Vec<&str> = world.facts.models.iter().map(|m| m.name.as_str()).collect();
    let Some(first) = served.first() else {
        return Verdict::fail("it serves no model", vec![engine(&[], "load a model")]);
    };
    match &world.told.model {
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

pub(super) fn version(world: &World) -> Verdict {
    let Some(version) = &world.facts.version else {
        return match &world.version {
            Err(silence) => Verdict::skip(format!("not told ({silence})")),
            Ok(()) => Verdict::skip("not told"),
        };
    };
    let is_vllm = matches!(world.facts.kind, EngineKind::Vllm | EngineKind::Unknown);
    match major_minor(version) {
        Some(found) if is_vllm && found < OLDEST => Verdict::fail(
            format!("{version} is older than 0.9, whose events are the first that are known"),
            vec![engine(&[], "upgrade it")],
        ),
        _ => Verdict::pass(match world.facts.kind {
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

pub(super) fn block_size(world: &World) -> Verdict {
    let Some(size) = world.true_block_size() else {
        return match world.told_block_size() {
            Some(told) => Verdict::pass(format!("{told} as told; the engine does not say")),
            None => {
                let why = match &world.metrics {
                    Ok(()) => "neither the engine's metrics nor anybody else say it".to_owned(),
                    Err(silence) => {
                        format!("nobody says it; the engine has no metrics ({silence})")
                    }
                };
                let text = "give its own --block-size, if it is not 16";
                Verdict::fail(why, vec![with_block_size(world, 16, text)])
            }
        };
    };
    let advice = vec![with_block_size(world, size, "tell the frontend the truth")];
    if let Some(told) = world.told_block_size()
        && told != size
    {
        return Verdict::fail(
            format!("the engine has {size}, the frontend is told {told}"),
            advice,
        );
    }
    if let Some(own) = world.facts.block_size.filter(|own| *own != size) {
        return Verdict::fail(
            format!("its events have {size}, the engine itself says {own}"),
            advice,
        );
    }
    let others = world.peers_block_size.as_ref();
    let others = others.filter(|(others, _)| *others != size);
    match (world.told.index_block_size, others) {
        (Some(index), _) if index == size => Verdict::pass(size.to_string()),
        (_, Some((others, one))) => Verdict::fail(
            format!("{size}, while {one} has {others}: one model has one index, of one block size"),
            vec![resize(world, *others, "as most of its peers have it")],
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

pub(super) fn prefix_caching(world: &World) -> Verdict {
    let mut twice = world.ranks.iter().filter_map(|r| r.twice.as_ref().ok());
    let hit = twice.any(|t| t.reported.unwrap_or(0) > 0);
    match world.facts.prefix_caching {
        Some(true) => Verdict::pass("on"),
        Some(false) => Verdict::fail(
            "off: nothing is kept, so nothing can be found again",
            vec![keep_prefixes(world)],
        ),
        None if hit => Verdict::pass("on: a repeated prompt was found again"),
        None => Verdict::skip("the engine does not say"),
    }
}
