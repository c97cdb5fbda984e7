//! A target and drafters without arithmetic, and a cycle that delivers late.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use slipstream_engine::batch::{Batch, Progress, Settled, Work};
use slipstream_engine::cycle::Cycle;
use slipstream_engine::draft::{Drafter, Observed};
use slipstream_engine::kv::KvManager;
use slipstream_engine::model::{Forward, Target};
use slipstream_engine::request::{RequestId, TokenId};
use slipstream_engine::rows::Rows;
use slipstream_engine::sampler::Sampler;
use slipstream_engine::stream::{Closed, Emitted, Finish, TokenSink};
use slipstream_engine::tree::{DraftTree, NodeId};
use slipstream_kernels::{Drawn, SlotMove};

pub const VOCAB: u32 = 61;

/// What the scripted target says after a text: any function of all its tokens will do.
pub fn next_token(tokens: impl IntoIterator<Item = TokenId>) -> TokenId {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for token in tokens {
        hash = (hash ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3).rotate_left(17);
    }
    (hash >> 20) as u32 % VOCAB
}

/// What a request says that is decoded alone.
pub fn expected(prompt: &[TokenId], num_tokens: usize) -> Vec<TokenId> {
    let mut tokens = prompt.to_vec();
    for _ in 0..num_tokens {
        tokens.push(next_token(tokens.iter().copied()));
    }
    tokens.split_off(prompt.len())
}

/// A target whose K/V is the token and its position: a row reads its whole text back from the slots it sees, so a wrong
/// slot, mask, move or position shows at once.
pub struct ScriptedTarget {
    slots: Vec<Option<(u32, TokenId)>>,
    /// Rows computed, for counting passes.
    pub num_forwards: usize,
    /// Every `poison`-th draw is not finite.
    pub poison: Option<(TokenId, u32)>,
}

impl ScriptedTarget {
    pub fn new(num_slots: u32) -> Self {
        Self { slots: vec![None; num_slots as usize], num_forwards: 0, poison: None }
    }
}

impl Target for ScriptedTarget {
    type Features = ();

    fn forward(&mut self, rows: &Rows, _wants_logits: bool) -> Forward<()> {
        self.num_forwards += 1;
        for ((slot, position), token) in rows.slots.iter().zip(&rows.positions).zip(&rows.token_ids) {
            self.slots[slot.0 as usize] = Some((*position, *token));
        }
        let text = |row: usize| -> Vec<TokenId> {
            let visible = &rows.attention.rows[row];
            let slots = visible.context.clone().chain(visible.tail.clone());
            let read = slots.enumerate().map(|(position, index)| {
                let slot = rows.attention.slots[index as usize];
                let (there, token) = self.slots[slot.0 as usize].expect("a row sees only slots that were written");
                assert_eq!(there as usize, position, "logical positions are consecutive");
                token
            });
            let tokens: Vec<TokenId> = read.collect();
            assert_eq!(tokens.len() as u32, rows.positions[row] + 1, "a row sees all before it and itself");
            assert_eq!(tokens.last(), Some(&rows.token_ids[row]));
            tokens
        };
        (0..rows.token_ids.len()).for_each(|row| drop(text(row)));
        let drawn = rows
            .drawing
            .iter()
            .map(|row| {
                let tokens = text(*row as usize);
                if self.poison.is_some_and(|(first, len)| tokens[0] == first && tokens.len() as u32 == len) {
                    return Drawn::NotFinite;
                }
                Drawn::Token(next_token(tokens))
            })
            .collect();
        Forward { drawn, logits: Vec::new(), features: vec![(); 1] }
    }

    fn move_kv(&mut self, moves: &[SlotMove]) {
        for SlotMove { from, to } in moves {
            self.slots[to.0 as usize] = self.slots[from.0 as usize];
        }
    }
}

/// A drafter whose right path has a prescribed length, among wrong siblings.
pub struct ScriptedDrafter {
    /// How many nodes of the right path it knows in its n-th tree.
    pub right_nodes: Box<dyn Fn(usize) -> usize + Send>,
    /// Wrong children before and after the right one, on every level.
    pub wrong_children: usize,
    pub num_trees: usize,
}

impl ScriptedDrafter {
    pub fn oracle(depth: usize) -> Self {
        Self { right_nodes: Box::new(move |_| depth), wrong_children: 0, num_trees: 0 }
    }

    pub fn liar() -> Self {
        Self { right_nodes: Box::new(|_| 0), wrong_children: 3, num_trees: 0 }
    }

    pub fn script(num_right: Vec<usize>, num_wrong: usize) -> Self {
        Self {
            right_nodes: Box::new(move |index| num_right[index % num_right.len()]),
            wrong_children: num_wrong,
            num_trees: 0,
        }
    }

