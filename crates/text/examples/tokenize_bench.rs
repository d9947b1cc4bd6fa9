//! Does a conversation of 32k tokens that grows by 500 a turn cost under a millisecond a turn?
//!
//! Real text: this repository's own sources and documents, cut into messages of about 500 tokens, user and
//! assistant in turn. Each turn the whole conversation is rendered and tokenized, as a router gets it. Rivals in the same
//! run: the reference library with and without the cache, the quick one with and without it. Tokens are compared with
//! the reference's first. Reports median, 90th percentile and maximum: a mean hides the cold turn.
//!
//! A second table: what one request costs from its body to its tokens, repeated (so that text is cached).
//!
//! `cargo run --release -p kvasir-text --features fast --example tokenize_bench -- FOLDER`, where FOLDER holds a
//! `tokenizer.json` with a chat template.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
#![expect(clippy::print_stdout, reason = "its report")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvasir_openai::Scan;
use kvasir_text::{ChatInput, TextModel, Tokenizer};

const TURNS: usize = 16;
const CONVERSATIONS: usize = 8;
const START_TOKENS: usize = 29_000;
/// Bytes of a message; two messages are a turn of about 500 tokens.
const MESSAGE_BYTES: usize = 900;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args()
        .nth(1)
        .ok_or("name a folder with a tokenizer.json")?;
    let folder = Path::new(&folder);
    let text = corpus(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")))?;
    let json = std::fs::read(folder.join("tokenizer.json"))?;
    let reference = Tokenizer::reference_only(&json)?;
    let plain = TextModel::load_with(folder, 0)?;
    let cached = TextModel::load(folder)?;
    println!(
        "corpus {} bytes; {:?}",
        text.len(),
        cached.tokenizer().status()
    );
    let conversations: Vec<Vec<String>> = (0..CONVERSATIONS)
        .map(|c| messages(&text, c * text.len() / CONVERSATIONS))
        .collect();

    let mut rows = [
        Row::new("render"),
        Row::new("reference"),
        Row::new("quick"),
        Row::new("quick + cache"),
    ];
    let (mut tokens, mut grown, mut first) = (0, 0, Row::new("quick + cache, first turn"));
    for (c, all) in conversations.iter().enumerate() {
        let (mut count, mut last) = (0, 0);
        for turn in 0..TURNS {
            let list = if turn == 0 {
                start(all, &cached)?
            } else {
                count + 2
            };
            count = list;
            let body = format!("[{}]", all[..count.min(all.len())].join(","));
            let input = ChatInput {
                messages: &body,
                add_generation_prompt: true,
                ..ChatInput::default()
            };
            let prompt = rows[0].time(|| cached.render(&input))?;
            let quick = rows[2].time(|| plain.encode_chat(&prompt))?;
            let row = if turn == 0 { &mut first } else { &mut rows[3] };
            let ids = row.time(|| cached.encode_chat(&prompt))?;
            if c < 2 {
                let want = rows[1].time(|| reference.encode(&prompt, false))?;
                assert_eq!(ids, want, "the cache changed tokens");
            }
            assert_eq!(ids, quick);
            tokens = tokens.max(ids.len());
            grown += if turn == 0 { 0 } else { ids.len() - last };
            last = ids.len();
        }
    }
    println!(
        "longest {tokens} tokens, {} a turn on average",
        grown / CONVERSATIONS / (TURNS - 1)
    );
    println!("| µs a turn | median | p90 | max | turns |\n| --- | --- | --- | --- | --- |");
    for row in rows.iter_mut().chain([&mut first]) {
        row.print();
    }
    println!("{:?}", cached.cache_stats());
    one_request(&cached, &text)
}

