//! When a published job may be read: between `open` and the moment `close` has seen the last worker leave.

use super::loom::{AtomicU64, Ordering};

const ACTIVE: u64 = (1 << 16) - 1;
const OPEN: u64 = 1 << 16;
const STOP: u64 = 1 << 17;
const EPOCH: u64 = 1 << 18;

/// One publisher and many workers around one job slot. The word holds how many workers are inside (16 bits), whether
/// the gate is open, whether the pool stops, and an epoch, so that a worker enters each job at most once.
#[derive(Debug)]
pub(super) struct Gate(AtomicU64);

/// What a worker finds at the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// Inside: the job of this epoch may be read until [`Gate::leave`].
    Inside(u64),
    /// Nothing new.
    Wait,
    /// The pool ends.
    Stop,
}

impl Gate {
    pub(super) fn new() -> Gate {
        Gate(AtomicU64::new(0))
    }

    /// Lets workers in. The job was written before; the gate was closed.
    pub(super) fn open(&self) {
        let word = self.0.load(Ordering::Relaxed);
        debug_assert!(word & (ACTIVE | OPEN) == 0);
        // Sequentially consistent: a worker going to sleep either sees this or is seen by the publisher (see `Pool`).
        self.0.store((word | OPEN) + EPOCH, Ordering::SeqCst);
    }

    /// Stops letting workers in. The job must stay until [`Gate::is_empty`].
    pub(super) fn close(&self) {
        self.0.fetch_and(!OPEN, Ordering::AcqRel);
    }

    /// Whether all workers have left; what they wrote is visible then.
    pub(super) fn is_empty(&self) -> bool {
        self.0.load(Ordering::Acquire) & ACTIVE == 0
    }

    /// Ends all waiting.
    pub(super) fn stop(&self) {
        self.0.fetch_or(STOP, Ordering::SeqCst);
    }

    /// Enters if there is a job newer than epoch `seen`.
    pub(super) fn enter(&self, seen: u64) -> Entry {
        let mut word = self.0.load(Ordering::SeqCst);
        loop {
            if word & STOP != 0 {
                return Entry::Stop;
            }
            let epoch = word / EPOCH;
            if word & OPEN == 0 || epoch == seen {
                return Entry::Wait;
            }
            match self.0.compare_exchange_weak(word, word + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Entry::Inside(epoch),
                Err(now) => word = now,
            }
        }
    }

    /// Whether [`Gate::enter`] would not say `Wait`.
    pub(super) fn has_news(&self, seen: u64) -> bool {
        let word = self.0.load(Ordering::SeqCst);
        word & STOP != 0 || (word & OPEN != 0 && word / EPOCH != seen)
    }

    /// Leaves; the job may be gone afterwards.
    pub(super) fn leave(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    struct Shared {
        gate: Gate,
        job: UnsafeCell<u64>,
    }

    // SAFETY: the test is that the gate makes this true; loom reports any access that it does not order.
    unsafe impl Sync for Shared {}
    // SAFETY: the parts are Send.
    unsafe impl Send for Shared {}

    /// A worker reads the job only while the publisher does not write it.
    #[test]
    fn jobs_are_read_between_open_and_close() {
        loom::model(|| {
            let shared = Arc::new(Shared { gate: Gate::new(), job: UnsafeCell::new(0) });
            let other = Arc::clone(&shared);
            let worker = thread::spawn(move || {
                let mut seen = 0;
                for _ in 0..2 {
                    match other.gate.enter(seen) {
                        Entry::Inside(epoch) => {
                            // SAFETY: inside the gate the publisher does not write.
                            assert_eq!(other.job.with(|job| unsafe { *job }), epoch);
                            other.gate.leave();
                            seen = epoch;
                        }
                        Entry::Wait => thread::yield_now(),
                        Entry::Stop => return,
                    }
                }
            });
            for epoch in 1..=2 {
                // SAFETY: the gate is closed and empty.
                shared.job.with_mut(|job| unsafe { *job = epoch });
                shared.gate.open();
                shared.gate.close();
                while !shared.gate.is_empty() {
                    thread::yield_now();
                }
            }
            shared.gate.stop();
            assert!(worker.join().is_ok());
        });
    }
}
