//! Damaged and hostile model files: an error that names the field, no panic, no allocation by claimed size (HC-101 to
//! HC-105).

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use slipstream_engine::error::EngineError;
use slipstream_engine::load::{Checkpoint, ModelFile};

/// Counts the bytes that this thread holds, and the most it ever held.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // A thread that is ending has no counters any more.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Most bytes held during a call beyond those held before.
fn peak_of<T>(run: impl FnOnce() -> T) -> (T, isize) {
    let before = HELD.with(Cell::get);
    PEAK.with(|peak| peak.set(before));
    let result = run();
    (result, PEAK.with(Cell::get) - before)
}

/// Writes GGUF files field by field, as wrongly as a test wants.
#[derive(Clone)]
struct Writer {
    version: u32,
    num_tensors: Option<u64>,
    num_keys: Option<u64>,
    keys: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    alignment: usize,
    data: Vec<u8>,
}

const U32: u32 = 4;
const F32: u32 = 6;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

fn text(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

fn key(name: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [
        text(name.as_bytes()),
        kind.to_le_bytes().to_vec(),
        value.to_vec(),
    ]
    .concat()
}

fn number(name: &str, value: u32) -> Vec<u8> {
    key(name, U32, &value.to_le_bytes())
}

fn array(element: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&element.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}

fn tensor(name: &str, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut bytes = text(name.as_bytes());
    bytes.extend((dims.len() as u32).to_le_bytes());
    bytes.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
    bytes.extend(kind.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes
}

impl Writer {
    /// A valid file of about 2 KB.
    fn valid() -> Self {
        let tokens: Vec<u8> = ["<|a|>", "a", "b", "ab", "!", "\u{120}"]
            .iter()
            .flat_map(|token| text(token.as_bytes()))
            .collect();
        let kinds: Vec<u8> = [3i32, 1, 1, 1, 1, 1]
            .iter()
            .flat_map(|kind| kind.to_le_bytes())
            .collect();
        let keys = vec![
            key("general.architecture", STRING, &text(b"llama")),
            key("general.name", STRING, &text(b"small")),
            number("llama.block_count", 1),
            number("llama.context_length", 64),
            number("llama.embedding_length", 8),
            number("llama.feed_forward_length", 8),
            number("llama.attention.head_count", 2),
            number("llama.attention.head_count_kv", 1),
            key(
                "llama.attention.layer_norm_rms_epsilon",
                F32,
                &1e-5f32.to_le_bytes(),
            ),
            key("tokenizer.ggml.model", STRING, &text(b"gpt2")),
            key("tokenizer.ggml.pre", STRING, &text(b"smollm")),
            key("tokenizer.ggml.tokens", ARRAY, &array(STRING, 6, &tokens)),
            key("tokenizer.ggml.token_type", ARRAY, &array(5, 6, &kinds)),
            key(
                "tokenizer.ggml.merges",
                ARRAY,
                &array(STRING, 1, &text(b"a b")),
            ),
            number("tokenizer.ggml.bos_token_id", 0),
            number("tokenizer.ggml.eos_token_id", 0),
            key(
                "tokenizer.chat_template",
                STRING,
                &text(b"{{ messages[0]['content'] }}"),
            ),
        ];
        let tensors = vec![
            tensor("token_embd.weight", &[8, 6], 0, 0),
            tensor("output_norm.weight", &[8], 0, 192),
            tensor("blk.0.attn_q.weight", &[8, 8], 1, 224),
        ];
        let data = vec![0; 352];
        Self {
            version: 3,
            num_tensors: None,
            num_keys: None,
            keys,
            tensors,
            alignment: 32,
            data,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(
            self.num_tensors
                .unwrap_or(self.tensors.len() as u64)
                .to_le_bytes(),
        );
        bytes.extend(
            self.num_keys
                .unwrap_or(self.keys.len() as u64)
                .to_le_bytes(),
        );
        bytes.extend(self.keys.concat());
        bytes.extend(self.tensors.concat());
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        bytes.extend(&self.data);
        bytes
    }

    /// The same file with a key in place of another, or beside them.
    fn with_key(mut self, name: &str, kind: u32, value: &[u8]) -> Self {
        let start = text(name.as_bytes());
        self.keys.retain(|key| !key.starts_with(&start));
        self.keys.push(key(name, kind, value));
        self
    }

    fn with_tensor(mut self, entry: Vec<u8>) -> Self {
        self.tensors.push(entry);
        self
    }

    /// Opens the file: an error that contains `expected`, without much memory.
    fn refused(&self, expected: &str) {
        let bytes = self.bytes();
        let size = bytes.len() as isize;
        let (result, peak) =
            peak_of(|| ModelFile::from_gguf(bytes, "file").map(|model| model.name));
        let error = result.expect_err(expected);
        assert!(matches!(error, EngineError::Model(_)), "{error:?}");
        assert!(
            error.to_string().contains(expected),
            "expected {expected:?} in {error}"
        );
        assert!(peak < size + (4 << 20), "{expected}: {peak} bytes");
    }
}

fn opens(bytes: Vec<u8>) -> Result<(), EngineError> {
    ModelFile::from_gguf(bytes, "file").map(|_| ())
}

#[test]
fn the_valid_file_opens() {
    let model = ModelFile::from_gguf(Writer::valid().bytes(), "file").expect("a model");
    assert_eq!(
        (
            model.name.as_str(),
            model.spec.vocab_size,
            model.spec.head_dim
        ),
        ("small", 6, 4)
    );
    assert_eq!(model.spec.max_position, 64);
    let tokenizer = model.tokenizer.expect("a tokenizer");
    assert_eq!(tokenizer.encode("ab!<|a|>", false).expect("ids"), [3, 4, 0]);
    let q = model
        .tensors
        .matrix("layers.0.self_attn.q_proj.weight", 8, 8)
        .expect("q");
    assert_eq!(q.order, slipstream_kernels::RowOrder::Interleaved(4));
    let error = model
        .tensors
        .matrix("lm_head.weight", 6, 8)
        .expect_err("no head")
        .to_string();
    assert_eq!(error, "expected a tensor lm_head.weight, got none");
    let error = model
        .tensors
        .matrix("model.embed_tokens.weight", 8, 6)
        .expect_err("a shape")
        .to_string();
    assert_eq!(
        error,
        "tensor model.embed_tokens.weight: expected shape [8, 6], got [6, 8]"
    );
}

#[test]
fn hc_101_sizes_that_overflow_are_refused() {
    let huge = [1 << 31, 1 << 32, (1 << 42) + 1, 1 << 63, u64::MAX];
    for size in huge {
        let file = Writer::valid();
        Writer {
            num_tensors: Some(size),
            ..file.clone()
        }
        .refused("number of tensors");
        Writer {
            num_keys: Some(size),
            ..file.clone()
        }
        .refused("number of keys");
        file.clone()
            .with_key("a.text", STRING, &size.to_le_bytes())
            .refused("a.text");
        for element in [0, 4, 7, STRING, 10] {
            file.clone()
                .with_key("a.list", ARRAY, &array(element, size, &[]))
                .refused("a.list");
        }
        let nested = array(ARRAY, 1, &array(0, size, &[]));
        file.clone()
            .with_key("a.list", ARRAY, &nested)
            .refused("a.list");
        for axis in 0..4 {
            let mut dims = [1; 4];
            dims[axis] = size;
            file.clone()
                .with_tensor(tensor("big", &dims, 0, 0))
                .refused("tensor big");
            dims[(axis + 1) % 4] = size;
            file.clone()
                .with_tensor(tensor("big", &dims, 0, 0))
                .refused("tensor big");
        }
        file.clone()
            .with_tensor(tensor("big", &[32, size], 8, 0))
            .refused("tensor big");
        file.clone()
            .with_tensor([size.to_le_bytes().to_vec(), b"name".to_vec()].concat())
            .refused("name of tensor 3");
        for name in [
            "block_count",
            "embedding_length",
            "feed_forward_length",
            "context_length",
            "attention.key_length",
        ] {
            file.clone()
                .with_key(&format!("llama.{name}"), 10, &size.to_le_bytes())
                .refused("expected");
        }
    }
    for num_dims in [0, 5, 1 << 31, u32::MAX] {
        let entry = [text(b"odd"), num_dims.to_le_bytes().to_vec(), vec![1; 64]].concat();
        Writer::valid()
            .with_tensor(entry)
            .refused("tensor odd: expected 1 to 4 dimensions");
    }
    Writer {
        num_tensors: Some(4),
        ..Writer::valid()
    }
    .refused("tensor 3");
    Writer {
        num_keys: Some(0),
        ..Writer::valid()
    }
    .refused("expected");
}

#[test]
fn hc_102_malformed_fields_are_named() {
    let file = Writer::valid;
    for version in [0, 1, 4, u32::MAX] {
        Writer { version, ..file() }.refused("GGUF version 2 or 3");
    }
    Writer {
        version: 3u32.swap_bytes(),
        ..file()
    }
    .refused("big-endian");
    assert!(
        opens(
            Writer {
                version: 2,
                ..file()
            }
            .bytes()
        )
        .is_ok()
    );
    file()
        .with_key("", U32, &[0; 4])
        .refused("name of key 17 of 1 to 1024 bytes, got 0");
    file()
        .with_key(&"k".repeat(2000), U32, &[0; 4])
        .refused("name of key 17");
    let mut twice = file();
    twice.keys.push(number("general.size", 1));
    twice.keys.push(number("general.size", 2));
    twice.refused("general.size twice");
    file()
        .with_key("a.kind", 13, &[0; 8])
        .refused("key a.kind: expected a value type");
    file()
        .with_key("a.kind", ARRAY, &array(99, 1, &[0; 8]))
        .refused("key a.kind: expected an element type");
    file()
        .with_key("a.flag", 7, &[2])
        .refused("key a.flag: expected a truth value");
    file()
        .with_key("a.text", STRING, &text(b"\xff\xfe"))
        .refused("key a.text: expected a text in UTF-8");
    let mut bad_name = file();
    bad_name
        .keys
        .push([text(b"\xff\xfe"), U32.to_le_bytes().to_vec(), vec![0; 4]].concat());
    bad_name.refused("name of key 17 in UTF-8");
    let tokens = array(
        STRING,
        6,
        &[
            text(b"\xff"),
            text(b"a"),
            text(b"b"),
            text(b"ab"),
            text(b"!"),
            text(b"c"),
        ]
        .concat(),
    );
    file()
        .with_key("tokenizer.ggml.tokens", ARRAY, &tokens)
        .refused("key tokenizer.ggml.tokens");
    let mut nested = array(0, 0, &[]);
    for _ in 0..100 {
        nested = array(ARRAY, 1, &nested);
    }
    file().with_key("a.list", ARRAY, &nested).refused("nested");
    file()
        .with_tensor(tensor("token_embd.weight", &[8], 0, 0))
        .refused("token_embd.weight twice");
    file()
        .with_tensor(tensor("", &[8], 0, 0))
        .refused("name of tensor 3");
    file()
        .with_tensor(tensor("odd", &[8], 4, 0))
        .refused("tensor odd: expected a known element type, got 4");
    file()
        .with_tensor(tensor("odd", &[31], 8, 0))
        .refused("multiple of 32");
}

#[test]
fn hc_102_every_truncation_of_a_valid_file_is_refused() {
    let whole = Writer::valid().bytes();
    assert!((1200..3000).contains(&whole.len()), "{}", whole.len());
    for len in 0..whole.len() {
        assert!(opens(whole[..len].to_vec()).is_err(), "{len} bytes");
    }
    assert!(opens(whole).is_ok());
}

#[test]
fn hc_103_zero_dimensions_and_odd_alignments_are_refused() {
    for axis in 0..4 {
        let mut dims = [2; 4];
        dims[axis] = 0;
        Writer::valid()
            .with_tensor(tensor("none", &dims, 0, 0))
            .refused("tensor none: expected no zero dimension");
    }
    for alignment in [0u32, 1, 3, 24, 1 << 17, 1 << 31] {
        Writer::valid()
            .with_key("general.alignment", U32, &alignment.to_le_bytes())
            .refused("general.alignment");
    }
    Writer::valid()
        .with_key("general.alignment", 5, &(-32i32).to_le_bytes())
        .refused("general.alignment");
    Writer::valid()
        .with_key("general.alignment", F32, &32f32.to_le_bytes())
        .refused("general.alignment");
    Writer::valid()
        .with_key("general.alignment", STRING, &text(b"32"))
        .refused("general.alignment");
    let wide = Writer {
        alignment: 64,
        ..Writer::valid()
    };
    let wide = Writer {
        tensors: wide.tensors[..2].to_vec(),
        ..wide
    };
    assert!(
        opens(
            wide.with_key("general.alignment", U32, &64u32.to_le_bytes())
                .bytes()
        )
        .is_ok()
    );
    for (offset, expected) in [
        (4, "multiple of 32"),
        (352, "bytes of data"),
        (384, "bytes of data"),
        (1 << 62, "bytes of data"),
        (u64::MAX - 31, "bytes of data"),
    ] {
        Writer::valid()
            .with_tensor(tensor("late", &[8], 0, offset))
            .refused(expected);
    }
}

#[test]
fn gguf_variants_that_cannot_run_are_named() {
    let file = Writer::valid;
    for architecture in ["gemma3", "mixtral", "eagle3", ""] {
        file()
            .with_key(
                "general.architecture",
                STRING,
                &text(architecture.as_bytes()),
            )
            .refused("not supported yet");
    }
    file()
        .with_key("llama.expert_count", U32, &8u32.to_le_bytes())
        .refused("llama.expert_count");
    file()
        .with_key("split.count", 2, &2u16.to_le_bytes())
        .refused("split.count");
    file()
        .with_key("llama.rope.scaling.type", STRING, &text(b"yarn"))
        .refused("llama.rope.scaling.type");
    file()
        .with_key("llama.rope.dimension_count", U32, &2u32.to_le_bytes())
        .refused("llama.rope.dimension_count");
    file()
        .with_key("llama.attention.head_count_kv", U32, &0u32.to_le_bytes())
        .refused("key/value heads");
    file()
        .with_key("llama.attention.head_count", U32, &0u32.to_le_bytes())
        .refused("llama.attention.head_count");
    file()
        .with_tensor(tensor("blk.0.attn_q.bias", &[8], 0, 0))
        .refused("blk.0.attn_q.bias");
    file()
        .with_key("tokenizer.ggml.model", STRING, &text(b"llama"))
        .refused("tokenizer.ggml.model");
    file()
        .with_key("tokenizer.ggml.pre", STRING, &text(b"unheard-of"))
        .refused("tokenizer.ggml.pre");
    file()
        .with_key("tokenizer.ggml.token_type", ARRAY, &array(5, 1, &[0; 4]))
        .refused("tokenizer.ggml.token_type");
    for merge in ["ab", "a ", " a", "a z", "b a"] {
        let merges = array(STRING, 1, &text(merge.as_bytes()));
        file()
            .with_key("tokenizer.ggml.merges", ARRAY, &merges)
            .refused("tokenizer.ggml.merges");
    }
    file()
        .with_key("tokenizer.ggml.eos_token_id", U32, &6u32.to_le_bytes())
        .refused("eos token id");
    file()
        .with_tensor(tensor("rope_freqs.weight", &[8], 0, 0))
        .refused("expected 2 rotary factors, got 8");
    let model = ModelFile::from_gguf(
        file().with_tensor(tensor("odd", &[256, 1], 10, 0)).bytes(),
        "file",
    )
    .expect("a model");
    let error = model.tensors.tensor("odd").expect_err("q2_k").to_string();
    assert!(
        error.starts_with("tensor odd:") && error.contains("q2_k, which is not supported yet"),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn hc_102_flipped_bytes_never_panic(flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = Writer::valid().bytes();
        for (index, byte) in flips {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        let size = bytes.len() as isize;
        let (_, peak) = peak_of(|| opens(bytes));
        prop_assert!(peak < size + (64 << 20));
    }

    #[test]
    fn hc_102_random_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(opens(bytes.clone()).is_err());
        let marked = [b"GGUF\x03\0\0\0".as_slice(), &bytes].concat();
        prop_assert!(opens(marked).is_err());
    }
}

/// A folder of its own for a test, gone when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("slipstream-load-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        let folder = Self(path);
        folder.write("config.json", b"{\"model_type\": \"llama\"}");
        folder
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.0.join(name), bytes).expect("a file");
    }

    fn open(&self) -> Result<Checkpoint<'static>, EngineError> {
        Checkpoint::open(&self.0)
    }

    fn refused(&self, bytes: &[u8], expected: &str) {
        self.write("model.safetensors", bytes);
        let (result, peak) = peak_of(|| self.open());
        let error = result.expect_err(expected);
        assert!(matches!(error, EngineError::Model(_)), "{error:?}");
        assert!(
            error.to_string().contains(expected),
            "expected {expected:?} in {error}"
        );
        assert!(
            peak < bytes.len() as isize + (4 << 20),
            "{expected}: {peak} bytes"
        );
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(Path::new(&self.0));
    }
}

