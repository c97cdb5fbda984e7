//! Tokenizers against what Hugging Face makes of the same texts (tests/golden/tokenizer/generate.py).

use std::path::{Path, PathBuf};

use serde_json::Value;
use slipstream_engine::load::{ModelFile, Tokenizer};
use slipstream_engine::request::TokenId;
use slipstream_engine::text::TextStream;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tokenizer").join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(name)).expect("golden file")).expect("golden JSON")
}

fn texts() -> Vec<String> {
    serde_json::from_value(json("texts.json")).expect("a list of texts")
}

fn ids(value: &Value) -> Vec<Vec<TokenId>> {
    serde_json::from_value(value.clone()).expect("lists of ids")
}

fn from_json(name: &str) -> Tokenizer {
    Tokenizer::from_json(&std::fs::read(golden(&format!("{name}.json"))).expect("golden file")).expect(name)
}

/// Text by way of the table, as a stream shows it.
fn streamed(tokenizer: &Tokenizer, tokens: &[TokenId]) -> String {
    let mut stream = TextStream::new(tokenizer.table(), [].into());
    let mut text: String = tokens.iter().map(|token| stream.push(*token, true).text).collect();
    text.push_str(&stream.finish());
    text
}

fn check(name: &str, tokenizer: &Tokenizer) {
    let expected = json(&format!("{name}.expected.json"));
    let texts = texts();
    for (text, expected) in texts.iter().zip(ids(&expected["ids"])) {
        assert_eq!(tokenizer.encode(text, false).expect(text), expected, "{name}: {text:?}");
    }
    let Value::Array(decoded) = &expected["decoded"] else {
        return;
    };
    for ((text, tokens), decoded) in texts.iter().zip(ids(&expected["ids"])).zip(decoded) {
        let decoded = decoded.as_str().unwrap_or(text);
        assert_eq!(streamed(tokenizer, &tokens), decoded, "{name}: {text:?}");
        assert_eq!(tokenizer.decode(&tokens).expect(text), decoded, "{name}: {text:?}");
    }
    for (text, expected) in texts.iter().zip(ids(&expected["special"])) {
        assert_eq!(tokenizer.encode(text, true).expect(text), expected, "{name}: {text:?}");
    }
}

#[test]
fn tokenizer_json_gives_the_ids_of_hugging_face() {
    for name in ["gpt-2", "smollm", "qwen2", "llama-bpe", "sentencepiece", "metaspace"] {
        check(name, &from_json(name));
    }
}

#[test]
fn gguf_metadata_gives_the_ids_of_the_original_tokenizer() {
    for name in ["gpt-2", "smollm", "qwen2", "llama-bpe"] {
        let model = ModelFile::open(&golden(&format!("{name}.gguf"))).expect(name);
        assert_eq!(model.name, format!("tiny {name}"));
        let tokenizer = model.tokenizer.expect("a tokenizer");
        check(name, &tokenizer);
        let original = from_json(name);
        assert_eq!(tokenizer.vocab_size(), original.vocab_size());
        let differing =
            (0..tokenizer.vocab_size() as TokenId).find(|id| tokenizer.token_text(*id) != original.token_text(*id));
        assert_eq!(differing, None, "{name}");
        assert_eq!(*tokenizer.table().bytes, *original.table().bytes, "{name}");
        assert_eq!(tokenizer.table().special, original.table().special, "{name}");
    }
}

#[test]
fn special_tokens_are_parsed_and_left_out_of_text() {
    let tokenizer = from_json("gpt-2");
    let end = tokenizer.special_token_id("<|im_end|>").expect("a special token");
    let call = tokenizer.token_id("<tool_call>").expect("an added token");
    assert_eq!(tokenizer.special_token_id("<tool_call>"), None);
    assert_eq!(tokenizer.token_text(end), Some("<|im_end|>"));
    let tokens = tokenizer.encode("<|im_end|><tool_call>", false).expect("ids");
    assert_eq!(tokens, [end, call]);
    assert_eq!(streamed(&tokenizer, &tokens), "<tool_call>");
    assert_eq!(tokenizer.token_text(u32::MAX), None);
    assert!(tokenizer.table().bytes(u32::MAX).is_empty());
}

#[test]
fn any_tokens_read_as_the_crate_decodes_them() {
    use proptest::prelude::*;
    for name in ["gpt-2", "qwen2", "llama-bpe"] {
        let tokenizer = from_json(name);
        let size = tokenizer.vocab_size() as TokenId;
        proptest!(ProptestConfig::with_cases(400), |(tokens in proptest::collection::vec(0..size, 0..40))| {
            prop_assert_eq!(streamed(&tokenizer, &tokens), tokenizer.decode(&tokens).expect("text"));
        });
    }
}

