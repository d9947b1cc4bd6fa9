//! `kvasir workers`: who serves what and how loaded each is; adding one and removing one.

use http::Method;
use kvasir_config::{Run, keys};
use serde_json::{Value, json};

use super::client::{AskError, Client};
use super::table::{Align, Table};
use super::text::{self, UNKNOWN, cell, count, whole};
use super::{print, show};
use crate::wiring::{BadConfig, Failure};

/// Lists the workers, or changes them.
pub(super) async fn run(client: &Client, run: &Run) -> Result<(), Failure> {
    let operands: Vec<&str> = run.operands.iter().map(String::as_str).collect();
    match operands[..] {
        [] => {
            let answer = list(client).await?;
            show(run, &answer, |answer| {
                table(answer).lines(usize::MAX).join("\n") + "\n"
            });
            Ok(())
        }
        ["add", url] => add(client, run, url).await,
        ["remove", id] => remove(client, run, id).await,
        ["add" | "remove"] => Err(BadConfig(
            "say which: kvasir workers add URL, or kvasir workers remove ID".to_owned(),
        )
        .into()),
        [other, ..] => Err(BadConfig(format!(
            "kvasir workers knows add URL and remove ID, not `{}`",
            text::plain(other)
        ))
        .into()),
    }
}

/// The workers as the frontend lists them.
pub(super) async fn list(client: &Client) -> Result<Value, Failure> {
    match client.get("/workers").await {
        Err(error) if error.is_not_found() => Err(client.without("/workers").into()),
        answer => Ok(answer?),
    }
}

async fn add(client: &Client, run: &Run, url: &str) -> Result<(), Failure> {
    let body = json!({ "url": url });
    let answer = client.send(&Method::POST, "/workers", Some(&body)).await;
    let answer = answer.map_err(refused)?;
    if run.settings.get(keys::JSON) {
        print(&format!("{answer:#}\n"));
        return Ok(());
    }
    let id = cell(answer.get("worker_id"));
    print(&format!(
        "worker {id} at {url} is watched; it joins when it answers (kvasir workers)\n"
    ));
    Ok(())
}

async fn remove(client: &Client, run: &Run, id: &str) -> Result<(), Failure> {
    let force = if run.settings.get(keys::FORCE) {
        "?force=true"
    } else {
        ""
    };
    let path = format!("/workers/{}{force}", text::escaped(id));
    let answer = client.send(&Method::DELETE, &path, None).await;
    let answer = answer.map_err(refused)?;
    if run.settings.get(keys::JSON) {
        print(&format!("{answer:#}\n"));
        return Ok(());
    }
    let id = cell(answer.get("worker_id"));
    let how = match run.settings.get(keys::FORCE) {
        true => "is removed; what ran there was cut",
        false => "gets nothing new and leaves when what runs there has ended",
    };
    print(&format!("worker {id} {how}\n"));
    Ok(())
}

/// The frontend's own words, without the request that they are about.
fn refused(error: AskError) -> Failure {
    match error {
        AskError::Status { message, .. } => message.into(),
        other => other.into(),
    }
}

/// The role of workers that compute whole requests.
const AGGREGATED: &str = "aggregated";

/// Which part of requests a worker computes.
fn role(worker: &Value) -> String {
    let role = worker.get("role").and_then(Value::as_str);
    text::plain(role.unwrap_or(AGGREGATED))
}

/// One rank of one worker.
struct Row<'v> {
    worker: &'v Value,
    rank: &'v Value,
}

impl Row<'_> {
    fn cache(&self) -> Option<&Value> {
        self.rank.get("cache").filter(|cache| !cache.is_null())
    }
}

