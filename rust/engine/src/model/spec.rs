//! What varies between decoder families, as data.
//!
//! A spec comes from a Hugging Face configuration or from GGUF metadata, read in [`crate::load`]. What the forward cannot
//! compute is refused there by name, so that a spec that exists can be run.

use slipstream_kernels::Rope;

use crate::error::{EngineError, Result};
use crate::request::TokenId;

/// Architectures that a spec can describe.
pub const SUPPORTED_ARCHITECTURES: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// Largest values that a file may claim; far above every released model.
const MAX_LAYERS: usize = 1024;
const MAX_WIDTH: usize = 1 << 16;
const MAX_HEAD_DIM: usize = 1024;
const MAX_INTERMEDIATE: usize = 1 << 20;
const MAX_VOCAB: usize = 1 << 22;
const MAX_CONTEXT: usize = 1 << 27;
const MAX_EOS_TOKENS: usize = 256;

/// How rotary frequencies are changed for a longer context.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by one factor.
    Linear {
        /// The factor.
        factor: f32,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f32,
        /// Wavelengths above `original_max_position / low_freq_factor` are divided.
        low_freq_factor: f32,
        /// Wavelengths below `original_max_position / high_freq_factor` are kept.
        high_freq_factor: f32,
        /// Context length before scaling.
        original_max_position: f32,
    },
    /// One divisor per frequency, as GGUF files carry them (`rope_freqs.weight`).
    Divided {
        /// The divisors, `head_dim / 2` of them.
        factors: Vec<f32>,
    },
}

/// A decoder of the llama family: pre-norm RMS blocks, rotary attention with grouped heads, SiLU-gated MLP.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// Family name, one of [`SUPPORTED_ARCHITECTURES`].
    pub architecture: String,
    /// Decoder layers.
    pub num_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head, even.
    pub head_dim: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// Their scaling.
    pub rope_scaling: RopeScaling,
    /// Whether q, k and v projections have a bias (Qwen2).
    pub qkv_bias: bool,
    /// Whether every query and key head is normed (Qwen3).
    pub qk_norm: bool,
    /// Whether the output head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Context length in tokens.
    pub max_position: usize,
    /// Token that begins a text.
    pub bos_token_id: Option<TokenId>,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<TokenId>,
    /// Factor on the attention scores.
    pub attention_scale: f32,
}

impl ModelSpec {
    /// Rotary frequencies, by the arithmetic of transformers: powers rounded to f32, then f32 throughout.
    pub fn rope(&self) -> Rope {
        let width = self.head_dim as f32;
        let inv_freq = (0..self.head_dim / 2).map(|pair| {
            let exponent = (2 * pair) as f32 / width;
            1.0 / (f64::from(self.rope_theta).powf(f64::from(exponent)) as f32)
        });
        let inv_freq = match &self.rope_scaling {
            RopeScaling::None => inv_freq.collect(),
            RopeScaling::Linear { factor } => inv_freq.map(|freq| freq / factor).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let longest_kept = original_max_position / high_freq_factor;
                let shortest_divided = original_max_position / low_freq_factor;
                inv_freq
                    .map(|freq| {
                        let wavelength = (2.0 * std::f64::consts::PI) as f32 / freq;
                        if wavelength > shortest_divided {
                            return freq / factor;
                        }
                        if wavelength < longest_kept {
                            return freq;
                        }
                        let smooth = (original_max_position / wavelength - low_freq_factor)
                            / (high_freq_factor - low_freq_factor);
                        (1.0 - smooth) * (freq / factor) + smooth * freq
                    })
                    .collect()
            }
            RopeScaling::Divided { factors } => inv_freq.zip(factors).map(|(freq, factor)| freq / factor).collect(),
        };
        Rope { inv_freq, amplitude: 1.0 }
    }

    /// Refuses sizes that do not fit together, naming the field. Both readers end here.
    pub(crate) fn checked(self) -> Result<Self> {
        let sizes = [
            ("number of layers", self.num_layers, MAX_LAYERS),
            ("hidden size", self.hidden_size, MAX_WIDTH),
            ("number of attention heads", self.num_heads, MAX_WIDTH),
            ("number of key/value heads", self.num_kv_heads, MAX_WIDTH),
            ("head dimension", self.head_dim, MAX_HEAD_DIM),
            ("intermediate size", self.intermediate_size, MAX_INTERMEDIATE),
            ("vocabulary size", self.vocab_size, MAX_VOCAB),
            ("context length", self.max_position, MAX_CONTEXT),
        ];
        for (name, value, most) in sizes {
            if value == 0 || value > most {
                return Err(EngineError::model(format!("expected a {name} of 1 to {most}, got {value}")));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(EngineError::model(format!(
                "expected a number of key/value heads that divides the {} attention heads, got {}",
                self.num_heads, self.num_kv_heads
            )));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(EngineError::model(format!("expected an even head dimension, got {}", self.head_dim)));
        }
        if self.num_heads * self.head_dim > 4 * MAX_WIDTH {
            return Err(EngineError::model(format!(
                "expected attention of at most {} wide, got {} heads of {}",
                4 * MAX_WIDTH,
                self.num_heads,
                self.head_dim
            )));
        }
        in_range("epsilon of the RMS norm", self.rms_norm_eps, 0.0, 1.0)?;
        in_range("rotary base", self.rope_theta, 1.0, 1e12)?;
        match &self.rope_scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                in_range("rotary scaling factor", *factor, 1e-3, 1e6)?;
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                in_range("rotary scaling factor", *factor, 1e-3, 1e6)?;
                in_range("low_freq_factor", *low_freq_factor, 1e-3, 1e6)?;
                in_range("high_freq_factor", *high_freq_factor, 1e-3, 1e6)?;
                in_range("original_max_position_embeddings", *original_max_position, 1.0, MAX_CONTEXT as f32)?;
                if high_freq_factor <= low_freq_factor {
                    return Err(EngineError::model(format!(
                        "expected high_freq_factor above low_freq_factor, got {high_freq_factor} and {low_freq_factor}"
                    )));
                }
            }
            RopeScaling::Divided { factors } => {
                if factors.len() != self.head_dim / 2 {
                    return Err(EngineError::model(format!(
                        "expected {} rotary factors, got {}",
                        self.head_dim / 2,
                        factors.len()
                    )));
                }
                factors.iter().try_for_each(|factor| in_range("rotary factor", *factor, 1e-3, 1e6))?;
            }
        }
        in_range("attention scale", self.attention_scale, 1e-6, 1e3)?;
        if self.eos_token_ids.len() > MAX_EOS_TOKENS {
            return Err(EngineError::model(format!(
                "expected at most {MAX_EOS_TOKENS} eos token ids, got {}",
                self.eos_token_ids.len()
            )));
        }
        for (name, token) in
            self.bos_token_id.iter().map(|id| ("bos", *id)).chain(self.eos_token_ids.iter().map(|id| ("eos", *id)))
        {
            if token as usize >= self.vocab_size {
                return Err(EngineError::model(format!(
                    "expected a {name} token id below the vocabulary size {}, got {token}",
                    self.vocab_size
                )));
            }
        }
        Ok(self)
    }
}

/// The usual factor on attention scores, `head_dim ** -0.5` as Python computes it.
pub(crate) fn default_attention_scale(head_dim: usize) -> f32 {
    (1.0 / (head_dim as f64).sqrt()) as f32
}

fn in_range(name: &str, value: f32, low: f32, high: f32) -> Result<()> {
    if value >= low && value <= high {
        return Ok(());
    }
    Err(EngineError::model(format!("expected {name} between {low} and {high}, got {value}")))
}
