//! Damaged and hostile GGUF files: an error that names the field, no panic, no allocation by claimed size (HC-101 to
//! HC-103).

#[path = "load_counting.rs"]
mod counting;
#[path = "load_gguf_writer.rs"]
mod writer;

use counting::peak_of;
use proptest::prelude::*;
use slipstream_engine::error::EngineError;
use slipstream_engine::load::ModelFile;
use writer::{ARRAY, F32, STRING, U32, Writer, array, number, tensor, text};

fn opens(bytes: Vec<u8>) -> Result<(), EngineError> {
    ModelFile::from_gguf(bytes, "file").map(|_| ())
}

#[test]
fn the_valid_file_opens() {
    let model = ModelFile::from_gguf(Writer::valid().bytes(), "file").expect("a model");
    assert_eq!((model.name.as_str(), model.spec.vocab_size, model.spec.head_dim), ("small", 6, 4));
    assert_eq!(model.spec.max_position, 64);
    let tokenizer = model.tokenizer.expect("a tokenizer");
    assert_eq!(tokenizer.encode("ab!<|a|>", false).expect("ids"), [3, 4, 0]);
    let q = model.tensors.matrix("layers.0.self_attn.q_proj.weight", 8, 8).expect("q");
    assert_eq!(q.order, slipstream_kernels::RowOrder::Interleaved(4));
    let error = model.tensors.matrix("lm_head.weight", 6, 8).expect_err("no head").to_string();
    assert_eq!(error, "expected a tensor lm_head.weight, got none");
    let error = model.tensors.matrix("model.embed_tokens.weight", 8, 6).expect_err("a shape").to_string();
    assert_eq!(error, "tensor model.embed_tokens.weight: expected shape [8, 6], got [6, 8]");
}

#[test]
fn hc_101_sizes_that_overflow_are_refused() {
    let huge = [1 << 31, 1 << 32, (1 << 42) + 1, 1 << 63, u64::MAX];
    for size in huge {
        let file = Writer::valid();
        Writer { num_tensors: Some(size), ..file.clone() }.refused("number of tensors");
        Writer { num_keys: Some(size), ..file.clone() }.refused("number of keys");
        file.clone().with_key("a.text", STRING, &size.to_le_bytes()).refused("a.text");
        for element in [0, 4, 7, STRING, 10] {
            file.clone().with_key("a.list", ARRAY, &array(element, size, &[])).refused("a.list");
        }
        let nested = array(ARRAY, 1, &array(0, size, &[]));
        file.clone().with_key("a.list", ARRAY, &nested).refused("a.list");
        for axis in 0..4 {
            let mut dims = [1; 4];
            dims[axis] = size;
            file.clone().with_tensor(tensor("big", &dims, 0, 0)).refused("tensor big");
            dims[(axis + 1) % 4] = size;
            file.clone().with_tensor(tensor("big", &dims, 0, 0)).refused("tensor big");
        }
        file.clone().with_tensor(tensor("big", &[32, size], 8, 0)).refused("tensor big");
        file.clone().with_tensor([size.to_le_bytes().to_vec(), b"name".to_vec()].concat()).refused("name of tensor 3");
        for name in ["block_count", "embedding_length", "feed_forward_length", "context_length", "attention.key_length"]
        {
            file.clone().with_key(&format!("llama.{name}"), 10, &size.to_le_bytes()).refused("expected");
        }
    }
    for num_dims in [0, 5, 1 << 31, u32::MAX] {
        let entry = [text(b"odd"), num_dims.to_le_bytes().to_vec(), vec![1; 64]].concat();
        Writer::valid().with_tensor(entry).refused("tensor odd: expected 1 to 4 dimensions");
    }
    Writer { num_tensors: Some(4), ..Writer::valid() }.refused("tensor 3");
    Writer { num_keys: Some(0), ..Writer::valid() }.refused("expected");
}

