//! The adapter for `kvasir-index`.
use crate::index::{Ev, Index, Step};
use kvasir_index::Matches;
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerId, WorkerRank};
use std::sync::Arc;

pub enum Event {
    Kv(WorkerRank, KvEvent),
    RemoveWorker(WorkerId),
}

pub struct Kvasir(Arc<kvasir_index::Index>);

impl Index for Kvasir {
    const NAME: &'static str = "kvasir";
    type Event = Event;
    type Query = Vec<LocalHash>;
    type Scores = Matches;
    type Reader = Arc<kvasir_index::Index>;

    fn new(_: u32) -> Self {
        Kvasir(Arc::default())
    }
    fn event(ev: Ev<'_>) -> Event {
        let tier = Tier::Device;
        match ev {
            Ev::Store { worker, parent, blocks, .. } => {
                let blocks = blocks
                    .iter()
                    .map(|b| StoredBlock { engine: EngineHash(b.seq), local: LocalHash(b.local) })
                    .collect();
                let parent = parent.map(EngineHash);
                Event::Kv(
                    WorkerRank::new(worker.into(), 0),
                    KvEvent::Stored { tier, parent, blocks },
                )
            }
            Ev::Remove { worker, seqs } => {
                let blocks = seqs.iter().map(|s| EngineHash(*s)).collect();
                Event::Kv(WorkerRank::new(worker.into(), 0), KvEvent::Removed { tier, blocks })
            }
            Ev::RemoveWorker { worker } => Event::RemoveWorker(WorkerId(worker.into())),
        }
    }
    fn query(local: &[u64], _: &[u64]) -> Vec<LocalHash> {
        local.iter().map(|l| LocalHash(*l)).collect()
    }
    fn reader(&self) -> Self::Reader {
        self.0.clone()
    }
    fn find_matches(r: &Self::Reader, q: Vec<LocalHash>, out: &mut Matches) {
        r.find(&q, out)
    }
    fn each(s: &Matches, f: &mut dyn FnMut(u32, u32)) {
        s.iter().for_each(|m| f(m.rank.worker.0 as u32, m.device))
    }
    fn drive(&mut self, steps: Vec<Step<Event>>, at: &mut dyn FnMut(u32)) {
        for s in steps {
            match s {
                // A refused event is an answer; the replay goes on as a router would.
                Step::Apply(Event::Kv(rank, event)) => drop(self.0.apply(rank, &event)),
                Step::Apply(Event::RemoveWorker(worker)) => self.0.remove_worker(worker),
                Step::Mark(i) => at(i),
            }
        }
    }
}
