//! One forward for every decoder family, over any backend: a [`ModelSpec`] says what varies.

use std::sync::Arc;

use slipstream_kernels::{
    AttentionPlan, AttentionWeights, Backend, HostMatrix, MlpWeights, Rope, Slot, SlotMove, Storage,
};

use super::spec::ModelSpec;
use super::{FeaturePoint, Forward, Target};
use crate::error::{EngineError, Result};
use crate::load::TensorStore;
use crate::request::TokenId;
use crate::rows::Rows;

/// One decoder layer.
#[derive(Debug)]
pub struct Layer<B: Backend> {
    /// Attention.
    pub attention: AttentionWeights<B>,
    /// Gated MLP.
    pub mlp: MlpWeights<B>,
}

/// A decoder's weights on a device. Shared by a target and drafters that borrow from it.
#[derive(Debug)]
pub struct DecoderWeights<B: Backend> {
    /// What the model is.
    pub spec: ModelSpec,
    /// Token embedding, `[vocab, hidden]`.
    pub embed: Arc<B::Weight>,
    /// The layers.
    pub layers: Vec<Layer<B>>,
    /// Final norm, `[hidden]`.
    pub norm: B::Vector,
    /// Output head, `[vocab, hidden]`; the embedding itself where the model ties them.
    pub head: Arc<B::Weight>,
}

/// Where the rows of one pass through a stack of layers stand.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    /// Token of every row.
    pub token_ids: &'a [TokenId],
    /// Position of every row.
    pub positions: &'a [u32],
    /// Slot of every row's K/V.
    pub slots: &'a [Slot],
    /// What every row sees.
    pub attention: &'a AttentionPlan,
}

impl<'a> From<&'a Rows> for Pass<'a> {
    fn from(rows: &'a Rows) -> Self {
        Self { token_ids: &rows.token_ids, positions: &rows.positions, slots: &rows.slots, attention: &rows.attention }
    }
}

impl<B: Backend> DecoderWeights<B> {
    /// Uploads a model's weights. `progress` is told the share done, from 0 to 1; an error from
    /// it ends the load.
    pub fn load(
        backend: &B,
        spec: ModelSpec,
        tensors: &TensorStore<'_>,
        storage: Storage,
        progress: &dyn Fn(f32) -> Result<()>,
    ) -> Result<Self> {
        let (vocab, hidden) = (spec.vocab_size, spec.hidden_size);
        let embed = Arc::new(backend.upload(&[tensors.matrix("model.embed_tokens.weight", vocab, hidden)?], storage)?);
        let mut layers = Vec::with_capacity(spec.num_layers);
        for index in 0..spec.num_layers {
            progress((index + 1) as f32 / (spec.num_layers + 2) as f32)?;
            layers.push(Layer::load(backend, tensors, &spec, &format!("model.layers.{index}"), storage, true)?);
        }
        let norm = backend.vector(&vector_of(tensors, "model.norm.weight", hidden)?);
        let head = if spec.tie_word_embeddings {
            Arc::clone(&embed)
        } else {
            Arc::new(backend.upload(&[tensors.matrix("lm_head.weight", vocab, hidden)?], storage)?)
        };
        progress(1.0)?;
        Ok(Self { spec, embed, layers, norm, head })
    }

    /// Bytes of weights that one pass reads, the embedding's rows left out.
    pub fn bytes_per_pass(&self, backend: &B) -> usize {
        let layers: usize = self
            .layers
            .iter()
            .flat_map(|layer| [&layer.attention.qkv, &layer.attention.out, &layer.mlp.gate_up, &layer.mlp.down])
            .map(|weight| backend.weight_bytes(weight))
            .sum();
        layers + backend.weight_bytes(&self.head)
    }

    /// The residual stream after the first `num_layers` layers, and the features asked for on the way.
    pub fn hidden(
        &self,
        backend: &B,
        pass: Pass<'_>,
        rope: &Rope,
        num_layers: usize,
        cache: &mut B::Cache,
        points: &[FeaturePoint],
    ) -> (B::Activations, Vec<B::Activations>) {
        let plan = backend.plan(pass.positions, pass.slots, pass.attention, rope);
        let mut x = backend.embed(&self.embed, pass.token_ids);
        let mut boundaries: Vec<(usize, B::Activations)> = Vec::new();
        for (index, layer) in self.layers[..num_layers].iter().enumerate() {
            tap(backend, points, index, &x, &mut boundaries);
            layer.forward(backend, &plan, cache, index, &mut x);
        }
        tap(backend, points, num_layers, &x, &mut boundaries);
        let features = points
            .iter()
            .map(|point| match point {
                FeaturePoint::FinalNorm => backend.norm(&self.norm, self.spec.rms_norm_eps, &x),
                FeaturePoint::Boundaries(wanted) => {
                    let parts: Vec<&B::Activations> = wanted
                        .iter()
                        .filter_map(|want| boundaries.iter().find(|(index, _)| index == want).map(|(_, x)| x))
                        .collect();
                    backend.concat(&parts)
                }
            })
            .collect();
        (x, features)
    }

    /// Logits of every row of a residual stream: final norm, then the head.
    pub fn logits(&self, backend: &B, x: &B::Activations) -> B::Activations {
        let normed = backend.norm(&self.norm, self.spec.rms_norm_eps, x);
        backend.matmul(&self.head, None, &normed)
    }
}

/// A vector of exactly this length.
pub(crate) fn vector_of(tensors: &TensorStore<'_>, name: &str, len: usize) -> Result<Vec<f32>> {
    let values = tensors.vector(name)?;
    if values.len() != len {
        return Err(EngineError::model(format!("tensor {name}: expected the shape [{len}], got [{}]", values.len())));
    }
    Ok(values)
}

