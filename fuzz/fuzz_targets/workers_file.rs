//! Target `workers_file` of `kvasir-fuzzing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvasir_fuzzing::check("workers_file", bytes));
