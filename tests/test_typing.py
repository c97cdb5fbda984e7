"""The public face, as a type checker sees it: this file runs nothing that matters; mypy reads it."""

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from mypy import api

from slipstream import Chunk, Completion, DraftModel, Eagle, Engine, NGram, SamplingParams, Stats

if TYPE_CHECKING:
    from typing_extensions import assert_type


def uses_of_an_engine(engine: Engine) -> None:
    """Every call with the type that it has."""
    chat = [{"role": "user", "content": "hello"}]
    assert_type(engine.generate("text"), Completion)
    assert_type(engine.generate([1, 2, 3]), Completion)
    assert_type(engine.generate(chat, temperature=0.0), Completion)
    assert_type(engine.generate(["one", "two"]), list[Completion])
    assert_type(engine.generate([[1, 2], [3]], SamplingParams(max_tokens=3)), list[Completion])
    assert_type(engine.generate([chat, chat]), list[Completion])
    stream: Iterator[Chunk] = engine.stream("text", max_tokens=3)
    for chunk in stream:
        assert_type(chunk.token_ids, list[int])
        assert_type(chunk.pieces, list[tuple[str, bool]])
    assert_type(engine.stats(), Stats)
    assert_type(engine.info(), dict[str, Any])


async def uses_of_a_stream(engine: Engine) -> None:
    """The same for an event loop."""
    stream: AsyncIterator[Chunk] = engine.astream("text")
    async for chunk in stream:
        assert_type(chunk.text, str)
    async with engine.astream("text") as opened:
        assert_type(opened.seed, int)


def ways_to_build_one() -> None:
    """Targets and drafters of every kind."""
    Engine("demo", NGram(max_nodes=4), threads=2)
    Engine("demo", [NGram(), Eagle("head", top_k=4), DraftModel(("config", {}), num_layers=2)])


def test_mypy_accepts_the_public_face() -> None:
    output, errors, status = api.run(["--strict", "--no-incremental", "--follow-imports=silent", __file__])
    assert status == 0, output + errors
