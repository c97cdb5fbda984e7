"""The Python face: what is refused and how, and that every way of leaving a stream cancels its request."""

import asyncio
import contextlib
import gc
import itertools
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import REPOSITORY
from slipstream import (
    ConfigError,
    DeviceError,
    DraftModel,
    Eagle,
    Engine,
    NGram,
    RequestError,
    SamplingParams,
)
from slipstream.engine import PARAMETERS

Check = Callable[[], None]

PROMPT = "the red fox sees"
LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True, "temperature": 1.0, "seed": 3}

# Odd values for every field (HC-088, HC-110), and which of them mean something.
ODD = [
    *(-1, 0, 1, 2, 2**31 - 1, 2**63, 2**64, 10**30),
    *(-0.5, 0.5, 1.5, 1e18, math.nan, math.inf, -math.inf, 1e-12),
    *("10", b"10", True, None, [], {}, object()),
]
NUMBERS = {
    "temperature": (0, 1e6),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
}
COUNTS = {"max_tokens": (1, 2**31 - 1), "top_k": (0, 2**31 - 1), "min_tokens": (0, 256), "seed": (0, 2**64 - 1)}
OPTIONAL = ("max_tokens", "seed")


def means_something(field: str, value: object) -> bool:
    """Whether the documentation of the field gives the value a meaning."""
    if value is None:
        return field in OPTIONAL
    if field == "ignore_eos":
        return isinstance(value, bool)
    if field == "speculate":
        return isinstance(value, bool) or (isinstance(value, int) and 0 <= value <= 2**31 - 1)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if field == "top_p":
        return 0 < value <= 1
    if field in NUMBERS:
        return NUMBERS[field][0] <= value <= NUMBERS[field][1]
    return isinstance(value, int) and COUNTS[field][0] <= value <= COUNTS[field][1]


@pytest.mark.parametrize("field", [*NUMBERS, *COUNTS, "top_p", "ignore_eos", "speculate"])
@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__ if type(value) is object else repr(value))
def test_hc_088_110_odd_values_mean_something_or_are_refused_by_name(field: str, value: Any) -> None:
    if means_something(field, value):
        params = SamplingParams(**{field: value})
        got = getattr(params, field)
        assert got == value or math.isclose(got, value, rel_tol=1e-6)  # kept in single precision
    else:
        with pytest.raises(RequestError, match=field):
            SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", 2), ("n", 0), ("n", -1), ("n", 129), ("n", 2**63), ("n", True)),
        *(("logprobs", 1), ("logprobs", -1), ("logprobs", 10**9)),
        *(
            ("json_schema", {"type": "object"}),
            ("regex", "a+"),
            ("grammar", "start: /a/"),
            ("prediction", "the red fox"),
        ),
        *(("priority", 1), ("priority", -1)),
    ],
)
def test_hc_059_063_064_109_what_is_not_built_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("stop", [""]), ("stop", [1]), ("stop", 5), ("stop", ["x"] * 500), ("stop", ["x" * 100_000])),
        *(("stop_token_ids", [-1]), ("stop_token_ids", [2**32]), ("stop_token_ids", ["a"]), ("stop_token_ids", 7)),
        *(
            ("logit_bias", {1: math.nan}),
            ("logit_bias", {1: 1e30}),
            ("logit_bias", {-1: 0.0}),
            ("logit_bias", {"a": 0.0}),
        ),
        *(("logit_bias", [1]), ("logit_bias", {1: "x"})),
    ],
    ids=itertools.count(),
)
def test_lists_of_a_request_are_checked(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("parameters", [{"stop_token_ids": [320]}, {"logit_bias": {320: 1.0}}], ids=str)
def test_ids_outside_the_vocabulary_are_refused_at_the_call(engine: Engine, parameters: Any) -> None:
    with pytest.raises(RequestError, match=next(iter(parameters))):
        engine.stream(PROMPT, **parameters)


def test_hc_027_unknown_parameters_raise_and_name_the_known_ones(engine: Engine) -> None:
    with pytest.raises(RequestError, match="did you mean temperature"):
        engine.stream(PROMPT, temprature=0)
    with pytest.raises(RequestError, match="max_tokens, temperature"):
        engine.stream(PROMPT, zzz=0)
    with pytest.raises(RequestError, match="either SamplingParams or keywords"):
        engine.stream(PROMPT, SamplingParams(), temperature=0)
    with pytest.raises(RequestError, match="expected SamplingParams, got dict"):
        engine.stream(PROMPT, {"temperature": 0})  # type: ignore[arg-type]


def test_the_known_parameters_are_all_of_them() -> None:
    stub = (REPOSITORY / "python" / "slipstream" / "_core.pyi").read_text(encoding="utf-8")
    class_body = stub.split("class SamplingParams:")[1].split("class Stats:")[0]
    signature = class_body.split("def __new__(")[1].split("-> SamplingParams")[0]
    assert tuple(re.findall(r"^        (\w+):", signature, flags=re.MULTILINE)) == PARAMETERS
    with pytest.raises((TypeError, RequestError)):
        SamplingParams(zzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [], (), [""], [[]], ["x", ""], None, 5, 1.5, b"bytes", {"role": "user", "content": "x"}),
        *([True, False], [1, -1], [1, 2**40], [320], [1, "x"], [1, 1.5], [1, None], [[1], []], "\ud800"),
        *([{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 5}], [{"role": 1, "content": "x"}]),
        *(
            [{"role": "user", "content": None}],
            [{"role": "user", "content": "x"}, "y"],
            [{"role": "user", "content": ""}, 1],
        ),
        *(np.array([[1.5]]), np.array([], dtype=np.int64), [None], [object()]),
    ],
    ids=itertools.count(),
)
def test_hc_085_wrong_prompts_are_refused(engine: Engine, chat_engine: Engine, prompt: Any) -> None:
    for one in (engine, chat_engine):
        with pytest.raises(RequestError, match="expected"):
            one.generate(prompt, max_tokens=1)
    assert engine.generate(PROMPT, max_tokens=1).token_ids


