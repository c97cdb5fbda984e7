//! What a row's controls leave of its logits.

use std::borrow::Cow;

use super::simd::Kernels;
use crate::draw::{Controls, Draw};

/// Tokens in the blocks whose maxima bound the k-th largest value.
const MAXIMA: usize = 32;
/// Where more than one in this many tokens is left, noise for all of them at once is cheaper than one by one.
const FEW: usize = 32;
/// How far below the best (in log-probability) to look for the tokens of a mass, nearest first.
const DEPTHS: [f32; 3] = [-8.0, -16.0, f32::NEG_INFINITY];

/// A token that is left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Kept {
    pub(super) token: u32,
    /// `(logit - max) / temperature`.
    pub(super) z: f32,
}

/// A row after its controls. At least one token is possible.
pub(super) enum Shaped<'a> {
    /// Temperature 0: controlled logits, their maximum; filters do not matter to the best token.
    Greedy(Cow<'a, [f32]>, f32),
    /// Controlled logits with their maximum and temperature; -inf where a token is impossible.
    Wide(Cow<'a, [f32]>, f32, f32),
    /// What is left, by token.
    Few(Vec<Kept>),
}

/// Applies a row's controls. `None` if a logit is not finite or no token is left.
pub(super) fn shape<'a, K: Kernels>(kernels: K, row: &'a [f32], draw: &Draw) -> Option<Shaped<'a>> {
    let controls = &*draw.controls;
    let row = &row[..row.len().min(controls.num_tokens as usize)];
    let logits = controlled(row, draw);
    let (max, finite) = kernels.peak(&logits);
    if !finite || max == f32::NEG_INFINITY {
        return None;
    }
    let temperature = controls.temperature;
    if temperature.is_nan() || temperature <= 0.0 {
        return Some(Shaped::Greedy(logits, max));
    }
    let top_k = (controls.top_k as usize).min(logits.len());
    let by_k = top_k > 0 && top_k < logits.len();
    let filtering = by_k || controls.top_p < 1.0 || controls.min_p > 0.0;
    if !filtering {
        return Some(Shaped::Wide(logits, max, temperature));
    }
    let mut z = vec![0.0f32; logits.len()];
    kernels.perturb(&logits, max, temperature, &mut z);
    let kept = filtered(kernels, &z, by_k.then_some(top_k), controls);
    if kept.len() * FEW <= z.len() {
        return Some(Shaped::Few(kept));
    }
    z.fill(f32::NEG_INFINITY);
    for kept in kept {
        z[kept.token as usize] = kept.z;
    }
    Some(Shaped::Wide(Cow::Owned(z), 0.0, 1.0))
}

/// Mask, bias and penalties. Ids past the row are ignored.
fn controlled<'a>(row: &'a [f32], draw: &Draw) -> Cow<'a, [f32]> {
    let controls = &*draw.controls;
    let penalized =
        controls.repetition_penalty != 1.0 || controls.presence_penalty != 0.0 || controls.frequency_penalty != 0.0;
    let penalized = penalized && !draw.seen.is_empty();
    if draw.banned.is_empty() && controls.logit_bias.is_empty() && !penalized {
        return Cow::Borrowed(row);
    }
    let mut logits = row.to_vec();
    for token in &*draw.banned {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    for (token, bias) in &controls.logit_bias {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit += bias;
        }
    }
    for seen in draw.seen.iter().filter(|_| penalized) {
        let Some(logit) = logits.get_mut(seen.token as usize) else {
            continue;
        };
        if seen.in_prompt || seen.num_output > 0 {
            *logit =
                if *logit > 0.0 { *logit / controls.repetition_penalty } else { *logit * controls.repetition_penalty };
        }
        if seen.num_output > 0 {
            *logit -= controls.presence_penalty;
            *logit -= controls.frequency_penalty * seen.num_output as f32;
        }
    }
    Cow::Owned(logits)
}

