//! Small hand-made streams: what each peer structure answers where the stream is not clean.
use index_bench::index::{Block, Ev, Index, Step};
use index_bench::peers::*;

/// A chain of n blocks under `salt`, with the peer's own sequence hashes.
fn chain(salt: u64, n: usize) -> Vec<Block> {
    use dynamo_kv_router::LocalBlockHash;
    use dynamo_kv_router::protocols::compute_next_seq_hash;
    let mut out: Vec<Block> = Vec::new();
    for i in 0..n {
        let local = index_bench::index::mix(salt * 1000 + i as u64 + 1);
        let seq = match out.last() {
            None => local,
            Some(p) => compute_next_seq_hash(p.seq, LocalBlockHash(local)),
        };
        out.push(Block { local, seq });
    }
    out
}

fn store(worker: u32, c: &[Block], from: usize, to: usize) -> Ev<'_> {
    Ev::Store {
        worker,
        parent: (from > 0).then(|| c[from - 1].seq),
        start: from as u32,
        blocks: &c[from..to],
    }
}

/// Plays the events, then asks for `ask` and prints the answer beside the exact one.
fn case<I: Index>(what: &str, evs: &[Ev<'_>], ask: &[Block], exact: &str) {
    let mut steps: Vec<Step<I::Event>> = evs.iter().map(|e| Step::Apply(I::event(*e))).collect();
    steps.push(Step::Mark(0));
    let mut idx = I::new(4);
    let r = idx.reader();
    let local: Vec<u64> = ask.iter().map(|b| b.local).collect();
    let seq: Vec<u64> = ask.iter().map(|b| b.seq).collect();
    let mut got = Vec::new();
    idx.drive(steps, &mut |_| {
        let mut out = I::Scores::default();
        I::find_matches(&r, I::query(&local, &seq), &mut out);
        I::each(&out, &mut |w, d| got.push((w, d)));
    });
    got.sort();
    let got = format!("{got:?}");
    println!(
        "{:<18} {:<62} got {:<22} exact {:<22} {}",
        I::NAME, what, got, exact, if got == exact { "" } else { "DIFFERS" }
    );
}

fn all<I: Index>() {
    let a = chain(1, 8);
    let rm = |i: std::ops::Range<usize>| -> Vec<u64> { a[i].iter().map(|b| b.seq).collect() };
    let r3 = rm(3..4);
    let r03 = rm(0..3);
    let r4 = rm(4..5);
    let unknown_then = [0xdead_u64, a[6].seq, a[7].seq];
    let rev: Vec<u64> = rm(4..8).into_iter().rev().collect();
    case::<I>("clean store 8", &[store(0, &a, 0, 8)], &a, "[(0, 8)]");
    case::<I>("duplicate store", &[store(0, &a, 0, 8), store(0, &a, 0, 8)], &a, "[(0, 8)]");
    case::<I>("duplicate store, then one removal of the tail", &[store(0, &a, 0, 8), store(0, &a, 0, 8), Ev::Remove { worker: 0, seqs: &rm(7..8) }], &a, "[(0, 7)]");
    case::<I>("child before parent, then parent", &[store(0, &a, 4, 8), store(0, &a, 0, 4)], &a, "[(0, 8)]");
    case::<I>("child before parent, parent held by another worker", &[store(1, &a, 0, 4), store(0, &a, 4, 8), store(0, &a, 0, 4)], &a, "[(0, 8), (1, 4)]");
    case::<I>("tail removed in reverse order", &[store(0, &a, 0, 8), Ev::Remove { worker: 0, seqs: &rev }], &a, "[(0, 4)]");
    case::<I>("middle block removed", &[store(0, &a, 0, 8), Ev::Remove { worker: 0, seqs: &r3 }], &a, "[(0, 3)]");
    case::<I>("middle block removed and stored again", &[store(0, &a, 0, 8), Ev::Remove { worker: 0, seqs: &r3 }, store(0, &a, 3, 4)], &a, "[(0, 8)]");
    case::<I>("middle removed, a block after the gap stored again (parent 4)", &[store(0, &a, 0, 8), Ev::Remove { worker: 0, seqs: &r3 }, store(0, &a, 5, 6), store(0, &a, 3, 4)], &a, "[(0, 8)]");
    case::<I>("head 0..3 removed", &[store(0, &a, 0, 8), Ev::Remove { worker: 0, seqs: &r03 }], &a, "[]");
    case::<I>("head removed and stored again", &[store(0, &a, 0, 8), Ev::Remove { worker: 0, seqs: &r03 }, store(0, &a, 0, 3)], &a, "[(0, 8)]");
    case::<I>("two workers; head of one removed", &[store(0, &a, 0, 8), store(1, &a, 0, 8), Ev::Remove { worker: 0, seqs: &r03 }], &a, "[(1, 8)]");
    // A branch forces separate nodes at position 4.
    let mut b = a[..4].to_vec();
    b.extend(chain_after(&a[3], 9, 4));
    case::<I>("branch at 4; middle 3 removed for 0 of two workers", &[store(0, &a, 0, 8), store(1, &a, 0, 8), store(1, &b, 4, 8), Ev::Remove { worker: 0, seqs: &r3 }], &a, "[(0, 3), (1, 8)]");
    case::<I>("  ... and 3 stored again", &[store(0, &a, 0, 8), store(1, &a, 0, 8), store(1, &b, 4, 8), Ev::Remove { worker: 0, seqs: &r3 }, store(0, &a, 3, 4)], &a, "[(0, 8), (1, 8)]");
    case::<I>("  ... 3 and 4 removed, only 3 stored again", &[store(0, &a, 0, 8), store(1, &a, 0, 8), store(1, &b, 4, 8), Ev::Remove { worker: 0, seqs: &r3 }, Ev::Remove { worker: 0, seqs: &r4 }, store(0, &a, 3, 4)], &a, "[(0, 4), (1, 8)]");
    // Equal-sized but different worker sets along the path.
    case::<I>("w0 holds 0..4 only, w1 holds 4..8 only (its head evicted)", &[store(1, &a, 0, 8), store(2, &b, 0, 8), store(0, &a, 0, 4), Ev::Remove { worker: 1, seqs: &rm(0..4) }, Ev::Remove { worker: 2, seqs: &rm(0..4) }], &a, "[(0, 4)]");
    case::<I>("removal batch with an unknown hash first", &[store(0, &a, 0, 8), Ev::Remove { worker: 0, seqs: &unknown_then }], &a, "[(0, 6)]");
    case::<I>("removal for a worker never seen", &[store(0, &a, 0, 8), Ev::Remove { worker: 3, seqs: &rm(0..8) }], &a, "[(0, 8)]");
    case::<I>("worker removed", &[store(0, &a, 0, 8), store(1, &a, 0, 8), Ev::RemoveWorker { worker: 0 }], &a, "[(1, 8)]");
    case::<I>("query diverges at 2 and then agrees again", &[store(0, &a, 0, 8)], &{ let mut q = a.clone(); q[2].local ^= 1; rehash(&mut q); q }, "[(0, 2)]");
}

fn chain_after(parent: &Block, salt: u64, n: usize) -> Vec<Block> {
    use dynamo_kv_router::LocalBlockHash;
    use dynamo_kv_router::protocols::compute_next_seq_hash;
    let mut p = parent.seq;
    (0..n)
        .map(|i| {
            let local = index_bench::index::mix(salt * 1000 + i as u64 + 1);
            p = compute_next_seq_hash(p, LocalBlockHash(local));
            Block { local, seq: p }
        })
        .collect()
}

fn rehash(q: &mut [Block]) {
    use dynamo_kv_router::LocalBlockHash;
    use dynamo_kv_router::protocols::compute_next_seq_hash;
    for i in 0..q.len() {
        q[i].seq = if i == 0 {
            q[0].local
        } else {
            compute_next_seq_hash(q[i - 1].seq, LocalBlockHash(q[i].local))
        };
    }
}

fn main() {
    all::<Radix>();
    all::<Crtc>();
    all::<Positional>();
    all::<PositionalBinary>();
    all::<index_bench::ours::Kvasir>();
}
