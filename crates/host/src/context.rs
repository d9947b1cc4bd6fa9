//! What every host is handed: the time, the metrics, and where tasks run.

use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, Metrics};

/// The surroundings of a host. Clones are one.
#[derive(Clone, Debug)]
pub struct HostContext {
    /// The time.
    pub clock: Clock,
    /// What is counted.
    pub metrics: Metrics,
    /// Where tasks are spawned and waited for.
    pub tasks: Tasks,
}
