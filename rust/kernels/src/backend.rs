//! The seam between the engine and a device.
//!
//! A *row* is one token in one forward; activations are `[rows, width]`, row-major, f32. Every operation is row
//! independent (invariant I2): the bits of a row do not depend on the other rows or on how many there are.

use std::ops::Range;

use crate::draw::{Draw, Drawn, Ranked};
use crate::weight::{HostMatrix, Storage, WeightError};

/// Where one token's K/V lives in a [`Backend::Cache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// Copy the K/V of every layer from one slot to another. A list of moves is carried out in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotMove {
    /// Slot to read.
    pub from: Slot,
    /// Slot to overwrite.
    pub to: Slot,
}

/// What a row may attend to, by *logical* position: first `context`, then `tail`, both ranges into
/// [`AttentionPlan::slots`]. Logical position `first_position + i` is the i-th slot of that concatenation; the last one
/// is the row itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visible {
    /// Position of the first visible token: 0 unless a window or a late start hides earlier ones.
    pub first_position: u32,
    /// Slots shared with the other rows of the sequence.
    pub context: Range<u32>,
    /// Slots of the row's own path: its ancestors in the draft tree, then itself. Empty for a prompt row.
    pub tail: Range<u32>,
}

impl Visible {
    /// Number of visible tokens, the row itself included.
    pub fn len(&self) -> usize {
        self.context.len() + self.tail.len()
    }

    /// Whether nothing is visible. A row sees at least itself, so this is false in every valid plan.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Which slots each row of a forward sees.
#[derive(Clone, Debug, Default)]
pub struct AttentionPlan {
    /// All slot lists, one after another.
    pub slots: Vec<Slot>,
    /// One per row.
    pub rows: Vec<Visible>,
}

/// Rotary embedding: pairs (i, i + n) of the first `2 n` elements of a head are rotated by `position * inv_freq[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Inverse frequencies, already scaled, in radians per position.
    pub inv_freq: Vec<f32>,
    /// Factor on cos and sin (1 unless the scaling method sets it).
    pub amplitude: f32,
}

/// Weights of one attention block. Shapes are `[out, in]`.
#[derive(Debug)]
pub struct AttentionWeights<B: Backend + ?Sized> {
    /// RMS norm before the block, `[hidden]`; `None` is the identity (layer 0 of an EAGLE-1/2 head).
    pub norm: Option<B::Vector>,
    /// Query, key and value projections, stacked: `[(heads + 2 kv_heads) * head_dim, hidden]`.
    pub qkv: B::Weight,
    /// Bias of `qkv`.
    pub qkv_bias: Option<B::Vector>,
    /// RMS norm of every query head, `[head_dim]` (Qwen3).
    pub q_norm: Option<B::Vector>,
    /// RMS norm of every key head, `[head_dim]` (Qwen3).
    pub k_norm: Option<B::Vector>,
    /// Output projection, `[hidden, heads * head_dim]`.
    pub out: B::Weight,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Epsilon of all norms in the block.
    pub eps: f32,
    /// Factor on the attention scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
}

/// Weights of one gated MLP block with SiLU: `down(silu(gate(x)) * up(x))`.
#[derive(Debug)]
pub struct MlpWeights<B: Backend + ?Sized> {
    /// RMS norm before the block, `[hidden]`.
    pub norm: B::Vector,
    /// Gate and up projections, stacked: `[2 * intermediate, hidden]`.
    pub gate_up: B::Weight,
    /// Down projection, `[hidden, intermediate]`.
    pub down: B::Weight,
    /// Epsilon of the norm.
    pub eps: f32,
}

/// What can still fail once shapes are right: the device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Memory for something could not be had.
    #[error("out of memory: {what} needs {bytes} bytes")]
    OutOfMemory {
        /// What was to be allocated.
        what: &'static str,
        /// Its size in bytes.
        bytes: usize,
    },
}

