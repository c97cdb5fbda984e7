//! The atomics of the lock-free parts, replaced by loom's under `--cfg loom`.

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
