//! One suite for every instruction set: each operation against a naive truth in f64, and row independence (I2) bit for
//! bit: alone, in a batch, in another order, on 1, 2 and 3 threads, on every instruction set.

mod attention;
mod draws;
mod products;
mod shaping;

use crate::cpu::{Cpu, Isa};
use crate::math::philox;
use crate::{HostMatrix, HostType, RowOrder};

/// The instruction set on 1, 2 and 3 threads; all must agree with [`reference`].
fn backends(isa: Isa) -> Vec<Cpu> {
    [1, 2, 3].map(|threads| Cpu::new(Some(threads), Some(isa))).into()
}

/// The meaning of every operation.
fn reference() -> Cpu {
    Cpu::new(Some(1), Some(Isa::Scalar))
}

/// Repeatable values.
struct Random {
    seed: u32,
    count: u32,
}

impl Random {
    fn new(seed: u32) -> Random {
        Random { seed, count: 0 }
    }

    fn bits(&mut self) -> u32 {
        self.count += 1;
        philox([self.count, 0, 0, 0], [self.seed, 7])[0]
    }

    /// Below `bound`.
    fn below(&mut self, bound: usize) -> usize {
        ((u64::from(self.bits()) * bound as u64) >> 32) as usize
    }

    /// Roughly normal with this deviation.
    fn normal(&mut self, deviation: f32) -> f32 {
        let sum: f32 = (0..6).map(|_| self.bits() as f32 / 4_294_967_296.0 - 0.5).sum();
        sum * deviation * std::f32::consts::SQRT_2
    }

    fn normals(&mut self, len: usize, deviation: f32) -> Vec<f32> {
        (0..len).map(|_| self.normal(deviation)).collect()
    }

    fn shuffled(&mut self, len: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..len as u32).collect();
        for i in (1..len).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn f32_matrix(bytes: &[u8], rows: usize, cols: usize) -> HostMatrix<'_> {
    HostMatrix { bytes, dtype: HostType::F32, rows, cols, order: RowOrder::AsStored }
}

/// `|value - truth| <= tolerance * (1 + |truth|)`.
fn assert_close(value: f32, truth: f64, tolerance: f64, what: &str) {
    let error = (f64::from(value) - truth).abs();
    assert!(error <= tolerance * (1.0 + truth.abs()), "{what}: {value} for {truth}");
}

macro_rules! suite {
    ($($module:ident::$name:ident,)*) => {
        mod scalar {
            $(#[test] fn $name() { super::$module::$name(crate::cpu::Isa::Scalar); })*
        }
        #[cfg(target_arch = "x86_64")]
        mod avx2 {
            $(
                #[test]
                fn $name() {
                    match crate::cpu::Avx2::detect() {
                        Some(avx2) => super::$module::$name(crate::cpu::Isa::Avx2(avx2)),
                        None => eprintln!("skipped: this CPU has no AVX2, FMA and F16C"),
                    }
                }
            )*
        }
    };
}

#[allow(clippy::print_stderr)]
mod suites {
    use super::{attention, draws, products, shaping};

    suite! {
        products::matmul_is_one_chain,
        products::matmul_rows_are_independent,
        products::norms,
        products::mlp_block,
        products::embeddings_come_out_of_the_panels,
        attention::blocks_match_the_truth,
        attention::trees_are_sequences,
        attention::moved_slots_stay_the_same,
        draws::noise_is_the_scalar_noise,
        draws::frequencies_are_the_probabilities,
        draws::rows_are_independent,
        draws::ranks_match_the_truth,
        draws::what_is_not_finite_is_said,
        draws::greedy_takes_the_lowest_id,
        shaping::golden_processors,
        shaping::penalties_and_bias,
        shaping::large_vocabularies,
        shaping::nothing_panics,
    }
}