/// The table of workers, a line for each rank.
pub(super) fn table(answer: &Value) -> Table {
    let rows: Vec<Row<'_>> = all(answer).flat_map(rows).collect();
    let mut table = Table::default();
    let mut add = |title, align, rank, of: &dyn Fn(&Row<'_>) -> String| {
        table.column(title, align, rank, rows.iter().map(of));
    };
    add("WORKER", Align::Left, 0, &|row| {
        cell(row.worker.get("worker_id"))
    });
    add("RANK", Align::Right, 5, &|row| {
        cell(row.rank.get("dp_rank"))
    });
    let is_split = |row: &Row<'_>| role(row.worker) != AGGREGATED;
    if rows.iter().any(is_split) {
        add("ROLE", Align::Left, 1, &|row| role(row.worker));
    }
    add("STATE", Align::Left, 0, &|row| state(row.worker));
    add("REQUESTS", Align::Right, 1, &|row| {
        cell(row.rank.get("active_requests"))
    });
    add("DECODE BLOCKS", Align::Right, 2, &|row| {
        blocks(row, "active_decode_blocks")
    });
    add("PREFILL TOKENS", Align::Right, 3, &|row| {
        let tokens = whole(row.rank, "active_prefill_tokens");
        tokens.map_or_else(|| UNKNOWN.to_owned(), count)
    });
    if rows.iter().any(|row| row.cache().is_some()) {
        add("CACHE VIEW", Align::Left, 4, &|row| cache_view(row.cache()));
        add("EVENTS", Align::Left, 6, &|row| events(row.cache()));
    }
    add("MODEL", Align::Left, 8, &|row| {
        cell(row.worker.get("model"))
    });
    add("URL", Align::Left, 7, &|row| {
        let field = |name: &str| row.worker.get(name).filter(|value| !value.is_null());
        cell(field("url").or_else(|| field("address")))
    });
    if rows.iter().any(|row| row.worker.get("sources").is_some()) {
        add("FROM", Align::Left, 9, &|row| sources(row.worker));
    }
    table
}

/// Workers that serve, then those that are wanted and serve nothing.
fn all(answer: &Value) -> impl Iterator<Item = &Value> {
    let list = |name: &str| answer.get(name).and_then(Value::as_array);
    let lists = [list("workers"), list("absent")];
    lists.into_iter().flatten().flatten()
}

/// Worker and rank of each line of the table.
pub(super) fn ranks(answer: &Value) -> Vec<(u64, u64)> {
    let rows = all(answer).flat_map(rows);
    let id = |value: &Value, field| whole(value, field).unwrap_or(u64::MAX);
    rows.map(|row| (id(row.worker, "worker_id"), id(row.rank, "dp_rank")))
        .collect()
}

fn rows(worker: &Value) -> Vec<Row<'_>> {
    let ranks = worker.get("ranks").and_then(Value::as_array);
    match ranks.map_or(&[][..], Vec::as_slice) {
        [] => vec![Row {
            worker,
            rank: &Value::Null,
        }],
        ranks => ranks.iter().map(|rank| Row { worker, rank }).collect(),
    }
}

/// Who brought it: a flag, a file, an operator, a discovery store.
pub(super) fn sources(worker: &Value) -> String {
    let sources = worker.get("sources").and_then(Value::as_array);
    let names = sources.into_iter().flatten().filter_map(Value::as_str);
    let names: Vec<String> = names.map(text::plain).collect();
    match names.is_empty() {
        true => UNKNOWN.to_owned(),
        false => names.join(", "),
    }
}

/// One word: what is the matter with it, else what it does.
fn state(worker: &Value) -> String {
    let is = |mark: &str| worker.get(mark).and_then(Value::as_bool) == Some(true);
    let stated = worker.get("state").and_then(Value::as_str);
    match stated.unwrap_or("serving") {
        "serving" if is("draining") => "draining".to_owned(),
        "serving" if is("down") => "down".to_owned(),
        "serving" if is("busy") => "busy".to_owned(),
        stated => text::plain(stated),
    }
}

/// How far the router believes what it knows of a rank's cache, and why not more.
fn cache_view(cache: Option<&Value>) -> String {
    let field = |name: &str| {
        cache
            .and_then(|cache| cache.get(name))
            .and_then(Value::as_str)
    };
    match (field("state"), field("cause")) {
        (Some(state), Some(cause)) => {
            let cause = cause.replace('_', " ");
            format!("{} ({})", text::plain(state), text::plain(&cause))
        }
        (state, _) => state.map_or_else(|| UNKNOWN.to_owned(), text::plain),
    }
}