fn safetensors(header: &str, data: usize) -> Vec<u8> {
    [
        &(header.len() as u64).to_le_bytes()[..],
        header.as_bytes(),
        &vec![0; data],
    ]
    .concat()
}

const HEADER: &str = r#"{"a":{"dtype":"F32","shape":[4,8],"data_offsets":[0,128]},"b":{"dtype":"BF16","shape":[8],"data_offsets":[128,144]},"c":{"dtype":"I64","shape":[2],"data_offsets":[144,160]}}"#;

#[test]
fn hc_104_safetensors_header_limits_and_foreign_files() {
    let folder = Folder::new("hc104");
    let valid = safetensors(HEADER, 160);
    let size = valid.len() as u64;
    for (len, expected) in [
        (0, "expected a safetensors header"),
        (1, "expected a safetensors header"),
        (size, "expected a header of"),
        (size + 1, "expected a header of"),
        (8 << 20, "expected a header of"),
        ((8 << 20) + 1, "at most 8388608 bytes"),
        (1 << 63, "at most 8388608 bytes"),
        (u64::MAX, "at most 8388608 bytes"),
    ] {
        let bytes = [&len.to_le_bytes()[..], &valid[8..]].concat();
        folder.refused(&bytes, expected);
    }
    folder.refused(b"", "at least 8 bytes, got 0");
    folder.refused(b"PK\x03\x04\x00\x00\x08\x08\x00\x00\x00\x00", "zip archive");
    folder.refused(
        b"\x80\x04\x95\x21\x00\x00\x00\x00\x00\x00\x00\x8c",
        "pickle",
    );
    folder.refused(
        b"<!DOCTYPE html><html><body>Not found</body></html>",
        "a web page",
    );
    folder.refused(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "Git LFS pointer",
    );
    folder.refused(&Writer::valid().bytes(), "a GGUF file");
    folder.refused(
        &safetensors("{\"a\u{0}", 0),
        "expected a safetensors header",
    );
    folder.refused(
        &[&4u64.to_le_bytes()[..], b"\xff\xfe\xfd\xfc"].concat(),
        "UTF-8",
    );
    folder.refused(
        &safetensors(&"[".repeat(10_000), 0),
        "expected a safetensors header",
    );
    folder.refused(
        &safetensors(&format!("{{\"a\":{}", "{\"a\":".repeat(10_000)), 0),
        "expected a safetensors header",
    );
    let overflow = HEADER.replace("[4,8]", "[9223372036854775807,4]");
    folder.refused(
        &safetensors(&overflow, 160),
        "expected a safetensors header",
    );
    folder.refused(
        &safetensors(&HEADER.replace("[0,128]", "[0,64]"), 160),
        "expected a safetensors header",
    );
    folder.refused(
        &safetensors(&HEADER.replace("\"BF16\"", "\"Q9\""), 160),
        "expected a safetensors header",
    );
    let zero = r#"{"z":{"dtype":"F32","shape":[4,0],"data_offsets":[0,0]}}"#;
    folder.refused(
        &safetensors(zero, 0),
        "tensor z: expected no zero dimension",
    );
}

