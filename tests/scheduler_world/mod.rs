//! Requests, a fake cycle, and what must hold after every step.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use slipstream_engine::batch::{Batch, Progress, Settled, Work};
use slipstream_engine::error::EngineError;
use slipstream_engine::kv::KvManager;
use slipstream_engine::request::{FinishReason, Request, RequestId, SamplingParams, TokenId};
use slipstream_engine::scheduler::{Scheduler, SchedulerConfig};
use slipstream_engine::stream::{Finish, TokenLog, TokenLogReader};
use slipstream_engine::text::TokenTable;
use slipstream_engine::tree::NodeId;
use slipstream_kernels::Slot;

/// The token of a request at a position. Requests whose ids are equal modulo 8 have one text; texts with different
/// numbers part at positions 0, 9, 18 and so on.
pub(crate) fn token(request: u64, position: u32) -> TokenId {
    let text = (request % 8) as u32;
    let parted = if position >= 9 * text { 37 * (text + 1) } else { 0 };
    let mixed = (position.wrapping_mul(0x9e37_79b9) >> 11).wrapping_add(position * 7 + parted);
    mixed % 240
}

/// Each token adds two or three letters.
pub(crate) fn text(token: TokenId) -> String {
    let letter = |value: u32| char::from(b'a' + (value % 26) as u8);
    let mut text = String::from(letter(token));
    text.push(letter(token / 26 + token));
    if token.is_multiple_of(3) {
        text.push(' ');
    }
    text
}

pub(crate) fn table() -> Arc<TokenTable> {
    let bytes: Vec<Box<[u8]>> = (0..256).map(|token| text(token).into_bytes().into()).collect();
    Arc::new(TokenTable { special: vec![false; bytes.len()], bytes, strips_leading_space: false })
}

pub(crate) fn ask(id: u64, prompt_len: u32, max_tokens: u32) -> Request {
    Request {
        id: RequestId(id),
        prompt: (0..prompt_len).map(|position| token(id, position)).collect(),
        params: SamplingParams { max_tokens: Some(max_tokens), ..SamplingParams::default() },
        seed: 0,
        stop_token_ids: Arc::from([]),
        max_len: prompt_len + max_tokens,
    }
}

pub(crate) fn config(max_draft_nodes: u16, max_in_flight: u32) -> SchedulerConfig {
    SchedulerConfig { max_batch: 8, max_batch_tokens: 64, chunk: None, max_draft_nodes, max_in_flight }
}

/// The output by the rules alone: one token after the other, the whole text searched anew each time.
pub(crate) fn expected(request: &Request, table: &TokenTable) -> (Vec<TokenId>, FinishReason) {
    let mut output = Vec::new();
    let mut bytes = Vec::new();
    let mut ignored = 0;
    for position in request.prompt.len() as u32..request.max_len {
        let token = token(request.id.0, position);
        output.push(token);
        bytes.extend_from_slice(table.bytes(token));
        let all = String::from_utf8_lossy(&bytes);
        let may_stop = output.len() >= request.params.min_tokens as usize;
        // A stop string that appears too early is text; what could still begin one later counts on.
        let ends = |stop: &String| all[ignored..].find(stop.as_str()).is_some();
        if may_stop && request.params.stop.iter().any(ends) || request.stop_token_ids.contains(&token) {
            return (output, FinishReason::Stop);
        }
        let held = (ignored..all.len()).filter(|start| all.is_char_boundary(*start)).find(|start| {
            request.params.stop.iter().any(|stop| stop.starts_with(&all[*start..]) && *stop != all[*start..])
        });
        ignored = held.unwrap_or(all.len());
    }
    (output, FinishReason::Length)
}

/// A small generator; the low bits of a SplitMix step are good enough to choose by.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((value ^ (value >> 31)) % u64::from(end.max(1))) as u32
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u32) as usize]
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Pool {
    pub(crate) num_blocks: u32,
    pub(crate) block_size: u32,
}

/// How much of its trees the target accepts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Accept {
    All,
    None,
    Random,
}

/// One entry under way, resolved as a device would: it knows its roots.
struct Job {
    request: RequestId,
    start: u32,
    /// Position after the root.
    end: u32,
    settles: bool,
    num_nodes: u32,
    path: Vec<NodeId>,
    /// Slots of the positions `0 .. end + num_nodes`, as they were at submission.
    slots: Vec<Slot>,
    fails: bool,
}

