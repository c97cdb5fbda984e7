//! AVX2 with FMA and F16C: matrices, norms, attention, activation functions.

#[allow(clippy::wildcard_imports)] // the instructions by their names, as in C
use std::arch::x86_64::*;

use super::{Kernels, VectorElement, x86_draw};
use crate::cpu::buffer::Line;
use crate::cpu::weight::{Bf16, F16, F32};
use crate::draw::Coin;
use crate::math::constants as c;

/// Proof that the CPU has AVX2, FMA and F16C: it can only be made by [`Avx2::detect`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx2(());

impl Avx2 {
    /// The proof, where it holds.
    pub fn detect() -> Option<Avx2> {
        let has =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        has.then_some(Avx2(()))
    }
}

/// How a line becomes two vectors: lanes 0 to 7 and lanes 8 to 15.
pub(in crate::cpu) trait Load: crate::cpu::weight::Element {
    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    unsafe fn load(line: &Line<Self::Bits>) -> [__m256; 2];
}

impl Load for F32 {
    #[inline(always)]
    unsafe fn load(line: &Line<f32>) -> [__m256; 2] {
        let start = line.0.as_ptr();
        // SAFETY: a line is 16 floats; the instructions exist by the caller's promise.
        unsafe { [_mm256_loadu_ps(start), _mm256_loadu_ps(start.add(8))] }
    }
}

impl Load for Bf16 {
    #[inline(always)]
    unsafe fn load(line: &Line<u16>) -> [__m256; 2] {
        // SAFETY: a line is 16 halves, 32 bytes; the instructions exist by the caller's promise.
        unsafe {
            let words = _mm256_loadu_si256(line.0.as_ptr().cast());
            let high = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)), _mm256_castsi256_ps(_mm256_and_si256(words, high))]
        }
    }
}

