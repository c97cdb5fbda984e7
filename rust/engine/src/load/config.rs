//! Reading a Hugging Face `config.json`.

use serde_json::{Map, Value};

use super::{shown, unsupported};
use crate::error::{EngineError, Result};
use crate::model::spec::{ModelSpec, RopeScaling, default_attention_scale};
use crate::request::TokenId;

/// What a family's configuration class fills in where `config.json` says nothing.
struct Defaults {
    head_dim: Option<usize>,
    max_position: usize,
    bos_token_id: Option<TokenId>,
    eos_token_id: Option<TokenId>,
    qkv_bias: bool,
    qk_norm: bool,
}

const LLAMA: Defaults = Defaults {
    head_dim: None,
    max_position: 2048,
    bos_token_id: Some(1),
    eos_token_id: Some(2),
    qkv_bias: false,
    qk_norm: false,
};
const QWEN2: Defaults = Defaults {
    head_dim: None,
    max_position: 32768,
    bos_token_id: None,
    eos_token_id: None,
    qkv_bias: true,
    qk_norm: false,
};
const QWEN3: Defaults = Defaults {
    head_dim: Some(128),
    max_position: 32768,
    bos_token_id: None,
    eos_token_id: None,
    qkv_bias: false,
    qk_norm: true,
};

/// The fields of one JSON object; absent and null are the same.
struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn wrong(name: &str, expected: &str, got: &Value) -> EngineError {
        EngineError::model(format!("expected {expected} for {name}, got {}", shown(&got.to_string())))
    }

    fn count(&self, name: &str) -> Result<Option<usize>> {
        let read = |value: &Value| {
            value
                .as_u64()
                .and_then(|count| usize::try_from(count).ok())
                .ok_or_else(|| Self::wrong(name, "a whole number", value))
        };
        self.get(name).map(read).transpose()
    }

    fn required(&self, name: &str) -> Result<usize> {
        self.count(name)?.ok_or_else(|| EngineError::model(format!("expected a field {name}, got none")))
    }

    fn number(&self, name: &str) -> Result<Option<f32>> {
        let read = |value: &Value| {
            value.as_f64().map(|number| number as f32).ok_or_else(|| Self::wrong(name, "a number", value))
        };
        self.get(name).map(read).transpose()
    }

    fn flag(&self, name: &str) -> Result<Option<bool>> {
        self.get(name).map(|value| value.as_bool().ok_or_else(|| Self::wrong(name, "true or false", value))).transpose()
    }

    fn text(&self, name: &str) -> Result<Option<&'a str>> {
        self.get(name).map(|value| value.as_str().ok_or_else(|| Self::wrong(name, "a text", value))).transpose()
    }

    fn object(&self, name: &str) -> Result<Option<Fields<'a>>> {
        self.get(name)
            .map(|value| value.as_object().map(Fields).ok_or_else(|| Self::wrong(name, "an object", value)))
            .transpose()
    }

    /// One token id or a list of them.
    fn tokens(&self, name: &str) -> Result<Option<Vec<TokenId>>> {
        let one = |value: &Value| {
            value
                .as_u64()
                .and_then(|id| TokenId::try_from(id).ok())
                .ok_or_else(|| Self::wrong(name, "token ids", value))
        };
        let read = |value: &Value| match value {
            Value::Array(items) => items.iter().map(one).collect(),
            single => Ok(vec![one(single)?]),
        };
        self.get(name).map(read).transpose()
    }
}

impl ModelSpec {
    /// Reads a Hugging Face `config.json`, in the style of transformers 4 or 5. `generation_config`, where there is one,
    /// has the last word on the tokens that begin and end a text.
    pub fn from_config(json: &Value, generation_config: Option<&Value>) -> Result<ModelSpec> {
        read(json, generation_config)
    }
}

fn read(json: &Value, generation_config: Option<&Value>) -> Result<ModelSpec> {
    let object = json.as_object().ok_or_else(|| EngineError::model("expected a JSON object in config.json"))?;
    let fields = Fields(object);
    let family = fields.text("model_type")?.ok_or_else(|| {
        EngineError::model("expected a field model_type, got none").with_hint("is this a model's config.json?")
    })?;
    let defaults = match family {
        "llama" => &LLAMA,
        "qwen2" => &QWEN2,
        "qwen3" => &QWEN3,
        other => return Err(unsupported("a model_type", other)),
    };
    refuse_variants(&fields)?;

    let hidden_size = fields.required("hidden_size")?;
    let num_heads = fields.required("num_attention_heads")?;
    let head_dim = match fields.count("head_dim")?.or(defaults.head_dim) {
        Some(head_dim) => head_dim,
        None if num_heads > 0 && hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            return Err(EngineError::model(format!(
                "expected num_attention_heads to divide hidden_size {hidden_size}, got {num_heads}"
            )));
        }
    };
    let max_position = fields.count("max_position_embeddings")?.unwrap_or(defaults.max_position);
    let (rope_theta, rope_scaling) = rope(&fields, max_position)?;
    let (bos_token_id, eos_token_ids) = end_tokens(&fields, generation_config, defaults)?;
    ModelSpec {
        architecture: family.to_owned(),
        num_layers: fields.required("num_hidden_layers")?,
        hidden_size,
        num_heads,
        num_kv_heads: fields.count("num_key_value_heads")?.unwrap_or(num_heads),
        head_dim,
        intermediate_size: fields.required("intermediate_size")?,
        vocab_size: fields.required("vocab_size")?,
        rms_norm_eps: fields.number("rms_norm_eps")?.unwrap_or(1e-6),
        rope_theta,
        rope_scaling,
        qkv_bias: defaults.qkv_bias,
        qk_norm: defaults.qk_norm,
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        max_position,
        bos_token_id,
        eos_token_ids,
        attention_scale: default_attention_scale(head_dim),
    }
    .checked()
}

