//! AVX2 with FMA: noise and the passes over a vocabulary.

#[allow(clippy::wildcard_imports)] // the instructions by their names, as in C
use std::arch::x86_64::*;

use super::x86::{exp, load, store};
use crate::cpu::scalar::fixed;
use crate::draw::Coin;
use crate::math::{self, constants as c};

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn peak(x: &[f32]) -> (f32, bool) {
    let (chunks, rest) = x.as_chunks::<8>();
    let infinity = _mm256_set1_ps(f32::INFINITY);
    let mut max = _mm256_set1_ps(f32::NEG_INFINITY);
    let mut bad = _mm256_setzero_ps();
    for chunk in chunks {
        let x = load(chunk);
        max = _mm256_max_ps(x, max);
        bad = _mm256_or_ps(bad, _mm256_cmp_ps::<_CMP_NLT_UQ>(x, infinity));
    }
    let mut lanes = [0.0; 8];
    store(&mut lanes, max);
    let mut max = f32::NEG_INFINITY;
    let mut finite = _mm256_movemask_ps(bad) == 0;
    for x in lanes.iter().chain(rest) {
        max = if *x > max { *x } else { max };
        finite &= *x < f32::INFINITY;
    }
    (max, finite)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn position(x: &[f32], value: f32) -> Option<usize> {
    let (chunks, rest) = x.as_chunks::<8>();
    let wanted = _mm256_set1_ps(value);
    for (i, chunk) in chunks.iter().enumerate() {
        let found = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_EQ_OQ>(load(chunk), wanted));
        if found != 0 {
            return Some(8 * i + found.trailing_zeros() as usize);
        }
    }
    rest.iter().position(|x| *x == value).map(|i| 8 * chunks.len() + i)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn at_least(x: &[f32], least: f32, out: &mut Vec<u32>) {
    let (chunks, rest) = x.as_chunks::<8>();
    let bound = _mm256_set1_ps(least);
    for (i, chunk) in chunks.iter().enumerate() {
        let mut found = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(load(chunk), bound));
        while found != 0 {
            out.push((8 * i) as u32 + found.trailing_zeros());
            found &= found - 1;
        }
    }
    let start = 8 * chunks.len();
    out.extend(rest.iter().enumerate().filter(|(_, x)| **x >= least).map(|(i, _)| (start + i) as u32));
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn perturb_vector(logits: &[f32; 8], max: __m256, temperature: __m256, noise: &mut [f32; 8]) {
    let z = _mm256_div_ps(_mm256_sub_ps(load(logits), max), temperature);
    let sum = _mm256_add_ps(load(noise), z);
    store(noise, sum);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn perturb(logits: &[f32], max: f32, temperature: f32, noise: &mut [f32]) {
    let (logits, logits_rest) = logits.as_chunks::<8>();
    let (noise, noise_rest) = noise.as_chunks_mut::<8>();
    let (max_all, temperature_all) = (_mm256_set1_ps(max), _mm256_set1_ps(temperature));
    for (logits, noise) in logits.iter().zip(noise) {
        perturb_vector(logits, max_all, temperature_all, noise);
    }
    for (noise, logit) in noise_rest.iter_mut().zip(logits_rest) {
        *noise += (logit - max) / temperature;
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn sum_exp(x: &[f32], max: f32) -> f64 {
    let (chunks, rest) = x.as_chunks::<8>();
    let max_all = _mm256_set1_ps(max);
    let mut low = _mm256_setzero_pd();
    let mut high = _mm256_setzero_pd();
    for chunk in chunks {
        let value = exp(_mm256_sub_ps(load(chunk), max_all));
        low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(value)));
        high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(value)));
    }
    let mut sums = [0.0f64; 8];
    // SAFETY: eight doubles are there.
    unsafe {
        _mm256_storeu_pd(sums.as_mut_ptr(), low);
        _mm256_storeu_pd(sums.as_mut_ptr().add(4), high);
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += f64::from(math::exp(x - max));
    }
    ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn mass(x: &[f32]) -> u64 {
    let (chunks, rest) = x.as_chunks::<8>();
    let scale = _mm256_set1_pd(4_294_967_296.0);
    let round = _mm256_set1_pd(4_503_599_627_370_496.0);
    let mut sums = _mm256_setzero_si256();
    for chunk in chunks {
        let value = exp(load(chunk));
        for half in [_mm256_castps256_ps128(value), _mm256_extractf128_ps::<1>(value)] {
            let shifted = _mm256_castpd_si256(_mm256_fmadd_pd(_mm256_cvtps_pd(half), scale, round));
            sums = _mm256_add_epi64(sums, _mm256_sub_epi64(shifted, _mm256_castpd_si256(round)));
        }
    }
    let mut lanes = [0u64; 4];
    // SAFETY: four 64-bit words are there.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), sums) };
    lanes.iter().sum::<u64>() + rest.iter().map(|x| fixed(math::exp(*x))).sum::<u64>()
}

/// The vector version of `math::ln_parts`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn ln_parts(f: __m256, exponent: __m256) -> __m256 {
    let s = _mm256_div_ps(f, _mm256_add_ps(_mm256_set1_ps(2.0), f));
    let square = _mm256_mul_ps(s, s);
    let mut polynomial = _mm256_set1_ps(c::LN[0]);
    for coefficient in &c::LN[1..] {
        polynomial = _mm256_fmadd_ps(polynomial, square, _mm256_set1_ps(*coefficient));
    }
    let double = _mm256_add_ps(s, s);
    let cubic = _mm256_mul_ps(double, _mm256_mul_ps(square, polynomial));
    let rest = _mm256_fmadd_ps(exponent, _mm256_set1_ps(c::LN2_LOW), cubic);
    _mm256_fmadd_ps(exponent, _mm256_set1_ps(c::LN2_HIGH), _mm256_add_ps(double, rest))
}

