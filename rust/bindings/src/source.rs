//! Where weights come from, and drafters' settings. Nothing is read before an engine is built.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use numpy::{PyArray1, PyArrayMethods, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::Value;
use slipstream_engine::assemble::{DrafterFile, TreeSettings, is_same_file};
use slipstream_engine::draft::{NGramSettings, head_spec};
use slipstream_engine::error::{EngineError, Result};
use slipstream_engine::load::{Checkpoint, LentTensors, ModelFile, TensorStore, TensorType};
use slipstream_engine::model::ModelSpec;
use slipstream_kernels::HostType;

use crate::error::raise;

/// A path, or tensors in memory.
#[pyclass(frozen, module = "slipstream._core")]
#[derive(Clone)]
pub(crate) struct Source {
    kind: Arc<Kind>,
}

enum Kind {
    Path(PathBuf),
    Parts(Parts),
}

struct Parts {
    config_json: String,
    generation_config_json: Option<String>,
    tokenizer_json: Option<Vec<u8>>,
    tokenizer_config_json: Option<String>,
    tensors: Vec<Tensor>,
}

struct Tensor {
    name: String,
    dtype: TensorType,
    shape: Vec<usize>,
    bytes: Py<PyArray1<u8>>,
}

/// A tensor as Python gives it: name, dtype, shape, bytes.
type GivenTensor = (String, String, Vec<usize>, Py<PyArray1<u8>>);

/// Bytes of a source's arrays, held while an engine is built.
pub(crate) type HeldArrays<'py> = Vec<PyReadonlyArray1<'py, u8>>;

impl Source {
    /// Holds the arrays, so that nobody writes to them.
    pub(crate) fn hold<'py>(&self, py: Python<'py>) -> PyResult<HeldArrays<'py>> {
        let Kind::Parts(parts) = &*self.kind else {
            return Ok(Vec::new());
        };
        let hold = |tensor: &Tensor| {
            tensor.bytes.bind(py).try_readonly().map_err(|_| {
                raise(&EngineError::model(format!("tensor {}: expected an array that nobody writes to", tensor.name)))
            })
        };
        parts.tensors.iter().map(hold).collect()
    }

    fn lend<'a>(parts: &Parts, bytes: &[&'a [u8]]) -> LentTensors<'a> {
        let lend =
            |(tensor, bytes): (&Tensor, &&'a [u8])| (tensor.name.clone(), tensor.dtype, tensor.shape.clone(), *bytes);
        parts.tensors.iter().zip(bytes).map(lend).collect()
    }

    /// Opens a decoder. `bytes` are those of [`Source::hold`].
    pub(crate) fn open_model<'a>(&self, bytes: &[&'a [u8]]) -> Result<ModelFile<'a>> {
        match &*self.kind {
            Kind::Path(path) => ModelFile::open(path),
            Kind::Parts(parts) => ModelFile::from_parts(
                &parts.config_json,
                parts.generation_config_json.as_deref(),
                parts.tokenizer_json.as_deref(),
                parts.tokenizer_config_json.as_deref(),
                Self::lend(parts, bytes),
            ),
        }
    }

    /// Opens a drafter's checkpoint.
    pub(crate) fn open_checkpoint<'a>(&self, bytes: &[&'a [u8]]) -> Result<Checkpoint<'a>> {
        match &*self.kind {
            Kind::Path(path) => Checkpoint::open(path),
            Kind::Parts(parts) => Checkpoint::from_parts(&parts.config_json, Self::lend(parts, bytes)),
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        match (&*self.kind, &*other.kind) {
            (Kind::Path(ours), Kind::Path(theirs)) => is_same_file(ours, theirs),
            _ => Arc::ptr_eq(&self.kind, &other.kind),
        }
    }

    /// The path, unless it is in memory.
    pub(crate) fn path_of(&self) -> Option<&Path> {
        match &*self.kind {
            Kind::Path(path) => Some(path),
            Kind::Parts(_) => None,
        }
    }
}

fn with_chat_template(config_json: Option<String>, template: Option<String>) -> PyResult<Option<String>> {
    let Some(template) = template else {
        return Ok(config_json);
    };
    let parsed = serde_json::from_str(config_json.as_deref().unwrap_or("{}"));
    let Ok(Value::Object(mut config)) = parsed else {
        return Err(raise(&EngineError::model("expected tokenizer_config_json to be a JSON object")));
    };
    config.insert("chat_template".to_owned(), Value::from(template));
    Ok(Some(Value::Object(config).to_string()))
}

