//! `slipstream._core`: the engine for Python. No logic lives here.
#![forbid(unsafe_code)]
#![expect(clippy::needless_pass_by_value, reason = "PyO3 hands arguments over by value")]
#![expect(
    clippy::redundant_closure_for_method_calls,
    reason = "a method of Python<'_> is not general enough as a path"
)]

mod build;
mod engine;
mod error;
mod handle;
mod params;
mod source;
mod stats;
mod stream;

use pyo3::prelude::*;

/// The compiled core of slipstream.
#[pymodule]
#[pyo3(name = "_core")]
fn core(py: Python<'_>, module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::register(py, module)?;
    module.add_class::<source::Source>()?;
    module.add_class::<source::Drafter>()?;
    module.add_class::<params::SamplingParams>()?;
    module.add_class::<stats::Stats>()?;
    module.add_class::<stream::Chunk>()?;
    module.add_class::<stream::TokenStream>()?;
    module.add_class::<engine::Engine>()?;
    module.add_function(wrap_pyfunction!(source::inspect, module)?)?;
    module.add_function(wrap_pyfunction!(engine::read_bandwidth, module)?)?;
    Ok(())
}