#[test]
fn hc_105_truncated_tensor_data_names_the_first_tensor() {
    let folder = Folder::new("hc105");
    let valid = safetensors(HEADER, 160);
    let start = valid.len() - 160;
    for (cut, expected) in [
        (40, "tensor a"),
        (80, "tensor a"),
        (127, "tensor a"),
        (130, "tensor b"),
        (158, "tensor c"),
        (159, "tensor c"),
    ] {
        folder.refused(&valid[..start + cut], expected);
    }
    for len in 0..valid.len() {
        folder.write("model.safetensors", &valid[..len]);
        assert!(folder.open().is_err(), "{len} bytes");
    }
    folder.write("model.safetensors", &valid);
    let checkpoint = folder.open().expect("a checkpoint");
    assert_eq!(checkpoint.tensors.names(), ["a", "b", "c"]);
    assert_eq!(checkpoint.tensors.integers("c").expect("integers"), [0, 0]);
    assert_eq!(checkpoint.tensors.vector("b").expect("a vector"), [0.0; 8]);
    assert!(
        checkpoint
            .tensors
            .tensor("b")
            .expect_err("a vector")
            .to_string()
            .contains("two dimensions, got [8]")
    );
    assert!(
        checkpoint
            .tensors
            .vector("c")
            .expect_err("integers")
            .to_string()
            .contains("tensor c: expected weights")
    );
}

