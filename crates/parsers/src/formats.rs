//! Which form a worker's card names.
//!
//! The names are those of Dynamo 1.6.1, and some of vLLM and SGLang for the same forms.

use crate::event::TextParser;
use crate::gemma::{self, GemmaCalls};
use crate::harmony;
use crate::json_calls::{JsonCalls, JsonForm};
use crate::python::PythonCalls;
use crate::schema::ToolSchemas;
use crate::sections::{HeadForm, SectionCalls, SectionForm};
use crate::tags::{TagCalls, TagForm};
use crate::think::Marks;
use crate::tool_calls::CallParser;

/// A form in which calls are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`.
    Hermes,
    /// `{"name": …, "parameters": …}`, alone or after `<|python_tag|>`.
    Llama3Json,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}]` or `[TOOL_CALLS]name{…}`.
    Mistral,
    /// `<TOOLCALL>[{"name": …, "arguments": …}]</TOOLCALL>`.
    NemotronDeci,
    /// `functools[{"name": …, "arguments": …}]`.
    Phi4,
    /// `<tool_calls>[{"name": …, "arguments": …}]</tool_calls>`.
    Jamba,
    /// Any of `<TOOLCALL>` and `<|python_tag|>`, or a bare object.
    Default,
    /// `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, then a fence with JSON.
    DeepSeekV3,
    /// The same without kind and fence.
    DeepSeekV31,
    /// `<｜DSML｜function_calls><｜DSML｜invoke name="…">`.
    DeepSeekV32,
    /// `<｜DSML｜tool_calls><｜DSML｜invoke name="…">`.
    DeepSeekV4,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.
    Qwen3Coder,
    /// `<minimax:tool_call><invoke name="…"><parameter name="…">value</parameter></invoke></minimax:tool_call>`.
    MiniMaxM2,
    /// `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`.
    Glm,
    /// `<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}`.
    KimiK2,
    /// `[name(a=1)]`.
    Pythonic,
    /// `<|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>`.
    Gemma4,
    /// Messages to `functions.name`.
    Harmony,
}

/// Forms of calls by the names that cards give them.
const TOOL_NAMES: &[(&str, ToolFormat)] = &[
    ("hermes", ToolFormat::Hermes),
    ("qwen25", ToolFormat::Hermes),
    ("qwen3", ToolFormat::Hermes),
    ("qwen", ToolFormat::Hermes),
    ("llama3_json", ToolFormat::Llama3Json),
    ("llama4_json", ToolFormat::Llama3Json),
    ("llama3", ToolFormat::Llama3Json),
    ("mistral", ToolFormat::Mistral),
    ("nemotron_deci", ToolFormat::NemotronDeci),
    ("phi4", ToolFormat::Phi4),
    ("phi4_mini_json", ToolFormat::Phi4),
    ("jamba", ToolFormat::Jamba),
    ("default", ToolFormat::Default),
    ("deepseek_v3", ToolFormat::DeepSeekV3),
    ("deepseekv3", ToolFormat::DeepSeekV3),
    ("deepseek_v3_1", ToolFormat::DeepSeekV31),
    ("deepseek_v31", ToolFormat::DeepSeekV31),
    ("deepseekv31", ToolFormat::DeepSeekV31),
    ("deepseek_v3_2", ToolFormat::DeepSeekV32),
    ("deepseek_v32", ToolFormat::DeepSeekV32),
    ("deepseekv32", ToolFormat::DeepSeekV32),
    ("deepseek_v4", ToolFormat::DeepSeekV4),
    ("deepseekv4", ToolFormat::DeepSeekV4),
    ("deepseek_v41", ToolFormat::DeepSeekV4),
    ("qwen3_coder", ToolFormat::Qwen3Coder),
    ("nemotron_nano", ToolFormat::Qwen3Coder),
    ("qwen3_xml", ToolFormat::Qwen3Coder),
    ("minimax_m2", ToolFormat::MiniMaxM2),
    ("glm45", ToolFormat::Glm),
    ("glm47", ToolFormat::Glm),
    ("kimi_k2", ToolFormat::KimiK2),
    ("kimi_k25", ToolFormat::KimiK2),
    ("pythonic", ToolFormat::Pythonic),
    ("llama4_pythonic", ToolFormat::Pythonic),
    ("gemma4", ToolFormat::Gemma4),
    ("harmony", ToolFormat::Harmony),
    ("openai", ToolFormat::Harmony),
    ("gpt_oss", ToolFormat::Harmony),
];

