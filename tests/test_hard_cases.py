"""Numbered faults that other engines really had, where no other file shows them; ``README.md`` has the whole table."""

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reference
from conftest import GOLDEN, REPOSITORY, generate_each, golden_prompts, ids_of, writes
from reference import changed
from slipstream import CapacityError, DraftModel, Eagle, Engine, Error, ModelError, NGram, RequestError

PROMPTS = golden_prompts()
TINY = reference.random_model(11, vocab_size=61)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
TINY_PROMPTS = [[1], [1, 7], [3, 4, 5], [5, 6, 7, 8] * 5, list(range(60)), [2, 9] * 8]
FIXED: dict[str, Any] = {"fixed_tree": True, "max_depth": 3, "top_k": 2, "max_nodes": 7}


# Blocks, limits and the batch.


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_hc_028_there_is_room_for_draft_slots_at_every_residue(block_size: int) -> None:
    prompts = [list(range(1, 2 + length)) for length in range(17)]
    for nodes in (1, block_size, 2 * block_size):
        for drafter in (
            NGram(min_match=1, max_nodes=nodes),
            DraftModel(TINY, num_layers=1, fixed_tree=True, max_depth=8, top_k=4, max_nodes=nodes),
        ):
            assert writes(TINY, drafter, prompts, GREEDY, block_size=block_size) == writes(TINY, None, prompts, GREEDY)


@pytest.mark.parametrize("kind", ["ngram", "draft_model", "eagle", "list"])
def test_hc_029_every_end_of_a_request_gives_its_blocks_back(target_a: Path, head_a: Path, kind: str) -> None:
    drafter: Any = {
        "ngram": NGram(),
        "draft_model": DraftModel(target_a, num_layers=1),
        "eagle": Eagle(head_a),
        "list": [NGram(), Eagle(head_a)],
    }[kind]
    with Engine(target_a, drafter, threads=1, prefix_cache=False) as engine:
        before = engine.load()
        text = engine.generate(PROMPTS[0], **GREEDY).text
        ends: list[dict[str, Any]] = [{}, {"stop": text[:2]}, {"stop_token_ids": [87]}, {"temperature": 0}]
        for round_number in range(12):
            streams = [
                engine.stream(PROMPTS[index % 10], seed=index, max_tokens=1 + (7 * index + round_number) % 30, **each)
                for index, each in enumerate(ends * 2)
            ]
            for index, stream in enumerate(streams):
                if index % 3 == 0:
                    stream.close()
                for _ in stream:
                    pass
        assert engine.load() == before


def test_hc_030_after_rejections_the_drafter_proposes_what_a_fresh_one_would(target_a: Path) -> None:
    """The accepted counts from any step on are those of a request that begins there with an empty cache."""
    drafter = DraftModel(target_a, num_layers=2, fixed_tree=True, max_depth=4, top_k=2, max_nodes=8)
    parameters: dict[str, Any] = {"ignore_eos": True, "temperature": 0.5, "seed": 3}
    with Engine(target_a, drafter, threads=1, prefix_cache=False) as engine:
        chunks = list(engine.stream(PROMPTS[0], max_tokens=200, **parameters))
        accepted = [chunk.num_accepted for chunk in chunks]
        assert {0, 1, 2} <= {*accepted}
        written: list[int] = []
        for index, chunk in enumerate(chunks):
            if index % 9 == 1:
                left = 200 - len(written)
                fresh = engine.stream(PROMPTS[0] + written, max_tokens=left, **parameters)
                assert [one.num_accepted for one in fresh] == accepted[index:]
            written += chunk.token_ids


def test_hc_032_positions_stay_consecutive_at_powers_of_two() -> None:
    model = changed(TINY, max_position_embeddings=4200)
    drafter = DraftModel(model, fixed_tree=True, max_depth=8, top_k=1, max_nodes=8)
    prompt = [1 + token % 60 for token in range(3950)]
    with Engine(model, drafter, threads=1) as engine:
        for start, count in ((prompt[:200], 100), (prompt, 200)):
            chunks = list(engine.stream(start, max_tokens=count, ignore_eos=True, seed=5))
            assert sum(len(chunk.token_ids) for chunk in chunks) == count
            assert {chunk.num_accepted for chunk in chunks[:-1]} == {8}


