"""Invariant I1: one request and seed give the same tokens with any drafter, batch, chunk, thread count or cache."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from conftest import GOLDEN, core_engine, generate_each, golden_prompts, ids_of
from slipstream import Completion, DraftModel, Eagle, Engine, NGram, SamplingParams

PROMPTS = golden_prompts()
TARGETS = {"a": GOLDEN / "targets" / "target_a", "b": GOLDEN / "targets" / "target_b"}
HEADS = {"a": GOLDEN / "heads" / "e2_a_bias", "b": GOLDEN / "heads" / "e2_b_nobias"}
KINDS = ("none", "ngram", "draft_model", "twin", "eagle", "list")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "t0.7": {"temperature": 0.7},
    "t1.3": {"temperature": 1.3, "top_p": 0.95},
}
LIMITS: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}


def drafter_of(kind: str, target: str, **tree: Any) -> Any:
    """A drafter of a kind for one of the two tiny targets; a twin is the whole target."""
    kinds: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "ngram": lambda: NGram(),
        "draft_model": lambda: DraftModel(TARGETS[target], num_layers=2, **tree),
        "twin": lambda: DraftModel(TARGETS[target], **tree),
        "eagle": lambda: Eagle(HEADS[target], **tree),
        "list": lambda: [NGram(), Eagle(HEADS[target], **tree)],
    }
    return kinds[kind]()


def run(
    target: str, drafter: Any, parameters: dict[str, Any], prompts: Sequence[Any] = PROMPTS, **settings: Any
) -> list[Completion]:
    """Each prompt with a seed of its own, together in one engine."""
    with Engine(TARGETS[target], drafter, **settings) as engine:
        return generate_each(engine, prompts, seeded(parameters, len(prompts)))


def seeded(parameters: dict[str, Any], count: int) -> list[dict[str, Any]]:
    return [{**LIMITS, "seed": 100 + index, **parameters} for index in range(count)]


@pytest.fixture(scope="session")
def plain() -> dict[tuple[str, str], list[list[int]]]:
    """What each target writes without a drafter and with default settings."""
    return {
        (target, name): ids_of(run(target, None, sampling))
        for target in TARGETS
        for name, sampling in SAMPLINGS.items()
    }


FACTORS: dict[str, tuple[Any, ...]] = {
    "target": tuple(TARGETS),
    "kind": KINDS,
    "sampling": tuple(SAMPLINGS),
    "batch": (1, 7),
    "chunk": (1, 5, None),
    "threads": (1, 2),
    "cache": ("cold", "warm"),
}


def pairs(case: tuple[Any, ...]) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    """The pairs of factor values that a case meets."""
    return set(itertools.combinations(enumerate(case), 2))


def pairwise(factors: dict[str, tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Few cases that meet every pair of values of two factors: each time the one with the most new pairs."""
    candidates = [(case, pairs(case)) for case in itertools.product(*factors.values())]
    missing = set().union(*(met for _, met in candidates))
    chosen = []
    while missing:
        case, met = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(case)
        missing -= met
    return chosen


CASES = pairwise(FACTORS)


def test_the_cases_meet_every_pair_of_factor_values() -> None:
    met = set().union(*map(pairs, CASES))
    for (first, values), (second, others) in itertools.combinations(enumerate(FACTORS.values()), 2):
        for pair in itertools.product(values, others):
            assert ((first, pair[0]), (second, pair[1])) in met
    assert len(CASES) < 40


@pytest.mark.parametrize(tuple(FACTORS), CASES)
def test_hc_001_077_the_same_tokens_with_any_drafter_and_setting(
    plain: dict[tuple[str, str], list[list[int]]],
    target: str,
    kind: str,
    sampling: str,
    batch: int,
    chunk: int | None,
    threads: int,
    cache: str,
) -> None:
    settings: dict[str, Any] = {"max_batch": batch, "chunk": chunk, "threads": threads}
    parameters = seeded(SAMPLINGS[sampling], len(PROMPTS))
    with Engine(TARGETS[target], drafter_of(kind, target), **settings) as engine:
        for _ in range(2 if cache == "warm" else 1):
            done = generate_each(engine, PROMPTS, parameters)
        assert ids_of(done) == plain[target, sampling]
        if cache == "warm":
            assert any(one.stats.cached_tokens for one in done)
        assert engine.stats().drafted > 0 or kind == "none"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS)
def test_greedy_text_is_that_of_transformers(target: str, kind: str) -> None:
    golden = np.load(GOLDEN / "greedy" / f"target_{target}.npz")
    assert golden["ids"].tolist() == list(range(len(PROMPTS)))
    done = run(target, drafter_of(kind, target), {"temperature": 0, "max_tokens": 256}, threads=2)
    assert ids_of(done) == golden["tokens"].tolist()


