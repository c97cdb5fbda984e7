//! Drafters: what proposes tokens. A guess costs time, never correctness.

mod blocks;
mod draft_model;
mod eagle;
mod eagle_head;
mod grow;
mod ngram;
mod trust;

pub use draft_model::DraftModel;
pub use eagle::Eagle;
pub use eagle_head::{EagleWeights, head_spec};
pub use grow::TreeShape;
pub use ngram::{NGram, NGramSettings};

use crate::batch::Batch;
use crate::kv::KvManager;
use crate::request::{RequestId, TokenId};
use crate::rows::Rows;
use crate::sampler::Sampler;
use crate::tree::DraftTree;
use crate::verify::Acceptance;

/// What a drafter learns from one step: everything by index of the batch's entries.
#[derive(Debug)]
pub struct Observed<'a, F> {
    /// The step's work.
    pub batch: &'a Batch,
    /// The trees that were verified.
    pub trees: &'a [DraftTree],
    /// Where each entry's rows are.
    pub rows: &'a Rows,
    /// What was accepted. The target's K/V is already in place.
    pub acceptances: &'a [Acceptance],
    /// Target features, for every point that was declared when the target was built, a row for every row.
    pub features: &'a [F],
}

impl<F> Observed<'_, F> {
    /// The token that followed an entry's root; none if nothing was drawn.
    fn first_settled(&self, entry: usize) -> Option<TokenId> {
        let acceptance = &self.acceptances[entry];
        acceptance.path.first().map(|node| self.trees[entry].token(*node)).or(acceptance.next)
    }
}

/// What proposes tokens. Knowing nothing yet is no error: the tree is its root alone.
pub trait Drafter<F>: Send {
    /// One tree per entry, rooted at its last token, each node with the log of its chance of acceptance.
    fn draft(&mut self, batch: &Batch, sampler: &Sampler, kv: &KvManager) -> Vec<DraftTree>;
    /// Learns what is settled.
    fn observe(&mut self, observed: &Observed<'_, F>, kv: &KvManager);
    /// Drops what it keeps of a request: it ended, or its slots were taken away.
    fn forget(&mut self, request: RequestId);
}

/// Any number of drafters as one: their trees are merged, so a shared prefix is verified once. With none, every tree is
/// its root alone, which is plain decoding.
pub struct Portfolio<F>(Vec<Box<dyn Drafter<F>>>);

impl<F> Portfolio<F> {
    /// A portfolio; the order is of no account.
    pub fn new(drafters: Vec<Box<dyn Drafter<F>>>) -> Self {
        Self(drafters)
    }
}

impl<F> Drafter<F> for Portfolio<F> {
    fn draft(&mut self, batch: &Batch, sampler: &Sampler, kv: &KvManager) -> Vec<DraftTree> {
        let mut trees: Vec<DraftTree> =
            batch.entries.iter().map(|entry| DraftTree::root_only(entry.root_token())).collect();
        for drafter in &mut self.0 {
            let proposed = drafter.draft(batch, sampler, kv);
            trees.iter_mut().zip(&proposed).for_each(|(tree, proposed)| tree.merge(proposed));
        }
        trees
    }

    fn observe(&mut self, observed: &Observed<'_, F>, kv: &KvManager) {
        self.0.iter_mut().for_each(|drafter| drafter.observe(observed, kv));
    }

    fn forget(&mut self, request: RequestId) {
        self.0.iter_mut().for_each(|drafter| drafter.forget(request));
    }
}
