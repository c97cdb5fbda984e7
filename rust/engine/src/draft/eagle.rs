//! EAGLE-1/2 heads (Li et al. 2024, arXiv 2401.15077 and 2406.16858): one decoder layer that predicts the target's next
//! feature from its last one and the next token.
//!
//! The pair (feature of token t - 1, token t) has its K/V in the slot of token t, at position t: a constant shift
//! against the published position t - 1, invisible under rotary embedding. Position 0 has no pair and is masked. K/V
//! written while a tree grows is scratch: it comes from predicted features and is computed again from true ones.

use std::collections::HashMap;
use std::sync::Arc;

use slipstream_kernels::{Backend, Draw, Ranked};

use super::blocks::BlockLog;
use super::eagle_head::EagleWeights;
use super::grow::{Grown, Network, PassRows, Seed, TreeShape, grow};
use super::trust::Trust;
use super::{Drafter, Observed};
use crate::batch::{Batch, Entry};
use crate::error::Result;
use crate::kv::KvManager;
use crate::model::DecoderWeights;
use crate::request::{RequestId, TokenId};
use crate::sampler::Sampler;
use crate::tree::{DraftTree, NodeId};

/// Most target rows kept for a request whose drafting pauses; it starts again from what they cover.
const MAX_PENDING: usize = 1024;

/// An EAGLE head as a drafter.
pub struct Eagle<B: Backend> {
    backend: Arc<B>,
    target: Arc<DecoderWeights<B>>,
    weights: EagleWeights<B>,
    shape: TreeShape,
    /// Index of its features among the target's.
    point: usize,
    num_slots: usize,
    cache: B::Cache,
    states: HashMap<RequestId, State<B>>,
    /// This step's trees, until it is known what was accepted.
    grown: Vec<Grown>,
    trust: Trust,
    /// With each block: how far pairs are computed, and the target features of its last two tokens.
    blocks: BlockLog<Arc<[f32]>>,
}

/// A request's pairs: those from `from` up to `next` have K/V; `pending` holds the features of the tokens from
/// `next - 1` on, from which the next pairs are made.
struct State<B: Backend> {
    from: u32,
    next: u32,
    pending: Option<B::Activations>,
}

impl<B: Backend> Eagle<B> {
    /// A drafter over the engine's `num_slots` slots for at most `max_batch` requests a step. `point` is the index of
    /// [`crate::model::FeaturePoint::FinalNorm`] among the target's points.
    pub fn new(
        backend: Arc<B>,
        target: Arc<DecoderWeights<B>>,
        weights: EagleWeights<B>,
        shape: TreeShape,
        point: usize,
        num_slots: usize,
        max_batch: usize,
    ) -> Result<Self> {
        let num_all = num_slots + max_batch * shape.num_scratch();
        let cache = backend.cache(weights.layers.len(), num_all, weights.kv_width)?;
        Ok(Self {
            backend,
            target,
            weights,
            shape,
            point,
            num_slots,
            cache,
            states: HashMap::new(),
            grown: Vec::new(),
            trust: Trust::default(),
            blocks: BlockLog::new(),
        })
    }

    /// Where a request begins: at its first pair, after a cached prefix whose pairs are there, or late.
    fn begin(&self, entry: &Entry, kv: &KvManager) -> State<B> {
        let (start, _) = entry.known();
        let request = entry.request.id;
        if start == 0 {
            return State { from: 1, next: 1, pending: None };
        }
        let filled = self.blocks.filled(kv, request, start);
        // The last pair of a block is computed a step after the block is full; its features are kept too. Position 0 has
        // no pair.
        let next = filled.max(start - 1).max(1);
        let features: Option<Vec<Arc<[f32]>>> =
            (next - 1..start).map(|position| self.blocks.kept(kv, request, position)).collect();
        match features {
            Some(features) if filled + 1 >= start => {
                let width = self.width();
                let pending = self.backend.from_host(&features.concat(), width);
                State { from: 1, next, pending: Some(pending) }
            }
            _ => State { from: start + 1, next: start + 1, pending: None },
        }
    }

    fn width(&self) -> usize {
        self.target.spec.hidden_size
    }

    fn compute(&mut self, rows: &PassRows, features: &B::Activations) -> B::Activations {
        let backend = &*self.backend;
        let plan = backend.plan(&rows.positions, &rows.slots, &rows.attention, &self.weights.rope);
        let embedded = backend.embed(&self.weights.embed, &rows.token_ids);
        let joined = backend.concat(&[&embedded, features]);
        let mut x = backend.matmul(&self.weights.fc, self.weights.fc_bias.as_ref(), &joined);
        for (index, layer) in self.weights.layers.iter().enumerate() {
            layer.forward(backend, &plan, &mut self.cache, index, &mut x);
        }
        x
    }

