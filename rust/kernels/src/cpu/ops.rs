//! Matrix products, norms, rotary embedding and activation functions over rows, shared out to the pool.

use super::buffer::{Line, Split};
use super::pool::Pool;
use super::simd::{Kernels, VectorElement};
use super::weight::{Bf16, CpuWeight, F16, F32, PANEL, Panels};

/// Most rows in a tile: 12 sums of 8 lanes leave 4 of AVX2's 16 registers for weights and input.
const TILE_ROWS: usize = 6;
/// Panels that a task takes through all rows before the next: they share one read of a tile's input from the first
/// cache.
const GROUP: usize = 4;
/// Inputs in a block when there are several tiles: `GROUP` panels of f32 take 256 KiB then and stay in the second
/// cache from tile to tile.
const BLOCK: usize = 1024;
/// Elements below which a row-wise pass is not worth waking other threads.
const SERIAL: usize = 16 * 1024;

/// What happens with a product.
#[derive(Clone, Copy)]
pub(super) enum Finish<'a> {
    /// It is stored, plus a bias.
    Store(Option<&'a [f32]>),
    /// It is added to what is there.
    Add,
}

/// Calls `task(row)` for every row, on the pool if there is enough to do.
pub(super) fn for_rows(pool: &Pool, rows: usize, width: usize, task: impl Fn(usize) + Sync) {
    if rows * width <= SERIAL {
        (0..rows).for_each(task);
    } else {
        pool.run(rows, (rows / (4 * pool.threads())).max(1), &|range| {
            range.for_each(&task);
        });
    }
}

/// `x · weightᵀ` into `out`, `[rows, weight.rows]`.
pub(super) fn matmul<K: Kernels>(
    kernels: K,
    pool: &Pool,
    weight: &CpuWeight,
    x: &[f32],
    finish: Finish<'_>,
    out: &mut [f32],
) {
    match &weight.panels {
        Panels::F32(lines) => Product { kernels, pool, weight, x, finish }.run::<F32>(lines, out),
        Panels::Bf16(lines) => Product { kernels, pool, weight, x, finish }.run::<Bf16>(lines, out),
        Panels::F16(lines) => Product { kernels, pool, weight, x, finish }.run::<F16>(lines, out),
    }
}

struct Product<'a, K> {
    kernels: K,
    pool: &'a Pool,
    weight: &'a CpuWeight,
    x: &'a [f32],
    finish: Finish<'a>,
}