/// Refuses what these families can be told to do and this engine does not.
fn refuse_variants(fields: &Fields<'_>) -> Result<()> {
    if let Some(activation) = fields.text("hidden_act")?
        && activation != "silu"
    {
        return Err(EngineError::model(format!("expected hidden_act silu, got {}", shown(activation))));
    }
    for name in ["attention_bias", "mlp_bias", "use_sliding_window"] {
        if fields.flag(name)? == Some(true) {
            return Err(EngineError::model(format!("expected {name} false, got true, which is not supported yet")));
        }
    }
    if let Some(layers) = fields.get("layer_types") {
        let types = layers.as_array().ok_or_else(|| Fields::wrong("layer_types", "a list", layers))?;
        if let Some(other) = types.iter().find(|layer| layer.as_str() != Some("full_attention")) {
            return Err(Fields::wrong("layer_types", "full_attention in every layer", other));
        }
    }
    for name in ["num_experts", "num_local_experts", "n_routed_experts"] {
        if fields.count(name)?.unwrap_or(0) > 0 {
            return Err(EngineError::model(format!("expected no {name}: mixtures of experts are not supported yet")));
        }
    }
    if let Some(classes) = fields.get("architectures") {
        let known = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"];
        let classes = classes.as_array().ok_or_else(|| Fields::wrong("architectures", "a list", classes))?;
        if let Some(other) = classes.iter().find(|class| !class.as_str().is_some_and(|class| known.contains(&class))) {
            return Err(Fields::wrong("architectures", &format!("of {}", known.join(", ")), other));
        }
    }
    if let Some(quantization) = fields.object("quantization_config")? {
        let method = quantization.text("quant_method")?.unwrap_or("unknown");
        return Err(EngineError::model(format!(
            "expected weights as f32, f16 or bf16, got quantization_config of {}",
            shown(method)
        ))
        .with_hint("use the original model, or a .gguf file for quantized weights"));
    }
    Ok(())
}

/// Rotary base and scaling: `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`.
fn rope(fields: &Fields<'_>, max_position: usize) -> Result<(f32, RopeScaling)> {
    let parameters = match fields.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => fields.object("rope_scaling")?,
    };
    let nested = |name: &str| parameters.as_ref().map_or(Ok(None), |parameters| parameters.number(name));
    let theta = match nested("rope_theta")? {
        Some(theta) => theta,
        None => fields.number("rope_theta")?.unwrap_or(10_000.0),
    };
    for share in [nested("partial_rotary_factor")?, fields.number("partial_rotary_factor")?].into_iter().flatten() {
        if share != 1.0 {
            return Err(EngineError::model(format!("expected partial_rotary_factor 1, got {share}")));
        }
    }
    let Some(parameters) = parameters else {
        return Ok((theta, RopeScaling::None));
    };
    let kind = match parameters.text("rope_type")? {
        Some(kind) => Some(kind),
        None => parameters.text("type")?,
    };
    if kind.is_none()
        && let Some((name, value)) = parameters.0.iter().find(|(_, value)| value.is_object())
    {
        return Err(Fields::wrong(
            "rope_parameters",
            "one set for all layers",
            &serde_json::json!({ name.as_str(): value }),
        ));
    }
    let needed = |name: &str| {
        parameters
            .number(name)?
            .ok_or_else(|| EngineError::model(format!("expected a field {name} in the rotary scaling, got none")))
    };
    let scaling = match kind.unwrap_or("default") {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: needed("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: needed("factor")?,
            low_freq_factor: needed("low_freq_factor")?,
            high_freq_factor: needed("high_freq_factor")?,
            original_max_position: parameters
                .number("original_max_position_embeddings")?
                .unwrap_or(max_position as f32),
        },
        other => {
            return Err(EngineError::model(format!(
                "expected rotary scaling of default, linear or llama3, got {}, which is not supported yet",
                shown(other)
            )));
        }
    };
    if parameters.get("mrope_section").is_some() {
        return Err(EngineError::model("expected one-dimensional positions, got mrope_section"));
    }
    Ok((theta, scaling))
}

/// The tokens that begin and end a text.
fn end_tokens(
    fields: &Fields<'_>,
    generation_config: Option<&Value>,
    defaults: &Defaults,
) -> Result<(Option<TokenId>, Vec<TokenId>)> {
    let generation = generation_config
        .map(|json| {
            json.as_object()
                .map(Fields)
                .ok_or_else(|| EngineError::model("expected a JSON object in generation_config.json"))
        })
        .transpose()?;
    let pick = |name: &str, default: Option<TokenId>| -> Result<Vec<TokenId>> {
        if let Some(generation) = &generation
            && let Some(tokens) = generation.tokens(name)?
        {
            return Ok(tokens);
        }
        // An explicit null says that there is none; an absent field leaves it to the family.
        match fields.tokens(name)? {
            Some(tokens) => Ok(tokens),
            None if fields.0.contains_key(name) => Ok(Vec::new()),
            None => Ok(default.into_iter().collect()),
        }
    };
    let bos = pick("bos_token_id", defaults.bos_token_id)?;
    Ok((bos.first().copied(), pick("eos_token_id", defaults.eos_token_id)?))
}