/// What a reader got, and how it ended.
pub(crate) struct Ending {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) finish: Finish,
}

pub(crate) struct World {
    pub(crate) scheduler: Scheduler,
    pub(crate) kv: KvManager,
    pub(crate) endings: BTreeMap<u64, Ending>,
    config: SchedulerConfig,
    accept: Accept,
    random: Random,
    table: Arc<TokenTable>,
    requests: BTreeMap<u64, Request>,
    readers: BTreeMap<u64, (TokenLogReader, Vec<TokenId>)>,
    closed: BTreeSet<u64>,
    cancelled: BTreeSet<u64>,
    /// Position from which on a request's step fails.
    failures: BTreeMap<u64, u32>,
    failed: BTreeSet<RequestId>,
    under_way: VecDeque<Vec<Job>>,
    /// Tokens of each request, the pending root included, as the device has them.
    lens: HashMap<RequestId, u32>,
    memory: Vec<u64>,
    quiet_steps: u32,
}

/// What the slot of a position holds.
fn content(request: RequestId, position: u32) -> u64 {
    (0..=position).fold(1, |hash: u64, at| {
        (hash ^ u64::from(token(request.0, at))).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
    })
}

impl World {
    pub(crate) fn new(config: SchedulerConfig, pool: Pool, accept: Accept) -> Self {
        let kv = KvManager::new(pool.num_blocks, pool.block_size, true);
        Self {
            scheduler: Scheduler::new(config, table()),
            memory: vec![0; kv.num_slots() as usize],
            kv,
            endings: BTreeMap::new(),
            config,
            accept,
            random: Random(7),
            table: table(),
            requests: BTreeMap::new(),
            readers: BTreeMap::new(),
            closed: BTreeSet::new(),
            cancelled: BTreeSet::new(),
            failures: BTreeMap::new(),
            failed: BTreeSet::new(),
            under_way: VecDeque::new(),
            lens: HashMap::new(),
            quiet_steps: 0,
        }
    }

    pub(crate) fn random(seed: u64) -> Self {
        let mut random = Random(seed);
        let block_size = random.pick(&[1, 2, 4, 7]);
        // From room for about one long request up to room for all.
        let num_slots = random.pick(&[40, 60, 100, 400]);
        let config = SchedulerConfig {
            max_batch: random.pick(&[1, 2, 4, 8]),
            max_batch_tokens: random.pick(&[1, 5, 16, 64, 1000]),
            chunk: random.pick(&[None, Some(1), Some(5), Some(16)]),
            max_draft_nodes: random.pick(&[0, 1, 4, 12]),
            max_in_flight: random.pick(&[1, 2]),
        };
        let accept = random.pick(&[Accept::All, Accept::None, Accept::Random, Accept::Random]);
        let mut world = Self::new(config, Pool { num_blocks: num_slots / block_size, block_size }, accept);
        world.random = random;
        world
    }

    pub(crate) fn submit(&mut self, request: Request) {
        let id = request.id.0;
        let (writer, reader) = TokenLog::open(request.max_len - request.prompt.len() as u32);
        self.readers.insert(id, (reader, Vec::new()));
        self.requests.insert(id, request.clone());
        assert_eq!(self.scheduler.submit(request, Box::new(writer)), RequestId(id));
    }

    pub(crate) fn cancel(&mut self, id: u64) {
        self.cancelled.insert(id);
        self.scheduler.cancel(RequestId(id));
    }

    pub(crate) fn close(&mut self, id: u64) {
        self.closed.insert(id);
        self.readers.remove(&id);
    }

    pub(crate) fn fail_at(&mut self, id: u64, position: u32) {
        self.failures.insert(id, position);
    }

    /// Steps until everything has ended.
    pub(crate) fn run(&mut self) {
        while !self.scheduler.is_idle() {
            self.step();
        }
        self.check_end();
    }

