//! The bytes of every token, from its text and the tokenizer's decoder.

use serde_json::Value;

use super::shown;
use crate::error::{EngineError, Result};
use crate::text::TokenTable;

/// One step of a decoder, as it acts on a single token.
enum Step {
    /// Characters of the byte-level alphabet to the bytes they stand for.
    ByteLevel,
    /// `<0x0A>` to the byte it names.
    ByteFallback,
    /// A text to another.
    Replace { pattern: String, content: String },
}

/// What a decoder does to a text.
#[derive(Default)]
struct Decoder {
    steps: Vec<Step>,
    /// Later steps act on the whole text.
    is_fused: bool,
    strips_leading_space: bool,
}

/// The table of a vocabulary. `texts` and `special` go by id; an id without a text has no bytes.
///
/// Bytes put together read as the tokenizer's own decoding does, but for two rarities: a run of byte tokens that is no
/// UTF-8 gives a mark per faulty sequence, not per byte, and only one leading space is dropped.
pub(super) fn build(texts: &[Option<String>], special: Vec<bool>, decoder: Option<&Value>) -> Result<TokenTable> {
    let Some(json) = decoder else {
        // Without a decoder, tokens are joined by spaces.
        let joined = |text: &String| format!(" {text}").into_bytes();
        let bytes = texts.iter().map(|text| text.as_ref().map(joined).unwrap_or_default().into());
        return Ok(TokenTable { bytes: bytes.collect(), special, strips_leading_space: true });
    };
    let mut decoder = Decoder::default();
    decoder.read(json)?;
    let alphabet = byte_alphabet();
    let bytes = texts
        .iter()
        .map(|text| text.as_ref().map(|text| decoder.bytes(text, &alphabet)).unwrap_or_default().into_boxed_slice())
        .collect();
    Ok(TokenTable { bytes, special, strips_leading_space: decoder.strips_leading_space })
}

impl Decoder {
    /// Adds the steps of a decoder as `tokenizer.json` writes it.
    fn read(&mut self, json: &Value) -> Result<()> {
        let field = |name: &str| json.get(name).and_then(Value::as_str).unwrap_or_default();
        match field("type") {
            "ByteLevel" => self.steps.push(Step::ByteLevel),
            "ByteFallback" => self.steps.push(Step::ByteFallback),
            "Fuse" => self.is_fused = true,
            "Sequence" => {
                let parts = json.get("decoders").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
                parts.iter().try_for_each(|part| self.read(part))?;
            }
            "Replace" => {
                let pattern = json.get("pattern").and_then(|pattern| pattern.get("String")).and_then(Value::as_str);
                let is_local = |pattern: &&str| {
                    let mut chars = pattern.chars();
                    chars.next().is_some() && (!self.is_fused || chars.next().is_none())
                };
                let Some(pattern) = pattern.filter(is_local) else {
                    return Err(unknown(json));
                };
                self.steps.push(Step::Replace { pattern: pattern.to_owned(), content: field("content").to_owned() });
            }
            "Strip" => {
                let count = |name: &str| json.get(name).and_then(Value::as_u64).unwrap_or(0);
                match (count("start"), count("stop")) {
                    (0, 0) => {}
                    (1, 0) if self.is_fused && field("content") == " " => {
                        self.strips_leading_space = true;
                    }
                    _ => return Err(unknown(json)),
                }
            }
            "Metaspace" if !self.is_fused => {
                self.steps.push(Step::Replace { pattern: field("replacement").to_owned(), content: " ".to_owned() });
                self.strips_leading_space = field("prepend_scheme") != "never";
            }
            _ => return Err(unknown(json)),
        }
        Ok(())
    }

    fn bytes(&self, text: &str, alphabet: &[Option<u8>]) -> Vec<u8> {
        let mut text = text.to_owned();
        for step in &self.steps {
            match step {
                Step::ByteLevel => {
                    let bytes: Option<Vec<u8>> =
                        text.chars().map(|c| alphabet.get(c as usize).copied().flatten()).collect();
                    // A token with other characters was added as plain text.
                    return bytes.unwrap_or_else(|| text.into_bytes());
                }
                Step::ByteFallback => {
                    if let Some(byte) = named_byte(&text) {
                        return vec![byte];
                    }
                }
                Step::Replace { pattern, content } => text = text.replace(pattern, content),
            }
        }
        text.into_bytes()
    }
}

fn unknown(json: &Value) -> EngineError {
    EngineError::model(format!(
        "expected a decoder of ByteLevel, or of Replace, ByteFallback, Fuse, Strip and Metaspace, got {}, which is not \
         supported yet",
        shown(&json.to_string())
    ))
}

fn named_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The byte of every character of the byte-level alphabet, by code point: printable Latin-1 characters stand for
/// themselves, the other bytes in order for the characters from 256 on.
fn byte_alphabet() -> Vec<Option<u8>> {
    let mut alphabet = vec![None; 256 + 68];
    let mut next = 256;
    for byte in 0..=255u8 {
        let is_printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if is_printable { usize::from(byte) } else { next };
        next += usize::from(!is_printable);
        if let Some(entry) = alphabet.get_mut(code) {
            *entry = Some(byte);
        }
    }
    alphabet
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_names_every_byte_once() {
        let mut bytes: Vec<u8> = byte_alphabet().into_iter().flatten().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_alphabet()[0x120], Some(b' '));
        assert_eq!(byte_alphabet()[0x10A], Some(b'\n'));
    }

    #[test]
    fn decoders_that_are_not_known_are_named() {
        for kind in ["WordPiece", "CTC", "BPEDecoder"] {
            let error = build(&[], Vec::new(), Some(&serde_json::json!({ "type": kind }))).expect_err(kind);
            assert!(error.to_string().contains(kind), "{error}");
        }
    }
}
