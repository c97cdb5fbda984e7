//! The scheduler with cycles that do no arithmetic: each entry settles a random number of tokens of a text known
//! beforehand, at once or one call late. Slots are filled and read one by one, so a block that is used by two requests,
//! or given back under a step, shows.

mod scheduler_world;

use scheduler_world::{Accept, Ending, Pool, World, ask, config, expected, table, token};
use slipstream_engine::error::EngineError;
use slipstream_engine::request::FinishReason;

const LATE: [u32; 2] = [1, 2];

#[test]
fn hc_041_078_082_091_random_schedules_end_with_the_expected_tokens() {
    for seed in 0..600 {
        let mut world = World::random(seed);
        world.run_random();
    }
}

#[test]
fn hc_050_a_stop_token_ends_the_output_at_every_offset_of_a_run() {
    for max_in_flight in LATE {
        for offset in 0..12 {
            let mut request = ask(1, 5, 60);
            let stop = token(1, 5 + 7 + offset);
            request.stop_token_ids = vec![stop, 250].into();
            let mut world = World::new(config(8, max_in_flight), Pool { num_blocks: 64, block_size: 4 }, Accept::All);
            world.submit(request);
            world.run();
            let ending = &world.endings[&1];
            assert_eq!(ending.tokens.last(), Some(&stop));
            assert_eq!(ending.finish.reason, FinishReason::Stop);
            world.check_end();
        }
    }
}

#[test]
fn hc_051_057_stop_strings_end_the_output_at_every_offset_of_a_run() {
    for max_in_flight in LATE {
        for offset in 0..12 {
            for min_tokens in [0, 3, 25] {
                let mut request = ask(2, 6, 60);
                // The text of two tokens and a half, so it ends in the middle of a token.
                let text: String = (0..3).map(|index| scheduler_world::text(token(2, 6 + offset + index))).collect();
                request.params.stop = vec![text[1..text.len() - 1].to_owned(), "never".to_owned()];
                request.params.min_tokens = min_tokens;
                let pool = Pool { num_blocks: 64, block_size: 4 };
                let mut world = World::new(config(8, max_in_flight), pool, Accept::All);
                let wanted = expected(&request, &table());
                assert!(wanted.1 == FinishReason::Length || wanted.0.len() as u32 >= min_tokens.max(offset));
                world.submit(request);
                world.run();
                world.check_end();
            }
        }
    }
}

#[test]
fn hc_052_072_exactly_max_tokens_and_no_draft_past_the_end() {
    for max_in_flight in LATE {
        for accept in [Accept::All, Accept::None, Accept::Random] {
            for max_tokens in 1..=20 {
                for nodes in [0, 1, 2, 7, 16] {
                    let pool = Pool { num_blocks: 64, block_size: 4 };
                    let mut world = World::new(config(nodes, max_in_flight), pool, accept);
                    world.submit(ask(3, 4, max_tokens));
                    world.run();
                    assert_eq!(world.endings[&3].tokens.len() as u32, max_tokens);
                    assert_eq!(world.endings[&3].finish.counts.num_tokens, u64::from(max_tokens));
                    world.check_end();
                }
            }
        }
    }
}

#[test]
fn hc_079_a_request_can_opt_out_of_drafting() {
    let mut world = World::new(config(5, 1), Pool { num_blocks: 64, block_size: 4 }, Accept::All);
    for id in 0..6 {
        let mut request = ask(id, 6, 30);
        request.params.max_draft_nodes = (id % 2 == 0).then_some(0);
        world.submit(request);
    }
    world.run();
    for (id, ending) in &world.endings {
        assert_eq!(ending.finish.counts.num_drafted == 0, id % 2 == 0, "request {id}");
    }
    world.check_end();
}

#[test]
fn hc_041_too_few_blocks_preempt_one_request_and_all_of_them_finish() {
    for max_in_flight in LATE {
        // Six requests of 32 tokens; blocks for three.
        let mut world = World::new(config(8, max_in_flight), Pool { num_blocks: 24, block_size: 4 }, Accept::Random);
        for id in 0..6 {
            world.submit(ask(id, 8, 24));
        }
        world.run();
        world.check_end();
        let counts = world.scheduler.counts();
        assert!(counts.num_preemptions > 0, "there were too few blocks");
        assert_eq!(counts.num_tokens, 6 * 24);
    }
}

#[test]
fn hc_091_a_pool_for_one_request_serves_many_without_a_hang() {
    for max_in_flight in LATE {
        for block_size in [1, 4, 16] {
            let num_blocks = 32_u32.div_ceil(block_size);
            let mut world = World::new(config(8, max_in_flight), Pool { num_blocks, block_size }, Accept::Random);
            for id in 0..8 {
                world.submit(ask(id, 20, 12));
            }
            world.run();
            assert!(world.endings.values().all(|ending| ending.finish.reason == FinishReason::Length));
            world.check_end();
        }
    }
}

