//! Every path of a request in two steps, and random histories of it.

use expect_test::expect;
use kvasir_types::Rng;

use super::TwoStepAction as Do;
use super::TwoStepInput as Told;
use super::*;

const KIND: TwoStepTerms = TwoStepTerms {
    serves_alone: true,
    falls_back: true,
};
const STRICT: TwoStepTerms = TwoStepTerms {
    serves_alone: false,
    falls_back: false,
};

fn word(action: &Do) -> String {
    match action {
        Do::BookPrefill => "book prefill".into(),
        Do::SendPrefill => "send prefill".into(),
        Do::Decode(DecodeMode::Alone) => "decode alone".into(),
        Do::Decode(DecodeMode::Transferred(_)) => "decode transferred".into(),
        Do::End(Leg::Prefill) => "end prefill".into(),
        Do::End(Leg::Decode) => "end decode".into(),
        Do::AnswerPrefill => "answer prefill".into(),
        Do::Detach => "detach".into(),
        Do::Fail(TwoStepFailure::NoPrefill) => "fail: no prefill".into(),
        Do::Fail(TwoStepFailure::Leg(leg, trouble)) => format!("fail: {leg:?} {trouble:?}"),
    }
}

fn run(terms: TwoStepTerms, pool: PoolState, history: &[Told]) -> String {
    let (mut request, first) = TwoStep::start(terms, pool);
    let mut out = vec![first];
    for told in history {
        request.step(*told, &mut out);
    }
    let over = if request.is_over() { "" } else { " …" };
    out.iter().map(word).collect::<Vec<_>>().join(", ") + over
}

