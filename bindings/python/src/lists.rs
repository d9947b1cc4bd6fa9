//! Lists of whole numbers, read in one pass.
//!
//! Answers one question: which numbers does this list hold, without an object's worth of work for each? Prompts come as lists of
//! thousands of numbers, and to ask each item what it is takes longer than to route them. The one module of this crate with `unsafe`.
//!
//! Two ways: [`direct`] reads lists and `int`s where CPython keeps them in memory, in the versions of which that is known; [`called`] asks
//! functions of the stable ABI, in all others. What neither takes is left to the caller's slow way, which says what is wrong with it.
//!
//! What always holds: no code of Python's runs while a list is read, and the GIL is held: nobody changes the list meanwhile.

#![expect(
    unsafe_code,
    reason = "items are read in place; each place says why it is sound"
)]

use pyo3::prelude::*;
use pyo3::types::PyList;

/// The numbers of a list, if it is one of exact `int`s that fit 32 bits.
pub(crate) fn unsigned(value: &Bound<'_, PyAny>) -> Option<Vec<u32>> {
    let list = value.cast::<PyList>().ok()?;
    let narrow = |number: u64| u32::try_from(number).ok();
    direct::numbers(list, narrow).or_else(|| {
        called::numbers(list, |bits, is_signed| {
            let is_negative = is_signed && bits.cast_signed() < 0;
            narrow(bits).filter(|_| !is_negative)
        })
    })
}

/// The bits of a list's numbers, if it is one of exact `int`s that fit 64 bits, with a sign or without.
pub(crate) fn bits(value: &Bound<'_, PyAny>) -> Option<Vec<u64>> {
    let list = value.cast::<PyList>().ok()?;
    direct::numbers(list, Some).or_else(|| called::numbers(list, |bits, _| Some(bits)))
}

/// Where CPython keeps them.
mod direct {
    use std::mem::offset_of;

    use pyo3::ffi;
    use pyo3::prelude::*;
    use pyo3::sync::PyOnceLock;
    use pyo3::types::{PyInt, PyList, PyType};

    /// The versions whose objects look like this: 3.11 up to the last that was there when this was written.
    const FIRST_VERSION: (u8, u8) = (3, 11);
    const LAST_VERSION: (u8, u8) = (3, 14);
    /// From this one on an `int` has a tag where its size and sign were.
    const TAGGED_SINCE: (u8, u8) = (3, 12);
    /// Bits of a digit.
    const DIGIT_BITS: u32 = 30;
    /// The tag's lowest bits are the sign, of which this one is that of negative numbers; the number of digits is above them.
    const TAG_NEGATIVE: usize = 2;
    const TAG_SHIFT: u32 = 3;

    /// A list.
    #[repr(C)]
    struct ListObject {
        head: Head,
        size: isize,
        items: *const *const IntObject,
        allocated: isize,
    }

    /// An `int`. As many digits follow as it has; behind an object of fewer there is nothing.
    #[repr(C)]
    struct IntObject {
        head: Head,
        /// The number of digits, negative if the number is; or the tag.
        size: usize,
        digits: [u32; 0],
    }

    /// What every object begins with.
    #[repr(C)]
    struct Head {
        references: usize,
        kind: *mut ffi::PyTypeObject,
    }

    /// How a number of digits and a sign are written.
    #[derive(Clone, Copy)]
    enum Layout {
        Signed,
        Tagged,
    }

    /// How this interpreter's `int`s look; none if that is not known.
    fn layout(py: Python<'_>) -> Option<Layout> {
        static LAYOUT: PyOnceLock<Option<Layout>> = PyOnceLock::new();
        *LAYOUT.get_or_init(py, || found(py).ok().flatten())
    }