impl ToolFormat {
    /// The form that a card names; none if it is not known.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase().replace('-', "_");
        let mut known = TOOL_NAMES.iter();
        known
            .find(|(known, _)| *known == name)
            .map(|(_, form)| *form)
    }

    /// The names that [`Self::named`] knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        TOOL_NAMES.iter().map(|(name, _)| *name)
    }

    /// Marks that a tokenizer may have as special tokens: they have to be seen.
    #[must_use]
    pub fn special(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::Qwen3Coder => &["<tool_call>", "</tool_call>"],
            Self::Llama3Json => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]", "[/TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            Self::NemotronDeci => &["<TOOLCALL>", "</TOOLCALL>"],
            Self::Phi4 => &["<|tool_call|>", "<|/tool_call|>"],
            Self::Jamba => &["<tool_calls>", "</tool_calls>"],
            Self::Default => &["<TOOLCALL>", "</TOOLCALL>", "<|python_tag|>"],
            Self::DeepSeekV3 | Self::DeepSeekV31 => &[
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁sep｜>",
            ],
            Self::DeepSeekV32 | Self::DeepSeekV4 => &["｜DSML｜"],
            Self::MiniMaxM2 => &["<minimax:tool_call>", "</minimax:tool_call>"],
            Self::Glm => &[
                "<tool_call>",
                "</tool_call>",
                "<arg_key>",
                "</arg_key>",
                "<arg_value>",
                "</arg_value>",
            ],
            Self::KimiK2 => &[
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
                "<|tool_call_section_begin|>",
                "<|tool_call_section_end|>",
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
            ],
            Self::Pythonic => &["<|python_start|>", "<|python_end|>"],
            Self::Gemma4 => gemma::SPECIAL,
            Self::Harmony => harmony::SPECIAL,
        }
    }

    /// What reads it. Harmony is read with its reasoning.
    pub(crate) fn parser(self, schemas: &ToolSchemas) -> Option<Box<dyn TextParser>> {
        if let Some(form) = self.json() {
            return Some(Box::new(CallParser::new(JsonCalls::new(form, schemas))));
        }
        if let Some(form) = self.tags() {
            return Some(Box::new(CallParser::new(TagCalls::new(form, schemas))));
        }
        if let Some(form) = self.sections() {
            return Some(Box::new(CallParser::new(SectionCalls::new(form))));
        }
        match self {
            Self::Pythonic => Some(Box::new(CallParser::new(PythonCalls::new(schemas)))),
            Self::Gemma4 => Some(Box::new(CallParser::new(GemmaCalls::new()))),
            _ => None,
        }
    }

    fn json(self) -> Option<JsonForm> {
        let form = |openers, closers, bare| JsonForm {
            openers,
            closers,
            bare,
            name_first: None,
        };
        Some(match self {
            Self::Hermes => form(&["<tool_call>"], &["</tool_call>"], &[]),
            Self::Llama3Json => form(&["<|python_tag|>"], &[], &['{']),
            Self::Mistral => JsonForm {
                name_first: Some(&["[ARGS]"]),
                ..form(&["[TOOL_CALLS]"], &["[/TOOL_CALLS]"], &[])
            },
            Self::NemotronDeci => form(&["<TOOLCALL>"], &["</TOOLCALL>"], &[]),
            Self::Phi4 => form(&["functools"], &[], &[]),
            Self::Jamba => form(&["<tool_calls>"], &["</tool_calls>"], &[]),
            Self::Default => form(
                &["<TOOLCALL>", "<|python_tag|>"],
                &["</TOOLCALL>"],
                &['{', '['],
            ),
            _ => return None,
        })
    }

    fn tags(self) -> Option<TagForm> {
        let invoke = TagForm {
            openers: &["<minimax:tool_call>", "<invoke name="],
            closers: &["</minimax:tool_call>"],
            function_open: "<invoke name=",
            function_close: "</invoke>",
            key_open: "<parameter name=",
            key_close: ">",
            value_open: "",
            value_close: "</parameter>",
            has_lines: true,
        };
        let dsml = TagForm {
            openers: &["<｜DSML｜function_calls>", "<｜DSML｜invoke name="],
            closers: &["</｜DSML｜function_calls>"],
            function_open: "<｜DSML｜invoke name=",
            function_close: "</｜DSML｜invoke>",
            key_open: "<｜DSML｜parameter name=",
            value_close: "</｜DSML｜parameter>",
            has_lines: false,
            ..invoke
        };
        Some(match self {
            Self::Qwen3Coder => TagForm {
                openers: &["<tool_call>", "<function="],
                closers: &["</tool_call>"],
                function_open: "<function=",
                function_close: "</function>",
                key_open: "<parameter=",
                ..invoke
            },
            Self::MiniMaxM2 => invoke,
            Self::DeepSeekV32 => dsml,
            Self::DeepSeekV4 => TagForm {
                openers: &["<｜DSML｜tool_calls>", "<｜DSML｜invoke name="],
                closers: &["</｜DSML｜tool_calls>"],
                ..dsml
            },
            Self::Glm => TagForm {
                openers: &["<tool_call>"],
                closers: &["</tool_call>"],
                function_open: "",
                function_close: "</tool_call>",
                key_open: "<arg_key>",
                key_close: "</arg_key>",
                value_open: "<arg_value>",
                value_close: "</arg_value>",
                has_lines: false,
            },
            _ => return None,
        })
    }

    fn sections(self) -> Option<SectionForm> {
        let deepseek = |head| SectionForm {
            openers: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
            closers: &["<｜tool▁calls▁end｜>"],
            call_open: "<｜tool▁call▁begin｜>",
            separator: "<｜tool▁sep｜>",
            call_close: "<｜tool▁call▁end｜>",
            head,
        };
        Some(match self {
            Self::DeepSeekV3 => deepseek(HeadForm::KindThenName),
            Self::DeepSeekV31 => deepseek(HeadForm::Name),
            Self::KimiK2 => SectionForm {
                openers: &[
                    "<|tool_calls_section_begin|>",
                    "<|tool_call_section_begin|>",
                    "<|tool_call_begin|>",
                ],
                closers: &["<|tool_calls_section_end|>", "<|tool_call_section_end|>"],
                call_open: "<|tool_call_begin|>",
                separator: "<|tool_call_argument_begin|>",
                call_close: "<|tool_call_end|>",
                head: HeadForm::Id,
            },
            _ => return None,
        })
    }
}

