//! Configurations and folders: what they give, and what is refused by name.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use slipstream_engine::error::EngineError;
use slipstream_engine::load::{Checkpoint, ModelFile};
use slipstream_engine::model::spec::{ModelSpec, RopeScaling};
use slipstream_kernels::HostType;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/config").join(name)
}

fn config(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(name)).expect("golden file")).expect("golden JSON")
}

fn refused(config: &Value, expected: &str) {
    let error = ModelSpec::from_config(config, None).expect_err(expected);
    assert!(matches!(error, EngineError::Model(_)), "{error:?}");
    assert!(error.to_string().contains(expected), "expected {expected:?} in {error}");
}

#[test]
fn both_styles_of_config_give_the_same_spec() {
    for name in ["llama", "llama_rope3", "qwen2", "qwen3"] {
        let old = ModelSpec::from_config(&config(&format!("{name}.json")), None).expect(name);
        let new = ModelSpec::from_config(&config(&format!("{name}.v5.json")), None).expect(name);
        assert_eq!(old, new, "{name}");
    }
}

#[test]
fn a_spec_says_what_the_config_says() {
    let spec = ModelSpec::from_config(&config("llama_rope3.json"), None).expect("a spec");
    assert_eq!((spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads), (4, 64, 4, 2));
    assert_eq!((spec.head_dim, spec.intermediate_size, spec.vocab_size), (32, 128, 320));
    assert_eq!((spec.rope_theta, spec.rms_norm_eps, spec.max_position), (500_000.0, 1e-5, 512));
    assert!(!spec.qkv_bias && !spec.qk_norm && !spec.tie_word_embeddings);
    assert_eq!((spec.bos_token_id, spec.eos_token_ids.as_slice()), (Some(1), &[2][..]));
    let scaling =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position: 32.0 };
    assert_eq!(spec.rope_scaling, scaling);
    assert!(ModelSpec::from_config(&config("qwen2.json"), None).expect("a spec").qkv_bias);
    assert!(ModelSpec::from_config(&config("qwen3.json"), None).expect("a spec").qk_norm);
    let generation = json!({ "eos_token_id": [7, 8], "bos_token_id": 5 });
    let spec = ModelSpec::from_config(&config("llama.json"), Some(&generation)).expect("a spec");
    assert_eq!((spec.bos_token_id, spec.eos_token_ids), (Some(5), vec![7, 8]));
}

#[test]
fn rotary_frequencies_have_the_bits_of_transformers() {
    let cases = config("rope.json");
    for (name, case) in cases.as_object().expect("cases") {
        let spec = ModelSpec::from_config(&case["config"], None).expect(name);
        let expected: Vec<u32> = serde_json::from_value(case["bits"].clone()).expect("bits");
        let got: Vec<u32> = spec.rope().inv_freq.iter().map(|freq| freq.to_bits()).collect();
        assert_eq!(got, expected, "{name}");
    }
}

#[test]
fn families_and_variants_that_cannot_run_are_refused_by_name() {
    for name in ["mistral", "gemma3"] {
        for style in ["json", "v5.json"] {
            refused(&config(&format!("{name}.{style}")), "expected a model_type of llama, qwen2, qwen3, got ");
        }
    }
    let with = |name: &str, value: Value| {
        let mut config = config("llama.json");
        config[name] = value;
        config
    };
    let without = |name: &str| {
        let mut config = config("llama.json");
        config.as_object_mut().expect("an object").remove(name);
        config
    };
    refused(&with("model_type", "mixtral".into()), "mixtral, which is not supported yet");
    refused(&with("hidden_act", "gelu".into()), "hidden_act silu, got gelu");
    for kind in ["yarn", "dynamic", "longrope", "su"] {
        refused(&with("rope_scaling", json!({ "type": kind, "factor": 2.0 })), kind);
        refused(&with("rope_scaling", json!({ "rope_type": kind, "factor": 2.0 })), kind);
        refused(&with("rope_parameters", json!({ "rope_type": kind, "factor": 2.0, "rope_theta": 1e4 })), kind);
    }
    refused(&with("rope_scaling", json!({ "type": "linear" })), "factor");
    refused(&with("rope_scaling", json!({ "type": "linear", "factor": 0 })), "rotary scaling factor");
    refused(&with("rope_scaling", json!({ "type": "default", "mrope_section": [1, 2] })), "mrope_section");
    refused(&with("rope_scaling", json!([])), "rope_scaling");
    refused(&with("partial_rotary_factor", json!(0.5)), "partial_rotary_factor");
    for name in ["attention_bias", "mlp_bias", "use_sliding_window"] {
        refused(&with(name, json!(true)), name);
        refused(&with(name, json!("yes")), name);
    }
    assert!(ModelSpec::from_config(&with("use_sliding_window", json!(false)), None).is_ok());
    refused(&with("layer_types", json!(["full_attention", "sliding_attention"])), "layer_types");
    refused(&with("quantization_config", json!({ "quant_method": "gptq" })), "gptq");
    for name in ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"] {
        refused(&without(name), name);
        for value in [json!(0), json!(-1), json!(1.5), json!(1u64 << 40), json!("64"), json!(u64::MAX)] {
            let error = ModelSpec::from_config(&with(name, value), None).expect_err(name);
            assert!(error.to_string().starts_with("expected "), "{error}");
        }
    }
    refused(&without("model_type"), "model_type");
    refused(&with("num_key_value_heads", json!(3)), "divides the 4 attention heads, got 3");
    refused(&with("head_dim", json!(15)), "even head dimension");
    refused(&with("rms_norm_eps", json!(-1.0)), "epsilon");
    refused(&with("rope_theta", json!(0)), "rotary base");
    refused(&with("eos_token_id", json!(320)), "eos token id below the vocabulary size 320, got 320");
    refused(&with("bos_token_id", json!(-1)), "bos_token_id");
    refused(&json!([]), "JSON object");
}

