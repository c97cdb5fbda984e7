//! `Engine`: a target, its drafters, and the thread that runs them.

use std::sync::Arc;
use std::time::Instant;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use slipstream_engine::assemble::{Assembled, Info, Settings};
use slipstream_engine::engine::Limits;
use slipstream_engine::error::EngineError;
use slipstream_engine::load::{ChatTemplate, Tokenizer};
use slipstream_engine::stream::TokenLog;
use slipstream_engine::text::TokenTable;
use slipstream_kernels::Storage;
use slipstream_kernels::cpu::{Cpu, Isa, ReadLoop};

use crate::build::Plan;
use crate::error::raise;
use crate::handle::Handle;
use crate::params::{SamplingParams, token_ids};
use crate::source::{Drafter, Source, spec_facts};
use crate::stats::Stats;
use crate::stream::{TimedSink, Times, TokenStream};

/// A target, its drafters and the thread that runs them.
#[pyclass(frozen, module = "slipstream._core")]
pub(crate) struct Engine {
    handle: Arc<Handle>,
    limits: Limits,
    tokenizer: Option<Arc<Tokenizer>>,
    chat_template: Option<ChatTemplate>,
    table: Arc<TokenTable>,
    info: Info,
    built: Instant,
}

impl Engine {
    fn tokenizer(&self) -> PyResult<&Tokenizer> {
        self.tokenizer.as_deref().ok_or_else(|| {
            raise(
                &EngineError::request("expected a model with a tokenizer, got one without")
                    .with_hint("pass token ids, or give the model a tokenizer.json"),
            )
        })
    }
}

fn storage(quantize: Option<&str>) -> Result<Storage, EngineError> {
    match quantize {
        None => Ok(Storage::Lossless),
        Some("bf16") => Ok(Storage::Bf16),
        Some(other) => Err(EngineError::config(format!("expected quantize to be None or \"bf16\", got {other:?}"))),
    }
}

