//! The bodies of the described routes: fields, types and what each means.

use serde_json::{Value, json};

use crate::fleet::members::MemberState;

/// An object with these fields, and whatever else the engine takes or gives.
fn open(required: &[&str], properties: &Value) -> Value {
    json!({ "type": "object", "required": required, "properties": properties })
}

fn list(of: &str) -> Value {
    json!({ "type": "array", "items": { "$ref": format!("#/components/schemas/{of}") } })
}

/// A field of this type; the text says what it means.
fn field(of: &str, meaning: &str) -> Value {
    json!({ "type": of, "description": meaning })
}

/// The same, of a field that may be `null`.
fn maybe(of: &str, meaning: &str) -> Value {
    json!({ "type": [of, "null"], "description": meaning })
}

/// Every schema by name.
pub(super) fn all() -> Value {
    let mut schemas = inference();
    for more in [
        health(),
        thresholds(),
        workers(),
        decisions(),
        what_if(),
        sessions(),
    ] {
        if let (Some(all), Value::Object(more)) = (schemas.as_object_mut(), more) {
            all.extend(more);
        }
    }
    schemas
}

fn inference() -> Value {
    let (text, number, flag) = (
        json!({ "type": "string" }),
        json!({ "type": "integer" }),
        json!({ "type": "boolean" }),
    );
    let extension = json!({ "type": "object", "description": "What is said to the router" });
    let usage = open(
        &[],
        &json!({ "prompt_tokens": number, "completion_tokens": number }),
    );
    json!({
        "Any": {},
        "Text": text,
        "Page": text,
        "EventStream": text,
        "Error": open(&[], &json!({ "message": text, "type": text, "code": number })),
        "ChatRequest": open(&["model", "messages"], &json!({
            "model": text,
            "messages": { "type": "array", "items": { "type": "object" } },
            "stream": flag, "max_tokens": number, "nvext": extension,
        })),
        "CompletionRequest": open(&["model", "prompt"], &json!({
            "model": text, "prompt": {}, "stream": flag, "max_tokens": number, "nvext": extension,
        })),
        "Completion": open(&[], &json!({
            "id": text, "choices": { "type": "array", "items": { "type": "object" } },
            "usage": usage, "nvext": { "type": "object" },
        })),
        "Model": open(&["id"], &json!({ "id": text, "object": text, "created": number, "owned_by": text,
            "context_window": number, "max_model_len": number })),
        "Models": open(&["data"], &json!({ "object": text, "data": list("Model") })),
    })
}

fn health() -> Value {
    let strings = json!({ "type": "array", "items": { "type": "string" } });
    json!({
        "Health": open(&["status"], &json!({
            "status": field("string", "`healthy`, or why not"),
            "endpoints": strings,
            "instances": { "type": "array", "items": { "type": "object" } },
            "waiting_for": { "type": "array", "items": { "type": "string" },
                "description": "Named workers that have never answered" },
            "discovery": list("DiscoveryHealth"),
        })),
        "DiscoveryHealth": open(&["source", "state"], &json!({
            "source": field("string", "Backend and address"),
            "state": field("string", "`ready`, `starting` or `lost`; the workers of a lost one go on serving"),
            "error": field("string", "Why it is lost"),
        })),
        "Live": open(&["status"], &json!({
            "status": field("string", "`live` while the process runs"),
            "message": field("string", "The same as a sentence"),
        })),
    })
}

fn thresholds() -> Value {
    json!({
        "BusyThreshold": open(&["model"], &json!({
            "model": field("string", "Whose workers"),
            "active_decode_blocks_threshold":
                maybe("number", "Share of a worker's KV blocks in use from which it is busy, 0 to 1"),
            "active_prefill_tokens_threshold":
                maybe("integer", "Prompt tokens under way from which a worker is busy"),
            "active_prefill_tokens_threshold_frac":
                maybe("number", "The same as a multiple of the tokens in its batch"),
        })),
        "BusyThresholds": open(&["thresholds"], &json!({ "thresholds": list("BusyThreshold") })),
    })
}

