//! EAGLE-2's dynamic tree (Li et al. 2024, arXiv 2406.16858), grown for all requests of a batch at once: level by level
//! the best nodes by cumulative score are expanded, then the best of all candidates stay.
//!
//! A pass of the drafter sees, for each row, the request's settled context and the row's own path below the root, whose
//! K/V lies in scratch slots behind the engine's own.

use std::ops::Range;

use slipstream_kernels::{AttentionPlan, Draw, Ranked, Slot, Visible};

use crate::budget::Budget;
use crate::request::{RequestId, TokenId};
use crate::sampler::Sampler;
use crate::tree::{DraftTree, NodeId};

/// The shape of a dynamic tree.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TreeShape {
    /// Expansions after the first level, so the tree is at most one level deeper.
    pub max_depth: u16,
    /// Children of a node, and nodes expanded on a level.
    pub top_k: u16,
    /// Most nodes proposed, the root not counted.
    pub max_nodes: u16,
    /// Whether children are drawn with the target's own noise (shared coins), or ranked by plain probability.
    pub noise: bool,
    /// What a node must promise to be expanded: [`Budget::UNLIMITED`] gives exactly the published tree.
    pub budget: Budget,
}

impl TreeShape {
    /// Scratch slots that one request needs: one for every expanded node.
    pub fn num_scratch(&self) -> usize {
        usize::from(self.max_depth) * usize::from(self.top_k)
    }
}

/// A request whose tree is to be grown.
#[derive(Clone, Debug)]
pub(super) struct Seed {
    pub(super) request: RequestId,
    /// Index of the entry in its batch.
    pub(super) entry: usize,
    pub(super) root: TokenId,
    pub(super) root_position: u32,
    /// Log of the factor on every estimated chance.
    pub(super) trust: f32,
    /// First position with K/V of this drafter.
    pub(super) first_position: u32,
    /// Slots of the positions from `first_position` to the root's.
    pub(super) context: Vec<Slot>,
    /// Row of the root's output in the pass before the first level.
    pub(super) row: u32,
}

/// A node to expand in the next pass.
#[derive(Clone, Copy, Debug)]
struct Frontier {
    seed: usize,
    node: NodeId,
    /// Row, in the pass before, of the output that produced the node.
    parent_row: u32,
}

/// A drafter's network, as far as growing a tree needs it.
pub(super) trait Network {
    /// Outputs of a pass, a row for every row.
    type Outputs;
    /// Runs rows; row `i` continues what row `parents[i]` of `previous` put out.
    fn pass(&mut self, rows: &PassRows, previous: &Self::Outputs, parents: &[u32]) -> Self::Outputs;
    /// The best children of some rows of a pass, of all of them if `rows` is none.
    fn rank(&self, outputs: &Self::Outputs, rows: Option<&[u32]>, draws: Option<&[Draw]>, k: usize)
    -> Vec<Vec<Ranked>>;
}

/// Grows a tree for every seed. `outputs` is the pass that computed the roots; scratch slots start at `first_scratch`.
pub(super) fn grow<N: Network>(
    network: &mut N,
    shape: TreeShape,
    seeds: Vec<Seed>,
    mut outputs: N::Outputs,
    sampler: &Sampler,
    first_scratch: usize,
) -> Vec<Grown> {
    let k = usize::from(shape.top_k);
    let roots: Vec<u32> = seeds.iter().map(|seed| seed.row).collect();
    let draws: Option<Vec<Draw>> =
        shape.noise.then(|| seeds.iter().map(|seed| sampler.draw(seed.request, 0, std::iter::empty())).collect());
    let ranked = network.rank(&outputs, Some(&roots), draws.as_deref(), k);
    let mut growth = Growth::new(shape, seeds, ranked, first_scratch);
    for _ in 0..shape.max_depth {
        let (level, rows) = growth.next_level();
        if level.is_empty() {
            break;
        }
        let parents: Vec<u32> = level.iter().map(|frontier| frontier.parent_row).collect();
        outputs = network.pass(&rows, &outputs, &parents);
        let ranked = network.rank(&outputs, None, growth.draws(&level, sampler).as_deref(), k);
        growth.extend(&level, ranked);
    }
    growth.finish()
}

/// One pass's rows.
#[derive(Debug, Default)]
pub(super) struct PassRows {
    pub(super) token_ids: Vec<TokenId>,
    pub(super) positions: Vec<u32>,
    pub(super) slots: Vec<Slot>,
    pub(super) attention: AttentionPlan,
}

impl PassRows {
    /// Adds rows of consecutive positions up to the end of `context`, whose first slot is that of `first_position`.
    pub(super) fn push_sequence(&mut self, token_ids: &[TokenId], first_position: u32, context: &[Slot]) {
        let base = self.attention.slots.len() as u32;
        self.attention.slots.extend_from_slice(context);
        let skipped = context.len() - token_ids.len();
        for (index, token) in (skipped..).zip(token_ids) {
            self.token_ids.push(*token);
            self.positions.push(first_position + index as u32);
            self.slots.push(context[index]);
            let seen = base..base + index as u32 + 1;
            self.attention.rows.push(Visible { first_position, context: seen, tail: 0..0 });
        }
    }

    pub(super) fn len(&self) -> usize {
        self.token_ids.len()
    }
}

/// The trees of a batch while they grow.
#[derive(Debug)]
struct Growth {
    shape: TreeShape,
    seeds: Vec<Seed>,
    trees: Vec<Growing>,
    attention: AttentionPlan,
}

#[derive(Debug)]
struct Growing {
    tree: DraftTree,
    frontier: Vec<Frontier>,
    context: Range<u32>,
    /// First scratch slot of the entry, and how many are taken.
    scratch: u32,
    num_taken: u32,
    /// Slot of each expanded node.
    slots: Vec<Option<Slot>>,
}

