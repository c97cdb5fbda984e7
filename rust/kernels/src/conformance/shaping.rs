use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::draws::{controls, draw_of};
use super::*;
use crate::backend::Backend;
use crate::{Controls, Draw, Drawn, Seen};

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Temperature, top-k, top-p, min-p of every golden combination.
const COMBINATIONS: [(f32, u32, f32, f32); 20] = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.5, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 50, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 0.5, 0.0),
    (1.0, 0, 0.1, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 0.5),
    (1.0, 0, 1.0, 0.01),
    (0.6, 20, 0.95, 0.0),
    (0.8, 10, 0.7, 0.0),
    (1.2, 40, 0.9, 0.05),
    (0.3, 0, 1.0, 0.02),
    (0.7, 1000, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (2.0, 0, 0.8, 0.0),
    (0.5, 3, 0.3, 0.0),
];

/// Probabilities of Hugging Face's processors (transformers 5.24.0).
pub(super) fn golden_processors(isa: Isa) {
    let logits = floats(include_bytes!("../../../../tests/golden/sampling/logits.f32"));
    let golden = floats(include_bytes!("../../../../tests/golden/sampling/probabilities.f32"));
    let cpu = Cpu::new(Some(1), Some(isa));
    for (combination, golden) in COMBINATIONS.iter().zip(golden.chunks_exact(3200)) {
        let (temperature, top_k, top_p, min_p) = *combination;
        let draw = draw_of(Controls { top_k, top_p, min_p, ..controls(temperature) }, 0);
        for (row, (logits, golden)) in logits.chunks_exact(320).zip(golden.chunks_exact(320)).enumerate() {
            let mut got = cpu.probabilities(logits, &draw).expect("finite");
            let mut golden = golden.to_vec();
            let kept = |chances: &[f32]| chances.iter().filter(|chance| **chance > 0.0).count();
            // Rows of many ties: which of them are kept depends on the order of Hugging Face's sort.
            if row == 6 || row == 7 {
                got.sort_by(f32::total_cmp);
                golden.sort_by(f32::total_cmp);
            }
            // Of tiny chances some are zero in one and not in the other; with a filter on, the sets are equal.
            if top_k > 0 || top_p < 1.0 || min_p > 0.0 {
                assert_eq!(kept(&got), kept(&golden), "{combination:?}, row {row}");
            }
            for (got, golden) in got.iter().zip(&golden) {
                assert!((got - golden).abs() < 2e-6, "{combination:?}, row {row}: {got} for {golden}");
            }
        }
    }
}

pub(super) fn penalties_and_bias(isa: Isa) {
    let cpu = Cpu::new(Some(1), Some(isa));
    let logits = [2.0f32, -1.0, 0.5, 1.5, -0.5, 0.0];
    let settings = Controls {
        repetition_penalty: 1.5,
        presence_penalty: 0.25,
        frequency_penalty: 0.5,
        logit_bias: vec![(3, -1.0), (5, 0.75), (4_000_000_000, 3.0)],
        ..controls(1.0)
    };
    let seen = |token, in_prompt, num_output| Seen { token, in_prompt, num_output };
    let draw = Draw {
        seen: Arc::new([seen(0, true, 0), seen(1, false, 3), seen(3, true, 1), seen(u32::MAX, true, 9)]),
        banned: Arc::new([4, 600]),
        ..draw_of(settings, 0)
    };
    let expected = [2.0 / 1.5, -1.5 - 0.25 - 3.0 * 0.5, 0.5, (1.5 - 1.0) / 1.5 - 0.25 - 0.5, f64::NEG_INFINITY, 0.75];
    let sum: f64 = expected.iter().map(|x: &f64| x.exp()).sum();
    let got = cpu.probabilities(&logits, &draw).expect("finite");
    for (got, expected) in got.iter().zip(expected) {
        assert_close(*got, expected.exp() / sum, 1e-6, "probability");
    }
}

/// The survivors of a slow, literal reading of the controls.
fn survivors(logits: &[f32], temperature: f32, top_k: usize, top_p: f64, min_p: f64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    if top_k > 0 && top_k < order.len() {
        let bound = logits[order[top_k - 1]];
        order.retain(|token| logits[*token] >= bound);
    }
    let weight = |token: usize| (f64::from(logits[token] - logits[order[0]]) / f64::from(temperature)).exp();
    let total: f64 = order.iter().map(|token| weight(*token)).sum();
    let mut reached = 0.0;
    let mut kept = Vec::new();
    for token in &order {
        if kept.is_empty() || reached < top_p * total || top_p >= 1.0 {
            kept.push(*token);
        }
        reached += weight(*token);
    }
    kept.retain(|token| weight(*token) >= min_p);
    kept.sort_unstable();
    kept
}

