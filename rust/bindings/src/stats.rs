//! Counts for Python.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use slipstream_engine::metrics::Counts;

/// Counts of one request, or of all ended requests.
#[pyclass(frozen, module = "slipstream._core")]
#[derive(Clone)]
pub(crate) struct Stats {
    counts: Counts,
    seconds: f64,
    seconds_to_first_token: Option<f64>,
}

impl Stats {
    pub(crate) fn new(counts: Counts, seconds: f64, seconds_to_first_token: Option<f64>) -> Self {
        Self { counts, seconds, seconds_to_first_token }
    }
}

#[pymethods]
impl Stats {
    /// Tokens of the prompt.
    #[getter]
    fn prompt_tokens(&self) -> u64 {
        self.counts.num_prompt_tokens
    }
    /// Prompt tokens whose keys and values were there already.
    #[getter]
    fn cached_tokens(&self) -> u64 {
        self.counts.num_cached_tokens
    }
    /// Tokens written.
    #[getter]
    fn tokens(&self) -> u64 {
        self.counts.num_tokens
    }
    /// Tokens that were settled and then cut off by a stop or a limit.
    #[getter]
    fn cut_tokens(&self) -> u64 {
        self.counts.num_cut
    }
    /// Steps that settled tokens.
    #[getter]
    fn steps(&self) -> u64 {
        self.counts.num_steps
    }
    /// Tokens drafted.
    #[getter]
    fn drafted(&self) -> u64 {
        self.counts.num_drafted
    }
    /// Drafted tokens accepted.
    #[getter]
    fn accepted(&self) -> u64 {
        self.counts.num_accepted
    }
    /// Times that the request's K/V blocks were taken away.
    #[getter]
    fn preemptions(&self) -> u64 {
        self.counts.num_preemptions
    }
    /// Tokens settled per step, the next token included: at least 1.
    #[getter]
    fn acceptance_length(&self) -> f64 {
        self.counts.acceptance_length()
    }
    /// Accepted by drafted tokens.
    #[getter]
    fn acceptance_rate(&self) -> f64 {
        self.counts.acceptance_rate()
    }
    /// Share of the steps that drafted to a depth whose path reached it, depth 1 first.
    #[getter]
    fn per_depth(&self) -> Vec<f64> {
        let accepted = self.counts.accepted_per_depth.iter().chain(std::iter::repeat(&0));
        self.counts
            .drafted_per_depth
            .iter()
            .zip(accepted)
            .map(|(drafted, accepted)| *accepted as f64 / *drafted as f64)
            .collect()
    }
    /// From submission to the end, or to now.
    #[getter]
    fn seconds(&self) -> f64 {
        self.seconds
    }
    /// From submission to the first token.
    #[getter]
    fn seconds_to_first_token(&self) -> Option<f64> {
        self.seconds_to_first_token
    }
    /// All counts by name.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let facts = PyDict::new(py);
        facts.set_item("prompt_tokens", self.prompt_tokens())?;
        facts.set_item("cached_tokens", self.cached_tokens())?;
        facts.set_item("tokens", self.tokens())?;
        facts.set_item("cut_tokens", self.cut_tokens())?;
        facts.set_item("steps", self.steps())?;
        facts.set_item("drafted", self.drafted())?;
        facts.set_item("accepted", self.accepted())?;
        facts.set_item("preemptions", self.preemptions())?;
        facts.set_item("acceptance_length", self.acceptance_length())?;
        facts.set_item("acceptance_rate", self.acceptance_rate())?;
        facts.set_item("per_depth", self.per_depth())?;
        facts.set_item("seconds", self.seconds)?;
        facts.set_item("seconds_to_first_token", self.seconds_to_first_token)?;
        Ok(facts)
    }
    fn __repr__(&self) -> String {
        format!(
            "Stats(tokens={}, steps={}, acceptance_length={:.2}, acceptance_rate={:.2}, seconds={:.3})",
            self.tokens(),
            self.steps(),
            self.acceptance_length(),
            self.acceptance_rate(),
            self.seconds
        )
    }
}