#[pymethods]
impl Source {
    /// A Hugging Face folder, or a `.gguf` file. Nothing is read yet.
    #[staticmethod]
    #[pyo3(signature = (path))]
    fn path(path: PathBuf) -> Self {
        Self { kind: Arc::new(Kind::Path(path)) }
    }

    /// A config and tensors `(name, dtype, shape, bytes)`.
    #[staticmethod]
    #[pyo3(signature = (
        config_json, tensors, *, generation_config_json=None, tokenizer_json=None, tokenizer_config_json=None,
        chat_template=None
    ))]
    fn parts(
        config_json: String,
        tensors: Vec<GivenTensor>,
        generation_config_json: Option<String>,
        tokenizer_json: Option<Vec<u8>>,
        tokenizer_config_json: Option<String>,
        chat_template: Option<String>,
    ) -> PyResult<Self> {
        let read = |(name, dtype, shape, bytes): GivenTensor| {
            let dtype = match dtype.as_str() {
                "f32" => HostType::F32,
                "f16" => HostType::F16,
                "bf16" => HostType::BF16,
                other => {
                    return Err(raise(&EngineError::model(format!(
                        "tensor {name}: expected a dtype of f32, f16 or bf16, got {other}"
                    ))));
                }
            };
            Ok(Tensor { name, dtype: TensorType::Weight(dtype), shape, bytes })
        };
        let parts = Parts {
            config_json,
            generation_config_json,
            tokenizer_json,
            tokenizer_config_json: with_chat_template(tokenizer_config_json, chat_template)?,
            tensors: tensors.into_iter().map(read).collect::<PyResult<_>>()?,
        };
        Ok(Self { kind: Arc::new(Kind::Parts(parts)) })
    }

    fn __repr__(&self) -> String {
        match &*self.kind {
            Kind::Path(path) => format!("Source.path({})", path.display()),
            Kind::Parts(parts) => format!("Source.parts(<{} tensors>)", parts.tensors.len()),
        }
    }
}

/// One drafter's settings.
#[pyclass(frozen, module = "slipstream._core")]
#[derive(Clone)]
pub(crate) struct Drafter {
    kind: DrafterKind,
}

#[derive(Clone)]
enum DrafterKind {
    NGram(NGramSettings),
    DraftModel { source: Source, num_layers: Option<usize>, tree: TreeSettings },
    Eagle { source: Source, tree: TreeSettings },
}

impl Drafter {
    /// Where its weights come from, if it has any.
    pub(crate) fn source(&self) -> Option<&Source> {
        match &self.kind {
            DrafterKind::NGram(_) => None,
            DrafterKind::DraftModel { source, .. } | DrafterKind::Eagle { source, .. } => Some(source),
        }
    }

    /// Opens its files. A draft model that is the target shares its weights.
    pub(crate) fn open<'a>(&self, target: &Source, bytes: &[&'a [u8]]) -> Result<DrafterFile<'a>> {
        match &self.kind {
            DrafterKind::NGram(ngram) => Ok(DrafterFile::NGram(*ngram)),
            DrafterKind::DraftModel { source, num_layers, tree } => {
                let file = if source.is_same(target) { None } else { Some(Box::new(source.open_model(bytes)?)) };
                Ok(DrafterFile::DraftModel { file, num_layers: *num_layers, tree: *tree })
            }
            DrafterKind::Eagle { source, tree } => {
                Ok(DrafterFile::Eagle { file: source.open_checkpoint(bytes)?, tree: *tree })
            }
        }
    }
}

#[pymethods]
impl Drafter {
    /// Prompt lookup.
    #[staticmethod]
    #[pyo3(signature = (*, min_match=2, max_match=5, max_nodes=10))]
    fn ngram(min_match: usize, max_match: usize, max_nodes: u16) -> Self {
        Self { kind: DrafterKind::NGram(NGramSettings { min_match, max_match, max_nodes }) }
    }

