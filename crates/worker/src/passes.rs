//! What the ranks of a worker compute: a report for each step, and once a second from a rank that has nothing to do.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvasir_tasks::Tasks;
use kvasir_types::WorkerRank;
use kvasir_wire::native::{ForwardPass, QueuedWork, ScheduledWork};

use crate::channels::Channel;

/// An idle rank gives a sign of life so often.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// The reports of each rank.
pub(crate) struct PassBoard {
    channel: Channel,
    ranks: Mutex<Vec<RankPasses>>,
}

struct RankPasses {
    rank: WorkerRank,
    /// Reports so far.
    counter: u64,
    /// Something was told since the last beat.
    has_told: bool,
}

impl PassBoard {
    /// The board of these ranks, whose heart beats as long as `tasks` run.
    pub(crate) fn start(
        channel: Channel,
        ranks: impl Iterator<Item = WorkerRank>,
        tasks: &Tasks,
    ) -> Arc<Self> {
        let ranks = ranks.map(|rank| RankPasses {
            rank,
            counter: 0,
            has_told: false,
        });
        let board = Arc::new(Self {
            channel,
            ranks: Mutex::new(ranks.collect()),
        });
        let weak = Arc::downgrade(&board);
        tasks.background().spawn(async move {
            while let Some(board) = weak.upgrade() {
                board.beat();
                drop(board);
                tokio::time::sleep(HEARTBEAT).await;
            }
        });
        board
    }

    pub(crate) const fn channel(&self) -> &Channel {
        &self.channel
    }

    /// A rank made a step.
    pub(crate) fn step(
        &self,
        rank: u32,
        wall_time: Duration,
        scheduled: ScheduledWork,
        queued: QueuedWork,
    ) {
        let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(passes) = ranks.get_mut(rank as usize) {
            self.tell(passes, wall_time, scheduled, queued);
            passes.has_told = true;
        }
    }

    fn beat(&self) {
        let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        for passes in ranks.iter_mut() {
            if !std::mem::take(&mut passes.has_told) {
                let (scheduled, queued) = (ScheduledWork::default(), QueuedWork::default());
                self.tell(passes, Duration::ZERO, scheduled, queued);
            }
        }
    }

    fn tell(
        &self,
        passes: &mut RankPasses,
        wall_time: Duration,
        scheduled: ScheduledWork,
        queued: QueuedWork,
    ) {
        passes.counter += 1;
        // A step takes a few milliseconds: nothing is encoded for nobody.
        if self.channel.is_unheard() {
            return;
        }
        let pass = ForwardPass {
            rank: passes.rank,
            counter: passes.counter,
            wall_time: wall_time.as_secs_f64(),
            scheduled,
            queued,
        };
        self.channel.publish_value(&pass.to_value());
    }
}