fn workers() -> Value {
    json!({
        "NewWorker": new_worker(),
        "Worker": open(&["worker_id", "url", "state"], &json!({
            "worker_id": field("integer", "Its id, derived from its URL"),
            "url": maybe("string", "Where it is; `null` for a worker in this process"),
            "state": { "enum": MemberState::ALL.map(MemberState::name), "description": "How far it is" },
            "address": maybe("string", "Where a token worker is on its request plane"),
            "role": { "enum": ["aggregated", "prefill", "decode"], "description": "Which part of requests it computes" },
            "origins": { "type": "array", "items": { "enum": ["flag", "file", "api", "discovery"] },
                "description": "Who wants it" },
            "sources": { "type": "array", "items": { "type": "string" },
                "description": "The same in full: which flag, file or discovery store" },
            "model": maybe("string", "What it serves; one row for each model"),
            "busy": field("boolean", "Over a busy threshold: it gets no new requests"),
            "down": field("boolean", "Ejected after a fault, until a probe passes"),
            "draining": field("boolean", "Ends what it has and gets nothing new"),
            "reuses_connections": maybe("boolean", "Whether its connections serve more than one request; not so for a while \
                after it sent bytes that belong to no request"),
            "block_size": field("integer", "Tokens in a block of the model's index"),
            "tokens_from": maybe("string", "Who says what the tokens of a prompt are"),
            "told": field("object", "What its user said about it"),
            "kv_total_blocks": maybe("integer", "Blocks of its KV cache"),
            "max_num_batched_tokens": maybe("integer", "Tokens in one of its batches"),
            "ranks": { "type": "array", "items": { "$ref": "#/components/schemas/Rank" },
                "description": "Its data-parallel ranks" },
        })),
        "Rank": open(&["dp_rank"], &json!({
            "dp_rank": field("integer", "Its number"),
            "active_requests": field("integer", "Requests that are booked there"),
            "active_prefill_tokens": field("integer", "Prompt tokens that are booked and not computed"),
            "active_decode_blocks": field("integer", "Blocks that running requests hold"),
            "cache": { "anyOf": [{ "$ref": "#/components/schemas/CacheState" }, { "type": "null" }],
                "description": "How well its cache is known; `null` where nobody has to judge" },
        })),
        "CacheState": open(&["state"], &json!({
            "state": field("string", "How far its events are believed"),
            "cause": maybe("string", "Why not in full"),
            "advice": maybe("string", "What to do about it"),
            "credit": field("number", "Share of a predicted hit that counts, 0 to 1"),
            "error": field("number", "How wrong predictions were of late, 0 to 1"),
            "error_by_cause": field("object", "The same by cause"),
            "answers": field("integer", "Answers that were compared"),
            "last_fault": maybe("string", "The last thing that went wrong with its events"),
            "events": maybe("object", "Its event socket: address, connection, sequence, faults"),
        })),
        "Replica": open(&["replica", "address"], &json!({
            "replica": field("integer", "Its id, which it draws when it starts"),
            "address": field("string", "Where its link comes from or leads to"),
            "connected_secs": field("integer", "For how long it has been linked"),
            "ranks_agreed": field("integer", "Ranks of which both know the same"),
            "ranks_differing": field("integer", "Ranks of which they know different things"),
        })),
        "Workers": open(&["workers", "absent"], &json!({
            "workers": list("Worker"), "absent": list("Worker"), "replicas": list("Replica"),
        })),
    })
}

