use std::sync::Arc;

use super::*;
use crate::backend::Backend;
use crate::math;
use crate::{Coin, Controls, Draw, Drawn, Ranked};

/// All controls off.
pub(super) fn controls(temperature: f32) -> Controls {
    Controls {
        temperature,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Vec::new(),
        num_tokens: u32::MAX,
    }
}

pub(super) fn draw_of(controls: Controls, position: u32) -> Draw {
    let coin = Coin { seed: 0x1234_5678_9abc_def0, sample: 3, position };
    Draw { controls: Arc::new(controls), coin, seen: Arc::new([]), banned: Arc::new([]) }
}

fn mixed_draws(random: &mut Random, rows: usize) -> Vec<Draw> {
    let kinds = [
        controls(0.0),
        controls(0.7),
        controls(1.3),
        Controls { top_k: 20, ..controls(1.0) },
        Controls { top_p: 0.9, ..controls(1.0) },
        Controls { top_k: 300, top_p: 0.99, min_p: 1e-4, ..controls(2.0) },
        Controls { logit_bias: vec![(3, 2.0), (5, -4.0)], num_tokens: 900, ..controls(0.8) },
    ];
    // Few positions, so that rows share coins.
    (0..rows).map(|_| draw_of(kinds[random.below(kinds.len())].clone(), random.below(5) as u32)).collect()
}

fn rank_bits(ranked: &[Vec<Ranked>]) -> Vec<Vec<(u32, u32)>> {
    ranked.iter().map(|row| row.iter().map(|r| (r.token, r.log_chance.to_bits())).collect()).collect()
}

pub(super) fn noise_is_the_scalar_noise(isa: Isa) {
    // Flat logits: the ranking shows the noise itself, in order.
    let len = 70_003;
    for (seed, sample, position) in [(0, 0, 0), (u64::MAX, u32::MAX, u32::MAX), (1 << 40, 1, 77)] {
        let coin = Coin { seed, sample, position };
        let draw = Draw { coin, ..draw_of(controls(1.0), 0) };
        let cpu = Cpu::new(Some(2), Some(isa));
        let logits = cpu.from_host(&vec![0.5; len], len);
        let ranked = cpu.rank(&logits, Some(std::slice::from_ref(&draw)), 2000);
        let mut expected: Vec<(f32, u32)> = (0..len as u32).map(|token| (math::noise(coin, token), token)).collect();
        expected.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let tokens: Vec<u32> = ranked[0].iter().map(|ranked| ranked.token).collect();
        assert_eq!(tokens, expected[..2000].iter().map(|(_, token)| *token).collect::<Vec<_>>());
        assert_eq!(cpu.draw(&logits, &[draw]), [Drawn::Token(expected[0].1)]);
    }
}

/// Chi-square of counts against probabilities, and its degrees of freedom.
fn chi_square(counts: &[u32], chances: &[f64]) -> (f64, f64) {
    let total: u32 = counts.iter().sum();
    let mut sum = 0.0;
    for (count, chance) in counts.iter().zip(chances) {
        let expected = chance * f64::from(total);
        sum += (f64::from(*count) - expected).powi(2) / expected;
    }
    (sum, (counts.len() - 1) as f64)
}

/// Far out in the tail (about 1e-6) by Wilson and Hilferty's approximation.
fn is_unlikely((sum, freedom): (f64, f64)) -> bool {
    let spread = 2.0 / (9.0 * freedom);
    ((sum / freedom).cbrt() - (1.0 - spread)) / spread.sqrt() > 4.75
}

