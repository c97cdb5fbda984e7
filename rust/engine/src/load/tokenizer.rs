//! Text to token ids, through the `tokenizers` crate.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use tokenizers::models::ModelWrapper;

use super::{shown, token_table};
use crate::error::{EngineError, Result};
use crate::request::TokenId;
use crate::text::TokenTable;

/// Ids from here on are refused; far above every released vocabulary.
const MAX_TOKENS: usize = 1 << 22;

/// Tokens put around a text beside what the tokenizer's own post-processor adds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Added {
    pub(super) first: Option<TokenId>,
    pub(super) last: Option<TokenId>,
}

/// A model's tokenizer: from `tokenizer.json`, or from what a GGUF file says.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    texts: Vec<Option<String>>,
    table: Arc<TokenTable>,
    added: Added,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Tokenizer").field("vocab_size", &self.texts.len()).finish_non_exhaustive()
    }
}

/// The parts of `tokenizer.json` that the crate takes on trust.
#[derive(serde::Deserialize)]
struct Outline {
    #[serde(default)]
    added_tokens: Vec<OutlineToken>,
    model: OutlineModel,
}

#[derive(serde::Deserialize)]
struct OutlineToken {
    id: u32,
    content: String,
}

#[derive(serde::Deserialize)]
struct OutlineModel {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f64>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    pub fn from_json(bytes: &[u8]) -> Result<Self> {
        let outline: Outline = serde_json::from_slice(bytes)
            .map_err(|error| EngineError::model(format!("expected a tokenizer.json: {}", shown(&error.to_string()))))?;
        outline.model.check()?;
        let mut inner = guarded("reading the tokenizer", || tokenizers::Tokenizer::from_bytes(bytes))?;
        inner
            .with_truncation(None)
            .map_err(|error| EngineError::model(format!("expected a tokenizer: {error}")))?
            .with_padding(None);
        if matches!(inner.get_model(), ModelWrapper::WordPiece(_)) {
            return Err(unsupported_model("WordPiece"));
        }
        for token in &outline.added_tokens {
            let got = inner.token_to_id(&token.content);
            if !token.content.is_empty() && got != Some(token.id) {
                return Err(EngineError::model(format!(
                    "expected the added token {} at id {}, got {}",
                    shown(&token.content),
                    token.id,
                    got.map_or_else(|| "none".to_owned(), |id| id.to_string())
                )));
            }
        }
        let vocab = inner.get_vocab(true);
        let size = vocab.values().max().map_or(0, |id| *id as usize + 1);
        if size == 0 || size > MAX_TOKENS {
            return Err(EngineError::model(format!("expected a vocabulary of 1 to {MAX_TOKENS} tokens, got {size}")));
        }
        drop(vocab);
        let added = inner.get_added_vocabulary();
        let texts: Vec<Option<String>> = (0..size as u32)
            // An added token that was normalized is decoded in that form.
            .map(|id| added.simple_id_to_token(id).or_else(|| inner.id_to_token(id)))
            .collect();
        let special = texts.iter().map(|text| text.as_ref().is_some_and(|text| added.is_special_token(text))).collect();
        let decoder = inner
            .get_decoder()
            .map(serde_json::to_value)
            .transpose()
            .map_err(|error| EngineError::model(format!("expected a decoder: {error}")))?;
        let table = Arc::new(token_table::build(&texts, special, decoder.as_ref())?);
        Ok(Self { inner, texts, table, added: Added::default() })
    }

    pub(super) fn with_added(mut self, added: Added) -> Self {
        self.added = added;
        self
    }

    /// Token ids of a text. The text of a special token becomes that token; `add_special` puts around the text what the
    /// model was trained to see there (never on top of a rendered chat).
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>> {
        let encoding = guarded("encoding a text", || self.inner.encode_fast(text, add_special))?;
        let Added { first, last } = if add_special { self.added } else { Added::default() };
        Ok(first.into_iter().chain(encoding.get_ids().iter().copied()).chain(last).collect())
    }

    /// Text of tokens without special ones, by the tokenizer's own decoder. [`Tokenizer::table`] gives the same text
    /// token by token.
    pub fn decode(&self, tokens: &[TokenId]) -> Result<String> {
        guarded("decoding tokens", || self.inner.decode(tokens, true))
    }

    /// A token as the vocabulary writes it.
    pub fn token_text(&self, token: TokenId) -> Option<&str> {
        self.texts.get(token as usize).and_then(Option::as_deref)
    }

    /// The id of a token as the vocabulary writes it.
    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.inner.token_to_id(text)
    }

    /// The id of a special token.
    pub fn special_token_id(&self, text: &str) -> Option<TokenId> {
        self.token_id(text).filter(|id| self.table.special.get(*id as usize).copied().unwrap_or(false))
    }

    /// One more than the largest token id.
    pub fn vocab_size(&self) -> usize {
        self.texts.len()
    }

    /// The bytes of every token.
    pub fn table(&self) -> Arc<TokenTable> {
        Arc::clone(&self.table)
    }
}

impl OutlineModel {
    fn check(&self) -> Result<()> {
        match self.kind.as_deref() {
            None | Some("BPE" | "Unigram" | "WordLevel") => {}
            Some(other) => return Err(unsupported_model(other)),
        }
        if self.dropout.is_some_and(|dropout| dropout != 0.0) {
            return Err(EngineError::model(
                "expected a tokenizer without dropout, got one that drops merges at random",
            ));
        }
        for (name, affix) in [
            ("continuing_subword_prefix", &self.continuing_subword_prefix),
            ("end_of_word_suffix", &self.end_of_word_suffix),
        ] {
            if affix.as_ref().is_some_and(|affix| !affix.is_empty()) {
                return Err(EngineError::model(format!(
                    "expected no {name} in the tokenizer, which is not supported yet"
                )));
            }
        }
        Ok(())
    }
}

fn unsupported_model(kind: &str) -> EngineError {
    EngineError::model(format!(
        "expected a tokenizer model of BPE, Unigram or WordLevel, got {}, which is not supported yet",
        shown(kind)
    ))
}

/// Runs what the crate may refuse by panicking. It is given nothing that could be left half changed.
fn guarded<T>(what: &str, run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            Err(EngineError::model(format!("{what}: expected a valid tokenizer: {}", shown(&error.to_string()))))
        }
        Err(_) => Err(EngineError::model(format!("{what}: expected a valid tokenizer, got one that cannot be used"))),
    }
}