/// Top-k, top-p, min-p; the tokens that are left, in order. The largest `z` is 0.
fn filtered<K: Kernels>(kernels: K, z: &[f32], top_k: Option<usize>, controls: &Controls) -> Vec<Kept> {
    let share = (controls.top_p < 1.0).then_some(controls.top_p);
    let mut kept = match (top_k, share) {
        (Some(k), None) => collect(kernels, z, kth_largest(kernels, z, k)),
        (Some(k), Some(share)) => {
            let mut kept = collect(kernels, z, kth_largest(kernels, z, k));
            let target = target(mass(kernels, &kept), share);
            nucleus(kernels, &mut kept, target);
            kept
        }
        (None, Some(share)) => {
            let target = target(kernels.mass(z), share);
            let mut kept = Vec::new();
            for depth in DEPTHS {
                kept = collect(kernels, z, depth);
                if mass(kernels, &kept) >= target {
                    break;
                }
            }
            nucleus(kernels, &mut kept, target);
            kept
        }
        // A little deeper than needed; the exact test follows.
        (None, None) => collect(kernels, z, crate::math::ln(controls.min_p) - 0.01),
    };
    if controls.min_p > 0.0 {
        kept.retain(|kept| kept.z == 0.0 || crate::math::exp(kept.z) >= controls.min_p);
    }
    kept.sort_unstable_by_key(|kept| kept.token);
    kept
}

/// Possible tokens whose `z` is at least `least`; always the best.
fn collect<K: Kernels>(kernels: K, z: &[f32], least: f32) -> Vec<Kept> {
    let mut tokens = Vec::new();
    kernels.at_least(z, least.clamp(f32::MIN, 0.0), &mut tokens);
    tokens.into_iter().map(|token| Kept { token, z: z[token as usize] }).collect()
}

fn mass<K: Kernels>(kernels: K, kept: &[Kept]) -> u64 {
    kernels.mass(&kept.iter().map(|kept| kept.z).collect::<Vec<_>>())
}

/// The mass to reach. The share is lowered by its own rounding error: 0.3 of ten equal tokens is three, though 0.3 in f32
/// is a little more.
fn target(total: u64, share: f32) -> u64 {
    (f64::from(share) * (1.0 - f64::from(f32::EPSILON) / 2.0) * total as f64).ceil() as u64
}

/// The smallest set that reaches `target`, best first, lower ids first among equals; at least one token. Halves are
/// ordered only where the boundary may lie.
fn nucleus<K: Kernels>(kernels: K, kept: &mut Vec<Kept>, target: u64) {
    let order = |a: &Kept, b: &Kept| b.z.total_cmp(&a.z).then(a.token.cmp(&b.token));
    let (mut begin, mut end, mut reached) = (0, kept.len(), 0u64);
    while end - begin > 32 {
        let middle = (end - begin) / 2;
        let range = &mut kept[begin..end];
        range.select_nth_unstable_by(middle, order);
        let upper = mass(kernels, &range[..middle]);
        if reached + upper >= target {
            end = begin + middle;
        } else {
            reached += upper;
            begin += middle;
        }
    }
    kept[begin..end].sort_unstable_by(order);
    while begin < end && (begin == 0 || reached < target) {
        reached += mass(kernels, &kept[begin..=begin]);
        begin += 1;
    }
    kept.truncate(begin);
}

/// The k-th largest of values without NaN; `0 < k <= x.len()`.
pub(super) fn kth_largest<K: Kernels>(kernels: K, x: &[f32], k: usize) -> f32 {
    let descending = |a: &f32, b: &f32| b.total_cmp(a);
    let mut candidates: Vec<f32> = x.chunks(MAXIMA).map(|chunk| kernels.peak(chunk).0).collect();
    if k > candidates.len() {
        candidates = x.to_vec();
    } else {
        // k blocks reach the k-th largest maximum, so at least k values do.
        let bound = *candidates.select_nth_unstable_by(k - 1, descending).1;
        let mut indices = Vec::new();
        kernels.at_least(x, bound, &mut indices);
        candidates = indices.into_iter().map(|i| x[i as usize]).collect();
    }
    *candidates.select_nth_unstable_by(k - 1, descending).1
}
