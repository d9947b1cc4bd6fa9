//! What went wrong last on a thread, in words.

use std::cell::RefCell;

thread_local! {
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Keeps a message for whoever asks on this thread.
pub(crate) fn set(message: impl Into<String>) {
    let message = message.into();
    tracing::warn!("{message}");
    // Destructors of a thread may call when it is gone.
    let _ = LAST.try_with(|last| last.replace(message));
}

/// Does something with the last message.
pub(crate) fn with<T>(act: impl FnOnce(&str) -> T) -> Option<T> {
    LAST.try_with(|last| act(&last.borrow())).ok()
}
