//! Requests that ask where they would go (`query_instance_id:`): the answer, without anything being run.

use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use kvasir_openai::{
    AnswerHead, Endpoint, ResponseNvext, StreamWriter, WorkerIds, write_done, write_unary,
};
use kvasir_telemetry::Clock;
use kvasir_types::{RequestId, Token, WorkerRank};

use crate::http::reply::{self, ByteSource, Cut, Reply};
use crate::models::ServedModel;

/// A request that is not to be run.
#[derive(Debug)]
pub(crate) struct Query {
    pub(crate) id: RequestId,
    pub(crate) endpoint: Endpoint,
    pub(crate) stream: bool,
    /// The prompt's tokens, where they are known.
    pub(crate) tokens: Option<Vec<Token>>,
}

impl Query {
    /// Says that it would go to `target`.
    pub(crate) fn answer(self, clock: Clock, model: &ServedModel, target: WorkerRank) -> Reply {
        let nvext = ResponseNvext {
            worker_id: Some(WorkerIds::aggregated(target.worker.0, target.rank.0)),
            token_ids: self.tokens,
            ..ResponseNvext::default()
        };
        let head = AnswerHead {
            endpoint: self.endpoint,
            id: self.id,
            model: &model.name,
            created: clock.unix_secs(clock.now()),
        };
        let mut out = BytesMut::new();
        if self.stream {
            StreamWriter::new(&head, 1).query(&mut out, &nvext);
            write_done(&mut out);
            return reply::events(Box::new(Once(Some(out.freeze()))));
        }
        write_unary(&mut out, &head, &[], None, &nvext);
        reply::json(StatusCode::OK, out.freeze())
    }
}

/// A stream whose whole content is known.
struct Once(Option<Bytes>);

impl ByteSource for Once {
    fn poll_bytes(&mut self, _: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        Poll::Ready(self.0.take().map(Ok))
    }
}
