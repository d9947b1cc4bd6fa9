//! Memory that callers hold until they give it back.
//!
//! What is lent is remembered by its address: what comes back twice, or was never lent, is left alone.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// What a caller may hold. Vectors are moved into here after their address was taken: they keep it.
enum Loan {
    Tokens(Vec<u32>),
    Bytes(Vec<u8>),
}

/// All that is lent.
pub(crate) struct Loans(OnceLock<Mutex<HashMap<usize, Loan>>>);

impl Loans {
    pub(crate) const fn new() -> Self {
        Self(OnceLock::new())
    }

    fn lent(&self) -> MutexGuard<'_, HashMap<usize, Loan>> {
        let lent = self.0.get_or_init(Mutex::default);
        lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lends tokens; null if there are none.
    pub(crate) fn tokens(&self, mut tokens: Vec<u32>) -> *mut u32 {
        if tokens.is_empty() {
            return std::ptr::null_mut();
        }
        let pointer = tokens.as_mut_ptr();
        self.lent().insert(pointer.addr(), Loan::Tokens(tokens));
        pointer
    }

    /// Lends bytes; null if there are none.
    pub(crate) fn bytes(&self, mut bytes: Vec<u8>) -> *mut u8 {
        if bytes.is_empty() {
            return std::ptr::null_mut();
        }
        let pointer = bytes.as_mut_ptr();
        self.lent().insert(pointer.addr(), Loan::Bytes(bytes));
        pointer
    }

    /// Takes back what was lent at an address.
    pub(crate) fn take_back(&self, address: usize) {
        let loan = self.lent().remove(&address);
        match loan {
            Some(Loan::Tokens(tokens)) => drop(tokens),
            Some(Loan::Bytes(bytes)) => drop(bytes),
            None => {}
        }
    }
}
