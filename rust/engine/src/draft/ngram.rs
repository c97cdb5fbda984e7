//! Prompt lookup: what followed the last tokens when they came before, in prompt and output (Saxena 2023).

use super::{Drafter, Observed};
use crate::batch::Batch;
use crate::kv::KvManager;
use crate::request::{RequestId, TokenId};
use crate::sampler::Sampler;
use crate::tree::{DraftTree, NodeId};

/// The n-gram drafter. It has no state: a request's tokens are all it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NGram {
    /// Fewest last tokens that must have come before.
    pub min_match: usize,
    /// A longer match than this counts no more.
    pub max_match: usize,
    /// Most nodes proposed.
    pub max_nodes: u16,
}

impl Default for NGram {
    fn default() -> Self {
        Self { min_match: 2, max_match: 5, max_nodes: 10 }
    }
}

impl NGram {
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

    fn propose(&self, tokens: &[TokenId], root: TokenId, max_nodes: usize) -> DraftTree {
        let mut tree = DraftTree::root_only(root);
        let Some((start, len)) = self.longest_match(tokens) else {
            return tree;
        };
        // A match that runs into the end of the text repeats itself: a loop of period `tokens.len() - start`.
        let period = tokens.len() - start;
        // The chance that a match of n tokens goes on for one more, by the rule of succession with one failure seen.
        let step = ((len + 1) as f32 / (len + 2) as f32).ln();
        let mut node = NodeId::ROOT;
        for index in 0..max_nodes.min(usize::from(self.max_nodes)) {
            let score = tree.score(node) + step;
            node = tree.push_new(node, tokens[start + index % period], score);
        }
        tree
    }
}

impl<F> Drafter<F> for NGram {
    fn draft(&mut self, batch: &Batch, sampler: &Sampler, _kv: &KvManager) -> Vec<DraftTree> {
        batch
            .entries
            .iter()
            .map(|entry| {
                if !entry.settles || entry.draft_budget == 0 {
                    return DraftTree::root_only(entry.root_token());
                }
                let tokens = sampler.tokens(entry.request.id);
                self.propose(tokens, entry.root_token(), usize::from(entry.draft_budget))
            })
            .collect()
    }

    fn observe(&mut self, _observed: &Observed<'_, F>, _kv: &KvManager) {}

    fn forget(&mut self, _request: RequestId) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn propose(tokens: &[TokenId], max_nodes: usize) -> Vec<TokenId> {
        let tree = NGram::default().propose(tokens, *tokens.last().expect("not empty"), max_nodes);
        tree.check();
        tree.tokens()[1..].to_vec()
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
    fn hc_086_short_or_new_text_proposes_nothing() {
        for tokens in [&[1][..], &[1, 2], &[1, 2, 3], &[1, 2, 3, 4, 5]] {
            assert!(propose(tokens, 8).is_empty());
        }
    }
}
