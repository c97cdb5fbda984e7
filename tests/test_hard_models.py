"""Models and drafters that fit, and those that are refused: numbered faults that other engines really had."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import reference
from conftest import generate_each, golden_prompts, ids_of, writes
from reference import changed
from slipstream import DraftModel, Eagle, Engine, ModelError, NGram

PROMPTS = golden_prompts()
TINY = reference.random_model(11, vocab_size=61)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
TINY_PROMPTS = [[1], [1, 7], [3, 4, 5], [5, 6, 7, 8] * 5, list(range(60)), [2, 9] * 8]
FIXED: dict[str, Any] = {"fixed_tree": True, "max_depth": 3, "top_k": 2, "max_nodes": 7}


def check_same(target: Any, drafter: Any, prompts: list[list[int]] = TINY_PROMPTS) -> None:
    """A drafter changes nothing."""
    assert writes(target, drafter, prompts, GREEDY) == writes(target, None, prompts, GREEDY)


@pytest.mark.parametrize("family", ["mamba", "rwkv", "jamba", "gemma3"])
def test_hc_003_models_whose_cache_cannot_be_rewound_are_refused(family: str) -> None:
    with pytest.raises(ModelError, match=family):
        Engine(changed(TINY, model_type=family), NGram())


@pytest.mark.parametrize(
    "fields", [{"model_type": "mistral", "sliding_window": 8}, {"model_type": "qwen2", "use_sliding_window": True}]
)
def test_hc_043_044_sliding_windows_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"mistral|sliding"):
        Engine(changed(TINY, **fields))


@pytest.mark.parametrize("scaling", ["yarn", "dynamic", "longrope", "mrope", "su"])
def test_hc_023_unknown_rotary_scaling_is_refused(scaling: str) -> None:
    model = changed(TINY, rope_scaling={"rope_type": scaling, "factor": 4.0})
    with pytest.raises(ModelError, match=scaling):
        Engine(model)
    with pytest.raises(ModelError, match=scaling):
        Engine(TINY, DraftModel(model))


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 100),
        ({"rope_type": "linear", "factor": 4.0}, 100),
        (
            {
                **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 32,
            },
            100,
        ),
    ],
)
def test_hc_023_030_045_a_twin_is_right_at_every_position_and_depth(scaling: Any, length: int) -> None:
    model = changed(TINY, rope_scaling=scaling)
    for noise, temperature in ((True, 1.0), (False, 0.0)):
        drafter = DraftModel(model, noise=noise, fixed_tree=True, max_depth=4, top_k=2, max_nodes=12)
        with Engine(model, drafter, threads=1) as engine:
            stream = engine.stream([1, 2, 3], max_tokens=length, ignore_eos=True, temperature=temperature, seed=1)
            accepted = [chunk.num_accepted for chunk in stream]
            assert stream.stats is not None
            # The tree holds twelve of many nodes: the path is in it to depth two at least, and then all of it is right.
            assert stream.stats.per_depth[0] == 1.0
            assert min(accepted[:-1]) >= 1
    chain = DraftModel(model, fixed_tree=True, max_depth=4, top_k=1, max_nodes=4)
    with Engine(model, chain, threads=1) as engine:
        stream = engine.stream([1, 2, 3], max_tokens=length, ignore_eos=True, seed=1)
        assert {chunk.num_accepted for chunk in list(stream)[:-1]} == {4}


def other_size(size: int) -> reference.Model:
    return reference.random_model(12, vocab_size=size)


@pytest.mark.parametrize("size", [50, 64])
def test_hc_017_another_vocabulary_size_is_refused_with_both_sizes(size: int) -> None:
    for drafter in (DraftModel(other_size(size)), Eagle(reference.random_head(1, size))):
        with pytest.raises(ModelError, match=rf"(?s)61.*{size}|{size}.*61"):
            Engine(TINY, drafter)
    check_same(TINY, DraftModel(other_size(61), **FIXED))


def swap_two(tokenizer: dict[str, Any]) -> None:
    vocab = tokenizer["model"]["vocab"]
    one, other = [token for token, index in vocab.items() if index in (100, 101)]
    vocab[one], vocab[other] = vocab[other], vocab[one]


def rename_special(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"][-1]["content"] += "x"
    vocab = tokenizer["model"]["vocab"]
    special = next((token for token, index in vocab.items() if index == tokenizer["added_tokens"][-1]["id"]), None)
    if special is not None:
        vocab[special + "x"] = vocab.pop(special)


@pytest.mark.parametrize("change", [swap_two, rename_special])
def test_hc_018_another_tokenizer_of_the_same_size_is_refused(
    target_a: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(target_a, folder)
    check_same(target_a, DraftModel(folder, num_layers=1), PROMPTS[:2])
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer|token"):
        Engine(target_a, DraftModel(folder, num_layers=1))


def padded(model: Path, rows: int) -> Any:
    """A golden target with an embedding table of another number of rows than its tokenizer has tokens."""
    weights = load_file(model / "model.safetensors")
    rng = np.random.default_rng(3)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        # Large rows: were they drawn, they would win.
        more = (rng.standard_normal((rows, 64)) * 10).astype(np.float32)
        weights[name] = np.concatenate([weights[name], more])
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return {**config, "vocab_size": config["vocab_size"] + rows}, weights, model


def test_hc_019_rows_past_the_tokenizer_are_never_written(target_a: Path) -> None:
    expected = writes(target_a, None, PROMPTS, GREEDY)
    for drafter in (None, NGram(), DraftModel(padded(target_a, 64), num_layers=2)):
        assert writes(padded(target_a, 64), drafter, PROMPTS, GREEDY) == expected
    for drafter in (DraftModel(padded(target_a, 8), num_layers=2), DraftModel(target_a, num_layers=2)):
        assert writes(padded(target_a, 64), drafter, PROMPTS, GREEDY) == expected


def test_hc_020_a_head_of_another_width_is_refused_with_both(target_a: Path) -> None:
    with pytest.raises(ModelError, match=r"64(.|\n)*fc\.weight(.|\n)*32"):
        Engine(target_a, Eagle(reference.random_head(1, 320)))


def test_hc_021_026_other_kinds_of_heads_are_refused() -> None:
    config, head = reference.random_head(1, 61)
    with pytest.raises(ModelError, match="EAGLE-3"):
        Engine(TINY, Eagle((config, {**head, "d2t": np.zeros(61, np.float32)})))
    medusa = {"0.0.linear.weight": np.zeros((32, 32), np.float32), "0.1.weight": np.zeros((61, 32), np.float32)}
    with pytest.raises(ModelError, match=r"EAGLE(.|\n)*fc\.weight"):
        Engine(TINY, Eagle((config, medusa)))


def as_dtype(model: reference.Model, dtype: str) -> Any:
    """The model in another type, as torch tensors."""
    return model[0], {name: torch.from_numpy(weight).to(getattr(torch, dtype)) for name, weight in model[1].items()}


@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
def test_hc_022_drafters_of_any_type_serve_targets_of_any_type(target: str) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        check_same(as_dtype(TINY, target), DraftModel(as_dtype(TINY, dtype), num_layers=1, **FIXED))
        check_same(as_dtype(TINY, target), Eagle(as_dtype(reference.random_head(4, 61), dtype), **FIXED))


@pytest.mark.parametrize("missing", sorted(reference.random_head(1, 61)[1]))
def test_hc_024_a_missing_tensor_is_named(missing: str) -> None:
    config, head = copy.copy(reference.random_head(1, 61))
    del head[missing]
    with pytest.raises(ModelError, match=re.escape(missing)):
        Engine(TINY, Eagle((config, head)))
    model = copy.copy(TINY[1])
    name = f"model.{missing}" if f"model.{missing}" in model else "model.norm.weight"
    del model[name]
    with pytest.raises(ModelError, match=re.escape(name)):
        Engine((TINY[0], model))


def test_hc_024_025_a_head_keeps_its_own_embedding_or_borrows_the_targets() -> None:
    config, head = reference.random_head(4, 61)
    embed = TINY[1]["model.embed_tokens.weight"]
    own = {**head, "embed_tokens.weight": np.ascontiguousarray(embed[::-1])}
    drafted: list[tuple[list[float], int]] = []
    for weights in (head, {**head, "embed_tokens.weight": embed}, own, {**own, "more": embed}):
        with Engine(TINY, Eagle((config, weights), **FIXED), threads=1) as engine:
            assert ids_of(generate_each(engine, TINY_PROMPTS, [GREEDY] * len(TINY_PROMPTS))) == writes(
                TINY, None, TINY_PROMPTS, GREEDY
            )
            drafted.append((engine.stats().per_depth, engine.stats().accepted))
    assert drafted[0] == drafted[1]
    assert drafted[2] == drafted[3] != drafted[0]
