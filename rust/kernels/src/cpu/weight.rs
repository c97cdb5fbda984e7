//! Weights packed for the matrix kernels: panels of 16 output rows, interleaved.
//!
//! A panel is `[cols][16]`: one [`Line`] for each input, one lane for each output row; the last panel is padded with
//! zeros. bf16 lines hold lane `i` and lane `i + 8` side by side, so that a vector of 32-bit words splits into the two
//! halves by a shift and a mask.

use half::{bf16, f16};

use super::buffer::{Buffer, Line, Plain, Split};
use super::pool::Pool;
use crate::blocks::{block_bytes, block_len, dequantize};
use crate::weight::{HostMatrix, HostType, RowOrder, Storage, WeightError};

/// Output rows in a panel.
pub(super) const PANEL: usize = 16;

/// A matrix `[out, in]` as [`super::Cpu`] keeps it.
#[derive(Debug)]
pub struct CpuWeight {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) panels: Panels,
}

#[derive(Debug)]
pub(super) enum Panels {
    F32(Buffer<Line<f32>>),
    Bf16(Buffer<Line<u16>>),
    F16(Buffer<Line<u16>>),
}

/// Where a lane lies in a line of an element type, and what its bits mean.
pub(super) trait Element: Copy + Send + Sync + 'static {
    type Bits: Plain;
    fn place(lane: usize) -> usize;
    fn decode(bits: Self::Bits) -> f32;
    fn encode(value: f32) -> Self::Bits;
    /// The bits as they are stored in a file of the same type.
    fn stored(bytes: &[u8], index: usize) -> Self::Bits;
}

#[derive(Clone, Copy)]
pub(super) struct F32;
#[derive(Clone, Copy)]
pub(super) struct Bf16;
#[derive(Clone, Copy)]
pub(super) struct F16;

impl Element for F32 {
    type Bits = f32;
    fn place(lane: usize) -> usize {
        lane
    }
    fn decode(bits: f32) -> f32 {
        bits
    }
    fn encode(value: f32) -> f32 {
        value
    }
    fn stored(bytes: &[u8], index: usize) -> f32 {
        let at = index * 4;
        f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
    }
}

fn stored_u16(bytes: &[u8], index: usize) -> u16 {
    u16::from_le_bytes([bytes[index * 2], bytes[index * 2 + 1]])
}

impl Element for Bf16 {
    type Bits = u16;
    fn place(lane: usize) -> usize {
        lane % 8 * 2 + lane / 8
    }
    fn decode(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }
    fn encode(value: f32) -> u16 {
        bf16::from_f32(value).to_bits()
    }
    fn stored(bytes: &[u8], index: usize) -> u16 {
        stored_u16(bytes, index)
    }
}

impl Element for F16 {
    type Bits = u16;
    fn place(lane: usize) -> usize {
        lane
    }
    fn decode(bits: u16) -> f32 {
        f16::from_bits(bits).to_f32()
    }
    fn encode(value: f32) -> u16 {
        f16::from_f32(value).to_bits()
    }
    fn stored(bytes: &[u8], index: usize) -> u16 {
        stored_u16(bytes, index)
    }
}

impl CpuWeight {
    /// Checks and packs `parts`.
    pub(super) fn pack(pool: &Pool, parts: &[HostMatrix<'_>], storage: Storage) -> Result<CpuWeight, WeightError> {
        let (rows, cols) = check(parts)?;
        let first = parts[0].dtype;
        let uniform = parts.iter().all(|part| part.dtype == first);
        let lines = rows.div_ceil(PANEL).checked_mul(cols).ok_or(WeightError::Memory { rows, cols })?;
        let panels = match (storage, first) {
            (Storage::Bf16, _) => Panels::Bf16(fill::<Bf16>(pool, parts, HostType::BF16, rows, cols, lines)?),
            (_, HostType::BF16) if uniform => {
                Panels::Bf16(fill::<Bf16>(pool, parts, HostType::BF16, rows, cols, lines)?)
            }
            (_, HostType::F16) if uniform => Panels::F16(fill::<F16>(pool, parts, HostType::F16, rows, cols, lines)?),
            _ => Panels::F32(fill::<F32>(pool, parts, HostType::F32, rows, cols, lines)?),
        };
        Ok(CpuWeight { rows, cols, panels })
    }

    /// Bytes of the panels.
    pub(super) fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(lines) => size_of_val::<[_]>(lines),
            Panels::Bf16(lines) | Panels::F16(lines) => size_of_val::<[_]>(lines),
        }
    }

    /// Row `row` as f32.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of a table of {}", self.rows);
        match &self.panels {
            Panels::F32(lines) => read_row::<F32>(lines, row, out),
            Panels::Bf16(lines) => read_row::<Bf16>(lines, row, out),
            Panels::F16(lines) => read_row::<F16>(lines, row, out),
        }
    }
}