/// Keeps the residual stream at a layer boundary if anybody asked for it.
fn tap<B: Backend>(
    backend: &B,
    points: &[FeaturePoint],
    boundary: usize,
    x: &B::Activations,
    taken: &mut Vec<(usize, B::Activations)>,
) {
    let is_wanted =
        points.iter().any(|point| matches!(point, FeaturePoint::Boundaries(list) if list.contains(&boundary)));
    if is_wanted {
        taken.push((boundary, backend.stack(&[x])));
    }
}

impl<B: Backend> Layer<B> {
    /// Uploads one layer by the names below `prefix`. `has_input_norm` is false for layer 0 of an EAGLE-1/2 head.
    pub fn load(
        backend: &B,
        tensors: &TensorStore<'_>,
        spec: &ModelSpec,
        prefix: &str,
        storage: Storage,
        has_input_norm: bool,
    ) -> Result<Self> {
        let (hidden, intermediate) = (spec.hidden_size, spec.intermediate_size);
        let (query, key_value) = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim);
        let matrix = |name: &str, rows: usize, cols: usize| -> Result<HostMatrix<'_>> {
            tensors.matrix(&format!("{prefix}.{name}.weight"), rows, cols)
        };
        let vector =
            |name: &str, len: usize| -> Result<Vec<f32>> { vector_of(tensors, &format!("{prefix}.{name}"), len) };
        let upload = |parts: &[HostMatrix<'_>], names: &str| {
            backend.upload(parts, storage).map_err(|error| EngineError::from(error).within(format!("{prefix}.{names}")))
        };
        let qkv_bias = if spec.qkv_bias {
            let mut bias = vector("self_attn.q_proj.bias", query)?;
            bias.extend(vector("self_attn.k_proj.bias", key_value)?);
            bias.extend(vector("self_attn.v_proj.bias", key_value)?);
            Some(backend.vector(&bias))
        } else {
            None
        };
        let head_norm = |name: &str| -> Result<Option<B::Vector>> {
            if !spec.qk_norm {
                return Ok(None);
            }
            Ok(Some(backend.vector(&vector(name, spec.head_dim)?)))
        };
        let attention = AttentionWeights {
            norm: if has_input_norm { Some(backend.vector(&vector("input_layernorm.weight", hidden)?)) } else { None },
            qkv: upload(
                &[
                    matrix("self_attn.q_proj", query, hidden)?,
                    matrix("self_attn.k_proj", key_value, hidden)?,
                    matrix("self_attn.v_proj", key_value, hidden)?,
                ],
                "self_attn.{q,k,v}_proj",
            )?,
            qkv_bias,
            q_norm: head_norm("self_attn.q_norm.weight")?,
            k_norm: head_norm("self_attn.k_norm.weight")?,
            out: upload(&[matrix("self_attn.o_proj", hidden, query)?], "self_attn.o_proj")?,
            num_heads: spec.num_heads,
            num_kv_heads: spec.num_kv_heads,
            head_dim: spec.head_dim,
            eps: spec.rms_norm_eps,
            scale: spec.attention_scale,
        };
        let mlp = MlpWeights {
            norm: backend.vector(&vector("post_attention_layernorm.weight", hidden)?),
            gate_up: upload(
                &[matrix("mlp.gate_proj", intermediate, hidden)?, matrix("mlp.up_proj", intermediate, hidden)?],
                "mlp.{gate,up}_proj",
            )?,
            down: upload(&[matrix("mlp.down_proj", hidden, intermediate)?], "mlp.down_proj")?,
            eps: spec.rms_norm_eps,
        };
        Ok(Self { attention, mlp })
    }

    /// Attention, then MLP, each added to the residual stream.
    pub fn forward(&self, backend: &B, plan: &B::Plan, cache: &mut B::Cache, index: usize, x: &mut B::Activations) {
        let queries = backend.qkv_store(&self.attention, x, plan, cache, index);
        backend.attend_out(&self.attention, &queries, plan, cache, index, x);
        backend.mlp(&self.mlp, x);
    }
}

/// A decoder with its K/V: the target.
pub struct Decoder<B: Backend> {
    backend: Arc<B>,
    weights: Arc<DecoderWeights<B>>,
    rope: Rope,
    cache: B::Cache,
    points: Vec<FeaturePoint>,
}

impl<B: Backend> Decoder<B> {
    /// A decoder over `num_slots` slots that gives the features at `points` with every forward.
    pub fn new(
        backend: Arc<B>,
        weights: Arc<DecoderWeights<B>>,
        num_slots: usize,
        points: Vec<FeaturePoint>,
    ) -> Result<Self> {
        let spec = &weights.spec;
        let cache = backend.cache(spec.num_layers, num_slots, spec.num_kv_heads * spec.head_dim)?;
        let rope = spec.rope();
        Ok(Self { backend, weights, rope, cache, points })
    }
}

impl<B: Backend> Target for Decoder<B> {
    type Features = B::Activations;

    fn forward(&mut self, rows: &Rows, wants_logits: bool) -> Forward<B::Activations> {
        let num_layers = self.weights.spec.num_layers;
        let (x, features) =
            self.weights.hidden(&self.backend, rows.into(), &self.rope, num_layers, &mut self.cache, &self.points);
        if rows.drawing.is_empty() {
            return Forward { drawn: Vec::new(), logits: Vec::new(), features };
        }
        let logits = self.weights.logits(&self.backend, &self.backend.gather(&x, &rows.drawing));
        Forward {
            drawn: self.backend.draw(&logits, &rows.draws),
            logits: if wants_logits { self.backend.to_host(&logits) } else { Vec::new() },
            features,
        }
    }

    fn move_kv(&mut self, moves: &[SlotMove]) {
        self.backend.move_kv(&mut self.cache, moves);
    }
}
