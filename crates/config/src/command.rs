//! The commands of the one binary.
//!
//! Answers: which commands are there, and which options does each have?
//!
//! Elsewhere: what a command does (`cli`).

/// A command that runs something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Command {
    /// The HTTP frontend with its router.
    Frontend,
    /// Frontend, mock workers and traffic in one process.
    Demo,
    /// A router without HTTP completions.
    Router,
    /// An index of engines' caches behind HTTP.
    Indexer,
    /// What runs where, behind HTTP.
    SlotTracker,
    /// A router behind HTTP that books and forwards nothing.
    Select,
    /// A mock engine.
    Mocker,
    /// Virtual-time simulation.
    Replay,
    /// Why requests went where they went.
    Why,
    /// Which worker serves what; adding and removing workers.
    Workers,
    /// A running frontend at a glance.
    Top,
    /// What is wrong with a worker, and the flag that fixes it.
    Doctor,
    /// Whether a running frontend can serve.
    Health,
    /// Another process takes over from a running frontend.
    Upgrade,
}

impl Command {
    /// All commands, in the order of help.
    pub const ALL: &[Self] = &[
        Self::Frontend,
        Self::Demo,
        Self::Router,
        Self::Indexer,
        Self::SlotTracker,
        Self::Select,
        Self::Mocker,
        Self::Replay,
        Self::Why,
        Self::Workers,
        Self::Top,
        Self::Doctor,
        Self::Health,
        Self::Upgrade,
    ];

    /// The word on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Frontend => "frontend",
            Self::Demo => "demo",
            Self::Router => "router",
            Self::Indexer => "indexer",
            Self::SlotTracker => "slot-tracker",
            Self::Select => "select",
            Self::Mocker => "mocker",
            Self::Replay => "replay",
            Self::Why => "why",
            Self::Workers => "workers",
            Self::Top => "top",
            Self::Doctor => "doctor",
            Self::Health => "health",
            Self::Upgrade => "upgrade",
        }
    }

    /// One line for the list of commands.
    pub const fn summary(self) -> &'static str {
        match self {
            Self::Frontend => "Serve the OpenAI API and route each request to the best worker",
            Self::Demo => "Try it: frontend, mock workers and sample traffic in one process",
            Self::Router => "Route for other services, without an HTTP API of its own",
            Self::Indexer => "Serve over HTTP which worker holds how much of a prompt",
            Self::SlotTracker => "Serve over HTTP what runs where, as others tell it",
            Self::Select => "Serve over HTTP which worker is best for a prompt, and book it",
            Self::Mocker => "Run a mock engine that behaves like an inference server",
            Self::Replay => "Simulate a trace under several policies, in virtual time",
            Self::Why => "Show why a request went where it went, or the latest decisions",
            Self::Workers => "List the workers of a running frontend, add one, remove one",
            Self::Top => "Watch a running frontend: workers, load, cache, requests",
            Self::Doctor => "Check why a worker's cache is not known, and which flag fixes it",
            Self::Health => "Tell by the exit code whether a running frontend can serve",
            Self::Upgrade => "Start a running frontend anew, without a lost request",
        }
    }

    /// Arguments of the command beside options, as in usage; empty when it takes none.
    pub const fn operands(self) -> &'static str {
        match self {
            Self::Why => "[REQUEST-ID]",
            Self::Workers => "[add URL | remove ID]",
            _ => "",
        }
    }

    /// Maximum number of arguments.
    pub(crate) const fn operands_max(self) -> usize {
        match self {
            Self::Why => 1,
            Self::Workers => 2,
            _ => 0,
        }
    }

    /// The command of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|command| command.name() == name)
    }

    pub(crate) const fn scope(self) -> Scope {
        match self {
            Self::Frontend => Scope::FRONTEND,
            Self::Demo => Scope::DEMO,
            Self::Router => Scope::ROUTER,
            Self::Indexer => Scope::INDEXER,
            Self::SlotTracker => Scope::SLOT_TRACKER,
            Self::Select => Scope::SELECT,
            Self::Mocker => Scope::MOCKER,
            Self::Replay => Scope::REPLAY,
            Self::Why => Scope::WHY,
            Self::Workers => Scope::WORKERS,
            Self::Top => Scope::TOP,
            Self::Doctor => Scope::DOCTOR,
            Self::Health => Scope::HEALTH,
            Self::Upgrade => Scope::UPGRADE,
        }
    }
}

/// A set of commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scope(u16);

impl Scope {
    /// `kvasir frontend`.
    pub const FRONTEND: Self = Self(1);
    /// `kvasir demo`.
    pub const DEMO: Self = Self(1 << 1);
    /// `kvasir router`.
    pub const ROUTER: Self = Self(1 << 2);
    /// `kvasir mocker`.
    pub const MOCKER: Self = Self(1 << 3);
    /// `kvasir replay`.
    pub const REPLAY: Self = Self(1 << 4);
    /// `kvasir config`, whose options are those of the command it looks at and a few of its own.
    pub const CONFIG: Self = Self(1 << 5);
    /// `kvasir why`.
    pub const WHY: Self = Self(1 << 6);
    /// `kvasir workers`.
    pub const WORKERS: Self = Self(1 << 7);
    /// `kvasir top`.
    pub const TOP: Self = Self(1 << 8);
    /// `kvasir doctor`.
    pub const DOCTOR: Self = Self(1 << 9);
    /// `kvasir health`.
    pub const HEALTH: Self = Self(1 << 10);
    /// `kvasir upgrade`.
    pub const UPGRADE: Self = Self(1 << 11);
    /// `kvasir indexer`.
    pub const INDEXER: Self = Self(1 << 12);
    /// `kvasir slot-tracker`.
    pub const SLOT_TRACKER: Self = Self(1 << 13);
    /// `kvasir select`.
    pub const SELECT: Self = Self(1 << 14);
    /// Parts of the router as services.
    pub const SERVICES: Self = Self::INDEXER.and(Self::SLOT_TRACKER).and(Self::SELECT);
    /// Commands that ask a running frontend.
    pub const OPERATE: Self = Self::WHY
        .and(Self::WORKERS)
        .and(Self::TOP)
        .and(Self::HEALTH)
        .and(Self::UPGRADE);
    /// Commands that listen for HTTP clients.
    pub const SERVE: Self = Self::FRONTEND.and(Self::DEMO);
    /// Commands with a router in them.
    pub const ROUTING: Self = Self::SERVE
        .and(Self::ROUTER)
        .and(Self::SELECT)
        .and(Self::REPLAY);
    /// Every command that serves or simulates.
    pub const ALL: Self = Self::ROUTING.and(Self::MOCKER).and(Self::SERVICES);

    /// Union of two sets.
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether the sets share a command.
    pub const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether the set is exactly `other`.
    pub const fn is_only(self, other: Self) -> bool {
        self.0 == other.0
    }

    /// Words of the commands in the set.
    pub fn names(self) -> Vec<&'static str> {
        let commands = Command::ALL
            .iter()
            .filter(|command| self.meets(command.scope()));
        let config = self.meets(Self::CONFIG).then_some("config");
        commands
            .map(|command| command.name())
            .chain(config)
            .collect()
    }
}
