//! The operations of [`Backend`], put together from the kernels.

use super::attention::{self, CpuCache, Heads};
use super::buffer::Split;
use super::ops::{self, Finish};
use super::scalar::Scalar;
use super::weight::{self, CpuWeight};
use super::{Cpu, CpuActivations, CpuPlan, Isa, draw};
use crate::backend::{AttentionPlan, AttentionWeights, Backend, DeviceError, MlpWeights, Rope, Slot, SlotMove};
use crate::draw::{Draw, Drawn, Ranked};
use crate::weight::{HostMatrix, Storage, WeightError};

impl Backend for Cpu {
    type Weight = CpuWeight;
    type Vector = Vec<f32>;
    type Cache = CpuCache;
    type Activations = CpuActivations;
    type Plan = CpuPlan;

    fn upload(&self, parts: &[HostMatrix<'_>], storage: Storage) -> Result<CpuWeight, WeightError> {
        CpuWeight::pack(&self.pool, parts, storage)
    }

    fn vector(&self, values: &[f32]) -> Vec<f32> {
        values.to_vec()
    }

    fn shape(&self, weight: &CpuWeight) -> (usize, usize) {
        (weight.rows, weight.cols)
    }

    fn weight_bytes(&self, weight: &CpuWeight) -> usize {
        weight.bytes()
    }

    fn cache(&self, num_layers: usize, num_slots: usize, kv_width: usize) -> Result<CpuCache, DeviceError> {
        CpuCache::new(num_layers, num_slots, kv_width).ok_or_else(|| {
            let bytes = [num_layers, num_slots, kv_width, 8].into_iter().fold(1usize, usize::saturating_mul);
            DeviceError::OutOfMemory { what: "the K/V cache", bytes }
        })
    }

    fn move_kv(&self, cache: &mut CpuCache, moves: &[SlotMove]) {
        cache.carry_out(moves);
    }

    fn plan(&self, positions: &[u32], slots: &[Slot], attention: &AttentionPlan, rope: &Rope) -> CpuPlan {
        let rows = positions.len();
        assert!(slots.len() == rows && attention.rows.len() == rows, "a plan of {rows} rows");
        let n = rope.inv_freq.len();
        let (mut cos, mut sin) = (Vec::with_capacity(rows * n), Vec::with_capacity(rows * n));
        for position in positions {
            for frequency in &rope.inv_freq {
                let angle = f64::from(*position as f32 * frequency);
                cos.push(angle.cos() as f32 * rope.amplitude);
                sin.push(angle.sin() as f32 * rope.amplitude);
            }
        }
        CpuPlan { slots: slots.to_vec(), attention: attention.clone(), cos, sin, n }
    }

    fn rows(&self, x: &CpuActivations) -> usize {
        x.rows()
    }

    fn from_host(&self, values: &[f32], width: usize) -> CpuActivations {
        assert!(width > 0 && values.len().is_multiple_of(width), "{} values in rows of {width}", values.len());
        CpuActivations { values: values.to_vec(), width }
    }

    fn to_host(&self, x: &CpuActivations) -> Vec<f32> {
        x.values.clone()
    }

    fn embed(&self, table: &CpuWeight, token_ids: &[u32]) -> CpuActivations {
        let mut out = CpuActivations::zeroed(token_ids.len(), table.cols);
        let split = Split::new(&mut out.values);
        // A row touches as many cache lines as a whole panel, hence the width.
        ops::for_rows(&self.pool, token_ids.len(), table.cols * weight::PANEL, |row| {
            // SAFETY: every row is one task's.
            table.row(token_ids[row] as usize, unsafe { split.part(row * table.cols, table.cols) });
        });
        out
    }

    fn gather(&self, x: &CpuActivations, rows: &[u32]) -> CpuActivations {
        let mut values = Vec::with_capacity(rows.len() * x.width);
        for row in rows {
            values.extend_from_slice(x.row(*row as usize));
        }
        CpuActivations { values, width: x.width }
    }

    fn concat(&self, parts: &[&CpuActivations]) -> CpuActivations {
        let rows = parts.first().map_or(0, |part| part.rows());
        assert!(parts.iter().all(|part| part.rows() == rows), "parts of different row counts");
        let width = parts.iter().map(|part| part.width).sum::<usize>();
        assert!(width > 0, "no parts");
        let mut values = Vec::with_capacity(rows * width);
        for row in 0..rows {
            for part in parts {
                values.extend_from_slice(part.row(row));
            }
        }
        CpuActivations { values, width }
    }

    fn stack(&self, parts: &[&CpuActivations]) -> CpuActivations {
        assert!(!parts.is_empty(), "no parts");
        let width = parts[0].width;
        assert!(parts.iter().all(|part| part.width == width), "parts of different widths");
        CpuActivations { values: parts.iter().flat_map(|part| part.values.iter().copied()).collect(), width }
    }

    fn norm(&self, weight: &Vec<f32>, eps: f32, x: &CpuActivations) -> CpuActivations {
        self.normed(weight, eps, x)
    }

    fn matmul(&self, weight: &CpuWeight, bias: Option<&Vec<f32>>, x: &CpuActivations) -> CpuActivations {
        assert!(bias.is_none_or(|bias| bias.len() == weight.rows), "a bias for {} outputs", weight.rows);
        let mut out = CpuActivations::zeroed(x.rows(), weight.rows);
        self.product(weight, x, Finish::Store(bias.map(Vec::as_slice)), &mut out.values);
        out
    }

    fn qkv_store(
        &self,
        block: &AttentionWeights<Cpu>,
        x: &CpuActivations,
        plan: &CpuPlan,
        cache: &mut CpuCache,
        layer: usize,
    ) -> CpuActivations {
        let (head_dim, kv_width) = (block.head_dim, block.num_kv_heads * block.head_dim);
        let (width, rows) = (block.num_heads * head_dim, x.rows());
        assert!(rows == plan.slots.len(), "{rows} rows for a plan of {}", plan.slots.len());
        assert!(block.qkv.rows == width + 2 * kv_width, "{} outputs of q, k and v", block.qkv.rows);
        assert!(cache.width == kv_width && 2 * plan.n <= head_dim, "heads of {head_dim}");
        let mut all = match &block.norm {
            Some(norm) => self.matmul(&block.qkv, block.qkv_bias.as_ref(), &self.normed(norm, block.eps, x)),
            None => self.matmul(&block.qkv, block.qkv_bias.as_ref(), x),
        };
        let prepare = |row: usize, heads: &mut [f32], norm: Option<&Vec<f32>>| {
            let angles = row * plan.n..(row + 1) * plan.n;
            for head in heads.chunks_exact_mut(head_dim) {
                if let Some(norm) = norm {
                    assert!(norm.len() == head_dim, "a norm of {} for heads of {head_dim}", norm.len());
                    with_kernels!(self.isa, kernels => ops::norm_row(kernels, norm, block.eps, head));
                }
                ops::rotate(head, &plan.cos[angles.clone()], &plan.sin[angles.clone()]);
            }
        };
        let mut queries = CpuActivations::zeroed(rows, width);
        let all_width = all.width;
        let (all_parts, query_parts) = (Split::new(&mut all.values), Split::new(&mut queries.values));
        ops::for_rows(&self.pool, rows, all_width, |row| {
            // SAFETY: every row is one task's.
            let (all, out) =
                unsafe { (all_parts.part(row * all_width, all_width), query_parts.part(row * width, width)) };
            let (query, key_value) = all.split_at_mut(width);
            prepare(row, query, block.q_norm.as_ref());
            out.copy_from_slice(query);
            prepare(row, &mut key_value[..kv_width], block.k_norm.as_ref());
        });
        for (row, slot) in plan.slots.iter().enumerate() {
            let (key, value) = all.row(row)[width..].split_at(kv_width);
            let start = cache.start(layer, slot.0);
            cache.keys[start..start + kv_width].copy_from_slice(key);
            cache.values[start..start + kv_width].copy_from_slice(value);
        }
        queries
    }

    fn attend_out(
        &self,
        block: &AttentionWeights<Cpu>,
        queries: &CpuActivations,
        plan: &CpuPlan,
        cache: &CpuCache,
        layer: usize,
        x: &mut CpuActivations,
    ) {
        let AttentionWeights { num_heads, num_kv_heads, head_dim, scale, .. } = *block;
        let heads = Heads { num_heads, num_kv_heads, head_dim, scale };
        let values = with_kernels!(self.isa, kernels => {
            attention::attend(kernels, &self.pool, heads, &queries.values, plan, cache, layer)
        });
        assert!(x.width == block.out.rows, "rows of {} for {} outputs", x.width, block.out.rows);
        let attended = CpuActivations { values, width: num_heads * head_dim };
        self.product(&block.out, &attended, Finish::Add, &mut x.values);
    }

    fn mlp(&self, block: &MlpWeights<Cpu>, x: &mut CpuActivations) {
        let width = block.down.cols;
        assert!(block.gate_up.rows == 2 * width && x.width == block.down.rows, "an MLP of {width}");
        let gate_up = self.matmul(&block.gate_up, None, &self.normed(&block.norm, block.eps, x));
        let values = with_kernels!(self.isa, kernels => {
            ops::silu_multiply(kernels, &self.pool, &gate_up.values, width)
        });
        self.product(&block.down, &CpuActivations { values, width }, Finish::Add, &mut x.values);
    }

    fn draw(&self, logits: &CpuActivations, draws: &[Draw]) -> Vec<Drawn> {
        assert!(logits.rows() == draws.len(), "{} draws for {} rows", draws.len(), logits.rows());
        let rows: Vec<&[f32]> = logits.values.chunks_exact(logits.width).collect();
        with_kernels!(self.isa, kernels => draw::draw(kernels, &self.pool, &rows, draws))
    }

    fn rank(&self, logits: &CpuActivations, draws: Option<&[Draw]>, k: usize) -> Vec<Vec<Ranked>> {
        assert!(draws.is_none_or(|draws| draws.len() == logits.rows()), "draws for {} rows", logits.rows());
        let rows: Vec<&[f32]> = logits.values.chunks_exact(logits.width).collect();
        with_kernels!(self.isa, kernels => draw::rank(kernels, &self.pool, &rows, draws, k))
    }
}