@pytest.mark.slow
def test_hc_032_positions_stay_consecutive_over_tens_of_thousands_of_tokens() -> None:
    model = changed(TINY, max_position_embeddings=40_000)
    drafter = DraftModel(model, fixed_tree=True, max_depth=8, top_k=1, max_nodes=8)
    with Engine(model, drafter, threads=2) as engine:
        chunks = list(engine.stream([1, 2, 3], max_tokens=33_000, ignore_eos=True, seed=5))
    assert sum(len(chunk.token_ids) for chunk in chunks) == 33_000
    assert {chunk.num_accepted for chunk in chunks[:-1]} == {8}


def test_hc_034_a_drafter_that_is_always_wrong_costs_steps_and_nothing_else() -> None:
    target = reference.constant_model([0.1, 0.8, 0.1])
    liar = reference.constant_model([0.8, 0.1, 0.1])
    for top_k in (1, 2):
        tree = DraftModel(liar, noise=False, fixed_tree=True, max_depth=3, top_k=1, max_nodes=3)
        with Engine(target, tree, threads=1, max_context=120) as engine:
            done = engine.generate([[0]] * (4 * top_k), max_tokens=100, temperature=0, ignore_eos=True)
        for one in done:
            assert one.token_ids == [1] * 100
            assert (one.stats.accepted, one.stats.steps) == (0, 100)
            assert one.stats.drafted > 200


def test_hc_035_refused_drafts_are_not_found_in_the_prefix_cache() -> None:
    target = reference.constant_model([0.1, 0.8, 0.1])
    liar = reference.constant_model([0.8, 0.1, 0.1])
    drafter = DraftModel(liar, noise=False, fixed_tree=True, max_depth=8, top_k=1, max_nodes=8)
    with Engine(target, drafter, threads=1, block_size=4, max_context=120) as engine:
        engine.generate([2, 1, 2], max_tokens=30, temperature=0)
        found = engine.generate([2, 1, 2] + [0] * 20, max_tokens=8, temperature=0).stats.cached_tokens
        assert found == 0
        known = engine.generate([2, 1, 2] + [1] * 20, max_tokens=8, temperature=0)
        assert 16 <= known.stats.cached_tokens < 23
        assert known.token_ids == [1] * 8


@pytest.mark.parametrize("chunk", [8, 16, 33])
def test_hc_039_the_first_tokens_after_a_prompt_in_chunks_are_right(target_a: Path, head_a: Path, chunk: int) -> None:
    prompts = [(PROMPTS[7] + PROMPTS[8][1:] + PROMPTS[6][1:])[: chunk * count] for count in (5, 7)]
    for drafter in (NGram(), Eagle(head_a), DraftModel(target_a, num_layers=2)):
        with Engine(target_a, drafter, threads=1, chunk=chunk, prefix_cache=False) as engine:
            alone = [engine.generate(prompt, **GREEDY).token_ids for prompt in prompts]
            others = [engine.stream(prompt, max_tokens=80, seed=1, ignore_eos=True) for prompt in PROMPTS[:4]]
            together = ids_of(engine.generate(prompts, **GREEDY))
            del others
        assert alone == together == writes(target_a, None, prompts, GREEDY)


def test_hc_040_091_no_tokens_of_others_and_no_hang_in_a_pool_that_evicts_all_the_time(target_a: Path) -> None:
    with Engine(target_a, threads=1, prefix_cache=False) as engine:
        prompts = [[1, *([80 + client, 70 + client % 7] * 6), *PROMPTS[client % 5][1:8]] for client in range(64)]
        expected = ids_of(engine.generate(prompts, temperature=0, max_tokens=12, ignore_eos=True))
    with Engine(target_a, NGram(), threads=2, kv_cache_bytes=130_000, block_size=4, max_batch=16) as engine:
        for _ in range(3):
            assert ids_of(engine.generate(prompts, temperature=0, max_tokens=12, ignore_eos=True)) == expected
        assert engine.stats().preemptions > 0


