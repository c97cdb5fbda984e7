"""The demo model: its greedy text is that of transformers, its chats are rendered the same, drafters change nothing."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

from conftest import generate_each, ids_of
from slipstream import DraftModel, Eagle, Engine, NGram

QUESTIONS = [
    "Write a short story about a fox that finds a lake.",
    "Write a Python function that sorts a list of pairs by their second item, and explain it line by line.",
    "Repeat this text three times: the quick brown fox jumps over the lazy dog and runs along the river.",
    "List five fruits, and give one fact about each.",
    "Correct the spelling: teh cat sat on teh mat, adn teh dog sat on teh floor. Then write it again without changes.",
    "What is the difference between a list and a tuple in Python?",
    "Translate to French: good morning, how are you today?",
    "Count from one to forty in words.",
    "Write a JSON object with the names and ages of three people.",
    "Explain to a child why the sky is blue.",
    "Rename the variable x to total: def add(a, b):\n    x = a + b\n    return x",
    "Write a poem of eight lines about winter.",
    "Summarise: Bees carry pollen from flower to flower. Without bees many plants would bear no fruit.",
    "Give me a recipe for pancakes with exact amounts.",
    "Who wrote Hamlet, and when?",
    "Complete the table: 2 x 1 = 2, 2 x 2 = 4, 2 x 3 = 6,",
    "Write a polite letter that asks for a day off on Friday.",
    "Write a bash script that counts the lines of all files in a folder.",
    "Name the planets in order, then in reverse order.",
    "Is 91 a prime number? Think step by step.",
]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.3, "top_p": 0.95, "seed": 2},
]


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Iterator[Engine]:
    """The demo model without a drafter."""
    with Engine(demo_model, max_context=1024) as engine:
        yield engine


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE head for the demo model with random weights of ordinary size: it proposes, and is mostly wrong."""
    folder = tmp_path_factory.mktemp("heads") / "random"
    folder.mkdir()
    rng = np.random.default_rng(7)
    hidden, inner, kv = 576, 1536, 192
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (hidden, hidden),
        "layers.0.self_attn.k_proj.weight": (kv, hidden),
        "layers.0.self_attn.v_proj.weight": (kv, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
    }
    weights = {name: (rng.standard_normal(size) / size[1] ** 0.5).astype(np.float32) for name, size in shapes.items()}
    # The feature passes through, with the rest as noise on it: what the head proposes is near what the target just saw.
    weights["fc.weight"] *= 0.3
    weights["fc.weight"][:, hidden:] += np.eye(hidden, dtype=np.float32)
    weights["layers.0.post_attention_layernorm.weight"] = np.ones(hidden, dtype=np.float32)
    save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 1,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "bias": False,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    """The demo model's tokenizer as transformers reads it."""
    return transformers.AutoTokenizer.from_pretrained(demo_model.parent, gguf_file=demo_model.name)


def drafter_of(kind: str, demo_model: Path, head: Path, is_fixed: bool) -> Any:
    """A drafter with its default tree, or with a small one of which every node is verified, whatever it promises."""
    tree: dict[str, Any] = {"max_depth": 2, "top_k": 2, "max_nodes": 4, "fixed_tree": True} if is_fixed else {}
    return {
        "ngram": NGram(),
        "draft_model": DraftModel(demo_model, num_layers=4, **tree),
        "eagle": Eagle(head, **tree),
        "list": [NGram(), Eagle(head, **tree)],
    }[kind]


def requests(count: int, max_tokens: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """``count`` chats, each with every sampling."""
    prompts = [chat(question) for question in QUESTIONS[:count] for _ in SAMPLINGS]
    return prompts, [{"max_tokens": max_tokens, "ignore_eos": True, **each} for _ in range(count) for each in SAMPLINGS]


@pytest.fixture(scope="module")
def plain(demo: Engine) -> Callable[[int, int], list[list[int]]]:
    """What the target writes alone for :func:`requests`, decoded once."""
    return functools.cache(lambda count, max_tokens: ids_of(generate_each(demo, *requests(count, max_tokens))))


def check_drafter(
    plain: Callable[[int, int], list[list[int]]], drafter: Any, demo_model: Path, count: int, max_tokens: int
) -> None:
    with Engine(demo_model, drafter, max_context=1024) as engine:
        written = ids_of(generate_each(engine, *requests(count, max_tokens)))
        assert engine.stats().drafted > 0
        print(engine.stats().to_dict())
    assert written == plain(count, max_tokens)


@pytest.mark.parametrize("kind", ["ngram", "draft_model", "eagle", "list"])
def test_drafters_write_the_same_tokens(plain: Any, demo_model: Path, head: Path, kind: str) -> None:
    check_drafter(plain, drafter_of(kind, demo_model, head, is_fixed=False), demo_model, 4, 128)


@pytest.mark.parametrize("kind", ["draft_model", "eagle", "list"])
def test_trees_that_are_verified_whole_change_no_token(plain: Any, demo_model: Path, head: Path, kind: str) -> None:
    check_drafter(plain, drafter_of(kind, demo_model, head, is_fixed=True), demo_model, 2, 32)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["ngram", "draft_model", "eagle", "list"])
def test_drafters_write_the_same_tokens_for_long(plain: Any, demo_model: Path, head: Path, kind: str) -> None:
    check_drafter(plain, drafter_of(kind, demo_model, head, is_fixed=False), demo_model, len(QUESTIONS), 128)


@pytest.mark.parametrize("count", [3, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_greedy_text_is_that_of_transformers(demo: Engine, demo_model: Path, count: int) -> None:
    """Each token is the one that transformers takes after the tokens before it, up to a first near tie."""
    max_tokens = 64
    prompts = [chat(question) for question in QUESTIONS[:count]]
    each = [{"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}] * count
    written = ids_of(generate_each(demo, prompts, each))
    asked = [demo.encode(demo._core.render_chat(json.dumps(prompt)), add_special=False) for prompt in prompts]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        demo_model.parent, gguf_file=demo_model.name, dtype=torch.float32, attn_implementation="eager"
    )
    num_ties = 0
    for index, (prompt, tokens) in enumerate(zip(asked, written, strict=True)):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        best = logits.argmax(-1).tolist()
        if best == tokens:
            continue
        step = next(step for step in range(max_tokens) if best[step] != tokens[step])
        first, second = torch.topk(logits[step], 2).values.tolist()
        print(f"prompt {index} differs first at token {step}: gap {first - second:.2e}")
        assert first - second < 1e-3, (index, step, best[step], tokens[step])
        num_ties += 1
    assert num_ties <= 2


@pytest.mark.parametrize(
    "messages",
    [
        chat(QUESTIONS[0]),
        [{"role": "system", "content": "You are brief."}, *chat("Hi <|im_end|> there")],
        [*chat("Hello"), {"role": "assistant", "content": "Hi!\n"}, *chat(" And now? é🦊 ")],
    ],
    ids=["question", "system", "turns"],
)
@pytest.mark.parametrize("is_open", [True, False])
def test_chats_are_rendered_as_transformers_does(
    demo: Engine, tokenizer: Any, messages: list[dict[str, str]], is_open: bool
) -> None:
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_open)
    assert demo._core.render_chat(json.dumps(messages), add_generation_prompt=is_open) == expected