fn read_row<E: Element>(lines: &[Line<E::Bits>], row: usize, out: &mut [f32]) {
    let place = E::place(row % PANEL);
    let panel = &lines[row / PANEL * out.len()..][..out.len()];
    for (out, line) in out.iter_mut().zip(panel) {
        *out = E::decode(line.0[place]);
    }
}

/// Total rows and common columns of parts whose bytes are all there.
fn check(parts: &[HostMatrix<'_>]) -> Result<(usize, usize), WeightError> {
    let widths =
        || WeightError::Parts(format!("{:?}", parts.iter().map(|part| (part.rows, part.cols)).collect::<Vec<_>>()));
    let cols = parts.first().ok_or_else(widths)?.cols;
    let mut rows = 0usize;
    for part in parts {
        if part.cols != cols || cols == 0 || part.rows == 0 {
            return Err(widths());
        }
        rows = rows.checked_add(part.rows).ok_or_else(widths)?;
        let block = block_len(part.dtype);
        if !cols.is_multiple_of(block) {
            return Err(WeightError::Block { block, dtype: part.dtype, cols });
        }
        let expected = (cols / block)
            .checked_mul(block_bytes(part.dtype))
            .and_then(|row| row.checked_mul(part.rows))
            .unwrap_or(usize::MAX);
        if part.bytes.len() != expected {
            let (rows, dtype, got) = (part.rows, part.dtype, part.bytes.len());
            return Err(WeightError::Length { rows, cols, dtype, expected, got });
        }
        if let RowOrder::Interleaved(head) = part.order
            && (head == 0 || !head.is_multiple_of(2) || !part.rows.is_multiple_of(head))
        {
            return Err(WeightError::Parts(format!("{} rows in interleaved heads of {head}", part.rows)));
        }
    }
    Ok((rows, cols))
}

/// The stored row that is row `row` of the matrix.
fn stored_row(order: RowOrder, row: usize) -> usize {
    match order {
        RowOrder::AsStored => row,
        RowOrder::Interleaved(head) => {
            let (start, within) = (row / head * head, row % head);
            let half = head / 2;
            start + within % half * 2 + within / half
        }
    }
}

fn fill<E: Element>(
    pool: &Pool,
    parts: &[HostMatrix<'_>],
    own: HostType,
    rows: usize,
    cols: usize,
    lines: usize,
) -> Result<Buffer<Line<E::Bits>>, WeightError> {
    let mut buffer = Buffer::zeroed(lines).ok_or(WeightError::Memory { rows, cols })?;
    let split = Split::new(&mut buffer);
    pool.run(rows.div_ceil(PANEL), 1, &|panels| {
        let mut values = vec![0.0f32; cols];
        for panel in panels {
            // SAFETY: every panel is one task's.
            let lines: &mut [Line<E::Bits>] = unsafe { split.part(panel * cols, cols) };
            for lane in 0..PANEL.min(rows - panel * PANEL) {
                let mut row = panel * PANEL + lane;
                let mut part = &parts[0];
                for candidate in parts {
                    part = candidate;
                    if row < candidate.rows {
                        break;
                    }
                    row -= candidate.rows;
                }
                let size = cols / block_len(part.dtype) * block_bytes(part.dtype);
                let bytes = &part.bytes[stored_row(part.order, row) * size..][..size];
                let place = E::place(lane);
                if part.dtype == own {
                    for (i, line) in lines.iter_mut().enumerate() {
                        line.0[place] = E::stored(bytes, i);
                    }
                } else {
                    dequantize(part.dtype, bytes, &mut values);
                    for (line, value) in lines.iter_mut().zip(&values) {
                        line.0[place] = E::encode(*value);
                    }
                }
            }
        }
    });
    Ok(buffer)
}