    /// Computes the pairs up to each entry's first token; gives a seed for each entry that can grow a tree.
    fn catch_up(&mut self, batch: &Batch, sampler: &Sampler, kv: &KvManager) -> Option<(Vec<Seed>, B::Activations)> {
        let mut rows = PassRows::default();
        let mut seeds = Vec::new();
        let mut features = Vec::new();
        for (index, entry) in batch.entries.iter().enumerate() {
            let request = entry.request.id;
            if entry.request.params.max_draft_nodes == Some(0) {
                continue;
            }
            // Also for a request that drafts nothing now: its features are kept from the first.
            if !self.states.contains_key(&request) {
                let state = self.begin(entry, kv);
                if state.from == 1 && state.next == 1 {
                    self.blocks.fill(kv, request, 0);
                }
                self.states.insert(request, state);
            }
            if entry.settles && entry.draft_budget == 0 {
                continue;
            }
            let factor = if entry.settles { self.trust.factor(request, self.shape) } else { Some(0.0) };
            let Some(trust) = factor else {
                continue;
            };
            let state = self.states.get_mut(&request).expect("just inserted");
            let (start, token_ids) = entry.known();
            let Some(pending) = &state.pending else {
                continue;
            };
            let num_pending = self.backend.rows(pending) as u32;
            assert_eq!(state.next + num_pending, start + 1, "features are kept for every token before the entry");
            let tokens: &[TokenId] = &sampler.tokens(request)[state.next as usize..=start as usize];
            let context: Vec<_> = kv.slots(request, state.from..start + 1).collect();
            rows.push_sequence(tokens, state.from, &context);
            features.push(state.pending.take().expect("checked above"));
            if state.from == 1 {
                (state.next..=start).for_each(|position| self.blocks.fill(kv, request, position));
            }
            if entry.settles && token_ids.len() == 1 {
                seeds.push(Seed {
                    request,
                    entry: index,
                    root: token_ids[0],
                    root_position: start,
                    trust,
                    first_position: state.from,
                    context,
                    row: rows.len() as u32 - 1,
                });
            }
            state.next = start + 1;
        }
        if rows.len() == 0 {
            return None;
        }
        let features = self.backend.stack(&features.iter().collect::<Vec<_>>());
        let outputs = self.compute(&rows, &features);
        Some((seeds, outputs))
    }
}

impl<B: Backend> Network for Eagle<B> {
    type Outputs = B::Activations;

    fn pass(&mut self, rows: &PassRows, previous: &B::Activations, parents: &[u32]) -> B::Activations {
        let features = self.backend.gather(previous, parents);
        self.compute(rows, &features)
    }

    /// The head's output is the predicted feature itself: the target's head reads it as it is.
    fn rank(
        &self,
        outputs: &B::Activations,
        rows: Option<&[u32]>,
        draws: Option<&[Draw]>,
        k: usize,
    ) -> Vec<Vec<Ranked>> {
        let gathered = rows.map(|rows| self.backend.gather(outputs, rows));
        let logits = self.backend.matmul(&self.target.head, None, gathered.as_ref().unwrap_or(outputs));
        self.backend.rank(&logits, draws, k)
    }
}

impl<B: Backend> Drafter<B::Activations> for Eagle<B> {
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
        for grown in self.grown.drain(..) {
            self.trust.learn(&grown, observed.first_settled(grown.seed.entry));
        }
        let features = &observed.features[self.point];
        for (index, entry) in observed.batch.entries.iter().enumerate() {
            let request = entry.request.id;
            let Some(state) = self.states.get_mut(&request) else {
                continue;
            };
            let rows = &observed.rows.entries[index];
            let path = observed.acceptances[index].path.iter();
            let settled: Vec<u32> = (rows.rows.start..=rows.root)
                .chain(path.map(|node: &NodeId| rows.root + node.index()))
                .map(|row| row as u32)
                .collect();
            let new = self.backend.gather(features, &settled);
            let values = self.backend.to_host(&new);
            let width = values.len() / settled.len();
            for (position, values) in (rows.start..).zip(values.chunks(width)) {
                if position % kv.block_size() + 2 >= kv.block_size() {
                    self.blocks.keep(kv, request, position, values.into());
                }
            }
            let all = match state.pending.take() {
                Some(pending) => self.backend.stack(&[&pending, &new]),
                None => new,
            };
            let num_rows = self.backend.rows(&all);
            if num_rows > MAX_PENDING {
                // What came before is out of reach: the request starts again from what is kept.
                let dropped = num_rows - MAX_PENDING;
                let kept: Vec<u32> = (dropped as u32..num_rows as u32).collect();
                state.next += dropped as u32;
                state.from = state.next;
                state.pending = Some(self.backend.gather(&all, &kept));
            } else {
                state.pending = Some(all);
            }
        }
    }

    fn forget(&mut self, request: RequestId) {
        self.states.remove(&request);
        self.trust.forget(request);
    }
}
