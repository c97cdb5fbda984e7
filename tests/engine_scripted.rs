//! The whole engine over a target and drafters without arithmetic, on the host cycle and on one that delivers late.
//! The scripted target reads every row's text back from its slots, so K/V, masks, moves and positions are checked too.

mod scripted;

use std::sync::Arc;

use proptest::prelude::*;
use scripted::{DelayedCycle, Kept, ScriptedDrafter, ScriptedTarget, VOCAB, expected};
use slipstream_engine::budget::Budget;
use slipstream_engine::cycle::{Cycle, HostCycle};
use slipstream_engine::draft::{Drafter, NGram, NGramSettings};
use slipstream_engine::engine::{Engine, Limits};
use slipstream_engine::error::EngineError;
use slipstream_engine::kv::KvManager;
use slipstream_engine::request::{FinishReason, RequestId, SamplingParams, TokenId};
use slipstream_engine::sampler::Sampler;
use slipstream_engine::scheduler::{Scheduler, SchedulerConfig};
use slipstream_engine::text::TokenTable;
use slipstream_engine::verify::TargetMatch;

#[derive(Clone, Copy, Debug)]
struct Shape {
    num_blocks: u32,
    block_size: u32,
    max_batch: usize,
    max_batch_tokens: u32,
    chunk: Option<u32>,
    max_draft_nodes: u16,
    is_delayed: bool,
}

const SHAPE: Shape = Shape {
    num_blocks: 64,
    block_size: 4,
    max_batch: 8,
    max_batch_tokens: 64,
    chunk: None,
    max_draft_nodes: 16,
    is_delayed: false,
};

fn limits(shape: Shape) -> Limits {
    Limits {
        max_context: 200,
        num_slots: shape.num_blocks * shape.block_size,
        num_tokens: VOCAB,
        eos_token_ids: Vec::new(),
        special_tokens: std::collections::HashMap::default(),
    }
}

fn engine(shape: Shape, drafters: Vec<Box<dyn Drafter<()>>>, poison: Option<(TokenId, u32)>) -> Engine<Box<dyn Cycle>> {
    let mut target = ScriptedTarget::new(shape.num_blocks * shape.block_size);
    target.poison = poison;
    let inner = HostCycle::new(target, drafters, Box::new(TargetMatch), Budget::UNLIMITED, Sampler::new(VOCAB));
    let cycle: Box<dyn Cycle> = if shape.is_delayed { Box::new(DelayedCycle::new(inner)) } else { Box::new(inner) };
    let config = SchedulerConfig {
        max_batch: shape.max_batch,
        max_batch_tokens: shape.max_batch_tokens,
        chunk: shape.chunk,
        max_draft_nodes: shape.max_draft_nodes,
        max_in_flight: if shape.is_delayed { 2 } else { 1 },
    };
    let scheduler = Scheduler::new(config, Arc::new(TokenTable::default()));
    Engine::new(scheduler, KvManager::new(shape.num_blocks, shape.block_size, true), cycle)
}

fn greedy(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens: Some(max_tokens), temperature: 0.0, ..SamplingParams::default() }
}

fn run(engine: &mut Engine<Box<dyn Cycle>>) {
    let mut num_steps = 0;
    while !engine.is_idle() {
        engine.step();
        engine.check();
        num_steps += 1;
        assert!(num_steps < 20_000, "an engine that goes on and on");
    }
    let load = engine.load();
    assert_eq!((load.num_running, load.num_waiting), (0, 0));
    assert_eq!(load.num_free_blocks, load.num_blocks, "rule L: every block is back");
}

/// Runs prompts together and compares each with what it says alone.
fn check_lossless(shape: Shape, drafters: Vec<Box<dyn Drafter<()>>>, prompts: &[Vec<TokenId>], max_tokens: u32) {
    let mut engine = engine(shape, drafters, None);
    let sinks: Vec<Kept> = prompts.iter().map(|_| Kept::default()).collect();
    for (id, (prompt, sink)) in prompts.iter().zip(&sinks).enumerate() {
        let request = limits(shape).request(RequestId(id as u64), prompt.clone(), greedy(max_tokens)).expect("valid");
        engine.submit(request, Box::new(sink.clone()));
        if id % 3 == 0 {
            engine.step();
        }
    }
    run(&mut engine);
    for (prompt, sink) in prompts.iter().zip(&sinks) {
        let finish = sink.finish().expect("ended");
        assert_eq!(finish.reason, FinishReason::Length, "{shape:?}");
        let wanted = (max_tokens as usize).min(limits(shape).max_context as usize - prompt.len());
        assert_eq!(sink.tokens(), expected(prompt, wanted), "{shape:?}");
        let counts = finish.counts;
        assert_eq!(counts.num_tokens as usize, wanted);
        assert_eq!(counts.num_tokens, counts.num_steps + counts.num_accepted - counts.num_cut, "HC-093");
    }
}

