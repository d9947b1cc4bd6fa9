//! Target `event_plane` of `kvasir-fuzzing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvasir_fuzzing::check("event_plane", bytes));
