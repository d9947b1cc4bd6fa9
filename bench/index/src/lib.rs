//! Workload generation, the `Index` trait, adapters, and small measuring tools.
pub mod alloc;
pub mod index;
pub mod ours;
pub mod peers;
pub mod sim;
pub mod stats;
pub mod trace;
