//! What a stream reports of one rank: into the log, and into the judgement.

use kvasir_kv_events::{Notice, Skip};
use kvasir_transport::SourceFault;
use kvasir_trust::Evidence;

use super::CacheView;
use crate::events::StreamObserver;

impl CacheView {
    /// Writes a line unless one of its kind was written of late. `write` is given how many were not.
    fn log(&self, kind: &'static str, write: impl FnOnce(Option<u64>)) {
        let withheld = self.lock().log_limit.admit(self.now(), kind);
        if let Some(withheld) = withheld {
            write(Some(withheld).filter(|count| *count > 0));
        }
    }

    /// Writes how many lines were withheld, when their minute is over.
    pub(super) fn log_withheld(&self) {
        let now = self.now();
        let mut inner = self.lock();
        let due: Vec<_> = inner.log_limit.due(now).collect();
        drop(inner);
        for (kind, count) in due {
            let (rank, url) = (self.rank, self.url());
            tracing::warn!(%rank, %url, kind, count, "cache events: the same happened again in the last minute");
        }
    }

    fn log_notice(&self, notice: &Notice) {
        if matches!(notice, Notice::Whole { .. }) {
            return; // The recovery that brought it is logged, and what it does to trust.
        }
        let (rank, url) = (self.rank, self.url());
        self.log(kind_of(notice), |withheld| match notice {
            Notice::Recovered { .. }
            | Notice::Cleared { .. }
            | Notice::Pairs
            | Notice::BlockSizeFits => {
                tracing::info!(%rank, %url, withheld, "cache events: {notice}");
            }
            _ => tracing::warn!(%rank, %url, withheld, "cache events: {notice}"),
        });
    }
}

impl StreamObserver for CacheView {
    fn notice(&self, notice: &Notice) {
        self.log_notice(notice);
        let mut inner = self.lock();
        inner.last_fault = fault_name(notice).or(inner.last_fault);
        match notice {
            Notice::Restarted => self.step(&mut inner, Evidence::Restarted),
            Notice::Recovered { messages: 1.., .. } => self.step(&mut inner, Evidence::Mended),
            Notice::Whole { .. } => self.step(&mut inner, Evidence::Whole),
            Notice::Skipped(Skip::BlockSize { .. }) => {
                inner.other_block_size = true;
                self.step_unusable(&mut inner);
            }
            Notice::BlockSizeFits => {
                inner.other_block_size = false;
                self.step_unusable(&mut inner);
            }
            _ => {}
        }
    }

    fn link(&self, fault: Option<&SourceFault>) {
        let (rank, url) = (self.rank, self.url());
        let address = self.lock().address.clone();
        let events = address.as_deref();
        match fault {
            None => self.log("connected", |withheld| {
                tracing::info!(%rank, %url, events, withheld, "event socket connected");
            }),
            Some(fault @ SourceFault::Local(_)) => {
                tracing::debug!(%rank, %url, %fault, "event socket not connected");
                return self.show(Evidence::LocalFault);
            }
            Some(fault) => self.log("not connected", |withheld| {
                tracing::warn!(%rank, %url, events, %fault, withheld, "event socket not connected");
            }),
        }
        self.count_lifecycle(if fault.is_none() {
            "activated"
        } else {
            "disconnected"
        });
        self.show(Evidence::Link(fault.is_none()));
    }
}

/// What a notice is called in listings, if it is a fault.
fn fault_name(notice: &Notice) -> Option<&'static str> {
    Some(match notice {
        Notice::Gap { .. } | Notice::GapWithoutReplay | Notice::RankGap { .. } => "gap",
        Notice::Restarted => "restart",
        Notice::ReplayTooShort { .. } | Notice::LogTooShort { .. } => "replay_too_short",
        Notice::RecoveryFailed { .. } | Notice::QueryFailed { .. } => "replay_failed",
        Notice::Refused(_) => "unreadable",
        Notice::Skipped(Skip::BlockSize { .. }) => "block_size",
        Notice::Orphans { .. } => "orphans",
        Notice::HeldDropped => "overflow",
        _ => return None,
    })
}

/// What lines about a notice are limited by.
fn kind_of(notice: &Notice) -> &'static str {
    fault_name(notice).unwrap_or(match notice {
        Notice::Recovered { .. } => "recovered",
        Notice::Cleared { .. } => "cleared",
        Notice::Skipped(_) => "skipped",
        Notice::UnknownWorker(_) => "unknown worker",
        _ => "other",
    })
}
