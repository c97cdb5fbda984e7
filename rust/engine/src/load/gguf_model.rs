//! What a GGUF file says about its model: the spec, and tensors under the names of Hugging Face.

use slipstream_kernels::{HostType, RowOrder};

use super::gguf::{Gguf, TensorInfo};
use super::gguf_value::Metadata;
use super::store::TensorType;
use super::{shown, unsupported};
use crate::error::{EngineError, Result};
use crate::model::spec::{ModelSpec, RopeScaling, SUPPORTED_ARCHITECTURES, default_attention_scale};
use crate::request::TokenId;

/// Divisors of the rotary frequencies.
const ROPE_FREQS: &str = "rope_freqs.weight";

/// The keys of one architecture, `{architecture}.{name}`.
struct Keys<'g> {
    architecture: &'g str,
    metadata: &'g Metadata<'g>,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn count(&self, name: &str) -> Result<Option<usize>> {
        let key = self.key(name);
        let Some(count) = self.metadata.count(&key)? else {
            return Ok(None);
        };
        usize::try_from(count)
            .map(Some)
            .map_err(|_| EngineError::model(format!("key {key}: expected a size, got {count}")))
    }

    fn required(&self, name: &str) -> Result<usize> {
        self.count(name)?.ok_or_else(|| EngineError::model(format!("expected a key {}, got none", self.key(name))))
    }

    /// A number of heads: one for all layers, or an equal one for each.
    fn heads(&self, name: &str) -> Result<Option<usize>> {
        let key = self.key(name);
        let Some(counts) = self.metadata.integers(&key)? else {
            return Ok(None);
        };
        let first = counts.first().copied().unwrap_or(0);
        if counts.iter().any(|count| *count != first) {
            return Err(EngineError::model(format!(
                "key {key}: expected the same number in every layer, got several, which is not supported yet"
            )));
        }
        usize::try_from(first)
            .map(Some)
            .map_err(|_| EngineError::model(format!("key {key}: expected a number of at least 0, got {first}")))
    }

    fn float(&self, name: &str) -> Result<Option<f32>> {
        Ok(self.metadata.float(&self.key(name))?.map(|number| number as f32))
    }
}

/// The spec that the metadata and the tensors describe.
pub(super) fn spec(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let metadata = &gguf.metadata;
    let architecture = metadata
        .text("general.architecture")?
        .ok_or_else(|| EngineError::model("expected a key general.architecture, got none"))?;
    if !SUPPORTED_ARCHITECTURES.contains(&architecture) {
        return Err(unsupported("general.architecture", architecture));
    }
    let keys = Keys { architecture, metadata };
    refuse_variants(&keys, gguf)?;

    let hidden_size = keys.required("embedding_length")?;
    let num_heads = keys
        .heads("attention.head_count")?
        .ok_or_else(|| EngineError::model(format!("expected a key {architecture}.attention.head_count, got none")))?;
    let head_dim = match keys.count("attention.key_length")? {
        Some(head_dim) => head_dim,
        None if num_heads > 0 && hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            return Err(EngineError::model(format!(
                "key {architecture}.attention.head_count: expected a divisor of {hidden_size}, got {num_heads}"
            )));
        }
    };
    for name in ["attention.value_length", "rope.dimension_count"] {
        if let Some(width) = keys.count(name)?
            && width != head_dim
        {
            return Err(EngineError::model(format!(
                "key {}: expected the head dimension {head_dim}, got {width}, which is not supported yet",
                keys.key(name)
            )));
        }
    }
    let vocab_size = match find(gguf, "token_embd.weight") {
        Some(TensorInfo { shape, .. }) if shape.len() == 2 => shape.first().copied().unwrap_or(0),
        Some(TensorInfo { shape, .. }) => {
            return Err(EngineError::model(format!(
                "tensor token_embd.weight: expected two dimensions, got {shape:?}"
            )));
        }
        None => {
            return Err(EngineError::model("expected a tensor token_embd.weight, got none"));
        }
    };
    ModelSpec {
        architecture: architecture.to_owned(),
        num_layers: keys.required("block_count")?,
        hidden_size,
        num_heads,
        num_kv_heads: keys.heads("attention.head_count_kv")?.unwrap_or(num_heads),
        head_dim,
        intermediate_size: keys.required("feed_forward_length")?,
        vocab_size,
        rms_norm_eps: keys.float("attention.layer_norm_rms_epsilon")?.ok_or_else(|| {
            EngineError::model(format!("expected a key {architecture}.attention.layer_norm_rms_epsilon, got none"))
        })?,
        rope_theta: keys.float("rope.freq_base")?.unwrap_or(10_000.0),
        rope_scaling: rope_scaling(&keys, gguf)?,
        qkv_bias: architecture == "qwen2",
        qk_norm: architecture == "qwen3",
        tie_word_embeddings: find(gguf, "output.weight").is_none(),
        max_position: keys.required("context_length")?,
        bos_token_id: token(metadata, "tokenizer.ggml.bos_token_id")?,
        eos_token_ids: end_tokens(metadata)?,
        attention_scale: default_attention_scale(head_dim),
    }
    .checked()
}

