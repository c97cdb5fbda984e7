//! Large zeroed arrays: page-aligned, on huge pages where the system grants them.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

/// Types for which every bit pattern, all zeros included, is a value.
///
/// # Safety
/// The type has no padding, no invalid bit patterns, and an alignment of at most one page.
pub(super) unsafe trait Plain: Copy + Send + Sync + 'static {}

/// Sixteen values, one for each output row of a panel.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(transparent)]
pub(super) struct Line<T>(pub(super) [T; 16]);

// SAFETY: a plain number.
unsafe impl Plain for f32 {}
// SAFETY: a plain number.
unsafe impl Plain for u16 {}
// SAFETY: an array of plain values, without padding between them.
unsafe impl<T: Plain> Plain for Line<T> {}

/// An array of `T`, zeroed when made.
pub(super) struct Buffer<T> {
    /// `None` when empty.
    pages: Option<MmapMut>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    /// `None` when that much memory cannot be had.
    pub(super) fn zeroed(len: usize) -> Option<Buffer<T>> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok())?;
        if bytes == 0 {
            return Some(Buffer { pages: None, len: 0, element: PhantomData });
        }
        let pages = MmapMut::map_anon(bytes).ok()?;
        // Only advice: streaming through small pages costs bandwidth.
        #[cfg(target_os = "linux")]
        let _ = pages.advise(memmap2::Advice::HugePage);
        Some(Buffer { pages: Some(pages), len, element: PhantomData })
    }
}

impl<T: Plain> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.pages {
            // SAFETY: the pages hold `len` elements by construction, page-aligned, and every bit pattern is a value.
            Some(pages) => unsafe { std::slice::from_raw_parts(pages.as_ptr().cast(), self.len) },
            None => &[],
        }
    }
}

impl<T: Plain> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.pages {
            // SAFETY: as for `deref`; the borrow is exclusive.
            Some(pages) => unsafe { std::slice::from_raw_parts_mut(pages.as_mut_ptr().cast(), self.len) },
            None => &mut [],
        }
    }
}

impl<T> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Buffer({} elements)", self.len)
    }
}

/// A mutable slice that several tasks write at once, each its own part.
pub(super) struct Split<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it hands out only disjoint parts (the promise of `part`'s callers), as `split_at_mut` does.
unsafe impl<T: Send> Sync for Split<'_, T> {}
// SAFETY: as for a mutable slice.
unsafe impl<T: Send> Send for Split<'_, T> {}

impl<'a, T> Split<'a, T> {
    pub(super) fn new(slice: &'a mut [T]) -> Split<'a, T> {
        Split { start: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// Elements `start..start + len`.
    ///
    /// # Safety
    /// No two parts that are alive at the same time overlap.
    // The point of the type: `&self` is shared by the tasks, each of which writes elsewhere.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "part {start} + {len} of {}", self.len);
        // SAFETY: inside the slice by the line above, and not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}