def test_hc_048_rows_of_a_ragged_batch_accept_what_they_accept_alone(target_a: Path, head_a: Path) -> None:
    prompts = [PROMPTS[7][:length] for length in (1, 2, 17, 64)]
    for drafter in (Eagle(head_a, fixed_tree=True), DraftModel(target_a, num_layers=2, fixed_tree=True)):
        with Engine(target_a, drafter, threads=2, prefix_cache=False) as engine:
            alone = [engine.generate(prompt, **GREEDY) for prompt in prompts]
            together = engine.generate(prompts, **GREEDY)
        assert ids_of(together) == ids_of(alone)
        for one, other in zip(together, alone, strict=True):
            assert (one.stats.accepted, one.stats.steps) == (other.stats.accepted, other.stats.steps)
            assert one.stats.per_depth == other.stats.per_depth


TINY_DRAFTERS: list[Any] = [
    NGram(min_match=1, max_nodes=16),
    DraftModel(TINY, num_layers=1, max_depth=6),
    DraftModel(TINY, **FIXED),
    Eagle(reference.random_head(4, 61), **FIXED),
]


@pytest.mark.parametrize("drafter", TINY_DRAFTERS, ids=["ngram", "draft_model", "twin", "eagle"])
def test_hc_052_054_072_075_the_context_is_filled_exactly(drafter: Any) -> None:
    with Engine(TINY, drafter, threads=1, max_context=64) as engine, Engine(TINY, threads=1, max_context=64) as plain:
        prompts = [[1 + token % 60 for token in range(length)] for length in (1, 2, 30, 57, 60, 62, 63)]
        for parameters in ({"max_tokens": None}, {"max_tokens": 2**31 - 1}, {"max_tokens": 3}):
            each = [{"temperature": 0, "ignore_eos": True, **parameters}] * len(prompts)
            done = generate_each(engine, prompts, each)
            assert ids_of(done) == ids_of(generate_each(plain, prompts, each))
            for prompt, one in zip(prompts, done, strict=True):
                room = 64 - len(prompt)
                assert len(one.token_ids) == one.stats.tokens == min(parameters["max_tokens"] or room, room)
                assert one.finish_reason == "length"
        for length in (65, 640):
            with pytest.raises(RequestError, match=rf"(?s)64.*{length}|{length}.*64"):
                engine.stream([1] * length, max_tokens=1)
        assert engine.generate([1], max_tokens=1).token_ids


@pytest.mark.parametrize("drafter", ["draft_model", "eagle"])
def test_hc_073_074_a_drafter_with_a_shorter_context_than_the_target(drafter: str) -> None:
    prompts = [list(range(1, 1 + length)) for length in (10, 31, 32, 33, 60)]
    short = changed(TINY, max_position_embeddings=32)
    head = changed(reference.random_head(4, 61), max_position_embeddings=32)
    chosen = DraftModel(short, **FIXED) if drafter == "draft_model" else Eagle(head, **FIXED)
    assert writes(TINY, chosen, prompts, GREEDY) == writes(TINY, None, prompts, GREEDY)


# Single requests.


def test_hc_059_every_setting_has_an_effect_or_is_refused() -> None:
    """Those that are refused: ``test_hc_059_063_064_109_what_is_not_built_is_refused_by_name``."""
    base: dict[str, Any] = {"max_tokens": 24, "seed": 9, "ignore_eos": True}
    extremes: list[dict[str, Any]] = [
        *({"temperature": 0}, {"temperature": 50.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"seed": 10}),
        *({"repetition_penalty": 100.0}, {"presence_penalty": 100.0}, {"frequency_penalty": 100.0}),
        *({"logit_bias": {5: 100.0}}, {"max_tokens": 3}),
    ]
    for drafter in (None, NGram(min_match=1), DraftModel(TINY, num_layers=1)):
        with Engine(TINY, drafter, threads=1) as engine:
            plain = engine.generate([1, 7], **base).token_ids
            for extreme in extremes:
                assert engine.generate([1, 7], **{**base, **extreme}).token_ids != plain, extreme


