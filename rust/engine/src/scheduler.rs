//! Who computes what in a step. Requests join and leave at any step; a prompt is computed in chunks beside the others'
//! decoding; every step's worst case is reserved here, so nothing fails for space later (invariant I3).

mod sequence;

use std::collections::VecDeque;
use std::sync::Arc;

use crate::batch::{Batch, Entry, Settled, Work};
use crate::error::EngineError;
use crate::kv::KvManager;
use crate::metrics::Counts;
use crate::request::{FinishReason, Request, RequestId};
use crate::stream::TokenSink;
use crate::text::TokenTable;
use sequence::{Flight, Need, Sequence};

/// Limits of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Most requests that hold blocks at a time. Never more than `max_batch_tokens`, so that each can have a row.
    pub max_batch: usize,
    /// Most rows of a step, draft nodes included.
    pub max_batch_tokens: u32,
    /// Most tokens of one prompt in a step.
    pub chunk: Option<u32>,
    /// Most draft nodes of one request in a step; 0 without a drafter.
    pub max_draft_nodes: u16,
    /// Steps that one request may have under way: 1 if a cycle delivers at once, 2 if one call late.
    pub max_in_flight: u32,
}

/// The requests: waiting, then running in the order of their arrival, then ended.
pub struct Scheduler {
    config: SchedulerConfig,
    table: Arc<TokenTable>,
    waiting: VecDeque<Sequence>,
    /// In the order of admission, which is that of arrival. Ended ones stay until no step of theirs is under way.
    running: Vec<Sequence>,
    /// Ended while they waited.
    left: Vec<RequestId>,
    counts: Counts,
}

/// An entry in the making: its blocks are reserved, its draft nodes are not.
struct Planned {
    /// Its sequence in `running`.
    index: usize,
    work: Work,
    settles: bool,
    /// Tokens reserved.
    reserved: u32,
    num_tokens: u32,
    draft_budget: u16,
}

/// A step in the making.
#[derive(Default)]
struct Plan {
    entries: Vec<Planned>,
    evicted: Vec<RequestId>,
    /// Rows left for prompt chunks.
    chunk_tokens: u32,
    /// A running request lacked blocks: nobody is admitted.
    is_tight: bool,
}

impl Scheduler {
    /// Without requests. `table` is read for stop strings.
    pub fn new(config: SchedulerConfig, table: Arc<TokenTable>) -> Self {
        assert!(config.max_batch > 0 && config.max_batch_tokens > 0, "a step has room for a row");
        assert!(config.max_in_flight > 0 && config.chunk != Some(0), "a request can go on");
        let max_batch = config.max_batch.min(config.max_batch_tokens as usize);
        Self {
            config: SchedulerConfig { max_batch, ..config },
            table,
            waiting: VecDeque::new(),
            running: Vec::new(),
            left: Vec::new(),
            counts: Counts::default(),
        }
    }

    /// Queues a request.
    pub fn submit(&mut self, request: Request, sink: Box<dyn TokenSink>) -> RequestId {
        assert!(!request.prompt.is_empty(), "a prompt has a token");
        let id = request.id;
        let sequence = Sequence::new(request, sink, &self.table);
        let is_full = sequence.len() >= sequence.request.max_len;
        self.waiting.push_back(sequence);
        if is_full {
            self.end_waiting(self.waiting.len() - 1, FinishReason::Length);
        }
        id
    }

    /// Ends a request, unless it has ended. What is under way for it will be dropped on arrival.
    pub fn cancel(&mut self, request: RequestId) {
        if let Some(index) = self.waiting.iter().position(|sequence| sequence.id() == request) {
            self.end_waiting(index, FinishReason::Cancelled);
        } else if let Some(index) = self.running.iter().position(|sequence| sequence.id() == request) {
            self.end_running(index, FinishReason::Cancelled);
        }
    }

