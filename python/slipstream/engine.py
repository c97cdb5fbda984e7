"""Text in, text out: the engine over the core."""

import dataclasses
import difflib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, overload

from slipstream import _core, prompts, settings, sources
from slipstream._core import Chunk, ConfigError, RequestError, SamplingParams, Stats
from slipstream.drafters import DraftModel, Eagle, NGram
from slipstream.prompts import Prompt
from slipstream.streams import AsyncTokenStream, Owner, TokenStream

PARAMETERS = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "n"),
    *("json_schema", "regex", "grammar", "prediction", "priority", "speculate"),
)
"""Names of the fields of :class:`SamplingParams`."""

_MAX_COUNT = 2**31 - 1
_MAX_BYTES = 2**62


@dataclasses.dataclass(frozen=True)
class Completion:
    """What one request wrote.

    Attributes:
        text: The text, stop string left out.
        token_ids: The tokens, in the target's vocabulary.
        finish_reason: ``"stop"``, ``"length"`` or ``"cancelled"``.
        stats: The request's counts and times.
        seed: The seed in use: with it the same request gives the same tokens.
        logprobs: ``None`` unless asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    seed: int
    logprobs: None = None


class Engine:
    """A target, its drafters, and the thread that runs them.

    Requests from any number of threads share its batches. Usable as a context manager.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any = None,
        *,
        device: str = "auto",
        max_batch: int = 32,
        kv_cache_bytes: int | None = None,
        max_context: int | None = None,
        verify: str = "coupled",
        threads: int | None = None,
        compute: str = "auto",
        quantize: str | None = None,
        kv_dtype: str = "auto",
        max_batch_tokens: int = 512,
        exact: bool = True,
        block_size: int = 16,
        prefix_cache: bool = True,
        chunk: int | None = None,
    ) -> None:
        """Loads a target and its drafters; Ctrl-C works meanwhile.

        Args:
            target: ``"demo"``; a Hugging Face folder or ``.gguf`` file; a hub id; a loaded transformers model, or
                ``(model, tokenizer)``; ``(config, state_dict)`` or ``(config, state_dict, tokenizer)``.
            drafter: ``None`` or ``"none"``: plain decoding. ``"auto"`` or ``"ngram"``: prompt lookup. An
                :class:`NGram`, :class:`DraftModel` or :class:`Eagle`, or a list of them, merged into one tree.
            device: ``"auto"`` or ``"cpu"``.
            max_batch: Most requests computed in one step. Default 32.
            kv_cache_bytes: Memory for keys and values, drafters' included. Default ``None``: the engine's choice.
            max_context: Most tokens of a request, prompt included. Default ``None``: what the model was made for.
            verify: ``"coupled"``: a draft node is accepted if it is the token that the target draws.
            threads: Threads that compute. Default ``None``: one per core.
            compute: ``"auto"`` or ``"f32"``.
            quantize: ``None`` keeps weights as they come; ``"bf16"`` halves float32 weights (and changes results).
            kv_dtype: ``"auto"`` or ``"f32"``.
            max_batch_tokens: Most tokens computed in one step. Default 512.
            exact: Only ``True``: a row's result never depends on the rest of the batch.
            block_size: Tokens per block of keys and values. Default 16.
            prefix_cache: Keep computed prompts for later requests that begin the same. Default ``True``.
            chunk: Most prompt tokens of one request in one step. Default ``None``: the engine's choice.

        Raises:
            ConfigError: If a setting is wrong or not supported.
            ModelError: If a file or weight is not what it should be, or a drafter does not fit the target.
            CapacityError: If the memory does not suffice.
        """
        settings.choice("device", device, ("auto", "cpu"))
        settings.choice("verify", verify, ("coupled",))
        settings.choice("compute", compute, ("auto", "f32"))
        settings.choice("quantize", quantize, (None, "bf16"))
        settings.choice("kv_dtype", kv_dtype, ("auto", "f32"))
        settings.choice("exact", exact, (True,))
        chosen: dict[str, Any] = {
            "threads": settings.optional_count("threads", threads, 1, 1024),
            "max_batch": settings.count("max_batch", max_batch, 1, 65_536),
            "max_batch_tokens": settings.count("max_batch_tokens", max_batch_tokens, 1, _MAX_COUNT),
            "chunk": settings.optional_count("chunk", chunk, 1, _MAX_COUNT),
            "max_context": settings.optional_count("max_context", max_context, 1, _MAX_COUNT),
            "kv_cache_bytes": settings.optional_count("kv_cache_bytes", kv_cache_bytes, 1, _MAX_BYTES),
            "block_size": settings.count("block_size", block_size, 1, 1024),
            "prefix_cache": settings.flag("prefix_cache", prefix_cache),
            "quantize": quantize,
        }
        drafters = _drafters(drafter)
        source = sources.resolve(target)
        self._core = _core.Engine(source, [_to_core(drafter) for drafter in drafters], **chosen)
        self._owner = Owner("engine", self._core)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, /, **parameters: Any) -> TokenStream:
        """Submits a request and returns its chunks as they are written.

        Args:
            prompt: Text (as it is), token ids, or a chat as a list of ``{"role": ..., "content": ...}`` (through the
                model's chat template).
            params: How to draw and when to end; or give its fields as keywords.
            **parameters: Fields of :class:`SamplingParams`.

        Returns:
            An iterator of :class:`Chunk` with ``close()``, ``seed`` and ``stats``. Losing it cancels the request.

        Raises:
            RequestError: If the request cannot be served as it is: at the call, not at the first chunk.
        """
        return TokenStream(self._submit(prompt, _parameters(params, parameters)), self)

    def astream(self, prompt: Prompt, params: SamplingParams | None = None, /, **parameters: Any) -> AsyncTokenStream:
        """As :meth:`stream`, for an event loop: iterate with ``async for``.

        Args:
            prompt: See :meth:`stream`.
            params: See :meth:`stream`.
            **parameters: Fields of :class:`SamplingParams`.

        Returns:
            An asynchronous iterator of :class:`Chunk` with ``aclose()``, ``seed`` and ``stats``. Losing it, or
            cancelling the task that waits for it, cancels the request.

        Raises:
            RequestError: If the request cannot be served as it is: at the call, not at the first chunk.
        """
        return AsyncTokenStream(self._submit(prompt, _parameters(params, parameters)), self)

    @overload
    def generate(self, prompt: Prompt, params: SamplingParams | None = None, /, **parameters: Any) -> Completion: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, /, **parameters: Any
    ) -> list[Completion]: ...

    def generate(
        self, prompt_or_prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, /, **parameters: Any
    ) -> Completion | list[Completion]:
        """Runs one request, or a batch of them, to the end. Interrupted, it cancels all of them.

        Args:
            prompt_or_prompts: One prompt (see :meth:`stream`), or a list of at most 10,000. A flat list of ids and a
                list of messages are one prompt.
            params: How to draw and when to end, for all of them; or give its fields as keywords.
            **parameters: Fields of :class:`SamplingParams`.

        Returns:
            A :class:`Completion`; for a list of prompts, a list of them in the same order.

        Raises:
            RequestError: If a request cannot be served as it is; then none was started.
        """
        self._owner.check()
        chosen = _parameters(params, parameters)
        given, is_batch = prompts.split(prompt_or_prompts)
        token_ids = [self._to_ids(prompt, index if is_batch else None) for index, prompt in enumerate(given)]
        streams: list[_core.TokenStream] = []
        try:
            for ids in token_ids:
                streams.append(self._core.submit(ids, chosen))
            completions = [_collect(stream) for stream in streams]
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return completions if is_batch else completions[0]

    def stats(self) -> Stats:
        """Counts over all ended requests since the engine was built."""
        self._owner.check()
        return self._core.stats()

    def info(self) -> dict[str, Any]:
        """What was loaded and is in effect: model, drafters, bytes of weights and K/V, threads, instruction set."""
        self._owner.check()
        return self._core.info()

    def load(self) -> dict[str, int]:
        """``running`` and ``waiting`` requests, ``free_blocks`` and ``num_blocks``, now."""
        self._owner.check()
        return self._core.load()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: Any text.
            add_special: Add what the model expects at the start of a text. Default ``True``.

        Raises:
            RequestError: If it is no text, or the model has no tokenizer.
        """
        self._owner.check()
        prompts.check_text("text", text)
        return self._core.encode(text, add_special=add_special)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out.

        Args:
            token_ids: Ids in the target's vocabulary.

        Raises:
            RequestError: If one is not, or the model has no tokenizer.
        """
        self._owner.check()
        return self._core.decode(token_ids)

    @property
    def has_chat_template(self) -> bool:
        """Whether a list of messages can be a prompt."""
        return self._core.has_chat_template

    @property
    def vocab_size(self) -> int:
        """Number of tokens that can be drawn."""
        return self._core.vocab_size

    @property
    def max_context(self) -> int:
        """Most tokens of a request, prompt included."""
        return self._core.max_context

    def close(self) -> None:
        """Ends every request and the engine's thread. Idempotent; safe from any thread."""
        if self._owner.is_here():
            self._core.close()

    def __enter__(self) -> "Engine":
        """The engine itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the engine."""
        self.close()

    def __repr__(self) -> str:
        """Vocabulary and context: what tells engines apart at a glance."""
        return f"<slipstream.Engine vocab_size={self.vocab_size} max_context={self.max_context}>"

    def _to_ids(self, prompt: object, index: int | None) -> list[int]:
        try:
            return prompts.to_ids(self._core, prompt)
        except RequestError as error:
            if index is None:
                raise
            raise RequestError(f"prompt {index}: {error}") from None

    def _submit(self, prompt: object, params: SamplingParams) -> _core.TokenStream:
        self._owner.check()
        return self._core.submit(self._to_ids(prompt, None), params)


