//! The K/V manager against a naive model: what each slot holds is tracked slot by slot, and after every operation each
//! request must find its own tokens where its block table says.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;
use slipstream_engine::kv::{KvManager, OutOfBlocks};
use slipstream_engine::request::{RequestId, TokenId};
use slipstream_engine::tree::NodeId;
use slipstream_kernels::{Slot, SlotMove};

/// The token of a text at a position. Texts with different numbers part at positions 0, 6, 12, 18 and so on.
fn token(text: u8, position: usize) -> TokenId {
    let parted = position >= 6 * usize::from(text);
    position as TokenId % 7 + if parted { 10 * u32::from(text) + 10 } else { 0 }
}

fn tokens(text: u8, len: usize) -> Vec<TokenId> {
    (0..len).map(|position| token(text, position)).collect()
}

/// What a slot holds once a token was computed after its prefix.
fn content(prefix: &[TokenId]) -> u64 {
    prefix
        .iter()
        .fold(1, |hash: u64, token| (hash ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23))
}

/// A step whose rows have slots and whose result is still to come.
#[derive(Clone)]
struct Step {
    chunk: u32,
    num_nodes: u32,
    path: Vec<NodeId>,
}

struct World {
    kv: KvManager,
    memory: Vec<u64>,
    /// Text of each request, and its steps under way.
    requests: BTreeMap<u64, (u8, VecDeque<Step>)>,
    next_id: u64,
}

impl World {
    fn new(num_blocks: u32, block_size: u32) -> Self {
        let kv = KvManager::new(num_blocks, block_size, true);
        // Nothing has been computed anywhere: a value that no prefix has.
        let memory = vec![0; kv.num_slots() as usize];
        Self { kv, memory, requests: BTreeMap::new(), next_id: 0 }
    }

    fn admit(&mut self, text: u8, prompt_len: usize) -> (RequestId, u32) {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let cached = self.kv.admit(id, &tokens(text, prompt_len));
        assert!((cached as usize) < prompt_len, "one token is computed (HC-036)");
        assert_eq!(cached % self.kv.block_size(), 0);
        assert_eq!(self.kv.computed(id), cached);
        self.requests.insert(id.0, (text, VecDeque::new()));
        (id, cached)
    }

    /// Reserves for the worst case of all steps under way and one more.
    fn reserve(&mut self, id: RequestId, chunk: u32, num_nodes: u32, path: Vec<NodeId>) -> Result<(), OutOfBlocks> {
        let under_way = &self.requests[&id.0].1;
        let before: u32 = under_way.iter().map(|step| step.chunk + step.num_nodes).sum();
        let free = self.kv.num_free();
        let tokens = self.kv.computed(id) + before + chunk + num_nodes;
        let reserved = self.kv.reserve(id, tokens);
        if reserved.is_err() {
            assert_eq!(self.kv.num_free(), free, "all or nothing");
            return reserved;
        }
        self.requests.get_mut(&id.0).expect("it was admitted").1.push_back(Step { chunk, num_nodes, path });
        Ok(())
    }

    /// Computes the oldest step under way: rejected nodes leave foreign values in their slots.
    fn collect(&mut self, id: RequestId) {
        let (text, under_way) = self.requests.get_mut(&id.0).expect("it was admitted");
        let text = *text;
        let Some(step) = under_way.pop_front() else { return };
        let start = self.kv.computed(id);
        let end = start + step.chunk;
        let slots: Vec<Slot> = self.kv.slots(id, start..end + step.num_nodes).collect();
        let truth = tokens(text, (end + step.num_nodes) as usize);
        for (slot, position) in slots.iter().zip(start..) {
            let node = (position + 1).saturating_sub(end);
            let depth = step.path.iter().position(|accepted| u32::from(accepted.0) == node);
            self.memory[slot.0 as usize] = match depth {
                _ if node == 0 => content(&truth[..=position as usize]),
                Some(depth) => content(&truth[..=end as usize + depth]),
                None => 0,
            };
        }
        let moves = self.kv.moves(id, end - 1, &step.path);
        assert!(moves.iter().all(|SlotMove { from, to }| from != to), "only real moves");
        for SlotMove { from, to } in moves {
            self.memory[to.0 as usize] = self.memory[from.0 as usize];
        }
        let settled = end as usize + step.path.len();
        self.kv.commit(id, &truth[start as usize..settled]);
        assert_eq!(self.kv.computed(id) as usize, settled);
    }

    fn release(&mut self, id: RequestId) {
        self.requests.remove(&id.0);
        self.kv.release(id);
    }