    /// Ends every request.
    pub fn cancel_all(&mut self) {
        let requests: Vec<RequestId> = self.waiting.iter().chain(&self.running).map(Sequence::id).collect();
        for request in requests {
            self.cancel(request);
        }
    }

    /// Plans a step and reserves its blocks. The batch is empty if nothing can be started.
    pub fn schedule(&mut self, kv: &mut KvManager) -> Batch {
        self.cancel_closed();
        let mut plan = Plan { chunk_tokens: self.chunk_tokens(), ..Plan::default() };
        self.plan_running(kv, &mut plan);
        self.plan_waiting(kv, &mut plan);
        self.plan_drafts(kv, &mut plan);
        let entries = plan.entries.into_iter().map(|planned| {
            let sequence = &mut self.running[planned.index];
            let Planned { work, settles, num_tokens, draft_budget, .. } = planned;
            sequence.flights.push_back(Flight { settles, num_tokens, draft_budget });
            Entry { request: Arc::clone(&sequence.request), work, draft_budget, settles }
        });
        Batch { entries: entries.collect(), evicted: plan.evicted }
    }

    /// Takes in what a step did for one request. Results of a request that has ended are dropped.
    pub fn advance(&mut self, settled: Settled) {
        let Some(index) = self.running.iter().position(|sequence| sequence.id() == settled.request) else { return };
        let sequence = &mut self.running[index];
        let flight = sequence.flights.pop_front().expect("a result belongs to an entry under way");
        if sequence.is_ended() {
            return;
        }
        match settled.outcome {
            Ok(progress) => {
                sequence.advance(flight, &progress);
                if sequence.is_ended() {
                    self.counts.add(&sequence.counts);
                }
            }
            Err(error) => self.end_running(index, FinishReason::Error(error)),
        }
    }

    /// Gives back the blocks of ended requests, each once no step under way can write to them (HC-082). The answer
    /// names the requests that are gone.
    pub fn retire(&mut self, kv: &mut KvManager) -> Vec<RequestId> {
        let mut gone = std::mem::take(&mut self.left);
        self.running.retain(|sequence| {
            let is_gone = sequence.is_ended() && sequence.flights.is_empty();
            if is_gone {
                kv.release(sequence.id());
                gone.push(sequence.id());
            }
            !is_gone
        });
        gone
    }

