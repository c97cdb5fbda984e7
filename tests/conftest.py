"""What the Python tests share: tiny models with known weights, one engine of them, the demo model."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from slipstream import Completion, Engine, _core, fetch, sources
from slipstream import engine as engine_module

REPOSITORY = Path(__file__).resolve().parents[1]
GOLDEN = REPOSITORY / "tests" / "golden"
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def golden_prompts() -> list[list[int]]:
    """The ten prompts of the golden data, as ids of ``target_a`` and ``target_b``."""
    return [prompt["ids"] for prompt in json.loads((GOLDEN / "prompts.json").read_text(encoding="utf-8"))]


def generate_each(engine: Engine, prompts: Sequence[Any], parameters: Sequence[dict[str, Any]]) -> list[Completion]:
    """Runs requests with parameters of their own together in one engine."""
    streams = [engine.stream(prompt, **each) for prompt, each in zip(prompts, parameters, strict=True)]
    done: list[Completion] = []
    for stream in streams:
        chunks = list(stream)
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        reason, stats = chunks[-1].finish_reason, stream.stats
        assert reason is not None
        assert stats is not None
        done.append(Completion("".join(chunk.text for chunk in chunks), token_ids, reason, stats, stream.seed))
    return done


def core_engine(target: Any, drafter: Any = None, **settings: Any) -> _core.Engine:
    """The core's engine, for settings that the Python face does not offer, and for requests by the ten thousand."""
    drafters = [engine_module._to_core(each) for each in engine_module._drafters(drafter)]
    return _core.Engine(sources.resolve(target), drafters, **settings)


def writes(
    target: Any, drafter: Any, prompts: Sequence[Any], parameters: dict[str, Any], **more: Any
) -> list[list[int]]:
    """What prompts are continued with, all with the same parameters, by an engine made for them."""
    with Engine(target, drafter, threads=1, **more) as engine:
        return ids_of(generate_each(engine, prompts, [parameters] * len(prompts)))


def ids_of(done: Sequence[Completion]) -> list[list[int]]:
    """The tokens of several completions."""
    return [one.token_ids for one in done]


hypothesis.settings.register_profile("fast", max_examples=25, deadline=None)
hypothesis.settings.register_profile("slow", max_examples=500, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(scope="session")
def target_a() -> Path:
    """A Llama of 4 layers with 320 tokens and a context of 1024, without a chat template."""
    return GOLDEN / "targets" / "target_a"


@pytest.fixture(scope="session")
def head_a() -> Path:
    """An EAGLE-2 head for ``target_a``."""
    return GOLDEN / "heads" / "e2_a_bias"


@pytest.fixture(scope="session")
def target_b() -> Path:
    """A Llama of 8 layers with Llama-3's rotary scaling from 64 positions on, else as ``target_a``."""
    return GOLDEN / "targets" / "target_b"


@pytest.fixture(scope="session")
def head_b() -> Path:
    """An EAGLE-2 head for ``target_b``."""
    return GOLDEN / "heads" / "e2_b_nobias"


@pytest.fixture(scope="session")
def head_a_bin() -> Path:
    """The same head as ``pytorch_model.bin``."""
    return GOLDEN / "heads" / "e2_a_bias_bin"


@pytest.fixture(scope="session")
def chat_target(target_a: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``target_a`` with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "chat_target"
    folder.mkdir()
    for file in target_a.iterdir():
        shutil.copyfile(file, folder / file.name)
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config_file.write_text(json.dumps({**config, "chat_template": CHAT_TEMPLATE}), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def engine(target_a: Path) -> Iterator[Engine]:
    """``target_a`` with prompt lookup and no prefix cache, so that free blocks say who holds them."""
    with Engine(target_a, "ngram", threads=1, prefix_cache=False) as engine:
        yield engine


@pytest.fixture(scope="session")
def chat_engine(chat_target: Path) -> Iterator[Engine]:
    """``target_a`` with a chat template."""
    with Engine(chat_target, threads=1) as engine:
        yield engine


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's file, fetched if it is not here."""
    return fetch.fetch_demo()


@pytest.fixture
def no_leak(engine: Engine) -> Iterator[Callable[[], None]]:
    """Checks, when called and at the end, that no request lives and all blocks are free again."""
    before = engine.load()["free_blocks"]

    def check() -> None:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            load = engine.load()
            if load["running"] == load["waiting"] == 0 and load["free_blocks"] == before:
                return
            time.sleep(0.005)
        pytest.fail(f"expected no request and {before} free blocks, got {engine.load()}")

    yield check
    check()


@pytest.fixture
def python() -> Callable[..., "subprocess.Popen[str]"]:
    """Starts a fresh interpreter on a script; its output is one pipe."""

    def start(script: str, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start
