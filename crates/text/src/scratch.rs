//! Buffers that a thread uses again and again.
//!
//! Answers one question: where does the next prompt's text go? A prompt of 4,000 tokens is printed into 19 KB and its tokens
//! take 16 KB; both are needed for microseconds. An allocator hands out other memory each time, which has left the caches.
//!
//! What always holds: a thread keeps one buffer of each kind, of at most [`KEPT_BYTES_MAX`]; what is handed out is empty.

use std::cell::Cell;

use kvasir_types::Token;

/// A larger buffer is given back to the allocator.
const KEPT_BYTES_MAX: usize = 256 << 10;

thread_local! {
    static TEXT: Cell<String> = const { Cell::new(String::new()) };
    static TOKENS: Cell<Vec<Token>> = const { Cell::new(Vec::new()) };
}

/// An empty text with room for so many bytes.
pub(crate) fn take_text(bytes: usize) -> String {
    let mut text = TEXT.try_with(Cell::take).unwrap_or_default();
    text.clear();
    text.reserve(bytes);
    text
}

/// Keeps a text's buffer for the next on this thread.
pub(crate) fn give_text(text: String) {
    if text.capacity() <= KEPT_BYTES_MAX {
        let _ = TEXT.try_with(|kept| kept.set(text));
    }
}

/// No tokens, with room for so many.
pub(crate) fn take_tokens(count: usize) -> Vec<Token> {
    let mut tokens = TOKENS.try_with(Cell::take).unwrap_or_default();
    tokens.clear();
    tokens.reserve(count);
    tokens
}

/// Keeps the buffer of tokens that are no longer needed for the next prompt on this thread.
pub fn recycle_tokens(tokens: Vec<Token>) {
    if tokens.capacity() * size_of::<Token>() <= KEPT_BYTES_MAX {
        let _ = TOKENS.try_with(|kept| kept.set(tokens));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_unless_it_is_large() {
        let mut text = take_text(100);
        text.push_str("abc");
        let at = text.as_ptr();
        give_text(text);
        let again = take_text(50);
        assert!(again.is_empty() && again.as_ptr() == at);
        let mut tokens = take_tokens(10);
        tokens.push(1);
        let at = tokens.as_ptr();
        recycle_tokens(tokens);
        let again = take_tokens(1);
        assert!(again.is_empty() && again.as_ptr() == at);
        recycle_tokens(Vec::with_capacity(KEPT_BYTES_MAX));
        assert_eq!(take_tokens(0).capacity(), 0);
    }
}