# Chain of 5, width only, two children three times over, ragged (nodes end anywhere in the last rank), 60 nodes.
SHAPES = {
    "chain": {"max_depth": 5, "top_k": 1, "max_nodes": 5},
    "wide": {"max_depth": 1, "top_k": 8, "max_nodes": 8},
    "binary": {"max_depth": 3, "top_k": 2, "max_nodes": 14},
    "ragged": {"max_depth": 4, "top_k": 3, "max_nodes": 11},
    "sixty": {"max_depth": 6, "top_k": 10, "max_nodes": 60},
}


@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["draft_model", "eagle"])
def test_hc_005_tokens_do_not_depend_on_the_tree(
    plain: dict[tuple[str, str], list[list[int]]], kind: str, shape: str, noise: bool
) -> None:
    target = "a" if noise else "b"
    drafter = drafter_of(kind, target, fixed_tree=True, noise=noise, **SHAPES[shape])
    with Engine(TARGETS[target], drafter, threads=2, max_batch_tokens=4096) as engine:
        for sampling in ("greedy", "t1.3"):
            done = generate_each(engine, PROMPTS, seeded(SAMPLINGS[sampling], len(PROMPTS)))
            assert ids_of(done) == plain[target, sampling], sampling
        assert engine.stats().drafted > engine.stats().steps


def test_hc_001_004_quantized_weights_and_repetition() -> None:
    """Rounded weights are the target: drafters change nothing about what they write. Prompts of period 1 to 7."""
    prompts = [[1, *(list(range(70 + period, 70 + 2 * period)) * 12)] for period in range(1, 8)]
    for nodes in (1, 4, 8):
        for target, kind in (("a", "ngram"), ("b", "list"), ("a", "twin")):
            drafter = NGram(max_nodes=nodes) if kind == "ngram" else drafter_of(kind, target, max_nodes=nodes)
            quantize = None if kind == "list" else "bf16"
            expected = run(target, None, {"temperature": 0, "max_tokens": 64}, prompts, quantize=quantize)
            done = run(target, drafter, {"temperature": 0, "max_tokens": 64}, prompts, quantize=quantize)
            assert ids_of(done) == ids_of(expected)


CONTROLS: dict[str, dict[str, Any]] = {
    "hc_058 repetition": {"repetition_penalty": 1.3},
    "hc_058 presence": {"presence_penalty": 0.8},
    "hc_058 frequency": {"frequency_penalty": 0.5},
    "hc_058 all": {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2, "temperature": 0.8},
    "hc_061 ban": {"logit_bias": {87: -100.0, 260: -100.0, 272: -100.0}},
    "hc_061 force": {"logit_bias": {300: 100.0}},
    "hc_061 lean": {"logit_bias": {87: 2.0, 224: -1.5}, "temperature": 1.0},
    "top_k": {"top_k": 3, "temperature": 1.0},
    "min_p": {"min_p": 0.1, "temperature": 1.4},
}


@pytest.mark.parametrize("controls", CONTROLS)
def test_hc_058_061_controls_count_every_accepted_token(controls: str) -> None:
    parameters = {"temperature": 0, **CONTROLS[controls]}
    for target in TARGETS:
        expected = ids_of(run(target, None, parameters))
        if target == "a" and parameters["temperature"] == 0:
            assert expected != ids_of(run(target, None, {"temperature": 0})), "the control has an effect"
        for kind in ("ngram", "twin", "eagle", "list"):
            done = ids_of(run(target, drafter_of(kind, target), parameters, threads=2))
            assert done == expected, kind
        for token, bias in CONTROLS[controls].get("logit_bias", {}).items():
            assert bias > -100 or not any(token in ids for ids in expected)
            assert bias < 100 or all({*ids} == {token} for ids in expected)


def shown(done: Completion) -> tuple[list[int], str, str]:
    return done.token_ids, done.text, done.finish_reason


def ends(target: str, parameters: Sequence[dict[str, Any]], prompt: Any) -> list[tuple[list[int], str, str]]:
    """What requests on one prompt write without a drafter, which each drafter must write too."""
    each = [{**LIMITS, "temperature": 0, **one} for one in parameters]
    prompts = [prompt] * len(each)
    with Engine(TARGETS[target], threads=2) as engine:
        expected = [shown(done) for done in generate_each(engine, prompts, each)]
    deep = {"fixed_tree": True, "max_depth": 8, "top_k": 1, "max_nodes": 8}
    for kind in ("ngram", "twin", "eagle", "list"):
        drafter = drafter_of(kind, target, **({} if kind in ("list", "eagle") else deep))
        with Engine(TARGETS[target], drafter, threads=2) as engine:
            assert [shown(done) for done in generate_each(engine, prompts, each)] == expected, kind
    return expected


