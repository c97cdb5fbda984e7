//! Model files to specs, weights, tokenizers and chat templates. The only readers of untrusted bytes: every size from a
//! file is checked before it is used, and nothing is allocated because a file claims a size.

mod chat;
mod checkpoint;
mod config;
mod date;
mod gguf;
mod gguf_model;
mod gguf_tokenizer;
mod gguf_value;
mod safetensors;
mod store;
mod token_table;
mod tokenizer;

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use slipstream_kernels::host_bytes::HostBytes;

pub use chat::{ChatTemplate, SpecialTexts};
pub use checkpoint::Checkpoint;
pub use store::{LentTensors, TensorStore, TensorType};
pub use tokenizer::Tokenizer;

use crate::error::{EngineError, Result};
use crate::model::spec::{ModelSpec, SUPPORTED_ARCHITECTURES};

/// Largest configuration file.
const MAX_CONFIG_BYTES: u64 = 4 << 20;
/// Largest `tokenizer.json`; the largest released ones have some 35 MB.
const MAX_TOKENIZER_BYTES: u64 = 128 << 20;

/// Everything of a model that is not a device's: spec, tokenizer, chat template, and weights under the names of Hugging
/// Face.
#[derive(Debug)]
pub struct ModelFile<'a> {
    /// A name to show: the folder's or the file's.
    pub name: String,
    /// The architecture.
    pub spec: ModelSpec,
    /// The tokenizer, where the source carries one.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// The chat template, where the source carries one.
    pub chat_template: Option<ChatTemplate>,
    /// The weights, under the names of Hugging Face.
    pub tensors: TensorStore<'a>,
}

impl ModelFile<'static> {
    /// Opens a Hugging Face folder or a `.gguf` file.
    pub fn open(path: &Path) -> Result<Self> {
        if path.is_dir() {
            return open_folder(path);
        }
        if !path.exists() {
            return Err(EngineError::model(format!(
                "expected a model at {}, got no such file or folder",
                path.display()
            )));
        }
        let bytes = map_file(path)?;
        if !bytes.starts_with(b"GGUF") {
            return Err(EngineError::model(format!("expected a model folder or a .gguf file, got {}", path.display()))
                .with_hint("for safetensors, give the folder that holds config.json"));
        }
        open_gguf(bytes, display_name(path)).map_err(|error| error.within(path.display()))
    }

    /// Reads a GGUF file that is already in memory.
    pub fn from_gguf(bytes: Vec<u8>, name: &str) -> Result<Self> {
        open_gguf(HostBytes::owned(bytes), name.to_owned()).map_err(|error| error.within(name))
    }
}

impl<'a> ModelFile<'a> {
    /// A model over tensors in memory, with the texts of its files.
    pub fn from_parts(
        config_json: &str,
        generation_config: Option<&str>,
        tokenizer_json: Option<&[u8]>,
        tokenizer_config: Option<&str>,
        tensors: LentTensors<'a>,
    ) -> Result<Self> {
        let config = parse_json(config_json.as_bytes(), "config.json")?;
        let generation =
            generation_config.map(|json| parse_json(json.as_bytes(), "generation_config.json")).transpose()?;
        let tokenizer_config =
            tokenizer_config.map(|json| parse_json(json.as_bytes(), "tokenizer_config.json")).transpose()?;
        let spec = ModelSpec::from_config(&config, generation.as_ref())?;
        let tokenizer = tokenizer_json.map(Tokenizer::from_json).transpose()?;
        let chat_template = template(tokenizer_config.as_ref(), None, &spec, tokenizer.as_ref());
        let tokenizer = tokenizer.map(Arc::new);
        let path = config.get("_name_or_path").and_then(Value::as_str).filter(|path| !path.is_empty());
        let name = path.unwrap_or("model").to_owned();
        Ok(Self { name, spec, tokenizer, chat_template, tensors: TensorStore::lent(tensors)? })
    }
}

fn open_folder(folder: &Path) -> Result<ModelFile<'static>> {
    let config_path = folder.join("config.json");
    if !config_path.exists() {
        return Err(EngineError::model(format!("expected config.json in {}, got none", folder.display()))
            .with_hint("give a Hugging Face model folder, or the path of a .gguf file"));
    }
    let config = read_json(&config_path)?;
    let optional = |name: &str| {
        let path = folder.join(name);
        if path.exists() { read_json(&path).map(Some) } else { Ok(None) }
    };
    let generation = optional("generation_config.json")?;
    let spec =
        ModelSpec::from_config(&config, generation.as_ref()).map_err(|error| error.within(config_path.display()))?;
    let mut tensors = TensorStore::default();
    if !safetensors::read_folder(folder, &mut tensors)? {
        return Err(checkpoint::missing_weights(folder));
    }
    let tokenizer_path = folder.join("tokenizer.json");
    let tokenizer = if tokenizer_path.exists() {
        let bytes = read_limited(&tokenizer_path, MAX_TOKENIZER_BYTES)?;
        Some(Tokenizer::from_json(&bytes).map_err(|error| error.within(tokenizer_path.display()))?)
    } else {
        None
    };
    let template_path = folder.join("chat_template.jinja");
    let template_file = if template_path.exists() {
        let bytes = read_limited(&template_path, MAX_CONFIG_BYTES)?;
        Some(String::from_utf8(bytes).map_err(|error| {
            EngineError::model(format!("expected a template in UTF-8: {error}")).within(template_path.display())
        })?)
    } else {
        None
    };
    let tokenizer_config = optional("tokenizer_config.json")?;
    let chat_template = template(tokenizer_config.as_ref(), template_file.as_deref(), &spec, tokenizer.as_ref());
    Ok(ModelFile { name: display_name(folder), spec, tokenizer: tokenizer.map(Arc::new), chat_template, tensors })
}