def test_hc_060_bias_outside_the_vocabulary_is_refused_and_others_go_on(engine: Engine) -> None:
    expected = engine.generate(PROMPTS[0], **GREEDY).token_ids
    running = engine.stream(PROMPTS[0], **GREEDY)
    for token in (320, 321, 2**31, 2**32 - 1, 2**32, 2**63, 2**70, -1, "7", 1.5, None):
        with pytest.raises(RequestError, match="logit_bias"):
            engine.stream(PROMPTS[1], logit_bias={token: 1.0})
    assert [token for chunk in running for token in chunk.token_ids] == expected


@pytest.mark.parametrize("drafter", [None, *TINY_DRAFTERS], ids=["none", "ngram", "draft_model", "twin", "eagle"])
def test_hc_086_087_short_prompts_and_extreme_filters(drafter: Any) -> None:
    extremes: list[dict[str, Any]] = [
        *({"top_k": top_k} for top_k in (0, 1, 61, 62, 2**31 - 1)),
        *({"top_p": 1e-12}, {"top_p": 1.0}, {"temperature": 1e-8}, {"temperature": 1e4}, {"min_p": 1.0}),
        {"top_k": 1, "top_p": 1e-12, "min_p": 1.0, "temperature": 1e-8},
    ]
    each = [{"max_tokens": 20, "ignore_eos": True, "seed": 1, **extreme} for extreme in extremes]
    for prompt in ([4], [4, 5], [4, 5, 6]):
        with Engine(TINY, drafter, threads=1) as engine, Engine(TINY, threads=1) as plain:
            done = ids_of(generate_each(engine, [prompt] * len(each), each))
            assert done == ids_of(generate_each(plain, [prompt] * len(each), each))
            greedy = plain.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True).token_ids
            assert done[0] == done[2] == done[3] == done[4] == done[6]
            assert done[1] == done[5] == done[7] == done[9] == done[10] == greedy


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_hc_089_a_row_that_is_not_finite_is_an_error_of_its_request(value: float) -> None:
    weights = copy.deepcopy(TINY[1])
    weights["model.embed_tokens.weight"][60] = value
    allowed = {"logit_bias": {60: -100.0}, **GREEDY}
    for drafter in (None, NGram(min_match=1), DraftModel(TINY, **FIXED)):
        with Engine((TINY[0], weights), drafter, threads=1) as engine:
            expected = engine.generate([1, 2], **allowed).token_ids
            good = engine.stream([1, 2], **allowed)
            with pytest.raises(Error, match="finite"):
                engine.generate([1, 60, 2], **allowed)
            assert [token for chunk in good for token in chunk.token_ids] == expected
            assert engine.load()["running"] == 0


def test_hc_083_084_the_budget_holds_the_drafter_and_too_small_a_one_is_refused_with_numbers(target_a: Path) -> None:
    for drafter in (None, DraftModel(target_a, num_layers=2)):
        with pytest.raises(CapacityError, match=r"expected kv_cache_bytes of at least \d+(.|\n)*got 2000"):
            Engine(target_a, drafter, kv_cache_bytes=2000)
        with Engine(target_a, drafter, kv_cache_bytes=3_000_000, threads=1) as engine:
            assert engine.info()["kv_bytes"] <= 3_000_000
            assert len(engine.generate(PROMPTS, **GREEDY)) == len(PROMPTS)


@pytest.mark.parametrize("drafter", TINY_DRAFTERS, ids=["ngram", "draft_model", "twin", "eagle"])
def test_hc_092_093_counts_of_requests_and_of_the_engine_add_up(drafter: Any) -> None:
    names = ("prompt_tokens", "cached_tokens", "tokens", "cut_tokens", "steps", "drafted", "accepted", "preemptions")
    parameters = [{"max_tokens": 1 + 3 * index, "seed": index, "stop_token_ids": [9]} for index in range(20)]
    with Engine(TINY, drafter, threads=1) as engine:
        streams = [engine.stream(TINY_PROMPTS[index % 6], **each) for index, each in enumerate(parameters)]
        totals = dict.fromkeys(names, 0)
        for stream in streams:
            chunks = list(stream)
            stats = stream.stats
            assert stats is not None
            assert stats.tokens == sum(len(chunk.token_ids) for chunk in chunks)
            assert stats.tokens == stats.steps + stats.accepted - stats.cut_tokens
            assert 0 <= stats.accepted <= stats.drafted
            assert sum(chunk.num_accepted for chunk in chunks) <= stats.accepted
            for name in names:
                totals[name] += getattr(stats, name)
        assert totals == {name: getattr(engine.stats(), name) for name in names}


