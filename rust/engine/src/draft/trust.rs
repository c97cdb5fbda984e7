//! How far a drafter's estimates are to be believed, learned from each request.
//!
//! A drafter says how likely each child of the root is the target's next token. Over many steps these chances should add
//! up to how often one of the children was it; where they do not, every node's chance is lowered by that factor, level by
//! level. A request whose drafter cannot promise enough even for a sure guess pauses, and is tried again now and then.

use std::collections::HashMap;

use super::grow::{Grown, TreeShape};
use crate::budget::Budget;
use crate::request::{RequestId, TokenId};
use crate::tree::NodeId;

/// How much a step counts after the next one.
const MEMORY: f32 = 0.9;
/// Steps believed before the first: as many hits as promised.
const PRIOR: f32 = 4.0;
/// A request that pauses is tried again after so many steps.
const PAUSE: u32 = 16;

#[derive(Clone, Copy, Debug)]
struct Record {
    hits: f32,
    promised: f32,
    num_paused: u32,
}

/// The records of all requests.
#[derive(Debug, Default)]
pub(super) struct Trust {
    records: HashMap<RequestId, Record>,
}

impl Trust {
    /// The log of the factor on every chance of a request's next tree; none if it pauses.
    pub(super) fn factor(&mut self, request: RequestId, shape: TreeShape) -> Option<f32> {
        if shape.budget == Budget::UNLIMITED {
            return Some(0.0);
        }
        let fresh = Record { hits: PRIOR, promised: PRIOR, num_paused: 0 };
        let record = self.records.entry(request).or_insert(fresh);
        let factor = (record.hits / record.promised).clamp(0.01, 1.0).ln();
        if shape.budget.is_worth(factor) || record.num_paused == PAUSE {
            record.num_paused = 0;
            return Some(factor);
        }
        record.num_paused += 1;
        None
    }

    /// Learns from one step: the tree as it was grown, and the token that followed its root.
    pub(super) fn learn(&mut self, grown: &Grown, next: Option<TokenId>) {
        let (Some(record), Some(next)) = (self.records.get_mut(&grown.seed.request), next) else {
            return;
        };
        let tree = &grown.whole;
        let children = tree.nodes().take_while(|node| tree.parent(*node) == NodeId::ROOT);
        let promised: f32 = children.map(|node| (tree.score(node) - grown.seed.trust).exp()).sum();
        let is_hit = tree.child(NodeId::ROOT, next).is_some();
        record.hits = record.hits * MEMORY + f32::from(u8::from(is_hit));
        record.promised = record.promised * MEMORY + promised.min(1.0);
    }

    pub(super) fn forget(&mut self, request: RequestId) {
        self.records.remove(&request);
    }
}
