//! Which prompt blocks are active on which slot, shared by hash.
//!
//! All active prompts of all slots form one compressed trie: a node is a run of blocks, its owners are the
//! slots with an active prompt through it. Owners of a child are owners of its parent, so asking for a new
//! prompt on *all* slots costs one walk down plus one visit per slot, not their product.
//!
//! Sequence hashes are chained: equal hashes at one position mean equal prefixes, so a run is compared by
//! bisection. Hashes that are not chained give odd depths but never a wrong release: a prompt is released
//! along the nodes it was booked on.

use std::sync::Arc;

use kvasir_types::SequenceHash;

use super::list::NONE;
use crate::map::FastMap;

/// One slot's share of a node.
#[derive(Clone, Copy, Debug)]
struct Owner {
    slot: u32,
    /// Active prompts of the slot through the node.
    count: u32,
    /// Exclusive or of those prompts' numbers: the number itself where there is one.
    prompts: u32,
}

/// A node's owners, sorted by slot. Most nodes have one, which needs no memory of its own.
#[derive(Clone, Debug)]
enum Owners {
    One(Owner),
    Many(Vec<Owner>),
}

impl Owners {
    fn as_slice(&self) -> &[Owner] {
        match self {
            Self::One(owner) => std::slice::from_ref(owner),
            Self::Many(list) => list,
        }
    }

    fn add(&mut self, slot: u32, prompt: u32) -> Owner {
        let new = Owner {
            slot,
            count: 1,
            prompts: prompt,
        };
        if let Self::One(owner) = self
            && owner.slot != slot
        {
            *self = Self::Many(vec![*owner]);
        }
        let owner = match self {
            Self::One(owner) => owner,
            Self::Many(list) => match list.binary_search_by_key(&slot, |o| o.slot) {
                Ok(at) => &mut list[at],
                Err(at) => {
                    list.insert(at, new);
                    return new;
                }
            },
        };
        owner.count += 1;
        owner.prompts ^= prompt;
        *owner
    }

    /// What is left of the slot's share; a count of 0 means that it is gone.
    fn remove(&mut self, slot: u32, prompt: u32) -> Owner {
        match self {
            Self::One(owner) => {
                owner.count -= 1;
                owner.prompts ^= prompt;
                *owner
            }
            Self::Many(list) => match list.binary_search_by_key(&slot, |o| o.slot) {
                Ok(at) => {
                    let owner = &mut list[at];
                    owner.count -= 1;
                    owner.prompts ^= prompt;
                    let left = *owner;
                    if left.count == 0 {
                        list.remove(at);
                    }
                    left
                }
                Err(_) => Owner {
                    slot,
                    count: 0,
                    prompts: 0,
                },
            },
        }
    }

    fn is_empty(&self) -> bool {
        self.as_slice().iter().all(|o| o.count == 0)
    }
}

/// A run of blocks `start..end` of some active prompt.
#[derive(Clone, Debug)]
struct Node {
    /// The name its parent knows it by: its first hash when it was made.
    key: SequenceHash,
    hashes: Arc<[SequenceHash]>,
    start: u32,
    end: u32,
    parent: u32,
    owners: Owners,
    /// Active prompts whose last block is this run's last.
    ends: u32,
    kids: u32,
    /// Exclusive or of the children's ids: the child itself where there is one.
    kids_xor: u32,
}

impl Node {
    fn len(&self) -> u32 {
        self.end - self.start
    }
}

/// What a booking or a release changed for its slot and for prompts on it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TrieChange {
    /// Blocks that became active on the slot (or, on release, inactive).
    pub(super) blocks: u32,
    /// Of the prompt itself: blocks that no other prompt of the slot has (on booking only).
    pub(super) exclusive: u32,
}

/// A prompt other than the one booked or released whose number of exclusive blocks changed.
pub(super) type ExclusiveChange = (u32, i64);

/// The trie.
#[derive(Clone, Debug, Default)]
pub(super) struct PrefixTrie {
    nodes: Vec<Option<Node>>,
    vacant: Vec<u32>,
    children: FastMap<(u32, SequenceHash), u32>,
    path: Vec<(u32, u32)>,
}

