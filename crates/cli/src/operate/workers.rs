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
        Err(error) if error.is_not_found() => Err(format!(
            "{} has no /workers: its admin routes are switched off (--disable-frontend-admin-api) or listen \
             elsewhere (--url)",
            client.url()
        )
        .into()),
        answer => Ok(answer?),
    }
}

async fn add(client: &Client, run: &Run, url: &str) -> Result<(), Failure> {
    let body = json!({ "url": url });
    let answer = client.send(&Method::POST, "/workers", Some(&body)).await;
    let answer = answer.map_err(changeable)?;
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
    if id.parse::<u64>().is_err() {
        return Err(BadConfig(format!(
            "`{}` is no worker id; kvasir workers lists them",
            text::plain(id)
        ))
        .into());
    }
    let force = if run.settings.get(keys::FORCE) {
        "?force=true"
    } else {
        ""
    };
    let path = format!("/workers/{id}{force}");
    let answer = client.send(&Method::DELETE, &path, None).await;
    let answer = answer.map_err(changeable)?;
    if run.settings.get(keys::JSON) {
        print(&format!("{answer:#}\n"));
        return Ok(());
    }
    let how = match run.settings.get(keys::FORCE) {
        true => "is removed; what ran there was cut",
        false => "gets nothing new and leaves when what runs there has ended",
    };
    print(&format!("worker {id} {how}\n"));
    Ok(())
}

/// A frontend whose workers cannot be changed says so by not knowing the method.
fn changeable(error: AskError) -> Failure {
    match &error {
        AskError::Status { status, .. } if status.as_u16() == 405 => {
            "this frontend's workers cannot be changed while it runs".into()
        }
        _ => error.into(),
    }
}

/// One rank of one worker.
struct Row<'v> {
    worker: &'v Value,
    rank: &'v Value,
}

/// The table of workers, a line for each rank.
pub(super) fn table(answer: &Value) -> Table {
    let workers = answer.get("workers").and_then(Value::as_array);
    let rows: Vec<Row<'_>> = workers.into_iter().flatten().flat_map(rows).collect();
    let mut table = Table::default();
    let mut add = |title, align, rank, of: &dyn Fn(&Row<'_>) -> String| {
        table.column(title, align, rank, rows.iter().map(of));
    };
    let both = |row: &Row<'_>, field: &str| row.rank.get(field).or(row.worker.get(field)).cloned();
    add("WORKER", Align::Left, 0, &|row| {
        cell(row.worker.get("worker_id"))
    });
    add("RANK", Align::Right, 5, &|row| {
        cell(row.rank.get("dp_rank"))
    });
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
    for (title, field, place) in [
        ("ENGINE", "engine", 9),
        ("EVENTS", "events", 6),
        ("TRUST", "trust", 4),
    ] {
        if rows.iter().any(|row| both(row, field).is_some()) {
            add(title, Align::Left, place, &|row| {
                brief(both(row, field).as_ref())
            });
        }
    }
    add("MODEL", Align::Left, 8, &|row| {
        cell(row.worker.get("model"))
    });
    add("URL", Align::Left, 7, &|row| cell(row.worker.get("url")));
    table
}

/// Worker and rank of each line of the table.
pub(super) fn ranks(answer: &Value) -> Vec<(u64, u64)> {
    let workers = answer.get("workers").and_then(Value::as_array);
    let rows = workers.into_iter().flatten().flat_map(rows);
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

/// One word: what the frontend says, or what follows from its marks.
fn state(worker: &Value) -> String {
    let is = |mark: &str| worker.get(mark).and_then(Value::as_bool) == Some(true);
    match worker.get("state").and_then(Value::as_str) {
        Some(state) => text::plain(state),
        None if is("draining") => "draining".to_owned(),
        None if is("down") => "down".to_owned(),
        None if is("busy") => "busy".to_owned(),
        None => "ready".to_owned(),
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

/// A value in one cell: of an object, its state.
fn brief(value: Option<&Value>) -> String {
    match value {
        Some(Value::Object(fields)) => {
            let word = ["state", "level", "status", "value"];
            cell(word.iter().find_map(|name| fields.get(*name)))
        }
        Some(Value::Number(number)) => number
            .as_f64()
            .map_or(UNKNOWN.to_owned(), |n| format!("{n:.2}")),
        other => cell(other),
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    #[test]
    fn a_line_for_each_rank() {
        let answer = json!({"workers": [
            {"worker_id": 7, "model": "tiny", "url": "http://a:8000", "kv_total_blocks": 4096, "busy": false,
             "down": false, "ranks": [
                {"dp_rank": 0, "active_requests": 3, "active_decode_blocks": 1024, "active_prefill_tokens": 12345},
                {"dp_rank": 1, "active_requests": 0, "active_decode_blocks": 0, "active_prefill_tokens": 0}]},
            {"worker_id": 18446744073709551615_u64, "model": "tiny", "url": null, "kv_total_blocks": null,
             "busy": true, "down": true, "trust": 0.5, "ranks": []},
        ]});
        expect![[r#"
            WORKER                RANK  STATE  REQUESTS  DECODE BLOCKS  PREFILL TOKENS  TRUST  MODEL  URL
            7                        0  ready         3    1,024 (25%)          12,345  -      tiny   http://a:8000
            7                        1  ready         0         0 (0%)               0  -      tiny   http://a:8000
            18446744073709551615     -  down          -              -               -  0.50   tiny   -"#]].assert_eq(&table(&answer).lines(120).join("\n"));
        let narrow = table(&answer).lines(40);
        assert!(
            narrow.iter().all(|line| line.chars().count() <= 40),
            "{narrow:?}"
        );
        assert!(narrow[1].starts_with("7 ") && narrow[1].contains("ready"));
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