def test_hc_096_copied_text_takes_a_third_of_the_passes() -> None:
    model = reference.constant_model([0.1, 0.8, 0.1])
    with Engine(model, NGram(max_nodes=5), threads=1) as engine:
        stats = engine.generate([1, 1, 1], max_tokens=100, temperature=0, ignore_eos=True).stats
    assert stats.tokens == 100
    assert stats.steps <= 100 / 3


# Processes, files, and the table.


def test_hc_006_greedy_text_is_the_same_in_every_process(target_a: Path, head_a: Path, python: Any) -> None:
    script = """
        import hashlib, json, sys
        from slipstream import Eagle, Engine, NGram
        prompts = json.loads(sys.argv[3])
        with Engine(sys.argv[1], [NGram(), Eagle(sys.argv[2])]) as engine:
            engine.generate([5, 6, 7], max_tokens=5)
            done = engine.generate(prompts, max_tokens=300, temperature=0, ignore_eos=True)
        print(hashlib.sha256(json.dumps([one.token_ids for one in done]).encode()).hexdigest())
    """
    started = [python(script, str(target_a), str(head_a), json.dumps(PROMPTS)) for _ in range(3)]
    printed = {process.communicate(timeout=60)[0] for process in started}
    assert len(printed) == 1
    assert re.fullmatch(r"[0-9a-f]{64}\n", printed.pop())


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\x80\x02}q\x00.", b"<!DOCTYPE html><html></html>", b"\xff" * 64])
def test_hc_102_104_foreign_and_cut_files_are_model_errors(target_a: Path, tmp_path: Path, content: bytes) -> None:
    for name in ("model.gguf", "model.safetensors"):
        folder = tmp_path / name
        shutil.copytree(target_a, folder)
        (folder / name).write_bytes(content)
        with pytest.raises(ModelError):
            Engine(folder / name if name.endswith("gguf") else folder)


def test_hc_105_weights_cut_short_are_refused_by_name(target_a: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(target_a, folder)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in (len(whole) // 4, len(whole) // 2, len(whole) * 99 // 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors(.|\n)*weight"):
            Engine(folder)


def test_hc_112_prompts_and_outputs_are_not_logged(target_a: Path, python: Any) -> None:
    script = """
        import sys
        from slipstream import Engine, NGram
        with Engine(sys.argv[1], NGram()) as engine:
            done = engine.generate("canary fox canary fox", max_tokens=40, temperature=0, stop="canary stop")
            assert done.text
    """
    printed, _ = python(script, str(target_a)).communicate(timeout=60)
    assert printed == ""


def test_the_table_names_every_case_and_every_test() -> None:
    text = (REPOSITORY / "tests" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| \d{3} \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 113))
    sources = [path for folder in ("tests", "rust") for path in (REPOSITORY / folder).rglob("*.[pr][ys]")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources if GOLDEN not in path.parents)
    known = {*re.findall(r"\b(?:def|fn) (\w+)\(", code)}
    named: dict[str, set[int]] = {}
    for row in rows:
        _, number, _, state, tests, _ = (cell.strip() for cell in row.split("|"))
        assert re.match(r"passes|refused by design|waits", state), row
        shown = re.findall(r"`(\w+)`", tests)
        assert shown or state.startswith("waits"), row
        assert {*shown} <= known, f"{number}: { ({*shown} - known) } do not exist"
        for name in shown:
            named.setdefault(name, set()).add(int(number))
    for name in known:
        if numbers := re.match(r"(?:test_)?hc((?:_\d{3})+)_", name):
            assert {int(number) for number in numbers[1].strip("_").split("_")} <= named.get(name, set()), name
