//! A prompt that whoever answers computes, though other workers compute prompts.
//!
//! Answers one question: is the way over a prefill worker worth it for this prompt now? It is not where the decode worker has most
//! of the prompt cached, or where prefill workers have much to do; it is wherever the decode worker is nearly full itself.
//!
//! Elsewhere: who the two workers would be (`Router`, asked without booking), what follows (`TwoStep`, or one leg alone).

use std::fmt;

/// Which test lets a prompt go past the prefill workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BypassPolicy {
    /// Little of the prompt is left to compute.
    #[default]
    IslBounding,
    /// The prefill worker that would compute it has much to do.
    PrefillLoad,
    /// Either of the two.
    IslOrLoad,
}

/// When prompts go past the prefill workers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BypassTerms {
    /// The test.
    pub policy: BypassPolicy,
    /// Uncached tokens of the prompt are fewer than this.
    pub uncached_tokens: u64,
    /// And less than this share of it.
    pub uncached_share: f64,
    /// The prefill worker has more than this many steps of prompt tokens before it.
    pub prefill_busy: Option<f64>,
    /// The decode worker would have more than this share of its blocks in use: then it computes no prompts.
    pub decode_busy: Option<f64>,
}

/// The two workers that a prompt would go to, and what they have of it and before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BypassView {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Those that the decode worker has cached.
    pub cached_tokens: u32,
    /// Blocks that would be in use on the decode worker with this prompt.
    pub decode_blocks: u64,
    /// Blocks that it has, where it says so.
    pub decode_blocks_total: Option<u64>,
    /// Prompt tokens that wait on the prefill worker.
    pub prefill_tokens: u64,
    /// Tokens that it computes in a step.
    pub prefill_batch: u64,
}

/// Why a prompt goes past the prefill workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BypassReason {
    /// Little of it is left to compute.
    ShortPrompt,
    /// The prefill worker has much to do.
    PrefillBusy,
}

impl BypassReason {
    /// Its name in series and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ShortPrompt => "short_prompt",
            Self::PrefillBusy => "prefill_busy",
        }
    }
}

impl fmt::Display for BypassReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl BypassTerms {
    /// Why the decode worker should compute the prompt itself; none if it should not.
    ///
    /// ```
    /// use kvasir_router::{BypassPolicy, BypassReason, BypassTerms, BypassView};
    ///
    /// let terms = BypassTerms {
    ///     policy: BypassPolicy::IslBounding,
    ///     uncached_tokens: 2048,
    ///     uncached_share: 0.7,
    ///     prefill_busy: None,
    ///     decode_busy: None,
    /// };
    /// let mut view = BypassView { prompt_tokens: 1000, cached_tokens: 301, ..BypassView::default() };
    /// assert_eq!(terms.judge(&view), Some(BypassReason::ShortPrompt));
    /// view.cached_tokens = 300;
    /// assert_eq!(terms.judge(&view), None, "700 of 1000 are not less than the share");
    /// ```
    #[must_use]
    pub fn judge(&self, view: &BypassView) -> Option<BypassReason> {
        if !self.has_room(view) {
            return None;
        }
        let (by_length, by_load) = match self.policy {
            BypassPolicy::IslBounding => (true, false),
            BypassPolicy::PrefillLoad => (false, true),
            BypassPolicy::IslOrLoad => (true, true),
        };
        if by_length && self.is_short(view) {
            return Some(BypassReason::ShortPrompt);
        }
        (by_load && self.is_prefill_busy(view)).then_some(BypassReason::PrefillBusy)
    }

    /// Whether [`Self::judge`] looks at the prefill worker.
    #[must_use]
    pub const fn asks_prefill(&self) -> bool {
        !matches!(self.policy, BypassPolicy::IslBounding) && self.prefill_busy.is_some()
    }

    fn is_short(&self, view: &BypassView) -> bool {
        let prompt = view.prompt_tokens;
        let uncached = prompt.saturating_sub(view.cached_tokens);
        let share = f64::from(uncached) / f64::from(prompt.max(1));
        u64::from(uncached) < self.uncached_tokens && share < self.uncached_share
    }

    fn is_prefill_busy(&self, view: &BypassView) -> bool {
        let limit = self
            .prefill_busy
            .map(|steps| steps * view.prefill_batch as f64);
        limit.is_some_and(|limit| view.prefill_tokens as f64 > limit)
    }

    /// Whether the decode worker may compute prompts. One of unknown size may not.
    fn has_room(&self, view: &BypassView) -> bool {
        let Some(share) = self.decode_busy else {
            return true;
        };
        let total = view.decode_blocks_total;
        total.is_some_and(|total| view.decode_blocks as f64 <= share * total as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: BypassTerms = BypassTerms {
        policy: BypassPolicy::IslOrLoad,
        uncached_tokens: 2048,
        uncached_share: 0.7,
        prefill_busy: Some(2.0),
        decode_busy: Some(0.9),
    };
    /// Short for the decode worker, and nothing waits anywhere.
    const VIEW: BypassView = BypassView {
        prompt_tokens: 4096,
        cached_tokens: 4000,
        decode_blocks: 900,
        decode_blocks_total: Some(1000),
        prefill_tokens: 0,
        prefill_batch: 1000,
    };

    fn judge(policy: BypassPolicy, change: impl Fn(&mut BypassView)) -> Option<BypassReason> {
        let mut view = VIEW;
        change(&mut view);
        BypassTerms { policy, ..TERMS }.judge(&view)
    }

    /// Each bound from both sides.
    #[test]
    fn each_policy_has_its_bounds() {
        use BypassPolicy::{IslBounding, IslOrLoad, PrefillLoad};
        use BypassReason::{PrefillBusy, ShortPrompt};
        let cached = |cached: u32| move |view: &mut BypassView| view.cached_tokens = cached;
        // 2048 uncached tokens are half of the prompt.
        assert_eq!(judge(IslBounding, cached(2049)), Some(ShortPrompt));
        assert_eq!(judge(IslBounding, cached(2048)), None);
        assert_eq!(judge(PrefillLoad, cached(4096)), None);
        let busy = |tokens: u64| {
            move |view: &mut BypassView| (view.cached_tokens, view.prefill_tokens) = (0, tokens)
        };
        assert_eq!(judge(PrefillLoad, busy(2000)), None);
        assert_eq!(judge(PrefillLoad, busy(2001)), Some(PrefillBusy));
        assert_eq!(judge(IslOrLoad, busy(2001)), Some(PrefillBusy));
        assert_eq!(judge(IslBounding, busy(2001)), None);
        let both = |view: &mut BypassView| view.prefill_tokens = 2001;
        assert_eq!(judge(IslOrLoad, both), Some(ShortPrompt));
    }

    #[test]
    fn a_decode_worker_that_is_nearly_full_or_of_unknown_size_computes_no_prompts() {
        let policy = BypassPolicy::IslBounding;
        assert!(judge(policy, |view| view.decode_blocks = 900).is_some());
        assert!(judge(policy, |view| view.decode_blocks = 901).is_none());
        assert!(judge(policy, |view| view.decode_blocks_total = None).is_none());
        let unguarded = BypassTerms {
            decode_busy: None,
            ..TERMS
        };
        let full = BypassView {
            decode_blocks: 5000,
            decode_blocks_total: None,
            ..VIEW
        };
        assert!(unguarded.judge(&full).is_some());
    }

    #[test]
    fn an_empty_prompt_is_as_short_as_can_be() {
        let empty = |view: &mut BypassView| (view.prompt_tokens, view.cached_tokens) = (0, 7);
        assert!(judge(BypassPolicy::IslBounding, empty).is_some());
    }
}
