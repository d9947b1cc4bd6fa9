//! The estimator against made-up engines that follow a known law.

use std::time::Duration;

use kvasir_types::{RequestId, Rng, Time};

use super::{Estimator, StepLaw};
use crate::{Booking, Ledger};

const TRUE: StepLaw = StepLaw {
    chunk: 0.009,
    token: 3e-5,
    pair: 2e-9,
    step: 0.012,
    stream: 8e-5,
    attend: 3e-8,
};

/// One rank whose steps take what a law says, as a router would see it.
struct Rig {
    ledger: Ledger,
    estimator: Estimator,
    now: Vec<f64>,
    ids: u128,
    rng: Rng,
    running: Vec<Vec<(RequestId, u32)>>,
    ranks: u32,
}

impl Rig {
    fn new(prior: StepLaw, ranks: u32) -> Self {
        let mut ledger = Ledger::new(16);
        ledger.grow(ranks);
        ledger.keep_journal();
        Self {
            ledger,
            estimator: Estimator::new(&prior),
            now: vec![1.0; ranks as usize],
            ids: 0,
            rng: Rng::new(7),
            running: vec![Vec::new(); ranks as usize],
            ranks,
        }
    }

    fn time(&self, slot: u32) -> Time {
        Time::from_secs_f64(self.now[slot as usize])
    }

    fn pass(&mut self, slot: u32, seconds: f64) {
        self.now[slot as usize] += seconds;
    }

    fn between(&mut self, low: u64, high: u64) -> u32 {
        (low + self.rng.below(high - low)) as u32
    }

    fn book(&mut self, slot: u32) -> (RequestId, u32, u32) {
        self.ids += 1;
        let id = RequestId(self.ids);
        let (new, cached) = (self.between(20, 6000), 16 * self.between(0, 200));
        let booking = Booking {
            sequence: std::sync::Arc::from([]),
            shares: false,
            isl_tokens: new + cached,
            prefill_tokens: new,
            prefill_duration: Some(Duration::from_millis(100)),
            decays: true,
            osl: None,
            silent: false,
            unnamed_blocks: 0,
        };
        self.ledger.book(self.time(slot), id, slot, &booking);
        (id, new, cached)
    }

    /// A prompt comes and is computed in one step with whatever decodes there.
    fn prompt(&mut self, slot: u32, law: &StepLaw) -> RequestId {
        let state = self.ledger.timed_load(slot);
        let (decoding, context) = (f64::from(state.decoding), state.context as f64);
        let (id, new, cached) = self.book(slot);
        if state.decoding > 0 {
            let rest = self.rng.unit() * law.decode(decoding, context);
            self.pass(slot, rest);
        }
        let work = law.work(f64::from(new), f64::from(cached));
        self.pass(slot, law.chunk + work + law.ride(decoding, context));
        self.ledger.first_token(self.time(slot), id);
        self.running[slot as usize].push((id, 1));
        self.learn();
        id
    }

    /// So many plain steps.
    fn decode(&mut self, slot: u32, law: &StepLaw, steps: u32) {
        for _ in 0..steps {
            let state = self.ledger.timed_load(slot);
            self.pass(
                slot,
                law.decode(f64::from(state.decoding), state.context as f64),
            );
            let mut running = std::mem::take(&mut self.running[slot as usize]);
            for (id, generated) in &mut running {
                *generated += 1;
                if generated.is_multiple_of(8) {
                    self.ledger.output(self.time(slot), *id, *generated, false);
                }
            }
            self.running[slot as usize] = running;
            self.learn();
        }
    }

    fn end(&mut self, slot: u32, many: usize) {
        let now = self.time(slot);
        for (id, _) in self.running[slot as usize].drain(..many) {
            self.ledger.free(now, id);
        }
        self.learn();
    }

    fn learn(&mut self) {
        let estimator = &mut self.estimator;
        self.ledger.read_journal(|note| estimator.observe(&note));
    }