fn refuse_variants(keys: &Keys<'_>, gguf: &Gguf<'_>) -> Result<()> {
    if let Some(parts) = keys.metadata.count("split.count")?
        && parts > 1
    {
        return Err(EngineError::model(format!("key split.count: expected a model in one file, got {parts} parts"))
            .with_hint("join the parts with `llama-gguf-split --merge`"));
    }
    for name in ["expert_count", "attention.sliding_window", "nextn_predict_layers"] {
        if let Some(count) = keys.count(name)?
            && count > 0
        {
            return Err(EngineError::model(format!(
                "key {}: expected 0, got {count}, which is not supported yet",
                keys.key(name)
            )));
        }
    }
    if keys.architecture != "qwen2"
        && let Some(bias) = gguf
            .tensors
            .iter()
            .find(|tensor| tensor.name.starts_with("blk.") && tensor.name.rsplit('.').next() == Some("bias"))
    {
        return Err(EngineError::model(format!(
            "expected no bias for {}, got a tensor {}, which is not supported yet",
            keys.architecture,
            shown(&bias.name)
        )));
    }
    Ok(())
}

fn rope_scaling(keys: &Keys<'_>, gguf: &Gguf<'_>) -> Result<RopeScaling> {
    let key = keys.key("rope.scaling.type");
    let factor = match keys.float("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => keys.float("rope.scale_linear")?,
    };
    let kind = keys.metadata.text(&key)?.unwrap_or(if factor.is_some() { "linear" } else { "none" });
    let linear = match kind {
        "none" => None,
        "linear" => factor.filter(|factor| *factor != 1.0 && *factor != 0.0),
        other => {
            return Err(EngineError::model(format!(
                "key {key}: expected none or linear, got {}, which is not supported yet",
                shown(other)
            )));
        }
    };
    let Some(tensor) = find(gguf, ROPE_FREQS) else {
        return Ok(linear.map_or(RopeScaling::None, |factor| RopeScaling::Linear { factor }));
    };
    if tensor.dtype != TensorType::Weight(HostType::F32) || tensor.shape.len() != 1 {
        return Err(EngineError::model(format!(
            "tensor {ROPE_FREQS}: expected a vector of f32, got {:?} of shape {:?}",
            tensor.dtype, tensor.shape
        )));
    }
    let bytes = keys.metadata.bytes.get(tensor.range.clone()).unwrap_or_default();
    let by = linear.unwrap_or(1.0);
    let factors = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) * by).collect();
    Ok(RopeScaling::Divided { factors })
}

fn find<'g>(gguf: &'g Gguf<'_>, name: &str) -> Option<&'g TensorInfo> {
    gguf.tensors.iter().find(|tensor| tensor.name == name)
}

/// A token id of the metadata; the largest number stands for none.
pub(super) fn token(metadata: &Metadata<'_>, key: &str) -> Result<Option<TokenId>> {
    match metadata.count(key)? {
        None => Ok(None),
        Some(id) if id == u64::from(u32::MAX) => Ok(None),
        Some(id) => TokenId::try_from(id)
            .map(Some)
            .map_err(|_| EngineError::model(format!("key {key}: expected a token id, got {id}"))),
    }
}

/// Tokens that end a text: of the text itself, of a turn, of a message.
fn end_tokens(metadata: &Metadata<'_>) -> Result<Vec<TokenId>> {
    let mut tokens = Vec::new();
    for name in ["eos", "eot", "eom"] {
        if let Some(id) = token(metadata, &format!("tokenizer.ggml.{name}_token_id"))?
            && !tokens.contains(&id)
        {
            tokens.push(id);
        }
    }
    Ok(tokens)
}

/// The Hugging Face name of a tensor; names that have none stay as they are.
pub(super) fn canonical(name: &str) -> String {
    match name {
        "token_embd.weight" => return "model.embed_tokens.weight".to_owned(),
        "output_norm.weight" => return "model.norm.weight".to_owned(),
        "output.weight" => return "lm_head.weight".to_owned(),
        _ => {}
    }
    let parts = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).and_then(|(layer, rest)| {
        let layer: u32 = layer.parse().ok()?;
        let (part, kind) = rest.rsplit_once('.')?;
        let part = match part {
            "attn_norm" => "input_layernorm",
            "attn_q" => "self_attn.q_proj",
            "attn_k" => "self_attn.k_proj",
            "attn_v" => "self_attn.v_proj",
            "attn_output" => "self_attn.o_proj",
            "attn_q_norm" => "self_attn.q_norm",
            "attn_k_norm" => "self_attn.k_norm",
            "ffn_norm" => "post_attention_layernorm",
            "ffn_gate" => "mlp.gate_proj",
            "ffn_up" => "mlp.up_proj",
            "ffn_down" => "mlp.down_proj",
            _ => return None,
        };
        Some(format!("model.layers.{layer}.{part}.{kind}"))
    });
    parts.unwrap_or_else(|| name.to_owned())
}

/// The row order of a tensor: the llama architecture stores q and k heads interleaved.
pub(super) fn row_order(spec: &ModelSpec, name: &str) -> RowOrder {
    let is_query_or_key = name.ends_with(".attn_q.weight") || name.ends_with(".attn_k.weight");
    if spec.architecture == "llama" && is_query_or_key {
        return RowOrder::Interleaved(spec.head_dim);
    }
    RowOrder::AsStored
}
