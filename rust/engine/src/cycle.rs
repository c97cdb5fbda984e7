//! The seam between scheduling and computing: draft, verify, commit.

use slipstream_kernels::{Drawn, SlotMove};

use crate::batch::{Batch, Entry, Progress, Settled};
use crate::budget::Budget;
use crate::draft::{Drafter, Observed, Portfolio};
use crate::error::{EngineError, Result};
use crate::kv::KvManager;
use crate::model::Target;
use crate::request::RequestId;
use crate::rows::{EntryRows, Rows};
use crate::sampler::Sampler;
use crate::tree::DraftTree;
use crate::verify::{Acceptance, Evidence, Verifier};

/// Runs batches. What is submitted may be collected at once or a call later: one [`Settled`] for every entry, those of a
/// request in order. Every entry that does not fail commits once.
///
/// Where a root is still on the device, its entry's draft budget was made for the earliest place it can have; whoever
/// finds it further on leaves out what would lie past the request's end.
pub trait Cycle {
    /// Takes one step's work.
    fn submit(&mut self, batch: Batch);
    /// What has settled, one entry per entry of the batches that are done.
    fn collect(&mut self, kv: &mut KvManager) -> Vec<Settled>;
    /// Drops what is kept of an ended request.
    fn forget(&mut self, request: RequestId);
}

impl Cycle for Box<dyn Cycle> {
    fn submit(&mut self, batch: Batch) {
        (**self).submit(batch);
    }

    fn collect(&mut self, kv: &mut KvManager) -> Vec<Settled> {
        (**self).collect(kv)
    }

    fn forget(&mut self, request: RequestId) {
        (**self).forget(request);
    }
}

/// The cycle as host code: everything of a batch happens in the `collect` that follows its `submit`.
pub struct HostCycle<T: Target> {
    target: T,
    drafter: Portfolio<T::Features>,
    verifier: Box<dyn Verifier>,
    budget: Budget,
    sampler: Sampler,
    batch: Batch,
}

impl<T: Target> HostCycle<T> {
    /// A cycle of these parts.
    pub fn new(
        target: T,
        drafters: Vec<Box<dyn Drafter<T::Features>>>,
        verifier: Box<dyn Verifier>,
        budget: Budget,
        sampler: Sampler,
    ) -> Self {
        Self { target, drafter: Portfolio::new(drafters), verifier, budget, sampler, batch: Batch::default() }
    }

    fn run(&mut self, batch: &Batch, kv: &mut KvManager) -> Vec<Settled> {
        for entry in &batch.entries {
            self.sampler.admit(&entry.request);
        }
        let trees = self.draft(batch, kv);
        let rows = Rows::flatten(batch, &trees, kv, &self.sampler);
        let forward = self.target.forward(&rows, self.verifier.wants_logits());
        let acceptances: Vec<Acceptance> = trees
            .iter()
            .zip(&rows.entries)
            .map(|(tree, entry)| self.verifier.verify(tree, entry.evidence(&forward.drawn, &forward.logits)))
            .collect();
        self.commit(batch, &rows, &acceptances, kv);
        let observed =
            Observed { batch, trees: &trees, rows: &rows, acceptances: &acceptances, features: &forward.features };
        self.drafter.observe(&observed, kv);
        let settle = |((entry, tree), acceptance)| self.sampler.settle_entry(entry, tree, acceptance);
        batch.entries.iter().zip(&trees).zip(&acceptances).map(settle).collect()
    }

    /// One tree per entry: the best nodes of what is proposed, none of which could lie past a request's end.
    fn draft(&mut self, batch: &Batch, kv: &KvManager) -> Vec<DraftTree> {
        let mut trees = self.drafter.draft(batch, &self.sampler, kv);
        for (entry, tree) in batch.entries.iter().zip(&mut trees) {
            // Every node has a slot behind the root's, and a path of them all and the next token must fit.
            let room = entry.request.max_len.saturating_sub(entry.root_position() + 2);
            tree.keep_best(u16::try_from(room).unwrap_or(u16::MAX));
        }
        self.budget.select(batch, &mut trees);
        trees
    }

    /// Makes the accepted paths' K/V part of their sequences.
    fn commit(&mut self, batch: &Batch, rows: &Rows, acceptances: &[Acceptance], kv: &mut KvManager) {
        let mut moves: Vec<SlotMove> = Vec::new();
        for ((entry, entry_rows), acceptance) in batch.entries.iter().zip(&rows.entries).zip(acceptances) {
            if entry.is_failed(acceptance) {
                continue;
            }
            let request = entry.request.id;
            moves.extend(kv.moves(request, entry.root_position(), &acceptance.path));
            let path = acceptance.path.iter().map(|node| rows.token_ids[entry_rows.root + node.index()]);
            let token_ids: Vec<_> = entry.known().1.iter().copied().chain(path).collect();
            kv.commit(request, &token_ids);
        }
        self.target.move_kv(&moves);
    }
}

impl Entry {
    /// Whether there was something to draw and it could not be drawn.
    fn is_failed(&self, acceptance: &Acceptance) -> bool {
        self.settles && acceptance.next.is_none()
    }
}

impl EntryRows {
    /// What a forward says about this entry's tree.
    fn evidence<'a>(&self, drawn: &'a [Drawn], logits: &'a [f32]) -> Evidence<'a> {
        let vocab_size = logits.len().checked_div(drawn.len()).unwrap_or(0);
        Evidence {
            drawn: &drawn[self.draws.clone()],
            logits: &logits[self.draws.start * vocab_size..self.draws.end * vocab_size],
        }
    }
}

impl Sampler {
    /// The settled tokens of one entry, appended to its request; or its error.
    fn settle_entry(&mut self, entry: &Entry, tree: &DraftTree, acceptance: &Acceptance) -> Settled {
        let request = entry.request.id;
        let outcome = progress(entry, tree, acceptance);
        if let Ok(progress) = &outcome {
            self.settle(request, &progress.token_ids);
        }
        Settled { request, outcome }
    }
}

fn progress(entry: &Entry, tree: &DraftTree, acceptance: &Acceptance) -> Result<Progress> {
    if entry.is_failed(acceptance) {
        return Err(EngineError::device(format!(
            "expected finite logits at position {}, got NaN, +inf or no token that may be drawn",
            entry.root_position() + acceptance.path.len() as u32
        ))
        .with_hint("the weights or the sampling parameters of this request leave nothing to draw from"));
    }
    Ok(Progress {
        computed: entry.root_position() + 1 + acceptance.path.len() as u32,
        token_ids: acceptance.path.iter().map(|node| tree.token(*node)).chain(acceptance.next).collect(),
        num_accepted: acceptance.path.len() as u16,
        num_drafted: tree.num_nodes() as u16,
        tree_depth: tree.max_depth(),
    })
}

impl<T: Target> Cycle for HostCycle<T> {
    fn submit(&mut self, batch: Batch) {
        assert!(self.batch.entries.is_empty(), "a batch is collected before the next is submitted");
        for request in &batch.evicted {
            self.drafter.forget(*request);
        }
        self.batch = batch;
    }

    fn collect(&mut self, kv: &mut KvManager) -> Vec<Settled> {
        let batch = std::mem::take(&mut self.batch);
        if batch.entries.is_empty() { Vec::new() } else { self.run(&batch, kv) }
    }

    fn forget(&mut self, request: RequestId) {
        self.drafter.forget(request);
        self.sampler.forget(request);
    }
}