/// Median times over 200 repetitions of one body.
fn one_request(model: &TextModel, corpus: &str) -> Result<(), Box<dyn Error>> {
    let words = [
        "alpha", "river", "stone", "cloud", "paper", "green", "seven",
    ];
    let words: Vec<&str> = (0..4000)
        .map(|i| words[(i * 5 + i / 3) % words.len()])
        .collect();
    let bodies = [
        ("short", "Say hello to the harbour.".to_owned()),
        ("4,000 words", words.join(" ")),
        ("12 kB of code", corpus[..floor(corpus, 12_000)].to_owned()),
    ];
    println!("| µs a request | body bytes | tokens | scan | scan and render | tokenize, cached |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for (name, content) in bodies {
        let body = serde_json::json!({
            "model": "m", "stream": true, "max_tokens": 16,
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}],
        });
        let body = body.to_string();
        let render = || {
            let scan = Scan::parse(body.as_bytes())?;
            let messages = scan.messages().ok_or("messages")?;
            let input = ChatInput {
                messages,
                add_generation_prompt: true,
                ..ChatInput::default()
            };
            Ok::<String, Box<dyn Error>>(model.render(&input)?)
        };
        let prompt = render()?;
        let tokens = model.encode_chat(&prompt)?.len();
        let times = [
            median(|| Scan::parse(body.as_bytes()).is_ok_and(|scan| scan.stream())),
            median(|| render().is_ok()),
            median(|| model.encode_chat(&prompt).is_ok()),
        ];
        let [scan, render, encode] = times.map(|t| t.as_nanos() as f64 / 1000.0);
        println!(
            "| {name} | {} | {tokens} | {scan:.1} | {render:.1} | {encode:.1} |",
            body.len()
        );
    }
    Ok(())
}

fn median(mut work: impl FnMut() -> bool) -> Duration {
    let mut row = Row::new("");
    for _ in 0..200 {
        assert!(row.time(&mut work), "it worked before");
    }
    row.times.sort_unstable();
    row.times[100]
}

/// How many messages make about `START_TOKENS` tokens.
fn start(all: &[String], model: &TextModel) -> Result<usize, Box<dyn Error>> {
    let sample = all[..20].concat();
    let each = model.tokenizer().encode(&sample, false)?.len() / 20;
    Ok((START_TOKENS / each.max(1)).min(all.len() - 2 * TURNS) / 2 * 2 + 1)
}

struct Row {
    name: &'static str,
    times: Vec<Duration>,
}

impl Row {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            times: Vec::new(),
        }
    }

    fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let out = work();
        self.times.push(begin.elapsed());
        out
    }

    fn print(&mut self) {
        self.times.sort_unstable();
        let n = self.times.len();
        let at = |share: f64| self.times[((n - 1) as f64 * share) as usize].as_micros();
        println!(
            "| {} | {} | {} | {} | {n} |",
            self.name,
            at(0.5),
            at(0.9),
            at(1.0)
        );
    }
}

/// The repository's Rust and Markdown, in a fixed order.
fn corpus(root: &Path) -> Result<String, Box<dyn Error>> {
    let mut files = Vec::new();
    for folder in ["crates", "docs", "xtask"] {
        walk(&root.join(folder), &mut files)?;
    }
    files.sort();
    let mut text = String::new();
    for file in files {
        text += &std::fs::read_to_string(file)?;
    }
    Ok(text)
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            walk(&path, files)?;
        } else if path.extension().is_some_and(|e| e == "rs" || e == "md") {
            files.push(path);
        }
    }
    Ok(())
}

/// The corpus from `offset` on and round again, as JSON messages.
fn messages(text: &str, offset: usize) -> Vec<String> {
    let mut start = floor(text, offset);
    let mut list = Vec::new();
    for i in 0..400 {
        if start + MESSAGE_BYTES > text.len() {
            start = 0;
        }
        let end = floor(text, start + MESSAGE_BYTES);
        let role = if i % 2 == 0 { "user" } else { "assistant" };
        let message = serde_json::json!({"role": role, "content": &text[start..end]});
        list.push(message.to_string());
        start = end;
    }
    list
}

fn floor(text: &str, at: usize) -> usize {
    (0..=at)
        .rev()
        .find(|at| text.is_char_boundary(*at))
        .unwrap_or(0)
}