pub(super) fn frequencies_are_the_probabilities(isa: Isa) {
    let logits = [1.0f32, -0.5, 0.3, 2.0, 0.3, -1.5, 0.0, 1.2, -0.2, 0.9, -3.0];
    let temperature = 0.8;
    let weights: Vec<f64> = logits.iter().map(|logit| (f64::from(*logit) / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    let chances: Vec<f64> = weights.iter().map(|weight| weight / total).collect();
    let cpu = Cpu::new(Some(2), Some(isa));
    let mut counts = vec![0u32; logits.len()];
    let (num_draws, rows) = (200_000u32, 2_000);
    let batch = cpu.from_host(&logits.repeat(rows as usize), logits.len());
    let shared = Arc::new(controls(temperature as f32));
    for start in (0..num_draws).step_by(rows as usize) {
        let draws: Vec<Draw> = (start..start + rows)
            .map(|position| Draw { controls: Arc::clone(&shared), ..draw_of(controls(1.0), position) })
            .collect();
        for drawn in cpu.draw(&batch, &draws) {
            let Drawn::Token(token) = drawn else { panic!("finite logits") };
            counts[token as usize] += 1;
        }
    }
    assert!(!is_unlikely(chi_square(&counts, &chances)), "{counts:?}");
    // The test itself can fail: a tenth more of one token shows.
    let mut biased = weights;
    biased[0] *= 1.1;
    let total: f64 = biased.iter().sum();
    let biased: Vec<f64> = biased.iter().map(|weight| weight / total).collect();
    assert!(is_unlikely(chi_square(&counts, &biased)), "{counts:?}");
}

pub(super) fn rows_are_independent(isa: Isa) {
    let mut random = Random::new(20);
    for len in [1, 7, 8, 9, 31, 32, 33, 1023, 1024, 1025, 20_000] {
        let rows = if len < 10_000 { 12 } else { 8 };
        let logits = random.normals(rows * len, 3.0);
        let draws = mixed_draws(&mut random, rows);
        let reference = reference();
        let all = reference.from_host(&logits, len);
        let meaning = reference.draw(&all, &draws);
        let meaning_ranked = rank_bits(&reference.rank(&all, Some(&draws), 10));
        let meaning_plain = rank_bits(&reference.rank(&all, None, 10));
        for cpu in backends(isa) {
            let all = cpu.from_host(&logits, len);
            assert_eq!(cpu.draw(&all, &draws), meaning);
            assert_eq!(rank_bits(&cpu.rank(&all, Some(&draws), 10)), meaning_ranked);
            assert_eq!(rank_bits(&cpu.rank(&all, None, 10)), meaning_plain);
            let order = random.shuffled(rows);
            let mixed = cpu.gather(&all, &order);
            let mixed_draws: Vec<Draw> = order.iter().map(|row| draws[*row as usize].clone()).collect();
            let drawn = cpu.draw(&mixed, &mixed_draws);
            let ranked = rank_bits(&cpu.rank(&mixed, Some(&mixed_draws), 10));
            for (place, row) in order.iter().map(|row| *row as usize).enumerate() {
                assert_eq!(drawn[place], meaning[row]);
                assert_eq!(ranked[place], meaning_ranked[row]);
                let alone = cpu.gather(&all, &[row as u32]);
                assert_eq!(cpu.draw(&alone, &draws[row..=row]), [meaning[row]]);
                assert_eq!(rank_bits(&cpu.rank(&alone, Some(&draws[row..=row]), 10))[0], meaning_ranked[row]);
                // The best by perturbed logits is the draw.
                if let Drawn::Token(token) = meaning[row] {
                    assert_eq!(meaning_ranked[row][0].0, token);
                }
            }
        }
    }
}

fn log_softmax(values: &[f64]) -> Vec<f64> {
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = values.iter().map(|value| (value - max).exp()).sum();
    values.iter().map(|value| value - max - sum.ln()).collect()
}

pub(super) fn ranks_match_the_truth(isa: Isa) {
    let mut random = Random::new(21);
    let cpu = Cpu::new(Some(2), Some(isa));
    for len in [1, 5, 33, 1030, 9_000] {
        let mut logits = random.normals(len, 4.0);
        if len > 5 {
            logits[3] = f32::NEG_INFINITY;
            logits[4] = logits[5];
        }
        let x = cpu.from_host(&logits, len);
        let exact: Vec<f64> = logits.iter().map(|x| f64::from(*x)).collect();
        let draw = draw_of(controls(0.6), 4);
        let perturbed: Vec<f64> = (0..len)
            .map(|token| exact[token] / f64::from(0.6f32) + f64::from(math::noise(draw.coin, token as u32)))
            .collect();
        let greedy = draw_of(controls(0.0), 4);
        let cases = [(None, &exact), (Some(draw), &perturbed), (Some(greedy), &exact)];
        for (draw, truth) in cases {
            let ranked = cpu.rank(&x, draw.as_ref().map(std::slice::from_ref), 10).remove(0);
            let chances = log_softmax(truth);
            let mut order: Vec<usize> = (0..len).filter(|token| exact[*token].is_finite()).collect();
            order.sort_by(|a, b| truth[*b].total_cmp(&truth[*a]).then(a.cmp(b)));
            order.truncate(10);
            assert_eq!(ranked.iter().map(|r| r.token as usize).collect::<Vec<_>>(), order);
            for ranked in ranked {
                assert_close(ranked.log_chance, chances[ranked.token as usize], 2e-6, "log chance");
            }
        }
    }
    // Under a filter the chances are those of the tokens that are left.
    let logits = random.normals(500, 2.0);
    let draw = draw_of(Controls { top_k: 3, ..controls(1.0) }, 9);
    let ranked = cpu.rank(&cpu.from_host(&logits, 500), Some(&[draw]), 10).remove(0);
    assert_eq!(ranked.len(), 3);
    let sum: f64 = ranked.iter().map(|r| f64::from(r.log_chance).exp()).sum();
    assert!((sum - 1.0).abs() < 1e-6);
}

pub(super) fn what_is_not_finite_is_said(isa: Isa) {
    let cpu = Cpu::new(Some(2), Some(isa));
    for temperature in [0.0, 1.0] {
        for bad in [f32::NAN, f32::INFINITY] {
            for at in [0, 7, 8, 38] {
                let mut logits = vec![0.0; 39];
                logits[at] = bad;
                let x = cpu.from_host(&logits, 39);
                let draw = draw_of(controls(temperature), 0);
                assert_eq!(cpu.draw(&x, std::slice::from_ref(&draw)), [Drawn::NotFinite]);
                assert!(cpu.rank(&x, Some(std::slice::from_ref(&draw)), 3)[0].is_empty());
                assert!(cpu.rank(&x, None, 3)[0].is_empty());
                // Not where the token is masked.
                let masked = Draw { banned: Arc::new([at as u32, 1000]), ..draw };
                assert!(matches!(cpu.draw(&x, &[masked])[0], Drawn::Token(token) if token != at as u32));
                if at == 38 {
                    let short = draw_of(Controls { num_tokens: 38, ..controls(temperature) }, 0);
                    assert!(matches!(cpu.draw(&x, &[short])[0], Drawn::Token(token) if token < 38));
                }
            }
        }
        let nothing = cpu.from_host(&[f32::NEG_INFINITY; 9], 9);
        assert_eq!(cpu.draw(&nothing, &[draw_of(controls(temperature), 0)]), [Drawn::NotFinite]);
        let none = draw_of(Controls { num_tokens: 0, ..controls(temperature) }, 0);
        assert_eq!(cpu.draw(&cpu.from_host(&[0.0; 9], 9), &[none]), [Drawn::NotFinite]);
    }
}

pub(super) fn greedy_takes_the_lowest_id(isa: Isa) {
    let cpu = Cpu::new(Some(2), Some(isa));
    for len in [1, 8, 9, 40, 3000] {
        for (first, second) in [(0, len - 1), (len / 2, len - 1), (len - 1, len - 1)] {
            let mut logits = vec![-1.0; len];
            logits[first] = 2.5;
            logits[second] = 2.5;
            let x = cpu.from_host(&logits, len);
            assert_eq!(cpu.draw(&x, &[draw_of(controls(0.0), 1)]), [Drawn::Token(first as u32)]);
            // A temperature that underflows is greedy too, where there is no tie.
            logits[first] = 3.0;
            let x = cpu.from_host(&logits, len);
            assert_eq!(cpu.draw(&x, &[draw_of(controls(1e-45), 1)]), [Drawn::Token(first as u32)]);
        }
    }
}