#[test]
fn hc_075_a_request_that_never_fits_ends_with_both_numbers() {
    for max_in_flight in LATE {
        let mut world = World::new(config(4, max_in_flight), Pool { num_blocks: 4, block_size: 4 }, Accept::Random);
        world.submit(ask(0, 17, 4));
        world.submit(ask(1, 10, 20));
        world.submit(ask(2, 5, 5));
        world.run();
        let reason = |id: u64| world.endings[&id].finish.reason.clone();
        let capacity = |len: u32| {
            let text = format!("expected at most 16 tokens in the K/V blocks, got a request of {len}");
            FinishReason::Error(
                EngineError::capacity(text).with_hint("give the engine more memory for K/V, or ask for fewer tokens"),
            )
        };
        assert_eq!(reason(0), capacity(17));
        assert_eq!(reason(1), capacity(17));
        assert_eq!(world.endings[&1].tokens.len(), 7, "it wrote what fits");
        assert_eq!(reason(2), FinishReason::Length);
        world.check_end();
    }
}

#[test]
fn hc_080_a_closed_sink_gives_its_blocks_back_within_two_steps() {
    for max_in_flight in LATE {
        let mut world = World::new(config(4, max_in_flight), Pool { num_blocks: 64, block_size: 4 }, Accept::Random);
        for id in 0..3 {
            world.submit(ask(id, 9, 2000 / 10));
        }
        for _ in 0..5 {
            world.step();
        }
        world.close(1);
        world.step();
        world.step();
        assert!(!world.kv.is_admitted(slipstream_engine::request::RequestId(1)));
        world.run();
        world.check_end();
    }
}

#[test]
fn a_waiting_request_can_be_cancelled_and_closed() {
    let mut world = World::new(config(0, 1), Pool { num_blocks: 16, block_size: 4 }, Accept::None);
    for id in 0..8 {
        world.submit(ask(id, 9, 20));
    }
    world.step();
    assert!(world.scheduler.num_waiting() > 0);
    world.cancel(7);
    world.close(6);
    world.run();
    assert_eq!(world.endings[&7].finish.reason, FinishReason::Cancelled);
    world.check_end();
}

#[test]
fn one_failure_ends_one_request() {
    for max_in_flight in LATE {
        let mut world = World::new(config(4, max_in_flight), Pool { num_blocks: 64, block_size: 4 }, Accept::Random);
        for id in 0..4 {
            world.submit(ask(id, 9, 30));
        }
        world.fail_at(2, 20);
        world.run();
        for (id, Ending { finish, .. }) in &world.endings {
            assert_eq!(matches!(finish.reason, FinishReason::Error(_)), *id == 2);
        }
        world.check_end();
    }
}

#[test]
fn prompts_go_on_beside_a_full_batch_of_drafts() {
    let mut config = config(16, 1);
    config.max_batch_tokens = 32;
    let mut world = World::new(config, Pool { num_blocks: 256, block_size: 4 }, Accept::Random);
    for id in 0..3 {
        world.submit(ask(id, 2, 300));
    }
    for _ in 0..4 {
        world.step();
    }
    world.submit(ask(9, 80, 1));
    for _ in 0..10 {
        world.step();
    }
    assert!(world.endings.contains_key(&9), "a quarter of 32 rows computes 80 tokens in 10 steps");
    world.run();
    world.check_end();
}

#[test]
fn a_step_of_one_row_serves_everybody() {
    for max_in_flight in LATE {
        let mut config = config(4, max_in_flight);
        config.max_batch_tokens = 1;
        let mut world = World::new(config, Pool { num_blocks: 64, block_size: 4 }, Accept::Random);
        for id in 0..3 {
            world.submit(ask(id, 5, 6));
        }
        world.run();
        world.check_end();
    }
}

#[test]
fn a_full_prompt_ends_at_once() {
    let mut world = World::new(config(4, 1), Pool { num_blocks: 64, block_size: 4 }, Accept::All);
    world.submit(ask(0, 5, 0));
    world.run();
    assert_eq!(world.endings[&0].finish.reason, FinishReason::Length);
    assert!(world.endings[&0].tokens.is_empty());
}

#[test]
fn hc_037_a_conversation_finds_its_earlier_turns() {
    for max_in_flight in LATE {
        let mut world = World::new(config(8, max_in_flight), Pool { num_blocks: 256, block_size: 16 }, Accept::Random);
        for turn in 0..10 {
            // All turns are prefixes of one text.
            let id = turn * 8;
            world.submit(ask(id, 20 + 50 * turn as u32, 20));
            world.run();
            let counts = &world.endings[&id].finish.counts;
            let earlier = if turn == 0 { 0 } else { 20 + 50 * (turn - 1) + 19 };
            assert_eq!(counts.num_cached_tokens, earlier / 16 * 16);
        }
        world.check_end();
    }
}
