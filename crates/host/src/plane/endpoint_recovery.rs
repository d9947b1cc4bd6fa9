//! Questions about caches, over the request planes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvasir_protocol::Payload;
use kvasir_transport::{CallContext, EndpointClient, PlaneError, SourceFault};
use kvasir_types::{Codec, PlaneEndpoint, RequestId};
use kvasir_wire::native::{Encoding, RecoveryReply, RecoveryRequest};

use super::{RecoveryClient, RecoveryFuture};

/// Asks workers over the request planes of this process.
pub struct EndpointRecovery {
    clients: BTreeMap<&'static str, Arc<dyn EndpointClient>>,
    /// What calls are named by: the first half of their ids, and how many there were.
    name: u64,
    calls: AtomicU64,
}

impl fmt::Debug for EndpointRecovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let planes: Vec<&&str> = self.clients.keys().collect();
        f.debug_struct("EndpointRecovery")
            .field("planes", &planes)
            .finish_non_exhaustive()
    }
}

impl EndpointRecovery {
    /// Over these planes, by name; `seed` tells the calls of one process from those of another.
    #[must_use]
    pub fn new(clients: BTreeMap<&'static str, Arc<dyn EndpointClient>>, seed: u64) -> Self {
        Self {
            clients,
            name: seed,
            calls: AtomicU64::new(0),
        }
    }

    fn next_id(&self) -> RequestId {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        RequestId(u128::from(self.name) << 64 | u128::from(call))
    }

    async fn call(
        &self,
        endpoint: &PlaneEndpoint,
        request: RecoveryRequest,
    ) -> Result<RecoveryReply, SourceFault> {
        let Some(client) = self.clients.get(&*endpoint.plane) else {
            let why = format!("request plane `{}` is not served here", endpoint.plane);
            return Err(SourceFault::Unreachable(why));
        };
        let mut question = Vec::new();
        request.encode(encoding(endpoint.codec), &mut question);
        let payload = Payload::new(endpoint.codec, question.into());
        let context = CallContext::new(request.rank.worker, self.next_id());
        let mut answer = client
            .call(endpoint, payload, context)
            .await
            .map_err(fault)?;
        // The first item is all of it; dropping the stream tells the worker so.
        let item = match answer.next().await {
            Some(item) => item.map_err(fault)?,
            None => return Err(SourceFault::Closed("it answered nothing".to_owned())),
        };
        RecoveryReply::decode(encoding(item.codec), &item.bytes)
            .map_err(|error| SourceFault::Protocol(error.to_string()))
    }
}

impl RecoveryClient for EndpointRecovery {
    fn ask<'a>(
        &'a self,
        endpoint: &'a PlaneEndpoint,
        request: RecoveryRequest,
    ) -> RecoveryFuture<'a> {
        Box::pin(self.call(endpoint, request))
    }
}

const fn encoding(codec: Codec) -> Encoding {
    match codec {
        Codec::Json => Encoding::Json,
        Codec::MessagePack => Encoding::MessagePack,
    }
}

fn fault(error: PlaneError) -> SourceFault {
    match error {
        PlaneError::Local(why) => SourceFault::Local(why),
        PlaneError::Timeout { .. } => SourceFault::Silent,
        error @ PlaneError::Disconnected(_) => SourceFault::Closed(error.to_string()),
        error => SourceFault::Unreachable(error.to_string()),
    }
}
