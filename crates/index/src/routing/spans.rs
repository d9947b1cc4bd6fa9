//! What one decision added: consecutive blocks of one path on one rank, with when each of them goes.
//!
//! A decision confirms a prompt from its first block on, so along a path expiries never grow: within a span they
//! are a few steps, and what hangs on a block goes no later than the block.

use kvasir_types::WorkerRank;

use super::ExpiryTick;

/// A span by itself: not one that takes its place later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SpanId {
    at: u32,
    generation: u32,
}

/// Expiry of the blocks before `len` that no step before covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) len: u32,
    pub(super) expiry: ExpiryTick,
}

#[derive(Debug)]
pub(super) struct Span {
    pub(super) rank: WorkerRank,
    pub(super) slot: u32,
    /// Depth of its first block.
    pub(super) start: u32,
    /// Blocks go from its end.
    pub(super) names: Vec<u64>,
    /// Lengths grow up to that of `names`, expiries shrink. At least one.
    pub(super) steps: Vec<Step>,
    /// What it hangs on.
    pub(super) parent: Option<SpanId>,
    /// How many hang on it.
    pub(super) children: u32,
}

impl Span {
    /// Makes the first `len` blocks, of which there are so many, stay until `expiry` at least.
    pub(super) fn confirm(&mut self, len: u32, expiry: ExpiryTick) {
        let longer = self.steps.partition_point(|s| s.expiry > expiry);
        let covering = self.steps.iter().rev().find(|s| s.expiry >= expiry);
        if covering.map_or(0, |s| s.len) < len {
            let until = self.steps.partition_point(|s| s.len <= len);
            self.steps.splice(longer..until, [Step { len, expiry }]);
        }
    }

    /// When its last block goes, and from where on the blocks go then.
    pub(super) fn due(&self) -> (ExpiryTick, u32) {
        match self.steps.as_slice() {
            [.., before, last] => (last.expiry, before.len),
            [last] => (last.expiry, 0),
            [] => (0, 0),
        }
    }

    /// Takes blocks off its end; `len` are left.
    pub(super) fn shorten(&mut self, len: u32) {
        self.names.truncate(len as usize);
        if self.names.len() * 2 < self.names.capacity() {
            self.names.shrink_to_fit();
        }
        self.steps
            .truncate(self.steps.partition_point(|s| s.len < len) + 1);
        if let Some(last) = self.steps.last_mut() {
            last.len = last.len.min(len);
        }
    }

    pub(super) fn len(&self) -> u32 {
        self.names.len() as u32
    }

    /// Bytes on the heap.
    pub(super) fn heap(&self) -> usize {
        self.names.capacity() * 8 + self.steps.capacity() * size_of::<Step>()
    }
}

/// Spans that are made and dropped together.
const CHUNK: usize = 256;

/// All spans. Grows by chunks: no span is moved to make room for another.
#[derive(Debug, Default)]
pub(super) struct Spans {
    chunks: Vec<Vec<Place>>,
    free: Vec<u32>,
    /// How many there were ever.
    generations: u32,
}

/// Where a span may be.
#[derive(Debug)]
struct Place {
    /// Which of all spans it is.
    generation: u32,
    span: Option<Span>,
}

