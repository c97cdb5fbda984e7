//! How tokens leave the engine: an append-only log with one writer, which never waits, and any number of readers.
//!
//! A token is a word of the log. The words are written first, then the length is published with release ordering; a
//! reader that acquires length `n` sees the first `n` words complete (invariant I8). Nothing is ever overwritten, so
//! the log cannot wrap, and it is as long as the request may write, so it cannot fill.

#[cfg(all(test, loom))]
mod loom_models;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::error::EngineError;
use crate::loom::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use crate::loom::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
use crate::loom::{Parker, Unparker};
use crate::metrics::Counts;
use crate::request::{FinishReason, TokenId};

/// One emitted token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emitted {
    /// The token.
    pub token: TokenId,
    /// Whether it was drafted and accepted.
    pub is_accepted: bool,
}

/// The end of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// The request's counts.
    pub counts: Counts,
}

/// The reader is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed;

/// Where the scheduler puts a request's tokens. Never blocks.
pub trait TokenSink: Send {
    /// Appends what one step settled, and the end if it is one. After an end nothing follows.
    fn emit(&mut self, tokens: &[Emitted], finish: Option<Finish>) -> Result<(), Closed>;
    /// Whether the reader is gone.
    fn is_closed(&self) -> bool;
}

/// In a word of the log: the token was drafted and accepted.
const ACCEPTED: u32 = 1 << 31;
/// In a word of the log: the token is the first of its step.
const STARTS_STEP: u32 = 1 << 30;
/// In the published state, above twice the length: the stream has ended.
const ENDED: u64 = 1;

/// Words of the first segment; each further one has twice as many. A short output costs one small allocation, and no
/// word ever moves.
const FIRST_SEGMENT: usize = if cfg!(loom) { 1 } else { 64 };
/// Enough for 2³² words.
const NUM_SEGMENTS: usize = 33;

/// One token as a reader sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedToken {
    /// The token.
    pub token: TokenId,
    /// Whether it was drafted and accepted.
    pub is_accepted: bool,
    /// Whether a step's tokens begin here.
    pub starts_step: bool,
}

/// What came since the last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Read {
    /// The new tokens.
    pub tokens: Vec<LoggedToken>,
    /// The end, once all tokens before it have been read.
    pub finish: Option<Finish>,
}

/// What one request wrote.
#[derive(Debug)]
pub struct TokenLog {
    capacity: usize,
    segments: [OnceLock<Box<[AtomicU32]>>; NUM_SEGMENTS],
    /// Set before the state that says so.
    finish: OnceLock<Finish>,
    /// Twice the number of complete words, plus [`ENDED`].
    state: AtomicU64,
    is_closed: AtomicBool,
    /// Who is to be woken. Readers are only ever added.
    first_waker: Waker,
}

/// A place in the list of readers' wakers.
#[derive(Debug, Default)]
struct Waker {
    link: OnceLock<Box<(Unparker, Waker)>>,
}

impl TokenLog {
    /// An empty log for at most `max_tokens` tokens: its one writer and a reader.
    pub fn open(max_tokens: u32) -> (TokenLogWriter, TokenLogReader) {
        let log = Arc::new(Self {
            capacity: max_tokens as usize,
            segments: [const { OnceLock::new() }; NUM_SEGMENTS],
            finish: OnceLock::new(),
            state: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
            first_waker: Waker::default(),
        });
        let reader = TokenLogReader::register(Arc::new(Presence(Arc::clone(&log))), 0);
        (TokenLogWriter { log, len: 0, is_ended: false }, reader)
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        let (segment, offset) = place(index);
        &self.segments[segment].get().expect("a segment is there before the length reaches into it")[offset]
    }

    fn read_finish(&self) -> Finish {
        self.finish.get().expect("the end is set before it is published").clone()
    }

    /// Wakes every reader that sleeps. A reader that is about to sleep finds its wake-up waiting.
    fn wake(&self) {
        // Against a reader that registers now: either it is found here, or it finds what was just published.
        fence(SeqCst);
        let mut next = self.first_waker.link.get();
        while let Some(waker) = next {
            waker.0.unpark();
            next = waker.1.link.get();
        }
    }

