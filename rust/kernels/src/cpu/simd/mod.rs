//! The inner loops, once for each instruction set. An instruction set is a type that can only be made where the CPU has
//! it. All sets give the same bits: [`scalar`](super::scalar) is the meaning of each loop, and every sum has one order,
//! whatever the set.

#[cfg(target_arch = "x86_64")]
mod x86;
#[cfg(target_arch = "x86_64")]
mod x86_draw;

#[cfg(target_arch = "x86_64")]
pub use x86::Avx2;

use super::buffer::Line;
use super::weight::Element;
use crate::draw::Coin;

/// Inner loops. Slices that belong together have equal lengths.
pub(super) trait Kernels: Copy + Send + Sync + 'static {
    /// `sums[r][p][lane] = fma(w, x, sums[r][p][lane])`, one input after another, for `R` rows and `P` panels.
    fn multiply<E: VectorElement, const R: usize, const P: usize>(
        self,
        panels: [&[Line<E::Bits>]; P],
        rows: [&[f32]; R],
        sums: &mut [[[f32; 16]; P]; R],
    );
    /// Sum of squares, in 8 interleaved sums, merged pairwise.
    fn sum_squares(self, x: &[f32]) -> f32;
    /// `scores[i] = query · keys[i]`, in the order of `sum_squares`.
    fn scores(self, query: &[f32], keys: &[&[f32]], scores: &mut [f32]);
    /// `out += chances[i] * values[i]`, one `i` after another, fused.
    fn accumulate(self, out: &mut [f32], values: &[&[f32]], chances: &[f32]);
    /// exp of every element.
    fn exp(self, x: &mut [f32]);
    /// `out = silu(gate) * up`.
    fn silu_multiply(self, gate: &[f32], up: &[f32], out: &mut [f32]);

    /// The largest element (-inf for none), and whether all are below +inf.
    fn peak(self, x: &[f32]) -> (f32, bool);
    /// First index of a value.
    fn position(self, x: &[f32], value: f32) -> Option<usize>;
    /// Appends the indices of all elements that are at least `least`.
    fn at_least(self, x: &[f32], least: f32, out: &mut Vec<u32>);
    /// Noise of the tokens from `4 * first_block` on.
    fn noise(self, coin: Coin, first_block: u32, out: &mut [f32]);
    /// `noise = (logits - max) / temperature + noise`.
    fn perturb(self, logits: &[f32], max: f32, temperature: f32, noise: &mut [f32]);
    /// Sum of `exp(x - max)`, in 8 interleaved sums, merged pairwise.
    fn sum_exp(self, x: &[f32], max: f32) -> f64;
    /// Sum of [`fixed`](super::scalar::fixed) of `exp(x)`, for `x <= 0`.
    fn mass(self, x: &[f32]) -> u64;
}

/// An element that every instruction set can load.
#[cfg(target_arch = "x86_64")]
pub(super) trait VectorElement: Element + x86::Load {}
#[cfg(target_arch = "x86_64")]
impl<E: Element + x86::Load> VectorElement for E {}
/// An element that every instruction set can load.
#[cfg(not(target_arch = "x86_64"))]
pub(super) trait VectorElement: Element {}
#[cfg(not(target_arch = "x86_64"))]
impl<E: Element> VectorElement for E {}