fn instruction_set(name: Option<&str>) -> Result<Option<Isa>, EngineError> {
    match name {
        None => Ok(None),
        Some("scalar") => Ok(Some(Isa::Scalar)),
        Some(name) if name == Isa::detect().name() => Ok(Some(Isa::detect())),
        Some(other) => Err(EngineError::config(format!(
            "expected instruction_set to be \"scalar\" or this CPU's best, {:?}, got {other:?}",
            Isa::detect().name()
        ))),
    }
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (
        target, drafters=Vec::new(), *, threads=None, max_batch=32, max_batch_tokens=512, chunk=None, max_context=None,
        kv_cache_bytes=None, block_size=16, prefix_cache=true, quantize=None, instruction_set=None
    ), text_signature = "(target, drafters=(), *, threads=None, max_batch=32, max_batch_tokens=512, chunk=None, \
        max_context=None, kv_cache_bytes=None, block_size=16, prefix_cache=True, quantize=None, instruction_set=None)")]
    #[expect(clippy::too_many_arguments, reason = "the one place where an engine's settings are listed")]
    fn new(
        py: Python<'_>,
        target: &Bound<'_, Source>,
        drafters: Vec<Py<Drafter>>,
        threads: Option<usize>,
        max_batch: usize,
        max_batch_tokens: u32,
        chunk: Option<u32>,
        max_context: Option<u32>,
        kv_cache_bytes: Option<usize>,
        block_size: u32,
        prefix_cache: bool,
        quantize: Option<&str>,
        instruction_set: Option<&str>,
    ) -> PyResult<Self> {
        let settings = Settings {
            threads,
            isa: self::instruction_set(instruction_set).map_err(|error| raise(&error))?,
            max_batch,
            max_batch_tokens,
            chunk,
            max_context,
            kv_cache_bytes,
            block_size,
            prefix_cache,
            storage: storage(quantize).map_err(|error| raise(&error))?,
        };
        let drafters = drafters.iter().map(|drafter| drafter.get().clone()).collect();
        let plan = Plan { target: target.get().clone(), drafters, settings };
        let Assembled { engine, limits, tokenizer, chat_template, table, info } = plan.build(py)?;
        let handle = Arc::new(Handle::start(engine).map_err(|error| raise(&error))?);
        Ok(Self { handle, limits, tokenizer, chat_template, table, info, built: Instant::now() })
    }

    /// Starts a request.
    #[pyo3(signature = (prompt, params))]
    fn submit(&self, prompt: &Bound<'_, PyAny>, params: &SamplingParams) -> PyResult<TokenStream> {
        self.handle.check_process()?;
        let prompt = token_ids("prompt", prompt)?;
        let id = self.handle.next_request();
        let request = self.limits.request(id, prompt, params.inner.clone()).map_err(|error| raise(&error))?;
        let (writer, reader) = TokenLog::open(request.max_len - request.prompt.len() as u32);
        let times = Arc::new(Times::default());
        let sink = Box::new(TimedSink::new(writer, Arc::clone(&times)));
        let shared = Arc::new(request.clone());
        self.handle.submit(request, sink).map_err(|error| raise(&error))?;
        Ok(TokenStream::new(shared, reader, Arc::clone(&self.table), times, Arc::clone(&self.handle)))
    }

    /// Token ids of a text.
    #[pyo3(signature = (text, *, add_special=true))]
    fn encode(&self, py: Python<'_>, text: &str, add_special: bool) -> PyResult<Vec<u32>> {
        let tokenizer = self.tokenizer()?;
        py.detach(|| tokenizer.encode(text, add_special)).map_err(|error| raise(&error))
    }

    /// Text of token ids, special tokens left out.
    #[pyo3(signature = (token_ids))]
    fn decode(&self, token_ids: &Bound<'_, PyAny>) -> PyResult<String> {
        let token_ids = self::token_ids("token_ids", token_ids)?;
        let num_tokens = self.limits.num_tokens;
        if let Some(token) = token_ids.iter().find(|token| **token >= num_tokens) {
            return Err(raise(&EngineError::request(format!("expected token_ids below {num_tokens}, got {token}"))));
        }
        self.tokenizer()?.decode(&token_ids).map_err(|error| raise(&error))
    }

    /// A chat as the text that the model was made for.
    #[pyo3(signature = (messages_json, *, add_generation_prompt=true))]
    fn render_chat(&self, messages_json: &str, add_generation_prompt: bool) -> PyResult<String> {
        let Some(template) = &self.chat_template else {
            return Err(raise(
                &EngineError::request("expected a model with a chat template, got one without")
                    .with_hint("pass the prompt as text"),
            ));
        };
        let messages = serde_json::from_str(messages_json)
            .map_err(|error| raise(&EngineError::request(format!("expected messages as JSON: {error}"))))?;
        template.render(&messages, add_generation_prompt).map_err(|error| raise(&error))
    }

    /// Whether the model brought a chat template.
    #[getter]
    fn has_chat_template(&self) -> bool {
        self.chat_template.is_some()
    }
    /// Number of tokens that can be drawn.
    #[getter]
    fn vocab_size(&self) -> u32 {
        self.limits.num_tokens
    }
    /// Most tokens of a request, prompt included.
    #[getter]
    fn max_context(&self) -> u32 {
        self.limits.max_context.min(self.limits.num_slots)
    }
    /// Tokens that end the text.
    #[getter]
    fn eos_token_ids(&self) -> Vec<u32> {
        self.limits.eos_token_ids.clone()
    }

    /// What was loaded.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let facts = spec_facts(py, &self.info.spec)?;
        facts.set_item("max_context", self.max_context())?;
        facts.set_item("drafters", &self.info.drafters)?;
        facts.set_item("weight_bytes_per_pass", self.info.bytes_per_pass)?;
        facts.set_item("kv_bytes_per_token", self.info.kv_bytes_per_token)?;
        facts.set_item("kv_bytes", self.info.kv_bytes)?;
        facts.set_item("threads", self.info.num_threads)?;
        facts.set_item("instruction_set", self.info.instruction_set)?;
        facts.set_item("has_tokenizer", self.tokenizer.is_some())?;
        Ok(facts)
    }

    /// Counts over all ended requests.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        self.handle.check_process()?;
        let (counts, _) = self.handle.report(py)?;
        Ok(Stats::new(counts, self.built.elapsed().as_secs_f64(), None))
    }

    /// What is going on now.
    fn load<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.handle.check_process()?;
        let (_, load) = self.handle.report(py)?;
        let facts = PyDict::new(py);
        facts.set_item("running", load.num_running)?;
        facts.set_item("waiting", load.num_waiting)?;
        facts.set_item("free_blocks", load.num_free_blocks)?;
        facts.set_item("num_blocks", load.num_blocks)?;
        Ok(facts)
    }

    /// Ends every request and the thread.
    fn close(&self, py: Python<'_>) {
        // In a fork there is no thread to end.
        if self.handle.check_process().is_ok() {
            py.detach(|| self.handle.close());
        }
    }
}

/// Bytes per second at which all threads together read memory: the limit of decoding one stream. The median of seven
/// readings of half a gibibyte.
#[pyfunction]
#[pyo3(signature = (threads=None))]
pub(crate) fn read_bandwidth(py: Python<'_>, threads: Option<usize>) -> PyResult<f64> {
    py.detach(|| {
        let cpu = Cpu::new(threads, None);
        let read = ReadLoop::new()?;
        let mut rates: Vec<f64> = (0..7).map(|_| read.bytes_per_second(&cpu)).collect();
        rates.sort_by(f64::total_cmp);
        Ok(rates[3])
    })
    .map_err(|error: EngineError| raise(&error))
}
