//! The primitives of lock-free code: the standard ones, or, under `--cfg loom`, ones that try every interleaving.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic;

#[cfg(not(loom))]
pub(crate) use crossbeam_utils::sync::{Parker, Unparker};

#[cfg(loom)]
pub(crate) use ::loom::sync::atomic;

#[cfg(loom)]
pub(crate) use model::{Parker, Unparker};

#[cfg(loom)]
mod model {
    use std::time::Instant;

    use ::loom::thread::{Thread, current, park};

    /// Crossbeam's parker in loom's terms. It belongs to the thread that makes it, and its deadline never comes: a lost
    /// wake-up is a deadlock, which loom reports.
    #[derive(Debug)]
    pub(crate) struct Parker {
        thread: Thread,
    }

    impl Parker {
        pub(crate) fn new() -> Self {
            Self { thread: current() }
        }

        pub(crate) fn unparker(&self) -> Unparker {
            Unparker { thread: self.thread.clone() }
        }

        pub(crate) fn park_deadline(&self, _deadline: Instant) {
            park();
        }
    }

    #[derive(Clone, Debug)]
    pub(crate) struct Unparker {
        thread: Thread,
    }

    impl Unparker {
        pub(crate) fn unpark(&self) {
            self.thread.unpark();
        }
    }
}
