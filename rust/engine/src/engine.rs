//! The engine: one step after another.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use crate::cycle::Cycle;
use crate::error::{EngineError, Result};
use crate::kv::KvManager;
use crate::metrics::Counts;
use crate::request::{Request, RequestId, SamplingParams, TokenId};
use crate::scheduler::Scheduler;
use crate::stream::TokenSink;

/// Scheduler, K/V blocks and cycle. One thread owns it all.
pub struct Engine<C: Cycle> {
    scheduler: Scheduler,
    kv: KvManager,
    cycle: C,
}

impl<C: Cycle> Engine<C> {
    /// An engine of these parts.
    pub fn new(scheduler: Scheduler, kv: KvManager, cycle: C) -> Self {
        Self { scheduler, kv, cycle }
    }

    /// Takes a request; its tokens go to `sink`.
    pub fn submit(&mut self, request: Request, sink: Box<dyn TokenSink>) -> RequestId {
        self.scheduler.submit(request, sink)
    }

    /// Ends a request before its time. Nothing happens if it has ended.
    pub fn cancel(&mut self, request: RequestId) {
        self.scheduler.cancel(request);
    }

    /// Ends every request before its time.
    pub fn cancel_all(&mut self) {
        self.scheduler.cancel_all();
    }

    /// One turn: who computes what, the computing, and what became of it.
    pub fn step(&mut self) {
        let batch = self.scheduler.schedule(&mut self.kv);
        self.cycle.submit(batch);
        for settled in self.cycle.collect(&mut self.kv) {
            self.scheduler.advance(settled);
        }
        for request in self.scheduler.retire(&mut self.kv) {
            self.cycle.forget(request);
        }
    }

    /// Whether no request is left.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    /// Counts over all ended requests.
    pub fn counts(&self) -> &Counts {
        self.scheduler.counts()
    }

    /// What is going on now.
    pub fn load(&self) -> Load {
        Load {
            num_running: self.scheduler.num_running(),
            num_waiting: self.scheduler.num_waiting(),
            num_free_blocks: self.kv.num_free(),
            num_blocks: self.kv.num_blocks(),
        }
    }

    /// Asserts every invariant of its parts.
    pub fn check(&self) {
        self.kv.check();
        self.scheduler.check(&self.kv);
    }
}

/// What an engine is busy with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that are computed.
    pub num_running: usize,
    /// Requests that wait for room.
    pub num_waiting: usize,
    /// K/V blocks that could be had at once: free, or cached and unused.
    pub num_free_blocks: u32,
    /// K/V blocks in all.
    pub num_blocks: u32,
}

/// What a model and an engine allow a request, apart from the engine so that any thread can check against it.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Tokens a sequence may hold, prompt included.
    pub max_context: u32,
    /// Tokens the K/V pool holds.
    pub num_slots: u32,
    /// Ids below this can be drawn and prompted.
    pub num_tokens: u32,
    /// The model's end-of-text tokens.
    pub eos_token_ids: Vec<TokenId>,
    /// Texts of special tokens: a stop string that is one of them is a stop token, since it never shows in text.
    pub special_tokens: HashMap<String, TokenId>,
}

impl Limits {
    /// A request out of what a caller asks, or the first thing that is wrong with it.
    pub fn request(&self, id: RequestId, prompt: Vec<TokenId>, mut params: SamplingParams) -> Result<Request> {
        params.validate(self.num_tokens)?;
        if prompt.is_empty() {
            return Err(EngineError::request("expected a prompt of at least one token, got none")
                .with_hint("the model has no token that begins a text, so an empty text cannot be continued"));
        }
        if let Some(token) = prompt.iter().find(|token| **token >= self.num_tokens) {
            return Err(EngineError::request(format!(
                "expected prompt token ids below {}, got {token}",
                self.num_tokens
            )));
        }
        let (limit, what) = if self.num_slots < self.max_context {
            (self.num_slots, "the K/V cache")
        } else {
            (self.max_context, "the context")
        };
        let num_prompt = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        if num_prompt >= limit {
            let message = format!("expected a prompt of fewer tokens than {what} holds ({limit}), got {num_prompt}");
            return Err(if self.num_slots < self.max_context {
                EngineError::capacity(message).with_hint("raise kv_cache_bytes")
            } else {
                EngineError::request(message)
            });
        }
        let max_tokens = params.max_tokens.unwrap_or(u32::MAX);
        let mut stop_token_ids = params.stop_token_ids.clone();
        if !params.ignore_eos {
            stop_token_ids.extend(&self.eos_token_ids);
        }
        params.stop.retain(|stop| match self.special_tokens.get(stop) {
            Some(token) => {
                stop_token_ids.push(*token);
                false
            }
            None => true,
        });
        stop_token_ids.sort_unstable();
        stop_token_ids.dedup();
        let seed = params.seed.unwrap_or_else(|| RandomState::new().hash_one(id.0));
        Ok(Request {
            id,
            max_len: num_prompt.saturating_add(max_tokens).min(limit),
            prompt,
            params,
            seed,
            stop_token_ids: Arc::from(stop_token_ids),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            max_context: 64,
            num_slots: 256,
            num_tokens: 61,
            eos_token_ids: vec![2],
            special_tokens: HashMap::from([("<end>".to_owned(), 5)]),
        }
    }

    fn error(prompt: Vec<TokenId>) -> String {
        let error = limits().request(RequestId(0), prompt, SamplingParams::default()).expect_err("refused");
        assert!(matches!(error, EngineError::Request(_)));
        error.to_string()
    }

    #[test]
    fn hc_075_085_prompts_that_cannot_be_served_are_refused_with_numbers() {
        assert!(error(vec![]).contains("at least one token"));
        assert!(error(vec![1, 61]).contains("below 61, got 61"));
        let long = error(vec![1; 64]);
        assert!(long.contains("(64)") && long.contains("got 64"), "{long}");
        let small = Limits { num_slots: 32, ..limits() };
        let error = small.request(RequestId(0), vec![1; 40], SamplingParams::default()).expect_err("too long");
        assert!(matches!(error, EngineError::Capacity(_)), "{error}");
    }

    #[test]
    fn hc_054_110_token_budgets_end_at_the_context() {
        for max_tokens in [None, Some(1000), Some(u32::MAX)] {
            let params = SamplingParams { max_tokens, ..SamplingParams::default() };
            assert_eq!(limits().request(RequestId(0), vec![1; 63], params).expect("fits").max_len, 64);
        }
    }

    #[test]
    fn hc_055_a_stop_string_that_is_a_special_token_is_a_stop_token() {
        let params = SamplingParams { stop: vec!["<end>".into(), "x".into()], ..SamplingParams::default() };
        let request = limits().request(RequestId(0), vec![1], params).expect("valid");
        assert_eq!(*request.stop_token_ids, [2, 5]);
        assert_eq!(request.params.stop, ["x"]);
    }
}
