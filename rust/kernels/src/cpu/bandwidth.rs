//! The machine's own limit for one stream: how fast memory can be read.

use std::time::Instant;

use super::buffer::Buffer;
use super::simd::Kernels;
use super::{Cpu, Isa, Scalar};
use crate::backend::DeviceError;

/// Far more than the caches hold.
const BYTES: usize = 512 << 20;
/// Elements that a thread takes at a time.
const CHUNK: usize = 1 << 16;

/// Memory that is only read, on huge pages where the system gives them, as weights lie.
#[derive(Debug)]
pub struct ReadLoop {
    values: Buffer<f32>,
}

impl ReadLoop {
    /// Half a gibibyte, every page of it touched.
    pub fn new() -> Result<ReadLoop, DeviceError> {
        let len = BYTES / size_of::<f32>();
        let mut values: Buffer<f32> =
            Buffer::zeroed(len).ok_or(DeviceError::OutOfMemory { what: "the read loop", bytes: BYTES })?;
        // A page that was never written is one page for all.
        values.fill(1.0);
        Ok(ReadLoop { values })
    }

    /// Bytes per second of reading it once with all threads.
    pub fn bytes_per_second(&self, cpu: &Cpu) -> f64 {
        let start = Instant::now();
        with_kernels!(cpu.isa, kernels => cpu.pool.run(self.values.len() / CHUNK, 4, &|range| {
            let peak = kernels.peak(&self.values[range.start * CHUNK..range.end * CHUNK]);
            assert!(peak == (1.0, true), "the loop reads what was written");
        }));
        BYTES as f64 / start.elapsed().as_secs_f64()
    }
}