@pytest.mark.parametrize(
    "token_ids",
    [*([-1], [2**32], [2**80], [True], [1.0], [None], ["a"], [320]), *(None, "ab", b"ab", 5, {1: 2}, {1}, [[1]])],
    ids=repr,
)
def test_hc_085_wrong_token_ids_are_refused_by_the_core_too(target_a: Path, token_ids: Any) -> None:
    with Engine(target_a, threads=1) as engine:
        with pytest.raises(RequestError, match="prompt"):
            engine._core.submit(token_ids, SamplingParams())
        with pytest.raises(RequestError, match="token_ids"):
            engine.decode(token_ids)


@pytest.mark.parametrize("text", [None, 5, b"text", ["text"], "\ud800"], ids=ascii)
def test_what_is_no_text_is_not_encoded(engine: Engine, text: Any) -> None:
    with pytest.raises(RequestError, match="expected text to be"):
        engine.encode(text)


def test_reprs_are_python(engine: Engine) -> None:
    params = SamplingParams(temperature=0.5, stop="a\nb", ignore_eos=True, logit_bias={3: 1.0}, speculate=4)
    assert eval(repr(params), {"SamplingParams": SamplingParams}).logit_bias == {3: 1.0}
    shown = 'temperature=0.5, stop=["a\\nb"], ignore_eos=True, logit_bias={3: 1.0}, speculate=4'
    assert repr(params) == f"SamplingParams({shown})"
    first, *_, last = engine.stream(PROMPT, max_tokens=3, temperature=0, ignore_eos=True)
    assert "finish_reason=None)" in repr(first)
    assert 'finish_reason="length")' in repr(last)


def test_hc_085_whitespace_is_a_prompt(engine: Engine) -> None:
    assert engine.generate(" ", max_tokens=2, ignore_eos=True, temperature=0).finish_reason == "length"


def test_hc_109_too_many_prompts_are_refused_before_any_is_read(engine: Engine) -> None:
    start = time.monotonic()
    with pytest.raises(RequestError, match="at most 10000 prompts"):
        engine.generate([PROMPT] * 10_001)
    assert time.monotonic() - start < 1


def test_chat_needs_a_template(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"chat template(.|\n)*hint: "):
        engine.stream([{"role": "user", "content": "hello"}])


def test_prompts_of_every_kind_agree(engine: Engine, chat_engine: Engine) -> None:
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    ids = engine.encode(PROMPT)
    expected = engine.generate(PROMPT, **settings).token_ids
    assert engine.generate(ids, **settings).token_ids == expected
    assert engine.generate(tuple(ids), SamplingParams(**settings)).token_ids == expected
    assert engine.generate(np.array(ids, dtype=np.uint16), **settings).token_ids == expected  # type: ignore[call-overload]
    assert [done.token_ids for done in engine.generate([PROMPT, ids], **settings)] == [expected, expected]
    chat = [{"role": "user", "content": "hi"}]
    rendered = chat_engine.encode("<user>hi\n<assistant>", add_special=False)
    expected = chat_engine.generate(rendered, **settings).token_ids
    assert chat_engine.generate(chat, **settings).token_ids == expected
    assert [done.token_ids for done in chat_engine.generate([chat, chat], **settings)] == [expected, expected]


