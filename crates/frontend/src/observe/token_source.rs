//! Who says what the tokens of a prompt are: the label that a prompt is counted under.

/// Who says what the tokens of a prompt are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum TokenSource {
    /// The client sent ids.
    Client = 1,
    /// The tokenizer in the folder of `--model-path`.
    Folder = 2,
    /// The tokenizer in the folder that the engine names.
    Announced = 3,
    /// The engine, asked.
    Engine = 4,
    /// Nobody: the bytes of the text stand in.
    Bytes = 5,
}

impl TokenSource {
    /// How many there are.
    pub(crate) const COUNT: usize = 5;

    /// Where it stands among them.
    pub(crate) const fn index(self) -> usize {
        self as usize - 1
    }

    /// As metrics and the list of workers say it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Folder => "model_path",
            Self::Announced => "announced",
            Self::Engine => "tokenize",
            Self::Bytes => "bytes",
        }
    }
}