/// The table of failures and what follows: kind terms, then strict ones.
#[test]
fn what_follows_each_failure() {
    use Handoff::{Answer, Bootstrap};
    let booked = |handoff| Told::PrefillBooked(handoff);
    let ended = |end| Told::PrefillEnded(end);
    let failed = |trouble| ended(PrefillEnd::Failed(trouble));
    let rows: [(&str, PoolState, Vec<Told>); 18] = [
        ("no prefill worker yet", PoolState::Pending, vec![]),
        ("prefill workers are gone", PoolState::Unavailable, vec![]),
        (
            "prefill cannot be booked",
            PoolState::Active,
            vec![Told::PrefillRefused(Trouble::Failed)],
        ),
        (
            "prefill pool is full",
            PoolState::Active,
            vec![Told::PrefillRefused(Trouble::Overloaded)],
        ),
        (
            "constraint cannot be met",
            PoolState::Active,
            vec![Told::PrefillRefused(Trouble::Constraint)],
        ),
        (
            "prefill fails",
            PoolState::Active,
            vec![booked(Answer), failed(Trouble::Failed)],
        ),
        (
            "prefill is full",
            PoolState::Active,
            vec![booked(Answer), failed(Trouble::Overloaded)],
        ),
        (
            "prefill was cancelled",
            PoolState::Active,
            vec![booked(Answer), failed(Trouble::Cancelled)],
        ),
        (
            "no transfer in its answer",
            PoolState::Active,
            vec![booked(Answer), ended(PrefillEnd::NoTransfer)],
        ),
        (
            "first token is the last",
            PoolState::Active,
            vec![booked(Answer), ended(PrefillEnd::Terminal)],
        ),
        (
            "decode refuses",
            PoolState::Active,
            vec![
                booked(Answer),
                ended(PrefillEnd::Ready),
                Told::DecodeRefused(Trouble::Failed),
            ],
        ),
        (
            "decode is full",
            PoolState::Active,
            vec![
                booked(Answer),
                ended(PrefillEnd::Ready),
                Told::DecodeRefused(Trouble::Overloaded),
            ],
        ),
        (
            "client leaves in prefill",
            PoolState::Active,
            vec![booked(Answer), Told::ClientLeft],
        ),
        (
            "client leaves before decode",
            PoolState::Active,
            vec![booked(Answer), ended(PrefillEnd::Ready), Told::ClientLeft],
        ),
        (
            "and decode begins",
            PoolState::Active,
            vec![
                booked(Answer),
                ended(PrefillEnd::Ready),
                Told::DecodeBooked,
                Told::ClientLeft,
                Told::DecodeBegan,
            ],
        ),
        (
            "bootstrap: prefill fails",
            PoolState::Active,
            vec![
                booked(Bootstrap),
                Told::DecodeBooked,
                failed(Trouble::Failed),
            ],
        ),
        (
            "bootstrap: and late",
            PoolState::Active,
            vec![
                booked(Bootstrap),
                Told::DecodeBooked,
                Told::DecodeBegan,
                failed(Trouble::Failed),
                Told::DecodeEnded(None),
            ],
        ),
        (
            "bootstrap: client leaves",
            PoolState::Active,
            vec![booked(Bootstrap), Told::DecodeBooked, Told::ClientLeft],
        ),
    ];
    let mut table = String::new();
    for (what, pool, history) in rows {
        let (kind, strict) = (run(KIND, pool, &history), run(STRICT, pool, &history));
        table += &format!("{what:<28}{kind}\n");
        if strict != kind {
            table += &format!("{:<28}{strict}\n", "  strict");
        }
    }
    expect![[r#"
        no prefill worker yet       decode alone …
          strict                    fail: no prefill
        prefill workers are gone    decode alone …
          strict                    fail: no prefill
        prefill cannot be booked    book prefill, end prefill, decode alone …
          strict                    book prefill, end prefill, fail: Prefill Failed
        prefill pool is full        book prefill, end prefill, fail: Prefill Overloaded
        constraint cannot be met    book prefill, end prefill, fail: Prefill Constraint
        prefill fails               book prefill, send prefill, end prefill, decode alone …
          strict                    book prefill, send prefill, end prefill, fail: Prefill Failed
        prefill is full             book prefill, send prefill, end prefill, fail: Prefill Overloaded
        prefill was cancelled       book prefill, send prefill, end prefill, fail: Prefill Cancelled
        no transfer in its answer   book prefill, send prefill, end prefill, decode alone …
          strict                    book prefill, send prefill, end prefill, fail: Prefill Failed
        first token is the last     book prefill, send prefill, end prefill, answer prefill
        decode refuses              book prefill, send prefill, end prefill, decode transferred, end decode, decode alone …
          strict                    book prefill, send prefill, end prefill, decode transferred, end decode, fail: Decode Failed
        decode is full              book prefill, send prefill, end prefill, decode transferred, end decode, fail: Decode Overloaded
        client leaves in prefill    book prefill, send prefill, end prefill
        client leaves before decode book prefill, send prefill, end prefill, decode transferred, detach …
        and decode begins           book prefill, send prefill, end prefill, decode transferred, detach, end decode
        bootstrap: prefill fails    book prefill, send prefill, decode transferred, end prefill, end decode, decode alone …
          strict                    book prefill, send prefill, decode transferred, end prefill, end decode, fail: Prefill Failed
        bootstrap: and late         book prefill, send prefill, decode transferred, end prefill, end decode
        bootstrap: client leaves    book prefill, send prefill, decode transferred, end decode, end prefill
    "#]]
    .assert_eq(&table);
}

/// A leg as who drives the request sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Seen {
    #[default]
    Closed,
    /// It is to be booked: what comes of it is not told yet.
    Open,
    /// It is booked.
    Booked,
}

/// Who drives a request, does what it is told, and fails where it can.
#[derive(Debug, Default)]
struct World {
    prefill: Seen,
    decode: Seen,
    /// Bookings made and freed, of both legs.
    made: u32,
    freed: u32,
    /// Transfers prepared and not used, and how often the client's request ended.
    prepared: u32,
    ends: u32,
    bootstrap: bool,
    begun: bool,
    left: bool,
}

impl World {
    fn leg(&mut self, leg: Leg) -> &mut Seen {
        match leg {
            Leg::Prefill => &mut self.prefill,
            Leg::Decode => &mut self.decode,
        }
    }

    fn obey(&mut self, action: Do) {
        match action {
            Do::BookPrefill => {
                assert_eq!(self.prefill, Seen::Closed);
                self.prefill = Seen::Open;
            }
            Do::SendPrefill => {
                assert_eq!(self.prefill, Seen::Booked, "only what is booked is sent")
            }
            Do::Decode(mode) => {
                assert_eq!((self.decode, self.begun), (Seen::Closed, false));
                match mode {
                    DecodeMode::Alone => self.prepared = 0,
                    DecodeMode::Transferred(_) => {
                        self.prepared = self.prepared.checked_sub(1).expect("a transfer, once");
                    }
                }
                self.decode = Seen::Open;
            }
            Do::End(leg) => {
                let seen = std::mem::take(self.leg(leg));
                assert_ne!(seen, Seen::Closed, "a leg ends once");
                self.freed += u32::from(seen == Seen::Booked);
            }
            Do::AnswerPrefill | Do::Fail(_) => self.ends += 1,
            Do::Detach => assert!(self.left && self.decode != Seen::Closed),
        }
    }

    /// What can happen now.
    fn possible(&self) -> Vec<Told> {
        let troubles = [
            Trouble::Overloaded,
            Trouble::Cancelled,
            Trouble::Constraint,
            Trouble::Failed,
        ];
        let mut all = Vec::new();
        match self.prefill {
            Seen::Open => {
                all.extend([Handoff::Answer, Handoff::Bootstrap].map(Told::PrefillBooked));
                all.extend(troubles.map(Told::PrefillRefused));
            }
            Seen::Booked => {
                let ends = [
                    PrefillEnd::Ready,
                    PrefillEnd::Ready,
                    PrefillEnd::NoTransfer,
                    PrefillEnd::Terminal,
                ];
                all.extend(ends.map(Told::PrefillEnded));
                all.extend(troubles.map(|t| Told::PrefillEnded(PrefillEnd::Failed(t))));
            }
            Seen::Closed => {}
        }
        match self.decode {
            Seen::Open => {
                all.extend([Told::DecodeBooked; 3]);
                all.extend(troubles.map(Told::DecodeRefused));
            }
            Seen::Booked => {
                if !self.begun {
                    all.extend([Told::DecodeBegan; 3]);
                }
                all.extend(troubles.map(|t| Told::DecodeEnded(Some(t))));
                all.push(Told::DecodeEnded(None));
            }
            Seen::Closed => {}
        }
        if !self.left {
            all.push(Told::ClientLeft);
        }
        all
    }

    fn happen(&mut self, told: Told) {
        match told {
            Told::PrefillBooked(handoff) => {
                self.prefill = Seen::Booked;
                self.made += 1;
                self.bootstrap = handoff == Handoff::Bootstrap;
                self.prepared = u32::from(self.bootstrap);
            }
            Told::DecodeBooked => {
                self.decode = Seen::Booked;
                self.made += 1;
            }
            Told::PrefillEnded(PrefillEnd::Ready) if !self.bootstrap => self.prepared = 1,
            Told::DecodeBegan => self.begun = true,
            Told::DecodeEnded(None) => self.ends += u32::from(!self.left),
            Told::ClientLeft => {
                self.left = true;
                self.ends += u32::from(self.ends == 0);
            }
            _ => {}
        }
    }
}

/// Pools come and go between requests; each request goes through a random history: it ends once, and all that was booked is
/// freed once, when nothing can happen any more.
#[test]
fn every_history_ends_once_and_frees_what_it_booked() {
    let mut rng = Rng::new(16);
    let (mut pool, mut paths) = (PoolState::Pending, std::collections::BTreeSet::new());
    for _ in 0..200_000 {
        pool = pool.with_workers(rng.below(3) as usize);
        let terms = TwoStepTerms {
            serves_alone: rng.below(2) == 0,
            falls_back: rng.below(2) == 0,
        };
        let (mut request, first) = TwoStep::start(terms, pool);
        let (mut world, mut out, mut path) = (World::default(), vec![first], vec![word(&first)]);
        for _ in 0..16 {
            out.drain(..).for_each(|action| world.obey(action));
            if request.is_over() {
                break;
            }
            let possible = world.possible();
            let told = possible[rng.below(possible.len() as u64) as usize];
            world.happen(told);
            request.step(told, &mut out);
            path.extend(out.iter().map(word));
        }
        assert!(request.is_over(), "{path:?}");
        assert_eq!(
            (world.prefill, world.decode),
            (Seen::Closed, Seen::Closed),
            "{path:?}"
        );
        assert_eq!((world.ends, world.made), (1, world.freed), "{path:?}");
        // Whatever comes late changes nothing.
        for late in [
            Told::DecodeBegan,
            Told::PrefillEnded(PrefillEnd::Ready),
            Told::ClientLeft,
        ] {
            request.step(late, &mut out);
        }
        assert_eq!(out, []);
        paths.insert(path);
    }
    assert!(paths.len() > 60, "only {} paths", paths.len());
}
