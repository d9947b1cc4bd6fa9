//! Target `request_plane` of `kvasir-fuzzing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvasir_fuzzing::check("request_plane", bytes));
