//! Tensor operations of slipstream.
//!
//! [`Backend`] is the seam: layer-level operations over rows of activations, so that each device may fuse inside them.
//! [`cpu::Cpu`] is its CPU implementation. This is the only crate that may say `unsafe`.

pub mod backend;
pub mod blocks;
#[cfg(all(test, not(loom)))]
mod conformance;
pub mod cpu;
pub mod draw;
pub mod host_bytes;
pub mod math;
pub mod weight;

pub use backend::{AttentionPlan, AttentionWeights, Backend, DeviceError, MlpWeights, Rope, Slot, SlotMove, Visible};
pub use draw::{Coin, Controls, Draw, Drawn, Ranked, Seen};
pub use host_bytes::HostBytes;
pub use weight::{HostMatrix, HostType, RowOrder, Storage, WeightError};