    /// Whether there is nothing left to do.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.left.is_empty()
    }

    /// Counts of all requests that have ended.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Requests that hold blocks.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Requests that hold none yet, or none any more.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    fn end_waiting(&mut self, index: usize, reason: FinishReason) {
        let mut sequence = self.waiting.remove(index).expect("the caller found it");
        sequence.end(reason, &[]);
        self.counts.add(&sequence.counts);
        self.left.push(sequence.id());
    }

    fn end_running(&mut self, index: usize, reason: FinishReason) {
        let sequence = &mut self.running[index];
        if !sequence.is_ended() {
            sequence.end(reason, &[]);
            self.counts.add(&sequence.counts);
        }
    }

    fn cancel_closed(&mut self) {
        for index in (0..self.waiting.len()).rev() {
            if self.waiting[index].is_closed() {
                self.end_waiting(index, FinishReason::Cancelled);
            }
        }
        for index in 0..self.running.len() {
            if self.running[index].is_closed() {
                self.end_running(index, FinishReason::Cancelled);
            }
        }
    }

    fn needs(&self) -> impl Iterator<Item = Need> {
        self.running.iter().filter_map(|sequence| sequence.need(self.config.max_in_flight))
    }

    fn chunk_of(&self, num_tokens: u32) -> u32 {
        num_tokens.min(self.config.chunk.unwrap_or(u32::MAX))
    }

    /// Rows for prompt chunks in this step. Roots and their draft nodes come first, but leave prompts a quarter of the
    /// step: enough that they never wait long, and little enough that decoding stays the rule.
    fn chunk_tokens(&self) -> u32 {
        let rows = self.config.max_batch_tokens;
        let num_roots = self.needs().filter(|need| need.is_root()).count() as u32;
        let wanted_nodes = num_roots.saturating_mul(u32::from(self.config.max_draft_nodes));
        let running = self.needs().map(|need| match need {
            Need::Known { num_tokens, .. } if num_tokens > 1 => self.chunk_of(num_tokens),
            _ => 0,
        });
        let free = self.config.max_batch.saturating_sub(self.running.len());
        let joining = self.waiting.iter().take(free).map(|sequence| self.chunk_of(sequence.len()));
        let wanted = running.chain(joining).fold(0, u32::saturating_add);
        let left = rows.saturating_sub(num_roots);
        left.saturating_sub(wanted_nodes).max(wanted.min(rows.div_ceil(4))).min(left)
    }

    /// Goes on with the running requests, the oldest first. If one lacks blocks, younger ones are preempted; if those
    /// have work under way, none of them gets more until they can be. So the oldest always goes on.
    fn plan_running(&mut self, kv: &mut KvManager, plan: &mut Plan) {
        let mut index = 0;
        while index < self.running.len() {
            let Some(need) = self.running[index].need(self.config.max_in_flight) else {
                index += 1;
                continue;
            };
            if self.running[index].flights.is_empty() && self.running[index].len() > kv.num_slots() {
                let error = too_long(&self.running[index], kv);
                self.end_running(index, FinishReason::Error(error));
                index += 1;
                continue;
            }
            while !self.plan_entry(index, need, kv, plan) {
                // What is under way gives a later chance, with the true length instead of the longest.
                if !self.running[index].flights.is_empty() {
                    break;
                }
                plan.is_tight = true;
                if !self.preempt_behind(index, kv, plan) {
                    return;
                }
            }
            index += 1;
        }
    }

    /// Adds a running request's entry; false if there are too few blocks.
    fn plan_entry(&mut self, index: usize, need: Need, kv: &mut KvManager, plan: &mut Plan) -> bool {
        let sequence = &self.running[index];
        let planned = match need {
            Need::Known { start, num_tokens } => {
                let chunk = if need.is_root() { 1 } else { self.chunk_of(num_tokens).min(plan.chunk_tokens) };
                if chunk == 0 {
                    return true;
                }
                let end = start + chunk;
                let token_ids = sequence.token_ids[start as usize..end as usize].to_vec();
                let settles = end == sequence.len();
                let work = Work::Known { start, token_ids };
                Planned { index, work, settles, reserved: end, num_tokens: chunk, draft_budget: 0 }
            }
            Need::OnDevice { longest } => {
                let work = Work::OnDevice;
                Planned { index, work, settles: true, reserved: longest, num_tokens: 1, draft_budget: 0 }
            }
        };
        if kv.reserve(sequence.id(), planned.reserved).is_err() {
            return false;
        }
        if !need.is_root() {
            plan.chunk_tokens -= planned.num_tokens;
        }
        plan.entries.push(planned);
        true
    }

    /// Takes the blocks of the most recently admitted request behind `index` that has nothing under way.
    fn preempt_behind(&mut self, index: usize, kv: &mut KvManager, plan: &mut Plan) -> bool {
        let is_victim = |sequence: &Sequence| !sequence.is_ended() && sequence.flights.is_empty();
        let Some(victim) = (index + 1..self.running.len()).rev().find(|victim| is_victim(&self.running[*victim]))
        else {
            return false;
        };
        let mut sequence = self.running.remove(victim);
        sequence.preempt();
        kv.release(sequence.id());
        plan.evicted.push(sequence.id());
        self.waiting.push_front(sequence);
        true
    }

    /// Admits waiting requests in order, each if all of its tokens fit now.
    fn plan_waiting(&mut self, kv: &mut KvManager, plan: &mut Plan) {
        while !plan.is_tight && plan.chunk_tokens > 0 && self.running.len() < self.config.max_batch {
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            if sequence.len() > kv.num_slots() {
                let error = too_long(&sequence, kv);
                self.waiting.push_front(sequence);
                self.end_waiting(0, FinishReason::Error(error));
                continue;
            }
            let id = sequence.id();
            let cached = kv.admit(id, &sequence.token_ids);
            // A block for each running request stays free, or the newcomer would soon be preempted for their roots.
            if kv.room(id, self.running.len() as u32) < sequence.len() {
                kv.release(id);
                self.waiting.push_front(sequence);
                return;
            }
            sequence.computed = cached;
            if sequence.counts.num_preemptions == 0 {
                sequence.counts.num_cached_tokens = u64::from(cached);
            }
            let need = Need::Known { start: cached, num_tokens: sequence.len() - cached };
            self.running.push(sequence);
            if need.is_root() {
                plan.chunk_tokens -= 1;
            }
            let has_room = self.plan_entry(self.running.len() - 1, need, kv, plan);
            assert!(has_room, "a request is admitted if all of its tokens fit");
        }
    }

    /// Hands out what rows and blocks are left to draft nodes: each entry at most an even share of the rows that the
    /// ones before it left.
    fn plan_drafts(&self, kv: &mut KvManager, plan: &mut Plan) {
        let used: u32 = plan.entries.iter().map(|planned| planned.num_tokens).sum();
        let mut rows = self.config.max_batch_tokens - used;
        let mut num_left = plan.entries.iter().filter(|planned| planned.settles).count() as u32;
        // While steps are under way, each running request's next root may need a block before the nodes' blocks are
        // back; without it, draft nodes would cause preemption.
        let kept = if self.config.max_in_flight > 1 { self.running.len() as u32 } else { 0 };
        for planned in plan.entries.iter_mut().filter(|planned| planned.settles) {
            let sequence = &self.running[planned.index];
            let share = rows / num_left;
            num_left -= 1;
            let space = kv.room(sequence.id(), kept).saturating_sub(planned.reserved);
            let limit = sequence.draft_limit().unwrap_or(0).min(u32::from(self.config.max_draft_nodes));
            let budget = limit.min(share).min(space);
            if budget == 0 {
                continue;
            }
            rows -= budget;
            planned.draft_budget = budget as u16;
            let reserved = (planned.reserved + budget).min(sequence.request.max_len);
            kv.extend(sequence.id(), reserved).expect("the room was asked for");
        }
    }

    /// Asserts what holds between steps.
    pub fn check(&self, kv: &KvManager) {
        assert!(self.running.len() <= self.config.max_batch, "as many run as may");
        for sequence in &self.running {
            assert!(kv.is_admitted(sequence.id()), "a running request has a block table");
            assert!(sequence.flights.len() as u32 <= self.config.max_in_flight);
            if sequence.is_ended() {
                continue;
            }
            assert_eq!(kv.computed(sequence.id()), sequence.computed, "computed tokens are committed");
            assert!(sequence.computed < sequence.len(), "the last token has no K/V (I6)");
            assert!(sequence.len() < sequence.request.max_len, "a full request has ended (I9)");
        }
        for sequence in &self.waiting {
            assert!(!kv.is_admitted(sequence.id()), "a waiting request has no blocks");
            assert!(sequence.flights.is_empty() && !sequence.is_ended());
        }
        let mut ids: Vec<RequestId> = self.running.iter().chain(&self.waiting).map(Sequence::id).collect();
        ids.sort_unstable();
        assert!(ids.windows(2).all(|pair| pair[0] != pair[1]), "a request is in one place");
    }
}

fn too_long(sequence: &Sequence, kv: &KvManager) -> EngineError {
    let text =
        format!("expected at most {} tokens in the K/V blocks, got a request of {}", kv.num_slots(), sequence.len());
    EngineError::capacity(text).with_hint("give the engine more memory for K/V, or ask for fewer tokens")
}
