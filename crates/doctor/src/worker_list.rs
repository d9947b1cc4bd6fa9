//! Workers as a running frontend lists them.

use kvasir_types::{EventFeed, Role, WorkerRecord};
use kvasir_upstream::{parse_url, worker_at};
use serde_json::Value;

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedWorker {
    /// Where it is, with what the frontend was told about it.
    pub worker: WorkerRecord,
    /// Tokens in a block of the frontend's index of its model.
    pub block_size: Option<u32>,
}

/// The engine servers in an answer of `GET /workers`, each once, whether they serve or do not answer; `None` if it
/// is no such answer.
#[must_use]
pub fn read_workers(answer: &Value) -> Option<Vec<ListedWorker>> {
    let serving = answer.get("workers")?.as_array()?;
    let absent = answer.get("absent").and_then(Value::as_array);
    let leaves = |row: &Value| row.get("draining").and_then(Value::as_bool) == Some(true);
    let absent = absent.into_iter().flatten().filter(|row| !leaves(row));
    let rows = serving.iter().chain(absent);
    let mut found: Vec<ListedWorker> = Vec::new();
    for listed in rows.filter_map(read_row) {
        let id = listed.worker.id;
        if !found.iter().any(|known| known.worker.id == id) {
            found.push(listed);
        }
    }
    Some(found)
}

fn read_row(row: &Value) -> Option<ListedWorker> {
    let mut worker = worker_at(parse_url(row.get("url")?.as_str()?).ok()?);
    let told = row.get("told");
    let text = |name| told?.get(name)?.as_str().map(str::to_owned);
    let count_in = |of: Option<&Value>, name| u32::try_from(of?.get(name)?.as_u64()?).ok();
    worker.events = EventFeed::Sockets {
        publish: text("events"),
        replay: text("replay"),
    };
    worker.block_size = count_in(told, "block_size");
    worker.ranks = count_in(told, "data_parallel_size");
    let role = row.get("role").and_then(Value::as_str);
    worker.role = role.and_then(Role::from_name).unwrap_or_default();
    Some(ListedWorker {
        worker,
        block_size: count_in(Some(row), "block_size"),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_frontends_own_words_are_kept_and_each_worker_comes_once() {
        let told = json!({"block_size": 32, "events": "tcp://a:1", "replay": null});
        let row = json!({"url": "http://a:8000", "block_size": 16, "told": told});
        let other = json!({"url": "http://a:8000", "model": "an adapter"});
        let no_server = json!({"url": null});
        let silent = json!({"url": "http://b:8000", "draining": false});
        let leaving = json!({"url": "http://c:8000", "draining": true});
        let answer = json!({"workers": [row, other, no_server], "absent": [silent, leaving]});
        let expected = ListedWorker {
            worker: kvasir_upstream::parse_worker("http://a:8000,block-size=32,events=tcp://a:1")
                .unwrap(),
            block_size: Some(16),
        };
        let silent = ListedWorker {
            worker: kvasir_upstream::parse_worker("http://b:8000").unwrap(),
            block_size: None,
        };
        assert_eq!(read_workers(&answer), Some(vec![expected, silent]));
        assert_eq!(read_workers(&json!({"workers": []})), Some(Vec::new()));
        assert_eq!(read_workers(&json!({"data": []})), None);
        assert_eq!(read_workers(&json!({"workers": 1})), None);
    }
}