    fn add_waker(&self, unparker: Unparker) {
        let mut new = Box::new((unparker, Waker::default()));
        let mut end = &self.first_waker;
        loop {
            match end.link.get() {
                Some(waker) => end = &waker.1,
                None => match end.link.set(new) {
                    Ok(()) => break,
                    Err(refused) => new = refused,
                },
            }
        }
        fence(SeqCst);
    }
}

/// Segment of a word, and its offset there.
fn place(index: usize) -> (usize, usize) {
    let segment = (index / FIRST_SEGMENT + 1).ilog2() as usize;
    (segment, index - start_of(segment))
}

fn start_of(segment: usize) -> usize {
    FIRST_SEGMENT * ((1 << segment) - 1)
}

/// The writing end. Dropped before the end of the stream, it ends it with an error, so no reader waits for ever.
#[derive(Debug)]
pub struct TokenLogWriter {
    log: Arc<TokenLog>,
    len: usize,
    is_ended: bool,
}

impl TokenLogWriter {
    fn write(&mut self, word: u32) {
        assert!(self.len < self.log.capacity, "a request writes at most the tokens its log was opened for");
        let (segment, offset) = place(self.len);
        let words = self.log.segments[segment].get_or_init(|| {
            let len = (FIRST_SEGMENT << segment).min(self.log.capacity - start_of(segment));
            (0..len).map(|_| AtomicU32::new(0)).collect()
        });
        words[offset].store(word, Relaxed);
        self.len += 1;
    }

    fn publish(&mut self, finish: Option<Finish>) {
        let mut state = 2 * self.len as u64;
        if let Some(finish) = finish {
            self.log.finish.set(finish).expect("a stream ends once");
            self.is_ended = true;
            state |= ENDED;
        }
        self.log.state.store(state, Release);
        self.log.wake();
    }
}

impl TokenSink for TokenLogWriter {
    fn emit(&mut self, tokens: &[Emitted], finish: Option<Finish>) -> Result<(), Closed> {
        assert!(!self.is_ended, "nothing follows the end of a stream");
        for (index, emitted) in tokens.iter().enumerate() {
            assert!(emitted.token < STARTS_STEP, "a token id leaves room for the flags");
            let accepted = if emitted.is_accepted { ACCEPTED } else { 0 };
            let starts_step = if index == 0 { STARTS_STEP } else { 0 };
            self.write(emitted.token | accepted | starts_step);
        }
        self.publish(finish);
        if self.is_closed() { Err(Closed) } else { Ok(()) }
    }

    fn is_closed(&self) -> bool {
        self.log.is_closed.load(Acquire)
    }
}

impl Drop for TokenLogWriter {
    fn drop(&mut self) {
        if !self.is_ended {
            let error = EngineError::device("engine stopped before the request ended");
            self.publish(Some(Finish { reason: FinishReason::Error(error), counts: Counts::default() }));
        }
    }
}

/// What all readers of a log hold; the last one to let go closes it.
#[derive(Debug)]
struct Presence(Arc<TokenLog>);

impl Drop for Presence {
    fn drop(&mut self) {
        self.0.is_closed.store(true, Release);
    }
}

/// A reading end, with a cursor of its own. A clone goes on where the original stands.
#[derive(Debug)]
pub struct TokenLogReader {
    presence: Arc<Presence>,
    parker: Parker,
    cursor: usize,
    has_finish: bool,
}

impl TokenLogReader {
    fn register(presence: Arc<Presence>, cursor: usize) -> Self {
        let parker = Parker::new();
        presence.0.add_waker(parker.unparker().clone());
        Self { presence, parker, cursor, has_finish: false }
    }

    /// Takes what is new. The end is given once, with or after the last tokens.
    pub fn read(&mut self) -> Read {
        let log = &self.presence.0;
        let state = log.state.load(Acquire);
        let len = (state / 2) as usize;
        let tokens = (self.cursor..len).map(|index| {
            let word = log.word(index).load(Relaxed);
            LoggedToken {
                token: word & !(ACCEPTED | STARTS_STEP),
                is_accepted: word & ACCEPTED != 0,
                starts_step: word & STARTS_STEP != 0,
            }
        });
        let tokens = tokens.collect();
        self.cursor = len;
        let is_new = state & ENDED != 0 && !self.has_finish;
        self.has_finish |= is_new;
        Read { tokens, finish: is_new.then(|| log.read_finish()) }
    }