def test_stream_and_generate_agree_and_add_up(engine: Engine, no_leak: Check) -> None:
    settings: dict[str, Any] = {"max_tokens": 60, "temperature": 0.9, "seed": 11, "ignore_eos": True}
    done = engine.generate(PROMPT, **settings)
    stream = engine.stream(PROMPT, **settings)
    assert stream.stats is None
    chunks = list(stream)
    assert stream.seed == done.seed == 11
    assert [token for chunk in chunks for token in chunk.token_ids] == done.token_ids
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert "".join(text for chunk in chunks for text, _ in chunk.pieces) == done.text
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == done.finish_reason == "length"
    stats = stream.stats
    assert stats is not None
    assert stats.tokens == len(done.token_ids) == stats.steps + stats.accepted - stats.cut_tokens
    assert sum(chunk.num_accepted for chunk in chunks) == stats.accepted


def test_a_drawn_seed_is_reported_and_gives_the_same_again(engine: Engine) -> None:
    first = engine.generate(PROMPT, max_tokens=30, temperature=1.5)
    assert engine.generate(PROMPT, max_tokens=30, temperature=1.5, seed=first.seed).token_ids == first.token_ids


@pytest.mark.parametrize("seed", range(8))
def test_hc_068_chunks_join_to_the_decoded_whole(engine: Engine, seed: int) -> None:
    """At a high temperature the tiny byte-level model writes bytes that are rarely whole characters."""
    stream = engine.stream(PROMPT, max_tokens=80, temperature=50.0, seed=seed, ignore_eos=True)
    chunks = list(stream)
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    assert "".join(chunk.text for chunk in chunks) == engine.decode(token_ids)


# Leaving a stream (HC-080, HC-081).


def leave_by_break(engine: Engine) -> None:
    for _ in engine.stream(PROMPT, **LONG):
        break


def leave_by_error(engine: Engine) -> None:
    with contextlib.suppress(KeyError):
        for _ in engine.stream(PROMPT, **LONG):
            raise KeyError


def leave_by_close(engine: Engine) -> None:
    stream = engine.stream(PROMPT, **LONG)
    next(stream)
    stream.close()
    stream.close()
    assert all(chunk.finish_reason in (None, "cancelled") for chunk in stream)


def leave_by_del(engine: Engine) -> None:
    stream = engine.stream(PROMPT, **LONG)
    next(stream)
    del stream
    gc.collect()


def leave_by_context(engine: Engine) -> None:
    with engine.stream(PROMPT, **LONG) as stream:
        next(stream)


def leave_unread(engine: Engine) -> None:
    engine.stream(PROMPT, **LONG)


@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_error, leave_by_close, leave_by_del, leave_by_context, leave_unread]
)
def test_hc_080_081_leaving_a_stream_cancels(engine: Engine, no_leak: Check, leave: Callable[[Engine], None]) -> None:
    for _ in range(20):
        leave(engine)
    no_leak()


async def aleave_by_break(engine: Engine) -> None:
    async for _ in engine.astream(PROMPT, **LONG):
        break


async def aleave_by_aclose(engine: Engine) -> None:
    stream = engine.astream(PROMPT, **LONG)
    await anext(stream)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def aleave_by_cancel_while_waiting(engine: Engine) -> None:
    async def read() -> None:
        async for _ in engine.astream(PROMPT, **LONG):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])


async def aleave_by_cancel_between_items(engine: Engine) -> None:
    async def read() -> None:
        async for _ in engine.astream(PROMPT, **LONG):
            await asyncio.sleep(60)

    task = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait([task])


async def aleave_by_context(engine: Engine) -> None:
    async with engine.astream(PROMPT, **LONG) as stream:
        await anext(stream)


async def aleave_the_loop(engine: Engine) -> None:
    stream = engine.astream(PROMPT, **LONG)
    await anext(stream)
    aleave_the_loop.stream = stream  # type: ignore[attr-defined]  # outlives its loop


