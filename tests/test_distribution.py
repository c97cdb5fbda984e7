"""With any drafter, sampled tokens have exactly the target's distribution, and the test would notice if they had not.

The exact distribution of the next tokens comes from ``reference.py``. Each check is a chi-square test at 0.001 with
cells expecting under 5 pooled, and the total variation must stay below twice that of as many exact draws.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import reference
from conftest import core_engine
from slipstream import DraftModel, Eagle, Engine, NGram, SamplingParams

COUNT = 12_000
PROMPT = (1, 5, 3, 5, 3)
TARGET = reference.random_model(1)
HALF_GOOD = DraftModel(TARGET, num_layers=1)
STRANGER = reference.random_model(2)

# (a) proposals that are no draws, (b) draws with the request's own coins, (c) few and many children, deep and shallow.
DRAFTERS: dict[str, Any] = {
    "none": None,
    "ngram": NGram(min_match=1),
    "argmax": DraftModel(TARGET, num_layers=1, noise=False, fixed_tree=True, max_depth=2, top_k=1, max_nodes=2),
    "argmax_tree": DraftModel(TARGET, num_layers=1, noise=False, fixed_tree=True, max_depth=2, top_k=3, max_nodes=8),
    "noise_tree": DraftModel(TARGET, num_layers=1, fixed_tree=True, max_depth=2, top_k=3, max_nodes=8),
    "stranger": DraftModel(STRANGER, fixed_tree=True, max_depth=2, top_k=2, max_nodes=4),
    "twin": DraftModel(TARGET, fixed_tree=True, max_depth=2, top_k=1, max_nodes=2),
    "eagle": Eagle(reference.random_head(3), fixed_tree=True, max_depth=2, top_k=3, max_nodes=8),
    "list": [NGram(min_match=1), DraftModel(TARGET, num_layers=1, fixed_tree=True, top_k=2, max_nodes=4)],
}

Counts = NDArray[np.int64]


def sample(
    target: reference.Model,
    drafter: Any,
    depth: int,
    count: int = COUNT,
    prompt: Sequence[int] = PROMPT,
    instruction_set: str | None = None,
    **settings: Any,
) -> Counts:
    """Draws the next ``depth`` tokens with ``count`` seeds; one row each."""
    core = core_engine(
        target, drafter, threads=2, max_batch=256, max_batch_tokens=4096, instruction_set=instruction_set
    )
    parameters = (SamplingParams(max_tokens=depth, ignore_eos=True, seed=seed, **settings) for seed in range(count))
    streams = [core.submit(prompt, each) for each in parameters]
    tokens = np.array([[token for chunk in stream for token in chunk.token_ids] for stream in streams])
    assert drafter is None or core.stats().drafted > 0
    core.close()
    return tokens


def table(tokens: Counts, vocab_size: int) -> Counts:
    """How often each tuple of tokens came."""
    counts = np.zeros((vocab_size,) * tokens.shape[1], dtype=np.int64)
    np.add.at(counts, tuple(tokens.T), 1)
    return counts


def total_variation(counts: Counts, exact: reference.Array) -> float:
    return float(np.abs(counts / counts.sum() - exact).sum()) / 2


def is_drawn_from(counts: Counts, exact: reference.Array) -> bool:
    """Rule D: chi-square p above 0.001, and a total variation below twice that of exact draws."""
    counts, exact = counts.ravel(), exact.ravel()
    expected = exact * counts.sum()
    if counts[expected == 0].any():
        return False
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = max(len(wanted) - 1, 1)
    # Wilson and Hilferty: the cube root of a chi-square over its degrees of freedom is very nearly normal.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.0902 * math.sqrt(2 / (9 * freedom))) ** 3
    rng = np.random.default_rng(5)
    draws = [rng.multinomial(counts.sum(), exact / exact.sum()) for _ in range(20)]
    usual = float(np.mean([total_variation(draw, exact) for draw in draws]))
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    return chi_square < limit and total_variation(counts, exact) <= 2 * usual


@pytest.fixture(scope="module")
def half_good() -> Counts:
    """Two tokens each, drawn with a drafter that is right about half the time."""
    return sample(TARGET, HALF_GOOD, 2, temperature=1.0)


def shifted(tokens: Counts) -> Counts:
    """A sampler that gives one token a tenth of the draws of another."""
    biased: Counts = tokens.copy()
    first = biased[:, 0]
    common, rare = np.argsort(-np.bincount(first, minlength=13))[:2]
    where = np.flatnonzero(first == common)
    biased[where[: len(where) // 10], 0] = rare
    return biased


def greedy(tokens: Counts) -> Counts:
    """A sampler that takes the most frequent token."""
    biased: Counts = tokens.copy()
    biased[:, 0] = np.bincount(tokens[:, 0]).argmax()
    return biased


def repeated(tokens: Counts) -> Counts:
    """A sampler whose next draw is sometimes a stale one."""
    biased: Counts = tokens.copy()
    biased[::20, 1] = biased[::20, 0]
    return biased


def one_step(tokens: Counts) -> Counts:
    """A sampler that draws from the right tables independently of the first token."""
    biased: Counts = tokens.copy()
    biased[:, 1] = np.roll(biased[:, 1], 1)
    return biased


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        *((name, 1.0) for name in DRAFTERS if name != "eagle"),
        *((name, 0.6) for name in ("none", "argmax_tree", "list")),
    ],
)
def test_hc_008_012_the_next_two_tokens_have_the_targets_distribution(name: str, temperature: float) -> None:
    tokens = sample(TARGET, DRAFTERS[name], 2, temperature=temperature)
    exact = reference.joint(TARGET, PROMPT, 2, temperature=temperature)
    assert is_drawn_from(table(tokens, 13), exact)


@pytest.mark.parametrize("name", ["argmax_tree", "noise_tree", "eagle", "stranger"])
def test_hc_008_the_third_token_has_the_targets_distribution(name: str) -> None:
    """It can be an accepted child, or what was drawn where the path ended; a head drafts from the second on."""
    counts = table(sample(TARGET, DRAFTERS[name], 3, count=8_000, temperature=0.8), 13)
    exact = reference.joint(TARGET, PROMPT, 3, temperature=0.8)
    assert is_drawn_from(counts, exact)
    assert is_drawn_from(counts.sum(axis=(0, 1)), exact.sum(axis=(0, 1)))


@pytest.mark.parametrize("bias", [shifted, greedy, repeated, one_step])
def test_the_test_notices_a_biased_sampler(half_good: Counts, bias: Callable[[Counts], Counts]) -> None:
    exact = reference.joint(TARGET, PROMPT, 2, temperature=1.0)
    assert is_drawn_from(table(half_good, 13), exact)
    assert not is_drawn_from(table(bias(half_good), 13), exact)


def test_the_test_notices_a_wrong_temperature_and_wrong_filters(half_good: Counts) -> None:
    counts = table(half_good, 13)
    for wrong in ({"temperature": 0.9}, {"temperature": 1.1}, {"temperature": 1.0, "top_p": 0.95}):
        assert not is_drawn_from(counts, reference.joint(TARGET, PROMPT, 2, **wrong))


@pytest.mark.parametrize("name", ["none", "ngram", "ranked_third", "always_right"])
def test_hc_007_all_of_three_tokens_appear_and_temperature_matters(name: str) -> None:
    target = reference.constant_model([0.5, 0.3, 0.2])
    third = reference.constant_model([0.1, 0.1, 0.8])
    drafter = {
        "none": None,
        "ngram": NGram(min_match=1),
        "ranked_third": DraftModel(third, noise=False, fixed_tree=True, max_depth=3, top_k=1, max_nodes=3),
        "always_right": DraftModel(target, fixed_tree=True, max_depth=3, top_k=1, max_nodes=3),
    }[name]
    few = sample(target, drafter, 4, count=300, prompt=(0, 1, 0, 1), temperature=1.0)
    assert {*few[:, 0].tolist()} == {*few[:, 3].tolist()} == {0, 1, 2}
    for temperature in (1.0, 0.7, 1.5):
        exact = reference.filtered(np.log([0.5, 0.3, 0.2]), temperature)
        tokens = sample(target, drafter, 4, count=5_000, prompt=(0, 1, 0, 1), temperature=temperature)
        assert is_drawn_from(np.bincount(tokens.ravel(), minlength=3), exact)


@pytest.mark.parametrize("noise", [False, True])
def test_hc_009_the_token_after_an_accepted_path_has_its_conditional_distribution(noise: bool) -> None:
    """Conditional on the run, here of one token that was drafted and accepted."""
    drafter = DraftModel(TARGET, noise=noise, fixed_tree=True, max_depth=1, top_k=1, max_nodes=1)
    runs: dict[tuple[int, ...], list[int]] = {}
    with Engine(TARGET, drafter, threads=2, max_batch=256, max_batch_tokens=4096) as engine:
        streams = [engine.stream(list(PROMPT), max_tokens=2, ignore_eos=True, seed=seed) for seed in range(COUNT)]
        for stream in streams:
            chunk = next(stream)
            if chunk.num_accepted == 1:
                accepted, following = chunk.token_ids
                runs.setdefault((accepted,), []).append(following)
    assert sum(map(len, runs.values())) > (0.95 if noise else 0.1) * COUNT
    for path, drawn in runs.items():
        exact = reference.filtered(reference.logits(TARGET, PROMPT + path)[-1], 1.0)
        assert is_drawn_from(np.bincount(drawn, minlength=13), exact), path


FILTERS: list[dict[str, Any]] = [
    *({"top_p": 0.3}, {"top_k": 2}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.8, "min_p": 0.05}),
    *({"top_p": 0.3, "temperature": 1.7}, {"min_p": 0.2, "temperature": 0.5}, {"top_k": 1}),
]


@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("name", ["none", "stranger", "argmax_tree", "list"])
def test_hc_010_nothing_outside_the_filtered_set_appears(name: str, settings: dict[str, Any]) -> None:
    settings = {"temperature": 1.0, **settings}
    tokens = sample(TARGET, DRAFTERS[name], 2, count=4_000, **settings)
    assert is_drawn_from(table(tokens, 13), reference.joint(TARGET, PROMPT, 2, **settings))


@pytest.mark.parametrize("settings", [{"top_p": 0.3}, {"top_k": 2}, {"min_p": 0.45}], ids=str)
def test_hc_010_a_drafter_that_proposes_the_third_ranked_token_is_refused_it(settings: dict[str, Any]) -> None:
    target = reference.constant_model([0.4, 0.3, 0.16, 0.14])
    drafter = DraftModel(
        reference.constant_model([0.01, 0.01, 0.97, 0.01]), fixed_tree=True, max_depth=4, top_k=1, max_nodes=4
    )
    tokens = sample(target, drafter, 8, count=2_500, prompt=(2, 2), temperature=1.0, **settings)
    exact = reference.filtered(np.log([0.4, 0.3, 0.16, 0.14]), 1.0, **settings)
    assert not np.isin(tokens, np.flatnonzero(exact == 0)).any()
    assert is_drawn_from(np.bincount(tokens.ravel(), minlength=4), exact)


def test_hc_011_at_temperature_zero_only_the_argmax_is_accepted() -> None:
    target = reference.constant_model([0.3, 0.5, *[0.025] * 8])
    drafts = reference.constant_model([0.2, 0.1, *[0.0875] * 8])
    for top_k in (1, 3):
        drafter = DraftModel(drafts, fixed_tree=True, max_depth=2, top_k=top_k, max_nodes=2 * top_k)
        assert (sample(target, drafter, 12, count=20, temperature=0.0) == 1).all()


@pytest.mark.parametrize("instruction_set", ["scalar", None])
def test_hc_013_every_instruction_set_samples(instruction_set: str | None) -> None:
    tokens = sample(TARGET, HALF_GOOD, 2, count=3_000, instruction_set=instruction_set, temperature=1.0)
    assert is_drawn_from(table(tokens, 13), reference.joint(TARGET, PROMPT, 2, temperature=1.0))


@pytest.mark.parametrize("seed", range(4))
def test_greedy_text_is_that_of_the_reference(seed: int) -> None:
    model = reference.random_model(seed, vocab_size=61)
    token_ids = [1, 7]
    for _ in range(24):
        row = reference.logits(model, tuple(token_ids))[-1]
        best, second = np.sort(row)[:-3:-1]
        assert best - second > 1e-4, "the seed gives no near tie"
        token_ids.append(int(row.argmax()))
    with Engine(model, threads=1) as engine:
        done = engine.generate([1, 7], max_tokens=24, temperature=0, ignore_eos=True)
    assert done.token_ids == token_ids[2:]
