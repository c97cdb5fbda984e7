//! Prompt lookup: what followed the last tokens when they came before, in prompt and output (Saxena 2023).
//!
//! Its nodes' chance is learned from each request: how often a copied token was the target's.

use std::collections::HashMap;

use super::{Drafter, Observed};
use crate::batch::Batch;
use crate::kv::KvManager;
use crate::request::{RequestId, TokenId};
use crate::sampler::Sampler;
use crate::tree::{DraftTree, NodeId};

/// Settings of the n-gram drafter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NGramSettings {
    /// Fewest last tokens that must have come before.
    pub min_match: usize,
    /// A longer match than this counts no more.
    pub max_match: usize,
    /// Most nodes proposed.
    pub max_nodes: u16,
}

impl Default for NGramSettings {
    fn default() -> Self {
        Self { min_match: 2, max_match: 5, max_nodes: 10 }
    }
}

/// How much a trial counts after the next one.
const MEMORY: f32 = 0.95;
/// What is believed before the first trial: three of four copied tokens are right.
const PRIOR: Rate = Rate { right: 3.0, trials: 4.0 };

/// Copied tokens that were judged, and those that were right; older ones count less.
#[derive(Clone, Copy, Debug)]
struct Rate {
    right: f32,
    trials: f32,
}

impl Rate {
    fn count(&mut self, is_right: bool) {
        self.right = self.right * MEMORY + f32::from(u8::from(is_right));
        self.trials = self.trials * MEMORY + 1.0;
    }

    fn chance(self) -> f32 {
        (self.right / self.trials).clamp(0.01, 0.99)
    }
}

/// The n-gram drafter.
#[derive(Debug)]
pub struct NGram {
    settings: NGramSettings,
    rates: HashMap<RequestId, Rate>,
    /// This step's proposals, until it is known what was accepted: by entry, the copied tokens.
    proposed: Vec<Vec<TokenId>>,
}

impl NGram {
    /// A drafter of these settings.
    pub fn new(settings: NGramSettings) -> Self {
        Self { settings, rates: HashMap::new(), proposed: Vec::new() }
    }
}

impl NGramSettings {
    /// The longest match of the last tokens further left, the latest of equal ones: where its continuation begins, and
    /// its length.
    fn longest_match(&self, tokens: &[TokenId]) -> Option<(usize, usize)> {
        let mut best: Option<(usize, usize)> = None;
        for end in (1..tokens.len()).rev() {
            let len = tokens[..end]
                .iter()
                .rev()
                .zip(tokens.iter().rev())
                .take(self.max_match)
                .take_while(|(left, right)| left == right)
                .count();
            if len >= self.min_match && best.is_none_or(|(_, longest)| len > longest) {
                best = Some((end, len));
                if len == self.max_match {
                    break;
                }
            }
        }
        best
    }

    /// What followed the longest match, at most `max_nodes` tokens.
    fn continuation(&self, tokens: &[TokenId], max_nodes: usize) -> Vec<TokenId> {
        let Some((start, _)) = self.longest_match(tokens) else {
            return Vec::new();
        };
        // A match that runs into the end of the text repeats itself: a loop of this period.
        let period = tokens.len() - start;
        (0..max_nodes.min(usize::from(self.max_nodes))).map(|index| tokens[start + index % period]).collect()
    }
}

impl<F> Drafter<F> for NGram {
    fn draft(&mut self, batch: &Batch, sampler: &Sampler, _kv: &KvManager) -> Vec<DraftTree> {
        self.proposed.clear();
        let mut trees = Vec::with_capacity(batch.entries.len());
        for entry in &batch.entries {
            let mut tree = DraftTree::root_only(entry.root_token());
            let mut copied = Vec::new();
            if entry.settles && entry.draft_budget > 0 {
                let step = self.rates.entry(entry.request.id).or_insert(PRIOR).chance().ln();
                copied = self.settings.continuation(sampler.tokens(entry.request.id), usize::from(entry.draft_budget));
                let mut node = NodeId::ROOT;
                for token in &copied {
                    node = tree.push_new(node, *token, tree.score(node) + step);
                }
            }
            trees.push(tree);
            self.proposed.push(copied);
        }
        trees
    }

    fn observe(&mut self, observed: &Observed<'_, F>, _kv: &KvManager) {
        for (index, copied) in self.proposed.drain(..).enumerate() {
            let Some(rate) = self.rates.get_mut(&observed.batch.entries[index].request.id) else {
                continue;
            };
            let (tree, acceptance) = (&observed.trees[index], &observed.acceptances[index]);
            let settled = acceptance.path.iter().map(|node| tree.token(*node)).chain(acceptance.next);
            // A copied token is judged as long as those before it were right, computed or not.
            for (copied, settled) in copied.into_iter().zip(settled) {
                rate.count(copied == settled);
                if copied != settled {
                    break;
                }
            }
        }
    }

    fn forget(&mut self, request: RequestId) {
        self.rates.remove(&request);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn propose(tokens: &[TokenId], max_nodes: usize) -> Vec<TokenId> {
        NGramSettings::default().continuation(tokens, max_nodes)
    }

    #[test]
    fn the_longest_then_latest_match_is_continued() {
        assert_eq!(propose(&[1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 2), [4, 9]);
        assert_eq!(propose(&[2, 3, 4, 7, 2, 3, 5, 8, 2, 3], 2), [5, 8]);
    }

    #[test]
    fn a_loop_is_continued_past_the_end() {
        assert_eq!(propose(&[5, 6, 7, 5, 6, 7, 5, 6], 7), [7, 5, 6, 7, 5, 6, 7]);
    }

    #[test]
    fn the_chance_follows_what_was_accepted() {
        let mut rate = PRIOR;
        (0..40).for_each(|_| rate.count(false));
        assert!(rate.chance() < 0.05);
        (0..40).for_each(|_| rate.count(true));
        assert!(rate.chance() > 0.85);
    }

    #[test]
    fn hc_086_short_or_new_text_proposes_nothing() {
        for tokens in [&[1][..], &[1, 2], &[1, 2, 3], &[1, 2, 3, 4, 5]] {
            assert!(propose(tokens, 8).is_empty());
        }
    }
}
