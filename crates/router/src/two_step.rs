//! A request whose prompt and answer are computed by different workers.
//!
//! Answers one question: the prompt's worker, the answer's worker or the client did this, what is to be done next? [`TwoStep`] is a
//! value without I/O and without a clock. Who drives it books workers, sends requests, and tells it what came of that; retries
//! inside one leg are [`Attempts`](crate::Attempts).
//!
//! What always holds: the client's request ends once, by an answer, a failure or the client's leaving; each leg that was begun is
//! ended once, and with it its booking; an answer that needs a transfer is asked for only where a transfer was prepared, and a
//! transfer that was prepared is used at most once; nothing is asked of a leg after its end.
//!
//! Elsewhere: which worker a leg goes to (`Router`), what a transfer is called by an engine (`kvasir-openai`, `kvasir-protocol`).

/// What is known of the workers that compute a model's prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PoolState {
    /// None has ever been there.
    #[default]
    Pending,
    /// Some are there.
    Active,
    /// All have gone.
    Unavailable,
}

impl PoolState {
    /// The state now that there are so many workers.
    ///
    /// ```
    /// use kvasir_router::PoolState::{Active, Pending, Unavailable};
    /// assert_eq!([Pending, Active, Unavailable].map(|state| state.with_workers(0)), [Pending, Unavailable, Unavailable]);
    /// assert_eq!(Unavailable.with_workers(1), Active);
    /// ```
    #[must_use]
    pub const fn with_workers(self, workers: usize) -> Self {
        match (self, workers) {
            (Self::Pending, 0) => Self::Pending,
            (_, 0) => Self::Unavailable,
            _ => Self::Active,
        }
    }

    /// Its name for operators.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Active => "active",
            Self::Unavailable => "unavailable",
        }
    }
}

/// The part of a request that one worker computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Leg {
    /// The prompt.
    Prefill,
    /// The answer.
    Decode,
}

/// How the cache gets from the prompt's worker to the answer's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Handoff {
    /// The prompt's worker says it in its answer: the other is asked afterwards.
    #[default]
    Answer,
    /// The two meet at an address that is known before: both are asked at once.
    Bootstrap,
}

/// What the answer's worker is to do about the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecodeMode {
    /// Compute it itself.
    Alone,
    /// Take it over from the prompt's worker.
    Transferred(Handoff),
}

/// On which terms a request is served by two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TwoStepTerms {
    /// While nobody computes prompts, those who compute answers do both.
    pub serves_alone: bool,
    /// A prompt whose worker failed is computed by the answer's worker, as long as the client has received nothing.
    pub falls_back: bool,
}

impl Default for TwoStepTerms {
    /// Whoever can serve a request serves it.
    fn default() -> Self {
        Self {
            serves_alone: true,
            falls_back: true,
        }
    }
}

/// What a leg's failure means for the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Trouble {
    /// Its workers are full.
    Overloaded,
    /// The request was given up on its way.
    Cancelled,
    /// The other leg's place cannot be as this one requires.
    Constraint,
    /// Anything else.
    Failed,
}

/// How the prompt's worker ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PrefillEnd {
    /// The prompt is computed, and it is known where it is.
    Ready,
    /// It is computed, but not known where it is.
    NoTransfer,
    /// The first token is all of the answer.
    Terminal,
    /// It failed.
    Failed(Trouble),
}

