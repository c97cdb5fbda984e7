//! A long log with two readers that sleep and poll as they like: every token arrives once, in order, and the end last.

use std::time::Duration;

use slipstream_engine::metrics::Counts;
use slipstream_engine::request::FinishReason;
use slipstream_engine::stream::{Emitted, Finish, TokenLog, TokenLogReader, TokenSink};

const NUM_TOKENS: u32 = 1_000_000;

fn read_all(mut reader: TokenLogReader, polls: bool) -> Finish {
    let mut next = 0;
    loop {
        if !polls {
            assert!(reader.wait(Duration::from_secs(60)), "a wake-up was lost");
        }
        let read = reader.read();
        for word in &read.tokens {
            assert_eq!(word.token, next, "a published word is complete (I8)");
            assert_eq!(word.is_accepted, next % 5 == 3);
            next += 1;
        }
        if let Some(finish) = read.finish {
            assert_eq!(next, NUM_TOKENS, "the end comes after all tokens");
            return finish;
        }
        if polls {
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_million_tokens_reach_two_readers_in_order() {
    let (mut writer, reader) = TokenLog::open(NUM_TOKENS);
    let readers = [(reader.clone(), true), (reader, false)]
        .map(|(reader, polls)| std::thread::spawn(move || read_all(reader, polls)));
    let mut next = 0;
    let mut step = 1;
    while next < NUM_TOKENS {
        let end = (next + step).min(NUM_TOKENS);
        let tokens: Vec<_> = (next..end).map(|token| Emitted { token, is_accepted: token % 5 == 3 }).collect();
        writer.emit(&tokens, None).expect("both readers are there");
        next = end;
        step = step % 11 + 1;
        if step == 7 {
            std::thread::yield_now();
        }
    }
    let finish = Finish { reason: FinishReason::Length, counts: Counts::default() };
    writer.emit(&[], Some(finish.clone())).expect("both readers are there");
    for reader in readers {
        assert_eq!(reader.join().expect("the reader ends"), finish);
    }
}