fn new_worker() -> Value {
    let count = |meaning: &str| json!({ "type": "integer", "minimum": 1, "description": meaning });
    json!({
        "type": "object", "required": ["url"], "additionalProperties": false,
        "properties": {
            "url": field("string", "`http://` or `https://`, host and port"),
            "block_size": count("Tokens in a block"),
            "kv_blocks": count("Blocks of its KV cache"),
            "max_num_batched_tokens": count("Tokens in one of its batches"),
            "max_num_seqs": count("Requests that it runs at once"),
            "data_parallel_size": count("Its data-parallel ranks"),
            "device": { "type": "string", "enum": ["cpu", "gpu"], "description": "What it computes on" },
            "role": { "type": "string", "enum": ["aggregated", "prefill", "decode"],
                "description": "Which part of requests it computes" },
            "bootstrap_port": count("Port where decode servers meet it, of an SGLang server that computes prompts"),
            "topology": { "type": "array", "items": { "type": "string" },
                "description": "Places that it is in, such as `zone:a1`" },
            "kv_transfer_domain": field("string", "Kind of place that its prompts stay in, such as `zone`"),
            "kv_transfer_preferred_weight": { "type": "number",
                "description": "Its place is preferred by this much, 0 to 1, and not required" },
            "events": field("string", "Where it publishes KV events, `tcp://host:port`"),
            "replay": field("string", "Where it replays them"),
            "taints": { "type": "array", "items": { "type": "string" },
                "description": "Its taints, `key=value`" },
            "api_key": { "type": "string", "writeOnly": true,
                "description": "The key that it asks for; never shown again" },
        },
    })
}

fn decisions() -> Value {
    json!({
        "Decision": open(&["id", "mode"], &json!({
            "id": field("string", "The request"),
            "at_unix_ms": field("integer", "When it was made"),
            "model": field("string", "What was asked for"),
            "mode": field("string", "How the worker was chosen"),
            "isl_tokens": field("integer", "Tokens of the prompt"),
            "request_blocks": field("integer", "Its blocks"),
            "candidates": { "type": "array", "items": { "type": "object" },
                "description": "Every worker that was weighed, with each term of its cost" },
            "excluded": field("object", "Workers that were not weighed, and why"),
            "predicted": field("object", "Tokens that the winner should find cached: indexed, in_flight (added by requests under way), evicted (taken by them)"),
            "shadow": maybe("object", "What the shadow policy would have done: policy, rank, its name as text, url, disagrees, and regret_s, the seconds that the real choice costs beyond it by the time model"),
            "learned": maybe("object", "What has been learned of the winner's speed by now, as in /workers; only of one decision, and only where seconds are learned"),
            "winner": { "description": "Who won, and why: lowest cost, a tie, a pin, a session" },
            "deciding": maybe("string", "The part of the cost by which the winner was cheaper than the next: cache (it holds more of the prompt), prompt, decode, requests, wait, delay, evict"),
            "role": maybe("string", "`prefill` where the worker computes the prompt for another that answers"),
            "prefill": maybe("object", "The decision about the worker that computed the prompt, where that is another; only of one decision"),
            "queued": field("object", "How long it waited for a worker"),
            "error": maybe("string", "Why nobody was chosen"),
            "resumed": field("boolean", "It continued an answer that broke off"),
            "cache_unknown": field("boolean", "The index of another router was asked and did not answer; left out otherwise"),
            "failed_before": field("integer", "Workers that had failed the request by then"),
            "superseded": field("boolean", "A later decision of the same request replaced it"),
            "candidate_names": { "type": "array", "items": { "type": "string" },
                "description": "The candidates' workers and ranks as text: ids have 64 bits" },
            "winner_name": maybe("string", "The winner's worker and rank as text"),
            "outcome": { "anyOf": [{ "$ref": "#/components/schemas/Outcome" }, { "type": "null" }],
                "description": "What became of the request, once it has ended" },
        })),
        "Outcome": open(&["status"], &json!({
            "client_request_id": maybe("string", "The client's own name of it"),
            "status": field("integer", "Status of the answer; 499 where the client left"),
            "worker": maybe("integer", "Who served it last"),
            "rank": maybe("integer", "Which rank"),
            "prefill_worker": maybe("integer", "Who computed the prompt, where that is another"),
            "prefill_rank": maybe("integer", "Which rank of it"),
            "moves": field("integer", "Times that another worker continued the answer"),
            "prompt_tokens": maybe("integer", "Tokens of the prompt, as the engine counted them"),
            "predicted_cached_tokens": maybe("integer", "Those that the router expected in the cache of the worker that computed the prompt"),
            "reported_cached_tokens": maybe("integer", "Those that the engine found cached"),
            "output_tokens": maybe("integer", "Tokens of the answer"),
            "ttft_ms": maybe("number", "Time to first token"),
            "total_ms": field("number", "Time to the end"),
        })),
        "Shadow": open(&["model", "policy"], &json!({
            "model": field("string", "The router, by the name of its first model"),
            "policy": field("string", "The shadow policy"),
            "placements": field("integer", "Placements in which there was a choice"),
            "compared": field("integer", "Of those, the ones that it decided, too"),
            "disagreed": field("integer", "Of those, the ones that it would have placed elsewhere"),
            "disagreement": field("number", "The same as a share of the compared ones, 0 to 1"),
            "mean_regret_s": field("number", "Seconds of waiting of all requests that a compared placement costs beyond the shadow's, by the time model; below 0 where the real policy is better. No time to first token"),
            "better_s": field("number", "Sum over those that the shadow would have placed better"),
            "worse_s": field("number", "Sum over those that it would have placed worse"),
        })),
        "Upgrade": open(&["pid", "replaced_pid"], &json!({
            "pid": field("integer", "The process that serves now"),
            "replaced_pid": field("integer", "The one that ends when what it has is done"),
        })),
        "Shadows": open(&["shadows"], &json!({ "shadows": list("Shadow") })),
        "Decisions": open(&["decisions"], &json!({ "decisions": list("Decision") })),
    })
}

