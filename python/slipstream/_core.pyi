"""The compiled core of slipstream: one engine, its requests and their token streams.

Every class is immutable and may be shared between threads. Waiting detaches from the interpreter, so other threads run
and Ctrl-C works. All errors derive from :class:`Error`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CapacityError",
    "Chunk",
    "ConfigError",
    "DeviceError",
    "Drafter",
    "Engine",
    "Error",
    "ModelError",
    "RequestError",
    "SamplingParams",
    "Source",
    "Stats",
    "TokenStream",
    "__version__",
    "inspect",
    "read_bandwidth",
]

__version__: str

class Error(Exception):
    """Base of all errors of slipstream."""

class ConfigError(Error, ValueError):
    """A setting is wrong."""

class ModelError(Error):
    """A file or a weight is not what it should be."""

class RequestError(Error, ValueError):
    """A request cannot be served as it is."""

class CapacityError(Error):
    """Memory or K/V blocks do not suffice."""

class DeviceError(Error):
    """The device, or the engine itself, failed."""

@final
class Source:
    """Where weights come from: a path, or tensors in memory."""

    @staticmethod
    def path(path: str) -> Source:
        """A Hugging Face folder, or a ``.gguf`` file. Nothing is read yet."""

    @staticmethod
    def parts(
        config_json: str,
        tensors: Sequence[tuple[str, str, Sequence[int], NDArray[np.uint8]]],
        *,
        generation_config_json: str | None = None,
        tokenizer_json: bytes | None = None,
        tokenizer_config_json: str | None = None,
        chat_template: str | None = None,
    ) -> Source:
        """A config and tensors ``(name, dtype, shape, bytes)``; dtype is ``"f32"``, ``"f16"`` or ``"bf16"``.

        The bytes are read in place while an engine is built.
        """

@final
class Drafter:
    """One drafter's settings. Nothing is read before an engine is built."""

    @staticmethod
    def ngram(*, min_match: int = 2, max_match: int = 5, max_nodes: int = 10) -> Drafter:
        """Prompt lookup: what followed the last tokens when they came before, in prompt and output."""

    @staticmethod
    def draft_model(
        source: Source,
        *,
        num_layers: int | None = None,
        max_depth: int = 5,
        top_k: int = 4,
        max_nodes: int = 16,
        noise: bool = True,
        fixed_tree: bool = False,
    ) -> Drafter:
        """A decoder with the target's vocabulary; ``num_layers`` uses only its first layers."""

    @staticmethod
    def eagle(
        source: Source,
        *,
        max_depth: int = 7,
        top_k: int = 10,
        max_nodes: int = 60,
        noise: bool = True,
        fixed_tree: bool = False,
    ) -> Drafter:
        """An EAGLE-1/2 head with EAGLE-2's dynamic tree."""

@final
class SamplingParams:
    """How a request draws and when it ends. Validated once, here; ids against the vocabulary when submitted."""

    def __new__(
        cls,
        *,
        max_tokens: int | None = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] = ...,
        logprobs: int | None = None,
        n: int = 1,
        json_schema: object = None,
        regex: str | None = None,
        grammar: str | None = None,
        prediction: str | None = None,
        priority: int = 0,
        speculate: bool | int = True,
    ) -> SamplingParams: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def stop(self) -> list[str]: ...
    @property
    def stop_token_ids(self) -> list[int]: ...
    @property
    def ignore_eos(self) -> bool: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> dict[int, float]: ...
    @property
    def speculate(self) -> bool | int: ...

@final
class Stats:
    """Counts of one request, or of all ended requests of an engine.

    Tokens = steps + accepted - cut. ``acceptance_length`` counts the next token (at least 1).
    """

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def cut_tokens(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def drafted(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def acceptance_length(self) -> float: ...
    @property
    def acceptance_rate(self) -> float: ...
    @property
    def per_depth(self) -> list[float]:
        """Share of the steps that drafted to a depth whose path reached it, depth 1 first."""
    @property
    def seconds(self) -> float:
        """From submission to the end, or to now."""
    @property
    def seconds_to_first_token(self) -> float | None: ...
    def to_dict(self) -> dict[str, Any]: ...

@final
class Chunk:
    """What one step settled."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_accepted(self) -> int:
        """How many of the tokens, from the first, were drafted and accepted."""
    @property
    def pieces(self) -> list[tuple[str, bool]]:
        """The text token by token, and whether the token was drafted and accepted."""
    @property
    def finish_reason(self) -> str | None:
        """``"stop"``, ``"length"`` or ``"cancelled"`` on the last chunk."""

@final
class TokenStream:
    """One request's output, step by step. Dropping it cancels the request."""

    def __iter__(self) -> TokenStream: ...
    def __next__(self) -> Chunk: ...
    def poll(self, timeout: float) -> Chunk | None:
        """The next chunk, or None if none came within ``timeout`` seconds. Raises StopIteration after the last."""
    def close(self) -> None:
        """Cancels the request. Idempotent; safe from any thread."""
    @property
    def request_id(self) -> int: ...
    @property
    def seed(self) -> int:
        """The seed in use."""
    @property
    def stats(self) -> Stats | None:
        """The request's counts; None before its end."""

@final
class Engine:
    """A target, its drafters and the thread that runs them."""

    def __new__(
        cls,
        target: Source,
        drafters: Sequence[Drafter] = (),
        *,
        threads: int | None = None,
        max_batch: int = 32,
        max_batch_tokens: int = 512,
        chunk: int | None = None,
        max_context: int | None = None,
        kv_cache_bytes: int | None = None,
        block_size: int = 16,
        prefix_cache: bool = True,
        quantize: str | None = None,
        instruction_set: str | None = None,
    ) -> Engine: ...
    def submit(self, prompt: Sequence[int], params: SamplingParams) -> TokenStream: ...
    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def render_chat(self, messages_json: str, *, add_generation_prompt: bool = True) -> str: ...
    @property
    def has_chat_template(self) -> bool: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def eos_token_ids(self) -> list[int]: ...
    def info(self) -> dict[str, Any]:
        """What was loaded: model, drafters, bytes of weights and K/V, threads, instruction set."""
    def stats(self) -> Stats:
        """Counts over all ended requests, and since the engine was built."""
    def load(self) -> dict[str, int]:
        """``running``, ``waiting``, ``free_blocks`` and ``num_blocks`` now."""
    def close(self) -> None:
        """Ends every request and the thread. Idempotent; safe from any thread."""

def inspect(source: Source) -> dict[str, Any]:
    """What a model or an EAGLE head is, from its config and tensor names: nothing large is read."""

def read_bandwidth(threads: int | None = None) -> float:
    """Bytes per second at which ``threads`` (default: one per core) read memory: the limit of decoding one stream."""