/// A form in which reasoning is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReasoningFormat {
    /// `<think>…</think>`.
    Think,
    /// The same, and an answer begins inside.
    ThinkFirst,
    /// The same; a section of tool calls ends it too.
    KimiK25,
    /// `◁think▷…◁/think▷`.
    Kimi,
    /// `[THINK]…[/THINK]`.
    Mistral,
    /// `Here is my thought process: … Here is my response: …`.
    Granite,
    /// Nothing is split: `<think>` is put before the answer.
    AppendThink,
    /// `<|channel>thought … <channel|>`.
    Gemma4,
    /// The channel `analysis`.
    Harmony,
}

/// Forms of reasoning by the names that cards give them.
const REASONING_NAMES: &[(&str, ReasoningFormat)] = &[
    ("basic", ReasoningFormat::Think),
    ("qwen3", ReasoningFormat::Think),
    ("nemotron_deci", ReasoningFormat::Think),
    ("glm45", ReasoningFormat::Think),
    ("glm47", ReasoningFormat::Think),
    ("deepseek_v4", ReasoningFormat::Think),
    ("deepseekv4", ReasoningFormat::Think),
    ("deepseek_v41", ReasoningFormat::Think),
    ("minimax_m2", ReasoningFormat::Think),
    ("qwen3_coder", ReasoningFormat::Think),
    ("kimi_k2", ReasoningFormat::Think),
    ("deepseek_r1", ReasoningFormat::ThinkFirst),
    ("deepseek_v3", ReasoningFormat::ThinkFirst),
    ("deepseek_v3_1", ReasoningFormat::ThinkFirst),
    ("deepseek_v3_2", ReasoningFormat::ThinkFirst),
    ("step3", ReasoningFormat::ThinkFirst),
    ("nemotron_nano", ReasoningFormat::ThinkFirst),
    ("nemotron3", ReasoningFormat::ThinkFirst),
    ("nemotron_v3", ReasoningFormat::ThinkFirst),
    ("kimi_k25", ReasoningFormat::KimiK25),
    ("kimi", ReasoningFormat::Kimi),
    ("mistral", ReasoningFormat::Mistral),
    ("granite", ReasoningFormat::Granite),
    ("minimax_append_think", ReasoningFormat::AppendThink),
    ("gemma4", ReasoningFormat::Gemma4),
    ("gpt_oss", ReasoningFormat::Harmony),
    ("harmony", ReasoningFormat::Harmony),
    ("openai_gptoss", ReasoningFormat::Harmony),
];