#[test]
fn hc_102_malformed_fields_are_named() {
    let file = Writer::valid;
    for version in [0, 1, 4, u32::MAX] {
        Writer { version, ..file() }.refused("GGUF version 2 or 3");
    }
    Writer { version: 3u32.swap_bytes(), ..file() }.refused("big-endian");
    assert!(opens(Writer { version: 2, ..file() }.bytes()).is_ok());
    file().with_key("", U32, &[0; 4]).refused("name of key 17 of 1 to 1024 bytes, got 0");
    file().with_key(&"k".repeat(2000), U32, &[0; 4]).refused("name of key 17");
    let mut twice = file();
    twice.keys.push(number("general.size", 1));
    twice.keys.push(number("general.size", 2));
    twice.refused("general.size twice");
    file().with_key("a.kind", 13, &[0; 8]).refused("key a.kind: expected a value type");
    file().with_key("a.kind", ARRAY, &array(99, 1, &[0; 8])).refused("key a.kind: expected an element type");
    file().with_key("a.flag", 7, &[2]).refused("key a.flag: expected a truth value");
    file().with_key("a.text", STRING, &text(b"\xff\xfe")).refused("key a.text: expected a text in UTF-8");
    let mut bad_name = file();
    bad_name.keys.push([text(b"\xff\xfe"), U32.to_le_bytes().to_vec(), vec![0; 4]].concat());
    bad_name.refused("name of key 17 in UTF-8");
    let tokens =
        array(STRING, 6, &[text(b"\xff"), text(b"a"), text(b"b"), text(b"ab"), text(b"!"), text(b"c")].concat());
    file().with_key("tokenizer.ggml.tokens", ARRAY, &tokens).refused("key tokenizer.ggml.tokens");
    let mut nested = array(0, 0, &[]);
    for _ in 0..100 {
        nested = array(ARRAY, 1, &nested);
    }
    file().with_key("a.list", ARRAY, &nested).refused("nested");
    file().with_tensor(tensor("token_embd.weight", &[8], 0, 0)).refused("token_embd.weight twice");
    file().with_tensor(tensor("", &[8], 0, 0)).refused("name of tensor 3");
    file().with_tensor(tensor("odd", &[8], 4, 0)).refused("tensor odd: expected a known element type, got 4");
    file().with_tensor(tensor("odd", &[31], 8, 0)).refused("multiple of 32");
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
        Writer::valid().with_tensor(tensor("none", &dims, 0, 0)).refused("tensor none: expected no zero dimension");
    }
    for alignment in [0u32, 1, 3, 24, 1 << 17, 1 << 31] {
        Writer::valid().with_key("general.alignment", U32, &alignment.to_le_bytes()).refused("general.alignment");
    }
    Writer::valid().with_key("general.alignment", 5, &(-32i32).to_le_bytes()).refused("general.alignment");
    Writer::valid().with_key("general.alignment", F32, &32f32.to_le_bytes()).refused("general.alignment");
    Writer::valid().with_key("general.alignment", STRING, &text(b"32")).refused("general.alignment");
    let wide = Writer { alignment: 64, ..Writer::valid() };
    let wide = Writer { tensors: wide.tensors[..2].to_vec(), ..wide };
    assert!(opens(wide.with_key("general.alignment", U32, &64u32.to_le_bytes()).bytes()).is_ok());
    for (offset, expected) in [
        (4, "multiple of 32"),
        (352, "bytes of data"),
        (384, "bytes of data"),
        (1 << 62, "bytes of data"),
        (u64::MAX - 31, "bytes of data"),
    ] {
        Writer::valid().with_tensor(tensor("late", &[8], 0, offset)).refused(expected);
    }
}

#[test]
fn gguf_variants_that_cannot_run_are_named() {
    let file = Writer::valid;
    for architecture in ["gemma3", "mixtral", "eagle3", ""] {
        file().with_key("general.architecture", STRING, &text(architecture.as_bytes())).refused("not supported yet");
    }
    file().with_key("llama.expert_count", U32, &8u32.to_le_bytes()).refused("llama.expert_count");
    file().with_key("split.count", 2, &2u16.to_le_bytes()).refused("split.count");
    file().with_key("llama.rope.scaling.type", STRING, &text(b"yarn")).refused("llama.rope.scaling.type");
    file().with_key("llama.rope.dimension_count", U32, &2u32.to_le_bytes()).refused("llama.rope.dimension_count");
    file().with_key("llama.attention.head_count_kv", U32, &0u32.to_le_bytes()).refused("key/value heads");
    file().with_key("llama.attention.head_count", U32, &0u32.to_le_bytes()).refused("llama.attention.head_count");
    file().with_tensor(tensor("blk.0.attn_q.bias", &[8], 0, 0)).refused("blk.0.attn_q.bias");
    file().with_key("tokenizer.ggml.model", STRING, &text(b"llama")).refused("tokenizer.ggml.model");
    file().with_key("tokenizer.ggml.pre", STRING, &text(b"unheard-of")).refused("tokenizer.ggml.pre");
    file().with_key("tokenizer.ggml.token_type", ARRAY, &array(5, 1, &[0; 4])).refused("tokenizer.ggml.token_type");
    for merge in ["ab", "a ", " a", "a z", "b a"] {
        let merges = array(STRING, 1, &text(merge.as_bytes()));
        file().with_key("tokenizer.ggml.merges", ARRAY, &merges).refused("tokenizer.ggml.merges");
    }
    file().with_key("tokenizer.ggml.eos_token_id", U32, &6u32.to_le_bytes()).refused("eos token id");
    file().with_tensor(tensor("rope_freqs.weight", &[8], 0, 0)).refused("expected 2 rotary factors, got 8");
    let model =
        ModelFile::from_gguf(file().with_tensor(tensor("odd", &[256, 1], 10, 0)).bytes(), "file").expect("a model");
    let error = model.tensors.tensor("odd").expect_err("q2_k").to_string();
    assert!(error.starts_with("tensor odd:") && error.contains("q2_k, which is not supported yet"), "{error}");
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