@pytest.mark.parametrize("target", TARGETS)
def test_hc_050_a_stop_token_inside_an_accepted_run_ends_the_output(target: str) -> None:
    for prompt in PROMPTS[:3]:
        written = run(target, None, {"temperature": 0}, [prompt])[0].token_ids
        stops = [[written[index]] for index in range(10, 31)] + [[written[12], written[25]]]
        for ids, (token_ids, _, reason) in zip(
            stops, ends(target, [{"stop_token_ids": one} for one in stops], prompt), strict=True
        ):
            first = min(written.index(stop) for stop in ids)
            assert reason == "stop"
            assert token_ids == written[: first + 1]


@pytest.mark.parametrize("target", TARGETS)
def test_hc_051_053_a_stop_string_inside_an_accepted_run_cuts_the_text(target: str) -> None:
    for prompt in PROMPTS[:3]:
        text = run(target, None, {"temperature": 0}, [prompt])[0].text
        stops = [text[start : start + 1 + start % 12] for start in range(8, 40)]
        stops += [[text[20:26], text[12:15] + "\x01", "never"], text[30:34] + "\x01"]  # type: ignore[list-item]
        for stop, (_, cut, reason) in zip(stops, ends(target, [{"stop": one} for one in stops], prompt), strict=True):
            found = [text.find(one) for one in ([stop] if isinstance(stop, str) else stop) if one in text]
            assert reason == ("stop" if found else "length")
            assert cut == (text[: min(found)] if found else text)