fn prompts(count: usize) -> Vec<Vec<TokenId>> {
    (0..count).map(|index| (0..=(index * 7 % 23)).map(|at| (at * at + index) as u32 % VOCAB).collect()).collect()
}

fn both(shape: Shape) -> [Shape; 2] {
    [shape, Shape { is_delayed: true, ..shape }]
}

#[test]
fn hc_002_034_oracle_liar_and_scripts_never_change_a_token() {
    for shape in both(SHAPE) {
        check_lossless(shape, vec![], &prompts(9), 40);
        check_lossless(shape, vec![Box::new(ScriptedDrafter::oracle(7))], &prompts(9), 40);
        check_lossless(shape, vec![Box::new(ScriptedDrafter::liar())], &prompts(9), 40);
        for num_wrong in 0..3 {
            let script = ScriptedDrafter::script(vec![0, 1, 3, 5, 2, 0, 4], num_wrong);
            check_lossless(shape, vec![Box::new(script)], &prompts(9), 40);
        }
    }
}

#[test]
fn hc_001_ngram_and_lists_never_change_a_token() {
    let repetitive: Vec<Vec<TokenId>> = (1..8).map(|period| (0..30).map(|at| at % period).collect()).collect();
    for shape in both(SHAPE) {
        for max_nodes in [1, 4, 8] {
            let ngram = NGramSettings { max_nodes, ..NGramSettings::default() };
            check_lossless(shape, vec![Box::new(NGram::new(ngram))], &repetitive, 60);
            let list: Vec<Box<dyn Drafter<()>>> =
                vec![Box::new(NGram::new(ngram)), Box::new(ScriptedDrafter::script(vec![2, 0, 3], 2))];
            check_lossless(shape, list, &repetitive, 60);
        }
    }
}

#[test]
fn hc_046_an_accepted_path_of_last_children_is_compacted_over_block_edges() {
    for block_size in [2, 4, 64] {
        for shape in both(Shape { block_size, num_blocks: 1024 / block_size, ..SHAPE }) {
            check_lossless(shape, vec![Box::new(ScriptedDrafter::script(vec![4, 5], 2))], &prompts(3), 60);
        }
    }
}

#[test]
fn hc_041_039_tiny_pools_and_chunks_never_change_a_token() {
    for chunk in [Some(1), Some(5), None] {
        for shape in both(Shape { num_blocks: 24, chunk, max_batch_tokens: 24, ..SHAPE }) {
            let script = ScriptedDrafter::script(vec![1, 0, 3, 2], 1);
            check_lossless(shape, vec![Box::new(script)], &prompts(12), 30);
        }
    }
}

#[test]
fn hc_052_exactly_max_tokens() {
    for max_tokens in 1..20 {
        for shape in both(SHAPE) {
            check_lossless(shape, vec![Box::new(ScriptedDrafter::oracle(7))], &prompts(4), max_tokens);
            check_lossless(shape, vec![Box::new(ScriptedDrafter::liar())], &prompts(4), max_tokens);
        }
    }
}

#[test]
fn hc_054_072_without_a_limit_the_context_is_filled_exactly() {
    for shape in both(Shape { num_blocks: 256, ..SHAPE }) {
        let long: Vec<Vec<TokenId>> = [1, 150, 197, 198, 199].iter().map(|len| vec![3; *len]).collect();
        check_lossless(shape, vec![Box::new(ScriptedDrafter::oracle(7))], &long, u32::MAX);
    }
}

#[test]
fn hc_089_a_row_that_is_not_finite_ends_its_request_alone() {
    for shape in both(SHAPE) {
        for bad_len in [3, 9, 14] {
            let script = ScriptedDrafter::script(vec![3, 0, 5], 1);
            let mut engine = engine(shape, vec![Box::new(script)], Some((50, bad_len)));
            let prompts = [vec![50, 1], vec![7, 8, 9], vec![11]];
            let sinks: Vec<Kept> = prompts.iter().map(|_| Kept::default()).collect();
            for (id, (prompt, sink)) in prompts.iter().zip(&sinks).enumerate() {
                let request = limits(shape).request(RequestId(id as u64), prompt.clone(), greedy(30)).expect("valid");
                engine.submit(request, Box::new(sink.clone()));
            }
            run(&mut engine);
            let reason = sinks[0].finish().expect("ended").reason;
            assert!(
                matches!(&reason, FinishReason::Error(EngineError::Device(message)) if message.text.contains("finite")),
                "{reason:?}"
            );
            let said = sinks[0].tokens();
            assert!(said.len() <= bad_len as usize - 2);
            assert_eq!(said, expected(&prompts[0], said.len()));
            for (prompt, sink) in prompts.iter().zip(&sinks).skip(1) {
                assert_eq!(sink.tokens(), expected(prompt, 30));
            }
        }
    }
}

