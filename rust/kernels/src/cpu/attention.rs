//! Attention over the slots that a row sees, and the cache they lie in.
//!
//! The order of all arithmetic follows from absolute positions: chunks of [`CHUNK`] positions, merged first to last by
//! an online softmax. Where the K/V of a position lies plays no part, so a tree node gets the bits of the same tokens
//! decoded one by one.

use super::CpuPlan;
use super::buffer::{Buffer, Split};
use super::pool::Pool;
use super::simd::Kernels;
use crate::backend::{SlotMove, Visible};

/// Positions in a chunk of the online softmax.
const CHUNK: usize = 32;

/// K and V of a stack of layers, `[layer][slot][kv_width]` each.
#[derive(Debug)]
pub struct CpuCache {
    pub(super) keys: Buffer<f32>,
    pub(super) values: Buffer<f32>,
    pub(super) num_layers: usize,
    pub(super) num_slots: usize,
    pub(super) width: usize,
}

impl CpuCache {
    pub(super) fn new(num_layers: usize, num_slots: usize, width: usize) -> Option<CpuCache> {
        let len = num_layers.checked_mul(num_slots)?.checked_mul(width)?;
        Some(CpuCache { keys: Buffer::zeroed(len)?, values: Buffer::zeroed(len)?, num_layers, num_slots, width })
    }

    pub(super) fn start(&self, layer: usize, slot: u32) -> usize {
        assert!(layer < self.num_layers, "layer {layer} of {}", self.num_layers);
        assert!((slot as usize) < self.num_slots, "slot {slot} of {}", self.num_slots);
        (layer * self.num_slots + slot as usize) * self.width
    }

    pub(super) fn carry_out(&mut self, moves: &[SlotMove]) {
        for layer in 0..self.num_layers {
            for step in moves {
                let (from, to) = (self.start(layer, step.from.0), self.start(layer, step.to.0));
                self.keys.copy_within(from..from + self.width, to);
                self.values.copy_within(from..from + self.width, to);
            }
        }
    }
}

/// Shape of an attention block.
#[derive(Clone, Copy)]
#[allow(clippy::struct_field_names)] // the names of `AttentionWeights`
pub(super) struct Heads {
    pub(super) num_heads: usize,
    pub(super) num_kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) scale: f32,
}

/// Attention of all rows, `[rows, heads * head_dim]`.
pub(super) fn attend<K: Kernels>(
    kernels: K,
    pool: &Pool,
    heads: Heads,
    queries: &[f32],
    plan: &CpuPlan,
    cache: &CpuCache,
    layer: usize,
) -> Vec<f32> {
    let Heads { num_heads, num_kv_heads, head_dim, .. } = heads;
    let rows = plan.attention.rows.len();
    let (width, shared) = (num_heads * head_dim, num_heads / num_kv_heads);
    assert!(queries.len() == rows * width, "{} queries for {rows} rows of {width}", queries.len());
    assert!(cache.width == num_kv_heads * head_dim, "a cache of width {}", cache.width);
    let mut out = vec![0.0; rows * width];
    let split = Split::new(&mut out);
    pool.run(rows * num_kv_heads, 1, &|tasks| {
        for task in tasks {
            let (row, kv_head) = (task / num_kv_heads, task % num_kv_heads);
            let start = row * width + kv_head * shared * head_dim;
            // SAFETY: every row and group of heads is one task's.
            let out = unsafe { split.part(start, shared * head_dim) };
            let queries = &queries[start..][..shared * head_dim];
            let view = View { plan, cache, layer, kv_head, visible: &plan.attention.rows[row] };
            attend_row(kernels, heads, queries, &view, out);
        }
    });
    out
}

/// What one row sees of one key/value head.
struct View<'a> {
    plan: &'a CpuPlan,
    cache: &'a CpuCache,
    layer: usize,
    kv_head: usize,
    visible: &'a Visible,
}

impl<'a> View<'a> {
    /// The K or V vectors of the visible tokens `from..from + out.len()`.
    fn gather(&self, of: &'a [f32], head_dim: usize, from: usize, out: &mut [&'a [f32]]) {
        let Visible { context, tail, .. } = self.visible;
        for (i, out) in out.iter_mut().enumerate() {
            let index = from + i;
            let at = match index.checked_sub(context.len()) {
                None => context.start as usize + index,
                Some(index) => tail.start as usize + index,
            };
            let start = self.cache.start(self.layer, self.plan.attention.slots[at].0) + self.kv_head * head_dim;
            *out = &of[start..start + head_dim];
        }
    }
}

/// The query heads that share one key/value head, for one row. `out` holds zeros.
fn attend_row<K: Kernels>(kernels: K, heads: Heads, queries: &[f32], view: &View<'_>, out: &mut [f32]) {
    let Heads { head_dim, scale, .. } = heads;
    let shared = queries.len() / head_dim;
    let len = view.visible.len();
    let mut max = vec![f32::NEG_INFINITY; shared];
    let mut sum = vec![0.0f32; shared];
    let mut done = 0;
    while done < len {
        let position = view.visible.first_position as usize + done;
        let offset = position % CHUNK;
        let count = (CHUNK - offset).min(len - done);
        let mut keys: [&[f32]; CHUNK] = [&[]; CHUNK];
        let mut values: [&[f32]; CHUNK] = [&[]; CHUNK];
        view.gather(&view.cache.keys, head_dim, done, &mut keys[..count]);
        view.gather(&view.cache.values, head_dim, done, &mut values[..count]);
        for head in 0..shared {
            let query = &queries[head * head_dim..][..head_dim];
            let out = &mut out[head * head_dim..][..head_dim];
            // A position's place in the chunk decides which of the eight sums below it goes to.
            let mut scores = [f32::NEG_INFINITY; CHUNK + 1];
            kernels.scores(query, &keys[..count], &mut scores[offset..offset + count]);
            for score in &mut scores {
                *score *= scale;
            }
            // The last element turns into the factor that brings earlier chunks to the new maximum.
            scores[CHUNK] = max[head];
            let new_max = kernels.peak(&scores).0;
            for score in &mut scores {
                *score -= new_max;
            }
            kernels.exp(&mut scores);
            let shrink = scores[CHUNK];
            sum[head] = sum[head] * shrink + lane_sum(&scores[..CHUNK]);
            if done > 0 {
                for out in &mut *out {
                    *out *= shrink;
                }
            }
            kernels.accumulate(out, &values[..count], &scores[offset..offset + count]);
            max[head] = new_max;
        }
        done += count;
    }
    for (out, sum) in out.chunks_exact_mut(head_dim).zip(sum) {
        for out in out {
            *out /= sum;
        }
    }
}

/// Eight interleaved sums, merged pairwise.
fn lane_sum(x: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    for (i, x) in x.iter().enumerate() {
        sums[i % 8] += x;
    }
    ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
}
