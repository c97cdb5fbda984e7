//! Persistent threads that share the tasks of one backend call.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::claim::Claim;
use super::gate::{Entry, Gate};

/// Looks at the gate before a worker gives its core up, and before it sleeps. Calls of one step follow each other within
/// microseconds, so a worker is awake for the next one; an idle engine costs nothing.
const SPINS: u32 = 2_000;
const YIELDS: u32 = 200;

/// A fixed number of threads, the caller among them.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    /// Held for the length of a run: two callers take turns.
    turn: Mutex<()>,
    workers: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    gate: Gate,
    job: UnsafeCell<Option<Job>>,
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

type Task = dyn Fn(Range<usize>) + Sync;

/// A run's closure and claims, borrowed from the stack of the caller of `run`.
#[derive(Clone, Copy)]
struct Job {
    task: *const Task,
    claim: *const Claim,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Job")
    }
}

// SAFETY: `job` is written only by the holder of `turn` while the gate is closed and empty, and read only inside the
// gate. The pointers in it lead to a `Sync` closure and a `Sync` claim.
unsafe impl Sync for Shared {}
// SAFETY: as above; nothing in it belongs to one thread.
unsafe impl Send for Shared {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic is carried to the caller by `run`; the data behind these locks is whole at every moment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// Starts `threads - 1` workers; the caller of [`Pool::run`] is the last thread. Fewer where the system refuses.
    pub fn new(threads: usize) -> Pool {
        let shared = Arc::new(Shared {
            gate: Gate::new(),
            job: UnsafeCell::new(None),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            panic: Mutex::new(None),
        });
        let workers = (1..threads.min(1 << 12))
            .map_while(|i| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new().name(format!("slipstream-{i}")).spawn(move || shared.work()).ok()
            })
            .collect();
        Pool { shared, turn: Mutex::new(()), workers }
    }

    /// Number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task` with disjoint ranges of at most `grain` that cover `0..num_tasks`, on all threads, and returns when
    /// all are done. A panic in any of them comes out here. Must not be called from inside a task.
    pub fn run(&self, num_tasks: usize, grain: usize, task: &(dyn Fn(Range<usize>) + Sync)) {
        if num_tasks == 0 {
            return;
        }
        let grain = grain.max(1);
        if self.workers.is_empty() || num_tasks <= grain {
            for start in (0..num_tasks).step_by(grain) {
                task(start..num_tasks.min(start + grain));
            }
            return;
        }
        let claim = Claim::new(num_tasks, grain);
        let turn = lock(&self.turn);
        // SAFETY: only the lifetime is erased. This function does not return or unwind before the gate is closed and
        // empty, and nobody reads the job outside the gate.
        let task: *const Task = unsafe { std::mem::transmute::<&(dyn Fn(Range<usize>) + Sync), &Task>(task) };
        let job = Job { task, claim: &raw const claim };
        // SAFETY: `turn` is held and the gate is closed and empty, so no one else touches the slot.
        unsafe { *self.shared.job.get() = Some(job) };
        self.shared.gate.open();
        self.shared.wake_sleepers();
        self.shared.carry_out(job);
        self.shared.gate.close();
        let mut looks = 0u32;
        while !self.shared.gate.is_empty() {
            looks += 1;
            if looks < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        // SAFETY: as for the write above.
        unsafe { *self.shared.job.get() = None };
        let panic = lock(&self.shared.panic).take();
        drop(turn);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.gate.stop();
        self.shared.wake_sleepers();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks, so it has none of its own to report.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn carry_out(&self, job: Job) {
        let result = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: the caller is inside the gate or is the publisher, so both borrows are alive.
            let (task, claim) = unsafe { (&*job.task, &*job.claim) };
            while let Some(tasks) = claim.take() {
                task(tasks);
            }
        }));
        if let Err(panic) = result {
            lock(&self.panic).get_or_insert(panic);
        }
    }

    fn work(&self) {
        let mut seen = 0;
        let mut looks = 0;
        loop {
            match self.gate.enter(seen) {
                Entry::Inside(epoch) => {
                    // SAFETY: inside the gate the slot is not written.
                    if let Some(job) = unsafe { *self.job.get() } {
                        self.carry_out(job);
                    }
                    self.gate.leave();
                    seen = epoch;
                    looks = 0;
                }
                Entry::Stop => return,
                Entry::Wait if looks < SPINS => {
                    looks += 1;
                    std::hint::spin_loop();
                }
                Entry::Wait if looks < SPINS + YIELDS => {
                    looks += 1;
                    std::thread::yield_now();
                }
                Entry::Wait => {
                    self.sleep_unless_open(seen);
                    looks = 0;
                }
            }
        }
    }

    /// Sleeps until the next `wake_sleepers`. Announcing, then looking again, against opening, then looking for
    /// sleepers: in the one order of sequentially consistent operations, one of the two sees the other.
    fn sleep_unless_open(&self, seen: u64) {
        let guard = lock(&self.sleep);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        if self.gate.has_news(seen) {
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        let guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        drop(guard);
    }

    fn wake_sleepers(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.sleep));
            self.wake.notify_all();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    fn check_once(pool: &Pool, num_tasks: usize, grain: usize) {
        let counts: Vec<AtomicU32> = (0..num_tasks).map(|_| AtomicU32::new(0)).collect();
        pool.run(num_tasks, grain, &|tasks| {
            assert!(tasks.len() <= grain.max(1));
            for task in tasks {
                counts[task].fetch_add(1, Ordering::Relaxed);
            }
        });
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            for (num_tasks, grain) in [(0, 1), (1, 1), (2, 1), (100, 1), (100, 7), (5, 9), (64, 0)] {
                check_once(&pool, num_tasks, grain);
            }
        }
    }

    #[test]
    fn stress_with_pauses_and_two_callers() {
        let pool = Pool::new(4);
        std::thread::scope(|scope| {
            for caller in 0..2 {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 0..3_000usize {
                        check_once(pool, round % 37 + 1, round % 3 + 1);
                        if round % 500 == caller * 250 {
                            // Long enough for the workers to fall asleep.
                            std::thread::sleep(std::time::Duration::from_millis(5));
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3);
        for bad in [0, 50, 99] {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(100, 1, &|tasks| assert!(tasks.start != bad, "task {bad}"));
            }));
            let message = result.err().and_then(|panic| panic.downcast::<String>().ok());
            assert_eq!(message.as_deref().map(String::as_str), Some(format!("task {bad}").as_str()));
            check_once(&pool, 100, 1);
        }
    }
}