    /// Arrivals, cancellations, readers that leave, and failures at any time, then to the end.
    pub(crate) fn run_random(&mut self) {
        for id in 0..self.random.below(24) as u64 {
            for _ in 0..self.random.below(4) {
                self.step();
            }
            let (prompt_len, max_tokens) = (1 + self.random.below(30), 1 + self.random.below(24));
            let mut request = ask(id, prompt_len, max_tokens);
            if self.random.below(3) == 0 {
                request.stop_token_ids = vec![token(id, prompt_len + self.random.below(max_tokens))].into();
            }
            if self.random.below(3) == 0 {
                let at = prompt_len + self.random.below(max_tokens);
                let text = text(token(id, at)) + &text(token(id, at + 1));
                request.params.stop = vec![text[..2 + self.random.below(2) as usize].to_owned()];
                request.params.min_tokens = self.random.below(max_tokens);
            }
            request.params.max_draft_nodes = self.random.pick(&[None, None, Some(0), Some(3)]);
            self.submit(request);
            let other = u64::from(self.random.below(id as u32 + 1));
            match self.random.below(12) {
                0 => self.cancel(other),
                1 => self.close(other),
                2 => self.fail_at(other, self.requests[&other].prompt.len() as u32 + 9),
                _ => {}
            }
        }
        self.run();
    }

    /// One step of the engine.
    pub(crate) fn step(&mut self) {
        let ended: BTreeSet<u64> = self.endings.keys().copied().collect();
        let batch = self.scheduler.schedule(&mut self.kv);
        self.check_batch(&batch, &ended);
        self.kv.check();
        let before = self.under_way.iter().map(Vec::len).sum::<usize>();
        let is_quiet = batch.entries.is_empty() && before == 0;
        self.start(&batch);
        let late = self.config.max_in_flight as usize - 1;
        while self.under_way.len() > late {
            for job in self.under_way.pop_front().into_iter().flatten() {
                let settled = self.finish(&job);
                self.scheduler.advance(settled);
            }
        }
        for request in self.scheduler.retire(&mut self.kv) {
            self.lens.remove(&request);
        }
        self.kv.check();
        self.scheduler.check(&self.kv);
        self.read();
        self.quiet_steps = if is_quiet { self.quiet_steps + 1 } else { 0 };
        assert!(self.quiet_steps < 3 || self.scheduler.is_idle(), "nothing goes on (HC-091)");
    }

    fn check_batch(&self, batch: &Batch, ended: &BTreeSet<u64>) {
        let mut ids = BTreeSet::new();
        let mut rows = 0;
        for entry in &batch.entries {
            let id = entry.request.id.0;
            assert!(ids.insert(id), "a request has one entry");
            assert!(!ended.contains(&id) && !self.closed.contains(&id), "what has ended computes nothing");
            assert!(entry.settles || entry.draft_budget == 0, "no draft before the prompt is done (HC-039)");
            assert!(entry.draft_budget <= self.config.max_draft_nodes);
            let num_tokens = match &entry.work {
                Work::Known { token_ids, .. } => token_ids.len() as u32,
                Work::OnDevice => 1,
            };
            assert!(num_tokens > 0);
            rows += num_tokens + u32::from(entry.draft_budget);
        }
        assert!(rows <= self.config.max_batch_tokens, "a step has room for its rows");
        assert!(ids.len() <= self.config.max_batch);
    }

    fn start(&mut self, batch: &Batch) {
        for request in &batch.evicted {
            self.lens.remove(request);
        }
        let mut jobs = Vec::new();
        for entry in &batch.entries {
            let request = entry.request.id;
            let (start, end) = match &entry.work {
                Work::Known { start, token_ids } => {
                    let positions = *start..*start + token_ids.len() as u32;
                    let truth: Vec<_> = positions.clone().map(|position| token(request.0, position)).collect();
                    assert_eq!(*token_ids, truth);
                    (positions.start, positions.end)
                }
                Work::OnDevice => (self.lens[&request] - 1, self.lens[&request]),
            };
            let left = entry.request.max_len.saturating_sub(end + 1);
            let limit = u32::from(entry.draft_budget).min(left);
            if matches!(entry.work, Work::Known { .. }) {
                assert_eq!(limit, u32::from(entry.draft_budget), "a path and the next token fit (HC-072)");
            }
            let (num_nodes, path) = self.accept(limit);
            let len = if entry.settles { end + path.len() as u32 + 1 } else { end };
            self.lens.insert(request, len);
            let slots: Vec<Slot> = self.kv.slots(request, 0..end + num_nodes).collect();
            let fails = self.failures.get(&request.0).is_some_and(|position| end > *position);
            jobs.push(Job { request, start, end, settles: entry.settles, num_nodes, path, slots, fails });
        }
        self.under_way.push_back(jobs);
    }

