//! Answers to routers that keep no index of their own.

use std::fmt;
use std::sync::Arc;

use kvasir_index::Matches;
use kvasir_protocol::Payload;
use kvasir_transport::{EndpointHandler, HandlerFuture, IncomingCall, ReplySink};
use kvasir_types::LocalHash;
use kvasir_wire::native::{Encoding, IndexQuery, IndexReply, RoutingRecord, TierScore};

use super::encoding;
use crate::context::HostContext;
use crate::router_host::RouterHost;

/// The endpoint that says how much of a prompt each rank holds, on the component of the workers.
pub const QUERY_ENDPOINT: &str = "kv_indexer_query";
/// The endpoint that learns where prompts went, where the index is made of routing decisions.
pub const RECORD_ENDPOINT: &str = "kv_indexer_record_routing_decision";

/// Finds the router of a model.
type FindRouter = Arc<dyn Fn(&str) -> Option<Arc<RouterHost>> + Send + Sync>;

/// What this process answers about its index. Clones are one.
#[derive(Clone)]
pub struct IndexEndpoints {
    find: FindRouter,
    /// The index is made of routing decisions, and takes those of others.
    records: bool,
    context: HostContext,
}

impl fmt::Debug for IndexEndpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IndexEndpoints")
            .field("records", &self.records)
            .finish_non_exhaustive()
    }
}

impl IndexEndpoints {
    /// Answers from the router that `find` gives for a model. `records`: it also learns from decisions of others.
    #[must_use]
    pub fn new(
        context: &HostContext,
        records: bool,
        find: impl Fn(&str) -> Option<Arc<RouterHost>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            find: Arc::new(find),
            records,
            context: context.clone(),
        }
    }

    /// The endpoints by their names.
    #[must_use]
    pub fn endpoints(&self) -> Vec<(&'static str, Arc<dyn EndpointHandler>)> {
        let (query, record) = (self.clone(), self.clone());
        let query = move |call| -> HandlerFuture { Box::pin(query.clone().query(call)) };
        let record = move |call| -> HandlerFuture { Box::pin(record.clone().record(call)) };
        let mut all: Vec<(&'static str, Arc<dyn EndpointHandler>)> =
            vec![(QUERY_ENDPOINT, Arc::new(query))];
        if self.records {
            all.push((RECORD_ENDPOINT, Arc::new(record)));
        }
        all
    }

    fn router(&self, model: &str) -> Result<Arc<RouterHost>, String> {
        (self.find)(model).ok_or_else(|| format!("served indexer model {model} is not registered"))
    }

    fn count(&self, is_answered: bool) {
        let served = &self.context.metrics.index_queries_served_total;
        let result = if is_answered { "answered" } else { "refused" };
        served.with_label_values(&[result]).inc();
    }

    async fn query(self, call: IncomingCall) {
        let asked = IndexQuery::decode(encoding(call.payload.codec), &call.payload.bytes);
        let found = match asked {
            Err(error) => Err(error.to_string()),
            Ok(asked) => self.router(&asked.model).map(|host| {
                let mut scores = scores(&host, &asked.blocks);
                if asked.device_only {
                    scores.retain_mut(|score| {
                        (score.host, score.disk) = (0, 0);
                        score.device > 0
                    });
                }
                scores
            }),
        };
        self.count(found.is_ok());
        let reply = match found {
            Ok(scores) => IndexReply::Scores(scores),
            Err(why) => IndexReply::Error(why),
        };
        answer(call.reply, |encoding, out| reply.encode(encoding, out)).await;
    }

    async fn record(self, call: IncomingCall) {
        let told = RoutingRecord::decode(encoding(call.payload.codec), &call.payload.bytes);
        let told = told.map_err(|error| error.to_string());
        let taken = told.and_then(|told| {
            let host = self.router(&told.model)?;
            let now = self.context.clock.now();
            let index = host.index();
            index.record_routing(now, told.rank, &told.blocks, &told.sequence);
            Ok(())
        });
        self.count(taken.is_ok());
        answer(call.reply, |encoding, out| match taken {
            Ok(()) => {
                let text = kvasir_msgpack::Value::Text(RoutingRecord::RECORDED.to_owned());
                match encoding {
                    Encoding::MessagePack => text.to_msgpack(out),
                    Encoding::Json => out.extend(text.to_json().to_string().as_bytes()),
                }
            }
            Err(why) => IndexReply::Error(why).encode(encoding, out),
        })
        .await;
    }
}

/// What each rank holds of a prompt, as far as it is believed.
fn scores(host: &RouterHost, blocks: &[LocalHash]) -> Vec<TierScore> {
    let mut found = Matches::new();
    host.index().find(blocks, &mut found);
    let trust = host.views().trust();
    let believed = found.sources().filter_map(|of| {
        // Others cannot judge it: of a rank that is not trusted only what we sent there counts.
        let is_exact = trust
            .get(of.events.rank)
            .is_none_or(|level| level.credit() >= 1.0);
        let score = match is_exact {
            true => of.merged(),
            false => kvasir_index::Match {
                rank: of.events.rank,
                device: of.routed,
                ..kvasir_index::Match::default()
            },
        };
        (score.disk_cumulative() > 0).then_some(score)
    });
    let score = |found: kvasir_index::Match| TierScore {
        rank: found.rank,
        device: found.device,
        host: found.host,
        disk: found.disk,
    };
    believed.map(score).collect()
}

/// Answers with one item.
async fn answer(mut reply: ReplySink, write: impl FnOnce(Encoding, &mut Vec<u8>)) {
    if !reply.start().await {
        return;
    }
    let mut bytes = Vec::new();
    write(encoding(reply.codec()), &mut bytes);
    let item = Payload::new(reply.codec(), bytes.into());
    if reply.send(&item).await {
        reply.finish().await;
    }
}