pub(super) fn large_vocabularies(isa: Isa) {
    let mut random = Random::new(30);
    let cpu = Cpu::new(Some(2), Some(isa));
    let logits = random.normals(5_000, 3.0);
    for (temperature, top_k, top_p, min_p) in [
        (1.0, 1, 1.0, 0.0),
        (1.0, 50, 1.0, 0.0),
        (0.7, 400, 1.0, 0.0),
        (0.7, 4_999, 1.0, 0.0),
        (1.0, 5_001, 0.99, 0.0),
        (1.0, 0, 0.5, 0.0),
        (1.0, 0, 0.95, 0.0),
        (5.0, 0, 0.95, 0.0),
        (50.0, 0, 0.99, 0.0),
        (1.0, 100, 0.9, 0.01),
        (1.0, 0, 1.0, 0.05),
        (1.0, 0, 0.0, 0.0),
        (1.0, 0, 1.0, 1.0),
    ] {
        let draw = draw_of(Controls { top_k, top_p, min_p, ..controls(temperature) }, 0);
        let got = cpu.probabilities(&logits, &draw).expect("finite");
        let kept: Vec<usize> = (0..logits.len()).filter(|token| got[*token] > 0.0).collect();
        let expected = survivors(&logits, temperature, top_k as usize, f64::from(top_p), f64::from(min_p));
        assert!(kept == expected, "{temperature} {top_k} {top_p} {min_p}: {} of {}", kept.len(), expected.len());
    }
}

fn any_logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        20 => -10.0f32..10.0,
        1 => any::<f32>(),
        1 => Just(f32::NEG_INFINITY),
        1 => Just(f32::MAX),
        1 => Just(f32::MIN),
        1 => Just(1.0f32),
    ]
}

fn any_control() -> impl Strategy<Value = f32> {
    prop_oneof![Just(0.0f32), Just(1.0f32), 0.0f32..2.0, any::<f32>()]
}

fn any_draw() -> impl Strategy<Value = Draw> {
    let numbers = (any_control(), any_control(), any_control(), any_control(), any_control(), any_control());
    let ids = (prop_oneof![0u32..400, any::<u32>()], prop_oneof![0u32..400, any::<u32>()]);
    (numbers, ids, any::<(u32, bool, u32, u64)>(), any_logit()).prop_map(|(numbers, ids, other, bias)| {
        let settings = Controls {
            temperature: numbers.0,
            top_k: ids.0,
            top_p: numbers.1,
            min_p: numbers.2,
            repetition_penalty: numbers.3,
            presence_penalty: numbers.4,
            frequency_penalty: numbers.5,
            logit_bias: vec![(ids.1, bias)],
            num_tokens: ids.1.saturating_add(other.2 % 300),
        };
        let seen = Seen { token: other.0 % 500, in_prompt: other.1, num_output: other.2 };
        let mut draw = draw_of(settings, other.0);
        draw.coin.seed = other.3;
        draw.seen = Arc::new([seen]);
        draw.banned = Arc::new([other.2 % 500, ids.1]);
        draw
    })
}

/// Any controls, in range or not: no panic, a possible token, and the meaning's answer.
pub(super) fn nothing_panics(isa: Isa) {
    let (cpu, reference) = (Cpu::new(Some(2), Some(isa)), reference());
    let mut runner = TestRunner::new(Config { cases: 600, failure_persistence: None, ..Config::default() });
    let rows = (proptest::collection::vec(any_logit(), 1..400), any_draw(), 0usize..12);
    let result = runner.run(&rows, |(logits, draw, k)| {
        let draws = [draw];
        let x = cpu.from_host(&logits, logits.len());
        let y = reference.from_host(&logits, logits.len());
        let drawn = cpu.draw(&x, &draws);
        prop_assert_eq!(&drawn, &reference.draw(&y, &draws));
        if let Drawn::Token(token) = drawn[0] {
            prop_assert!(token < draws[0].controls.num_tokens && (token as usize) < logits.len());
            prop_assert!(!draws[0].banned.contains(&token));
            prop_assert!(logits[token as usize] > f32::NEG_INFINITY);
        }
        let (ranked, meaning) = (cpu.rank(&x, Some(&draws), k), reference.rank(&y, Some(&draws), k));
        prop_assert_eq!(&ranked, &meaning);
        prop_assert!(ranked[0].len() <= k);
        prop_assert_eq!(cpu.rank(&x, None, k), reference.rank(&y, None, k));
        Ok(())
    });
    assert!(result.is_ok(), "{result:?}");
}
