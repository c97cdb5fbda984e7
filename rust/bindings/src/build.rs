//! Builds an engine on a thread of its own, so that Ctrl-C is seen meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, Result as Joined};
use std::time::Duration;

use pyo3::prelude::*;
use slipstream_engine::assemble::{Assembled, Settings, assemble};
use slipstream_engine::error::{EngineError, Result};

use crate::error::raise;
use crate::source::{Drafter, HeldArrays, Source, slices};

/// How often Ctrl-C is looked for, and the end: it is all that building a tiny engine waits for.
const LOOK: Duration = Duration::from_millis(5);

/// All that an engine is built from.
pub(crate) struct Plan {
    pub(crate) target: Source,
    pub(crate) drafters: Vec<Drafter>,
    pub(crate) settings: Settings,
}

impl Plan {
    /// Builds the engine.
    pub(crate) fn build(self, py: Python<'_>) -> PyResult<Assembled> {
        let drafters = self.drafters.iter().filter_map(Drafter::source);
        if drafters.chain([&self.target]).all(|source| source.path_of().is_some()) {
            self.build_from_files(py)
        } else {
            self.build_from_memory(py)
        }
    }

    /// Nothing is borrowed: after an interrupt the loader is left to end by itself, and never touches the interpreter.
    fn build_from_files(self, py: Python<'_>) -> PyResult<Assembled> {
        let is_interrupted = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&is_interrupted);
        let loader = Builder::new()
            .name("slipstream-loader".to_owned())
            .spawn(move || self.load(&[], &[], &flag))
            .map_err(|error| raise(&EngineError::device(format!("the loader's thread cannot be started: {error}"))))?;
        py.detach(|| {
            watch(&is_interrupted, || loader.is_finished())?;
            settle(loader.join())
        })
    }

    /// The arrays are borrowed: an interrupt waits for the loader to see it.
    fn build_from_memory(self, py: Python<'_>) -> PyResult<Assembled> {
        let hold = |drafter: &Drafter| drafter.source().map_or(Ok(Vec::new()), |source| source.hold(py));
        let target_arrays = self.target.hold(py)?;
        let drafter_arrays: Vec<HeldArrays<'_>> = self.drafters.iter().map(hold).collect::<PyResult<_>>()?;
        let target_bytes = slices(&target_arrays)?;
        let drafter_bytes: Vec<Vec<&[u8]>> = drafter_arrays.iter().map(slices).collect::<PyResult<_>>()?;
        let is_interrupted = AtomicBool::new(false);
        py.detach(|| {
            std::thread::scope(|scope| {
                let loader = scope.spawn(|| self.load(&target_bytes, &drafter_bytes, &is_interrupted));
                let watched = watch(&is_interrupted, || loader.is_finished());
                let loaded = loader.join();
                watched?;
                settle(loaded)
            })
        })
    }

    fn load(&self, target: &[&[u8]], drafters: &[Vec<&[u8]>], is_interrupted: &AtomicBool) -> Result<Assembled> {
        let go_on = || {
            if is_interrupted.load(Ordering::Relaxed) {
                return Err(EngineError::device("loading was interrupted"));
            }
            Ok(())
        };
        let model = self.target.open_model(target)?;
        let mut files = Vec::with_capacity(self.drafters.len());
        for (index, drafter) in self.drafters.iter().enumerate() {
            go_on()?;
            files.push(drafter.open(&self.target, drafters.get(index).map_or(&[], Vec::as_slice))?);
        }
        assemble(model, files, &self.settings, &|_| go_on())
    }
}

/// Waits for the loader's end, or for Ctrl-C.
fn watch(is_interrupted: &AtomicBool, is_finished: impl Fn() -> bool) -> PyResult<()> {
    while !is_finished() {
        std::thread::sleep(LOOK);
        Python::attach(|py| py.check_signals()).inspect_err(|_| is_interrupted.store(true, Ordering::Relaxed))?;
    }
    Ok(())
}

/// What a loader that ended brought.
fn settle(loaded: Joined<Result<Assembled>>) -> PyResult<Assembled> {
    loaded
        .unwrap_or_else(|_| Err(EngineError::device("loading stopped: an invariant was broken")))
        .map_err(|error| raise(&error))
}
