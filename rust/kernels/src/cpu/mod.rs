//! The CPU backend.

mod attention;
mod buffer;
mod claim;
mod draw;
mod gate;
mod loom;
mod ops;
mod pool;
mod scalar;
mod shape;
mod simd;
mod weight;

pub use attention::CpuCache;
pub use pool::Pool;
pub use scalar::Scalar;
#[cfg(target_arch = "x86_64")]
pub use simd::Avx2;
pub use weight::CpuWeight;

use ops::Finish;

use crate::backend::{AttentionPlan, Slot};
use crate::draw::Draw;

/// The instruction set of the inner loops. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust: the meaning, slow.
    Scalar,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
}

impl Isa {
    /// The fastest that this CPU has.
    pub fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = Avx2::detect() {
            return Isa::Avx2(avx2);
        }
        Isa::Scalar
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => "avx2",
        }
    }
}

/// Runs an expression with the kernels of an instruction set.
macro_rules! with_kernels {
    ($isa:expr, $kernels:ident => $body:expr) => {
        match $isa {
            Isa::Scalar => {
                let $kernels = Scalar;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2($kernels) => $body,
        }
    };
}

mod backend;
mod bandwidth;

pub use bandwidth::ReadLoop;

/// The backend on this machine's CPU.
#[derive(Debug)]
pub struct Cpu {
    pool: Pool,
    isa: Isa,
}

/// `[rows, width]` values, row-major.
#[derive(Clone, Debug)]
pub struct CpuActivations {
    values: Vec<f32>,
    width: usize,
}

/// The index arrays of one forward, with the cosines and sines of its rows.
#[derive(Debug)]
pub struct CpuPlan {
    slots: Vec<Slot>,
    attention: AttentionPlan,
    /// `[rows, n]`, amplitude included.
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Pairs that are rotated in a head.
    n: usize,
}

impl Cpu {
    /// A backend with this many threads, the calling one included (default: all the process may use), and this
    /// instruction set (default: the fastest that the CPU has).
    pub fn new(threads: Option<usize>, isa: Option<Isa>) -> Cpu {
        let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        Cpu { pool: Pool::new(threads), isa: isa.unwrap_or_else(Isa::detect) }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Number of threads in use, the caller of each operation included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The distribution that a draw is made from: one probability for each element of `logits`, after all controls.
    /// `None` where [`crate::Backend::draw`] says [`Drawn::NotFinite`].
    pub fn probabilities(&self, logits: &[f32], draw: &Draw) -> Option<Vec<f32>> {
        with_kernels!(self.isa, kernels => draw::probabilities(kernels, logits, draw))
    }

    fn product(&self, weight: &CpuWeight, x: &CpuActivations, finish: Finish<'_>, out: &mut [f32]) {
        assert!(x.width == weight.cols, "rows of {} times a matrix of {} inputs", x.width, weight.cols);
        with_kernels!(self.isa, kernels => ops::matmul(kernels, &self.pool, weight, &x.values, finish, out));
    }

    fn normed(&self, weight: &[f32], eps: f32, x: &CpuActivations) -> CpuActivations {
        assert!(weight.len() == x.width, "a norm of {} for rows of {}", weight.len(), x.width);
        let values = with_kernels!(self.isa, kernels => ops::norm(kernels, &self.pool, weight, eps, &x.values));
        CpuActivations { values, width: x.width }
    }
}

impl CpuActivations {
    fn zeroed(rows: usize, width: usize) -> CpuActivations {
        CpuActivations { values: vec![0.0; rows * width], width }
    }

    fn rows(&self) -> usize {
        // Rows of no width do not occur: every width is that of a matrix or of `from_host`, which checks.
        self.values.len() / self.width
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..][..self.width]
    }
}
