//! Weights of a drafter's head: a folder with `config.json` and safetensors, without the rest of a model.

use std::path::Path;

use serde_json::Value;

use super::store::{LentTensors, TensorStore};
use super::{parse_json, read_json, safetensors};
use crate::error::{EngineError, Result};

/// A configuration as it is, and tensors by name. What they mean is the drafter's to know.
#[derive(Debug)]
pub struct Checkpoint<'a> {
    /// `config.json`.
    pub config: Value,
    /// The tensors.
    pub tensors: TensorStore<'a>,
}

impl Checkpoint<'static> {
    /// Opens a folder with `config.json` and `model.safetensors`, or an index of shards.
    pub fn open(folder: &Path) -> Result<Self> {
        super::require_folder(folder)?;
        let config = read_json(&folder.join("config.json"))?;
        let mut tensors = TensorStore::default();
        if !safetensors::read_folder(folder, &mut tensors)? {
            return Err(missing_weights(folder));
        }
        Ok(Self { config, tensors })
    }
}

impl<'a> Checkpoint<'a> {
    /// A checkpoint over tensors in memory.
    pub fn from_parts(config_json: &str, tensors: LentTensors<'a>) -> Result<Self> {
        Ok(Self { config: parse_json(config_json.as_bytes(), "config.json")?, tensors: TensorStore::lent(tensors)? })
    }
}

/// The error for a folder without safetensors.
pub(super) fn missing_weights(folder: &Path) -> EngineError {
    let has = |name: &str| folder.join(name).exists();
    let error = EngineError::model("expected model.safetensors or model.safetensors.index.json, got neither")
        .within(folder.display());
    if has("pytorch_model.bin") || has("pytorch_model.bin.index.json") {
        return error.with_hint(
            "pytorch_model.bin is a pickle, which can run code: load it through torch (`pip install slipstream[torch]`), \
             or convert it with `from safetensors.torch import save_file; import torch` and \
             `save_file(torch.load(\"pytorch_model.bin\", weights_only=True), \"model.safetensors\")`",
        );
    }
    error.with_hint("download the weights into this folder")
}
