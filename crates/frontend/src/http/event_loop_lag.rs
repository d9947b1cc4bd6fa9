//! How late the timers of a serving thread are: what requests on it wait for besides themselves.
//!
//! A timer that goes off twice a second and notes how much later than asked for that was costs nothing that
//! shows, and a thread that computes for too long between two waits shows at once.

use std::time::Duration;

use kvasir_telemetry::{Clock, Metrics};

/// Between two looks.
const EVERY: Duration = Duration::from_millis(500);
/// What the runtime's own timer may be late: it counts milliseconds.
const STALL: Duration = Duration::from_millis(5);

/// Watches the thread that runs this, for as long as it is polled.
pub(crate) async fn watch(metrics: Metrics, clock: Clock) {
    loop {
        let asked = clock.now() + EVERY;
        tokio::time::sleep(EVERY).await;
        note(&metrics, clock.now() - asked);
    }
}

fn note(metrics: &Metrics, late: Duration) {
    metrics.event_loop_delay_seconds.observe(late.as_secs_f64());
    if late > STALL {
        metrics.event_loop_stall_total.inc();
    }
}

#[cfg(test)]
mod tests {
    use kvasir_telemetry::MetricOptions;

    use super::*;

    #[test]
    fn only_more_than_five_milliseconds_is_a_stall() {
        let metrics = Metrics::new(&MetricOptions::default()).unwrap();
        for late in [0, 5, 6, 500] {
            note(&metrics, Duration::from_millis(late));
        }
        assert_eq!(metrics.event_loop_delay_seconds.get_sample_count(), 4);
        assert_eq!(metrics.event_loop_stall_total.get(), 2);
    }
}
