//! Target `answer_text` of `kvasir-fuzzing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvasir_fuzzing::check("answer_text", bytes));