    fn found(py: Python<'_>) -> PyResult<Option<Layout>> {
        let name = py
            .import("sys")?
            .getattr("implementation")?
            .getattr("name")?;
        let version = py.version_info();
        let version = (version.major, version.minor);
        let is_known = (FIRST_VERSION..=LAST_VERSION).contains(&version)
            && name.extract::<String>()? == "cpython"
            && size_of::<usize>() == 8;
        // A build with more in each object, for debugging it, shows in their sizes.
        let sizes = |kind: Bound<'_, PyType>| -> PyResult<(usize, usize)> {
            let size = |name| kind.getattr(name)?.extract();
            Ok((size("__basicsize__")?, size("__itemsize__")?))
        };
        let digits = offset_of!(IntObject, digits);
        let is_as_here = sizes(py.get_type::<PyList>())? == (size_of::<ListObject>(), 0)
            && sizes(py.get_type::<PyInt>())? == (digits, size_of::<u32>());
        let layout = match version < TAGGED_SINCE {
            true => Layout::Signed,
            false => Layout::Tagged,
        };
        Ok((is_known && is_as_here).then_some(layout))
    }

    /// The items of a list, if all are exact `int`s from 0 on, of at most 64 bits, for which `fit` has a value.
    pub(super) fn numbers<T>(
        list: &Bound<'_, PyList>,
        fit: impl Fn(u64) -> Option<T>,
    ) -> Option<Vec<T>> {
        match layout(list.py())? {
            Layout::Signed => read(list, fit, |size| (size.cast_signed() >= 0).then_some(size)),
            Layout::Tagged => read(list, fit, |tag| {
                (tag & TAG_NEGATIVE == 0).then_some(tag >> TAG_SHIFT)
            }),
        }
    }

    /// `count` says how many digits a number has that is not negative. Called where the layout is known.
    fn read<T>(
        list: &Bound<'_, PyList>,
        fit: impl Fn(u64) -> Option<T>,
        count: impl Fn(usize) -> Option<usize>,
    ) -> Option<Vec<T>> {
        let list = list.as_ptr().cast::<ListObject>();
        // SAFETY: it is a list, or of a type made from `list`, which begins as one; what a list looks like was found out. The GIL is held.
        let (size, items) = unsafe { ((*list).size, (*list).items) };
        let size = usize::try_from(size).ok()?;
        let mut found = Vec::with_capacity(size);
        for at in 0..size {
            // SAFETY: a list of `size` has so many items, each an object. No code of Python's runs here, so that the list stays as it is.
            let item = unsafe { *items.add(at) };
            // SAFETY: every object begins with its head.
            let kind = unsafe { (*item).head.kind };
            if kind != &raw mut ffi::PyLong_Type {
                return None;
            }
            // SAFETY: it is an `int` and nothing made from it, of which the layout is known.
            let digits = count(unsafe { (*item).size })?;
            // SAFETY: the address of what follows is taken, and read below as far as there are digits.
            let first = unsafe { (&raw const (*item).digits).cast::<u32>() };
            // SAFETY: `digit` is called with less than their number.
            let digit = |at: usize| u64::from(unsafe { *first.add(at) });
            let number = match digits {
                0 => 0,
                1 => digit(0),
                2 => digit(0) | digit(1) << DIGIT_BITS,
                3 if digit(2) < 1 << (u64::BITS - 2 * DIGIT_BITS) => {
                    digit(0) | digit(1) << DIGIT_BITS | digit(2) << (2 * DIGIT_BITS)
                }
                _ => return None,
            };
            found.push(fit(number)?);
        }
        Some(found)
    }
}

/// As the stable ABI gives them.
mod called {
    use std::ffi::c_int;

    use pyo3::ffi;
    use pyo3::prelude::*;
    use pyo3::types::PyList;

    /// The items of a list, if all are exact `int`s for which `fit` has a value: it gets their bits, and whether these have a sign.
    pub(super) fn numbers<T>(
        list: &Bound<'_, PyList>,
        fit: impl Fn(u64, bool) -> Option<T>,
    ) -> Option<Vec<T>> {
        let length = isize::try_from(list.len()).ok()?;
        let mut found = Vec::with_capacity(list.len());
        for at in 0..length {
            let (bits, is_signed) = whole(list, at)?;
            found.push(fit(bits, is_signed)?);
        }
        Some(found)
    }

    /// The bits of the item at an index, if it is an exact `int` that fits 64 of them, and whether they have a sign.
    fn whole(list: &Bound<'_, PyList>, at: isize) -> Option<(u64, bool)> {
        // SAFETY: `list` is a list and the GIL is held: its type says both. An index past the end gives null and sets an exception, which is
        // taken below. The item is borrowed from the list, which nothing changes until the item is read: the GIL is kept, and none of
        // Python's code runs, for an exact `int` is read without a call of any of its methods.
        let read = unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), at);
            if item.is_null() || ffi::Py_TYPE(item) != &raw mut ffi::PyLong_Type {
                None
            } else {
                let mut overflow: c_int = 0;
                let signed = ffi::PyLong_AsLongLongAndOverflow(item, &raw mut overflow);
                match overflow {
                    0 => Some((signed.cast_unsigned(), true)),
                    1 => Some((ffi::PyLong_AsUnsignedLongLong(item), false)),
                    _ => None,
                }
            }
        };
        match read {
            // The greatest number is what stands for an error, too.
            Some((bits, is_signed)) if is_signed || bits != u64::MAX => read,
            _ => {
                drop(PyErr::take(list.py()));
                None
            }
        }
    }
}
