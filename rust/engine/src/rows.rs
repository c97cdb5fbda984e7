//! Flattening a batch and its trees into the arrays that a forward needs.

use std::ops::Range;

use slipstream_kernels::{AttentionPlan, Draw, Slot, Visible};

use crate::batch::{Batch, Entry};
use crate::kv::KvManager;
use crate::request::TokenId;
use crate::sampler::Sampler;
use crate::tree::{DraftTree, NodeId};

/// One forward's rows: for each entry its tokens, then the nodes of its tree.
#[derive(Debug, Default)]
pub struct Rows {
    /// Token of every row.
    pub token_ids: Vec<TokenId>,
    /// Position of every row in its sequence.
    pub positions: Vec<u32>,
    /// Where every row's K/V goes.
    pub slots: Vec<Slot>,
    /// What every row sees.
    pub attention: AttentionPlan,
    /// Rows that draw, ascending.
    pub drawing: Vec<u32>,
    /// Their draws.
    pub draws: Vec<Draw>,
    /// Where each entry's rows and draws are.
    pub entries: Vec<EntryRows>,
}

/// One entry's part of [`Rows`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryRows {
    /// Position of the entry's first row.
    pub start: u32,
    /// Row of the root: the last of the entry's tokens. Node `i` of the tree is `i` rows further.
    pub root: usize,
    /// All of the entry's rows.
    pub rows: Range<usize>,
    /// Its draws, in node order; empty if it does not settle.
    pub draws: Range<usize>,
}

impl EntryRows {
    /// Position of the root.
    pub fn root_position(&self) -> u32 {
        self.start + (self.root - self.rows.start) as u32
    }
}

impl Rows {
    /// Lays out a batch whose roots are known, one tree per entry.
    pub fn flatten(batch: &Batch, trees: &[DraftTree], kv: &KvManager, sampler: &Sampler) -> Self {
        let mut rows = Self::default();
        for (entry, tree) in batch.entries.iter().zip(trees) {
            rows.push_entry(entry, tree, kv, sampler);
        }
        rows
    }

    fn push_entry(&mut self, entry: &Entry, tree: &DraftTree, kv: &KvManager, sampler: &Sampler) {
        let request = entry.request.id;
        let (start, token_ids) = entry.known();
        let first = self.token_ids.len();
        let root = first + token_ids.len() - 1;
        let root_position = start + token_ids.len() as u32 - 1;
        let end = root_position + tree.len() as u32;
        let base = self.attention.slots.len() as u32;
        self.attention.slots.reserve(end as usize);
        kv.slots(request, 0..end).for_each(|slot| self.attention.slots.push(slot));

        for (position, token) in (start..).zip(token_ids) {
            let slot = self.attention.slots[(base + position) as usize];
            self.push_row(*token, position, slot, base..base + position + 1, 0..0);
        }
        for node in tree.nodes() {
            let tail_start = self.attention.slots.len() as u32;
            for ancestor in tree.ancestors(node) {
                let slot = self.attention.slots[(base + root_position) as usize + ancestor.index()];
                self.attention.slots.push(slot);
            }
            self.attention.slots[tail_start as usize..].reverse();
            let tail = tail_start..self.attention.slots.len() as u32;
            let position = root_position + tail.len() as u32;
            let slot = self.attention.slots[tail.end as usize - 1];
            self.push_row(tree.token(node), position, slot, base..base + root_position + 1, tail);
        }

        let draws_start = self.draws.len();
        if entry.settles {
            for node in (0..tree.len() as u16).map(NodeId) {
                self.drawing.push((root + node.index()) as u32);
                let path = tree.ancestors(node).map(|node| tree.token(node));
                self.draws.push(sampler.draw(request, tree.depth(node), path));
            }
        }
        self.entries.push(EntryRows {
            start,
            root,
            rows: first..self.token_ids.len(),
            draws: draws_start..self.draws.len(),
        });
    }

    fn push_row(&mut self, token: TokenId, position: u32, slot: Slot, context: Range<u32>, tail: Range<u32>) {
        self.token_ids.push(token);
        self.positions.push(position);
        self.slots.push(slot);
        self.attention.rows.push(Visible { first_position: 0, context, tail });
    }
}
