//! What a step costs without a model: schedule, tree, rows, verify, commit, stream. The target says what the drafter
//! proposed, so that every path is walked to its end, or nothing of it.
//!
//! `cargo bench --bench step -- [--json]`
#![expect(clippy::print_stdout, reason = "a bench prints its result")]

use std::sync::Arc;
use std::time::Instant;

use slipstream_engine::batch::Batch;
use slipstream_engine::budget::Budget;
use slipstream_engine::cycle::HostCycle;
use slipstream_engine::draft::{Drafter, Observed};
use slipstream_engine::engine::{Engine, Limits};
use slipstream_engine::kv::KvManager;
use slipstream_engine::model::{Forward, Target};
use slipstream_engine::request::{RequestId, SamplingParams};
use slipstream_engine::rows::Rows;
use slipstream_engine::sampler::Sampler;
use slipstream_engine::scheduler::{Scheduler, SchedulerConfig};
use slipstream_engine::stream::TokenLog;
use slipstream_engine::text::TokenTable;
use slipstream_engine::tree::{DraftTree, NodeId};
use slipstream_engine::verify::TargetMatch;
use slipstream_kernels::{Drawn, SlotMove};

const NUM_NODES: u16 = 32;
const VOCAB: u32 = 1000;

/// Draws a row's position, so the right continuation is known to the drafter.
struct Counting;

impl Target for Counting {
    type Features = ();

    fn forward(&mut self, rows: &Rows, _wants_logits: bool) -> Forward<()> {
        let drawn = rows.drawing.iter().map(|row| Drawn::Token(rows.positions[*row as usize] % VOCAB)).collect();
        Forward { drawn, logits: Vec::new(), features: vec![()] }
    }

    fn move_kv(&mut self, _moves: &[SlotMove]) {}
}

/// A tree of 32 nodes: four children on each of eight levels, of which `right` levels hold the target's token, last.
struct Bushy {
    right: u32,
}

impl Drafter<()> for Bushy {
    fn draft(&mut self, batch: &Batch, _sampler: &Sampler, _kv: &KvManager) -> Vec<DraftTree> {
        let grow = |entry: &slipstream_engine::batch::Entry| {
            let mut tree = DraftTree::root_only(entry.root_token());
            let mut node = NodeId::ROOT;
            for level in 0..u32::from(NUM_NODES) / 4 {
                let right = (entry.root_position() + level) % VOCAB;
                let shift = u32::from(level >= self.right);
                let score = tree.score(node) - 0.1;
                let children = [3, 2, 1, 0].map(|wrong| tree.push_new(node, (right + wrong + shift) % VOCAB, score));
                node = children[3];
            }
            tree
        };
        let plain = |entry: &slipstream_engine::batch::Entry| DraftTree::root_only(entry.root_token());
        batch.entries.iter().map(|entry| if entry.settles { grow(entry) } else { plain(entry) }).collect()
    }

    fn observe(&mut self, _observed: &Observed<'_, ()>, _kv: &KvManager) {}

    fn forget(&mut self, _request: RequestId) {}
}

/// Median nanoseconds of a step of `batch` requests, over runs of 100 steps each.
fn measure(batch: u32, right: u32) -> f64 {
    let num_blocks = batch * 256;
    let num_slots = num_blocks * 16;
    let cycle = HostCycle::new(
        Counting,
        vec![Box::new(Bushy { right })],
        Box::new(TargetMatch),
        Budget::UNLIMITED,
        Sampler::new(VOCAB),
    );
    let config = SchedulerConfig {
        max_batch: batch as usize,
        max_batch_tokens: batch * (u32::from(NUM_NODES) + 1) * 2,
        chunk: None,
        max_draft_nodes: NUM_NODES,
        max_in_flight: 1,
    };
    let scheduler = Scheduler::new(config, Arc::new(TokenTable::default()));
    let mut engine = Engine::new(scheduler, KvManager::new(num_blocks, 16, true), cycle);
    let limits = Limits {
        max_context: 4096,
        num_slots,
        num_tokens: VOCAB,
        eos_token_ids: Vec::new(),
        special_tokens: std::collections::HashMap::new(),
    };
    let mut readers = Vec::new();
    for id in 0..batch {
        let params = SamplingParams { max_tokens: None, temperature: 0.0, ..SamplingParams::default() };
        let prompt: Vec<u32> = (0..32).map(|at| (at + id) % VOCAB).collect();
        let request = limits.request(RequestId(u64::from(id)), prompt, params).expect("valid");
        let (writer, reader) = TokenLog::open(4096);
        engine.submit(request, Box::new(writer));
        readers.push(reader);
    }
    for _ in 0..20 {
        engine.step();
    }
    let before: usize = readers.iter_mut().map(|reader| reader.read().tokens.len()).sum();
    let mut times: Vec<f64> = (0..4)
        .flat_map(|_| {
            (0..100)
                .map(|_| {
                    let start = Instant::now();
                    engine.step();
                    start.elapsed().as_nanos() as f64
                })
                .collect::<Vec<_>>()
        })
        .collect();
    let written: usize = readers.iter_mut().map(|reader| reader.read().tokens.len()).sum();
    // Checked before it is told: every step settles the right levels and the next token.
    assert!(before > 0);
    assert_eq!(written as u32, 400 * batch * (right + 1), "a step settles its path and the next token");
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let is_json = std::env::args().any(|argument| argument == "--json");
    let mut results = serde_json::Map::new();
    println!("a step without a model, trees of {NUM_NODES} nodes: median of 400, in microseconds");
    for (batch, limit) in [(1, 30.0), (8, f64::NAN), (64, 1000.0)] {
        for right in [0, 4, 8] {
            let micros = measure(batch, right) / 1e3;
            let wanted = if f64::is_nan(limit) { String::new() } else { format!(", wanted under {limit}") };
            println!("requests {batch:3}, accepted {right}: {micros:8.1}{wanted}");
            results.insert(format!("requests_{batch}_accepted_{right}_us"), micros.into());
        }
    }
    if is_json {
        println!("{}", serde_json::Value::Object(results));
    }
}
