//! GGUF's block types: sizes and the arithmetic that turns a block into f32, step for step as ggml does it.

use half::{bf16, f16};

use crate::weight::HostType;

/// Elements in one block; 1 for the plain types.
pub fn block_len(dtype: HostType) -> usize {
    match dtype {
        HostType::F32 | HostType::F16 | HostType::BF16 => 1,
        HostType::Q8_0 | HostType::Q4_0 | HostType::Q4_1 | HostType::Q5_0 | HostType::Q5_1 => 32,
        HostType::Q4K | HostType::Q5K | HostType::Q6K => 256,
    }
}

/// Bytes in one block.
pub fn block_bytes(dtype: HostType) -> usize {
    match dtype {
        HostType::F32 => 4,
        HostType::F16 | HostType::BF16 => 2,
        HostType::Q8_0 => 34,
        HostType::Q4_0 => 18,
        HostType::Q4_1 => 20,
        HostType::Q5_0 => 22,
        HostType::Q5_1 => 24,
        HostType::Q4K => 144,
        HostType::Q5K => 176,
        HostType::Q6K => 210,
    }
}

/// Expands whole blocks: `out.len() / block_len` of them, `bytes.len()` to match.
///
/// # Panics
/// If the lengths disagree or are not whole blocks.
pub fn dequantize(dtype: HostType, bytes: &[u8], out: &mut [f32]) {
    let (len, size) = (block_len(dtype), block_bytes(dtype));
    assert!(
        out.len().is_multiple_of(len) && bytes.len().is_multiple_of(size) && out.len() / len == bytes.len() / size,
        "{} bytes of {dtype:?} do not hold {} elements",
        bytes.len(),
        out.len()
    );
    let expand: fn(&[u8], &mut [f32]) = match dtype {
        HostType::F32 => |block, out| out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
        HostType::F16 => |block, out| out[0] = half_at(block, 0),
        HostType::BF16 => |block, out| out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
        HostType::Q8_0 => q8_0,
        HostType::Q4_0 => q4_0,
        HostType::Q4_1 => q4_1,
        HostType::Q5_0 => q5_0,
        HostType::Q5_1 => q5_1,
        HostType::Q4K => q4_k,
        HostType::Q5K => q5_k,
        HostType::Q6K => q6_k,
    };
    for (block, out) in bytes.chunks_exact(size).zip(out.chunks_exact_mut(len)) {
        expand(block, out);
    }
}

fn half_at(block: &[u8], offset: usize) -> f32 {
    f16::from_le_bytes([block[offset], block[offset + 1]]).to_f32()
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (out, &q) in out.iter_mut().zip(&block[2..]) {
        *out = f32::from(q.cast_signed()) * d;
    }
}

/// Low nibbles are the first half of a block of 32, high nibbles the second.
fn nibble(quants: &[u8], i: usize) -> u8 {
    if i < 16 { quants[i] & 0x0f } else { quants[i - 16] >> 4 }
}

fn fifth_bit(block: &[u8], offset: usize, i: usize) -> u8 {
    ((block[offset + i / 8] >> (i % 8)) & 1) << 4
}

fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * (f32::from(nibble(&block[2..], i)) - 8.0);
    }
}

fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * f32::from(nibble(&block[4..], i)) + m;
    }
}

fn q5_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        let q = nibble(&block[6..], i) | fifth_bit(block, 2, i);
        *out = d * (f32::from(q) - 16.0);
    }
}

fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (i, out) in out.iter_mut().enumerate() {
        let q = nibble(&block[8..], i) | fifth_bit(block, 4, i);
        *out = d * f32::from(q) + m;
    }
}

/// The six-bit scale and minimum of sub-block `i` of 8, from the 12 bytes that Q4_K and Q5_K pack them into.
fn scale_and_min(packed: &[u8], i: usize) -> (f32, f32) {
    let (scale, min) = if i < 4 {
        (packed[i] & 0x3f, packed[i + 4] & 0x3f)
    } else {
        let shared = packed[i + 4];
        ((shared & 0x0f) | ((packed[i - 4] >> 2) & 0x30), (shared >> 4) | ((packed[i] >> 2) & 0x30))
    };
    (f32::from(scale), f32::from(min))
}

fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, d_min) = (half_at(block, 0), half_at(block, 2));
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(&block[4..16], sub);
        let (d, m) = (d * scale, d_min * min);
        let quants = &block[16 + sub / 2 * 32..][..32];
        for (out, &q) in out.iter_mut().zip(quants) {
            *out = d * f32::from((q >> (sub % 2 * 4)) & 0x0f) - m;
        }
    }
}

fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, d_min) = (half_at(block, 0), half_at(block, 2));
    let high = &block[16..48];
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(&block[4..16], sub);
        let (d, m) = (d * scale, d_min * min);
        let quants = &block[48 + sub / 2 * 32..][..32];
        for (i, out) in out.iter_mut().enumerate() {
            let q = ((quants[i] >> (sub % 2 * 4)) & 0x0f) | (((high[i] >> sub) & 1) << 4);
            *out = d * f32::from(q) - m;
        }
    }
}

fn q6_k(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 208);
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    for (i, out) in out.iter_mut().enumerate() {
        // Half a block is 128 elements: four runs of 32 share 64 low bytes and 32 high bytes.
        let (half, run, j) = (i / 128, i % 128 / 32, i % 32);
        let four = (low[half * 64 + run % 2 * 32 + j] >> (run / 2 * 4)) & 0x0f;
        let two = (high[half * 32 + j] >> (run * 2)) & 3;
        let scale = d * f32::from(scales[i / 16].cast_signed());
        *out = scale * (f32::from(four | (two << 4)) - 32.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random blocks and what the `gguf` package makes of them (`tests/golden/make_blocks.py`): bytes, then f32 values.
    fn check(dtype: HostType, golden: &[u8]) {
        let (len, size) = (block_len(dtype), block_bytes(dtype));
        let num_blocks = golden.len() / (size + 4 * len);
        assert!(num_blocks > 10);
        assert_eq!(golden.len(), num_blocks * (size + 4 * len));
        let (bytes, expected) = golden.split_at(num_blocks * size);
        let mut values = vec![0.0f32; num_blocks * len];
        dequantize(dtype, bytes, &mut values);
        for (i, (value, expected)) in values.iter().zip(expected.chunks_exact(4)).enumerate() {
            assert_eq!(value.to_le_bytes(), expected, "{dtype:?}, element {i}: {value}");
        }
    }

    macro_rules! golden {
        ($($name:ident $dtype:ident $file:literal,)*) => {$(
            #[test]
            fn $name() {
                check(HostType::$dtype, include_bytes!(concat!("../../../tests/golden/blocks/", $file, ".bin")));
            }
        )*};
    }

    golden! {
        f32_as_gguf F32 "F32",
        f16_as_gguf F16 "F16",
        bf16_as_gguf BF16 "BF16",
        q8_0_as_gguf Q8_0 "Q8_0",
        q4_0_as_gguf Q4_0 "Q4_0",
        q4_1_as_gguf Q4_1 "Q4_1",
        q5_0_as_gguf Q5_0 "Q5_0",
        q5_1_as_gguf Q5_1 "Q5_1",
        q4_k_as_gguf Q4K "Q4_K",
        q5_k_as_gguf Q5K "Q5_K",
        q6_k_as_gguf Q6K "Q6_K",
    }
}