/// Something done to a valid `tokenizer.json`.
type Change = Box<dyn Fn(&mut Value)>;

#[test]
fn hostile_tokenizers_are_refused_and_never_panic() {
    let good = json("gpt-2.json");
    let with = |change: &dyn Fn(&mut Value)| {
        let mut value = good.clone();
        change(&mut value);
        Tokenizer::from_json(&serde_json::to_vec(&value).expect("JSON"))
    };
    let cases: Vec<(&str, Change)> = vec![
        ("WordPiece", Box::new(|value| value["model"]["type"] = "WordPiece".into())),
        ("dropout", Box::new(|value| value["model"]["dropout"] = 0.1.into())),
        ("continuing_subword_prefix", Box::new(|value| value["model"]["continuing_subword_prefix"] = "é".into())),
        ("end_of_word_suffix", Box::new(|value| value["model"]["end_of_word_suffix"] = "</w>".into())),
        (
            "tokenizer",
            Box::new(|value| {
                value["model"]["merges"] = serde_json::json!([["a", "zzzzzzzzzzzzzzzz"]]);
            }),
        ),
        (
            "vocabulary",
            Box::new(|value| {
                value["added_tokens"] = Value::Array(Vec::new());
                value["model"]["vocab"]["far"] = 4_000_000_000_u32.into();
            }),
        ),
        ("added token", Box::new(|value| value["added_tokens"][0]["id"] = 77.into())),
        (
            "decoder",
            Box::new(|value| {
                value["decoder"] = serde_json::json!({ "type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": true });
            }),
        ),
        (
            "tokenizer",
            Box::new(
                |value| value["pre_tokenizer"] = serde_json::json!({ "type": "Split", "pattern": { "Regex": "(" }, "behavior": "Isolated", "invert": false }),
            ),
        ),
        ("tokenizer", Box::new(|value| value["version"] = "9".into())),
        ("tokenizer", Box::new(|value| value["model"] = Value::Null)),
    ];
    for (expected, change) in cases {
        let error = with(&*change).expect_err(expected).to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    // The crate would panic here: the merged token is longer than any of the vocabulary.
    let longest = with(&|value| {
        value["added_tokens"] = Value::Array(Vec::new());
        let long = "x".repeat(40);
        value["model"]["vocab"][&long] = 5000.into();
        value["model"]["merges"] = serde_json::json!([[long, long]]);
    });
    assert!(longest.is_err());
    let deep = "[".repeat(10_000);
    for bytes in [&b""[..], b"{}", b"[]", b"\xff\xfe", deep.as_bytes(), b"{\"model\":{\"type\":\"BPE\"}}"] {
        assert!(Tokenizer::from_json(bytes).is_err());
    }
    let whole = serde_json::to_vec(&good).expect("JSON");
    for len in (0..whole.len()).step_by(97) {
        assert!(Tokenizer::from_json(&whole[..len]).is_err());
    }
}

/// The demo model where it was fetched: `SLIPSTREAM_DEMO_GGUF` names it.
#[test]
fn the_demo_model_gives_the_ids_of_its_original_tokenizer() {
    let Some(path) = std::env::var_os("SLIPSTREAM_DEMO_GGUF") else {
        return;
    };
    let model = ModelFile::open(Path::new(&path)).expect("the demo model");
    let tokenizer = model.tokenizer.expect("a tokenizer");
    check("demo", &tokenizer);
    assert_eq!(tokenizer.vocab_size(), 49152);
    assert_eq!(model.spec.num_layers, 30);
    assert!(model.spec.tie_word_embeddings);
    let chat = model.chat_template.expect("a chat template");
    let messages = serde_json::json!([{ "role": "user", "content": "Hi" }]);
    assert_eq!(
        chat.render(&messages, true).expect("a prompt"),
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
         <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    for layer in 0..30 {
        let q = model.tensors.matrix(&format!("model.layers.{layer}.self_attn.q_proj.weight"), 576, 576);
        assert_eq!(q.expect("q").order, slipstream_kernels::RowOrder::Interleaved(64));
        assert_eq!(model.tensors.vector(&format!("layers.{layer}.input_layernorm.weight")).expect("norm").len(), 576);
    }
    assert_eq!(model.tensors.names().len(), 272);
}
