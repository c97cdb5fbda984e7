//! One request's tokens, where its work stands, and when it is over.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::batch::Progress;
use crate::metrics::Counts;
use crate::request::{FinishReason, Request, RequestId, TokenId};
use crate::stream::{Closed, Emitted, Finish, TokenSink};
use crate::text::{TextStream, TokenTable};

/// An entry whose result has not been collected.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    pub(super) settles: bool,
    /// Tokens it computes, without its draft nodes.
    pub(super) num_tokens: u32,
    pub(super) draft_budget: u16,
}

/// What the next entry of a sequence computes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Need {
    /// Tokens from a position on, to the last one known.
    Known { start: u32, num_tokens: u32 },
    /// The root that a step under way draws. `longest` is the most tokens that the sequence can have then.
    OnDevice { longest: u32 },
}

impl Need {
    /// One row and its draft nodes, as opposed to a chunk that can be made shorter.
    pub(super) fn is_root(self) -> bool {
        matches!(self, Self::OnDevice { .. } | Self::Known { num_tokens: 1, .. })
    }
}

pub(super) struct Sequence {
    pub(super) request: Arc<Request>,
    sink: Box<dyn TokenSink>,
    /// Prompt and output. All but the last have K/V, or will have once what is under way is done (invariant I6).
    pub(super) token_ids: Vec<TokenId>,
    /// Only with stop strings.
    text: Option<TextStream>,
    pub(super) counts: Counts,
    /// Tokens with K/V, as far as results have been collected.
    pub(super) computed: u32,
    /// Oldest first.
    pub(super) flights: VecDeque<Flight>,
    is_ended: bool,
}

impl Sequence {
    pub(super) fn new(request: Request, sink: Box<dyn TokenSink>, table: &Arc<TokenTable>) -> Self {
        let stops = &request.params.stop;
        let text = (!stops.is_empty()).then(|| TextStream::new(Arc::clone(table), stops.iter().cloned().collect()));
        let counts = Counts { num_prompt_tokens: request.prompt.len() as u64, ..Counts::default() };
        Self {
            token_ids: request.prompt.clone(),
            request: Arc::new(request),
            sink,
            text,
            counts,
            computed: 0,
            flights: VecDeque::new(),
            is_ended: false,
        }
    }

    pub(super) fn id(&self) -> RequestId {
        self.request.id
    }

    pub(super) fn len(&self) -> u32 {
        self.token_ids.len() as u32
    }

    pub(super) fn is_ended(&self) -> bool {
        self.is_ended
    }

    pub(super) fn is_closed(&self) -> bool {
        self.sink.is_closed()
    }

    fn num_settling(&self) -> u32 {
        self.flights.iter().filter(|flight| flight.settles).count() as u32
    }

    /// What there is to compute beyond what is under way.
    pub(super) fn need(&self, max_in_flight: u32) -> Option<Need> {
        if self.is_ended || self.flights.len() as u32 >= max_in_flight {
            return None;
        }
        if self.num_settling() == 0 {
            let start = self.computed + self.flights.iter().map(|flight| flight.num_tokens).sum::<u32>();
            return Some(Need::Known { start, num_tokens: self.len() - start });
        }
        // Every step under way gains a token (I7): they may be sure to reach the end.
        self.draft_limit()?;
        let gain: u32 =
            self.flights.iter().filter(|flight| flight.settles).map(|f| u32::from(f.draft_budget) + 1).sum();
        Some(Need::OnDevice { longest: (self.len() + gain).min(self.request.max_len) })
    }

    /// Most draft nodes of the next entry: a path and the next token must not pass the end. `None` if there is no room
    /// for a next token either. A root on the device is taken to be as early as it can be; whoever finds it further on
    /// leaves out what would pass the end then.
    pub(super) fn draft_limit(&self) -> Option<u32> {
        let left = self.request.max_len.checked_sub(self.len() + self.num_settling() + 1)?;
        Some(self.request.params.max_draft_nodes.map_or(left, |limit| left.min(limit)))
    }

    /// Its blocks are taken away: everything is computed again, as one prompt.
    pub(super) fn preempt(&mut self) {
        assert!(self.flights.is_empty(), "blocks are not taken from under a step (HC-082)");
        self.computed = 0;
        self.counts.num_preemptions += 1;
    }

    /// Takes in what a step did.
    pub(super) fn advance(&mut self, flight: Flight, progress: &Progress) {
        if !flight.settles {
            assert!(progress.token_ids.is_empty(), "nothing is drawn while the prompt goes on");
            self.computed += flight.num_tokens;
            assert_eq!(progress.computed, self.computed, "a chunk computes its tokens");
            return;
        }
        let settled = &progress.token_ids;
        let num_accepted = usize::from(progress.num_accepted);
        assert_eq!(settled.len(), num_accepted + 1, "a step settles its path and the next token (I7)");
        let mut emitted = Vec::with_capacity(settled.len());
        let mut reason = None;
        for (index, token) in settled.iter().enumerate() {
            self.token_ids.push(*token);
            emitted.push(Emitted { token: *token, is_accepted: index < num_accepted });
            reason = self.reason_to_end(*token);
            if reason.is_some() {
                break;
            }
        }
        let num_cut = (settled.len() - emitted.len()) as u64;
        self.counts.count_step(progress.num_accepted, progress.num_drafted, progress.tree_depth, num_cut);
        if let Some(reason) = reason {
            self.end(reason, &emitted);
            return;
        }
        self.computed = progress.computed;
        assert_eq!(self.computed + 1, self.len(), "only the last token has no K/V (I6)");
        if self.sink.emit(&emitted, None) == Err(Closed) {
            self.end(FinishReason::Cancelled, &[]);
        }
    }

    /// Whether the output is over with the token just added. Stop tokens need no look at `min_tokens`: before it they
    /// are never drawn.
    fn reason_to_end(&mut self, token: TokenId) -> Option<FinishReason> {
        let num_output = self.token_ids.len() - self.request.prompt.len();
        let may_stop = num_output >= self.request.params.min_tokens as usize;
        let ends_text = self.text.as_mut().is_some_and(|text| text.push(token, may_stop).stopped);
        if ends_text || self.request.stop_token_ids.contains(&token) {
            return Some(FinishReason::Stop);
        }
        (self.len() >= self.request.max_len).then_some(FinishReason::Length)
    }

    /// The end of the stream, with the last tokens.
    pub(super) fn end(&mut self, reason: FinishReason, last: &[Emitted]) {
        assert!(!self.is_ended, "a request ends once");
        self.is_ended = true;
        let finish = Finish { reason, counts: self.counts.clone() };
        // A reader that left does not miss it.
        let _ = self.sink.emit(last, Some(finish));
    }
}
