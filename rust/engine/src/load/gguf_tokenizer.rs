//! The tokenizer that GGUF metadata describes, written as the `tokenizer.json` it was converted from.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::gguf_model::token;
use super::gguf_value::Metadata;
use super::shown;
use super::tokenizer::{Added, Tokenizer};
use crate::error::{EngineError, Result};

/// A token's role, as numbered in `tokenizer.ggml.token_type`.
const CONTROL: i64 = 3;
/// See [`CONTROL`].
const USER_DEFINED: i64 = 4;

const CONTRACTIONS: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";

/// What the name in `tokenizer.ggml.pre` stands for.
struct Pre {
    normalizer: Value,
    splitter: Value,
    ignore_merges: bool,
    /// Whether texts begin with the first token where the file does not say.
    adds_bos: bool,
}

/// The original definitions of the models that the names come from.
fn pre(name: &str) -> Option<Pre> {
    let byte_level = |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex });
    // Words, numbers of at most `digits` digits, punctuation, white space; byte-level characters after that.
    let split = |digits: &str| {
        let regex = format!(
            r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        );
        json!({ "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false },
            byte_level(false),
        ]})
    };
    Some(match name {
        "gpt-2" | "gpt2" | "default" => {
            Pre { normalizer: Value::Null, splitter: byte_level(true), ignore_merges: false, adds_bos: false }
        }
        "smollm" => Pre {
            normalizer: Value::Null,
            splitter: json!({ "type": "Sequence", "pretokenizers": [
                { "type": "Digits", "individual_digits": true },
                byte_level(true),
            ]}),
            ignore_merges: false,
            adds_bos: false,
        },
        "qwen2" => Pre {
            normalizer: json!({ "type": "NFC" }),
            splitter: split(r"\p{N}"),
            ignore_merges: false,
            adds_bos: false,
        },
        "llama-bpe" | "llama3" | "llama-v3" => {
            Pre { normalizer: Value::Null, splitter: split(r"\p{N}{1,3}"), ignore_merges: true, adds_bos: true }
        }
        _ => return None,
    })
}

/// The tokenizer of a file; `None` where it carries none.
pub(super) fn read(metadata: &Metadata<'_>) -> Result<Option<Tokenizer>> {
    let Some(model) = metadata.text("tokenizer.ggml.model")? else {
        return Ok(None);
    };
    match model {
        "gpt2" => {}
        "none" | "no_vocab" => return Ok(None),
        other => {
            return Err(EngineError::model(format!(
                "key tokenizer.ggml.model: expected gpt2 (byte-level BPE), got {}, which is not supported yet",
                shown(other)
            ))
            .with_hint("use the Hugging Face folder of the model, with its tokenizer.json"));
        }
    }
    let name = metadata.text("tokenizer.ggml.pre")?.unwrap_or("default");
    let pre = pre(name).ok_or_else(|| {
        EngineError::model(format!(
            "key tokenizer.ggml.pre: expected smollm, qwen2, llama-bpe or gpt-2, got {}, which is not supported yet",
            shown(name)
        ))
    })?;
    let tokens = metadata
        .texts("tokenizer.ggml.tokens")?
        .ok_or_else(|| EngineError::model("expected a key tokenizer.ggml.tokens, got none"))?;
    let types = metadata.integers("tokenizer.ggml.token_type")?.unwrap_or_default();
    if !types.is_empty() && types.len() != tokens.len() {
        return Err(EngineError::model(format!(
            "key tokenizer.ggml.token_type: expected {} entries as there are tokens, got {}",
            tokens.len(),
            types.len()
        )));
    }
    let mut vocab = Map::with_capacity(tokens.len());
    for (id, text) in tokens.iter().enumerate() {
        // Of tokens with the same text, the first is the one that text turns into.
        if !vocab.contains_key(*text) {
            vocab.insert((*text).to_owned(), Value::from(id));
        }
    }
    let merges = merges(metadata, &vocab)?;
    let added: Vec<Value> = types
        .iter()
        .zip(&tokens)
        .enumerate()
        .filter(|(id, (kind, text))| {
            matches!(**kind, CONTROL | USER_DEFINED) && !text.is_empty() && vocab.get(**text) == Some(&Value::from(*id))
        })
        .map(|(id, (kind, text))| {
            json!({ "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": *kind == CONTROL })
        })
        .collect();
    let json = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": pre.normalizer,
        "pre_tokenizer": pre.splitter,
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                   "ignore_merges": pre.ignore_merges, "vocab": vocab, "merges": merges },
    });
    let bytes = serde_json::to_vec(&json).map_err(|error| EngineError::model(error.to_string()))?;
    let tokenizer = Tokenizer::from_json(&bytes).map_err(|error| error.within("key tokenizer.ggml.tokens"))?;
    Ok(Some(tokenizer.with_added(added_tokens(metadata, pre.adds_bos, tokens.len())?)))
}

fn merges(metadata: &Metadata<'_>, vocab: &Map<String, Value>) -> Result<Vec<Value>> {
    let key = "tokenizer.ggml.merges";
    let merges = metadata.texts(key)?.ok_or_else(|| EngineError::model(format!("expected a key {key}, got none")))?;
    let mut joined = String::new();
    let mut seen = HashSet::new();
    let mut pairs = Vec::with_capacity(merges.len());
    for merge in merges {
        // A part is never empty, so the space that parts them is not the first character.
        let pair = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(space, _)| merge.split_at(space));
        let Some((left, right)) = pair.and_then(|(left, right)| Some((left, right.strip_prefix(' ')?))) else {
            return Err(EngineError::model(format!("key {key}: expected two tokens, got {}", shown(merge))));
        };
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        for part in [left, right, &joined] {
            if !vocab.contains_key(part) {
                return Err(EngineError::model(format!(
                    "key {key}: expected tokens of the vocabulary, got {} in {}",
                    shown(part),
                    shown(merge)
                )));
            }
        }
        // A repeated pair keeps its first rank.
        if seen.insert(merge) {
            pairs.push(json!([left, right]));
        }
    }
    Ok(pairs)
}

/// What is put around a text.
fn added_tokens(metadata: &Metadata<'_>, adds_bos: bool, vocab_size: usize) -> Result<Added> {
    let pick = |flag: &str, default: bool, name: &str| -> Result<Option<u32>> {
        if !metadata.flag(flag)?.unwrap_or(default) {
            return Ok(None);
        }
        let Some(id) = token(metadata, name)? else {
            return Ok(None);
        };
        if id as usize >= vocab_size {
            return Err(EngineError::model(format!("key {name}: expected a token id below {vocab_size}, got {id}")));
        }
        Ok(Some(id))
    };
    Ok(Added {
        first: pick("tokenizer.ggml.add_bos_token", adds_bos, "tokenizer.ggml.bos_token_id")?,
        last: pick("tokenizer.ggml.add_eos_token", false, "tokenizer.ggml.eos_token_id")?,
    })
}
