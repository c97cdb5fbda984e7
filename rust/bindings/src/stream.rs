//! One request's output, step by step.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use slipstream_engine::request::{FinishReason, Request};
use slipstream_engine::stream::{
    Closed, Closer, Emitted, Finish, LoggedToken, TokenLogReader, TokenLogWriter, TokenSink,
};
use slipstream_engine::text::{TextStream, TokenTable};

use crate::error::raise;
use crate::handle::{Handle, WAIT};
use crate::stats::Stats;

/// When a request's tokens came, in nanoseconds since its submission; 0 is not yet.
#[derive(Debug, Default)]
pub(crate) struct Times {
    first: AtomicU64,
    last: AtomicU64,
}

/// A log's writing end that notes the time.
pub(crate) struct TimedSink {
    log: TokenLogWriter,
    submitted: Instant,
    times: Arc<Times>,
}

impl TimedSink {
    pub(crate) fn new(log: TokenLogWriter, times: Arc<Times>) -> Self {
        Self { log, submitted: Instant::now(), times }
    }
}

impl TokenSink for TimedSink {
    fn emit(&mut self, tokens: &[Emitted], finish: Option<Finish>) -> Result<(), Closed> {
        let now = u64::try_from(self.submitted.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1);
        if !tokens.is_empty() {
            let _ = self.times.first.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        }
        self.times.last.store(now, Ordering::Relaxed);
        self.log.emit(tokens, finish)
    }

    fn is_closed(&self) -> bool {
        self.log.is_closed()
    }
}

/// What one step settled.
#[pyclass(frozen, module = "slipstream._core")]
pub(crate) struct Chunk {
    pieces: Vec<(String, bool)>,
    /// Text that was held back and came with the end.
    rest: String,
    token_ids: Vec<u32>,
    num_accepted: usize,
    finish_reason: Option<&'static str>,
}

#[pymethods]
impl Chunk {
    /// The chunk's text.
    #[getter]
    fn text(&self) -> String {
        self.pieces.iter().map(|(text, _)| text.as_str()).chain([self.rest.as_str()]).collect()
    }
    /// The chunk's tokens.
    #[getter]
    fn token_ids(&self) -> Vec<u32> {
        self.token_ids.clone()
    }
    /// How many of the tokens, from the first, were drafted and accepted.
    #[getter]
    fn num_accepted(&self) -> usize {
        self.num_accepted
    }
    /// The text token by token, and whether the token was drafted and accepted.
    #[getter]
    fn pieces(&self) -> Vec<(String, bool)> {
        let rest = Some((self.rest.clone(), false)).filter(|(text, _)| !text.is_empty());
        self.pieces.iter().cloned().chain(rest).collect()
    }
    /// "stop", "length" or "cancelled" on the last chunk.
    #[getter]
    fn finish_reason(&self) -> Option<&'static str> {
        self.finish_reason
    }
    fn __repr__(&self) -> String {
        let reason = self.finish_reason.map_or_else(|| "None".to_owned(), |word| format!("{word:?}"));
        format!("Chunk(text={:?}, token_ids={:?}, finish_reason={reason})", self.text(), self.token_ids)
    }
}

/// The reading side: tokens to text, exactly as the scheduler looked for stop strings.
struct Reader {
    log: TokenLogReader,
    request: Arc<Request>,
    text: TextStream,
    num_read: u32,
    queue: VecDeque<LoggedToken>,
    finish: Option<Finish>,
    is_over: bool,
}

/// What a reader has next.
enum Next {
    Chunk(Chunk),
    Nothing,
    Failed(slipstream_engine::error::EngineError),
    Over,
}

impl Reader {
    /// The next step's chunk, if it has come.
    fn next(&mut self) -> Next {
        if self.is_over {
            return Next::Over;
        }
        let read = self.log.read();
        self.queue.extend(read.tokens);
        self.finish = self.finish.take().or(read.finish);
        if self.queue.is_empty() {
            let Some(finish) = self.finish.take() else {
                return Next::Nothing;
            };
            self.is_over = true;
            return match reason_word(&finish.reason) {
                Ok(word) => Next::Chunk(Chunk {
                    pieces: Vec::new(),
                    rest: self.text.finish(),
                    token_ids: Vec::new(),
                    num_accepted: 0,
                    finish_reason: Some(word),
                }),
                Err(error) => Next::Failed(error),
            };
        }
        Next::Chunk(self.step())
    }