def _collect(stream: _core.TokenStream) -> Completion:
    texts: list[str] = []
    token_ids: list[int] = []
    last: Chunk | None = None
    for last in stream:
        texts.append(last.text)
        token_ids.extend(last.token_ids)
    stats = stream.stats
    reason = None if last is None else last.finish_reason
    assert reason is not None, "a stream's last chunk has a finish reason"
    assert stats is not None, "a stream that ended has stats"
    return Completion("".join(texts), token_ids, reason, stats, stream.seed)


def _parameters(params: object, parameters: dict[str, Any]) -> SamplingParams:
    if params is None:
        for name in parameters:
            if name not in PARAMETERS:
                close = difflib.get_close_matches(name, PARAMETERS, 1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(PARAMETERS)}"
                raise RequestError(f"expected one of {len(PARAMETERS)} sampling parameters, got {name!r}\nhint: {hint}")
        return SamplingParams(**parameters)
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"expected SamplingParams, got {type(params).__name__}\nhint: or give its fields as keywords, temperature=0"
        )
    if parameters:
        raise RequestError(f"expected either SamplingParams or keywords, got both ({', '.join(parameters)})")
    return params


def _drafters(given: object) -> list[NGram | DraftModel | Eagle]:
    if given is None or given == "none":
        return []
    if isinstance(given, str) and given in ("auto", "ngram"):
        return [NGram()]
    if isinstance(given, (NGram, DraftModel, Eagle)):
        return [given]
    if isinstance(given, (list, tuple)) and all(isinstance(item, (str, NGram, DraftModel, Eagle)) for item in given):
        return [drafter for item in given for drafter in _drafters(item)]
    got = settings.shown(given) if isinstance(given, str) else type(given).__name__
    raise ConfigError(
        'expected None, "none", "auto", "ngram", an NGram, DraftModel or Eagle, or a list of these as drafter, '
        f"got {got}"
    )


def _to_core(drafter: NGram | DraftModel | Eagle) -> _core.Drafter:
    if isinstance(drafter, NGram):
        return _core.Drafter.ngram(
            min_match=drafter.min_match, max_match=drafter.max_match, max_nodes=drafter.max_nodes
        )
    tree = {name: getattr(drafter, name) for name in ("max_depth", "top_k", "max_nodes", "noise", "fixed_tree")}
    if isinstance(drafter, Eagle):
        return _core.Drafter.eagle(sources.resolve(drafter.path), **tree)
    return _core.Drafter.draft_model(sources.resolve(drafter.source), num_layers=drafter.num_layers, **tree)
