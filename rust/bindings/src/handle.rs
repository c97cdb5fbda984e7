//! The engine's thread: it owns the engine, takes requests from a queue, and steps while there are any.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, unbounded};
use pyo3::{PyResult, Python};
use slipstream_engine::assemble::CpuEngine;
use slipstream_engine::engine::Load;
use slipstream_engine::error::EngineError;
use slipstream_engine::metrics::Counts;
use slipstream_engine::request::{Request, RequestId};
use slipstream_engine::stream::TokenSink;

use crate::error::raise;

/// How long a wait stays away from the interpreter, at most: Ctrl-C is seen after it.
pub(crate) const WAIT: Duration = Duration::from_millis(50);

enum Command {
    Submit(Box<Request>, Box<dyn TokenSink>),
    Report(Sender<(Counts, Load)>),
    Close,
}

/// What the rest of the process holds of an engine.
pub(crate) struct Handle {
    commands: Sender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
    next_request: AtomicU64,
    process: u32,
}

fn stopped() -> EngineError {
    EngineError::device("expected a running engine, got one that was closed or has stopped")
}

impl Handle {
    pub(crate) fn start(engine: CpuEngine) -> Result<Self, EngineError> {
        let (commands, queue) = unbounded();
        let thread = std::thread::Builder::new()
            .name("slipstream-engine".to_owned())
            .spawn(move || run(engine, &queue))
            .map_err(|error| EngineError::device(format!("the engine's thread cannot be started: {error}")))?;
        Ok(Self {
            commands,
            thread: Mutex::new(Some(thread)),
            next_request: AtomicU64::new(0),
            process: std::process::id(),
        })
    }

    /// An error in a process that was forked: the engine's thread did not come along.
    pub(crate) fn check_process(&self) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(raise(
            &EngineError::device(format!(
                "expected the process {} that built this engine, got its fork {}",
                self.process,
                std::process::id()
            ))
            .with_hint("build an engine in the process that uses it"),
        ))
    }

    pub(crate) fn next_request(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn submit(&self, request: Request, sink: Box<dyn TokenSink>) -> Result<(), EngineError> {
        self.commands.send(Command::Submit(Box::new(request), sink)).map_err(|_| stopped())
    }

    /// Counts over ended requests, and what is going on. Waits for the step under way.
    pub(crate) fn report(&self, py: Python<'_>) -> PyResult<(Counts, Load)> {
        let (reply, answer) = bounded(1);
        self.commands.send(Command::Report(reply)).map_err(|_| raise(&stopped()))?;
        loop {
            match py.detach(|| answer.recv_timeout(WAIT)) {
                Ok(report) => return Ok(report),
                Err(RecvTimeoutError::Timeout) => py.check_signals()?,
                Err(RecvTimeoutError::Disconnected) => return Err(raise(&stopped())),
            }
        }
    }

    /// Ends every request, and the thread.
    pub(crate) fn close(&self) {
        // A closed queue means that the thread has ended.
        let _ = self.commands.send(Command::Close);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic of the engine was reported to its requests.
            let _ = thread.join();
        }
    }
}

fn run(mut engine: CpuEngine, queue: &Receiver<Command>) {
    // A panic is a programming error: the requests' streams say that the engine stopped, and so does every later call.
    let outcome = catch_unwind(AssertUnwindSafe(|| serve(&mut engine, queue)));
    if outcome.is_err() {
        tracing::error!("the engine stopped: one of its invariants was broken");
    }
}

fn serve(engine: &mut CpuEngine, queue: &Receiver<Command>) {
    loop {
        loop {
            let command = if engine.is_idle() {
                match queue.recv() {
                    Ok(command) => command,
                    Err(_) => return,
                }
            } else {
                match queue.try_recv() {
                    Ok(command) => command,
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            };
            match command {
                Command::Submit(request, sink) => {
                    engine.submit(*request, sink);
                }
                Command::Report(reply) => {
                    // Nobody waits any more: nothing to tell.
                    let _ = reply.send((engine.counts().clone(), engine.load()));
                }
                Command::Close => {
                    engine.cancel_all();
                    return;
                }
            }
        }
        engine.step();
    }
}
