//! The published EAGLE-1/2 checkpoint: `config.json` and a handful of tensors. Nothing in the config says EAGLE, so the
//! tensors' names do.

use std::sync::Arc;

use serde_json::Value;
use slipstream_kernels::{Backend, Rope, Storage};

use crate::error::{EngineError, Result};
use crate::load::TensorStore;
use crate::model::forward::vector_of;
use crate::model::{DecoderWeights, Layer, ModelSpec};

/// A head's weights. The output head is the target's, and so is the embedding unless the head brings its own.
#[derive(Debug)]
pub struct EagleWeights<B: Backend> {
    /// `[hidden, 2 * hidden]`, over (embedding, feature).
    pub fc: B::Weight,
    /// Bias of `fc`.
    pub fc_bias: Option<B::Vector>,
    /// Decoder layers; the first has no input norm.
    pub layers: Vec<Layer<B>>,
    /// Token embedding, `[vocab, hidden]`.
    pub embed: Arc<B::Weight>,
    /// The head's own rotary embedding: never the target's.
    pub rope: Rope,
    /// Width of K and of V in one layer.
    pub kv_width: usize,
}

/// What a head's `config.json` says, in a decoder's words.
pub fn head_spec(config: &Value) -> Result<ModelSpec> {
    let mut config = config.clone();
    if let Some(fields) = config.as_object_mut() {
        // The reference computes the width of a head and ignores this field.
        fields.remove("head_dim");
        // Heads are published under any class name.
        fields.remove("architectures");
        fields.entry("model_type").or_insert_with(|| Value::from("llama"));
        fields.entry("num_hidden_layers").or_insert_with(|| Value::from(1));
    }
    let mut spec = ModelSpec::from_config(&config, None)?;
    spec.qkv_bias = config.get("qkv_bias").and_then(Value::as_bool).unwrap_or(false);
    spec.qk_norm = false;
    Ok(spec)
}

/// Refuses what is not an EAGLE-1/2 head, by what gives it away.
fn check_layout(tensors: &TensorStore<'_>) -> Result<()> {
    if tensors.has("midlayer.self_attn.q_proj.weight") || tensors.has("d2t") {
        return Err(EngineError::model("expected an EAGLE-1/2 head, got an EAGLE-3 head, which is not supported yet"));
    }
    if !tensors.has("fc.weight") {
        return Err(EngineError::model("expected an EAGLE head's tensor fc.weight, got none")
            .with_hint("a folder with a whole decoder goes in DraftModel(...)"));
    }
    if let Some(name) = ["layers.0.input_layernorm.weight", "embed_layernorm.weight", "hidden_states_layernorm.weight"]
        .into_iter()
        .find(|name| tensors.has(name))
    {
        return Err(EngineError::model(format!(
            "expected an EAGLE-1/2 head as published, got one with {name}, a variant that is not supported"
        )));
    }
    Ok(())
}

impl<B: Backend> EagleWeights<B> {
    /// Uploads a head. Every tensor must have the shape that the target's widths ask for.
    pub fn load(
        backend: &B,
        target: &DecoderWeights<B>,
        config: &Value,
        tensors: &TensorStore<'_>,
        storage: Storage,
    ) -> Result<Self> {
        check_layout(tensors)?;
        let spec = head_spec(config)?;
        let (hidden, vocab) = (target.spec.hidden_size, target.spec.vocab_size);
        let has_bias = config.get("bias").and_then(Value::as_bool).unwrap_or(true);
        let fc = backend.upload(&[tensors.matrix("fc.weight", hidden, 2 * hidden)?], storage)?;
        let fc_bias = if has_bias { Some(backend.vector(&vector_of(tensors, "fc.bias", hidden)?)) } else { None };
        let layers = (0..spec.num_layers)
            .map(|index| Layer::load(backend, tensors, &spec, &format!("layers.{index}"), storage, index > 0))
            .collect::<Result<_>>()?;
        let embed = if tensors.has("embed_tokens.weight") {
            Arc::new(backend.upload(&[tensors.matrix("embed_tokens.weight", vocab, hidden)?], storage)?)
        } else {
            tracing::info!("the head has no embedding of its own: the target's is used");
            Arc::clone(&target.embed)
        };
        Ok(Self { fc, fc_bias, layers, embed, rope: spec.rope(), kv_width: spec.num_kv_heads * spec.head_dim })
    }
}
