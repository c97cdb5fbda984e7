//! Logits, hidden states and greedy text against Hugging Face transformers (f32, eager attention). The data and its
//! makers: `golden/README.md`.
#![expect(clippy::print_stdout, reason = "how near the logits are is part of the result")]

use std::fs::File;
use std::path::{Path, PathBuf};

use ndarray_npy::NpzReader;
use slipstream_engine::load::ModelFile;
use slipstream_engine::model::{DecoderWeights, Pass};
use slipstream_engine::request::TokenId;
use slipstream_kernels::cpu::{Cpu, Isa};
use slipstream_kernels::{AttentionPlan, Backend, Slot, Storage, Visible};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

/// The rows of one plain sequence.
fn logits(backend: &Cpu, weights: &DecoderWeights<Cpu>, token_ids: &[TokenId]) -> Vec<f32> {
    let len = token_ids.len() as u32;
    let slots: Vec<Slot> = (0..len).map(Slot).collect();
    let positions: Vec<u32> = (0..len).collect();
    let rows = (0..len).map(|row| Visible { first_position: 0, context: 0..row + 1, tail: 0..0 }).collect();
    let attention = AttentionPlan { slots: slots.clone(), rows };
    let spec = &weights.spec;
    let mut cache =
        backend.cache(spec.num_layers, token_ids.len(), spec.num_kv_heads * spec.head_dim).expect("a small cache");
    let pass = Pass { token_ids, positions: &positions, slots: &slots, attention: &attention };
    let (x, _) = weights.hidden(backend, pass, &spec.rope(), spec.num_layers, &mut cache, &[]);
    backend.to_host(&weights.logits(backend, &x))
}

fn argmax(row: &[f32]) -> TokenId {
    let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter().position(|logit| *logit == best).expect("a largest logit") as TokenId
}

/// Whole numbers, saved with 32 or 64 bits.
fn integers(file: &mut NpzReader<File>, name: &str) -> ndarray::ArrayD<i64> {
    if let Ok(values) = file.by_name(name) {
        return values;
    }
    let values: ndarray::ArrayD<i32> = file.by_name(name).expect("whole numbers");
    values.mapv(i64::from)
}

fn check(name: &str) {
    let folder = golden().join("logits").join(name);
    let mut file = NpzReader::new(File::open(folder.join("golden.npz")).expect("data")).expect("an npz file");
    let input = integers(&mut file, "input_ids");
    let expected: ndarray::ArrayD<f32> = file.by_name("logits").expect("logits");
    let greedy: Vec<TokenId> = integers(&mut file, "greedy32_p0").iter().map(|id| *id as TokenId).collect();
    let (len, vocab) = (expected.shape()[1], expected.shape()[2]);
    let expected: Vec<f32> = expected.iter().copied().collect();
    let prompts: Vec<Vec<TokenId>> =
        input.outer_iter().map(|row| row.iter().map(|id| *id as TokenId).collect()).collect();

    for isa in [Isa::Scalar, Isa::detect()] {
        let backend = Cpu::new(Some(2), Some(isa));
        let model = ModelFile::open(&folder).expect("the golden model");
        let weights =
            DecoderWeights::load(&backend, model.spec.clone(), &model.tensors, Storage::Lossless, &|_| Ok(()))
                .expect("loads");
        let mut worst = 0.0_f32;
        for (prompt, expected) in prompts.iter().zip(expected.chunks(len * vocab)) {
            let ours = logits(&backend, &weights, prompt);
            for (ours, expected) in ours.chunks(vocab).zip(expected.chunks(vocab)) {
                let scale = expected.iter().fold(0.0_f32, |scale, logit| scale.max(logit.abs()));
                let apart = ours.iter().zip(expected).fold(0.0_f32, |apart, (a, b)| apart.max((a - b).abs()));
                worst = worst.max(apart / scale);
            }
        }
        println!("{name} on {}: largest difference {worst:.1e} of a row's largest logit", isa.name());
        assert!(worst < 1e-4, "{name}: {worst}");

        let mut text = prompts[0].clone();
        for (index, token) in greedy.iter().enumerate() {
            let ours = logits(&backend, &weights, &text);
            assert_eq!(argmax(&ours[ours.len() - vocab..]), *token, "{name}: greedy token {index}");
            text.push(*token);
        }
    }
}

#[test]
fn llama() {
    check("llama");
}

#[test]
fn llama_with_scaled_rope() {
    check("llama_rope3");
}

#[test]
fn qwen2() {
    check("qwen2");
}

#[test]
fn qwen3() {
    check("qwen3");
}