impl ReasoningFormat {
    /// The form that a card names; none if it is not known.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase().replace('-', "_");
        let mut known = REASONING_NAMES.iter();
        known
            .find(|(known, _)| *known == name)
            .map(|(_, form)| *form)
    }

    /// The names that [`Self::named`] knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        REASONING_NAMES.iter().map(|(name, _)| *name)
    }

    /// Marks that a tokenizer may have as special tokens: they have to be seen.
    #[must_use]
    pub fn special(self) -> &'static [&'static str] {
        match self {
            Self::Harmony => harmony::SPECIAL,
            Self::Granite | Self::AppendThink => &[],
            Self::Mistral => &["[THINK]", "[/THINK]"],
            Self::Gemma4 => &["<|channel>", "<channel|>"],
            Self::Kimi => &["\u{25c1}think\u{25b7}", "\u{25c1}/think\u{25b7}"],
            Self::Think | Self::ThinkFirst | Self::KimiK25 => &["<think>", "</think>"],
        }
    }

    pub(crate) fn marks(self) -> Option<Marks> {
        let think = Marks {
            opens: &["<think>"],
            closes: &["</think>"],
            breaks: &[],
            is_first: false,
            prepend: None,
        };
        Some(match self {
            Self::Think => think,
            Self::ThinkFirst => Marks {
                is_first: true,
                ..think
            },
            Self::KimiK25 => Marks {
                is_first: true,
                breaks: &[
                    "<|tool_calls_section_begin|>",
                    "<|tool_call_section_begin|>",
                ],
                ..think
            },
            Self::Kimi => Marks {
                opens: &["\u{25c1}think\u{25b7}"],
                closes: &["\u{25c1}/think\u{25b7}"],
                ..think
            },
            Self::Mistral => Marks {
                opens: &["[THINK]"],
                closes: &["[/THINK]"],
                ..think
            },
            Self::Gemma4 => Marks {
                opens: &["<|channel>thought"],
                closes: &["<channel|>"],
                ..think
            },
            Self::Granite => Marks {
                opens: &["Here's my thought process:", "Here is my thought process:"],
                closes: &["Here's my response:", "Here is my response:"],
                ..think
            },
            Self::AppendThink => Marks {
                prepend: Some("<think>"),
                ..think
            },
            Self::Harmony => return None,
        })
    }
}