/// Layer-level operations of a device. Shapes that disagree are a programming error and panic; files were checked when
/// they were loaded.
pub trait Backend: Send + Sync + 'static {
    /// A matrix `[out, in]`, packed for the device's kernels.
    type Weight: Send + Sync + std::fmt::Debug;
    /// A vector of f32: a norm's weight or a bias.
    type Vector: Send + Sync + std::fmt::Debug;
    /// K and V of a stack of layers, addressed by [`Slot`].
    type Cache: Send;
    /// `[rows, width]` activations.
    type Activations: Send;
    /// Index arrays of one forward on the device, with its rotary table.
    type Plan;

    /// Packs a matrix made of `parts` stacked by output row. All parts have the same number of columns.
    fn upload(&self, parts: &[HostMatrix<'_>], storage: Storage) -> Result<Self::Weight, WeightError>;
    /// Uploads a vector.
    fn vector(&self, values: &[f32]) -> Self::Vector;
    /// `[out, in]` of a weight.
    fn shape(&self, weight: &Self::Weight) -> (usize, usize);
    /// Bytes that the kernels read when a weight is used once.
    fn weight_bytes(&self, weight: &Self::Weight) -> usize;

    /// A zeroed cache of `num_layers` layers and `num_slots` slots; K and V of a slot are `kv_width` wide each.
    fn cache(&self, num_layers: usize, num_slots: usize, kv_width: usize) -> Result<Self::Cache, DeviceError>;
    /// Carries out slot moves in order, in every layer.
    fn move_kv(&self, cache: &mut Self::Cache, moves: &[SlotMove]);

    /// Uploads what every layer of a forward shares: `positions[r]`, the slot each row's K/V goes to, and what it sees.
    fn plan(&self, positions: &[u32], slots: &[Slot], attention: &AttentionPlan, rope: &Rope) -> Self::Plan;

    /// Number of rows of activations.
    fn rows(&self, x: &Self::Activations) -> usize;
    /// Activations from host values, `values.len() = rows * width`.
    // The backend makes them; it is not made from them.
    #[allow(clippy::wrong_self_convention)]
    fn from_host(&self, values: &[f32], width: usize) -> Self::Activations;
    /// Activations back on the host, row-major.
    fn to_host(&self, x: &Self::Activations) -> Vec<f32>;
    /// Rows of an embedding table, one per token id.
    fn embed(&self, table: &Self::Weight, token_ids: &[u32]) -> Self::Activations;
    /// The named rows of `x`, in that order; a row may be named again.
    fn gather(&self, x: &Self::Activations, rows: &[u32]) -> Self::Activations;
    /// Rows of `parts` side by side: widths add up, row counts are equal.
    fn concat(&self, parts: &[&Self::Activations]) -> Self::Activations;
    /// Rows of `parts` one after another: row counts add up, widths are equal.
    fn stack(&self, parts: &[&Self::Activations]) -> Self::Activations;
    /// RMS norm of every row.
    fn norm(&self, weight: &Self::Vector, eps: f32, x: &Self::Activations) -> Self::Activations;
    /// `x · weightᵀ (+ bias)`.
    fn matmul(&self, weight: &Self::Weight, bias: Option<&Self::Vector>, x: &Self::Activations) -> Self::Activations;

    /// Norm, q/k/v with bias, q/k norm, rotary; K and V of every row go to its slot in `layer` of `cache`. Returns the
    /// queries, `[rows, heads * head_dim]`.
    fn qkv_store(
        &self,
        block: &AttentionWeights<Self>,
        x: &Self::Activations,
        plan: &Self::Plan,
        cache: &mut Self::Cache,
        layer: usize,
    ) -> Self::Activations;
    /// Attention of `queries` over the slots each row sees, output projection, added to the residual stream `x`.
    fn attend_out(
        &self,
        block: &AttentionWeights<Self>,
        queries: &Self::Activations,
        plan: &Self::Plan,
        cache: &Self::Cache,
        layer: usize,
        x: &mut Self::Activations,
    );
    /// The MLP block, added to the residual stream `x`.
    fn mlp(&self, block: &MlpWeights<Self>, x: &mut Self::Activations);

    /// One draw per row of `logits`; `draws[r]` belongs to row `r`.
    fn draw(&self, logits: &Self::Activations, draws: &[Draw]) -> Vec<Drawn>;
    /// The `k` best tokens of every row, best first, ties by lower id. With `draws`, by logits under the row's controls
    /// plus its noise (shared noise, see [`crate::draw`]); without, by plain logits. Fewer than `k` where fewer tokens are possible; none
    /// where a logit is not finite.
    fn rank(&self, logits: &Self::Activations, draws: Option<&[Draw]>, k: usize) -> Vec<Vec<Ranked>>;
}