impl PrefixTrie {
    /// Nodes in use; 0 when nothing is active.
    pub(super) fn nodes(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    fn node(&self, at: u32) -> Option<&Node> {
        self.nodes.get(at as usize)?.as_ref()
    }

    fn node_mut(&mut self, at: u32) -> Option<&mut Node> {
        self.nodes.get_mut(at as usize)?.as_mut()
    }

    /// The names of the prompt that ends with this node.
    pub(super) fn sequence(&self, tail: u32) -> Vec<SequenceHash> {
        let node = self.node(tail);
        let names = node.and_then(|node| node.hashes.get(..node.end as usize));
        names.unwrap_or_default().to_vec()
    }

    fn insert(&mut self, node: Node) -> u32 {
        let (parent, key) = (node.parent, node.key);
        let at = match self.vacant.pop() {
            Some(at) => {
                self.nodes[at as usize] = Some(node);
                at
            }
            None => {
                self.nodes.push(Some(node));
                self.nodes.len() as u32 - 1
            }
        };
        self.children.insert((parent, key), at);
        at
    }

    /// Fills `path` with the nodes along `seq` and how deep each matches.
    fn walk(&mut self, seq: &[SequenceHash]) {
        self.path.clear();
        let (mut parent, mut depth) = (NONE, 0usize);
        while let Some(&next) = seq.get(depth) {
            let Some(&at) = self.children.get(&(parent, next)) else {
                break;
            };
            let Some(node) = self.nodes.get(at as usize).and_then(Option::as_ref) else {
                break;
            };
            let run = &node.hashes[node.start as usize..node.end as usize];
            let matched = common(run, &seq[depth..]);
            depth += matched;
            self.path.push((at, depth as u32));
            if matched < run.len() {
                break;
            }
            parent = at;
        }
    }

    /// Calls `found(slot, depth)` once for each slot on which a prefix of `seq` is active, with its length.
    pub(super) fn depths(&mut self, seq: &[SequenceHash], mut found: impl FnMut(u32, u32) -> bool) {
        self.walk(seq);
        let mut seen = 0;
        for &(at, depth) in self.path.iter().rev() {
            let Some(node) = self.nodes.get(at as usize).and_then(Option::as_ref) else {
                continue;
            };
            let owners = node.owners.as_slice();
            if owners.len() == seen {
                continue;
            }
            seen += owners.iter().filter(|o| found(o.slot, depth)).count();
        }
    }

    /// Books `seq` (not empty) for prompt number `prompt` on `slot`. Gives the node to release it by.
    pub(super) fn acquire(
        &mut self,
        seq: &Arc<[SequenceHash]>,
        slot: u32,
        prompt: u32,
        changes: &mut Vec<ExclusiveChange>,
    ) -> (u32, TrieChange) {
        self.walk(seq);
        let mut change = TrieChange::default();
        let matched = self.path.last().map_or(0, |(_, depth)| *depth);
        let mut tail = self.split_last().unwrap_or(NONE);
        if (matched as usize) < seq.len() {
            let fresh = Node {
                key: seq[matched as usize],
                hashes: Arc::clone(seq),
                start: matched,
                end: seq.len() as u32,
                parent: tail,
                owners: Owners::One(Owner {
                    slot,
                    count: 1,
                    prompts: prompt,
                }),
                ends: 0,
                kids: 0,
                kids_xor: 0,
            };
            change.blocks = fresh.len();
            change.exclusive = fresh.len();
            let at = self.insert(fresh);
            self.adopt(tail, at);
            tail = at;
        }
        for &(at, _) in &self.path {
            let Some(node) = self.nodes.get_mut(at as usize).and_then(Option::as_mut) else {
                continue;
            };
            let len = node.len();
            let owner = node.owners.add(slot, prompt);
            match owner.count {
                1 => {
                    change.blocks += len;
                    change.exclusive += len;
                }
                2 => changes.push((owner.prompts ^ prompt, -i64::from(len))),
                _ => {}
            }
        }
        if let Some(node) = self.node_mut(tail) {
            node.ends += 1;
        }
        (tail, change)
    }

    fn adopt(&mut self, parent: u32, child: u32) {
        if let Some(node) = self.node_mut(parent) {
            node.kids += 1;
            node.kids_xor ^= child;
        }
    }

    fn disown(&mut self, parent: u32, child: u32) {
        if let Some(node) = self.node_mut(parent) {
            node.kids -= 1;
            node.kids_xor ^= child;
        }
    }

    /// Makes the last node of the path end where the match ends. The lower part keeps its id, so that
    /// prompts that end there stay where they are.
    fn split_last(&mut self) -> Option<u32> {
        let (at, depth) = *self.path.last()?;
        let node = self.node_mut(at)?;
        if depth == node.end {
            return Some(at);
        }
        let upper = Node {
            key: node.key,
            hashes: Arc::clone(&node.hashes),
            start: node.start,
            end: depth,
            parent: node.parent,
            owners: node.owners.clone(),
            ends: 0,
            kids: 1,
            kids_xor: at,
        };
        let parent = node.parent;
        node.start = depth;
        let lower_key = node.hashes[depth as usize];
        node.key = lower_key;
        let up = self.insert(upper);
        if let Some(node) = self.node_mut(at) {
            node.parent = up;
        }
        self.children.insert((up, lower_key), at);
        self.disown(parent, at);
        self.adopt(parent, up);
        if let Some(last) = self.path.last_mut() {
            *last = (up, depth);
        }
        Some(up)
    }

    /// Releases what `acquire` booked, given the node it returned.
    pub(super) fn release(
        &mut self,
        tail: u32,
        slot: u32,
        prompt: u32,
        changes: &mut Vec<ExclusiveChange>,
    ) -> TrieChange {
        let mut change = TrieChange::default();
        if let Some(node) = self.node_mut(tail) {
            node.ends -= 1;
        }
        let (mut at, mut lowest_left) = (tail, NONE);
        while let Some(node) = self.node_mut(at) {
            let (len, parent) = (node.len(), node.parent);
            let left = node.owners.remove(slot, prompt);
            match left.count {
                0 => change.blocks += len,
                1 => changes.push((left.prompts, i64::from(len))),
                _ => {}
            }
            if node.owners.is_empty() {
                self.drop_leaf(at);
            } else if lowest_left == NONE {
                lowest_left = at;
            }
            at = parent;
        }
        self.merge_down(lowest_left);
        change
    }

    fn drop_leaf(&mut self, at: u32) {
        let Some(node) = self.nodes.get_mut(at as usize).and_then(Option::take) else {
            return;
        };
        debug_assert_eq!(
            (node.ends, node.kids),
            (0, 0),
            "a run without owners has no heirs"
        );
        self.children.remove(&(node.parent, node.key));
        self.disown(node.parent, at);
        self.vacant.push(at);
    }

    /// Joins a node in which nothing ends with its only child.
    fn merge_down(&mut self, at: u32) {
        let Some(node) = self.node(at).filter(|n| n.ends == 0 && n.kids == 1) else {
            return;
        };
        let (child, parent, start, key) = (node.kids_xor, node.parent, node.start, node.key);
        let Some(lower) = self.node_mut(child) else {
            return;
        };
        let lower_key = std::mem::replace(&mut lower.key, key);
        lower.start = start;
        lower.parent = parent;
        self.children.remove(&(at, lower_key));
        self.nodes[at as usize] = None;
        self.vacant.push(at);
        self.children.insert((parent, key), child);
        self.disown(parent, at);
        self.adopt(parent, child);
    }
}

/// How many leading hashes agree; at least 1, as the first do.
fn common(run: &[SequenceHash], seq: &[SequenceHash]) -> usize {
    let (mut same, mut differ) = (1, run.len().min(seq.len()) + 1);
    if run.get(differ - 2) == seq.get(differ - 2) {
        return differ - 1;
    }
    while differ - same > 1 {
        let middle = same + (differ - same) / 2;
        if run.get(middle - 1) == seq.get(middle - 1) {
            same = middle;
        } else {
            differ = middle;
        }
    }
    same
}