    /// Whether [`TokenLogReader::read`] would find something, or has given the end already.
    fn is_ready(&self) -> bool {
        let state = self.presence.0.state.load(Acquire);
        state & ENDED != 0 || (state / 2) as usize > self.cursor
    }

    /// Sleeps until there is something to read, or at most for `timeout`. True if there is, or the end has been read.
    pub fn wait(&mut self, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            if self.is_ready() {
                return true;
            }
            let now = Instant::now();
            // A deadline past the clock's range never comes: the sleep is cut into days.
            let until = deadline.unwrap_or(now + Duration::from_secs(86_400));
            if now >= until {
                return false;
            }
            self.parker.park_deadline(until);
        }
    }

    /// Tells the writer that nobody reads any more. What is written can still be read, and the end still comes.
    pub fn close(&self) {
        self.closer().close();
    }

    /// Closes the log from any thread. It counts as a reader while it lives.
    pub fn closer(&self) -> Closer {
        Closer { presence: Arc::clone(&self.presence) }
    }
}

/// See [`TokenLogReader::closer`].
#[derive(Clone, Debug)]
pub struct Closer {
    presence: Arc<Presence>,
}

impl Closer {
    /// See [`TokenLogReader::close`].
    pub fn close(&self) {
        self.presence.0.is_closed.store(true, Release);
    }
}

impl Clone for TokenLogReader {
    fn clone(&self) -> Self {
        Self { has_finish: self.has_finish, ..Self::register(Arc::clone(&self.presence), self.cursor) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn emitted(token: TokenId) -> Emitted {
        Emitted { token, is_accepted: token % 3 == 1 }
    }

    fn finish() -> Finish {
        Finish { reason: FinishReason::Stop, counts: Counts::default() }
    }

    #[test]
    fn words_have_one_place_each() {
        let mut expected = (0, 0);
        for index in 0..10_000 {
            assert_eq!(place(index), expected);
            expected.1 += 1;
            if expected.1 == FIRST_SEGMENT << expected.0 {
                expected = (expected.0 + 1, 0);
            }
        }
        assert!(place(u32::MAX as usize).0 < NUM_SEGMENTS);
    }

    #[test]
    fn a_reader_gets_each_step_once_and_the_end_once() {
        let (mut writer, mut reader) = TokenLog::open(u32::MAX);
        assert_eq!(reader.read(), Read::default());
        assert!(!reader.wait(Duration::from_millis(1)));
        assert_eq!(writer.emit(&[emitted(0), emitted(1)], None), Ok(()));
        assert_eq!(writer.emit(&[emitted(2)], Some(finish())), Ok(()));
        let mut late = reader.clone();
        let read = reader.read();
        let flags: Vec<_> = read.tokens.iter().map(|word| (word.token, word.is_accepted, word.starts_step)).collect();
        assert_eq!(flags, [(0, false, true), (1, true, false), (2, false, true)]);
        assert_eq!(read.finish, Some(finish()));
        assert_eq!(reader.read(), Read::default());
        assert!(reader.wait(Duration::MAX), "after the end nobody sleeps");
        assert_eq!(late.read(), read);
    }

    #[test]
    fn hc_080_the_last_reader_closes_the_log() {
        let (mut writer, reader) = TokenLog::open(4);
        let other = reader.clone();
        drop(reader);
        assert!(!writer.is_closed());
        drop(other);
        assert!(writer.is_closed());
        assert_eq!(writer.emit(&[emitted(0)], None), Err(Closed));
        assert_eq!(writer.emit(&[], Some(finish())), Err(Closed));
    }

    #[test]
    fn a_closed_reader_still_gets_the_end() {
        let (mut writer, mut reader) = TokenLog::open(4);
        reader.close();
        assert_eq!(writer.emit(&[emitted(0)], None), Err(Closed));
        assert_eq!(writer.emit(&[], Some(finish())), Err(Closed));
        assert_eq!(reader.read().finish, Some(finish()));
    }

    #[test]
    fn a_lost_writer_is_an_end_with_an_error() {
        let (writer, mut reader) = TokenLog::open(4);
        let thread = std::thread::spawn(move || drop(writer));
        assert!(reader.wait(Duration::MAX));
        let reason = reader.read().finish.map(|finish| finish.reason);
        assert_eq!(reason, Some(FinishReason::Error(EngineError::device("engine stopped before the request ended"))));
        thread.join().expect("the writer is dropped");
    }
}
