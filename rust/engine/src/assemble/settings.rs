//! An engine's settings, and their ranges.

use slipstream_kernels::Storage;
use slipstream_kernels::cpu::Isa;

use crate::budget::Budget;
use crate::draft::TreeShape;
use crate::error::{EngineError, Result};

/// Settings of an engine.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Compute threads, the engine's own included; `None` is one per core.
    pub threads: Option<usize>,
    /// `None` is the fastest that the CPU has.
    pub isa: Option<Isa>,
    /// Most requests computed at a time.
    pub max_batch: usize,
    /// Most rows of a step.
    pub max_batch_tokens: u32,
    /// Most prompt tokens of one request in a step.
    pub chunk: Option<u32>,
    /// Most tokens of a sequence; `None` is what the model was made for.
    pub max_context: Option<u32>,
    /// Bytes for K/V, drafters' included; `None` is enough for `max_batch` sequences, at most 2 GiB.
    pub kv_cache_bytes: Option<usize>,
    /// Slots of a block.
    pub block_size: u32,
    /// Whether blocks of ended requests are kept for prompts that begin alike.
    pub prefix_cache: bool,
    /// In which type weights are kept.
    pub storage: Storage,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            threads: None,
            isa: None,
            max_batch: 32,
            max_batch_tokens: 512,
            chunk: None,
            max_context: None,
            kv_cache_bytes: None,
            block_size: 16,
            prefix_cache: true,
            storage: Storage::Lossless,
        }
    }
}

/// Nodes of all requests in a step, and what a node must promise: on two cores a row more costs about a sixth of a pass
/// over one row, so a node that is accepted less often does not pay.
pub(super) const BUDGET: Budget = Budget { max_nodes: 64, min_chance: 0.17 };

/// A tree's shape as a user sets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeSettings {
    /// See [`TreeShape`].
    pub max_depth: u16,
    /// See [`TreeShape`].
    pub top_k: u16,
    /// See [`TreeShape`].
    pub max_nodes: u16,
    /// See [`TreeShape`].
    pub noise: bool,
    /// Exactly the published tree: no node is dropped for what it promises.
    pub fixed_tree: bool,
}

impl TreeSettings {
    pub(super) fn shape(self) -> Result<TreeShape> {
        let Self { max_depth, top_k, max_nodes, noise, fixed_tree } = self;
        let in_range = |name: &str, value: u16, low: u16, high: u16| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(EngineError::config(format!("expected {name} between {low} and {high}, got {value}")))
        };
        in_range("max_depth", max_depth, 1, 32)?;
        in_range("top_k", top_k, 1, 32)?;
        in_range("max_nodes", max_nodes, 1, 1024)?;
        // Nodes are numbered by 16 bits.
        let num_candidates = u32::from(top_k) + u32::from(max_depth) * u32::from(top_k) * u32::from(top_k);
        if fixed_tree && u32::from(max_nodes) > num_candidates {
            return Err(EngineError::config(format!(
                "expected max_nodes of at most top_k + max_depth * top_k * top_k = {num_candidates}, got {max_nodes}"
            )));
        }
        let budget = if fixed_tree { Budget::UNLIMITED } else { BUDGET };
        Ok(TreeShape { max_depth, top_k, max_nodes, noise, budget })
    }
}

impl Settings {
    /// Refuses what is out of range, by name.
    pub(super) fn check(&self) -> Result<()> {
        let in_range = |name: &str, value: usize, low: usize, high: usize| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(EngineError::config(format!("expected {name} between {low} and {high}, got {value}")))
        };
        in_range("threads", self.threads.unwrap_or(1), 1, 1024)?;
        in_range("max_batch", self.max_batch, 1, 4096)?;
        in_range("max_batch_tokens", self.max_batch_tokens as usize, 1, 65_536)?;
        in_range("chunk", self.chunk.unwrap_or(1) as usize, 1, 65_536)?;
        in_range("block_size", self.block_size as usize, 1, 1024)?;
        in_range("max_context", self.max_context.unwrap_or(2) as usize, 2, u32::MAX as usize)
    }
}