impl Spans {
    pub(super) fn insert(&mut self, span: Span) -> SpanId {
        self.generations = self.generations.wrapping_add(1);
        let new = Place {
            generation: self.generations,
            span: Some(span),
        };
        let (generation, at) = (self.generations, self.free.pop());
        if let Some(at) = at
            && let Some(place) = self.place(at)
        {
            *place = new;
            return SpanId { at, generation };
        }
        let at = match self.chunks.last() {
            Some(last) if last.len() < CHUNK => (self.chunks.len() - 1) * CHUNK + last.len(),
            _ => self.chunks.len() * CHUNK,
        };
        if at.is_multiple_of(CHUNK) {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        self.chunks[at / CHUNK].push(new);
        let at = at as u32;
        SpanId { at, generation }
    }

    /// Gives all memory back. No id is used again.
    pub(super) fn clear(&mut self) {
        (self.chunks, self.free) = (Vec::new(), Vec::new());
    }

    fn place(&mut self, at: u32) -> Option<&mut Place> {
        let chunk = self.chunks.get_mut(at as usize / CHUNK)?;
        chunk.get_mut(at as usize % CHUNK)
    }

    /// `None` if it is gone.
    pub(super) fn get(&self, id: SpanId) -> Option<&Span> {
        let place = self.chunks.get(id.at as usize / CHUNK)?;
        let place = place.get(id.at as usize % CHUNK)?;
        place
            .span
            .as_ref()
            .filter(|_| place.generation == id.generation)
    }

    /// `None` if it is gone.
    pub(super) fn get_mut(&mut self, id: SpanId) -> Option<&mut Span> {
        let place = self
            .place(id.at)
            .filter(|place| place.generation == id.generation)?;
        place.span.as_mut()
    }

    pub(super) fn remove(&mut self, id: SpanId) -> Option<Span> {
        let place = self
            .place(id.at)
            .filter(|place| place.generation == id.generation)?;
        let span = place.span.take()?;
        self.free.push(id.at);
        Some(span)
    }

    /// Bytes of the places.
    pub(super) fn bytes(&self) -> usize {
        self.chunks.len() * CHUNK * size_of::<Place>() + self.free.capacity() * 4
    }

    /// Every span, for checks.
    #[cfg(any(test, feature = "oracle"))]
    pub(super) fn iter(&self) -> impl Iterator<Item = (SpanId, &Span)> {
        let places = self.chunks.iter().flatten();
        (0u32..).zip(places).filter_map(|(at, place)| {
            let generation = place.generation;
            Some((SpanId { at, generation }, place.span.as_ref()?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_types::Rng;

    const LEN: u32 = 12;

    /// Random confirmations, some late, and blocks that go, against an expiry for each block.
    #[test]
    fn steps_agree_with_an_expiry_for_each_block() {
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let mut truth = vec![10; LEN as usize];
            let (len, expiry) = (LEN, 10);
            let mut span = Span {
                rank: WorkerRank::new(1, 0),
                slot: 0,
                start: 3,
                names: (0..u64::from(LEN)).collect(),
                steps: vec![Step { len, expiry }],
                parent: None,
                children: 0,
            };
            let mut now = 10;
            while span.len() > 0 {
                if rng.below(4) == 0 {
                    let left = rng.below(u64::from(span.len()) + 1) as u32;
                    truth.truncate(left as usize);
                    if left == 0 {
                        break;
                    }
                    span.shorten(left);
                } else {
                    now += rng.below(3);
                    let len = 1 + rng.below(u64::from(span.len())) as u32;
                    // Threads may come with an older clock.
                    let expiry = now - rng.below(3).min(now);
                    span.confirm(len, expiry);
                    let first = truth.iter_mut().take(len as usize);
                    first.for_each(|e| *e = expiry.max(*e));
                }
                let mut shown = Vec::new();
                for step in &span.steps {
                    assert!(step.len as usize > shown.len());
                    shown.resize(step.len as usize, step.expiry);
                }
                assert_eq!(shown, truth);
                assert!(span.steps.windows(2).all(|s| s[0].expiry > s[1].expiry));
                let (tick, from) = span.due();
                assert!(truth[from as usize..].iter().all(|e| *e == tick));
                assert!(from == 0 || truth[from as usize - 1] > tick);
            }
        }
    }

    #[test]
    fn an_id_stands_for_one_span_only() {
        let span = |n| Span {
            rank: WorkerRank::new(n, 0),
            slot: 0,
            start: 0,
            names: vec![n],
            steps: Vec::new(),
            parent: None,
            children: 0,
        };
        let mut spans = Spans::default();
        let ids: Vec<SpanId> = (0..600).map(|n| spans.insert(span(n))).collect();
        for (n, id) in (0..).zip(&ids) {
            assert_eq!(spans.get(*id).map(|s| s.names[0]), Some(n));
        }
        assert!(spans.remove(ids[7]).is_some() && spans.remove(ids[7]).is_none());
        let again = spans.insert(span(1_000));
        assert!(spans.get(ids[7]).is_none() && spans.get_mut(ids[7]).is_none());
        assert_eq!(spans.get(again).map(|s| s.names[0]), Some(1_000));
        assert_eq!(spans.iter().count(), 600);
    }
}