impl Load for F16 {
    #[inline(always)]
    unsafe fn load(line: &Line<u16>) -> [__m256; 2] {
        let start = line.0.as_ptr();
        // SAFETY: a line is 16 halves, 32 bytes; the instructions exist by the caller's promise.
        unsafe {
            [_mm256_cvtph_ps(_mm_loadu_si128(start.cast())), _mm256_cvtph_ps(_mm_loadu_si128(start.add(8).cast()))]
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn load(x: &[f32; 8]) -> __m256 {
    // SAFETY: eight floats are there.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn store(x: &mut [f32; 8], value: __m256) {
    // SAFETY: eight floats are there.
    unsafe { _mm256_storeu_ps(x.as_mut_ptr(), value) }
}

/// The first elements of a vector from a slice of fewer than eight, the others `fill`.
fn padded(x: &[f32], fill: f32) -> [f32; 8] {
    let mut all = [fill; 8];
    all[..x.len()].copy_from_slice(x);
    all
}

/// `((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn merge(sums: __m256) -> f32 {
    let pairs = _mm256_hadd_ps(sums, sums);
    let fours = _mm256_hadd_ps(pairs, pairs);
    _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(fours), _mm256_extractf128_ps::<1>(fours)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_sums(a: &[f32], b: &[f32]) -> __m256 {
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    let mut sums = _mm256_setzero_ps();
    for (a, b) in a.iter().zip(b) {
        sums = _mm256_fmadd_ps(load(a), load(b), sums);
    }
    if !a_rest.is_empty() {
        sums = _mm256_fmadd_ps(load(&padded(a_rest, 0.0)), load(&padded(b_rest, 0.0)), sums);
    }
    sums
}

#[target_feature(enable = "avx2,fma,f16c")]
fn sum_squares(x: &[f32]) -> f32 {
    merge(dot_sums(x, x))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn scores(query: &[f32], keys: &[&[f32]], out: &mut [f32]) {
    let (fours, rest) = keys.as_chunks::<4>();
    let (out_fours, out_rest) = out.as_chunks_mut::<4>();
    for (keys, out) in fours.iter().zip(out_fours) {
        let mut sums = [_mm256_setzero_ps(); 4];
        for (sums, key) in sums.iter_mut().zip(keys) {
            assert_eq!(key.len(), query.len());
            *sums = dot_sums(query, key);
        }
        let pairs = [_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3])];
        let fours = _mm256_hadd_ps(pairs[0], pairs[1]);
        let all = _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps::<1>(fours));
        // SAFETY: four floats are there.
        unsafe { _mm_storeu_ps(out.as_mut_ptr(), all) };
    }
    for (key, out) in rest.iter().zip(out_rest) {
        assert_eq!(key.len(), query.len());
        *out = merge(dot_sums(query, key));
    }
}

/// `N` vectors of the output stay in registers while all values pass.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn accumulate_vectors<const N: usize>(out: &mut [f32], at: usize, values: &[&[f32]], chances: &[f32]) {
    let mut sums = [_mm256_setzero_ps(); N];
    for (i, out) in out[at..at + 8 * N].as_chunks::<8>().0.iter().enumerate() {
        sums[i] = load(out);
    }
    for (value, chance) in values.iter().zip(chances) {
        let chance = _mm256_set1_ps(*chance);
        let value = value[at..at + 8 * N].as_chunks::<8>().0;
        for i in 0..N {
            sums[i] = _mm256_fmadd_ps(chance, load(&value[i]), sums[i]);
        }
    }
    let (out, _) = out[at..at + 8 * N].as_chunks_mut::<8>();
    for i in 0..N {
        store(&mut out[i], sums[i]);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn accumulate(out: &mut [f32], values: &[&[f32]], chances: &[f32]) {
    let mut at = 0;
    while out.len() - at >= 64 {
        accumulate_vectors::<8>(out, at, values, chances);
        at += 64;
    }
    while out.len() - at >= 8 {
        accumulate_vectors::<1>(out, at, values, chances);
        at += 8;
    }
    for (value, chance) in values.iter().zip(chances) {
        for (out, value) in out[at..].iter_mut().zip(&value[at..]) {
            *out = chance.mul_add(*value, *out);
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn exp(x: __m256) -> __m256 {
    let x = _mm256_max_ps(_mm256_set1_ps(c::EXP_MIN), x);
    let x = _mm256_min_ps(_mm256_set1_ps(c::EXP_MAX), x);
    let round = _mm256_set1_ps(c::ROUND);
    let shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(c::LOG2_E), round);
    let n = _mm256_sub_ps(shifted, round);
    let exponent = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_castps_si256(round));
    let r = _mm256_fmadd_ps(n, _mm256_set1_ps(-c::LN2_HIGH), x);
    let r = _mm256_fmadd_ps(n, _mm256_set1_ps(-c::LN2_LOW), r);
    let mut polynomial = _mm256_set1_ps(c::EXP[0]);
    for coefficient in &c::EXP[1..] {
        polynomial = _mm256_fmadd_ps(polynomial, r, _mm256_set1_ps(*coefficient));
    }
    let y = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(r, r), polynomial, r), _mm256_set1_ps(1.0));
    let half = _mm256_srai_epi32::<1>(exponent);
    let y = _mm256_mul_ps(y, power_of_two(half));
    _mm256_mul_ps(y, power_of_two(_mm256_sub_epi32(exponent, half)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn power_of_two(exponent: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(exponent, _mm256_set1_epi32(127))))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn exp_all(x: &mut [f32]) {
    let (x, rest) = x.as_chunks_mut::<8>();
    for x in x {
        let value = exp(load(x));
        store(x, value);
    }
    if !rest.is_empty() {
        let mut last = padded(rest, 0.0);
        let value = exp(load(&last));
        store(&mut last, value);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn silu_multiply_vector(gate: &[f32; 8], up: &[f32; 8], out: &mut [f32; 8]) {
    let gate = load(gate);
    // Flips the sign, as the scalar negation does; a subtraction would not for zeros.
    let negative = _mm256_xor_ps(gate, _mm256_set1_ps(-0.0));
    let sigmoid = _mm256_div_ps(gate, _mm256_add_ps(_mm256_set1_ps(1.0), exp(negative)));
    store(out, _mm256_mul_ps(sigmoid, load(up)));
}

#[target_feature(enable = "avx2,fma,f16c")]
fn silu_multiply(gate: &[f32], up: &[f32], out: &mut [f32]) {
    let (gate, gate_rest) = gate.as_chunks::<8>();
    let (up, up_rest) = up.as_chunks::<8>();
    let (out, out_rest) = out.as_chunks_mut::<8>();
    for ((gate, up), out) in gate.iter().zip(up).zip(out) {
        silu_multiply_vector(gate, up, out);
    }
    if !out_rest.is_empty() {
        let mut last = [0.0; 8];
        silu_multiply_vector(&padded(gate_rest, 0.0), &padded(up_rest, 0.0), &mut last);
        out_rest.copy_from_slice(&last[..out_rest.len()]);
    }
}

/// All sums stay in registers: `2 R P` of them, at most 12, and at least 8 where possible, which hides the latency of
/// the fused multiply-add (4 cycles, 2 a cycle).
#[target_feature(enable = "avx2,fma,f16c")]
fn multiply<E: Load, const R: usize, const P: usize>(
    panels: [&[Line<E::Bits>]; P],
    rows: [&[f32]; R],
    sums: &mut [[[f32; 16]; P]; R],
) {
    let len = rows[0].len();
    assert!(rows.iter().all(|row| row.len() == len) && panels.iter().all(|panel| panel.len() == len));
    let mut registers = [[[_mm256_setzero_ps(); 2]; P]; R];
    for r in 0..R {
        for p in 0..P {
            let (halves, _) = sums[r][p].as_chunks::<8>();
            registers[r][p] = [load(&halves[0]), load(&halves[1])];
        }
    }
    let mut weights = [[_mm256_setzero_ps(); 2]; P];
    for i in 0..len {
        // SAFETY: `i` is below the length that all rows and panels share; the caller has the instructions.
        unsafe {
            for p in 0..P {
                weights[p] = E::load(panels[p].get_unchecked(i));
            }
            for r in 0..R {
                let x = _mm256_set1_ps(*rows[r].get_unchecked(i));
                for p in 0..P {
                    for half in 0..2 {
                        registers[r][p][half] = _mm256_fmadd_ps(weights[p][half], x, registers[r][p][half]);
                    }
                }
            }
        }
    }
    for r in 0..R {
        for p in 0..P {
            let (halves, _) = sums[r][p].as_chunks_mut::<8>();
            store(&mut halves[0], registers[r][p][0]);
            store(&mut halves[1], registers[r][p][1]);
        }
    }
}

impl Kernels for Avx2 {
    fn multiply<E: VectorElement, const R: usize, const P: usize>(
        self,
        panels: [&[Line<E::Bits>]; P],
        rows: [&[f32]; R],
        sums: &mut [[[f32; 16]; P]; R],
    ) {
        // SAFETY: `self` proves the instructions.
        unsafe { multiply::<E, R, P>(panels, rows, sums) }
    }

    fn sum_squares(self, x: &[f32]) -> f32 {
        // SAFETY: `self` proves the instructions.
        unsafe { sum_squares(x) }
    }

    fn scores(self, query: &[f32], keys: &[&[f32]], out: &mut [f32]) {
        // SAFETY: `self` proves the instructions.
        unsafe { scores(query, keys, out) }
    }

    fn accumulate(self, out: &mut [f32], values: &[&[f32]], chances: &[f32]) {
        // SAFETY: `self` proves the instructions.
        unsafe { accumulate(out, values, chances) }
    }

    fn exp(self, x: &mut [f32]) {
        // SAFETY: `self` proves the instructions.
        unsafe { exp_all(x) }
    }

    fn silu_multiply(self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        // SAFETY: `self` proves the instructions.
        unsafe { silu_multiply(gate, up, out) }
    }

    fn peak(self, x: &[f32]) -> (f32, bool) {
        // SAFETY: `self` proves the instructions.
        unsafe { x86_draw::peak(x) }
    }

    fn position(self, x: &[f32], value: f32) -> Option<usize> {
        // SAFETY: `self` proves the instructions.
        unsafe { x86_draw::position(x, value) }
    }

    fn at_least(self, x: &[f32], least: f32, out: &mut Vec<u32>) {
        // SAFETY: `self` proves the instructions.
        unsafe { x86_draw::at_least(x, least, out) }
    }

    fn noise(self, coin: Coin, first_block: u32, out: &mut [f32]) {
        // SAFETY: `self` proves the instructions.
        unsafe { x86_draw::noise(coin, first_block, out) }
    }

    fn perturb(self, logits: &[f32], max: f32, temperature: f32, noise: &mut [f32]) {
        // SAFETY: `self` proves the instructions.
        unsafe { x86_draw::perturb(logits, max, temperature, noise) }
    }

    fn sum_exp(self, x: &[f32], max: f32) -> f64 {
        // SAFETY: `self` proves the instructions.
        unsafe { x86_draw::sum_exp(x, max) }
    }

    fn mass(self, x: &[f32]) -> u64 {
        // SAFETY: `self` proves the instructions.
        unsafe { x86_draw::mass(x) }
    }
}
