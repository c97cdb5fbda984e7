//! Chat messages to a prompt, through the template that a model brings.
//!
//! A template is a program from an untrusted file. It runs in an interpreter that knows no files, processes or host
//! objects; its steps, and with them the memory it can fill, are counted, and its output is bounded.

use std::fmt;
use std::io::{self, Write};
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use serde_json::Value as Json;

use super::date::strftime;
use super::shown;
use crate::error::{EngineError, Result};

/// Steps that any template may take; one step also pays for 64 bytes of text.
const BASE_FUEL: u64 = 1_000_000;
/// Most bytes of a rendered prompt.
const MAX_OUTPUT_BYTES: usize = 32 << 20;
/// Largest template.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;
const NAME: &str = "chat";

/// Texts of special tokens, which templates name as variables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTexts {
    /// `bos_token`.
    pub bos: Option<String>,
    /// `eos_token`.
    pub eos: Option<String>,
}

/// A model's chat template. One that cannot be read is kept with its error, since the model itself can still be used.
pub struct ChatTemplate {
    environment: Result<Environment<'static>>,
    source: String,
    special: SpecialTexts,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ChatTemplate").field("source", &self.source).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// A template with the texts of the model's special tokens.
    pub fn new(source: &str, special: SpecialTexts) -> Self {
        Self { environment: environment(source), source: source.to_owned(), special }
    }