#[test]
fn hc_105_shards_that_are_missing_cut_or_elsewhere_are_named() {
    let folder = Folder::new("shards");
    let shard = |name: &str, data| {
        safetensors(
            &format!(r#"{{"{name}":{{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}}}"#),
            data,
        )
    };
    let index = |second: &str, file: &str| {
        format!(r#"{{"metadata":{{}},"weight_map":{{"a":"one.safetensors","{second}":"{file}"}}}}"#)
            .into_bytes()
    };
    folder.write("one.safetensors", &shard("a", 16));
    let refused = |expected: &[&str]| {
        let error = folder.open().expect_err("a refusal").to_string();
        assert!(
            expected.iter().all(|expected| error.contains(expected)),
            "expected {expected:?} in {error}"
        );
    };
    folder.write(
        "model.safetensors.index.json",
        &index("b", "two.safetensors"),
    );
    refused(&["two.safetensors", "tensor b", "no such file"]);
    folder.write("two.safetensors", &shard("b", 15));
    refused(&["two.safetensors", "tensor b", "cut short"]);
    folder.write("two.safetensors", &shard("b", 16));
    assert_eq!(
        folder.open().expect("a checkpoint").tensors.names(),
        ["a", "b"]
    );
    folder.write(
        "model.safetensors.index.json",
        &index("c", "two.safetensors"),
    );
    refused(&["two.safetensors", "tensor c", "got none"]);
    folder.write("two.safetensors", &shard("a", 16));
    refused(&["a twice"]);
    for outside in [
        "../two.safetensors",
        "/etc/passwd",
        "x/two.safetensors",
        "..",
        ".",
        "",
        "a\\\\b",
    ] {
        folder.write("model.safetensors.index.json", &index("b", outside));
        refused(&["inside the folder"]);
    }
    for broken in [&b""[..], b"{}", b"[]", b"{\"weight_map\": []}", b"\xff"] {
        folder.write("model.safetensors.index.json", broken);
        refused(&["index of shards"]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn hc_104_flipped_bytes_never_panic(flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5)) {
        let mut bytes = safetensors(HEADER, 160);
        for (index, byte) in flips {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        let folder = Folder::new("flips");
        folder.write("model.safetensors", &bytes);
        let (result, peak) = peak_of(|| folder.open());
        if let Ok(checkpoint) = result {
            for name in checkpoint.tensors.names() {
                let _ = (checkpoint.tensors.tensor(name).is_ok(), checkpoint.tensors.vector(name).is_ok());
            }
        }
        prop_assert!(peak < 64 << 20);
    }
}
