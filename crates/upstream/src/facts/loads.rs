//! What SGLang's `/v1/loads` says: how busy each rank is, also where it has no metrics.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{ROWS_MAX, RankLoad};

#[derive(Deserialize)]
struct Page {
    loads: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    #[serde(default)]
    dp_rank: Option<u32>,
    #[serde(default)]
    num_running_reqs: u64,
    #[serde(default)]
    num_waiting_reqs: u64,
    #[serde(default)]
    token_usage: Option<f64>,
}

/// Reads the page; what cannot be read says nothing.
#[must_use]
pub fn read_loads(body: &[u8]) -> BTreeMap<u32, RankLoad> {
    let page: Option<Page> = serde_json::from_slice(body).ok();
    let rows = page.into_iter().flat_map(|page| page.loads).take(ROWS_MAX);
    rows.map(|row| {
        let load = RankLoad {
            running: row.num_running_reqs,
            waiting: row.num_waiting_reqs,
            kv_usage: row.token_usage.map(|usage| usage.clamp(0.0, 1.0)),
        };
        (row.dp_rank.unwrap_or(0), load)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_says_how_busy_it_is() {
        let page = br#"{"timestamp":"2026-03-01T00:00:00","version":"0.5.9","dp_rank_count":2,"loads":[
            {"dp_rank":0,"num_running_reqs":3,"num_waiting_reqs":1,"num_used_tokens":512,"token_usage":0.25,"gen_throughput":7.5},
            {"dp_rank":1,"num_running_reqs":0,"num_waiting_reqs":0,"token_usage":0.0}],"aggregate":{}}"#;
        let loads = read_loads(page);
        let said = [0, 1].map(|rank| {
            let load = loads[&rank];
            (load.running, load.waiting, load.kv_usage)
        });
        assert_eq!(said, [(3, 1, Some(0.25)), (0, 0, Some(0.0))]);
        for rubbish in [&b""[..], b"[]", b"{}", b"{\"loads\":[1]}", b"\xff"] {
            assert!(read_loads(rubbish).is_empty());
        }
    }
}
