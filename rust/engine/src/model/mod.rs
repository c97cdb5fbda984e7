//! The target: what computes rows and draws from them.

pub mod forward;
pub mod spec;

use slipstream_kernels::{Drawn, SlotMove};

pub use forward::{Decoder, DecoderWeights, Layer, Pass};
pub use spec::ModelSpec;

use crate::rows::Rows;

/// Where in the target a drafter taps the residual stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FeaturePoint {
    /// After the final norm: the vector that the head sees (EAGLE-1/2).
    FinalNorm,
    /// At these layer boundaries, side by side: boundary `j` is the input of layer `j` (EAGLE-3).
    Boundaries(Vec<usize>),
}

/// What one forward gives.
#[derive(Debug)]
pub struct Forward<F> {
    /// A draw for every row of [`Rows::drawing`].
    pub drawn: Vec<Drawn>,
    /// Logits of the same rows, row-major; empty unless asked for.
    pub logits: Vec<f32>,
    /// For every feature point, a row for every row.
    pub features: Vec<F>,
}

/// A model that computes rows, stores their K/V and draws.
pub trait Target: Send {
    /// Rows of features as the device keeps them.
    type Features;
    /// Computes every row, stores its K/V in its slot, draws where asked.
    fn forward(&mut self, rows: &Rows, wants_logits: bool) -> Forward<Self::Features>;
    /// Moves K/V between slots, in order.
    fn move_kv(&mut self, moves: &[SlotMove]);
}
