//! How loaded the ranks of a worker are: told when it changes, once a millisecond at most.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvasir_tasks::Tasks;
use kvasir_types::WorkerRank;
use kvasir_wire::native::ActiveLoad;
use tokio::sync::Notify;

use crate::channels::Channel;

/// What changes within this time is told as one.
const COALESCE: Duration = Duration::from_millis(1);

/// The load of each rank, as it was told and as it is.
pub(crate) struct LoadBoard {
    channel: Channel,
    ranks: Mutex<Vec<RankLoad>>,
    changed: Arc<Notify>,
}

struct RankLoad {
    rank: WorkerRank,
    used: u64,
    told: Option<u64>,
}

impl LoadBoard {
    /// The board of these ranks, which is read as long as `tasks` run.
    pub(crate) fn start(
        channel: Channel,
        ranks: impl Iterator<Item = WorkerRank>,
        tasks: &Tasks,
    ) -> Arc<Self> {
        let ranks = ranks.map(|rank| RankLoad {
            rank,
            used: 0,
            told: None,
        });
        let board = Arc::new(Self {
            channel,
            ranks: Mutex::new(ranks.collect()),
            changed: Arc::default(),
        });
        let (weak, told) = (Arc::downgrade(&board), Arc::clone(&board.changed));
        tasks.background().spawn(async move {
            loop {
                told.notified().await;
                tokio::time::sleep(COALESCE).await;
                match weak.upgrade() {
                    Some(board) => board.tell(),
                    None => return,
                }
            }
        });
        board
    }

    pub(crate) const fn channel(&self) -> &Channel {
        &self.channel
    }

    /// A rank uses so many blocks now.
    pub(crate) fn set(&self, rank: u32, used: u64) {
        let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(load) = ranks.get_mut(rank as usize) else {
            return;
        };
        load.used = used;
        if load.told != Some(used) {
            self.changed.notify_one();
        }
    }

    fn tell(&self) {
        let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        for load in ranks.iter_mut().filter(|load| load.told != Some(load.used)) {
            load.told = Some(load.used);
            let report = ActiveLoad {
                rank: load.rank,
                active_decode_blocks: None,
                active_prefill_tokens: None,
                used_blocks: Some(load.used),
            };
            self.channel.publish_value(&report.to_value());
        }
    }
}

impl Drop for LoadBoard {
    fn drop(&mut self) {
        self.changed.notify_one();
    }
}
