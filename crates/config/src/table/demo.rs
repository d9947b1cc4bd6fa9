//! Rows: the demo's own switches.

use crate::command::Scope;
use crate::spec::{Group, options, var};

options! { DEMO_ROWS, Group::Demo, Scope::DEMO;

    /// Mock engines to start.
    WORKERS: u32 = "workers" =>
        scope(Scope::DEMO.and(Scope::REPLAY).and(Scope::MOCKER)).env(&[var("KVASIR_DEMO_WORKERS")])
        .aliases(&["num-workers"]).default("4").default_note("4; 8 in replay, 1 in mocker").ints(1, 1024).common()
        .effective();

    /// Run each mock engine in a process of its own: found through a folder, asked over TCP, its events over ZeroMQ.
    PROCESSES: bool = "processes" =>
        env(&[var("KVASIR_DEMO_PROCESSES")]).default("false").effective();

    /// Compute prompts on half of the mock engines and answers on the others, each in a process of its own.
    DISAGG: bool = "disagg" =>
        env(&[var("KVASIR_DEMO_DISAGG")]).default("false").effective();

    /// Send sample conversations and print a live summary.
    TRAFFIC: bool = "traffic" =>
        env(&[var("KVASIR_DEMO_TRAFFIC")]).default("false").common().effective();
}