    /// A decoder with the target's vocabulary.
    #[staticmethod]
    #[pyo3(signature = (
        source, *, num_layers=None, max_depth=5, top_k=4, max_nodes=16, noise=true, fixed_tree=false
    ))]
    fn draft_model(
        source: &Bound<'_, Source>,
        num_layers: Option<usize>,
        max_depth: u16,
        top_k: u16,
        max_nodes: u16,
        noise: bool,
        fixed_tree: bool,
    ) -> Self {
        let tree = TreeSettings { max_depth, top_k, max_nodes, noise, fixed_tree };
        Self { kind: DrafterKind::DraftModel { source: source.get().clone(), num_layers, tree } }
    }

    /// An EAGLE-1/2 head with EAGLE-2's dynamic tree.
    #[staticmethod]
    #[pyo3(signature = (source, *, max_depth=7, top_k=10, max_nodes=60, noise=true, fixed_tree=false))]
    fn eagle(
        source: &Bound<'_, Source>,
        max_depth: u16,
        top_k: u16,
        max_nodes: u16,
        noise: bool,
        fixed_tree: bool,
    ) -> Self {
        let tree = TreeSettings { max_depth, top_k, max_nodes, noise, fixed_tree };
        Self { kind: DrafterKind::Eagle { source: source.get().clone(), tree } }
    }
}

fn describe<'py>(
    py: Python<'py>,
    kind: &str,
    spec: &ModelSpec,
    tensors: &TensorStore<'_>,
) -> PyResult<Bound<'py, PyDict>> {
    let facts = spec_facts(py, spec)?;
    facts.set_item("kind", kind)?;
    let names = tensors.names();
    let elements = names.iter().filter_map(|name| tensors.shape(name)).map(|shape| shape.iter().product::<usize>());
    facts.set_item("parameters", elements.sum::<usize>())?;
    facts.set_item("tensors", names.len())?;
    Ok(facts)
}

/// What a spec says, for people.
pub(crate) fn spec_facts<'py>(py: Python<'py>, spec: &ModelSpec) -> PyResult<Bound<'py, PyDict>> {
    let facts = PyDict::new(py);
    facts.set_item("architecture", &spec.architecture)?;
    facts.set_item("layers", spec.num_layers)?;
    facts.set_item("hidden_size", spec.hidden_size)?;
    facts.set_item("heads", spec.num_heads)?;
    facts.set_item("kv_heads", spec.num_kv_heads)?;
    facts.set_item("head_dim", spec.head_dim)?;
    facts.set_item("intermediate_size", spec.intermediate_size)?;
    facts.set_item("vocab_size", spec.vocab_size)?;
    facts.set_item("max_context", spec.max_position)?;
    facts.set_item("tied_embeddings", spec.tie_word_embeddings)?;
    facts.set_item("kv_bytes_per_token", 8 * spec.num_layers * spec.num_kv_heads * spec.head_dim)?;
    Ok(facts)
}

/// What a model or an EAGLE head is, from its config and tensor names.
#[pyfunction]
#[pyo3(signature = (source))]
pub(crate) fn inspect<'py>(py: Python<'py>, source: &Bound<'py, Source>) -> PyResult<Bound<'py, PyDict>> {
    let source = source.get();
    let held = source.hold(py)?;
    let bytes = slices(&held)?;
    let is_folder = source.path_of().is_none_or(Path::is_dir);
    let checkpoint = if is_folder { source.open_checkpoint(&bytes).ok() } else { None };
    if let Some(head) = checkpoint.filter(|checkpoint| checkpoint.tensors.has("fc.weight")) {
        let spec = head_spec(&head.config).map_err(|error| raise(&error))?;
        return describe(py, "eagle", &spec, &head.tensors);
    }
    let model = source.open_model(&bytes).map_err(|error| raise(&error))?;
    let facts = describe(py, "model", &model.spec, &model.tensors)?;
    facts.set_item("name", &model.name)?;
    facts.set_item("has_tokenizer", model.tokenizer.is_some())?;
    facts.set_item("has_chat_template", model.chat_template.is_some())?;
    Ok(facts)
}

/// The bytes of held arrays.
pub(crate) fn slices<'a>(held: &'a HeldArrays<'_>) -> PyResult<Vec<&'a [u8]>> {
    let slice = |array: &'a PyReadonlyArray1<'_, u8>| {
        array.as_slice().map_err(|_| raise(&EngineError::model("expected tensors without gaps, got a strided array")))
    };
    held.iter().map(slice).collect()
}