/// The vector version of `math::split`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn split(x: __m256) -> (__m256, __m256) {
    let bits = _mm256_castps_si256(x);
    let exponent = _mm256_srai_epi32::<23>(_mm256_sub_epi32(bits, _mm256_set1_epi32(c::SQRT_HALF_BITS)));
    let mantissa = _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32::<23>(exponent)));
    (_mm256_sub_ps(mantissa, _mm256_set1_ps(1.0)), _mm256_cvtepi32_ps(exponent))
}

/// The vector version of `math::gumbel`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn gumbel(bits: __m256i) -> __m256 {
    let sign = _mm256_set1_ps(-0.0);
    let upper = _mm256_castsi256_ps(bits);
    let folded = _mm256_cvtepi32_ps(_mm256_xor_si256(bits, _mm256_srai_epi32::<31>(bits)));
    let small = _mm256_mul_ps(_mm256_add_ps(folded, _mm256_set1_ps(0.5)), _mm256_set1_ps(c::TWO_TO_MINUS_32));
    let (f, exponent) = split(small);
    let f = _mm256_blendv_ps(_mm256_xor_ps(small, sign), f, upper);
    let exponent = _mm256_blendv_ps(_mm256_setzero_ps(), exponent, upper);
    let exponential = _mm256_xor_ps(ln_parts(f, exponent), sign);
    let (f, exponent) = split(exponential);
    _mm256_xor_ps(ln_parts(f, exponent), sign)
}

/// High and low words of eight 32-bit products.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn multiply_wide(x: __m256i, multiplier: __m256i) -> (__m256i, __m256i) {
    let even = _mm256_mul_epu32(x, multiplier);
    let odd = _mm256_mul_epu32(_mm256_srli_epi64::<32>(x), multiplier);
    (
        _mm256_blend_epi32::<0b1010_1010>(_mm256_srli_epi64::<32>(even), odd),
        _mm256_blend_epi32::<0b1010_1010>(even, _mm256_slli_epi64::<32>(odd)),
    )
}

/// Four words for each of eight counters, `[word][counter]`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn philox(first_block: u32, coin: Coin) -> [__m256i; 4] {
    let all = |word: u32| _mm256_set1_epi32(word.cast_signed());
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let mut x =
        [_mm256_add_epi32(all(first_block), lanes), all(coin.position), all(coin.sample), _mm256_setzero_si256()];
    let mut key = math::key(coin);
    let multipliers = [all(c::PHILOX_MULTIPLIERS[0]), all(c::PHILOX_MULTIPLIERS[1])];
    for _ in 0..c::PHILOX_ROUNDS {
        let (first_high, first_low) = multiply_wide(x[0], multipliers[0]);
        let (second_high, second_low) = multiply_wide(x[2], multipliers[1]);
        x = [
            _mm256_xor_si256(_mm256_xor_si256(second_high, x[1]), all(key[0])),
            second_low,
            _mm256_xor_si256(_mm256_xor_si256(first_high, x[3]), all(key[1])),
            first_low,
        ];
        key = [key[0].wrapping_add(c::PHILOX_WEYL[0]), key[1].wrapping_add(c::PHILOX_WEYL[1])];
    }
    x
}

/// Noise of 32 tokens: eight counters of four words, brought into token order.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn noise_32(coin: Coin, first_block: u32) -> [__m256; 4] {
    let words = philox(first_block, coin);
    let low = [_mm256_unpacklo_epi32(words[0], words[1]), _mm256_unpacklo_epi32(words[2], words[3])];
    let high = [_mm256_unpackhi_epi32(words[0], words[1]), _mm256_unpackhi_epi32(words[2], words[3])];
    // Each holds the four words of one counter below and of the counter four further above.
    let counters = [
        _mm256_unpacklo_epi64(low[0], low[1]),
        _mm256_unpackhi_epi64(low[0], low[1]),
        _mm256_unpacklo_epi64(high[0], high[1]),
        _mm256_unpackhi_epi64(high[0], high[1]),
    ];
    [
        gumbel(_mm256_permute2x128_si256::<0x20>(counters[0], counters[1])),
        gumbel(_mm256_permute2x128_si256::<0x20>(counters[2], counters[3])),
        gumbel(_mm256_permute2x128_si256::<0x31>(counters[0], counters[1])),
        gumbel(_mm256_permute2x128_si256::<0x31>(counters[2], counters[3])),
    ]
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn noise(coin: Coin, first_block: u32, out: &mut [f32]) {
    let (chunks, rest) = out.as_chunks_mut::<32>();
    let mut block = first_block;
    for chunk in chunks {
        for (out, vector) in chunk.as_chunks_mut::<8>().0.iter_mut().zip(noise_32(coin, block)) {
            store(out, vector);
        }
        block += 8;
    }
    if !rest.is_empty() {
        let mut last = [0.0; 32];
        for (out, vector) in last.as_chunks_mut::<8>().0.iter_mut().zip(noise_32(coin, block)) {
            store(out, vector);
        }
        rest.copy_from_slice(&last[..rest.len()]);
    }
}