@pytest.mark.parametrize(
    "leave",
    [
        aleave_by_break,
        aleave_by_aclose,
        aleave_by_cancel_while_waiting,
        aleave_by_cancel_between_items,
        aleave_by_context,
        aleave_the_loop,
    ],
)
def test_hc_081_leaving_an_async_stream_cancels(engine: Engine, no_leak: Check, leave: Any) -> None:
    for _ in range(5):
        asyncio.run(leave(engine))
    gc.collect()
    no_leak()


def test_astream_brings_what_generate_does(engine: Engine, no_leak: Check) -> None:
    settings: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    expected = engine.generate(PROMPT, **settings)

    async def read() -> list[int]:
        stream = engine.astream(PROMPT, **settings)
        token_ids = [token async for chunk in stream for token in chunk.token_ids]
        assert stream.stats is not None
        return token_ids

    async def read_all() -> list[list[int]]:
        return await asyncio.gather(*(read() for _ in range(4)))

    assert asyncio.run(read_all()) == [expected.token_ids] * 4


def test_errors_of_an_async_stream_are_raised_at_the_call(engine: Engine) -> None:
    with pytest.raises(RequestError, match="temperature"):
        engine.astream(PROMPT, temperature=-1)


def test_closing_an_engine_ends_its_requests(target_a: Path) -> None:
    engine = Engine(target_a, threads=1)
    stream = engine.stream(PROMPT, **LONG)
    next(stream)
    engine.close()
    engine.close()
    with contextlib.suppress(DeviceError):
        assert [*(chunk.finish_reason for chunk in stream)][-1:] in ([], ["cancelled"])
    with pytest.raises(DeviceError, match="closed"):
        engine.generate(PROMPT)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        *((lambda: NGram(min_match=6), "min_match"), (lambda: NGram(max_nodes=0), "max_nodes")),
        *((lambda: Eagle("x", top_k=0), "top_k"), (lambda: Eagle("x", max_depth=33), "max_depth")),
        *((lambda: Eagle("x", max_depth=0), "max_depth"), (lambda: Eagle("x", max_nodes=1025), "max_nodes")),
        (lambda: Eagle("x", top_k=2, max_depth=2, max_nodes=11, fixed_tree=True), "at most 10"),
        *((lambda: DraftModel("x", num_layers=0), "num_layers"), (lambda: DraftModel("x", top_k=True), "top_k")),
        *((lambda: Eagle("x", max_nodes=10**400), "max_nodes"), (lambda: Eagle("x", noise=1), "noise")),  # type: ignore[arg-type]
    ],
    ids=itertools.count(),
)
def test_hc_047_drafters_outside_their_ranges_are_refused(build: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build()


@pytest.mark.parametrize(
    "setting",
    [
        *({"device": "cuda"}, {"verify": "typical"}, {"compute": "bf16"}, {"quantize": "int4"}, {"kv_dtype": "f16"}),
        *({"exact": False}, {"exact": 1}, {"max_batch": 0}, {"max_batch": True}, {"max_batch": "4"}, {"threads": 0}),
        *({"threads": -1}, {"block_size": 0}, {"max_context": 0}, {"kv_cache_bytes": 1.5}, {"kv_cache_bytes": 2**70}),
        *({"prefix_cache": 1}, {"chunk": 0}, {"max_batch_tokens": 0}),
    ],
    ids=str,
)
def test_settings_that_are_wrong_or_not_built_are_refused_by_name(target_a: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Engine(target_a, **setting)


@pytest.mark.parametrize("drafter", ["eagle", 5, ["ngrams"], {"ngram": 1}, NGram], ids=str)
def test_wrong_drafters_are_refused(target_a: Path, drafter: Any) -> None:
    with pytest.raises(ConfigError, match="drafter"):
        Engine(target_a, drafter)


def test_hc_027_drafter_settings_are_in_effect(target_a: Path, head_a: Path) -> None:
    with Engine(target_a, [NGram(max_nodes=3), Eagle(head_a, max_nodes=7)], threads=1) as engine:
        assert len(engine.info()["drafters"]) == 2
        done = engine.generate(PROMPT, max_tokens=40, temperature=0, ignore_eos=True)
        assert 0 < done.stats.drafted <= 10 * done.stats.steps
        silent = engine.generate(PROMPT, max_tokens=40, temperature=0, ignore_eos=True, speculate=False)
        assert silent.stats.drafted == 0
        assert silent.token_ids == done.token_ids
