//! Whether a drafter fits a target: asked before anything large is read.

use std::path::Path;

use super::{DrafterFile, Settings};
use crate::draft::{NGramSettings, TreeShape, head_spec};
use crate::error::{EngineError, Result};
use crate::load::ModelFile;
use crate::request::TokenId;

/// Refuses an EAGLE head where a decoder is wanted (its config looks like one), and weights with more layers than the
/// config says.
pub(super) fn check_decoder(file: &ModelFile<'_>) -> Result<()> {
    if file.tensors.has("fc.weight") && !file.tensors.has("model.layers.0.input_layernorm.weight") {
        return Err(EngineError::model(format!("expected a decoder, got a draft head: {}", file.name))
            .with_hint("a head goes beside its target: Engine(target, Eagle(head))"));
    }
    let beyond = format!("model.layers.{}.input_layernorm.weight", file.spec.num_layers);
    if file.tensors.has(&beyond) {
        return Err(EngineError::model(format!(
            "expected weights of {} layers, as the config says, got a tensor {beyond}",
            file.spec.num_layers
        )));
    }
    Ok(())
}

/// Refuses a context that the model was not made for.
pub(super) fn check_context(settings: &Settings, target: &ModelFile<'_>) -> Result<()> {
    match settings.max_context {
        Some(max_context) if max_context as usize > target.spec.max_position => Err(EngineError::config(format!(
            "expected max_context of at most {}, what the model was made for, got {max_context}",
            target.spec.max_position
        ))),
        _ => Ok(()),
    }
}

/// Refuses a drafter that does not fit, before any weight is read; its tree's shape if it has one.
pub(super) fn check_fit(drafter: &DrafterFile<'_>, target: &ModelFile<'_>) -> Result<Option<TreeShape>> {
    match drafter {
        DrafterFile::NGram(NGramSettings { min_match, max_match, max_nodes }) => {
            if *min_match == 0 || min_match > max_match || *max_nodes == 0 || *max_nodes > 1024 {
                return Err(EngineError::config(format!(
                    "expected 1 <= min_match <= max_match and 1 <= max_nodes <= 1024, got {min_match}, {max_match} and \
                     {max_nodes}"
                )));
            }
            Ok(None)
        }
        DrafterFile::DraftModel { file, num_layers, tree } => {
            let spec = file.as_ref().map_or(&target.spec, |file| &file.spec);
            if let Some(num_layers) = *num_layers
                && (num_layers == 0 || num_layers > spec.num_layers)
            {
                return Err(EngineError::config(format!(
                    "expected num_layers between 1 and the draft model's {}, got {num_layers}",
                    spec.num_layers
                )));
            }
            if let Some(file) = file {
                check_decoder(file)?;
                check_vocabulary(file, target)?;
            }
            tree.shape().map(Some)
        }
        DrafterFile::Eagle { file, tree } => {
            let spec = head_spec(&file.config)?;
            let (hidden, vocab) = (target.spec.hidden_size, target.spec.vocab_size);
            let pairs = [
                ("hidden size", hidden, spec.hidden_size, format!(" (fc.weight of [{hidden}, {}])", 2 * hidden)),
                ("vocabulary size", vocab, spec.vocab_size, String::new()),
            ];
            for (what, target, head, tensor) in pairs {
                if head != target {
                    return Err(EngineError::model(format!(
                        "expected an EAGLE head of the target's {what} {target}{tensor}, got {head}"
                    ))
                    .with_hint("a head fits only the model that it was trained for"));
                }
            }
            tree.shape().map(Some)
        }
    }
}

/// A draft model must mean the same by every id. Embedding tables of one family differ in padding, so the tokenizers
/// are compared where both are there, and sizes only where they are not.
fn check_vocabulary(draft: &ModelFile<'_>, target: &ModelFile<'_>) -> Result<()> {
    let mismatch = |what: String| {
        Err(EngineError::model(what).with_hint("a draft model must share the target's tokenizer, id by id"))
    };
    if let (Some(ours), Some(theirs)) = (&target.tokenizer, &draft.tokenizer) {
        let (num_ours, num_theirs) = (ours.vocab_size(), theirs.vocab_size());
        if num_ours != num_theirs {
            return mismatch(format!("expected a draft model of {num_ours} tokens, got {num_theirs}"));
        }
        let differing = (0..num_ours as TokenId).find(|token| ours.token_text(*token) != theirs.token_text(*token));
        if let Some(token) = differing {
            return mismatch(format!(
                "expected token {token} of the draft model to be {:?}, got {:?}",
                ours.token_text(token).unwrap_or_default(),
                theirs.token_text(token).unwrap_or_default()
            ));
        }
        return Ok(());
    }
    if target.spec.vocab_size != draft.spec.vocab_size {
        return mismatch(format!(
            "expected a draft model of vocabulary size {}, got {}",
            target.spec.vocab_size, draft.spec.vocab_size
        ));
    }
    Ok(())
}

/// The path of a draft model that is the target itself, so that its weights are shared.
pub fn is_same_file(target: &Path, draft: &Path) -> bool {
    match (target.canonicalize(), draft.canonicalize()) {
        (Ok(target), Ok(draft)) => target == draft,
        _ => false,
    }
}
