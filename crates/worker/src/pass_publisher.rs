//! What a program tells of the steps of its engine, beside its cache.

use std::sync::Arc;
use std::time::Duration;

use kvasir_discovery::RecordKey;
use kvasir_types::WorkerRank;
use kvasir_wire::native::{QueuedWork, ScheduledWork, Topic};

use crate::channels::Channel;
use crate::passes::PassBoard;
use crate::{EndpointMember, JoinError, records};

impl EndpointMember {
    /// Opens the channel of what ranks compute, for reports that come as bytes.
    pub async fn open_passes(&self) -> Result<PassChannel, JoinError> {
        let (channel, key) = self.announce_passes().await?;
        Ok(PassChannel {
            channel,
            key,
            member: self.clone(),
        })
    }

    /// The same for reports that are made here. Ranks count from 0; one that says nothing gives a sign of life each second.
    pub async fn publish_passes(
        &self,
        ranks: impl Iterator<Item = WorkerRank>,
    ) -> Result<PassPublisher, JoinError> {
        let (channel, key) = self.announce_passes().await?;
        Ok(PassPublisher {
            board: PassBoard::start(channel, ranks, &self.tasks),
            key,
            member: self.clone(),
        })
    }

    async fn announce_passes(&self) -> Result<(Channel, RecordKey), JoinError> {
        let channel = self.channel(Topic::ForwardPass).await?;
        let (topic, id, transport) = (channel.topic(), channel.id(), channel.transport());
        let record = records::channel(&self.endpoint, topic, id, transport);
        let key = record.key();
        self.put(record).await?;
        Ok((channel, key))
    }
}

/// Publishes reports that were made elsewhere. Never waits.
pub struct PassChannel {
    channel: Channel,
    key: RecordKey,
    member: EndpointMember,
}

impl PassChannel {
    /// Tells everybody who listens.
    pub fn publish(&self, payload: Vec<u8>) {
        self.channel.publish(payload);
    }

    /// Takes back what was announced of it.
    pub async fn withdraw(&self) -> Result<(), JoinError> {
        self.member.remove(self.key.clone()).await
    }
}

/// Publishes what ranks compute. Never waits.
pub struct PassPublisher {
    board: Arc<PassBoard>,
    key: RecordKey,
    member: EndpointMember,
}

impl PassPublisher {
    /// A rank made a step.
    pub fn step(
        &self,
        rank: u32,
        wall_time: Duration,
        scheduled: ScheduledWork,
        queued: QueuedWork,
    ) {
        self.board.step(rank, wall_time, scheduled, queued);
    }

    /// Takes back what was announced of it.
    pub async fn withdraw(&self) -> Result<(), JoinError> {
        self.member.remove(self.key.clone()).await
    }
}
