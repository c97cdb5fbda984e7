//! The meaning of every inner loop, written for reading.

use super::buffer::Line;
use super::simd::{Kernels, VectorElement};
use crate::draw::Coin;
use crate::math;

/// Plain Rust, on any CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scalar;

/// A share in [0, 1] in units of 2^-32, rounded to even. Integers, so that a sum of them has no order.
pub(super) fn fixed(share: f32) -> u64 {
    // Adding 2^52 leaves the rounded integer in the low bits.
    const ROUND: f64 = 4_503_599_627_370_496.0;
    f64::from(share).mul_add(4_294_967_296.0, ROUND).to_bits() - ROUND.to_bits()
}

fn merge(sums: [f32; 8]) -> f32 {
    ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
}

/// Eight interleaved sums; a last, short group of eight is filled up with zeros.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let at = |x: &[f32], i: usize| x.get(i).copied().unwrap_or(0.0);
    let mut sums = [0.0f32; 8];
    for i in 0..a.len().next_multiple_of(8) {
        sums[i % 8] = at(a, i).mul_add(at(b, i), sums[i % 8]);
    }
    merge(sums)
}

impl Kernels for Scalar {
    fn multiply<E: VectorElement, const R: usize, const P: usize>(
        self,
        panels: [&[Line<E::Bits>]; P],
        rows: [&[f32]; R],
        sums: &mut [[[f32; 16]; P]; R],
    ) {
        for (row, sums) in rows.iter().zip(sums) {
            for (panel, sums) in panels.iter().zip(sums) {
                for (line, x) in panel.iter().zip(*row) {
                    for (lane, sum) in sums.iter_mut().enumerate() {
                        *sum = E::decode(line.0[E::place(lane)]).mul_add(*x, *sum);
                    }
                }
            }
        }
    }

    fn sum_squares(self, x: &[f32]) -> f32 {
        dot(x, x)
    }

    fn scores(self, query: &[f32], keys: &[&[f32]], scores: &mut [f32]) {
        for (score, key) in scores.iter_mut().zip(keys) {
            *score = dot(query, key);
        }
    }

    fn accumulate(self, out: &mut [f32], values: &[&[f32]], chances: &[f32]) {
        for (value, chance) in values.iter().zip(chances) {
            for (out, value) in out.iter_mut().zip(*value) {
                *out = chance.mul_add(*value, *out);
            }
        }
    }

    fn exp(self, x: &mut [f32]) {
        for x in x {
            *x = math::exp(*x);
        }
    }

    fn silu_multiply(self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + math::exp(-gate)) * up;
        }
    }

    fn peak(self, x: &[f32]) -> (f32, bool) {
        x.iter().fold((f32::NEG_INFINITY, true), |(max, finite), x| {
            (if *x > max { *x } else { max }, finite && *x < f32::INFINITY)
        })
    }

    fn position(self, x: &[f32], value: f32) -> Option<usize> {
        x.iter().position(|x| *x == value)
    }

    fn at_least(self, x: &[f32], least: f32, out: &mut Vec<u32>) {
        out.extend(x.iter().enumerate().filter(|(_, x)| **x >= least).map(|(i, _)| i as u32));
    }

    fn noise(self, coin: Coin, first_block: u32, out: &mut [f32]) {
        for (i, out) in out.iter_mut().enumerate() {
            *out = math::noise(coin, first_block * 4 + i as u32);
        }
    }

    fn perturb(self, logits: &[f32], max: f32, temperature: f32, noise: &mut [f32]) {
        for (noise, logit) in noise.iter_mut().zip(logits) {
            *noise += (logit - max) / temperature;
        }
    }

    fn sum_exp(self, x: &[f32], max: f32) -> f64 {
        let mut sums = [0.0f64; 8];
        for (i, x) in x.iter().enumerate() {
            sums[i % 8] += f64::from(math::exp(x - max));
        }
        ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
    }

    fn mass(self, x: &[f32]) -> u64 {
        x.iter().map(|x| fixed(math::exp(*x))).sum()
    }
}