    /// The first step in the queue. It carries the end if nothing follows it.
    fn step(&mut self) -> Chunk {
        let mut chunk = Chunk {
            pieces: Vec::new(),
            rest: String::new(),
            token_ids: Vec::new(),
            num_accepted: 0,
            finish_reason: None,
        };
        let mut is_stopped = false;
        while let Some(token) = self.queue.front().copied() {
            if token.starts_step && !chunk.token_ids.is_empty() {
                break;
            }
            self.queue.pop_front();
            self.num_read += 1;
            chunk.token_ids.push(token.token);
            chunk.num_accepted += usize::from(token.is_accepted);
            if self.request.stop_token_ids.contains(&token.token) {
                // A stop token ends the text and is no part of it.
                continue;
            }
            let may_stop = self.num_read >= self.request.params.min_tokens;
            let pushed = self.text.push(token.token, may_stop);
            is_stopped |= pushed.stopped;
            chunk.pieces.push((pushed.text, token.is_accepted));
        }
        if self.queue.is_empty()
            && let Some(Ok(word)) = self.finish.as_ref().map(|finish| reason_word(&finish.reason))
        {
            self.is_over = true;
            self.finish = None;
            chunk.finish_reason = Some(word);
            if !is_stopped {
                chunk.rest = self.text.finish();
            }
        }
        chunk
    }
}

fn reason_word(reason: &FinishReason) -> Result<&'static str, slipstream_engine::error::EngineError> {
    match reason {
        FinishReason::Stop => Ok("stop"),
        FinishReason::Length => Ok("length"),
        FinishReason::Cancelled => Ok("cancelled"),
        FinishReason::Error(error) => Err(error.clone()),
    }
}

/// One request's output.
#[pyclass(frozen, module = "slipstream._core")]
pub(crate) struct TokenStream {
    request: Arc<Request>,
    reader: Mutex<Reader>,
    /// Closes the log, also while another thread waits on it.
    closer: Closer,
    /// A reading end of its own, to look for the end.
    end: Mutex<(TokenLogReader, Option<Stats>)>,
    times: Arc<Times>,
    handle: Arc<Handle>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TokenStream {
    pub(crate) fn new(
        request: Arc<Request>,
        log: TokenLogReader,
        table: Arc<TokenTable>,
        times: Arc<Times>,
        handle: Arc<Handle>,
    ) -> Self {
        let text = TextStream::new(table, request.params.stop.clone().into());
        let reader = Reader {
            log: log.clone(),
            request: Arc::clone(&request),
            text,
            num_read: 0,
            queue: VecDeque::new(),
            finish: None,
            is_over: false,
        };
        Self { request, reader: Mutex::new(reader), closer: log.closer(), end: Mutex::new((log, None)), times, handle }
    }

    /// Waits for the next chunk away from the interpreter, for at most `timeout`.
    fn wait(&self, py: Python<'_>, timeout: Duration) -> PyResult<Option<Chunk>> {
        self.handle.check_process()?;
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).min(WAIT);
            let next = py.detach(|| {
                let mut reader = lock(&self.reader);
                match reader.next() {
                    Next::Nothing => {
                        reader.log.wait(left);
                        reader.next()
                    }
                    next => next,
                }
            });
            match next {
                Next::Chunk(chunk) => return Ok(Some(chunk)),
                Next::Failed(error) => return Err(raise(&error)),
                Next::Over => return Err(PyStopIteration::new_err(())),
                Next::Nothing if Instant::now() >= deadline => return Ok(None),
                Next::Nothing => {
                    // An interrupt leaves nobody to read on.
                    py.check_signals().inspect_err(|_| self.closer.close())?;
                }
            }
        }
    }
}

#[pymethods]
impl TokenStream {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Chunk>> {
        const DAY: Duration = Duration::from_secs(86_400);
        loop {
            match self.wait(py, DAY) {
                Ok(None) => {}
                Err(error) if error.is_instance_of::<PyStopIteration>(py) => return Ok(None),
                next => return next,
            }
        }
    }

    /// The next chunk, or None if none came in time.
    #[pyo3(signature = (timeout))]
    fn poll(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<Chunk>> {
        self.wait(py, Duration::try_from_secs_f64(timeout.clamp(0.0, 86_400.0)).unwrap_or_default())
    }

    /// Cancels the request.
    fn close(&self) {
        self.closer.close();
    }

    /// The request's number in its engine.
    #[getter]
    fn request_id(&self) -> u64 {
        self.request.id.0
    }

    /// The seed in use.
    #[getter]
    fn seed(&self) -> u64 {
        self.request.seed
    }

    /// The request's counts; None before its end.
    #[getter]
    fn stats(&self) -> Option<Stats> {
        let mut end = lock(&self.end);
        if end.1.is_none()
            && let Some(finish) = end.0.read().finish
        {
            let seconds = |nanoseconds: u64| nanoseconds as f64 / 1e9;
            let first = self.times.first.load(Ordering::Relaxed);
            end.1 = Some(Stats::new(
                finish.counts,
                seconds(self.times.last.load(Ordering::Relaxed)),
                (first > 0).then(|| seconds(first)),
            ));
        }
        end.1.clone()
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        self.closer.close();
    }
}
