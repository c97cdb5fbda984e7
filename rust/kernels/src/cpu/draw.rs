//! Drawing and ranking tokens.
//!
//! A row is first shaped by its controls. Most rows then need the noise of every token: rows of one coin share it, block
//! by block, and it never leaves the first cache. Where few tokens are left, only theirs is made.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::OnceLock;

use super::buffer::Split;
use super::pool::Pool;
use super::shape::{Kept, Shaped, kth_largest, shape};
use super::simd::Kernels;
use crate::draw::{Coin, Draw, Drawn, Ranked};
use crate::math;

/// Tokens in a block of noise: 4 KiB, in the first cache.
const BLOCK: usize = 1024;
/// Tokens in a task.
const SEGMENT: usize = 8 * BLOCK;

/// A row whose every token counts: logits, their maximum, temperature, and the coin of its noise, if any.
struct Wide<'a> {
    logits: Cow<'a, [f32]>,
    max: f32,
    temperature: f32,
    coin: Option<Coin>,
}

/// What is known about a row once it is shaped.
enum Outcome<'a, T> {
    Known(T),
    Wide(Wide<'a>),
}

/// Shapes rows on the pool.
fn on_rows<T: Send + Sync>(pool: &Pool, rows: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let cells: Vec<OnceLock<T>> = (0..rows).map(|_| OnceLock::new()).collect();
    pool.run(rows, 1, &|range| {
        for row in range {
            cells[row].get_or_init(|| work(row));
        }
    });
    // Every row was some task's, or `run` has panicked.
    cells.into_iter().filter_map(OnceLock::into_inner).collect()
}