    fn accept(&mut self, limit: u32) -> (u32, Vec<NodeId>) {
        let num_nodes = match self.accept {
            Accept::Random => self.random.below(limit + 1),
            Accept::All | Accept::None => limit,
        };
        let path = (1..=num_nodes as u16).map(NodeId);
        let path = match self.accept {
            Accept::All => path.collect(),
            Accept::None => Vec::new(),
            Accept::Random => path.filter(|_| self.random.below(2) == 0).collect(),
        };
        (num_nodes, path)
    }

    fn slot(&mut self, job: &Job, position: u32) -> &mut u64 {
        &mut self.memory[job.slots[position as usize].0 as usize]
    }

    /// Computes a job. The memory is read and written only now, as late as a slow device may.
    fn finish(&mut self, job: &Job) -> Settled {
        let request = job.request;
        if job.fails || self.failed.contains(&request) {
            self.failed.insert(request);
            return Settled { request, outcome: Err(EngineError::device("expected a result, got none")) };
        }
        for position in 0..job.start {
            let held = *self.slot(job, position);
            assert_eq!(held, content(request, position), "{request:?} finds its K/V at {position} (HC-040, HC-082)");
        }
        for position in job.start..job.end {
            *self.slot(job, position) = content(request, position);
        }
        for node in 1..=job.num_nodes {
            *self.slot(job, job.end - 1 + node) = 0;
        }
        for (node, position) in job.path.iter().zip(job.end..) {
            *self.slot(job, job.end - 1 + u32::from(node.0)) = content(request, position);
        }
        for moved in self.kv.moves(request, job.end - 1, &job.path) {
            self.memory[moved.to.0 as usize] = self.memory[moved.from.0 as usize];
        }
        let num_accepted = job.path.len() as u32;
        let tokens = |from: u32, to: u32| (from..to).map(|position| token(request.0, position)).collect::<Vec<_>>();
        self.kv.commit(request, &tokens(job.start, job.end + num_accepted));
        let mut progress = Progress { computed: self.kv.computed(request), ..Progress::default() };
        if job.settles {
            progress.token_ids = tokens(job.end, job.end + num_accepted + 1);
            progress.num_accepted = num_accepted as u16;
            progress.num_drafted = job.num_nodes as u16;
            progress.tree_depth = job.num_nodes as u16;
        }
        Settled { request, outcome: Ok(progress) }
    }

    fn read(&mut self) {
        let mut ended = Vec::new();
        for (id, (reader, tokens)) in &mut self.readers {
            let read = reader.read();
            tokens.extend(read.tokens.iter().map(|word| word.token));
            if let Some(finish) = read.finish {
                ended.push((*id, finish));
            }
        }
        for (id, finish) in ended {
            let (_, tokens) = self.readers.remove(&id).expect("it was just read");
            self.check_ending(id, &tokens, &finish);
            self.endings.insert(id, Ending { tokens, finish });
        }
    }

    fn check_ending(&self, id: u64, tokens: &[TokenId], finish: &Finish) {
        let request = &self.requests[&id];
        let (wanted, reason) = expected(request, &self.table);
        match &finish.reason {
            FinishReason::Cancelled => assert!(self.cancelled.contains(&id)),
            FinishReason::Error(EngineError::Capacity(_)) => {
                assert!((request.prompt.len() + tokens.len()) as u32 > self.kv.num_slots());
            }
            FinishReason::Error(_) => assert!(self.failures.contains_key(&id)),
            finished => assert_eq!((tokens, finished), (wanted.as_slice(), &reason), "request {id}"),
        }
        assert!(wanted.starts_with(tokens), "request {id} got {tokens:?} of {wanted:?}");
        let counts = &finish.counts;
        assert_eq!(counts.num_tokens, tokens.len() as u64, "all that is counted was emitted (HC-052)");
        assert_eq!(counts.num_tokens + counts.num_cut, counts.num_steps + counts.num_accepted, "HC-093");
        assert_eq!(counts.num_prompt_tokens, request.prompt.len() as u64);
        assert!(counts.num_cached_tokens < counts.num_prompt_tokens);
    }

    /// Nothing is left: every block is back (rule L), every reader that stayed has its end.
    pub(crate) fn check_end(&mut self) {
        self.read();
        assert!(self.scheduler.is_idle());
        assert!(self.readers.is_empty());
        assert_eq!(self.kv.num_free(), self.kv.num_blocks());
        let counts = self.scheduler.counts();
        assert_eq!(counts.num_tokens + counts.num_cut, counts.num_steps + counts.num_accepted, "HC-093");
    }
}
