//! Changes of inputs: what a fuzzer does without looking at the program, from a seed.

use kvasir_types::Rng;

/// Makes new inputs from kept ones.
#[derive(Debug)]
pub struct Mutator<'a> {
    rng: Rng,
    corpus: &'a [Vec<u8>],
    words: &'a [&'a str],
    len_max: usize,
}

/// Most changes of one input.
const CHANGES_MAX: u64 = 5;
/// One input in so many is noise.
const NOISE: u64 = 25;

impl<'a> Mutator<'a> {
    /// One whose inputs all come from `seed`.
    #[must_use]
    pub fn new(seed: u64, corpus: &'a [Vec<u8>], words: &'a [&'a str], len_max: usize) -> Self {
        Self {
            rng: Rng::new(seed),
            corpus,
            words,
            len_max,
        }
    }

    /// The next input.
    pub fn input(&mut self) -> Vec<u8> {
        let mut bytes = if self.corpus.is_empty() || self.rng.below(NOISE) == 0 {
            (0..self.rng.below(80))
                .map(|_| self.rng.next_u64() as u8)
                .collect()
        } else {
            self.kept().to_vec()
        };
        for _ in 0..=self.rng.below(CHANGES_MAX) {
            self.change(&mut bytes);
        }
        bytes.truncate(self.len_max);
        bytes
    }

    fn kept(&mut self) -> &'a [u8] {
        let at = self.rng.below(self.corpus.len() as u64) as usize;
        self.corpus.get(at).map_or(&[], Vec::as_slice)
    }

    /// A place in `bytes`, its end included.
    fn place(&mut self, bytes: &[u8]) -> usize {
        self.rng.below(bytes.len() as u64 + 1) as usize
    }

    fn range(&mut self, bytes: &[u8], longest: u64) -> std::ops::Range<usize> {
        let start = self.place(bytes);
        let len = 1 + self.rng.below(longest) as usize;
        start..bytes.len().min(start + len)
    }

    fn change(&mut self, bytes: &mut Vec<u8>) {
        let at = self.place(bytes);
        match self.rng.below(10) {
            0 => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = self.rng.next_u64() as u8;
                }
            }
            1 => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << self.rng.below(8);
                }
            }
            2 => bytes.insert(at, self.rng.next_u64() as u8),
            3 => drop(bytes.drain(self.range(bytes, 12))),
            4 if self.rng.below(4) == 0 => bytes.truncate(at),
            5 => {
                let copied = self.range(bytes, 60);
                let copied = bytes[copied].to_vec();
                bytes.splice(at..at, copied);
            }
            6 if !self.corpus.is_empty() => {
                let other = self.kept();
                let part = self.range(other, 120);
                bytes.splice(at..at, other[part].iter().copied());
            }
            // A number that is off by little, or far too great.
            7 => {
                if let Some(byte) = bytes.iter_mut().skip(at).find(|byte| byte.is_ascii_digit()) {
                    *byte = b'0' + self.rng.below(10) as u8;
                }
            }
            _ if !self.words.is_empty() => {
                let word = self.words[self.rng.below(self.words.len() as u64) as usize];
                bytes.splice(at..at, word.bytes());
            }
            _ => {
                let filled = self.range(bytes, 4);
                let value = [0, 1, 0x7f, 0x80, 0xff][self.rng.below(5) as usize];
                bytes[filled].fill(value);
            }
        }
    }
}