    /// The template of a `tokenizer_config.json`: one text, or the one called `default` of several.
    pub(super) fn from_tokenizer_config(
        config: &Json,
        jinja_file: Option<&str>,
        special: SpecialTexts,
    ) -> Option<Self> {
        let field = config.get("chat_template");
        let named = |entry: &&Json| entry.get("name").and_then(Json::as_str) == Some("default");
        let in_config = match field {
            Some(Json::String(text)) => Some(text.as_str()),
            Some(Json::Array(entries)) => {
                let entry = entries.iter().find(named).or_else(|| entries.first());
                entry.and_then(|entry| entry.get("template")).and_then(Json::as_str)
            }
            _ => None,
        };
        jinja_file.or(in_config).map(|source| Self::new(source, special))
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders messages: a list of `{"role", "content"}`, content a text or a list of `{"type": "text", "text"}`. The
    /// result is to be encoded without adding special tokens, since the template writes them itself.
    pub fn render(&self, messages: &Json, add_generation_prompt: bool) -> Result<String> {
        let mut environment = self.environment.clone()?;
        let (messages, input_bytes) = checked_messages(messages)?;
        environment.set_fuel(Some(BASE_FUEL + input_bytes as u64));
        let failed = |error: &Error| {
            EngineError::request(format!("the chat template refused the messages: {}", shown(&error.to_string())))
        };
        let template = environment.get_template(NAME).map_err(|error| failed(&error))?;
        let mut context = serde_json::Map::new();
        context.insert("messages".to_owned(), Json::Array(messages));
        context.insert("add_generation_prompt".to_owned(), Json::Bool(add_generation_prompt));
        context.insert("tools".to_owned(), Json::Null);
        context.insert("documents".to_owned(), Json::Null);
        for (name, text) in [("bos_token", &self.special.bos), ("eos_token", &self.special.eos)] {
            if let Some(text) = text {
                context.insert(name.to_owned(), Json::String(text.clone()));
            }
        }
        let mut output = Bounded { bytes: Vec::new(), is_full: false };
        let result = template.render_captured_to(Value::from(Serde(context)), &mut output).map(|_| ());
        if output.is_full {
            return Err(EngineError::request(format!(
                "expected a chat template that writes at most {MAX_OUTPUT_BYTES} bytes, got more"
            )));
        }
        result.map_err(|error| failed(&error))?;
        String::from_utf8(output.bytes).map_err(|error| EngineError::request(format!("expected text: {error}")))
    }
}

/// Output that refuses to grow past its bound.
struct Bounded {
    bytes: Vec<u8>,
    is_full: bool,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_OUTPUT_BYTES {
            self.is_full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The messages as templates expect them, and their size in bytes.
fn checked_messages(messages: &Json) -> Result<(Vec<Json>, usize)> {
    let wrong = |index: usize, expected: &str, got: &Json| {
        EngineError::request(format!("message {index}: expected {expected}, got {}", shown(&got.to_string())))
    };
    let list = messages.as_array().ok_or_else(|| {
        EngineError::request(format!("expected a list of messages, got {}", shown(&messages.to_string())))
    })?;
    if list.is_empty() {
        return Err(EngineError::request("expected at least one message, got none"));
    }
    let mut input_bytes = 0;
    let mut checked = Vec::with_capacity(list.len());
    for (index, message) in list.iter().enumerate() {
        let mut fields = message.as_object().ok_or_else(|| wrong(index, "an object", message))?.clone();
        let role = fields.get("role").unwrap_or(&Json::Null);
        if !role.is_string() {
            return Err(wrong(index, "a role", role));
        }
        let content = match fields.get("content") {
            Some(Json::String(text)) => text.clone(),
            Some(Json::Array(parts)) => {
                let text = |part: &Json| {
                    let is_text = part.get("type").and_then(Json::as_str) == Some("text");
                    part.get("text").and_then(Json::as_str).filter(|_| is_text).map(str::to_owned)
                };
                let parts = parts.iter().map(|part| text(part).ok_or_else(|| wrong(index, "parts of type text", part)));
                parts.collect::<Result<Vec<_>>>()?.concat()
            }
            other => {
                return Err(wrong(index, "a text as content", other.unwrap_or(&Json::Null)));
            }
        };
        input_bytes += content.len() + 64;
        fields.insert("content".to_owned(), Json::String(content));
        checked.push(Json::Object(fields));
    }
    Ok((checked, input_bytes))
}

/// An interpreter with the settings, filters and functions that Hugging Face gives to templates.
fn environment(source: &str) -> Result<Environment<'static>> {
    if source.len() > MAX_TEMPLATE_BYTES {
        return Err(EngineError::model(format!(
            "expected a chat template of at most {MAX_TEMPLATE_BYTES} bytes, got {}",
            source.len()
        )));
    }
    let failed =
        |error: &Error| EngineError::model(format!("expected a valid chat template: {}", shown(&error.to_string())));
    let mut environment = Environment::new();
    let syntax =
        SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(|error| failed(&error))?;
    environment.set_syntax(syntax);
    environment.set_debug(false);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.remove_global("debug");
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: String| strftime(&format, SystemTime::now()));
    environment.add_template_owned(NAME, without_generation_tags(source)).map_err(|error| failed(&error))?;
    Ok(environment)
}

/// JSON as Python writes it: a space after commas and colons, other alphabets and markup as they are.
#[expect(clippy::needless_pass_by_value, reason = "the interpreter hands its arguments over")]
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let failed = |error: serde_json::Error| Error::new(ErrorKind::InvalidOperation, error.to_string());
    let mut bytes = Vec::new();
    match options.get::<Option<usize>>("indent")? {
        Some(indent) => {
            let indent = " ".repeat(indent.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter)).map_err(failed)?;
        }
        None => {
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Spaced)).map_err(failed)?;
        }
    }
    String::from_utf8(bytes).map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, is_first: bool) -> io::Result<()> {
        if is_first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, is_first: bool) -> io::Result<()> {
        if is_first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Templates for training mark the assistant's text with `{% generation %}`; to us these tags mean nothing.
fn without_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        result.push_str(before);
        let Some(len) = tag.find("%}").map(|end| end + 2) else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(len);
        let word = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        match word {
            "generation" => result.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => result.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => result.push_str(tag),
        }
        rest = after;
    }
    result.push_str(rest);
    result
}
