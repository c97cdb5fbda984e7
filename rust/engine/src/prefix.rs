//! The blocks of one pool: which are free, how many sequences count on each, and which full ones can be found again by
//! their tokens.
//!
//! A published block is keyed by its own tokens and by the *filling* of the block before it, so the hash that finds it
//! is chained over the whole prefix, and what it finds is compared token by token: two prefixes with one hash cannot
//! be taken for each other. Published blocks that nobody counts on stay until their space is needed.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use crate::request::TokenId;

/// A block of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    fn index(self) -> usize {
        self.0 as usize
    }
}

/// One filling of a block. A block has a new serial each time it is allocated, so what is kept beside a block under
/// this key is never taken for what the block holds later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey {
    /// The block.
    pub block: BlockId,
    /// The filling.
    pub serial: u64,
}

/// What a published block is found by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Link {
    /// The filling of the block before it; `None` at the start of a sequence.
    parent: Option<BlockKey>,
    tokens: Box<[TokenId]>,
}

#[derive(Debug)]
struct Published {
    link: Link,
    /// Blocks before it.
    depth: u32,
    /// Published blocks right after it.
    children: Vec<BlockId>,
}

#[derive(Debug, Default)]
struct Block {
    /// Sequences that have it in their block table.
    references: u32,
    serial: u64,
    published: Option<Published>,
    /// When the last sequence let go of it.
    last_used: u64,
}

/// All blocks of a pool.
#[derive(Debug)]
pub(crate) struct BlockPool {
    blocks: Vec<Block>,
    /// Unreferenced and unpublished; the last one goes first.
    free: Vec<BlockId>,
    index: HashMap<Link, BlockId>,
    /// Unreferenced and published: the least recently used first, and among equals a chain's tail before its root.
    idle: BTreeSet<(u64, Reverse<u32>, BlockId)>,
    clock: u64,
    last_serial: u64,
}

