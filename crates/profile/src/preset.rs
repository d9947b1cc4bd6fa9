//! Engines known by name: a model on a device, its step times and the room its cache has.

use crate::{GridError, Profile, h200};

/// An H200's memory, bytes.
const H200_BYTES: u64 = 141_000_000_000;
/// Share of the memory that an engine takes (vLLM's `--gpu-memory-utilization` default), in percent.
const MEMORY_SHARE_PERCENT: u64 = 90;
/// Activations, graphs and the rest that is neither weights nor cache, bytes.
const OVERHEAD_BYTES: u64 = 10_000_000_000;

/// A model on a device, known by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    /// Llama-3.1-8B in bf16 on one H200.
    H200Llama8b,
    /// Qwen3-32B in bf16 on one H200.
    H200Qwen32b,
}

impl Preset {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::H200Llama8b, Self::H200Qwen32b];

    /// The preset called `name`.
    ///
    /// ```
    /// # use kvasir_profile::Preset;
    /// assert_eq!(Preset::find("h200-llama-8b"), Some(Preset::H200Llama8b));
    /// assert_eq!(Preset::find("h100"), None);
    /// ```
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|p| p.name() == name)
    }

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::H200Llama8b => "h200-llama-8b",
            Self::H200Qwen32b => "h200-qwen-32b",
        }
    }

    /// Bytes of the weights.
    #[must_use]
    pub const fn weight_bytes(self) -> u64 {
        match self {
            Self::H200Llama8b => 16_060_000_000,
            Self::H200Qwen32b => 65_520_000_000,
        }
    }

    /// Bytes of one token's keys and values.
    #[must_use]
    pub const fn kv_bytes_per_token(self) -> u64 {
        match self {
            Self::H200Llama8b => 131_072,
            Self::H200Qwen32b => 262_144,
        }
    }

    /// Tokens whose keys and values fit beside the weights.
    ///
    /// ```
    /// # use kvasir_profile::Preset;
    /// assert_eq!(Preset::H200Llama8b.kv_tokens(), 769_348);
    /// assert_eq!(Preset::H200Qwen32b.kv_tokens(), 195_999);
    /// ```
    #[must_use]
    pub const fn kv_tokens(self) -> u64 {
        let usable = H200_BYTES / 100 * MEMORY_SHARE_PERCENT;
        let cache = usable.saturating_sub(self.weight_bytes() + OVERHEAD_BYTES);
        cache / self.kv_bytes_per_token()
    }

    /// The measured step times.
    pub fn profile(self) -> Result<Profile, GridError> {
        match self {
            Self::H200Llama8b => Profile::new(h200::LLAMA_8B_PREFILL, h200::LLAMA_8B_DECODE),
            Self::H200Qwen32b => Profile::new(h200::QWEN_32B_PREFILL, h200::QWEN_32B_DECODE),
        }
    }
}
