//! How the page of metrics is set up: who exports, what is shown, where an operator wants the bounds.

/// Who exports: the values of the labels that groups add.
#[derive(Clone, Debug)]
pub struct Identity {
    /// `--metrics-prefix`.
    pub frontend_prefix: String,
    /// `dynamo_namespace`.
    pub namespace: String,
    /// `dynamo_component`.
    pub component: String,
    /// `router_id`, and in hexadecimal `worker_id`.
    pub router_id: u64,
}

impl Default for Identity {
    fn default() -> Self {
        Self {
            frontend_prefix: "dynamo_frontend".into(),
            namespace: "dynamo".into(),
            component: "backend".into(),
            router_id: 0,
        }
    }
}

/// What a process is, as far as its series differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProcessKind {
    /// It serves clients, or a part of the router.
    #[default]
    Frontend,
    /// It routes for callers on the request plane.
    Router,
    /// It is an index for others.
    Indexer,
    /// It answers requests itself.
    Worker,
}

/// All that decides how series are made.
#[derive(Clone, Debug)]
pub struct MetricOptions {
    /// Who exports.
    pub identity: Identity,
    /// Requests are routed by cache (`--router-mode kv`): without, the series about that are not shown.
    pub by_cache: bool,
    /// What the process is: each has series of its own.
    pub process: ProcessKind,
    /// The bounds that an operator can set.
    pub bounds: TunedBounds,
}

impl Default for MetricOptions {
    fn default() -> Self {
        Self {
            identity: Identity::default(),
            by_cache: true,
            process: ProcessKind::default(),
            bounds: TunedBounds::default(),
        }
    }
}

/// Histograms whose bounds an operator can set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunableHistogram {
    /// `DYN_METRICS_REQUEST_DURATION_*`.
    RequestDuration,
    /// `DYN_METRICS_TTFT_*`.
    Ttft,
    /// `DYN_METRICS_ITL_*`.
    Itl,
    /// `DYN_METRICS_INPUT_SEQUENCE_*`.
    InputSequence,
    /// `DYN_METRICS_OUTPUT_SEQUENCE_*`.
    OutputSequence,
}

/// Log-spaced bounds, see [`crate::log_spaced`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogBounds {
    /// Where the spacing starts; its own bound is replaced by 0.
    pub min: f64,
    /// The last bound.
    pub max: f64,
    /// How many bounds.
    pub count: u32,
}

impl LogBounds {
    pub(crate) fn list(self) -> Vec<f64> {
        crate::log_spaced(self.min, self.max, self.count)
    }
}

/// The bounds that an operator can set, by what they are of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TunedBounds {
    /// Of [`TunableHistogram::RequestDuration`], in seconds.
    pub request_duration: LogBounds,
    /// Of [`TunableHistogram::Ttft`], in seconds.
    pub ttft: LogBounds,
    /// Of [`TunableHistogram::Itl`], in seconds.
    pub itl: LogBounds,
    /// Of [`TunableHistogram::InputSequence`], in tokens.
    pub input_sequence: LogBounds,
    /// Of [`TunableHistogram::OutputSequence`], in tokens.
    pub output_sequence: LogBounds,
}

impl Default for TunedBounds {
    /// Those of Dynamo 1.6.1.
    fn default() -> Self {
        let log = |min, max, count| LogBounds { min, max, count };
        Self {
            request_duration: log(1.0, 512.0, 10),
            ttft: log(0.001, 480.0, 18),
            itl: log(0.001, 80.0, 20),
            input_sequence: log(50.0, 128_000.0, 12),
            output_sequence: log(50.0, 32_000.0, 10),
        }
    }
}

impl TunedBounds {
    pub(crate) fn of(&self, which: TunableHistogram) -> LogBounds {
        match which {
            TunableHistogram::RequestDuration => self.request_duration,
            TunableHistogram::Ttft => self.ttft,
            TunableHistogram::Itl => self.itl,
            TunableHistogram::InputSequence => self.input_sequence,
            TunableHistogram::OutputSequence => self.output_sequence,
        }
    }
}
