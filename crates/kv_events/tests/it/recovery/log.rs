//! Events of a log: what it repeats, and what it no longer holds.

use super::*;

const RANK: WorkerRank = WorkerRank {
    worker: kvasir_types::WorkerId(1),
    rank: kvasir_types::DpRank(0),
};

struct Log {
    sequencer: Sequencer,
    index: Index,
}

impl Log {
    fn step(&mut self, event: SourceEvent) -> Vec<Output> {
        let mut out = Vec::new();
        self.sequencer
            .step(Time::ZERO, event, &self.index, &mut out);
        out
    }

    /// Blocks of one sequence, each stored by the event of its number.
    fn events(&mut self, ids: std::ops::RangeInclusive<u64>) -> Vec<Output> {
        let stored = ids.map(|id| RouterEvent {
            rank: RANK,
            id,
            residency: None,
            position: None,
            event: KvEvent::Stored {
                tier: Tier::Device,
                parent: (id > 1).then(|| EngineHash(id - 1)),
                blocks: vec![StoredBlock {
                    engine: EngineHash(id),
                    local: LocalHash(id),
                }],
            },
        });
        self.step(SourceEvent::Events(stored.collect()))
    }

    fn answer(&mut self, asked: &[Output], reply: RecoveryReply) -> Vec<Output> {
        let [Output::Query { attempt, .. }] = asked[asked.len() - 1..] else {
            panic!("nothing was asked: {asked:?}");
        };
        self.step(SourceEvent::Answered { attempt, reply })
    }

    fn depth(&self) -> u32 {
        let locals: Vec<LocalHash> = (1..=100).map(LocalHash).collect();
        let mut matches = Matches::new();
        self.index.find(&locals, &mut matches);
        matches.get(RANK).map_or(0, |m| m.device)
    }
}

#[test]
fn what_a_log_repeats_is_applied_once_and_what_it_lost_is_forgotten() {
    let format = EventFormat::RouterEvents(Encoding::Json);
    let mut log = Log {
        sequencer: Sequencer::new(format, StreamOptions::log(16)),
        index: Index::new(),
    };
    log.sequencer.add_rank(RANK);
    let asked = log.step(SourceEvent::Connected);
    let (events, last) = (Vec::new(), 0);
    log.answer(&asked, RecoveryReply::TreeDump { events, last });
    assert_eq!((log.events(1..=20), log.depth()), (vec![], 20));
    // A message that was written twice, however long it is.
    assert_eq!((log.events(9..=20), log.depth()), (vec![], 20));
    let again = log.events(1..=20);
    assert_eq!(again, [Output::Notice(Notice::Restarted)]);
    assert_eq!(log.depth(), 20);
    assert!(log.sequencer.status().exact);
    // Events are missing, and the log does not have them either.
    let asked = log.events(25..=25);
    let (last, message) = (24, String::new());
    let told = log.answer(&asked, RecoveryReply::TreeDumpFailed { last, message });
    assert_eq!(told, [Output::Notice(Notice::LogTooShort { rank: RANK })]);
    assert_eq!((log.depth(), log.sequencer.status().exact), (0, false));
    // What follows counts, and an engine that began again is known at once.
    log.events(25..=26);
    log.events(1..=2);
    assert_eq!((log.depth(), log.sequencer.status().exact), (2, true));
}