impl<K: Kernels> Product<'_, K> {
    fn run<E: VectorElement>(&self, lines: &[Line<E::Bits>], out: &mut [f32]) {
        let (width, cols) = (self.weight.rows, self.weight.cols);
        let rows = self.x.len() / cols;
        assert!(self.x.len() == rows * cols && out.len() == rows * width);
        if rows == 0 {
            return;
        }
        let num_panels = width.div_ceil(PANEL);
        // Enough runs that threads end together, yet whole groups where there are many.
        let grain = (num_panels / (8 * self.pool.threads())).clamp(1, 2 * GROUP).next_multiple_of(GROUP.min(2));
        let out = Split::new(out);
        self.pool.run(num_panels, grain, &|panels| {
            let mut sums = vec![[0.0f32; PANEL]; rows * GROUP.min(panels.len())];
            for start in panels.clone().step_by(GROUP) {
                let count = GROUP.min(panels.end - start);
                let sums = &mut sums[..rows * count];
                sums.fill([0.0; PANEL]);
                self.group::<E>(&lines[start * cols..][..count * cols], count, rows, sums);
                for row in 0..rows {
                    for p in 0..count {
                        let lane = (start + p) * PANEL;
                        // SAFETY: these outputs belong to this task's panels alone.
                        let out = unsafe { out.part(row * width + lane, PANEL.min(width - lane)) };
                        self.finish(lane, &sums[row * count + p], out);
                    }
                }
            }
        });
    }

    /// All rows through `count` panels; `sums` is `[rows][count]`.
    fn group<E: VectorElement>(&self, lines: &[Line<E::Bits>], count: usize, rows: usize, sums: &mut [[f32; PANEL]]) {
        let cols = self.weight.cols;
        let num_tiles = rows.div_ceil(TILE_ROWS);
        let block = if num_tiles == 1 { cols } else { BLOCK };
        for begin in (0..cols).step_by(block) {
            let inputs = begin..cols.min(begin + block);
            for tile in 0..num_tiles {
                // Tiles of nearly equal height: a low one would wait for the latency of its few sums.
                let tile_rows = tile * rows / num_tiles..(tile + 1) * rows / num_tiles;
                let tile = Tile { lines, count, cols, inputs: inputs.clone(), first_row: tile_rows.start };
                match tile_rows.len() {
                    1 => self.tile::<E, 1, 4>(&tile, sums),
                    2 => self.tile::<E, 2, 2>(&tile, sums),
                    3 => self.tile::<E, 3, 2>(&tile, sums),
                    4 => self.tile::<E, 4, 1>(&tile, sums),
                    5 => self.tile::<E, 5, 1>(&tile, sums),
                    _ => self.tile::<E, 6, 1>(&tile, sums),
                }
            }
        }
    }

    fn tile<E: VectorElement, const R: usize, const P: usize>(&self, tile: &Tile<'_, E>, sums: &mut [[f32; PANEL]]) {
        let mut p = 0;
        while p + P <= tile.count {
            self.multiply::<E, R, P>(tile, p, sums);
            p += P;
        }
        while p + 2 <= tile.count && P > 2 {
            self.multiply::<E, R, 2>(tile, p, sums);
            p += 2;
        }
        while p < tile.count {
            self.multiply::<E, R, 1>(tile, p, sums);
            p += 1;
        }
    }

    fn multiply<E: VectorElement, const R: usize, const P: usize>(
        &self,
        tile: &Tile<'_, E>,
        first: usize,
        sums: &mut [[f32; PANEL]],
    ) {
        let (begin, len) = (tile.inputs.start, tile.inputs.len());
        let panels = std::array::from_fn(|p| &tile.lines[(first + p) * tile.cols + begin..][..len]);
        let rows = std::array::from_fn(|r| &self.x[(tile.first_row + r) * tile.cols + begin..][..len]);
        let place = |r: usize, p: usize| (tile.first_row + r) * tile.count + first + p;
        let mut part: [[[f32; PANEL]; P]; R] = std::array::from_fn(|r| std::array::from_fn(|p| sums[place(r, p)]));
        self.kernels.multiply::<E, R, P>(panels, rows, &mut part);
        for r in 0..R {
            for p in 0..P {
                sums[place(r, p)] = part[r][p];
            }
        }
    }

    fn finish(&self, lane: usize, sums: &[f32; PANEL], out: &mut [f32]) {
        match self.finish {
            Finish::Store(None) => out.copy_from_slice(&sums[..out.len()]),
            Finish::Store(Some(bias)) => {
                for ((out, sum), bias) in out.iter_mut().zip(sums).zip(&bias[lane..]) {
                    *out = sum + bias;
                }
            }
            Finish::Add => {
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out += sum;
                }
            }
        }
    }
}

struct Tile<'a, E: VectorElement> {
    lines: &'a [Line<E::Bits>],
    count: usize,
    cols: usize,
    inputs: std::ops::Range<usize>,
    first_row: usize,
}

/// RMS norm of one row, in place: `x / sqrt(mean(x²) + eps) * weight`.
pub(super) fn norm_row<K: Kernels>(kernels: K, weight: &[f32], eps: f32, x: &mut [f32]) {
    let mean = kernels.sum_squares(x) / x.len() as f32;
    let factor = 1.0 / (mean + eps).sqrt();
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = *x * factor * weight;
    }
}

/// RMS norm of every row.
pub(super) fn norm<K: Kernels>(kernels: K, pool: &Pool, weight: &[f32], eps: f32, x: &[f32]) -> Vec<f32> {
    let width = weight.len();
    assert!(width > 0 && x.len().is_multiple_of(width), "rows of {width} in {} values", x.len());
    let mut out = x.to_vec();
    let split = Split::new(&mut out);
    for_rows(pool, x.len() / width, width, |row| {
        // SAFETY: every row is one task's.
        norm_row(kernels, weight, eps, unsafe { split.part(row * width, width) });
    });
    out
}

/// `silu(gate) * up` of rows that hold gate, then up.
pub(super) fn silu_multiply<K: Kernels>(kernels: K, pool: &Pool, gate_up: &[f32], width: usize) -> Vec<f32> {
    let rows = gate_up.len() / (2 * width);
    let mut out = vec![0.0; rows * width];
    let split = Split::new(&mut out);
    for_rows(pool, rows, 4 * width, |row| {
        let (gate, up) = gate_up[row * 2 * width..][..2 * width].split_at(width);
        // SAFETY: every row is one task's.
        kernels.silu_multiply(gate, up, unsafe { split.part(row * width, width) });
    });
    out
}

/// Rotates pairs (i, i + n) of a head by the angles of one row.
pub(super) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let n = cos.len();
    let (first, rest) = head.split_at_mut(n);
    for (((a, b), cos), sin) in first.iter_mut().zip(&mut rest[..n]).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}