    /// Prompts, each followed by some steps, with a batch that grows and shrinks.
    fn serve(&mut self, prompts: u32, law: impl Fn(u32) -> StepLaw) {
        for i in 0..prompts {
            let slot = i % self.ranks;
            self.prompt(slot, &law(slot));
            self.decode(slot, &law(slot), 40);
            let running = self.running[slot as usize].len();
            let most = 4 + (i / (8 * self.ranks)) as usize % 24;
            if running > most {
                self.end(slot, running - most);
            }
        }
    }

    fn off(&self, slot: u32, law: &StepLaw) -> (f64, f64) {
        let found = self.estimator.law_of(slot);
        let mut worst = (0.0f64, 0.0f64);
        for (new, cached) in [
            (500.0, 0.0),
            (2000.0, 2000.0),
            (6000.0, 0.0),
            (4000.0, 3000.0),
        ] {
            let ratio =
                (found.chunk + found.work(new, cached)) / (law.chunk + law.work(new, cached));
            worst.0 = worst.0.max((ratio - 1.0).abs());
        }
        let state = self.ledger.timed_load(slot);
        let (n, context) = (f64::from(state.decoding.max(1)), state.context as f64);
        worst.1 = (found.decode(n, context) / law.decode(n, context) - 1.0).abs();
        worst
    }
}

#[test]
fn from_a_prior_ten_times_off_fifty_prompts_suffice() {
    for off in [0.1, 10.0] {
        let mut rig = Rig::new(TRUE.scaled(off, off), 1);
        rig.serve(50, |_| TRUE);
        let (prompts, steps) = rig.off(0, &TRUE);
        assert!(prompts < 0.08 && steps < 0.08, "{off}: {prompts} {steps}");
    }
}

#[test]
fn ranks_of_different_speed_are_told_apart_and_equal_ones_are_not() {
    let mut rig = Rig::new(TRUE.scaled(3.0, 3.0), 4);
    let law = |slot: u32| {
        if slot < 2 {
            TRUE
        } else {
            TRUE.scaled(2.0, 2.0)
        }
    };
    rig.serve(600, law);
    for slot in 0..4 {
        let (prompts, steps) = rig.off(slot, &law(slot));
        assert!(prompts < 0.12 && steps < 0.12, "{slot}: {prompts} {steps}");
    }
    let mut alike = Rig::new(TRUE, 4);
    alike.serve(400, |_| TRUE);
    for slot in 0..4 {
        let (prompts, steps) = alike.estimator.factors(slot);
        assert!((prompts - 1.0).abs() < 0.08, "{slot}: {prompts}");
        assert!((steps - 1.0).abs() < 0.08, "{slot}: {steps}");
    }
}

#[test]
fn an_engine_that_slows_to_half_is_followed_within_200_prompts() {
    let mut rig = Rig::new(TRUE, 2);
    rig.serve(400, |_| TRUE);
    let slow = TRUE.scaled(2.0, 2.0);
    let law = |slot: u32| if slot == 1 { slow } else { TRUE };
    rig.serve(200, law);
    let (prompts, steps) = rig.off(1, &slow);
    assert!(prompts < 0.12 && steps < 0.12, "{prompts} {steps}");
    let (prompts, _) = rig.off(0, &TRUE);
    assert!(prompts < 0.12, "{prompts}");
}

/// Every third answer comes in one piece, long after its prompt was computed.
#[test]
fn answers_in_one_piece_teach_nothing() {
    let mut rig = Rig::new(TRUE, 1);
    for i in 0..300u32 {
        if i % 3 == 0 {
            let (id, ..) = rig.book(0);
            rig.pass(0, 9.0);
            match i % 2 {
                0 => drop(rig.ledger.prefilled(rig.time(0), id)),
                _ => drop(rig.ledger.free(rig.time(0), id)),
            }
            rig.ledger.free(rig.time(0), id);
            rig.learn();
        }
        rig.serve(1, |_| TRUE);
    }
    let (prompts, steps) = rig.off(0, &TRUE);
    assert!(prompts < 0.05 && steps < 0.05, "{prompts} {steps}");
}