fn what_if() -> Value {
    let weight = |meaning: &str| maybe("number", meaning);
    let sum = open(
        &[],
        &json!({
            "cached_blocks": field("number", "Prompt blocks that the winners hold"),
            "queued_prompt_blocks": field("number", "Prompt blocks to be computed at the winners, these prompts' included"),
            "decode_blocks": field("number", "Blocks that running requests hold there"),
        }),
    );
    json!({
        "WhatIfRequest": { "type": "object", "additionalProperties": false, "properties": {
            "model": maybe("string", "Only decisions about this model"),
            "last": { "type": "integer", "minimum": 1, "maximum": 1000,
                "description": "The newest so many decisions of each router; 500 if it is left out" },
            "weights": { "$ref": "#/components/schemas/WeightChange" },
        } },
        "WeightChange": { "type": "object", "additionalProperties": false, "properties": {
            "overlap_score_credit": weight("In place of --router-kv-overlap-score-credit"),
            "overlap_score_credit_decay": weight("In place of --router-kv-overlap-score-credit-decay"),
            "prefill_load_scale": weight("In place of --router-prefill-load-scale"),
            "decode_active_request_weight": weight("In place of --router-decode-active-request-weight"),
        } },
        "WhatIf": open(&["considered", "moved"], &json!({
            "considered": field("integer", "Decisions that were scored again"),
            "skipped": field("integer", "Decisions that no cost made: pinned, by session, in another mode, refused"),
            "partial": field("integer", "Of those considered: had more candidates than are kept, so that a better one may be missing"),
            "moved": field("integer", "Of those considered: would have gone elsewhere"),
            "prompt_blocks": field("number", "Blocks of all their prompts"),
            "before": { "$ref": "#/components/schemas/WhatIfSum" },
            "after": { "$ref": "#/components/schemas/WhatIfSum" },
            "ranks": { "type": "array", "items": { "type": "object" },
                "description": "Each rank with the decisions that it got and would have got" },
            "moves": { "type": "array", "items": { "type": "object" },
                "description": "The newest that moved, at most 50" },
        })),
        "WhatIfSum": sum,
    })
}

fn sessions() -> Value {
    json!({
        "Session": open(&["id", "worker"], &json!({
            "id": field("string", "What its client calls it"),
            "router": field("string", "The router that knows it"),
            "worker": field("string", "Where its requests go: worker and rank"),
            "in_engine": field("boolean", "The engine holds a session, too"),
            "requests": field("integer", "Requests that hold it"),
            "idle_ms_left": maybe("integer", "Until it ends unless it is used"),
        })),
        "Sessions": open(&["total", "sessions"], &json!({
            "total": field("integer", "How many are bound"),
            "sessions": list("Session"),
        })),
    })
}