/// How a rank's events come in.
fn events(cache: Option<&Value>) -> String {
    let Some(cache) = cache else {
        return UNKNOWN.to_owned();
    };
    let Some(events) = cache.get("events").filter(|e| !e.is_null()) else {
        return "none".to_owned();
    };
    let is = |name: &str| events.get(name).and_then(Value::as_bool) == Some(true);
    let says = |name: &str| events.get(name).and_then(Value::as_str).is_some();
    match () {
        () if says("error") => "broken".to_owned(),
        () if !is("connected") => "connecting".to_owned(),
        () if says("recovering") => "recovering".to_owned(),
        () if is("complete") => "complete".to_owned(),
        () => "listening".to_owned(),
    }
}

/// Blocks in use, and their share where the whole is known.
fn blocks(row: &Row<'_>, field: &str) -> String {
    let Some(used) = whole(row.rank, field) else {
        return UNKNOWN.to_owned();
    };
    match whole(row.worker, "kv_total_blocks") {
        Some(total) => format!(
            "{} ({})",
            count(used),
            text::share(used as f64, total as f64)
        ),
        None => count(used),
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    #[test]
    fn a_line_for_each_rank() {
        let exact = json!({"state": "exact", "cause": null, "events": {"connected": true, "complete": true}});
        let poor = json!({"state": "approximate", "cause": "no_events", "events": null});
        let answer = json!({
            "workers": [{"worker_id": 7, "model": "tiny", "url": "http://a:8000", "kv_total_blocks": 4096, "ranks": [
                {"dp_rank": 0, "active_requests": 3, "active_decode_blocks": 1024, "active_prefill_tokens": 12345, "cache": exact},
                {"dp_rank": 1, "active_requests": 0, "active_decode_blocks": 0, "active_prefill_tokens": 0, "cache": poor}],
             "state": "serving", "busy": false, "down": false},
             {"worker_id": 8, "model": "tiny", "state": "serving", "busy": true, "down": true}],
            "absent": [{"worker_id": 18446744073709551615_u64, "model": null, "url": "http://c:8000",
                        "state": "unreachable", "down": true, "ranks": []}],
        });
        expect![[r#"
            WORKER                RANK  STATE        REQUESTS  DECODE BLOCKS  PREFILL TOKENS  CACHE VIEW               EVENTS    MODEL  URL
            7                        0  serving             3    1,024 (25%)          12,345  exact                    complete  tiny   http://a:8000
            7                        1  serving             0         0 (0%)               0  approximate (no events)  none      tiny   http://a:8000
            8                        -  down                -              -               -  -                        -         tiny   -
            18446744073709551615     -  unreachable         -              -               -  -                        -         -      http://c:8000"#]].assert_eq(&table(&answer).lines(160).join("\n"));
        let narrow = table(&answer).lines(40);
        assert!(
            narrow.iter().all(|line| line.chars().count() <= 40),
            "{narrow:?}"
        );
        assert!(narrow[1].starts_with("7 ") && narrow[1].contains("serving"));
    }

    #[test]
    fn roles_are_shown_where_there_are_some() {
        let worker =
            |id: u32, role: &str| json!({"worker_id": id, "role": role, "state": "serving"});
        let answer = json!({"workers": [worker(7, "prefill"), worker(8, "decode")]});
        let lines = table(&answer).lines(160);
        assert!(lines[0].contains("ROLE"), "{lines:?}");
        assert!(lines[1].contains("prefill") && lines[2].contains("decode"));
        let whole = json!({"workers": [worker(7, "aggregated")]});
        assert!(!table(&whole).lines(160)[0].contains("ROLE"));
    }

    #[test]
    fn strange_bodies_make_an_empty_table() {
        for body in [
            json!(null),
            json!({"workers": 3}),
            json!({"workers": [1, null, {}]}),
        ] {
            let _ = table(&body).lines(80);
        }
    }
}