impl Growth {
    /// Begins with the ranked children of every root. Scratch slots start at `first_scratch`.
    fn new(shape: TreeShape, seeds: Vec<Seed>, ranked: Vec<Vec<Ranked>>, first_scratch: usize) -> Self {
        let mut attention = AttentionPlan::default();
        let mut trees = Vec::with_capacity(seeds.len());
        for (index, (seed, children)) in seeds.iter().zip(ranked).enumerate() {
            let base = attention.slots.len() as u32;
            attention.slots.extend_from_slice(&seed.context);
            let mut growing = Growing {
                tree: DraftTree::root_only(seed.root),
                frontier: Vec::new(),
                context: base..attention.slots.len() as u32,
                scratch: (first_scratch + seed.entry * shape.num_scratch()) as u32,
                num_taken: 0,
                slots: vec![None],
            };
            growing.extend(shape, index, seed.trust, &[(NodeId::ROOT, seed.row)], vec![children]);
            trees.push(growing);
        }
        Self { shape, seeds, trees, attention }
    }

    /// The rows of the next level, and the nodes they expand; empty when nothing is worth expanding.
    fn next_level(&mut self) -> (Vec<Frontier>, PassRows) {
        let mut rows = PassRows::default();
        let mut level = Vec::new();
        for (seed, growing) in self.seeds.iter().zip(&mut self.trees) {
            for frontier in std::mem::take(&mut growing.frontier) {
                let slot = Slot(growing.scratch + growing.num_taken);
                growing.num_taken += 1;
                growing.slots[frontier.node.index()] = Some(slot);
                let tail_start = self.attention.slots.len() as u32;
                for ancestor in growing.tree.path(frontier.node) {
                    let slot = growing.slots[ancestor.index()].expect("a node is expanded after its ancestors");
                    self.attention.slots.push(slot);
                }
                rows.token_ids.push(growing.tree.token(frontier.node));
                rows.positions.push(seed.root_position + u32::from(growing.tree.depth(frontier.node)));
                rows.slots.push(slot);
                rows.attention.rows.push(Visible {
                    first_position: seed.first_position,
                    context: growing.context.clone(),
                    tail: tail_start..self.attention.slots.len() as u32,
                });
                level.push(frontier);
            }
        }
        rows.attention.slots.clone_from(&self.attention.slots);
        (level, rows)
    }

    /// The draws that rank the children of a level's nodes; none if they are ranked by plain probability.
    fn draws(&self, level: &[Frontier], sampler: &Sampler) -> Option<Vec<Draw>> {
        self.shape.noise.then(|| {
            level
                .iter()
                .map(|frontier| {
                    let tree = &self.trees[frontier.seed].tree;
                    let path = tree.ancestors(frontier.node).map(|node| tree.token(node));
                    sampler.draw(self.seeds[frontier.seed].request, tree.depth(frontier.node), path)
                })
                .collect()
        })
    }

    /// Adds the ranked children of a level's nodes. Row `i` of the pass expanded `level[i]`.
    fn extend(&mut self, level: &[Frontier], ranked: Vec<Vec<Ranked>>) {
        let mut ranked = ranked.into_iter();
        let mut row = 0;
        for (index, growing) in self.trees.iter_mut().enumerate() {
            let num_rows = level.iter().filter(|frontier| frontier.seed == index).count();
            let parents: Vec<(NodeId, u32)> = (row..row + num_rows).map(|row| (level[row].node, row as u32)).collect();
            row += num_rows;
            growing.extend(
                self.shape,
                index,
                self.seeds[index].trust,
                &parents,
                ranked.by_ref().take(num_rows).collect(),
            );
        }
    }

    /// The best nodes of each tree, with what was grown: the seeds, the whole trees, and the slots of expanded nodes.
    fn finish(self) -> Vec<Grown> {
        let shape = self.shape;
        self.seeds
            .into_iter()
            .zip(self.trees)
            .map(|(seed, growing)| {
                let mut tree = growing.tree.clone();
                tree.keep_best(shape.max_nodes);
                Grown { seed, tree, whole: growing.tree, slots: growing.slots }
            })
            .collect()
    }
}

/// A finished tree.
#[derive(Debug)]
pub(super) struct Grown {
    pub(super) seed: Seed,
    /// The proposal.
    pub(super) tree: DraftTree,
    /// All candidates.
    pub(super) whole: DraftTree,
    /// Scratch slot of each expanded candidate.
    pub(super) slots: Vec<Option<Slot>>,
}

impl Growing {
    /// Adds the children of `parents` (a node, and the row that ranked them); the best of them are the next frontier.
    fn extend(
        &mut self,
        shape: TreeShape,
        seed: usize,
        trust: f32,
        parents: &[(NodeId, u32)],
        ranked: Vec<Vec<Ranked>>,
    ) {
        let mut candidates: Vec<(NodeId, u32)> = Vec::new();
        for ((parent, row), children) in parents.iter().zip(ranked) {
            let so_far = self.tree.score(*parent);
            for child in children {
                candidates.push((self.tree.push_new(*parent, child.token, so_far + child.log_chance + trust), *row));
            }
        }
        self.slots.resize(self.tree.len(), None);
        // Stable: of equal scores the earlier candidate is first.
        candidates.sort_by(|a, b| self.tree.score(b.0).total_cmp(&self.tree.score(a.0)));
        self.frontier = candidates
            .into_iter()
            .take(usize::from(shape.top_k))
            .filter(|(node, _)| shape.budget.is_worth(self.tree.score(*node)))
            .map(|(node, parent_row)| Frontier { seed, node, parent_row })
            .collect();
    }
}
