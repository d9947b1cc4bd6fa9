//! Settings that are one of several names.
//!
//! One declaration gives the type, its names for parsers and the words for help.

use std::fmt;

/// One allowed name of a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Canonical spelling.
    pub name: &'static str,
    /// What it means, in a few words.
    pub help: &'static str,
}

/// Declares an enum whose variants are the names of a choice.
#[macro_export]
macro_rules! choices {
    ($(
        $(#[$attribute:meta])+
        $ty:ident { $( $variant:ident = $name:literal: $help:literal, )+ }
    )+) => {$(
        $(#[$attribute])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $ty { $( #[doc = $help] $variant, )+ }

        impl $ty {
            /// Every name with its meaning.
            pub const CHOICES: &'static [$crate::Choice] =
                &[ $( $crate::Choice { name: $name, help: $help }, )+ ];

            /// The name as it is typed.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $( Self::$variant => $name, )+ }
            }

            /// The variant of exactly this name.
            #[must_use]
            pub fn find(name: &str) -> Option<Self> {
                match name { $( $name => Some(Self::$variant), )+ _ => None }
            }
        }
    )+};
}

choices! {
    /// How a worker is chosen. Option `router-mode`.
    #[cfg_attr(
        feature = "serde",
        derive(serde::Serialize, serde::Deserialize),
        serde(rename_all = "kebab-case")
    )]
    RouterMode {
        RoundRobin = "round-robin": "each worker in turn",
        Random = "random": "a random worker",
        Kv = "kv": "lowest uncached prefill work plus decode load",
        Direct = "direct": "the worker that the request names",
        PowerOfTwo = "power-of-two": "the less loaded of two drawn at random",
        LeastLoaded = "least-loaded": "fewest active requests",
        DeviceAwareWeighted = "device-aware-weighted": "weighted by device, CPU encoders less often",
    }

    /// What `kv` mode takes for the cost of a placement. Option `router-policy`.
    #[cfg_attr(
        feature = "serde",
        derive(serde::Serialize, serde::Deserialize),
        serde(rename_all = "kebab-case")
    )]
    RouterPolicy {
        Kv = "kv": "blocks of uncached prompt and of decode load, by the weights given",
        Time = "time": "seconds that all requests wait, learned from the workers; nothing to set",
    }

    /// Order of the admission queue. Option `router-queue-policy`.
    QueuePolicy {
        Fcfs = "fcfs": "first come, first served; best tail latency",
        Lcfs = "lcfs": "last come, first served; for experiments",
        Wspt = "wspt": "short prompts first; best mean latency",
        WsptUncached = "wspt-uncached": "fewest uncached prompt tokens first",
    }

    /// How tracked prefill work decays before the first token. Option `router-prefill-load-model`.
    PrefillLoadModel {
        None = "none": "no decay until the first token",
        Aic = "aic": "decays by the AI configurator's estimate",
        Learned = "learned": "decays by the prefill times of the worker so far",
    }

    /// Whose caching behaviour an engine has. Option `engine-type`.
    EngineFamily {
        Vllm = "vllm": "vLLM",
        Sglang = "sglang": "SGLang",
        Trtllm = "trtllm": "TensorRT-LLM",
    }

    /// Which request is preempted. Option `preemption-mode`.
    PreemptionMode {
        Lifo = "lifo": "the one that came last",
        Fifo = "fifo": "the one that came first",
    }
}

impl fmt::Display for RouterMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Default for RouterMode {
    fn default() -> Self {
        crate::router::ROUTER_MODE.default
    }
}

impl Default for RouterPolicy {
    fn default() -> Self {
        crate::router::ROUTER_POLICY.default
    }
}

impl Default for QueuePolicy {
    fn default() -> Self {
        crate::router::ROUTER_QUEUE_POLICY.default
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_found_by_each_of_its_names_and_no_other() {
        for choice in RouterMode::CHOICES {
            let found = RouterMode::find(choice.name);
            assert_eq!(found.map(RouterMode::name), Some(choice.name));
        }
        assert_eq!(RouterMode::find("round_robin"), None);
        assert_eq!(QueuePolicy::find(""), None);
    }
}
