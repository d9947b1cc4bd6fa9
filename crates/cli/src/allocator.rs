//! The allocator of the process, and the one thing that is asked of it.
//!
//! The one place with `unsafe`. Its proof: `mi_collect` takes a flag and no pointer; it works on the allocator's own lists of the calling
//! thread and of memory that no thread owns any more, frees nothing that is in use, and may be called by any thread at any time.
#![expect(unsafe_code, reason = "a call into the allocator; the proof is above")]

/// Thousands of streams come and go; the C library's allocator keeps what they held and more (decision 0074).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Gives back to the system what this thread has freed. A tokenizer of 54 MB leaves 110 MB behind that were needed to make it.
pub(crate) fn give_back() {
    // SAFETY: see the proof at the head of this file.
    unsafe { libmimalloc_sys::mi_collect(true) }
}
