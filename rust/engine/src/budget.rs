//! Which draft nodes are computed: nodes of all requests compete by their estimated chance of acceptance.

use crate::batch::Batch;
use crate::tree::{DraftTree, NodeId};

/// How many nodes a step computes, and what a node must promise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Most draft nodes of all requests in one step.
    pub max_nodes: usize,
    /// Least estimated chance of acceptance of a node that is computed.
    pub min_chance: f32,
}

impl Budget {
    /// Every node that a drafter proposes: for reproducing a published tree.
    pub const UNLIMITED: Self = Self { max_nodes: usize::MAX, min_chance: 0.0 };

    /// Whether a node with this cumulative score is worth expanding.
    pub fn is_worth(&self, score: f32) -> bool {
        score >= self.min_chance.ln()
    }

    /// Cuts the trees to each entry's own draft budget, then keeps the best nodes of all.
    pub fn select(&self, batch: &Batch, trees: &mut [DraftTree]) {
        for (entry, tree) in batch.entries.iter().zip(trees.iter_mut()) {
            tree.keep_best(entry.draft_budget);
            tree.keep_above(self.min_chance.ln());
        }
        let total: usize = trees.iter().map(DraftTree::num_nodes).sum();
        if total <= self.max_nodes {
            return;
        }
        let mut nodes: Vec<(f32, usize, NodeId)> = Vec::with_capacity(total);
        for (index, tree) in trees.iter().enumerate() {
            nodes.extend(tree.nodes().map(|node| (tree.score(node), index, node)));
        }
        nodes.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.2.cmp(&b.2)).then(a.1.cmp(&b.1)));
        let mut kept = vec![0_u16; trees.len()];
        nodes.iter().take(self.max_nodes).for_each(|(_, index, _)| kept[*index] += 1);
        trees.iter_mut().zip(kept).for_each(|(tree, kept)| tree.keep_best(kept));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::batch::{Entry, Work};
    use crate::request::{Request, RequestId, SamplingParams};

    #[test]
    fn the_best_nodes_of_all_requests_stay() {
        let entry = |id: u64| Entry {
            request: Arc::new(Request {
                id: RequestId(id),
                prompt: vec![1],
                params: SamplingParams::default(),
                seed: 0,
                stop_token_ids: Arc::new([]),
                max_len: 100,
            }),
            work: Work::Known { start: 0, token_ids: vec![1] },
            draft_budget: 3,
            settles: true,
        };
        let batch = Batch { entries: vec![entry(0), entry(1)], evicted: vec![] };
        let mut good = DraftTree::root_only(1);
        let mut poor = DraftTree::root_only(1);
        for token in 0..4 {
            good.push(NodeId::ROOT, token, -0.1 * token as f32);
            poor.push(NodeId::ROOT, token, -0.25 - token as f32);
        }
        let mut trees = [good, poor];
        Budget { max_nodes: 4, min_chance: 0.0 }.select(&batch, &mut trees);
        assert_eq!(trees.each_ref().map(DraftTree::num_nodes), [3, 1]);
        Budget { max_nodes: 4, min_chance: 0.8 }.select(&batch, &mut trees);
        assert_eq!(trees.each_ref().map(DraftTree::num_nodes), [3, 0]);
    }
}