/// One stream of several is read a hundred times slower than it is made.
#[test]
fn a_client_that_reads_slowly_is_not_taken_for_a_slow_engine() {
    let mut rig = Rig::new(TRUE, 1);
    for _ in 0..60 {
        let slow = rig.prompt(0, &TRUE);
        rig.running[0].retain(|(id, _)| *id != slow);
        rig.serve(3, |_| TRUE);
        // What it was sent long ago arrives only now.
        rig.ledger.output(rig.time(0), slow, 20, false);
        rig.decode(0, &TRUE, 20);
        rig.ledger.free(rig.time(0), slow);
        rig.learn();
    }
    let (_, steps) = rig.off(0, &TRUE);
    assert!(steps < 0.08, "{steps}");
}

/// An engine that counts tokens only now and then: gaps over few tokens are not measured, long ones are right.
#[test]
fn tokens_that_are_counted_late_do_not_shorten_steps() {
    let mut rig = Rig::new(TRUE, 1);
    for _ in 0..100 {
        let late = rig.prompt(0, &TRUE);
        rig.running[0].clear();
        rig.pass(0, 100.0 * TRUE.decode(1.0, 3000.0));
        rig.ledger.output(rig.time(0), late, 101, false);
        rig.ledger.output(rig.time(0), late, 101, false);
        rig.ledger.free(rig.time(0), late);
        rig.learn();
    }
    let found = rig.estimator.law().decode(1.0, 3000.0);
    let truth = TRUE.decode(1.0, 3000.0);
    assert!((found / truth - 1.0).abs() < 0.05, "{found} for {truth}");
}

#[test]
fn a_journal_that_nobody_reads_is_bounded_and_its_loss_is_noticed() {
    let mut rig = Rig::new(TRUE, 1);
    for _ in 0..5000 {
        let (id, ..) = rig.book(0);
        rig.pass(0, 0.01);
        rig.ledger.first_token(rig.time(0), id);
        rig.ledger.free(rig.time(0), id);
    }
    let mut notes = 0;
    rig.ledger.read_journal(|_| notes += 1);
    assert_eq!(notes, 4097);
}

/// What is kept is all that is known: a second estimator says the same, and goes on learning alike.
#[test]
fn an_estimator_goes_on_where_another_ended() {
    let law = |slot: u32| {
        if slot == 1 {
            TRUE.scaled(2.0, 2.0)
        } else {
            TRUE
        }
    };
    let mut rig = Rig::new(TRUE.scaled(3.0, 3.0), 3);
    rig.serve(300, law);
    let mut next = Estimator::new(&StepLaw::default());
    assert!(next.resume_fleet(&rig.estimator.fleet_record()));
    for slot in 0..3 {
        next.set_rank(slot, 8192.0, true);
        assert!(next.resume_rank(slot, &rig.estimator.rank_record(slot)));
        assert_eq!(next.law_of(slot), rig.estimator.law_of(slot));
        assert_eq!(next.rank_samples(slot), rig.estimator.rank_samples(slot));
    }
    assert_eq!(next.output(), rig.estimator.output());
    rig.estimator = next;
    rig.serve(30, law);
    let (prompts, steps) = rig.off(1, &law(1));
    assert!(prompts < 0.12 && steps < 0.12, "{prompts} {steps}");
}

#[test]
fn numbers_that_no_estimator_wrote_change_nothing() {
    let mut rig = Rig::new(TRUE, 1);
    rig.serve(60, |_| TRUE);
    let (fleet, rank) = (rig.estimator.fleet_record(), rig.estimator.rank_record(0));
    let mut fresh = Estimator::new(&TRUE);
    let before = (fresh.law(), fresh.output());
    for at in 0..fleet.len() {
        for bad in [f64::NAN, f64::INFINITY, -1.0] {
            let mut numbers = fleet.clone();
            numbers[at] = bad;
            assert!(!fresh.resume_fleet(&numbers), "{at}: {bad}");
            if let Some(number) = numbers.get_mut(at).filter(|_| at < rank.len()) {
                *number = bad;
                let mut numbers = rank.clone();
                numbers[at] = bad;
                assert!(!fresh.resume_rank(0, &numbers), "{at}: {bad}");
            }
        }
    }
    assert!(!fresh.resume_fleet(&fleet[1..]) && !fresh.resume_fleet(&[]));
    assert!(!fresh.resume_rank(0, &rank[1..]) && !fresh.resume_rank(0, &[]));
    assert_eq!((fresh.law(), fresh.output()), before);
}