fn open_gguf(bytes: HostBytes, name: String) -> Result<ModelFile<'static>> {
    let parsed = gguf::parse(&bytes)?;
    let spec = gguf_model::spec(&parsed)?;
    let tokenizer = gguf_tokenizer::read(&parsed.metadata)?;
    let source = parsed.metadata.text("tokenizer.chat_template")?;
    let chat_template = source.map(|source| ChatTemplate::new(source, special_texts(None, &spec, tokenizer.as_ref())));
    let name = parsed.metadata.text("general.name")?.map_or(name, shown);
    let described = parsed.tensors;
    let mut tensors = TensorStore::default();
    let file = tensors.add_file(bytes);
    for tensor in described {
        let order = gguf_model::row_order(&spec, &tensor.name);
        tensors.add(gguf_model::canonical(&tensor.name), tensor.dtype, tensor.shape, order, file, tensor.range)?;
    }
    Ok(ModelFile { name, spec, tokenizer: tokenizer.map(Arc::new), chat_template, tensors })
}

fn template(
    config: Option<&Value>,
    file: Option<&str>,
    spec: &ModelSpec,
    tokenizer: Option<&Tokenizer>,
) -> Option<ChatTemplate> {
    let special = special_texts(config, spec, tokenizer);
    ChatTemplate::from_tokenizer_config(config.unwrap_or(&Value::Null), file, special)
}

/// Texts of the special tokens: as the tokenizer's configuration says, else of the spec's ids.
fn special_texts(config: Option<&Value>, spec: &ModelSpec, tokenizer: Option<&Tokenizer>) -> SpecialTexts {
    let configured = |name: &str| {
        let field = config?.get(name)?;
        field.as_str().or_else(|| field.get("content")?.as_str()).map(str::to_owned)
    };
    let text = |id: Option<u32>| tokenizer?.token_text(id?).map(str::to_owned);
    SpecialTexts {
        bos: configured("bos_token").or_else(|| text(spec.bos_token_id)),
        eos: configured("eos_token").or_else(|| text(spec.eos_token_ids.first().copied())),
    }
}

fn require_folder(folder: &Path) -> Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    Err(EngineError::model(format!("expected a folder at {}, got none", folder.display())))
}

/// Maps a regular file.
fn map_file(path: &Path) -> Result<HostBytes> {
    if !path.is_file() {
        return Err(EngineError::model(format!("expected a file at {}, got none", path.display())));
    }
    HostBytes::map(path).map_err(|error| unreadable(path, &error))
}

/// Reads a small file whole.
fn read_limited(path: &Path, most: u64) -> Result<Vec<u8>> {
    if !path.is_file() {
        return Err(EngineError::model(format!("expected a file at {}, got none", path.display())));
    }
    let file = File::open(path).map_err(|error| unreadable(path, &error))?;
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(|error| unreadable(path, &error))?;
    if bytes.len() as u64 > most {
        return Err(
            EngineError::model(format!("expected a file of at most {most} bytes, got more")).within(path.display())
        );
    }
    Ok(bytes)
}

fn read_json(path: &Path) -> Result<Value> {
    let bytes = read_limited(path, MAX_CONFIG_BYTES)?;
    parse_json(&bytes, &path.display().to_string())
}

fn parse_json(bytes: &[u8], name: &str) -> Result<Value> {
    serde_json::from_slice(bytes).map_err(|error| EngineError::model(format!("{name}: expected JSON: {error}")))
}

fn unreadable(path: &Path, error: &std::io::Error) -> EngineError {
    EngineError::model(format!("expected a readable file at {}: {error}", path.display()))
}

fn display_name(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// The error for a family that is not supported.
fn unsupported(what: &str, name: &str) -> EngineError {
    EngineError::model(format!(
        "expected {what} of {}, got {}, which is not supported yet",
        SUPPORTED_ARCHITECTURES.join(", "),
        shown(name)
    ))
}

/// A text of a file, short and on one line, to be shown in a message.
fn shown(text: &str) -> String {
    const MOST: usize = 120;
    let mut result = String::new();
    for character in text.chars().take(MOST) {
        if character.is_control() {
            result.extend(character.escape_default());
        } else {
            result.push(character);
        }
    }
    if text.chars().nth(MOST).is_some() {
        result.push_str("...");
    }
    result
}
