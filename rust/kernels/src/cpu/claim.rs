//! Who does which task: numbers handed out in runs, each exactly once.

use std::ops::Range;

use super::loom::{AtomicUsize, Ordering};

/// Tasks `0..num_tasks`, claimed in runs of `grain`.
#[derive(Debug)]
pub(super) struct Claim {
    next: AtomicUsize,
    num_tasks: usize,
    grain: usize,
}

impl Claim {
    /// No task is claimed yet. A grain of 0 counts as 1.
    pub(super) fn new(num_tasks: usize, grain: usize) -> Claim {
        Claim { next: AtomicUsize::new(0), num_tasks, grain: grain.max(1) }
    }

    /// The next run, or `None` when all are handed out; a thread stops asking then, so the counter passes the end by
    /// at most one grain per thread.
    pub(super) fn take(&self) -> Option<Range<usize>> {
        // Relaxed: only the counter itself is shared; the results are published by the gate.
        let start = self.next.fetch_add(self.grain, Ordering::Relaxed);
        (start < self.num_tasks).then(|| start..self.num_tasks.min(start.saturating_add(self.grain)))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn covers_all_tasks_in_order() {
        for (num_tasks, grain) in [(0, 1), (1, 1), (7, 3), (8, 4), (5, 100), (3, 0)] {
            let claim = Claim::new(num_tasks, grain);
            let tasks: Vec<usize> = std::iter::from_fn(|| claim.take()).flatten().collect();
            assert_eq!(tasks, (0..num_tasks).collect::<Vec<_>>());
        }
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn each_task_is_claimed_once() {
        loom::model(|| {
            let claim = Arc::new(Claim::new(3, 2));
            let other = Arc::clone(&claim);
            let worker = thread::spawn(move || {
                let mut mine = Vec::new();
                while let Some(run) = other.take() {
                    mine.extend(run);
                }
                mine
            });
            let mut all = Vec::new();
            while let Some(run) = claim.take() {
                all.extend(run);
            }
            if let Ok(theirs) = worker.join() {
                all.extend(theirs);
            }
            all.sort_unstable();
            assert_eq!(all, [0, 1, 2]);
        });
    }
}
