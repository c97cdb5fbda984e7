//! Text from token ids, one token at a time: never half a character, never a lost one, and stop strings found wherever
//! they end.

use std::sync::Arc;

use crate::request::TokenId;

/// The bytes of every token of a vocabulary.
#[derive(Debug, Default)]
pub struct TokenTable {
    /// Bytes of each token, by id. An id past the end has none.
    pub bytes: Vec<Box<[u8]>>,
    /// Tokens left out of text (end of text, roles of a chat template), by id.
    pub special: Vec<bool>,
    /// Whether one space at the start of the text is dropped (SentencePiece-style vocabularies).
    pub strips_leading_space: bool,
}

impl TokenTable {
    /// Bytes that a token adds to a text; none for a special token or an unknown id.
    pub fn bytes(&self, token: TokenId) -> &[u8] {
        let index = token as usize;
        if self.special.get(index).copied().unwrap_or(false) {
            return &[];
        }
        self.bytes.get(index).map_or(&[], |bytes| bytes)
    }
}

/// What one token added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pushed {
    /// Text that can be shown now.
    pub text: String,
    /// Whether a stop string ended here; the text ends just before it.
    pub stopped: bool,
}

/// Turns tokens into text. The scheduler and the reader of a stream each run one and agree, since it depends on nothing
/// but the tokens.
#[derive(Clone, Debug)]
pub struct TextStream {
    table: Arc<TokenTable>,
    stops: Arc<[String]>,
    /// Bytes of a character that is not complete yet.
    partial: Vec<u8>,
    /// Characters that may turn out to begin a stop string.
    held: String,
    started: bool,
}

impl TextStream {
    /// A stream over a vocabulary that ends at any of `stops` (each non-empty).
    pub fn new(table: Arc<TokenTable>, stops: Arc<[String]>) -> Self {
        Self { table, stops, partial: Vec::new(), held: String::new(), started: false }
    }

    /// Adds a token. A stop string ends the text only if `may_stop`; else it is ordinary text.
    pub fn push(&mut self, token: TokenId, may_stop: bool) -> Pushed {
        let mut bytes = self.table.bytes(token);
        if !self.started && !bytes.is_empty() {
            self.started = true;
            if self.table.strips_leading_space && bytes[0] == b' ' {
                bytes = &bytes[1..];
            }
        }
        self.partial.extend_from_slice(bytes);
        self.decode(false);
        if may_stop && let Some(start) = self.first_stop() {
            self.held.truncate(start);
            self.partial.clear();
            return Pushed { text: std::mem::take(&mut self.held), stopped: true };
        }
        let rest = self.held.split_off(self.held.len() - self.held_back());
        Pushed { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// The text still held when no further token comes. A cut character becomes one replacement mark.
    pub fn finish(&mut self) -> String {
        self.decode(true);
        std::mem::take(&mut self.held)
    }

    /// Moves complete characters from `partial` to `held`; what can never become one turns into replacement marks, as
    /// decoding the whole text at once would do.
    fn decode(&mut self, is_last: bool) {
        let mut rest = self.partial.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    self.held.push_str(text);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    self.held.push_str(&String::from_utf8_lossy(valid));
                    if let Some(len) = error.error_len() {
                        self.held.push(char::REPLACEMENT_CHARACTER);
                        rest = &after[len..];
                        continue;
                    }
                    rest = after;
                    if is_last && !rest.is_empty() {
                        self.held.push(char::REPLACEMENT_CHARACTER);
                        rest = &[];
                    }
                    break;
                }
            }
        }
        self.partial = rest.to_vec();
    }

    fn first_stop(&self) -> Option<usize> {
        self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min()
    }

    /// Length of the longest end of `held` that begins a stop string.
    fn held_back(&self) -> usize {
        let begins_stop = |tail: &str| self.stops.iter().any(|stop| stop.len() > tail.len() && stop.starts_with(tail));
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        self.held
            .char_indices()
            .map(|(index, _)| index)
            .filter(|index| self.held.len() - index < longest)
            .find(|index| begins_stop(&self.held[*index..]))
            .map_or(0, |index| self.held.len() - index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(pieces: &[&[u8]], stops: &[&str]) -> TextStream {
        let table = TokenTable {
            bytes: pieces.iter().map(|piece| (*piece).into()).collect(),
            special: vec![false; pieces.len()],
            strips_leading_space: false,
        };
        TextStream::new(Arc::new(table), stops.iter().map(|stop| (*stop).to_owned()).collect())
    }

    fn run(stream: &mut TextStream, count: u32) -> (Vec<String>, bool) {
        let mut texts = Vec::new();
        for token in 0..count {
            let pushed = stream.push(token, true);
            texts.push(pushed.text);
            if pushed.stopped {
                return (texts, true);
            }
        }
        texts.push(stream.finish());
        (texts, false)
    }

    #[test]
    fn hc_068_characters_split_over_tokens_arrive_whole() {
        let emoji = "👩‍🚀é한".as_bytes();
        let pieces: Vec<&[u8]> = emoji.chunks(1).collect();
        let (texts, _) = run(&mut stream(&pieces, &[]), emoji.len() as u32);
        assert_eq!(texts.concat().as_bytes(), emoji);
        assert!(texts.iter().all(|text| !text.contains('\u{fffd}')));
    }

    #[test]
    fn hc_069_output_that_ends_inside_a_character_ends_in_one_mark() {
        for cut in 1..4 {
            let bytes = [b"a", &"😀".as_bytes()[..cut]].concat();
            let pieces: Vec<&[u8]> = bytes.chunks(1).collect();
            let (texts, _) = run(&mut stream(&pieces, &[]), bytes.len() as u32);
            assert_eq!(texts.concat(), String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn hc_051_053_stops_split_over_tokens_leak_nothing_and_near_misses_arrive() {
        let (texts, stopped) = run(&mut stream(&[b"one EN", b"x EN", b"D two"], &["END"]), 3);
        assert!(stopped);
        assert_eq!(texts, ["one ", "ENx ", ""]);
        let (texts, stopped) = run(&mut stream(&[b"ends in EN"], &["END"]), 1);
        assert!(!stopped);
        assert_eq!(texts, ["ends in ", "EN"]);
    }

    #[test]
    fn hc_057_a_stop_before_it_may_stop_is_ordinary_text() {
        let mut stream = stream(&[b"aXb", b"Xc"], &["X"]);
        assert_eq!(stream.push(0, false), Pushed { text: "aXb".into(), stopped: false });
        assert_eq!(stream.push(1, true), Pushed { text: String::new(), stopped: true });
    }

    #[test]
    fn invalid_bytes_become_marks_as_in_the_whole_text() {
        let bytes = [b'a', 0xff, 0xe2, 0x82, b'b', 0xc3];
        let pieces: Vec<&[u8]> = bytes.chunks(1).collect();
        let (texts, _) = run(&mut stream(&pieces, &[]), bytes.len() as u32);
        assert_eq!(texts.concat(), String::from_utf8_lossy(&bytes));
    }
}
