//! Every interleaving of a writer and a reader over a few tokens.

use super::*;
use ::loom::thread;

fn emitted(token: TokenId) -> Emitted {
    Emitted { token, is_accepted: false }
}

fn finish() -> Finish {
    Finish { reason: FinishReason::Stop, counts: Counts::default() }
}

/// Reads to the end; each look finds the next tokens of 1, 2, 3, ...
fn read_all(reader: &mut TokenLogReader, mut next: TokenId, wait: bool) -> TokenId {
    loop {
        if wait {
            assert!(reader.wait(Duration::MAX));
        }
        let read = reader.read();
        for word in read.tokens {
            assert_eq!(word.token, next, "a published word is complete (I8)");
            next += 1;
        }
        if read.finish.is_some() {
            return next;
        }
        if !wait {
            thread::yield_now();
        }
    }
}

#[test]
fn loom_published_means_complete() {
    ::loom::model(|| {
        let (mut writer, reader) = TokenLog::open(3);
        let thread = thread::spawn(move || {
            writer.emit(&[emitted(1), emitted(2)], None).expect("a reader is there");
            writer.emit(&[emitted(3)], Some(finish())).expect("a reader is there");
        });
        let mut reader = reader;
        assert_eq!(read_all(&mut reader, 1, false), 4);
        thread.join().expect("the writer ends");
    });
}

#[test]
fn loom_no_wake_up_is_lost() {
    ::loom::model(|| {
        let (mut writer, reader) = TokenLog::open(2);
        let thread = thread::spawn(move || {
            writer.emit(&[emitted(1)], None).expect("a reader is there");
            writer.emit(&[emitted(2)], Some(finish())).expect("a reader is there");
        });
        let mut reader = reader;
        assert_eq!(read_all(&mut reader, 1, true), 3);
        thread.join().expect("the writer ends");
    });
}

#[test]
fn loom_a_reader_that_registers_late_is_woken() {
    ::loom::model(|| {
        let (mut writer, reader) = TokenLog::open(1);
        // The clone belongs to the thread that sleeps in it, and registers while the writer publishes.
        let thread = thread::spawn(move || {
            let mut late = reader.clone();
            assert_eq!(read_all(&mut late, 1, true), 2);
        });
        // The readers may have read the end and left before the writer looks.
        let _ = writer.emit(&[emitted(1)], Some(finish()));
        thread.join().expect("the reader wakes");
    });
}

#[test]
fn loom_a_dropped_writer_wakes_its_reader() {
    ::loom::model(|| {
        let (writer, mut reader) = TokenLog::open(1);
        let thread = thread::spawn(move || drop(writer));
        assert!(reader.wait(Duration::MAX));
        assert!(matches!(reader.read().finish, Some(Finish { reason: FinishReason::Error(_), .. })));
        thread.join().expect("the writer is dropped");
    });
}

#[test]
fn loom_a_close_is_seen_and_ends_the_stream() {
    ::loom::model(|| {
        let (mut writer, mut reader) = TokenLog::open(2);
        let thread = thread::spawn(move || {
            // As the scheduler does: a closed sink is told that its request was cancelled.
            let first = writer.emit(&[emitted(1)], None);
            let second = if first.is_ok() { writer.emit(&[emitted(2)], None) } else { first };
            let reason = if second.is_ok() { FinishReason::Length } else { FinishReason::Cancelled };
            let _ = writer.emit(&[], Some(Finish { reason, counts: Counts::default() }));
        });
        reader.close();
        let next = read_all(&mut reader, 1, true);
        assert!(next == 2 || next == 3);
        thread.join().expect("the writer ends");
    });
}
