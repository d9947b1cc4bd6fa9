//! Events that come after they were asked for.

use super::*;

/// A server between them that was away delivers what it kept: the worker lives, and says so.
#[test]
fn old_events_that_come_late_are_no_restart() {
    let mut one = One::new();
    let joined = one.step(SourceEvent::Connected);
    one.answer(&joined);
    let late: Vec<RouterEvent> = (0..30).map(|_| one.publish()).collect();
    one.step(SourceEvent::Disconnected(SourceFault::Silent));
    let out = one.step(SourceEvent::Connected);
    one.answer(&out);
    assert_eq!(one.depth(), 30);
    let mut out = Vec::new();
    for event in late {
        assert_eq!(one.depth(), 30, "what is known stays known");
        out.extend(one.live(event));
    }
    let out = one.answer(&out);
    assert!(!out.contains(&Output::Notice(Notice::Restarted)), "{out:?}");
    assert!(one.sequencer.status().recovering.is_none());
    assert_eq!((one.depth(), one.is_exact()), (30, true));
}
