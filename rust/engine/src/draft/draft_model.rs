//! A decoder with the target's vocabulary as drafter (Leviathan et al. 2022, arXiv 2211.17192), as a dynamic tree.
//!
//! Its K/V are more layers in the same slots. K/V of expanded nodes lies in scratch slots and is moved with the accepted
//! path, since it was computed from tokens, which turned out to be true.

use std::collections::HashMap;
use std::sync::Arc;

use slipstream_kernels::{Backend, Draw, Ranked, Rope, SlotMove};

use super::blocks::BlockLog;
use super::grow::{Grown, Network, PassRows, Seed, TreeShape, grow};
use super::trust::Trust;
use super::{Drafter, Observed};
use crate::batch::Batch;
use crate::error::Result;
use crate::kv::KvManager;
use crate::model::{DecoderWeights, Pass};
use crate::request::{RequestId, TokenId};
use crate::sampler::Sampler;
use crate::tree::{DraftTree, NodeId};

/// A draft model.
pub struct DraftModel<B: Backend> {
    backend: Arc<B>,
    weights: Arc<DecoderWeights<B>>,
    num_layers: usize,
    rope: Rope,
    shape: TreeShape,
    num_slots: usize,
    /// The target's ids end here; the tables of one family differ in padding.
    num_tokens: TokenId,
    cache: B::Cache,
    /// First position of each request without K/V here.
    next: HashMap<RequestId, u32>,
    /// This step's trees, until it is known what was accepted.
    grown: Vec<Grown>,
    trust: Trust,
    blocks: BlockLog<()>,
}

impl<B: Backend> DraftModel<B> {
    /// A drafter of the first `num_layers` layers of `weights`, over the engine's `num_slots` slots, for at most
    /// `max_batch` requests a step. Only ids below `num_tokens` are proposed.
    pub fn new(
        backend: Arc<B>,
        weights: Arc<DecoderWeights<B>>,
        num_layers: usize,
        shape: TreeShape,
        num_slots: usize,
        max_batch: usize,
        num_tokens: TokenId,
    ) -> Result<Self> {
        let num_all = num_slots + max_batch * shape.num_scratch();
        let kv_width = weights.spec.num_kv_heads * weights.spec.head_dim;
        let cache = backend.cache(num_layers, num_all, kv_width)?;
        let rope = weights.spec.rope();
        Ok(Self {
            backend,
            weights,
            num_layers,
            rope,
            shape,
            num_slots,
            num_tokens,
            cache,
            next: HashMap::new(),
            grown: Vec::new(),
            trust: Trust::default(),
            blocks: BlockLog::new(),
        })
    }

    fn compute(&mut self, rows: &PassRows) -> B::Activations {
        let pass = Pass {
            token_ids: &rows.token_ids,
            positions: &rows.positions,
            slots: &rows.slots,
            attention: &rows.attention,
        };
        self.weights.hidden(&self.backend, pass, &self.rope, self.num_layers, &mut self.cache, &[]).0
    }

    /// Computes every entry's tokens that have no K/V here; gives a seed for each entry that can grow a tree.
    fn catch_up(&mut self, batch: &Batch, sampler: &Sampler, kv: &KvManager) -> Option<(Vec<Seed>, B::Activations)> {
        let mut rows = PassRows::default();
        let mut seeds = Vec::new();
        for (index, entry) in batch.entries.iter().enumerate() {
            let request = entry.request.id;
            let root_position = entry.root_position();
            let is_paused = entry.settles && entry.draft_budget == 0;
            let is_past_context = root_position as usize >= self.weights.spec.max_position;
            if entry.request.params.max_draft_nodes == Some(0) || is_paused || is_past_context {
                continue;
            }
            let factor = if entry.settles { self.trust.factor(request, self.shape) } else { Some(0.0) };
            let Some(trust) = factor else {
                continue;
            };
            let (start, _) = entry.known();
            let blocks = &self.blocks;
            let next = self.next.entry(request).or_insert_with(|| blocks.filled(kv, request, start));
            let tokens = &sampler.tokens(request)[*next as usize..=root_position as usize];
            let context: Vec<_> = kv.slots(request, 0..root_position + 1).collect();
            rows.push_sequence(tokens, 0, &context);
            (*next..=root_position).for_each(|position| self.blocks.fill(kv, request, position));
            *next = root_position + 1;
            if entry.settles {
                seeds.push(Seed {
                    request,
                    entry: index,
                    root: entry.root_token(),
                    root_position,
                    trust,
                    first_position: 0,
                    context,
                    row: rows.len() as u32 - 1,
                });
            }
        }
        if rows.len() == 0 {
            return None;
        }
        let outputs = self.compute(&rows);
        Some((seeds, outputs))
    }
}

impl<B: Backend> Network for DraftModel<B> {
    type Outputs = B::Activations;

    fn pass(&mut self, rows: &PassRows, _previous: &B::Activations, _parents: &[u32]) -> B::Activations {
        self.compute(rows)
    }

    fn rank(
        &self,
        outputs: &B::Activations,
        rows: Option<&[u32]>,
        draws: Option<&[Draw]>,
        k: usize,
    ) -> Vec<Vec<Ranked>> {
        let gathered = rows.map(|rows| self.backend.gather(outputs, rows));
        let logits = self.weights.logits(&self.backend, gathered.as_ref().unwrap_or(outputs));
        let mut ranked = self.backend.rank(&logits, draws, k);
        for children in &mut ranked {
            children.retain(|child| child.token < self.num_tokens);
        }
        ranked
    }
}

impl<B: Backend> Drafter<B::Activations> for DraftModel<B> {
    fn draft(&mut self, batch: &Batch, sampler: &Sampler, kv: &KvManager) -> Vec<DraftTree> {
        self.grown.clear();
        let mut trees: Vec<DraftTree> =
            batch.entries.iter().map(|entry| DraftTree::root_only(entry.root_token())).collect();
        if let Some((seeds, outputs)) = self.catch_up(batch, sampler, kv) {
            let (shape, num_slots) = (self.shape, self.num_slots);
            self.grown = grow(self, shape, seeds, outputs, sampler, num_slots);
        }
        for grown in &self.grown {
            trees[grown.seed.entry] = grown.tree.clone();
        }
        trees
    }

    fn observe(&mut self, observed: &Observed<'_, B::Activations>, kv: &KvManager) {
        let mut moves = Vec::new();
        for grown in &self.grown {
            self.trust.learn(grown, observed.first_settled(grown.seed.entry));
            let request = grown.seed.request;
            let tree = &observed.trees[grown.seed.entry];
            let Some(next) = self.next.get_mut(&request) else {
                continue;
            };
            let mut node = NodeId::ROOT;
            for accepted in &observed.acceptances[grown.seed.entry].path {
                // Another drafter's node, or one that was not expanded: it is computed with the next root.
                let Some(child) = grown.whole.child(node, tree.token(*accepted)) else {
                    break;
                };
                let Some(from) = grown.slots[child.index()] else {
                    break;
                };
                let position = *next;
                let to = kv.slots(request, position..position + 1).next().expect("an accepted position has a slot");
                moves.push(SlotMove { from, to });
                self.blocks.fill(kv, request, position);
                *next = position + 1;
                node = child;
            }
        }
        self.backend.move_kv(&mut self.cache, &moves);
        self.grown.clear();
    }

    fn forget(&mut self, request: RequestId) {
        self.next.remove(&request);
        self.trust.forget(request);
    }
}