/// Something that happened to a leg or to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TwoStepInput {
    /// A worker for the prompt is booked.
    PrefillBooked(Handoff),
    /// None could be.
    PrefillRefused(Trouble),
    /// The prompt's worker has ended.
    PrefillEnded(PrefillEnd),
    /// A worker for the answer is booked.
    DecodeBooked,
    /// None could be.
    DecodeRefused(Trouble),
    /// The first token came.
    DecodeBegan,
    /// The answer ended; with trouble, if it is not complete.
    DecodeEnded(Option<Trouble>),
    /// The client is gone.
    ClientLeft,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TwoStepFailure {
    /// Nobody computes prompts, and those who compute answers are not to do both.
    NoPrefill,
    /// A leg failed.
    Leg(Leg, Trouble),
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TwoStepAction {
    /// Book a worker for the prompt.
    BookPrefill,
    /// Send the prompt to it. Where both workers are asked at once, nothing waits for its answer.
    SendPrefill,
    /// Book a worker for the answer and send it the request.
    Decode(DecodeMode),
    /// The leg is over: stop it if it runs, and free what is booked. Nothing more is told of it.
    End(Leg),
    /// The client gets what the prompt's worker said.
    AnswerPrefill,
    /// The client gets an error.
    Fail(TwoStepFailure),
    /// The client is gone, but the answer's leg goes on until its first token: only then the prompt's worker gives up the
    /// blocks that it holds for the transfer.
    Detach,
}

/// How far a leg is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LegState {
    #[default]
    Unused,
    /// It is to be booked.
    Asked,
    /// It is booked.
    Running,
    Over,
}

impl LegState {
    const fn is_open(self) -> bool {
        matches!(self, Self::Asked | Self::Running)
    }
}

/// One request on its way through both legs.
///
/// ```
/// use kvasir_router::{DecodeMode, Handoff, Leg, PoolState, PrefillEnd, TwoStep, TwoStepTerms};
/// use kvasir_router::{TwoStepAction as Do, TwoStepInput as Told};
///
/// let terms = TwoStepTerms { serves_alone: true, falls_back: true };
/// let (mut request, first) = TwoStep::start(terms, PoolState::Active);
/// assert_eq!(first, Do::BookPrefill);
/// let mut out = Vec::new();
/// request.step(Told::PrefillBooked(Handoff::Answer), &mut out);
/// request.step(Told::PrefillEnded(PrefillEnd::Ready), &mut out);
/// let after = DecodeMode::Transferred(Handoff::Answer);
/// assert_eq!(out, [Do::SendPrefill, Do::End(Leg::Prefill), Do::Decode(after)]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TwoStep {
    terms: TwoStepTerms,
    prefill: LegState,
    decode: LegState,
    handoff: Handoff,
    mode: DecodeMode,
    /// The client has received something.
    streamed: bool,
    /// The client's request has ended.
    ended: bool,
}

impl TwoStep {
    /// A request that came while the pool of the prompt's workers was in this state, and what is done first.
    #[must_use]
    pub const fn start(terms: TwoStepTerms, pool: PoolState) -> (Self, TwoStepAction) {
        let mut request = Self {
            terms,
            prefill: LegState::Unused,
            decode: LegState::Unused,
            handoff: Handoff::Answer,
            mode: DecodeMode::Alone,
            streamed: false,
            ended: false,
        };
        let first = match (pool, terms.serves_alone) {
            (PoolState::Active, _) => {
                request.prefill = LegState::Asked;
                TwoStepAction::BookPrefill
            }
            (_, true) => request.ask_decode(DecodeMode::Alone),
            (_, false) => request.fail(TwoStepFailure::NoPrefill),
        };
        (request, first)
    }