    fn check(&self) {
        self.kv.check();
        for (id, (text, _)) in &self.requests {
            let computed = self.kv.computed(RequestId(*id));
            let truth = tokens(*text, computed as usize);
            for (slot, position) in self.kv.slots(RequestId(*id), 0..computed).zip(0..) {
                assert_eq!(self.memory[slot.0 as usize], content(&truth[..=position]), "request {id} at {position}");
            }
        }
    }

    /// Computes a prompt at once and lets it go: a cached chain.
    fn leave_cached(&mut self, text: u8, len: u32) {
        let (id, cached) = self.admit(text, len as usize);
        self.reserve(id, len - cached, 0, Vec::new()).expect("there is room");
        self.collect(id);
        self.check();
        self.release(id);
        self.check();
    }
}

/// A path through nodes `1 ..= num_nodes`, by the bits of a mask.
fn path(num_nodes: u32, mask: u64) -> Vec<NodeId> {
    (1..=num_nodes as u16).filter(|node| mask >> (node - 1) & 1 == 1).map(NodeId).collect()
}

#[derive(Clone, Debug)]
enum Operation {
    Admit { text: u8, len: usize },
    Reserve { which: usize, chunk: u32, num_nodes: u32, mask: u64 },
    Collect { which: usize },
    Release { which: usize },
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        2 => (0..5_u8, 1..30_usize).prop_map(|(text, len)| Operation::Admit { text, len }),
        6 => (any::<usize>(), 1..9_u32, 0..9_u32, any::<u64>())
            .prop_map(|(which, chunk, num_nodes, mask)| Operation::Reserve { which, chunk, num_nodes, mask }),
        6 => any::<usize>().prop_map(|which| Operation::Collect { which }),
        1 => any::<usize>().prop_map(|which| Operation::Release { which }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn hc_028_029_033_every_request_finds_its_own_tokens(
        num_blocks in 4..24_u32,
        block_size in 1..6_u32,
        operations in prop::collection::vec(operation(), 1..120),
    ) {
        let mut world = World::new(num_blocks, block_size);
        for operation in operations {
            let pick = |which: usize| world.requests.keys().nth(which % world.requests.len().max(1)).copied();
            match operation {
                Operation::Admit { text, len } => {
                    world.admit(text, len);
                }
                Operation::Reserve { which, chunk, num_nodes, mask } => {
                    if let Some(id) = pick(which).filter(|id| world.requests[id].1.len() < 2) {
                        let _ = world.reserve(RequestId(id), chunk, num_nodes, path(num_nodes, mask));
                    }
                }
                Operation::Collect { which } => {
                    if let Some(id) = pick(which) {
                        world.collect(RequestId(id));
                    }
                }
                Operation::Release { which } => {
                    if let Some(id) = pick(which) {
                        world.release(RequestId(id));
                    }
                }
            }
            world.check();
        }
        for id in world.requests.keys().copied().collect::<Vec<_>>() {
            world.release(RequestId(id));
        }
        world.check();
        prop_assert_eq!(world.kv.num_free(), num_blocks, "all blocks are back (HC-029)");
    }
}

#[test]
fn hc_038_eviction_takes_the_tail_of_a_chain_before_its_root() {
    let mut world = World::new(12, 4);
    world.leave_cached(0, 32);
    let (other, _) = world.admit(1, 16);
    world.reserve(other, 16, 0, Vec::new()).expect("4 blocks are free");
    let (new, cached) = world.admit(2, 12);
    assert_eq!(cached, 0);
    world.reserve(new, 12, 0, Vec::new()).expect("3 blocks can be evicted");
    world.check();
    let (_, cached) = world.admit(0, 33);
    assert_eq!(cached, 5 * 4);
    world.check();
}

#[test]
fn hc_028_room_for_draft_slots_at_every_residue() {
    for block_size in [4, 16] {
        for prompt_len in 1..=2 * block_size {
            for num_nodes in 1..=2 * block_size {
                let mut world = World::new(8, block_size);
                let (id, _) = world.admit(0, prompt_len as usize);
                world.reserve(id, prompt_len, num_nodes, path(num_nodes, 0b1010)).expect("there is room");
                assert_eq!(world.kv.slots(id, 0..prompt_len + num_nodes).count() as u32, prompt_len + num_nodes);
                world.collect(id);
                world.check();
                let held = world.kv.num_blocks() - world.kv.num_free();
                assert_eq!(held, world.kv.computed(id).div_ceil(block_size), "the rest is given back at once");
            }
        }
    }
}

#[test]
fn hc_035_rejected_draft_tokens_are_not_found() {
    let mut world = World::new(16, 4);
    let (id, _) = world.admit(0, 10);
    world.reserve(id, 10, 6, Vec::new()).expect("there is room");
    world.collect(id);
    for _ in 0..5 {
        world.reserve(id, 1, 6, vec![NodeId(2)]).expect("there is room");
        world.collect(id);
    }
    // 10 + 5 · (root + 1 accepted) tokens are settled: 5 full blocks.
    let mut prompt = tokens(0, 20);
    prompt.extend([99; 8]);
    assert_eq!(world.kv.admit(RequestId(1000), &prompt), 20);
    prompt.truncate(19);
    prompt.extend([99; 8]);
    assert_eq!(world.kv.admit(RequestId(1001), &prompt), 16);
    world.kv.check();
}

#[test]
fn hc_037_speculation_does_not_cost_prefix_hits() {
    let cached_of = |num_nodes: u32| {
        let mut world = World::new(100, 16);
        let mut cached = Vec::new();
        for turn in 1..=20 {
            let (id, hit) = world.admit(0, 50 * turn);
            cached.push(hit);
            world.reserve(id, 50 * turn as u32 - hit, num_nodes, Vec::new()).expect("there is room");
            world.collect(id);
            while (world.kv.computed(id) as usize) < 50 * turn + 20 {
                world.reserve(id, 1, num_nodes, path(num_nodes, 0b1001)).expect("there is room");
                world.collect(id);
            }
            world.check();
            world.release(id);
        }
        cached
    };
    let (plain, speculative) = (cached_of(0), cached_of(8));
    for (plain, speculative) in plain.iter().zip(&speculative) {
        assert!(plain.abs_diff(*speculative) <= 16, "{plain} and {speculative}");
    }
    assert!(plain.iter().skip(1).all(|cached| *cached > 0));
}

#[test]
fn a_full_hit_still_computes_a_token() {
    for len in 1..40 {
        let mut world = World::new(16, 4);
        world.leave_cached(0, len);
        let (_, cached) = world.admit(0, len as usize);
        assert_eq!(cached, (len - 1) / 4 * 4);
    }
}

#[test]
fn copies_computed_at_the_same_time_do_not_break_the_chain() {
    let mut world = World::new(10, 4);
    let (first, _) = world.admit(0, 8);
    let (second, _) = world.admit(0, 8);
    for id in [first, second] {
        world.reserve(id, 8, 0, Vec::new()).expect("there is room");
    }
    world.collect(first);
    world.collect(second);
    world.check();
    // The second one's blocks 2 and 3 hang below the first one's 0 and 1.
    world.reserve(second, 8, 0, Vec::new()).expect("there is room");
    world.collect(second);
    world.check();
    let (third, cached) = world.admit(0, 17);
    assert_eq!(cached, 16);
    world.release(third);
    world.release(first);
    world.check();
    // All else is used, and then the roots that nobody counts on are: the second one publishes its own from then on.
    let (filler, _) = world.admit(1, 24);
    world.reserve(filler, 24, 0, Vec::new()).expect("6 blocks can be had");
    world.check();
    world.release(filler);
    world.reserve(second, 4, 0, Vec::new()).expect("there is room");
    world.collect(second);
    world.check();
    let (_, cached) = world.admit(0, 21);
    assert_eq!(cached, 20);
    world.check();
}

#[test]
fn a_serial_names_one_filling() {
    let mut kv = KvManager::new(1, 4, true);
    let mut keys = Vec::new();
    for round in 0..3 {
        let id = RequestId(round);
        kv.admit(id, &[round as TokenId; 5]);
        kv.reserve(id, 4).expect("the block is free or can be evicted");
        keys.push(kv.block_key(id, 0));
        kv.commit(id, &[round as TokenId; 4]);
        assert_eq!(kv.block_key(id, 0), keys[round as usize]);
        kv.release(id);
    }
    assert!(keys[0] != keys[1] && keys[1] != keys[2]);
    // A hit finds the filling that was committed.
    kv.admit(RequestId(9), &[2; 5]);
    assert_eq!(kv.block_key(RequestId(9), 0), keys[2]);
}

#[test]
fn without_a_prefix_cache_nothing_is_found() {
    let mut kv = KvManager::new(8, 4, false);
    kv.admit(RequestId(0), &[1; 9]);
    kv.reserve(RequestId(0), 9).expect("there is room");
    kv.commit(RequestId(0), &[1; 9]);
    kv.release(RequestId(0));
    assert_eq!(kv.admit(RequestId(1), &[1; 9]), 0);
    kv.check();
}

#[test]
fn too_few_blocks_is_a_value_with_both_numbers() {
    let mut kv = KvManager::new(2, 4, true);
    kv.admit(RequestId(0), &[1; 9]);
    assert_eq!(kv.room(RequestId(0), 0), 8);
    assert_eq!(kv.room(RequestId(0), 1), 4);
    let error = kv.reserve(RequestId(0), 9).expect_err("9 tokens need 3 blocks");
    assert_eq!(error.to_string(), "expected 3 free blocks, got 2");
}
