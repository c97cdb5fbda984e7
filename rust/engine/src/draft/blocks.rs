//! How far a drafter's own K/V is valid in each block, so that a prefix hit can go on from it.

use std::collections::HashMap;

use crate::kv::{BlockId, BlockKey, KvManager};
use crate::request::RequestId;

/// Filled positions of blocks. A record counts only for the filling of the block that it was made for.
#[derive(Debug)]
pub(super) struct BlockLog<T> {
    records: HashMap<BlockId, Record<T>>,
}

#[derive(Debug)]
struct Record<T> {
    serial: u64,
    filled: u32,
    kept: HashMap<u32, T>,
}

impl<T: Clone> BlockLog<T> {
    pub(super) fn new() -> Self {
        Self { records: HashMap::new() }
    }

    fn record(&mut self, key: BlockKey) -> &mut Record<T> {
        let fresh = || Record { serial: key.serial, filled: 0, kept: HashMap::new() };
        let record = self.records.entry(key.block).or_insert_with(fresh);
        if record.serial != key.serial {
            *record = fresh();
        }
        record
    }

    /// The K/V of a request's position is there now. Positions are told in order; a gap ends what counts as filled.
    pub(super) fn fill(&mut self, kv: &KvManager, request: RequestId, position: u32) {
        let offset = position % kv.block_size();
        let record = self.record(kv.block_key(request, position / kv.block_size()));
        if record.filled == offset {
            record.filled = offset + 1;
        }
    }

    /// Keeps something with a request's position.
    pub(super) fn keep(&mut self, kv: &KvManager, request: RequestId, position: u32, value: T) {
        let offset = position % kv.block_size();
        self.record(kv.block_key(request, position / kv.block_size())).kept.insert(offset, value);
    }

    /// What was kept with a position.
    pub(super) fn kept(&self, kv: &KvManager, request: RequestId, position: u32) -> Option<T> {
        let key = kv.block_key(request, position / kv.block_size());
        let record = self.records.get(&key.block).filter(|record| record.serial == key.serial)?;
        record.kept.get(&(position % kv.block_size())).cloned()
    }

    /// How many of a request's first `len` positions are filled without a gap.
    pub(super) fn filled(&self, kv: &KvManager, request: RequestId, len: u32) -> u32 {
        let size = kv.block_size();
        let mut filled = 0;
        while filled < len {
            let key = kv.block_key(request, filled / size);
            let here = self
                .records
                .get(&key.block)
                .filter(|record| record.serial == key.serial)
                .map_or(0, |record| record.filled);
            filled += here;
            if here < size {
                break;
            }
        }
        filled.min(len)
    }
}