    /// Whether nothing is left to be done or to be told.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        self.ended && !self.prefill.is_open() && !self.decode.is_open()
    }

    /// Something happened: what is to be done goes to `out`, in order. News of a leg that is over is no news.
    pub fn step(&mut self, told: TwoStepInput, out: &mut Vec<TwoStepAction>) {
        match told {
            TwoStepInput::PrefillBooked(handoff) if self.prefill == LegState::Asked => {
                self.prefill = LegState::Running;
                self.handoff = handoff;
                out.push(TwoStepAction::SendPrefill);
                if handoff == Handoff::Bootstrap {
                    out.push(self.ask_decode(DecodeMode::Transferred(handoff)));
                }
            }
            TwoStepInput::PrefillRefused(trouble) if self.prefill == LegState::Asked => {
                self.end(Leg::Prefill, out);
                self.prefill_failed(trouble, out);
            }
            TwoStepInput::PrefillEnded(end) if self.prefill == LegState::Running => {
                self.end(Leg::Prefill, out);
                self.prefilled(end, out);
            }
            TwoStepInput::DecodeBooked if self.decode == LegState::Asked => {
                self.decode = LegState::Running;
            }
            TwoStepInput::DecodeRefused(trouble) if self.decode == LegState::Asked => {
                self.decode_failed(trouble, out);
            }
            TwoStepInput::DecodeBegan if self.decode == LegState::Running => match self.ended {
                true => self.end(Leg::Decode, out),
                false => self.streamed = true,
            },
            TwoStepInput::DecodeEnded(trouble) if self.decode == LegState::Running => match trouble
            {
                Some(trouble) => self.decode_failed(trouble, out),
                None => {
                    self.end(Leg::Decode, out);
                    self.ended = true;
                }
            },
            TwoStepInput::ClientLeft if !self.ended => self.client_left(out),
            _ => {}
        }
    }

    /// The prompt's worker has ended, and what it held is freed.
    fn prefilled(&mut self, end: PrefillEnd, out: &mut Vec<TwoStepAction>) {
        if self.ended {
            return;
        }
        match (self.handoff, end) {
            (Handoff::Answer, PrefillEnd::Ready) => {
                out.push(self.ask_decode(DecodeMode::Transferred(Handoff::Answer)));
            }
            (Handoff::Answer, PrefillEnd::Terminal) => {
                self.ended = true;
                out.push(TwoStepAction::AnswerPrefill);
            }
            (Handoff::Answer, PrefillEnd::NoTransfer) => self.prefill_failed(Trouble::Failed, out),
            (Handoff::Answer, PrefillEnd::Failed(trouble)) => self.prefill_failed(trouble, out),
            // The answer's worker waits for what will not come; one that has begun has it.
            (Handoff::Bootstrap, PrefillEnd::Failed(trouble)) if !self.streamed => {
                self.end(Leg::Decode, out);
                self.prefill_failed(trouble, out);
            }
            (Handoff::Bootstrap, _) => {}
        }
    }

    /// No worker computes the prompt alone.
    fn prefill_failed(&mut self, trouble: Trouble, out: &mut Vec<TwoStepAction>) {
        out.push(match (trouble, self.terms.falls_back) {
            (Trouble::Failed, true) => self.ask_decode(DecodeMode::Alone),
            _ => self.fail(TwoStepFailure::Leg(Leg::Prefill, trouble)),
        });
    }

    fn decode_failed(&mut self, trouble: Trouble, out: &mut Vec<TwoStepAction>) {
        self.end(Leg::Decode, out);
        if self.ended {
            return;
        }
        // The prompt's worker would wait for one who takes its cache.
        self.end(Leg::Prefill, out);
        let transferred = self.mode != DecodeMode::Alone;
        let again = transferred && !self.streamed && self.terms.falls_back;
        out.push(match (trouble, again) {
            // What was prepared may have been used: a second use would read what is there by then.
            (Trouble::Failed, true) => self.ask_decode(DecodeMode::Alone),
            _ => self.fail(TwoStepFailure::Leg(Leg::Decode, trouble)),
        });
    }

    fn client_left(&mut self, out: &mut Vec<TwoStepAction>) {
        self.ended = true;
        let awaited = self.mode == DecodeMode::Transferred(Handoff::Answer);
        if self.decode.is_open() && awaited && !self.streamed {
            out.push(TwoStepAction::Detach);
            return;
        }
        self.end(Leg::Decode, out);
        self.end(Leg::Prefill, out);
    }

    const fn ask_decode(&mut self, mode: DecodeMode) -> TwoStepAction {
        self.decode = LegState::Asked;
        self.mode = mode;
        TwoStepAction::Decode(mode)
    }

    const fn fail(&mut self, why: TwoStepFailure) -> TwoStepAction {
        self.ended = true;
        TwoStepAction::Fail(why)
    }

    /// Ends a leg, if it has not ended.
    fn end(&mut self, leg: Leg, out: &mut Vec<TwoStepAction>) {
        let state = match leg {
            Leg::Prefill => &mut self.prefill,
            Leg::Decode => &mut self.decode,
        };
        if state.is_open() {
            *state = LegState::Over;
            out.push(TwoStepAction::End(leg));
        }
    }
}

#[cfg(test)]
mod tests;
