//! Which block holds what. Every request has a block table; its positions have slots from [`KvManager::reserve`] on,
//! and tokens from [`KvManager::commit`] on. Full blocks of settled tokens can be found again by requests that begin
//! alike, and are then shared, read-only and counted (invariant I4).

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use slipstream_kernels::{Slot, SlotMove};

use crate::prefix::BlockPool;
pub use crate::prefix::{BlockId, BlockKey};
use crate::request::{RequestId, TokenId};
use crate::tree::NodeId;

/// The pool has too few blocks left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {needed} free blocks, got {free}")]
pub struct OutOfBlocks {
    /// Blocks to add.
    pub needed: u32,
    /// Blocks that were free or could be evicted.
    pub free: u32,
}

/// One request's block table.
#[derive(Debug, Default)]
struct Table {
    blocks: Vec<BlockId>,
    /// The tokens that have K/V.
    token_ids: Vec<TokenId>,
    /// Tokens that each reservation without its commit needs slots for, oldest first.
    outstanding: VecDeque<u32>,
    /// Blocks whose tokens are known to the prefix cache, and the filling it finds for the last of them. That is
    /// another request's block if both computed it at the same time.
    num_chained: u32,
    chain: Option<BlockKey>,
}

impl Table {
    fn computed(&self) -> u32 {
        self.token_ids.len() as u32
    }
}

/// The blocks of one pool and who has them.
#[derive(Debug)]
pub struct KvManager {
    pool: BlockPool,
    block_size: u32,
    prefix_cache: bool,
    tables: BTreeMap<RequestId, Table>,
}

impl KvManager {
    /// A pool of free blocks. With `prefix_cache`, full blocks can be found again by their tokens.
    pub fn new(num_blocks: u32, block_size: u32, prefix_cache: bool) -> Self {
        assert!(block_size > 0, "a block has slots");
        assert!(num_blocks.checked_mul(block_size).is_some(), "a slot fits 32 bits");
        Self { pool: BlockPool::new(num_blocks), block_size, prefix_cache, tables: BTreeMap::new() }
    }

    /// Gives a request its block table, begun with the cached blocks that hold the start of its prompt. Answers how
    /// many tokens those are: whole blocks, and at least one token short of the prompt, since the last one's row is
    /// what the first draw comes from.
    pub fn admit(&mut self, request: RequestId, prompt: &[TokenId]) -> u32 {
        assert!(!self.tables.contains_key(&request), "{request:?} is admitted once");
        let mut table = Table::default();
        let block_size = self.block_size as usize;
        let cacheable = if self.prefix_cache { prompt.len().saturating_sub(1) / block_size } else { 0 };
        for tokens in prompt.chunks_exact(block_size).take(cacheable) {
            let Some(block) = self.pool.find(table.chain, tokens) else { break };
            self.pool.acquire(block);
            table.blocks.push(block);
            table.token_ids.extend_from_slice(tokens);
            table.chain = Some(self.pool.key(block));
        }
        table.num_chained = table.blocks.len() as u32;
        let computed = table.computed();
        self.tables.insert(request, table);
        computed
    }

    /// Gives slots to all of the positions `0 .. tokens`, or changes nothing. May evict cached blocks that nobody
    /// counts on. Every reservation is followed by one commit, or by the request's release.
    pub fn reserve(&mut self, request: RequestId, tokens: u32) -> Result<(), OutOfBlocks> {
        self.grow(request, tokens)?;
        self.table_mut(request).outstanding.push_back(tokens);
        Ok(())
    }

    /// Makes the request's latest reservation larger, or changes nothing.
    pub fn extend(&mut self, request: RequestId, tokens: u32) -> Result<(), OutOfBlocks> {
        self.grow(request, tokens)?;
        let latest = self.table_mut(request).outstanding.back_mut().expect("a reservation is there to be extended");
        *latest = tokens.max(*latest);
        Ok(())
    }

    fn grow(&mut self, request: RequestId, tokens: u32) -> Result<(), OutOfBlocks> {
        let free = self.pool.num_free();
        let needed = tokens.div_ceil(self.block_size).saturating_sub(self.table(request).blocks.len() as u32);
        if needed > free {
            return Err(OutOfBlocks { needed, free });
        }
        for _ in 0..needed {
            let block = self.pool.allocate().expect("the free blocks were counted");
            self.table_mut(request).blocks.push(block);
        }
        Ok(())
    }

    /// Most tokens that the request could have slots for if `kept` of the free blocks stay free.
    pub fn room(&self, request: RequestId, kept: u32) -> u32 {
        (self.table(request).blocks.len() as u32 + self.num_free().saturating_sub(kept)) * self.block_size
    }

    /// The slots of reserved positions.
    pub fn slots(&self, request: RequestId, positions: Range<u32>) -> impl Iterator<Item = Slot> {
        let table = self.table(request);
        let size = self.block_size;
        // Block by block: a division for every position would cost more than all else in a long context.
        (positions.start / size..positions.end.div_ceil(size)).flat_map(move |index| {
            let (start, first) = (index * size, table.blocks[index as usize].0 * size);
            let (from, to) = (positions.start.max(start) - start, positions.end.min(start + size) - start);
            (first + from..first + to).map(Slot)
        })
    }

    fn slot(&self, table: &Table, position: u32) -> Slot {
        let block = table.blocks[(position / self.block_size) as usize];
        Slot(block.0 * self.block_size + position % self.block_size)
    }

