//! Reads MessagePack without copying and without a panic, as far as event and request dialects need it.
//!
//! Invariants: a reader never moves past its bytes; a length that the sender claims is never trusted for
//! an allocation; skipping is iterative, so depth costs no stack. Why not a crate: docs/decisions/0060.

use std::mem;

use crate::DecodeError;

/// Deepest nesting that is read into a tree. Events nest 6 levels deep.
pub const DEPTH_MAX: usize = 32;

type Result<T> = std::result::Result<T, DecodeError>;

/// Reads values from the front of a slice.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// An integer of either sign, as MessagePack writes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Int {
    /// Zero or above.
    Unsigned(u64),
    /// Below zero.
    Negative(i64),
}

impl Int {
    /// The 64 bits, whatever their sign was: engines write one hash as signed or as unsigned.
    #[must_use]
    pub const fn bits(self) -> u64 {
        match self {
            Self::Unsigned(value) => value,
            Self::Negative(value) => value as u64,
        }
    }
}

/// What kind of value comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// nil
    Nil,
    /// true or false
    Bool,
    /// Any integer.
    Int,
    /// Any float.
    Float,
    /// Text.
    Str,
    /// Bytes.
    Bin,
    /// A list.
    Array,
    /// Pairs.
    Map,
    /// An extension type, or the one marker that is never used.
    Ext,
}

impl<'a> Reader<'a> {
    /// Reads from the start of `bytes`.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// How many bytes have been read.
    #[must_use]
    pub const fn position(&self) -> usize {
        self.at
    }

    /// How many bytes are left.
    #[must_use]
    pub const fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Fails unless everything was read.
    pub fn finish(&self) -> Result<()> {
        match self.left() {
            0 => Ok(()),
            extra => Err(DecodeError::Trailing { extra }),
        }
    }

    fn truncated(&self) -> DecodeError {
        DecodeError::Truncated {
            at: self.bytes.len(),
        }
    }

    #[inline]
    fn marker(&self) -> Result<u8> {
        self.bytes
            .get(self.at)
            .copied()
            .ok_or_else(|| self.truncated())
    }

