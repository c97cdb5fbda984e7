//! GGUF files field by field, valid or as wrong as a test wants.

use slipstream_engine::error::EngineError;
use slipstream_engine::load::ModelFile;

use crate::counting::peak_of;

/// Writes GGUF files field by field, as wrongly as a test wants.
#[derive(Clone)]
pub(crate) struct Writer {
    pub(crate) version: u32,
    pub(crate) num_tensors: Option<u64>,
    pub(crate) num_keys: Option<u64>,
    pub(crate) keys: Vec<Vec<u8>>,
    pub(crate) tensors: Vec<Vec<u8>>,
    pub(crate) alignment: usize,
    pub(crate) data: Vec<u8>,
}

pub(crate) const U32: u32 = 4;
pub(crate) const F32: u32 = 6;
pub(crate) const STRING: u32 = 8;
pub(crate) const ARRAY: u32 = 9;

pub(crate) fn text(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

pub(crate) fn key(name: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [text(name.as_bytes()), kind.to_le_bytes().to_vec(), value.to_vec()].concat()
}

pub(crate) fn number(name: &str, value: u32) -> Vec<u8> {
    key(name, U32, &value.to_le_bytes())
}

pub(crate) fn array(element: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&element.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}

pub(crate) fn tensor(name: &str, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut bytes = text(name.as_bytes());
    bytes.extend((dims.len() as u32).to_le_bytes());
    bytes.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
    bytes.extend(kind.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes
}

impl Writer {
    /// A valid file of about 2 KB.
    pub(crate) fn valid() -> Self {
        let tokens: Vec<u8> =
            ["<|a|>", "a", "b", "ab", "!", "\u{120}"].iter().flat_map(|token| text(token.as_bytes())).collect();
        let kinds: Vec<u8> = [3i32, 1, 1, 1, 1, 1].iter().flat_map(|kind| kind.to_le_bytes()).collect();
        let keys = vec![
            key("general.architecture", STRING, &text(b"llama")),
            key("general.name", STRING, &text(b"small")),
            number("llama.block_count", 1),
            number("llama.context_length", 64),
            number("llama.embedding_length", 8),
            number("llama.feed_forward_length", 8),
            number("llama.attention.head_count", 2),
            number("llama.attention.head_count_kv", 1),
            key("llama.attention.layer_norm_rms_epsilon", F32, &1e-5f32.to_le_bytes()),
            key("tokenizer.ggml.model", STRING, &text(b"gpt2")),
            key("tokenizer.ggml.pre", STRING, &text(b"smollm")),
            key("tokenizer.ggml.tokens", ARRAY, &array(STRING, 6, &tokens)),
            key("tokenizer.ggml.token_type", ARRAY, &array(5, 6, &kinds)),
            key("tokenizer.ggml.merges", ARRAY, &array(STRING, 1, &text(b"a b"))),
            number("tokenizer.ggml.bos_token_id", 0),
            number("tokenizer.ggml.eos_token_id", 0),
            key("tokenizer.chat_template", STRING, &text(b"{{ messages[0]['content'] }}")),
        ];
        let tensors = vec![
            tensor("token_embd.weight", &[8, 6], 0, 0),
            tensor("output_norm.weight", &[8], 0, 192),
            tensor("blk.0.attn_q.weight", &[8, 8], 1, 224),
        ];
        let data = vec![0; 352];
        Self { version: 3, num_tensors: None, num_keys: None, keys, tensors, alignment: 32, data }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.num_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        bytes.extend(self.num_keys.unwrap_or(self.keys.len() as u64).to_le_bytes());
        bytes.extend(self.keys.concat());
        bytes.extend(self.tensors.concat());
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        bytes.extend(&self.data);
        bytes
    }

    /// The same file with a key in place of another, or beside them.
    pub(crate) fn with_key(mut self, name: &str, kind: u32, value: &[u8]) -> Self {
        let start = text(name.as_bytes());
        self.keys.retain(|key| !key.starts_with(&start));
        self.keys.push(key(name, kind, value));
        self
    }

    pub(crate) fn with_tensor(mut self, entry: Vec<u8>) -> Self {
        self.tensors.push(entry);
        self
    }

    /// Opens the file: an error that contains `expected`, without much memory.
    pub(crate) fn refused(&self, expected: &str) {
        let bytes = self.bytes();
        let size = bytes.len() as isize;
        let (result, peak) = peak_of(|| ModelFile::from_gguf(bytes, "file").map(|model| model.name));
        let error = result.expect_err(expected);
        assert!(matches!(error, EngineError::Model(_)), "{error:?}");
        assert!(error.to_string().contains(expected), "expected {expected:?} in {error}");
        assert!(peak < size + (4 << 20), "{expected}: {peak} bytes");
    }
}