/// Goes through all tokens of the wide rows. `work(row, first_token, values)` gets each row's perturbed logits, a block
/// at a time, on any thread. `rows` holds pairs of row and what is known of it.
fn perturb_blocks<K: Kernels>(
    kernels: K,
    pool: &Pool,
    rows: &[(usize, &Wide<'_>)],
    work: impl Fn(usize, usize, &[f32]) + Sync,
) {
    let mut groups: HashMap<Option<Coin>, Vec<(usize, &Wide<'_>)>> = HashMap::new();
    for (row, wide) in rows {
        groups.entry(wide.coin).or_default().push((*row, wide));
    }
    let mut tasks = Vec::new();
    for (coin, members) in &groups {
        let longest = members.iter().map(|(_, wide)| wide.logits.len()).max().unwrap_or(0);
        tasks.extend((0..longest).step_by(SEGMENT).map(|start| (*coin, members, start..longest.min(start + SEGMENT))));
    }
    pool.run(tasks.len(), 1, &|range| {
        let mut noise = [0.0f32; BLOCK];
        let mut values = [0.0f32; BLOCK];
        for (coin, members, tokens) in &tasks[range] {
            for start in tokens.clone().step_by(BLOCK) {
                let noise = &mut noise[..BLOCK.min(tokens.end - start)];
                match coin {
                    Some(coin) => kernels.noise(*coin, start as u32 / 4, noise),
                    None => noise.fill(0.0),
                }
                for (row, wide) in *members {
                    let Some(logits) = wide.logits.get(start..) else {
                        continue;
                    };
                    let logits = &logits[..logits.len().min(noise.len())];
                    let values = &mut values[..logits.len()];
                    values.copy_from_slice(&noise[..logits.len()]);
                    kernels.perturb(logits, wide.max, wide.temperature, values);
                    work(*row, start, values);
                }
            }
        }
    });
}

/// The better of two tokens: higher value, then lower id.
fn better(a: Kept, b: Kept) -> Kept {
    if b.z > a.z || (b.z == a.z && b.token < a.token) { b } else { a }
}

/// One draw per row.
pub(super) fn draw<K: Kernels>(kernels: K, pool: &Pool, rows: &[&[f32]], draws: &[Draw]) -> Vec<Drawn> {
    let outcomes = on_rows(pool, rows.len(), |row| match shape(kernels, rows[row], &draws[row]) {
        None => Outcome::Known(Drawn::NotFinite),
        Some(Shaped::Greedy(logits, max)) => Outcome::Known(first(kernels, &logits, max)),
        Some(Shaped::Few(kept)) => {
            let noisy = kept.into_iter().map(|kept| with_noise(kept, draws[row].coin));
            Outcome::Known(noisy.reduce(better).map_or(Drawn::NotFinite, |best| Drawn::Token(best.token)))
        }
        Some(Shaped::Wide(logits, max, temperature)) => {
            Outcome::Wide(Wide { logits, max, temperature, coin: Some(draws[row].coin) })
        }
    });
    let wide = wide_rows(&outcomes);
    let blocks = rows.iter().map(|row| row.len().div_ceil(BLOCK)).max().unwrap_or(0);
    let bests: Vec<OnceLock<Kept>> = (0..wide.len() * blocks).map(|_| OnceLock::new()).collect();
    let places: Vec<(usize, &Wide<'_>)> = wide.iter().enumerate().map(|(place, (_, wide))| (place, *wide)).collect();
    perturb_blocks(kernels, pool, &places, |place, start, values| {
        let (max, _) = kernels.peak(values);
        if max > f32::NEG_INFINITY
            && let Some(i) = kernels.position(values, max)
        {
            bests[place * blocks + start / BLOCK].get_or_init(|| Kept { token: (start + i) as u32, z: max });
        }
    });
    let mut chosen = vec![None; rows.len()];
    for (place, (row, wide)) in wide.iter().enumerate() {
        let best = bests[place * blocks..][..blocks].iter().filter_map(OnceLock::get).copied().reduce(better);
        // A temperature so small that even the best rounds to nothing leaves the order of the logits.
        chosen[*row] =
            Some(best.map_or_else(|| first(kernels, &wide.logits, wide.max), |best| Drawn::Token(best.token)));
    }
    outcomes
        .iter()
        .zip(chosen)
        .map(|(outcome, chosen)| match outcome {
            Outcome::Known(drawn) => *drawn,
            Outcome::Wide(_) => chosen.unwrap_or(Drawn::NotFinite),
        })
        .collect()
}

fn wide_rows<'a, 'b, T>(outcomes: &'b [Outcome<'a, T>]) -> Vec<(usize, &'b Wide<'a>)> {
    let wide = |(row, outcome): (usize, &'b Outcome<'a, T>)| match outcome {
        Outcome::Known(_) => None,
        Outcome::Wide(wide) => Some((row, wide)),
    };
    outcomes.iter().enumerate().filter_map(wide).collect()
}

fn first<K: Kernels>(kernels: K, logits: &[f32], max: f32) -> Drawn {
    kernels.position(logits, max).map_or(Drawn::NotFinite, |token| Drawn::Token(token as u32))
}

fn with_noise(kept: Kept, coin: Coin) -> Kept {
    // In the order of `Kernels::perturb`, for equal bits.
    Kept { token: kept.token, z: math::noise(coin, kept.token) + kept.z }
}

/// The `k` best tokens of every row.
pub(super) fn rank<K: Kernels>(
    kernels: K,
    pool: &Pool,
    rows: &[&[f32]],
    draws: Option<&[Draw]>,
    k: usize,
) -> Vec<Vec<Ranked>> {
    let outcomes = on_rows(pool, rows.len(), |row| {
        let Some(draw) = draws.map(|draws| &draws[row]) else {
            let (max, finite) = kernels.peak(rows[row]);
            if !finite || max == f32::NEG_INFINITY {
                return Outcome::Known(Vec::new());
            }
            return Outcome::Wide(Wide { logits: Cow::Borrowed(rows[row]), max, temperature: 1.0, coin: None });
        };
        match shape(kernels, rows[row], draw) {
            None => Outcome::Known(Vec::new()),
            Some(Shaped::Greedy(logits, max)) => Outcome::Wide(Wide { logits, max, temperature: 1.0, coin: None }),
            Some(Shaped::Few(kept)) => {
                let noisy: Vec<Kept> = kept.into_iter().map(|kept| with_noise(kept, draw.coin)).collect();
                let values: Vec<f32> = noisy.iter().map(|kept| kept.z).collect();
                Outcome::Known(best(kernels, &values, k, |i| noisy[i as usize].token))
            }
            Some(Shaped::Wide(logits, max, temperature)) => {
                Outcome::Wide(Wide { logits, max, temperature, coin: Some(draw.coin) })
            }
        }
    });
    let wide = wide_rows(&outcomes);
    let mut values: Vec<Vec<f32>> = wide.iter().map(|(_, wide)| vec![0.0; wide.logits.len()]).collect();
    let splits: Vec<Split<'_, f32>> = values.iter_mut().map(|values| Split::new(values)).collect();
    let places: Vec<(usize, &Wide<'_>)> = wide.iter().enumerate().map(|(place, (_, wide))| (place, *wide)).collect();
    perturb_blocks(kernels, pool, &places, |place, start, block| {
        // SAFETY: a block of a row is one task's.
        unsafe { splits[place].part(start, block.len()) }.copy_from_slice(block);
    });
    drop(splits);
    let mut ranked = on_rows(pool, wide.len(), |place| best(kernels, &values[place], k, |i| i)).into_iter();
    outcomes
        .into_iter()
        .map(|outcome| match outcome {
            Outcome::Known(known) => known,
            Outcome::Wide(_) => ranked.next().unwrap_or_default(),
        })
        .collect()
}

/// The `k` best of perturbed logits, with their log-softmax.
fn best<K: Kernels>(kernels: K, values: &[f32], k: usize, token: impl Fn(u32) -> u32) -> Vec<Ranked> {
    let k = k.min(values.len());
    let (max, finite) = kernels.peak(values);
    if k == 0 || !finite || max == f32::NEG_INFINITY {
        return Vec::new();
    }
    let log_sum = kernels.sum_exp(values, max).ln();
    let mut indices = Vec::new();
    kernels.at_least(values, kth_largest(kernels, values, k).max(f32::MIN), &mut indices);
    indices.sort_unstable_by(|a, b| values[*b as usize].total_cmp(&values[*a as usize]).then(a.cmp(b)));
    indices.truncate(k);
    let rank = |i: u32| Ranked {
        token: token(i),
        log_chance: (f64::from(values[i as usize]) - f64::from(max) - log_sum) as f32,
    };
    indices.into_iter().map(rank).collect()
}

/// The distribution that a draw is made from.
pub(super) fn probabilities<K: Kernels>(kernels: K, row: &[f32], draw: &Draw) -> Option<Vec<f32>> {
    let mut chances = vec![0.0f32; row.len()];
    let (tokens, z): (Vec<u32>, Vec<f32>) = match shape(kernels, row, draw)? {
        Shaped::Greedy(logits, max) => {
            chances[kernels.position(&logits, max)?] = 1.0;
            return Some(chances);
        }
        Shaped::Few(kept) => kept.into_iter().map(|kept| (kept.token, kept.z)).unzip(),
        Shaped::Wide(logits, max, temperature) => {
            let z = logits.iter().map(|logit| (logit - max) / temperature);
            (0..logits.len() as u32).zip(z).unzip()
        }
    };
    let sum = kernels.sum_exp(&z, 0.0);
    for (token, z) in tokens.into_iter().zip(z) {
        chances[token as usize] = (f64::from(math::exp(z)) / sum) as f32;
    }
    Some(chances)
}