    #[inline]
    fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        let found = self.bytes.get(self.at..).and_then(<[u8]>::first_chunk::<N>);
        let found = *found.ok_or_else(|| self.truncated())?;
        self.at += N;
        Ok(found)
    }

    fn raw(&mut self, len: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(len).ok_or_else(|| self.truncated())?;
        let found = self.bytes.get(self.at..end);
        let found = found.ok_or_else(|| self.truncated())?;
        self.at = end;
        Ok(found)
    }

    fn wrong(&self, expected: &'static str, found: u8) -> DecodeError {
        DecodeError::Kind {
            expected,
            found,
            at: self.at,
        }
    }

    /// What the next value is, without reading it.
    pub fn peek(&self) -> Result<Kind> {
        Ok(match self.marker()? {
            0x00..=0x7f | 0xcc..=0xd3 | 0xe0..=0xff => Kind::Int,
            0x80..=0x8f | 0xde | 0xdf => Kind::Map,
            0x90..=0x9f | 0xdc | 0xdd => Kind::Array,
            0xa0..=0xbf | 0xd9..=0xdb => Kind::Str,
            0xc0 => Kind::Nil,
            0xc2 | 0xc3 => Kind::Bool,
            0xc4..=0xc6 => Kind::Bin,
            0xca | 0xcb => Kind::Float,
            0xc1 | 0xc7..=0xc9 | 0xd4..=0xd8 => Kind::Ext,
        })
    }

    /// Reads nil if it comes next.
    pub fn nil(&mut self) -> Result<bool> {
        let is = self.marker()? == 0xc0;
        self.at += usize::from(is);
        Ok(is)
    }

    /// Reads true or false.
    pub fn bool(&mut self) -> Result<bool> {
        match self.marker()? {
            marker @ (0xc2 | 0xc3) => {
                self.at += 1;
                Ok(marker == 0xc3)
            }
            found => Err(self.wrong("a boolean", found)),
        }
    }

    /// Reads an integer.
    #[inline]
    pub fn int(&mut self) -> Result<Int> {
        let marker = self.marker()?;
        self.at += 1;
        Ok(match marker {
            0x00..=0x7f => Int::Unsigned(u64::from(marker)),
            0xcc => Int::Unsigned(u64::from(u8::from_be_bytes(self.fixed()?))),
            0xcd => Int::Unsigned(u64::from(u16::from_be_bytes(self.fixed()?))),
            0xce => Int::Unsigned(u64::from(u32::from_be_bytes(self.fixed()?))),
            0xcf => Int::Unsigned(u64::from_be_bytes(self.fixed()?)),
            0xe0..=0xff => signed(i64::from(marker as i8)),
            0xd0 => signed(i64::from(i8::from_be_bytes(self.fixed()?))),
            0xd1 => signed(i64::from(i16::from_be_bytes(self.fixed()?))),
            0xd2 => signed(i64::from(i32::from_be_bytes(self.fixed()?))),
            0xd3 => signed(i64::from_be_bytes(self.fixed()?)),
            found => {
                self.at -= 1;
                return Err(self.wrong("an integer", found));
            }
        })
    }

    /// Reads an integer if it is written with all of its 64 bits, as names of blocks are.
    #[inline]
    pub fn u64_of_nine_bytes(&mut self) -> Option<u64> {
        let [0xcf, value @ ..] = self.bytes.get(self.at..)?.first_chunk::<9>()? else {
            return None;
        };
        self.at += 9;
        Some(u64::from_be_bytes(*value))
    }

    /// Reads an integer that is not negative.
    pub fn u64(&mut self, field: &'static str) -> Result<u64> {
        match self.int()? {
            Int::Unsigned(value) => Ok(value),
            Int::Negative(_) => Err(DecodeError::Range { field }),
        }
    }

    /// Reads an integer that is not negative and fits 32 bits.
    #[inline]
    pub fn u32(&mut self, field: &'static str) -> Result<u32> {
        match self.int()? {
            Int::Unsigned(value) => u32::try_from(value).map_err(|_| DecodeError::Range { field }),
            Int::Negative(_) => Err(DecodeError::Range { field }),
        }
    }

    /// Reads `len` integers as [`Self::u32`] reads one, and appends them to `out`.
    ///
    /// Token ids are most of what engines send, and most of them are written as three bytes: five of those
    /// are read at once.
    pub fn u32s(&mut self, len: usize, field: &'static str, out: &mut Vec<u32>) -> Result<()> {
        let mut rest = self.bytes.get(self.at..).unwrap_or_default();
        if len > rest.len() {
            // Each takes a byte at least: a claimed length is not believed for an allocation.
            return Err(self.truncated());
        }
        let start = out.len();
        out.resize(start + len, 0);
        let mut slots = out.get_mut(start..).unwrap_or_default();
        while let Some((slot, more)) = slots.split_first_mut() {
            if let [0xcd, a, b, after @ ..] = rest {
                *slot = u32::from(u16::from_be_bytes([*a, *b]));
                (rest, slots) = (after, more);
                while let Some((five, after)) = five_u16(rest)
                    && slots.len() >= five.len()
                    && let Some((slot, more)) = mem::take(&mut slots).split_first_chunk_mut()
                {
                    *slot = five;
                    (rest, slots) = (after, more);
                }
                continue;
            }
            let (value, after) = match rest {
                [value @ 0x00..=0x7f, after @ ..] => (u32::from(*value), after),
                [0xce, a, b, c, d, after @ ..] => (u32::from_be_bytes([*a, *b, *c, *d]), after),
                [0xcc, value, after @ ..] => (u32::from(*value), after),
                _ => {
                    self.at = self.bytes.len() - rest.len();
                    let value = self.u32(field)?;
                    (value, self.bytes.get(self.at..).unwrap_or_default())
                }
            };
            *slot = value;
            (rest, slots) = (after, more);
        }
        self.at = self.bytes.len() - rest.len();
        Ok(())
    }

    /// Reads a float; integers are widened.
    pub fn float(&mut self) -> Result<f64> {
        match self.marker()? {
            0xca => {
                self.at += 1;
                Ok(f64::from(f32::from_be_bytes(self.fixed()?)))
            }
            0xcb => {
                self.at += 1;
                Ok(f64::from_be_bytes(self.fixed()?))
            }
            _ => Ok(match self.int()? {
                Int::Unsigned(value) => value as f64,
                Int::Negative(value) => value as f64,
            }),
        }
    }

    fn length(&mut self, width: u8) -> Result<usize> {
        Ok(match width {
            1 => usize::from(u8::from_be_bytes(self.fixed()?)),
            2 => usize::from(u16::from_be_bytes(self.fixed()?)),
            _ => u32::from_be_bytes(self.fixed()?) as usize,
        })
    }

    /// Reads text.
    pub fn str(&mut self) -> Result<&'a str> {
        let start = self.at;
        let bytes = self.text_bytes()?;
        std::str::from_utf8(bytes).map_err(|_| DecodeError::Utf8 { at: start })
    }

    /// Reads text without looking whether it is any; for comparing it with text.
    #[inline]
    pub fn text_bytes(&mut self) -> Result<&'a [u8]> {
        let marker = self.marker()?;
        let start = self.at;
        self.at += 1;
        let len = match marker {
            0xa0..=0xbf => usize::from(marker & 0x1f),
            0xd9 => self.length(1)?,
            0xda => self.length(2)?,
            0xdb => self.length(4)?,
            found => {
                self.at = start;
                return Err(self.wrong("text", found));
            }
        };
        self.raw(len)
    }

    /// Reads bytes.
    pub fn bin(&mut self) -> Result<&'a [u8]> {
        let marker = self.marker()?;
        self.at += 1;
        let len = match marker {
            0xc4 => self.length(1)?,
            0xc5 => self.length(2)?,
            0xc6 => self.length(4)?,
            found => {
                self.at -= 1;
                return Err(self.wrong("bytes", found));
            }
        };
        self.raw(len)
    }

    /// Reads the head of an array: how many values follow.
    pub fn array(&mut self) -> Result<usize> {
        let marker = self.marker()?;
        self.at += 1;
        match marker {
            0x90..=0x9f => Ok(usize::from(marker & 0x0f)),
            0xdc => self.length(2),
            0xdd => self.length(4),
            found => {
                self.at -= 1;
                Err(self.wrong("an array", found))
            }
        }
    }

    /// Reads the head of a map: how many pairs follow.
    pub fn map(&mut self) -> Result<usize> {
        let marker = self.marker()?;
        self.at += 1;
        match marker {
            0x80..=0x8f => Ok(usize::from(marker & 0x0f)),
            0xde => self.length(2),
            0xdf => self.length(4),
            found => {
                self.at -= 1;
                Err(self.wrong("a map", found))
            }
        }
    }

    /// Reads past the next value, whatever it is.
    pub fn skip(&mut self) -> Result<()> {
        let mut left = 1usize;
        while left > 0 {
            left -= 1;
            match self.peek()? {
                Kind::Nil | Kind::Bool => self.at += 1,
                Kind::Int => drop(self.int()?),
                Kind::Float => drop(self.float()?),
                Kind::Bin => drop(self.bin()?),
                Kind::Str => self.skip_str()?,
                Kind::Array => left = left.saturating_add(self.array()?),
                Kind::Map => left = left.saturating_add(self.map()?.saturating_mul(2)),
                Kind::Ext => self.skip_ext()?,
            }
        }
        Ok(())
    }

    fn skip_str(&mut self) -> Result<()> {
        self.text_bytes().map(drop)
    }

    fn skip_ext(&mut self) -> Result<()> {
        let marker = self.marker()?;
        self.at += 1;
        let len = match marker {
            0xd4..=0xd8 => 1usize << (marker - 0xd4),
            0xc7 => self.length(1)?,
            0xc8 => self.length(2)?,
            0xc9 => self.length(4)?,
            found => {
                self.at -= 1;
                return Err(self.wrong("a value", found));
            }
        };
        self.raw(len.saturating_add(1)).map(drop)
    }
}

/// Five numbers of 16 bits, each behind its marker, if that is what comes next.
#[inline]
fn five_u16(bytes: &[u8]) -> Option<([u32; 5], &[u8])> {
    const MARKERS: u128 = 0xff00_00ff_0000_ff00_00ff_0000_ff00_0000;
    const FIVE: u128 = 0xcd00_00cd_0000_cd00_00cd_0000_cd00_0000;
    let word = u128::from_be_bytes(*bytes.first_chunk::<16>()?);
    if word & MARKERS != FIVE {
        return None;
    }
    let at = |shift: u32| u32::from((word >> shift) as u16);
    let five = [at(104), at(80), at(56), at(32), at(8)];
    Some((five, bytes.get(15..)?))
}

const fn signed(value: i64) -> Int {
    if value < 0 {
        Int::Negative(value)
    } else {
        Int::Unsigned(value as u64)
    }
}
