//! Writes MessagePack, each value in its shortest form.

/// Appends values to a buffer, each in its shortest form, as every engine's encoder does.
#[derive(Debug)]
pub struct Writer<'b> {
    out: &'b mut Vec<u8>,
}

impl<'b> Writer<'b> {
    /// Appends to `out`.
    pub const fn new(out: &'b mut Vec<u8>) -> Self {
        Self { out }
    }

    fn put(&mut self, marker: u8, rest: &[u8]) {
        self.out.push(marker);
        self.out.extend_from_slice(rest);
    }

    /// Writes nil.
    pub fn nil(&mut self) {
        self.out.push(0xc0);
    }

    /// Writes an integer that is not negative.
    pub fn uint(&mut self, value: u64) {
        match value {
            0..=0x7f => self.out.push(value as u8),
            0x80..=0xff => self.put(0xcc, &[value as u8]),
            0x100..=0xffff => self.put(0xcd, &(value as u16).to_be_bytes()),
            0x1_0000..=0xffff_ffff => self.put(0xce, &(value as u32).to_be_bytes()),
            _ => self.put(0xcf, &value.to_be_bytes()),
        }
    }

    /// Writes an integer of either sign.
    pub fn sint(&mut self, value: i64) {
        match value {
            0.. => self.uint(value as u64),
            -0x20..0 => self.out.push(value as u8),
            -0x80..-0x20 => self.put(0xd0, &(value as i8).to_be_bytes()),
            -0x8000..-0x80 => self.put(0xd1, &(value as i16).to_be_bytes()),
            -0x8000_0000..-0x8000 => self.put(0xd2, &(value as i32).to_be_bytes()),
            _ => self.put(0xd3, &value.to_be_bytes()),
        }
    }

    /// Writes a float of 32 bits.
    pub fn float32(&mut self, value: f32) {
        self.put(0xca, &value.to_be_bytes());
    }

    /// Writes a float of 64 bits.
    pub fn float(&mut self, value: f64) {
        self.put(0xcb, &value.to_be_bytes());
    }

    /// Writes true or false.
    pub fn bool(&mut self, value: bool) {
        self.out.push(0xc2 + u8::from(value));
    }

    fn head(&mut self, len: usize, small: Option<(u8, usize)>, wide: [u8; 3]) {
        match (len, small) {
            (_, Some((base, max))) if len <= max => self.out.push(base | len as u8),
            (0..=0xff, _) if wide[0] != 0 => self.put(wide[0], &[len as u8]),
            (0..=0xffff, _) => self.put(wide[1], &(len as u16).to_be_bytes()),
            _ => self.put(wide[2], &(len as u32).to_be_bytes()),
        }
    }

    /// Writes text.
    pub fn str(&mut self, text: &str) {
        self.head(text.len(), Some((0xa0, 31)), [0xd9, 0xda, 0xdb]);
        self.out.extend_from_slice(text.as_bytes());
    }

    /// Writes bytes.
    pub fn bin(&mut self, bytes: &[u8]) {
        self.head(bytes.len(), None, [0xc4, 0xc5, 0xc6]);
        self.out.extend_from_slice(bytes);
    }

    /// Writes the head of an array of `len` values.
    pub fn array(&mut self, len: usize) {
        self.head(len, Some((0x90, 15)), [0, 0xdc, 0xdd]);
    }

    /// Writes the head of a map of `len` pairs.
    pub fn map(&mut self, len: usize) {
        self.head(len, Some((0x80, 15)), [0, 0xde, 0xdf]);
    }
}
