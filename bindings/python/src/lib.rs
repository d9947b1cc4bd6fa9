//! Kvasir from Python.
//!
//! Answers one question: what does a Python program see of the router? This crate is the module `kvasir._native`; what programs import
//! (`kvasir`, `kvasir.llm`, `kvasir.runtime`) is the typed Python around it, in `python/kvasir`. Nothing is decided here: the brain,
//! the index and the hashes are those that the server runs.
//!
//! What always holds: a mistake of the caller is an exception that says what to change; no lock is held while Python runs; `unsafe` is
//! in `lists` and nowhere else.
//!
//! Elsewhere: the server (`kvasir-cli`), the brain (`kvasir-router`), the index (`kvasir-index`).

mod client;
mod config;
mod context;
mod decision;
mod errors;
mod hashing;
mod indexes;
mod kv_router;
mod lists;
mod models;
mod passes;
mod planes;
mod process;
mod publish;
mod readers;
mod router;
mod selection;
mod serve;
mod stream;
mod trees;
mod values;

use pyo3::prelude::*;

/// What the package `kvasir` is made from; not for programs.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<client::Caller>()?;
    module.add_class::<config::KvRouterConfig>()?;
    module.add_class::<context::Cancellation>()?;
    module.add_class::<decision::Candidate>()?;
    module.add_class::<decision::Decision>()?;
    module.add_class::<indexes::ApproxKvIndexer>()?;
    module.add_class::<indexes::OverlapScores>()?;
    module.add_class::<indexes::RadixTree>()?;
    module.add_class::<kv_router::EndpointRouter>()?;
    module.add_class::<passes::PassReader>()?;
    module.add_class::<passes::PassRelay>()?;
    module.add_class::<passes::PassReports>()?;
    module.add_class::<planes::Runtime>()?;
    module.add_class::<publish::CacheEvents>()?;
    module.add_class::<publish::LoadReports>()?;
    module.add_class::<readers::CacheReader>()?;
    module.add_class::<readers::EngineEvents>()?;
    module.add_class::<router::Router>()?;
    module.add_class::<selection::Selection>()?;
    module.add_class::<serve::Reply>()?;
    module.add_class::<serve::Served>()?;
    module.add_class::<stream::Annotated>()?;
    module.add_class::<stream::Answer>()?;
    module.add_function(wrap_pyfunction!(
        hashing::compute_block_hash_for_seq,
        module
    )?)?;
    module.add_function(wrap_pyfunction!(
        hashing::compute_seq_hash_for_block,
        module
    )?)?;
    module.add_function(wrap_pyfunction!(hashing::lora_name_to_id, module)?)?;
    module.add_function(wrap_pyfunction!(
        models::get_reasoning_parser_names,
        module
    )?)?;
    module.add_function(wrap_pyfunction!(models::get_tool_parser_names, module)?)?;
    module.add_function(wrap_pyfunction!(models::announce_model, module)?)?;
    module.add_function(wrap_pyfunction!(models::withdraw_model, module)?)?;
    module.add_function(wrap_pyfunction!(process::settle, module)?)?;
    module.add_function(wrap_pyfunction!(process::shut_down, module)?)?;
    module.add_function(wrap_pyfunction!(process::task_count, module)?)?;
    module.add_function(wrap_pyfunction!(publish::chain_hashes, module)?)?;
    module.add_function(wrap_pyfunction!(publish::open_load, module)?)?;
    module.add_function(wrap_pyfunction!(serve::serve, module)?)?;
    Ok(())
}

/// Python gives memory at multiples of 16: whatever wants more lies beside its object.
const fn fits<T>() {
    assert!(align_of::<T>() <= 16);
}

const _: () = {
    fits::<client::Caller>();
    fits::<indexes::ApproxKvIndexer>();
    fits::<indexes::RadixTree>();
    fits::<kv_router::EndpointRouter>();
    fits::<passes::PassReader>();
    fits::<passes::PassRelay>();
    fits::<passes::PassReports>();
    fits::<planes::Runtime>();
    fits::<publish::CacheEvents>();
    fits::<publish::LoadReports>();
    fits::<readers::CacheReader>();
    fits::<readers::EngineEvents>();
    fits::<router::Router>();
    fits::<selection::Selection>();
    fits::<serve::Reply>();
    fits::<serve::Served>();
    fits::<stream::Answer>();
};