impl BlockPool {
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self {
            blocks: (0..num_blocks).map(|_| Block::default()).collect(),
            free: (0..num_blocks).rev().map(BlockId).collect(),
            index: HashMap::new(),
            idle: BTreeSet::new(),
            clock: 0,
            last_serial: 0,
        }
    }

    pub(crate) fn num_blocks(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Blocks that [`BlockPool::allocate`] can still hand out.
    pub(crate) fn num_free(&self) -> u32 {
        (self.free.len() + self.idle.len()) as u32
    }

    pub(crate) fn key(&self, block: BlockId) -> BlockKey {
        BlockKey { block, serial: self.blocks[block.index()].serial }
    }

    pub(crate) fn references(&self, block: BlockId) -> u32 {
        self.blocks[block.index()].references
    }

    /// A block for new content, referenced once.
    pub(crate) fn allocate(&mut self) -> Option<BlockId> {
        if self.free.is_empty() {
            self.evict();
        }
        let id = self.free.pop()?;
        self.last_serial += 1;
        let block = &mut self.blocks[id.index()];
        block.serial = self.last_serial;
        block.references = 1;
        Some(id)
    }

    /// The published block with these tokens after `parent`.
    pub(crate) fn find(&self, parent: Option<BlockKey>, tokens: &[TokenId]) -> Option<BlockId> {
        self.index.get(&Link { parent, tokens: tokens.into() }).copied()
    }

    /// One more sequence counts on the block.
    pub(crate) fn acquire(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        if block.references == 0 {
            let published = block.published.as_ref().expect("an unreferenced block is taken up only as a cached one");
            self.idle.remove(&(block.last_used, Reverse(published.depth), id));
        }
        block.references += 1;
    }

    /// A sequence lets go of blocks, all at the same moment.
    pub(crate) fn release(&mut self, ids: &[BlockId]) {
        self.clock += 1;
        for id in ids.iter().rev() {
            let block = &mut self.blocks[id.index()];
            assert!(block.references > 0, "only a referenced block is given back");
            block.references -= 1;
            if block.references > 0 {
                continue;
            }
            block.last_used = self.clock;
            match &block.published {
                Some(published) => {
                    self.idle.insert((block.last_used, Reverse(published.depth), *id));
                }
                None => self.free.push(*id),
            }
        }
    }

    /// Whether a filling can still be found.
    pub(crate) fn is_published(&self, key: BlockKey) -> bool {
        let block = &self.blocks[key.block.index()];
        block.serial == key.serial && block.published.is_some()
    }

    /// Makes a full block findable, unless one with the same prefix is: the answer is the one that will be found.
    /// `parent` is published.
    pub(crate) fn publish(&mut self, id: BlockId, parent: Option<BlockKey>, tokens: &[TokenId]) -> BlockKey {
        let link = Link { parent, tokens: tokens.into() };
        if let Some(found) = self.index.get(&link) {
            return self.key(*found);
        }
        let depth = match parent {
            None => 0,
            Some(parent) => {
                let parent = self.blocks[parent.block.index()].published.as_mut();
                let parent = parent.expect("blocks are published in the order of their chain");
                parent.children.push(id);
                parent.depth + 1
            }
        };
        self.index.insert(link.clone(), id);
        let block = &mut self.blocks[id.index()];
        assert!(block.published.is_none(), "a block is published under one prefix");
        block.published = Some(Published { link, depth, children: Vec::new() });
        self.key(id)
    }

    /// Frees one unreferenced cached block, if there is one. A chain loses its tail first: without its root the rest
    /// of it could never be found again.
    fn evict(&mut self) {
        let Some((_, _, mut victim)) = self.idle.first().copied() else { return };
        // Two sequences that computed the same block at the same time leave one of them with an unpublished copy: it
        // publishes its further blocks under the other's, which may have been let go earlier.
        while let Some(child) = self.children(victim).iter().find(|child| self.references(**child) == 0) {
            victim = *child;
        }
        self.unpublish(victim);
    }

    fn children(&self, id: BlockId) -> &[BlockId] {
        self.blocks[id.index()].published.as_ref().map_or(&[], |published| &published.children)
    }

    /// A block and all after it can no longer be found; the unreferenced ones are free then.
    fn unpublish(&mut self, top: BlockId) {
        let parent = self.blocks[top.index()].published.as_ref().and_then(|published| published.link.parent);
        if let Some(parent) = parent.and_then(|key| self.blocks[key.block.index()].published.as_mut()) {
            parent.children.retain(|child| *child != top);
        }
        let mut rest = vec![top];
        while let Some(id) = rest.pop() {
            let block = &mut self.blocks[id.index()];
            let published = block.published.take().expect("a child is published");
            if block.references == 0 {
                self.idle.remove(&(block.last_used, Reverse(published.depth), id));
                self.free.push(id);
            }
            self.index.remove(&published.link);
            rest.extend(published.children);
        }
    }

    /// Asserts what holds between a block's state and the lists. `references` counts each block's holders.
    pub(crate) fn check(&self, references: &[u32]) {
        let mut is_free = vec![false; self.blocks.len()];
        for id in &self.free {
            assert!(!is_free[id.index()], "{id:?} is free once");
            is_free[id.index()] = true;
        }
        let mut num_published = 0;
        let mut num_idle = 0;
        for (index, block) in self.blocks.iter().enumerate() {
            let id = BlockId(index as u32);
            assert_eq!(block.references, references[index], "{id:?} counts its holders");
            assert!(block.serial <= self.last_serial);
            assert_eq!(is_free[index], block.references == 0 && block.published.is_none(), "{id:?} is free if unused");
            let Some(published) = &block.published else {
                assert!(block.references <= 1, "{id:?} is shared, so it is published (I4)");
                continue;
            };
            num_published += 1;
            if block.references == 0 {
                num_idle += 1;
                assert!(self.idle.contains(&(block.last_used, Reverse(published.depth), id)), "{id:?} can be evicted");
            }
            assert_eq!(self.index.get(&published.link), Some(&id), "{id:?} is found by its link");
            match published.link.parent {
                None => assert_eq!(published.depth, 0),
                Some(parent) => {
                    assert!(self.is_published(parent), "the block before {id:?} can be found");
                    assert!(self.children(parent.block).contains(&id), "{id:?} is a child of its parent");
                    let parent = self.blocks[parent.block.index()].published.as_ref();
                    assert_eq!(parent.map(|parent| parent.depth + 1), Some(published.depth));
                }
            }
            for child in &published.children {
                let link = self.blocks[child.index()].published.as_ref().map(|child| child.link.parent);
                assert_eq!(link, Some(Some(self.key(id))), "{child:?} hangs below {id:?}");
            }
        }
        assert_eq!(self.index.len(), num_published);
        assert_eq!(self.idle.len(), num_idle);
        let mut serials: Vec<u64> = self.blocks.iter().map(|block| block.serial).filter(|serial| *serial > 0).collect();
        serials.sort_unstable();
        assert!(serials.windows(2).all(|pair| pair[0] != pair[1]), "a serial names one filling");
    }
}