    fn grow(&mut self, tokens: &[TokenId]) -> DraftTree {
        let mut tree = DraftTree::root_only(*tokens.last().expect("a root"));
        let mut text = tokens.to_vec();
        let mut node = NodeId::ROOT;
        let num_right = (self.right_nodes)(self.num_trees);
        self.num_trees += 1;
        for level in 0..=num_right {
            let right = next_token(text.iter().copied());
            let score = tree.score(node) - 0.01;
            for wrong in 0..self.wrong_children {
                let token = (right + 1 + wrong as u32) % VOCAB;
                let below = tree.push(node, token, score - 0.001 * wrong as f32);
                tree.push(below, right, score - 0.1);
            }
            if level == num_right {
                break;
            }
            node = tree.push(node, right, score - 0.05);
            text.push(right);
        }
        tree.check();
        tree
    }
}

impl Drafter<()> for ScriptedDrafter {
    fn draft(&mut self, batch: &Batch, sampler: &Sampler, _kv: &KvManager) -> Vec<DraftTree> {
        batch
            .entries
            .iter()
            .map(|entry| {
                if entry.settles {
                    self.grow(sampler.tokens(entry.request.id))
                } else {
                    DraftTree::root_only(entry.root_token())
                }
            })
            .collect()
    }

    fn observe(&mut self, observed: &Observed<'_, ()>, kv: &KvManager) {
        for (entry, acceptance) in observed.batch.entries.iter().zip(observed.acceptances) {
            if entry.settles && acceptance.next.is_none() {
                continue;
            }
            let computed = entry.root_position() + 1 + acceptance.path.len() as u32;
            assert_eq!(kv.computed(entry.request.id), computed, "the path is committed before it is observed");
        }
    }

    fn forget(&mut self, _request: RequestId) {}
}

/// A cycle that runs a batch one call after it was submitted, as a device does that is one step ahead of the host; roots
/// that the host cannot know are filled in from what the step before settled.
pub struct DelayedCycle<C: Cycle> {
    inner: C,
    waiting: VecDeque<Batch>,
    roots: HashMap<RequestId, (u32, TokenId)>,
}

impl<C: Cycle> DelayedCycle<C> {
    pub fn new(inner: C) -> Self {
        Self { inner, waiting: VecDeque::from([Batch::default()]), roots: HashMap::new() }
    }

    fn resolve(&self, batch: &mut Batch) {
        for entry in &mut batch.entries {
            if entry.work == Work::OnDevice
                && let Some((start, token)) = self.roots.get(&entry.request.id).copied()
            {
                entry.work = Work::Known { start, token_ids: vec![token] };
            }
        }
        // A device leaves a row inert that would lie past its request's end, or whose request has failed.
        batch.entries.retain(|entry| entry.work != Work::OnDevice && entry.root_position() + 1 < entry.request.max_len);
    }
}

impl<C: Cycle> Cycle for DelayedCycle<C> {
    fn submit(&mut self, batch: Batch) {
        self.waiting.push_back(batch);
    }

    fn collect(&mut self, kv: &mut KvManager) -> Vec<Settled> {
        let mut batch = self.waiting.pop_front().expect("one batch is always under way");
        let requests: Vec<RequestId> = batch.entries.iter().map(|entry| entry.request.id).collect();
        self.resolve(&mut batch);
        self.inner.submit(batch);
        let mut settled = self.inner.collect(kv);
        for one in &settled {
            match &one.outcome {
                Ok(progress) => {
                    let root = progress.token_ids.last().map(|token| (progress.computed, *token));
                    self.roots.extend(root.map(|root| (one.request, root)));
                }
                Err(_) => drop(self.roots.remove(&one.request)),
            }
        }
        for request in requests {
            if !settled.iter().any(|one| one.request == request) {
                let progress = Progress::default();
                settled.push(Settled { request, outcome: Ok(progress) });
            }
        }
        settled
    }

    fn forget(&mut self, request: RequestId) {
        self.roots.remove(&request);
        self.inner.forget(request);
    }
}

/// A sink that keeps what it gets, shared with the test.
#[derive(Clone, Default)]
pub struct Kept(Arc<Mutex<Contents>>);

#[derive(Default)]
struct Contents {
    tokens: Vec<Emitted>,
    finish: Option<Finish>,
    is_closed: bool,
}

impl Kept {
    pub fn tokens(&self) -> Vec<TokenId> {
        self.0.lock().expect("not poisoned").tokens.iter().map(|emitted| emitted.token).collect()
    }

    pub fn finish(&self) -> Option<Finish> {
        self.0.lock().expect("not poisoned").finish.clone()
    }

    pub fn close(&self) {
        self.0.lock().expect("not poisoned").is_closed = true;
    }
}

impl TokenSink for Kept {
    fn emit(&mut self, tokens: &[Emitted], finish: Option<Finish>) -> Result<(), Closed> {
        let mut kept = self.0.lock().expect("not poisoned");
        assert!(kept.finish.is_none(), "nothing follows an end");
        kept.tokens.extend_from_slice(tokens);
        kept.finish = finish;
        if kept.is_closed { Err(Closed) } else { Ok(()) }
    }

    fn is_closed(&self) -> bool {
        self.0.lock().expect("not poisoned").is_closed
    }
}