@pytest.mark.parametrize("target", TARGETS)
def test_hc_056_057_min_tokens_holds_for_each_verified_row(target: str) -> None:
    for prompt in PROMPTS[:3]:
        token_ids, text, _ = shown(run(target, None, {"temperature": 0}, [prompt])[0])
        by_id: list[dict[str, Any]] = [
            {"stop_token_ids": [token_ids[3], token_ids[7]], "min_tokens": least} for least in range(1, 13)
        ]
        for wanted, (written, _, _) in zip(by_id, ends(target, by_id, prompt), strict=True):
            least, stops = wanted["min_tokens"], wanted["stop_token_ids"]
            assert len(written) >= least
            assert not {*written[: least - 1]} & {*stops}, "masked until it may stop"
        by_text: list[dict[str, Any]] = [{"stop": text[4:6], "min_tokens": least} for least in (0, 1, 5, 20, 48)]
        lengths = [len(written) for written, _, _ in ends(target, by_text, prompt)]
        assert all(length >= one["min_tokens"] for length, one in zip(lengths, by_text, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_hc_014_the_same_seed_gives_the_same_text(kind: str) -> None:
    parameters: dict[str, Any] = {"temperature": 2.0, "seed": 42, "max_tokens": 10}
    with Engine(TARGETS["a"], drafter_of(kind, "a"), threads=2) as engine:
        streamed = [
            [token for chunk in engine.stream(PROMPTS[0], **parameters) for token in chunk.token_ids] for _ in range(5)
        ]
        together = ids_of(engine.generate([PROMPTS[0]] * 5, **parameters))
    assert all(ids == streamed[0] for ids in streamed + together)


@pytest.mark.parametrize("kind", ["ngram", "draft_model", "eagle", "list"])
def test_hc_015_016_a_seeded_request_does_not_depend_on_its_neighbours(kind: str) -> None:
    seeds = [{**LIMITS, "temperature": 0.9, "seed": seed} for seed in range(6)] + [{**LIMITS, "temperature": 0}]
    prompts = [PROMPTS[1]] * len(seeds)
    with Engine(TARGETS["a"], drafter_of(kind, "a"), threads=1) as engine:
        alone = [
            generate_each(engine, [prompt], [each])[0].token_ids for prompt, each in zip(prompts, seeds, strict=True)
        ]
    with Engine(TARGETS["a"], drafter_of(kind, "a"), threads=2, max_batch=8) as engine:
        for round_number in range(4):
            others = [
                {"temperature": 1.0, "max_tokens": 1 + (7 * other + round_number) % 40, "ignore_eos": True}
                for other in range(9)
            ]
            mixed = [*others[:5], *seeds, *others[5:]]
            asked = [*PROMPTS[:5], *prompts, *PROMPTS[5:9]]
            assert ids_of(generate_each(engine, asked, mixed)[5 : 5 + len(seeds)]) == alone


@pytest.mark.parametrize(("kind", "kv_cache_bytes"), [("twin", 1_150_000), ("eagle", 890_000), ("list", 890_000)])
def test_hc_015_041_preemption_changes_nothing(
    plain: dict[tuple[str, str], list[list[int]]], kind: str, kv_cache_bytes: int
) -> None:
    for sampling in SAMPLINGS:
        with Engine(
            TARGETS["a"], drafter_of(kind, "a"), threads=2, kv_cache_bytes=kv_cache_bytes, block_size=4
        ) as engine:
            done = generate_each(engine, PROMPTS, seeded(SAMPLINGS[sampling], len(PROMPTS)))
            assert ids_of(done) == plain["a", sampling]
            assert engine.stats().preemptions == sum(one.stats.preemptions for one in done) > 0


@pytest.mark.parametrize("kind", ["ngram", "twin", "eagle", "list"])
def test_hc_079_090_a_request_can_limit_or_leave_speculation(kind: str) -> None:
    limits: list[bool | int] = [True, False, 0, 1, 2, 5, 1000]
    for sampling in ("greedy", "t1.3"):
        each = [{**LIMITS, **SAMPLINGS[sampling], "seed": 4, "speculate": limit} for limit in limits]
        prompts = [PROMPTS[6]] * len(limits)
        expected = run("a", None, {**SAMPLINGS[sampling], "seed": 4}, [PROMPTS[6]])[0].token_ids
        with Engine(TARGETS["a"], drafter_of(kind, "a"), threads=2) as engine:
            done = generate_each(engine, prompts, each)
        assert ids_of(done) == [expected] * len(limits)
        for limit, one in zip(limits, done, strict=True):
            nodes = 1000 if limit is True else int(limit)
            assert one.stats.drafted <= nodes * one.stats.steps
        assert done[0].stats.drafted > 0


def per_step(engine: Engine, prompt: list[int], parameters: dict[str, Any]) -> tuple[list[int], list[int], int]:
    """Tokens, accepted counts step by step, and how many prompt tokens were found in the cache."""
    stream = engine.stream(prompt, **parameters)
    chunks = list(stream)
    assert stream.stats is not None
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return tokens, [chunk.num_accepted for chunk in chunks], stream.stats.cached_tokens


@pytest.mark.parametrize("kind", ["draft_model", "twin", "eagle"])
@pytest.mark.parametrize("target", TARGETS)
def test_hc_036_a_prefix_hit_accepts_as_much_as_a_cold_run(target: str, kind: str) -> None:
    source = PROMPTS[7]
    with Engine(TARGETS[target], drafter_of(kind, target, fixed_tree=True), threads=2, block_size=8) as engine:
        for length in (7, 8, 9, 16, 17, 31, 32, 40, 64):
            parameters = {**LIMITS, "temperature": 0 if length % 2 else 0.8, "seed": length}
            prompt = [1, 70 + length, *source[:length]][:length]  # of its own from the first block on
            cold = per_step(engine, prompt, parameters)
            warm = per_step(engine, prompt, parameters)
            assert cold[2] == 0
            assert warm[2] == (length - 1) // 8 * 8 if length % 8 else warm[2] in (length - 8, length - 1)
            assert warm[0] == cold[0], length
            if kind == "eagle" and length % 8 == 1:
                # Nothing but the root is left to compute, and the block kept its last token's feature: the head drafts
                # one step sooner than after a prompt that it computes.
                assert cold[1][0] == 0
                assert len(warm[1]) <= len(cold[1])
                assert sum(warm[1]) >= sum(cold[1])
            else:
                assert warm[1] == cold[1], length


@pytest.mark.parametrize("kind", ["none", "list"])
def test_the_scalar_instruction_set_writes_what_the_fast_one_does(
    plain: dict[tuple[str, str], list[list[int]]], kind: str
) -> None:
    core = core_engine(TARGETS["a"], drafter_of(kind, "a"), threads=2, instruction_set="scalar")
    assert core.info()["instruction_set"] == "scalar"
    for sampling in ("greedy", "t0.7"):
        each = [SamplingParams(**one) for one in seeded(SAMPLINGS[sampling], 4)]
        streams = [core.submit(prompt, one) for prompt, one in zip(PROMPTS, each, strict=False)]
        written = [[token for chunk in stream for token in chunk.token_ids] for stream in streams]
        assert written == plain["a", sampling][:4]
    core.close()


@pytest.mark.parametrize(
    ("lengths", "settings"),
    [
        ([511, 1], {}),
        ([15, 1], {"max_batch_tokens": 16}),
        ([2, 2], {"max_batch_tokens": 2, "block_size": 1}),
        ([1, 1, 2, 3], {"max_batch_tokens": 2, "block_size": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["eagle", "draft_model", "list"])
def test_a_first_step_that_leaves_no_room_for_drafts_changes_nothing(
    kind: str, lengths: list[int], settings: dict[str, Any]
) -> None:
    prompts = [[3 + (7 * place) % 300 for place in range(length)] for length in lengths]
    limits = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with Engine(TARGETS["a"]) as plain, Engine(TARGETS["a"], drafter_of(kind, "a"), **settings) as engine:
        for _ in range(2):
            assert ids_of(engine.generate(prompts, **limits)) == ids_of(plain.generate(prompts, **limits))
