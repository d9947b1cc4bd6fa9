//! `kvasir why`: where a request went, what every candidate would have cost, and what came of it.

use std::fmt::Write as _;
use std::time::Duration;

use kvasir_config::{Run, keys};
use kvasir_telemetry::Clock;
use serde_json::Value;

use super::client::Client;
use super::show;
use super::table::{Align, Table};
use super::text::{self, UNKNOWN, amount, cell, count, number, span, whole};
use crate::wiring::Failure;

/// One decision, or the latest ones.
pub(super) async fn run(client: &Client, run: &Run) -> Result<(), Failure> {
    let clock = Clock::new();
    let now_ms = clock.unix_millis(clock.now());
    let Some(id) = run.operands.first() else {
        let mut answer = client.get("/decisions").await?;
        let limit = run.settings.get(keys::LIMIT) as usize;
        if let Some(rows) = answer.get_mut("decisions").and_then(Value::as_array_mut) {
            rows.truncate(limit);
        }
        show(run, &answer, |answer| latest(answer, now_ms));
        return Ok(());
    };
    match client
        .get(&format!("/decisions/{}", text::escaped(id)))
        .await
    {
        Ok(decision) => show(run, &decision, |decision| one(decision, now_ms)),
        Err(error) if error.is_not_found() => return Err(unknown(client, id).await.into()),
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// What to say about a request that is not known: whether there are others.
async fn unknown(client: &Client, id: &str) -> String {
    let latest = client.get("/decisions").await.unwrap_or_default();
    let known = latest.get("decisions").and_then(Value::as_array);
    match known.map(Vec::len) {
        None => client.without("/decisions"),
        Some(0) => format!("{id}: nothing is remembered; no request has been routed yet"),
        Some(_) => format!(
            "{id}: no decision about this request is remembered. Ids are those of answers (chatcmpl-…) or of \
             the header x-request-id; `kvasir why` lists the latest, --router-decision-log says how many the \
             frontend keeps"
        ),
    }
}

/// The latest decisions, one a line, newest first.
fn latest(answer: &Value, now_ms: u64) -> String {
    let rows = answer.get("decisions").and_then(Value::as_array);
    let rows = rows.map_or(&[][..], Vec::as_slice);
    if rows.is_empty() {
        return "no request has been routed yet\n".to_owned();
    }
    let mut table = Table::default();
    let mut add = |title, align, of: &dyn Fn(&Value) -> String| {
        table.column(title, align, 0, rows.iter().map(of));
    };
    let outcome = |row: &Value, field: &str| cell(row.get("outcome").and_then(|o| o.get(field)));
    let ms = |row: &Value, field: &str| {
        let ms = row.get("outcome").and_then(|o| number(o, field));
        ms.map_or_else(|| UNKNOWN.to_owned(), span)
    };
    add("REQUEST", Align::Left, &|row| cell(row.get("id")));
    add("WHEN", Align::Right, &|row| age(row, now_ms));
    add("MODEL", Align::Left, &|row| cell(row.get("model")));
    add("WORKER", Align::Left, &winner_name);
    add("BECAUSE", Align::Left, &|row| {
        let reason = reason(row.get("winner").and_then(|w| w.get(1)), row);
        again(row).map_or(reason.clone(), |again| format!("{again}; {reason}"))
    });
    add("PROMPT", Align::Right, &|row| cell(row.get("isl_tokens")));
    add("PREDICTED", Align::Right, &|row| {
        outcome(row, "predicted_cached_tokens")
    });
    add("CACHED", Align::Right, &|row| {
        outcome(row, "reported_cached_tokens")
    });
    add("STATUS", Align::Right, &|row| match row.get("outcome") {
        _ if row.get("superseded").and_then(Value::as_bool) == Some(true) => "lost".to_owned(),
        None | Some(Value::Null) => "running".to_owned(),
        Some(ended) => cell(ended.get("status")),
    });
    add("TTFT", Align::Right, &|row| ms(row, "ttft_ms"));
    add("TOTAL", Align::Right, &|row| ms(row, "total_ms"));
    table.lines(usize::MAX).join("\n") + "\n"
}

/// One decision in full.
fn one(decision: &Value, now_ms: u64) -> String {
    let mut out = String::new();
    let mut line = |title: &str, text: String| {
        let _ = writeln!(out, "{title:<10} {text}");
    };
    line("request", cell(decision.get("id")));
    line("model", cell(decision.get("model")));
    let when = whole(decision, "at_unix_ms").map_or_else(|| UNKNOWN.to_owned(), text::moment);
    line("when", format!("{when} UTC, {}", age(decision, now_ms)));
    line("prompt", prompt(decision));
    line("mode", mode(decision));
    if let Some(again) = again(decision) {
        line("again", again);
    }
    if let Some(prefill) = decision.get("prefill") {
        line("prefill", went_to(prefill));
    }
    if decision.get("cache_unknown").and_then(Value::as_bool) == Some(true) {
        let text = "not known: the index of another router did not answer";
        line("cache", text.to_owned());
    }
    line("went to", went_to(decision));
    let excluded = excluded(decision);
    if let Some(excluded) = excluded {
        line("left out", excluded);
    }
    if let Some(learned) = learned(decision) {
        line("learned", learned);
    }
    if let Some(shadow) = shadow(decision) {
        line("shadow", shadow);
    }
    for (title, text) in outcome(decision) {
        line(title, text);
    }
    if let Some(prefill) = decision.get("prefill") {
        out.push_str("\nprefill workers:\n");
        out.push_str(&candidates(prefill));
        out.push_str("\ndecode workers:\n");
    }
    out.push_str(&candidates(decision));
    out
}

fn age(decision: &Value, now_ms: u64) -> String {
    let at = whole(decision, "at_unix_ms");
    at.map_or_else(
        || UNKNOWN.to_owned(),
        |at| text::ago(Duration::from_millis(now_ms.saturating_sub(at))),
    )
}

/// Whether other workers were asked before, and how far they came.
fn again(decision: &Value) -> Option<String> {
    let failed = whole(decision, "failed_before").filter(|failed| *failed > 0)?;
    let workers = if failed == 1 { "worker" } else { "workers" };
    let resumed = decision.get("resumed").and_then(Value::as_bool) == Some(true);
    Some(match resumed {
        true => format!("goes on with an answer that broke off, after {failed} {workers}"),
        false => format!("{failed} {workers} had failed it before"),
    })
}

fn prompt(decision: &Value) -> String {
    let tokens = whole(decision, "isl_tokens").unwrap_or(0);
    let blocks = whole(decision, "request_blocks").unwrap_or(0);
    let size = cell(decision.get("block_size"));
    format!(
        "{} tokens, {} blocks of {size}",
        count(tokens),
        count(blocks)
    )
}

fn mode(decision: &Value) -> String {
    let mut out = cell(decision.get("mode"));
    if let Some(temperature) = number(decision, "temperature").filter(|t| *t > 0.0) {
        let _ = write!(out, ", temperature {temperature}");
    }
    let queued = decision.get("queued");
    let secs = queued.and_then(|q| number(q, "secs")).unwrap_or(0.0);
    let nanos = queued.and_then(|q| number(q, "nanos")).unwrap_or(0.0);
    let waited_ms = secs * 1e3 + nanos / 1e6;
    if waited_ms > 0.0 {
        let _ = write!(out, "; it waited {} in the queue", span(waited_ms));
    }
    out
}

/// `worker/rank` of the winner.
fn winner_name(decision: &Value) -> String {
    let winner = decision.get("winner").and_then(|winner| winner.get(0));
    winner.map_or_else(|| UNKNOWN.to_owned(), rank_name)
}

fn rank_name(rank: &Value) -> String {
    format!("{}/{}", cell(rank.get("worker")), cell(rank.get("rank")))
}

fn went_to(decision: &Value) -> String {
    let Some(winner) = decision.get("winner").filter(|winner| !winner.is_null()) else {
        return format!("nobody: {}", cell(decision.get("error")));
    };
    let place = position(decision, winner.get(0));
    let url = place.and_then(|at| decision.get("candidate_urls")?.get(at));
    let url = url.filter(|url| !url.is_null());
    let url = url.or_else(|| decision.get("winner_address"));
    let at = url
        .and_then(Value::as_str)
        .map(|url| format!(" at {}", text::plain(url)));
    let sources = decision.get("winner_sources").and_then(Value::as_array);
    let sources = sources.into_iter().flatten().filter_map(Value::as_str);
    let sources: Vec<String> = sources.map(text::plain).collect();
    let from = match sources.is_empty() {
        true => String::new(),
        false => format!(" (from {})", sources.join(", ")),
    };
    format!(
        "worker {}{}{from}: {}",
        winner_name(decision),
        at.unwrap_or_default(),
        reason(winner.get(1), decision)
    )
}

/// Where a rank stands among the candidates.
fn position(decision: &Value, rank: Option<&Value>) -> Option<usize> {
    let candidates = decision.get("candidates")?.as_array()?;
    candidates.iter().position(|c| c.get("rank") == rank)
}

/// Why the winner won, in words.
fn reason(reason: Option<&Value>, decision: &Value) -> String {
    let eligible = whole(decision, "eligible").unwrap_or(0);
    let field = |name: &str, inner: &str| reason?.get(name)?.get(inner).cloned();
    if let Some(among) = field("tie", "among") {
        return format!("lowest cost, drawn among {among} equals");
    }
    if let Some(share) = field("sampled", "probability").and_then(|p| p.as_f64()) {
        return format!("drawn with probability {share:.2}");
    }
    match reason.and_then(Value::as_str) {
        Some("lowest_cost") => format!("lowest cost of {eligible}"),
        Some("pinned") => "the request named it".to_owned(),
        Some("session") => "its session lives there".to_owned(),
        Some("rule") => {
            let mode = decision.get("router_mode").and_then(Value::as_str);
            format!("{} among {eligible}", mode.unwrap_or("the mode's rule"))
        }
        _ => cell(reason),
    }
}

fn excluded(decision: &Value) -> Option<String> {
    let excluded = decision.get("excluded")?;
    let all = whole(excluded, "count").filter(|count| *count > 0)?;
    let named = excluded.get("named").and_then(Value::as_array);
    let named: Vec<String> = named
        .into_iter()
        .flatten()
        .map(|pair| {
            let rank = pair.get(0).map(rank_name).unwrap_or_default();
            format!("{rank} ({})", cell(pair.get(1)).replace('_', " "))
        })
        .collect();
    let more = all.saturating_sub(named.len() as u64);
    let tail = (more > 0).then(|| format!(" and {more} more"));
    Some(format!("{}{}", named.join(", "), tail.unwrap_or_default()))
}

/// What has been learned of the winner by now, in figures that one can check.
fn learned(decision: &Value) -> Option<String> {
    let learned = decision.get("learned").filter(|said| said.is_object())?;
    let prompt = number(learned, "prompt_8k_s")?;
    let step = number(learned, "step_64x2k_s")?;
    let samples = |of| count(whole(learned, of).unwrap_or(0));
    Some(format!(
        "8k prompt {}, step {} at 64 × 2k; from {} runs of prompts and {} of steps there",
        span(prompt * 1e3),
        span(step * 1e3),
        samples("prompt_samples"),
        samples("step_samples"),
    ))
}

/// What another policy would have done. Its regret is the time model's and no time to first token.
fn shadow(decision: &Value) -> Option<String> {
    let shadow = decision.get("shadow").filter(|shadow| shadow.is_object())?;
    let policy = cell(shadow.get("policy"));
    if shadow.get("disagrees").and_then(Value::as_bool) != Some(true) {
        return Some(format!("{policy} agrees"));
    }
    let to = shadow.get("rank").map(rank_name).unwrap_or_default();
    let regret = number(shadow, "regret_s").unwrap_or(0.0);
    let judged = match regret {
        r if r > 0.0 => format!("{r:.3} s cheaper"),
        r if r < 0.0 => format!("{:.3} s dearer", -r),
        _ => "as dear".to_owned(),
    };
    Some(format!(
        "{policy} would have chosen {to}, {judged} by the time model"
    ))
}

/// What was predicted, what the engine said, how it ended.
fn outcome(decision: &Value) -> Vec<(&'static str, String)> {
    let Some(ended) = decision.get("outcome").filter(|outcome| !outcome.is_null()) else {
        return vec![("answer", "not ended yet".to_owned())];
    };
    let mut out = Vec::new();
    if let Some(given) = ended.get("client_request_id").and_then(Value::as_str) {
        out.push(("called", format!("{} by its client", text::plain(given))));
    }
    let tokens = |field: &str| whole(ended, field);
    let predicted = tokens("predicted_cached_tokens");
    let prompt = whole(decision, "isl_tokens").unwrap_or(0);
    if let Some(predicted) = predicted {
        let share = text::share(predicted as f64, prompt as f64);
        out.push((
            "predicted",
            format!(
                "{} tokens cached, {share}{}",
                count(predicted),
                sources(decision)
            ),
        ));
    }
    if tokens("output_tokens").is_some() {
        out.push(("reported", reported(ended, predicted)));
    }
    let mut answer = format!("status {}", cell(ended.get("status")));
    if let Some(tokens) = tokens("output_tokens") {
        let _ = write!(answer, ", {} tokens", count(tokens));
    }
    if let Some(first) = number(ended, "ttft_ms") {
        let _ = write!(answer, ", the first after {}", span(first));
    }
    let total = number(ended, "total_ms").unwrap_or(0.0);
    let _ = write!(answer, ", all after {}", span(total));
    out.push(("answer", answer));
    out
}

/// What a prediction is made of, where requests under way have a part in it.
fn sources(decision: &Value) -> String {
    let predicted = decision.get("predicted").unwrap_or(&Value::Null);
    let tokens = |field: &str| whole(predicted, field).unwrap_or(0);
    let (added, taken) = (tokens("in_flight"), tokens("evicted"));
    if added == 0 && taken == 0 {
        return String::new();
    }
    let mut out = format!(": {} by the index", count(tokens("indexed")));
    if added > 0 {
        let _ = write!(out, ", {} by requests under way", count(added));
    }
    if taken > 0 {
        let _ = write!(out, ", {} fewer for want of room", count(taken));
    }
    out
}

fn reported(ended: &Value, predicted: Option<u64>) -> String {
    let Some(cached) = whole(ended, "reported_cached_tokens") else {
        if whole(ended, "moves").is_some_and(|moves| moves > 0) {
            return "nothing: the worker that computed the prompt did not end the answer"
                .to_owned();
        }
        return "the engine did not say (vLLM does with --enable-prompt-tokens-details)".to_owned();
    };
    let prompt = whole(ended, "prompt_tokens").unwrap_or(0);
    let share = text::share(cached as f64, prompt as f64);
    let against = match predicted.map(|predicted| cached.cmp(&predicted)) {
        None => String::new(),
        Some(std::cmp::Ordering::Equal) => "; as predicted".to_owned(),
        Some(std::cmp::Ordering::Less) => {
            format!(
                "; {} fewer than predicted",
                count(predicted.unwrap_or(0) - cached)
            )
        }
        Some(std::cmp::Ordering::Greater) => {
            format!(
                "; {} more than predicted",
                count(cached - predicted.unwrap_or(0))
            )
        }
    };
    format!(
        "{} of {} tokens cached, {share}{against}",
        count(cached),
        count(prompt)
    )
}

/// Every candidate that is kept, with the terms of its cost.
fn candidates(decision: &Value) -> String {
    let list = decision.get("candidates").and_then(Value::as_array);
    let list = list.map_or(&[][..], Vec::as_slice);
    if list.is_empty() {
        return String::new();
    }
    let in_seconds = list
        .iter()
        .any(|c| c.get("seconds").is_some_and(Value::is_object));
    if in_seconds {
        return candidates_in_seconds(decision, list);
    }
    let winner = decision.get("winner").and_then(|winner| winner.get(0));
    let scale = number(decision, "prefill_load_scale").unwrap_or(1.0);
    let term = |candidate: &Value, name: &str| {
        let value = candidate.get("terms").and_then(|terms| number(terms, name));
        value.map_or_else(|| UNKNOWN.to_owned(), amount)
    };
    let mut table = Table::default();
    let mut add = |title, align, of: &dyn Fn(&Value) -> String| {
        table.column(title, align, 0, list.iter().map(of));
    };
    let mark = |c: &Value| if c.get("rank") == winner { ">" } else { "" }.to_owned();
    add("", Align::Left, &mark);
    add("WORKER", Align::Left, &|c| {
        c.get("rank").map(rank_name).unwrap_or_default()
    });
    add("COST", Align::Right, &|c| term(c, "cost"));
    add("PROMPT", Align::Right, &|c| term(c, "raw_prefill_blocks"));
    add("CREDIT", Align::Right, &|c| term(c, "credit_blocks"));
    if is_pooled(list) {
        add("SHARED", Align::Right, &|c| term(c, "shared_blocks"));
    }
    add("DECODE", Align::Right, &|c| term(c, "decode_blocks"));
    add("REQUESTS", Align::Right, &|c| term(c, "request_cost"));
    add("TAINTS", Align::Right, &|c| term(c, "taint_factor"));
    add("CACHED", Align::Right, &|c| term(c, "cached_blocks"));
    let urls = decision.get("candidate_urls").and_then(Value::as_array);
    let url = |at: usize| cell(urls.and_then(|urls| urls.get(at)));
    table.column("URL", Align::Left, 0, (0..list.len()).map(url));
    let eligible = whole(decision, "eligible").unwrap_or(0);
    let kept = (eligible > list.len() as u64)
        .then(|| format!("The {} cheapest of {eligible} are kept. ", list.len()));
    let pooled = match is_pooled(list) {
        true => "SHARED is the part of CREDIT that a cache holds which all workers share.\n",
        false => "",
    };
    format!(
        "\n{}\n\n{}In blocks; the lowest cost wins: cost = ({} x max(0, prompt - credit) + decode + requests) x \
         taints.\nPROMPT is what waits there plus this prompt, CREDIT what is taken off for what is cached, DECODE \
         what runs there with this request.\n{pooled}",
        table.lines(usize::MAX).join("\n"),
        kept.unwrap_or_default(),
        amount(scale),
    )
}

/// Whether a cache that all workers share held some of the prompt.
fn is_pooled(list: &[Value]) -> bool {
    let shared = |c: &Value| number(c.get("terms")?, "shared_blocks");
    list.iter().filter_map(shared).any(|blocks| blocks > 0.0)
}

/// The same where placements cost seconds.
fn candidates_in_seconds(decision: &Value, list: &[Value]) -> String {
    let winner = decision.get("winner").and_then(|winner| winner.get(0));
    let of = |candidate: &Value, group: &str, name: &str| {
        candidate.get(group).and_then(|terms| number(terms, name))
    };
    let seconds = |candidate: &Value, group: &str, name: &str| {
        let value = of(candidate, group, name);
        value.map_or_else(|| UNKNOWN.to_owned(), |value| format!("{value:.3}"))
    };
    let mut table = Table::default();
    let mut add = |title, align, of: &dyn Fn(&Value) -> String| {
        table.column(title, align, 0, list.iter().map(of));
    };
    let mark = |c: &Value| if c.get("rank") == winner { ">" } else { "" }.to_owned();
    add("", Align::Left, &mark);
    add("WORKER", Align::Left, &|c| {
        c.get("rank").map(rank_name).unwrap_or_default()
    });
    add("COST", Align::Right, &|c| seconds(c, "terms", "cost"));
    add("WAIT", Align::Right, &|c| seconds(c, "seconds", "wait"));
    add("PROMPT", Align::Right, &|c| seconds(c, "seconds", "own"));
    add("DELAY", Align::Right, &|c| seconds(c, "seconds", "delay"));
    add("DECODE", Align::Right, &|c| seconds(c, "seconds", "decode"));
    add("EVICT", Align::Right, &|c| seconds(c, "seconds", "evict"));
    add("NEW", Align::Right, &|c| {
        of(c, "seconds", "new_tokens").map_or_else(|| UNKNOWN.to_owned(), amount)
    });
    if is_pooled(list) {
        add("SHARED", Align::Right, &|c| {
            of(c, "terms", "shared_blocks").map_or_else(|| UNKNOWN.to_owned(), amount)
        });
    }
    let urls = decision.get("candidate_urls").and_then(Value::as_array);
    let url = |at: usize| cell(urls.and_then(|urls| urls.get(at)));
    table.column("URL", Align::Left, 0, (0..list.len()).map(url));
    let eligible = whole(decision, "eligible").unwrap_or(0);
    let kept = (eligible > list.len() as u64)
        .then(|| format!("The {} cheapest of {eligible} are kept. ", list.len()));
    format!(
        "\n{}\n\n{}In seconds; the lowest cost wins: cost = (wait + prompt + delay + decode + evict) x taints.\nWAIT is \
         until the prompt's turn, PROMPT what it then takes, DELAY what it costs others, DECODE what its answer costs, EVICT \
         what leaves the cache for it, NEW the tokens not cached.\n{}",
        table.lines(usize::MAX).join("\n"),
        kept.unwrap_or_default(),
        match is_pooled(list) {
            true => "SHARED is what a cache counts that all workers share, in blocks.\n",
            false => "",
        },
    )
}

#[cfg(test)]
mod tests;
