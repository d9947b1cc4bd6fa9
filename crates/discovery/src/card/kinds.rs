//! What a model can be asked for, what its workers take, and which part of a request they compute.

use std::fmt;

use serde_json::Value;

/// What a model can be asked for: a set of names. In a card it is text (`Chat | Completions`); in the oldest ones a number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelType {
    known: u32,
    /// Names that are not in the table.
    others: Vec<String>,
}

/// Names by their bit.
const NAMES: [&str; 12] = [
    "Chat",
    "Completions",
    "Embedding",
    "TensorBased",
    "Prefill",
    "Images",
    "Audios",
    "Videos",
    "Realtime",
    "Classify",
    "Pooling",
    "Rerank",
];
const CHAT: u32 = 1;
const COMPLETIONS: u32 = 1 << 1;
const PREFILL: u32 = 1 << 4;
/// Names that are not in the table and are kept.
const OTHERS_MAX: usize = 16;

impl ModelType {
    /// Conversations and completions.
    pub const TEXT: Self = Self {
        known: CHAT | COMPLETIONS,
        others: Vec::new(),
    };
    /// Nothing: what a prefill worker says.
    pub const NONE: Self = Self {
        known: 0,
        others: Vec::new(),
    };

    /// From the bits of a number.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self {
            known: bits & ((1 << NAMES.len()) - 1),
            others: Vec::new(),
        }
    }

    /// From names with `|` between them.
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        let mut this = Self::NONE;
        for name in text
            .split('|')
            .map(str::trim)
            .filter(|name| !name.is_empty())
        {
            let bit = NAMES
                .iter()
                .position(|known| known.eq_ignore_ascii_case(name));
            match (bit, name) {
                (Some(bit), _) => this.known |= 1 << bit,
                // What the first versions called a worker that takes tokens of either.
                (None, "Backend") => this.known |= CHAT | COMPLETIONS,
                (None, "Completion") => this.known |= COMPLETIONS,
                (None, name) if this.others.len() < OTHERS_MAX => this.others.push(name.into()),
                (None, _) => {}
            }
        }
        this
    }

    pub(super) fn read(value: Option<&Value>) -> Self {
        match value {
            Some(Value::String(text)) => Self::from_text(text),
            Some(Value::Number(bits)) => {
                let bits = bits.as_u64().and_then(|bits| u32::try_from(bits).ok());
                Self::from_bits(bits.unwrap_or(0))
            }
            Some(Value::Object(flags)) => Self::read(flags.get("bits")),
            _ => Self::NONE,
        }
    }

    /// Whether it can hold a conversation.
    #[must_use]
    pub const fn is_chat(&self) -> bool {
        self.known & CHAT != 0
    }

    /// Whether it completes text.
    #[must_use]
    pub const fn is_completions(&self) -> bool {
        self.known & COMPLETIONS != 0
    }

    /// Whether an older card says by it that its worker computes prompts alone.
    #[must_use]
    pub const fn is_prefill(&self) -> bool {
        self.known & PREFILL != 0
    }
}

impl fmt::Display for ModelType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = (0..NAMES.len()).filter(|bit| self.known & (1 << bit) != 0);
        let known = known.filter_map(|bit| NAMES.get(bit).copied());
        let names: Vec<&str> = known
            .chain(self.others.iter().map(String::as_str))
            .collect();
        f.write_str(&names.join(" | "))
    }
}

/// What a worker takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ModelInput {
    /// Token ids: the frontend has template and tokenizer.
    #[default]
    Tokens,
    /// The client's body.
    Text,
    /// Tensors.
    Tensor,
}

impl ModelInput {
    /// Its name in a card.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tokens => "Tokens",
            Self::Text => "Text",
            Self::Tensor => "Tensor",
        }
    }

    pub(super) fn read(value: Option<&Value>) -> Self {
        let all = [Self::Tokens, Self::Text, Self::Tensor];
        let name = value.and_then(Value::as_str).unwrap_or_default();
        let found = all
            .into_iter()
            .find(|one| one.name().eq_ignore_ascii_case(name));
        found.unwrap_or_default()
    }
}

/// Which part of a request a worker computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkerType {
    /// The prompt.
    Prefill,
    /// The answer.
    Decode,
    /// Pictures and sound, as the others take them.
    Encode,
    /// All of it.
    Aggregated,
}

impl WorkerType {
    const ALL: [Self; 4] = [Self::Prefill, Self::Decode, Self::Encode, Self::Aggregated];

    /// Its name in a card.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Encode => "encode",
            Self::Aggregated => "aggregated",
        }
    }

    /// Its place in a checksum; none is 0.
    pub(super) const fn ordinal(self) -> u8 {
        match self {
            Self::Prefill => 1,
            Self::Decode => 2,
            Self::Encode => 3,
            Self::Aggregated => 4,
        }
    }

    pub(super) fn read(value: Option<&Value>) -> Option<Self> {
        let name = value?.as_str()?;
        Self::ALL
            .into_iter()
            .find(|one| one.name().eq_ignore_ascii_case(name))
    }
}
