//! Several orders over the same entries: doubly linked lists whose links lie in the entries themselves.

/// No entry.
pub(super) const NONE: u32 = u32::MAX;

/// An entry's neighbours in one list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    prev: u32,
    next: u32,
}

impl Default for Link {
    fn default() -> Self {
        Self {
            prev: NONE,
            next: NONE,
        }
    }
}

impl Link {
    /// The entry behind it.
    pub(super) fn next(&self) -> Option<u32> {
        (self.next != NONE).then_some(self.next)
    }
}

/// The ends of one list.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    head: u32,
    tail: u32,
    len: u32,
}

impl Default for List {
    fn default() -> Self {
        Self {
            head: NONE,
            tail: NONE,
            len: 0,
        }
    }
}

/// Where an entry keeps the link of one kind of list.
pub(super) trait Links {
    /// Its link of list kind `kind`.
    fn link(&mut self, at: u32, kind: usize) -> &mut Link;
}

impl List {
    /// The entry that has been in longest.
    pub(super) fn head(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn push_back(&mut self, links: &mut impl Links, kind: usize, at: u32) {
        *links.link(at, kind) = Link {
            prev: self.tail,
            next: NONE,
        };
        if self.tail == NONE {
            self.head = at;
        } else {
            links.link(self.tail, kind).next = at;
        }
        self.tail = at;
        self.len += 1;
    }

    /// Takes out an entry that is in this list.
    pub(super) fn remove(&mut self, links: &mut impl Links, kind: usize, at: u32) {
        let Link { prev, next } = std::mem::take(links.link(at, kind));
        if prev == NONE {
            self.head = next;
        } else {
            links.link(prev, kind).next = next;
        }
        if next == NONE {
            self.tail = prev;
        } else {
            links.link(next, kind).prev = prev;
        }
        self.len -= 1;
    }
}