#[test]
fn hc_035_036_a_prefix_hit_changes_nothing_and_refused_drafts_are_not_cached() {
    for shape in both(SHAPE) {
        let mut engine = engine(shape, vec![Box::new(ScriptedDrafter::liar())], None);
        let mut cached = Vec::new();
        for id in 0..3 {
            let sink = Kept::default();
            let prompt: Vec<TokenId> = (0..16).collect();
            let request = limits(shape).request(RequestId(id), prompt.clone(), greedy(20)).expect("valid");
            engine.submit(request, Box::new(sink.clone()));
            run(&mut engine);
            assert_eq!(sink.tokens(), expected(&prompt, 20));
            cached.push(sink.finish().expect("ended").counts.num_cached_tokens);
        }
        assert_eq!(cached, [0, 12, 12], "whole blocks, and at least one token is computed");
        // The prompt, what was said, and then a token that a liar may have put there.
        let mut prompt: Vec<TokenId> = (0..16).collect();
        prompt.extend(expected(&prompt, 5));
        let right = expected(&prompt, 1)[0];
        prompt.extend([(right + 1) % VOCAB; 10]);
        let sink = Kept::default();
        let request = limits(shape).request(RequestId(9), prompt.clone(), greedy(20)).expect("valid");
        engine.submit(request, Box::new(sink.clone()));
        run(&mut engine);
        assert_eq!(sink.tokens(), expected(&prompt, 20));
        assert_eq!(sink.finish().expect("ended").counts.num_cached_tokens, 20);
    }
}

#[test]
fn hc_090_no_draft_nodes_is_plain_decoding() {
    for shape in both(Shape { max_draft_nodes: 0, ..SHAPE }) {
        check_lossless(shape, vec![Box::new(ScriptedDrafter::oracle(7))], &prompts(5), 20);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn hc_031_042_076_078_random_engines_say_what_each_request_says_alone(
        num_blocks in 20_u32..80,
        block_size in 1_u32..9,
        max_batch in 1_usize..9,
        max_batch_tokens in 1_u32..80,
        chunk in prop::option::of(1_u32..20),
        max_draft_nodes in 0_u16..24,
        is_delayed in any::<bool>(),
        num_right in prop::collection::vec(0_usize..7, 1..6),
        num_wrong in 0_usize..3,
        lens in prop::collection::vec((1_usize..60, 1_u32..40, 0_u8..4, 0_usize..6), 1..14),
    ) {
        let num_blocks = num_blocks * 16 / block_size.min(16);
        let shape = Shape { num_blocks, block_size, max_batch, max_batch_tokens, chunk, max_draft_nodes, is_delayed };
        let script = ScriptedDrafter::script(num_right, num_wrong);
        let mut engine = engine(shape, vec![Box::new(script), Box::new(NGram::new(NGramSettings::default()))], None);
        let mut requests = Vec::new();
        for (id, (len, max_tokens, fate, delay)) in lens.into_iter().enumerate() {
            // Some prompts share a prefix.
            let prompt: Vec<TokenId> = (0..len).map(|at| ((at * (1 + id % 2)) as u32) % VOCAB).collect();
            let sink = Kept::default();
            let request = limits(shape).request(RequestId(id as u64), prompt.clone(), greedy(max_tokens)).expect("valid");
            engine.submit(request, Box::new(sink.clone()));
            for _ in 0..delay {
                engine.step();
                engine.check();
            }
            match fate {
                0 => engine.cancel(RequestId(id as u64)),
                1 => sink.close(),
                _ => {}
            }
            requests.push((prompt, sink, max_tokens, fate));
        }
        run(&mut engine);
        for (prompt, sink, max_tokens, fate) in requests {
            let said = sink.tokens();
            prop_assert_eq!(&said, &expected(&prompt, said.len()));
            if fate > 1 {
                prop_assert_eq!(said.len() as u32, max_tokens);
            }
        }
    }
}