const TOKENIZER_CONFIG: &str = r#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>",
    "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}]}"#;

fn zeros(len: usize) -> Vec<u8> {
    vec![0; len]
}

#[test]
fn a_model_is_made_from_parts() {
    let (embed, norm) = (zeros(320 * 64 * 2), zeros(64 * 4));
    let config = std::fs::read_to_string(golden("llama.json")).expect("golden file");
    let tensors = vec![
        ("embed_tokens.weight".to_owned(), HostType::BF16.into(), vec![320, 64], embed.as_slice()),
        ("model.norm.weight".to_owned(), HostType::F32.into(), vec![64], norm.as_slice()),
    ];
    let model = ModelFile::from_parts(&config, None, None, Some(TOKENIZER_CONFIG), tensors).expect("a model");
    assert!(model.tokenizer.is_none());
    assert_eq!(model.tensors.matrix("model.embed_tokens.weight", 320, 64).expect("a matrix").dtype, HostType::BF16);
    assert_eq!(model.tensors.vector("norm.weight").expect("a vector"), vec![0.0; 64]);
    assert!(model.tensors.has("norm.weight") && !model.tensors.has("lm_head.weight"));
    let chat = model.chat_template.expect("a template");
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    assert_eq!(chat.render(&messages, false).expect("a prompt"), "<s>Hi</s>");

    let short = vec![("a".to_owned(), HostType::F32.into(), vec![320, 64], embed.as_slice())];
    let error = ModelFile::from_parts(&config, None, None, None, short).expect_err("too few bytes").to_string();
    assert!(error.starts_with("tensor a: expected the bytes of"), "{error}");
    let head = vec![("fc.weight".to_owned(), HostType::F32.into(), vec![8, 8], &norm[..])];
    let head = Checkpoint::from_parts("{\"bias\": false}", head).expect("a checkpoint");
    assert_eq!(head.config["bias"], false);
    assert_eq!(head.tensors.shape("fc.weight"), Some(&[8, 8][..]));
}

#[test]
fn paths_that_hold_no_model_are_explained() {
    let folder = std::env::temp_dir().join(format!("slipstream-load-paths-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let refused = |path: &Path, expected: &[&str]| {
        let error = ModelFile::open(path).expect_err("a refusal").to_string();
        assert!(expected.iter().all(|expected| error.contains(expected)), "expected {expected:?} in {error}");
    };
    refused(&folder.join("nothing"), &["no such file or folder"]);
    refused(&folder, &["config.json", "hint:"]);
    std::fs::write(folder.join("odd.gguf"), b"not a model").expect("a file");
    refused(&folder.join("odd.gguf"), &["a .gguf file"]);
    std::fs::copy(golden("llama.json"), folder.join("config.json")).expect("a file");
    refused(&folder, &["model.safetensors", "hint: download"]);
    std::fs::write(folder.join("pytorch_model.bin"), b"PK").expect("a file");
    refused(&folder, &["slipstream[torch]", "save_file"]);
    let error = Checkpoint::open(&folder).expect_err("a pickle").to_string();
    assert!(error.contains("pip install slipstream[torch]"), "{error}");
    std::fs::write(folder.join("generation_config.json"), b"{").expect("a file");
    refused(&folder, &["generation_config.json", "expected JSON"]);
    std::fs::remove_dir_all(&folder).expect("gone");
}
