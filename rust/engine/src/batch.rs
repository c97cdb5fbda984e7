//! What the scheduler hands to a cycle, and what comes back: values, nothing else.

use std::sync::Arc;

use crate::error::EngineError;
use crate::request::{Request, RequestId, TokenId};

/// The tokens an entry computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Positions `start ..` get these tokens; the last one is the root of the draft tree.
    Known {
        /// Position of the first token.
        start: u32,
        /// At least one token.
        token_ids: Vec<TokenId>,
    },
    /// The root is the last token of a step that is still under way; only the cycle knows it and its position.
    OnDevice,
}

/// One request's work in one step.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Whose work.
    pub request: Arc<Request>,
    /// The tokens to compute.
    pub work: Work,
    /// Most draft nodes below the root.
    pub draft_budget: u16,
    /// False only while the prompt goes on: then nothing is drawn.
    pub settles: bool,
}

/// One step's work, at most one entry per request.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// The entries.
    pub entries: Vec<Entry>,
    /// Requests whose blocks were taken away before this step (preempted): what a drafter keeps per slot is gone.
    pub evicted: Vec<RequestId>,
}

/// What one step did for one request.
#[derive(Clone, Debug)]
pub struct Settled {
    /// Whose.
    pub request: RequestId,
    /// How it went on, or why it cannot.
    pub outcome: Result<Progress, EngineError>,
}

/// Tokens that a step settled, in order: the accepted path, then the next token. Empty while the prompt goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Tokens of the sequence that have K/V now.
    pub computed: u32,
    /// The settled tokens.
    pub token_ids: Vec<TokenId>,
    /// How many of them, from the first, were accepted draft nodes.
    pub num_accepted: u16,
    /// Nodes that were verified.
    pub num_drafted: u16,
    /// Depth of the tree that was verified.
    pub tree_depth: u16,
}

impl Entry {
    /// Position of the first token, and the tokens.
    ///
    /// # Panics
    /// If the root is still on the device: a host cycle settles a step before it runs the next.
    pub fn known(&self) -> (u32, &[TokenId]) {
        match &self.work {
            Work::Known { start, token_ids } => (*start, token_ids),
            Work::OnDevice => panic!("a host cycle runs entries whose root is known"),
        }
    }

    /// The root: the last of the tokens to compute.
    pub fn root_token(&self) -> TokenId {
        *self.known().1.last().expect("an entry computes at least one token")
    }

    /// The root's position.
    pub fn root_position(&self) -> u32 {
        let (start, token_ids) = self.known();
        start + token_ids.len() as u32 - 1
    }
}