    /// What makes an accepted path contiguous. `root` is the root's position; node `i` was computed in the slot of
    /// position `root + i`, and the path's `d`-th node belongs in that of `root + d`. Parents come first, so a path
    /// moves only downwards and its moves are safe one after another.
    pub fn moves(&self, request: RequestId, root: u32, path: &[NodeId]) -> Vec<SlotMove> {
        let table = self.table(request);
        let slot = |offset: u32| self.slot(table, root + offset);
        (1..)
            .zip(path)
            .filter(|(depth, node)| u32::from(node.0) != *depth)
            .map(|(depth, node)| SlotMove { from: slot(u32::from(node.0)), to: slot(depth) })
            .collect()
    }

    /// These tokens have K/V now, after the ones before. Blocks that they fill are published; blocks that no
    /// reservation still out there needs are given back.
    pub fn commit(&mut self, request: RequestId, token_ids: &[TokenId]) {
        let table = self.tables.get_mut(&request).expect("tokens are committed to an admitted request");
        table.token_ids.extend_from_slice(token_ids);
        assert!(
            table.token_ids.len() <= table.blocks.len() * self.block_size as usize,
            "{request:?} commits tokens whose slots it reserved (I3)"
        );
        table.outstanding.pop_front();
        if self.prefix_cache {
            publish(&mut self.pool, table, self.block_size);
        }
        let needed = table.outstanding.iter().copied().fold(table.computed(), u32::max).div_ceil(self.block_size);
        if (needed as usize) < table.blocks.len() {
            let surplus = table.blocks.split_off(needed as usize);
            self.pool.release(&surplus);
        }
    }

    /// Gives back all of a request's blocks. Published ones stay until their space is needed.
    pub fn release(&mut self, request: RequestId) {
        let table = self.tables.remove(&request).expect("an admitted request is released, and once");
        self.pool.release(&table.blocks);
    }

    /// Tokens of a request that have K/V.
    pub fn computed(&self, request: RequestId) -> u32 {
        self.table(request).computed()
    }

    /// Whether the request has a block table.
    pub fn is_admitted(&self, request: RequestId) -> bool {
        self.tables.contains_key(&request)
    }

    /// Blocks that can be reserved: free ones and cached ones that nobody counts on.
    pub fn num_free(&self) -> u32 {
        self.pool.num_free()
    }

    /// Blocks of the pool.
    pub fn num_blocks(&self) -> u32 {
        self.pool.num_blocks()
    }

    /// Slots of a block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Slots of the pool.
    pub fn num_slots(&self) -> u32 {
        self.num_blocks() * self.block_size
    }

    /// What is kept beside the `index`-th block of a request's table goes under this key.
    pub fn block_key(&self, request: RequestId, index: u32) -> BlockKey {
        self.pool.key(self.table(request).blocks[index as usize])
    }

    fn table(&self, request: RequestId) -> &Table {
        self.tables.get(&request).expect("a request is admitted before its blocks are asked for")
    }

    fn table_mut(&mut self, request: RequestId) -> &mut Table {
        self.tables.get_mut(&request).expect("a request is admitted before its blocks are asked for")
    }

    /// Asserts invariant I4 and what the pool promises: every block has as many holders as it counts, a shared one is
    /// published and wholly computed by all of them, and every published one is found by the tokens it holds.
    pub fn check(&self) {
        let mut references = vec![0; self.num_blocks() as usize];
        for (request, table) in &self.tables {
            let capacity = table.blocks.len() as u32 * self.block_size;
            assert!(table.computed() <= capacity, "{request:?} has a slot for every token");
            assert!(table.outstanding.iter().all(|tokens| *tokens <= capacity), "{request:?} keeps what it reserved");
            assert!(table.num_chained * self.block_size <= table.computed(), "only full blocks are published (HC-035)");
            let mut blocks = table.blocks.clone();
            blocks.sort_unstable();
            assert!(blocks.windows(2).all(|pair| pair[0] != pair[1]), "{request:?} has each block once");
            let mut chain = None;
            for (index, block) in table.blocks.iter().enumerate() {
                references[block.0 as usize] += 1;
                let key = self.pool.key(*block);
                let end = (index + 1) * self.block_size as usize;
                if end > table.token_ids.len() {
                    assert_eq!(self.pool.references(*block), 1, "{block:?} is still written, so it has one owner (I4)");
                    assert!(!self.pool.is_published(key), "{block:?} is not full, so it is not published");
                    continue;
                }
                let found = self.pool.find(chain, &table.token_ids[end - self.block_size as usize..end]);
                if self.pool.is_published(key) {
                    assert_eq!(found, Some(*block), "{block:?} is found by the tokens it holds");
                }
                // Past a block that cannot be found there is none that can.
                chain = found.map(|block| self.pool.key(block)).or(Some(BlockKey { block: *block, serial: u64::MAX }));
            }
        }
        self.pool.check(&references);
    }
}

/// Publishes the full blocks that are not yet. If the chain was evicted meanwhile, it is begun anew with the request's
/// own blocks.
fn publish(pool: &mut BlockPool, table: &mut Table, block_size: u32) {
    if table.chain.is_some_and(|chain| !pool.is_published(chain)) {
        table.chain = None;
        table.num_chained = 0;
    }
    let full = table.token_ids.chunks_exact(block_size as usize).zip(&table.blocks);
    for (tokens, block) in full.skip(table.num_chained as usize) {
        table.chain = Some(pool.publish(*block, table.chain, tokens));
        table.num_chained += 1;
    }
}
