"""What a prompt may be, and how it becomes token ids."""

import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream import _core, settings
from slipstream._core import RequestError

Message = Mapping[str, Any]
"""One message of a chat: ``{"role": ..., "content": ...}``."""

Prompt = str | Sequence[int] | Sequence[Message]
"""Raw text, token ids, or a chat."""

MAX_PROMPTS = 10_000
"""Most prompts in one call."""

_EXPECTED = "a prompt as text, a list of token ids, or a list of chat messages"


def split(given: object) -> tuple[list[object], bool]:
    """The prompts in one argument, and whether it was a list of prompts.

    A list of text, of chats or of id lists is many prompts; a flat list of ids is one, and so is a list of messages.

    Args:
        given: What was passed to ``generate``.

    Raises:
        RequestError: If it holds nothing, or more than 10,000 prompts.
    """
    given = _as_list(given)
    if not isinstance(given, list):
        return [given], False
    if not given:
        raise RequestError(f"expected {_EXPECTED}, or several of them, got an empty list")
    first = _as_list(given[0])
    if not isinstance(first, (str, list)):
        return [given], False
    if len(given) > MAX_PROMPTS:
        raise RequestError(
            f"expected at most {MAX_PROMPTS} prompts in one call, got {len(given)}\nhint: split them over several calls"
        )
    return given, True


def to_ids(core: _core.Engine, prompt: object) -> list[int]:
    """A prompt's token ids.

    Args:
        core: The engine whose tokenizer, vocabulary and chat template apply.
        prompt: Text (encoded as it is, special tokens added), token ids, or a chat (through the chat template).

    Raises:
        RequestError: If it is none of these, empty, or holds what cannot be a token or a message.
    """
    prompt = _as_list(prompt)
    if isinstance(prompt, str):
        return _encode(core, prompt, add_special=True)
    if not isinstance(prompt, list):
        hint = "\nhint: a chat is a list of messages" if isinstance(prompt, Mapping) else ""
        raise RequestError(f"expected {_EXPECTED}, got {type(prompt).__name__}{hint}")
    if not prompt:
        raise RequestError("expected a prompt of at least one token, got an empty list")
    if isinstance(prompt[0], Mapping):
        return _encode(core, _render(core, prompt), add_special=False)
    return [_token_id(index, item, core.vocab_size) for index, item in enumerate(prompt)]


def _as_list(given: object) -> object:
    """Tuples, NumPy arrays and torch tensors as lists; all else as it is."""
    if isinstance(given, tuple):
        return list(given)
    if callable(getattr(given, "tolist", None)) and hasattr(given, "ndim"):
        return given.tolist()  # type: ignore[attr-defined]
    return given


def _encode(core: _core.Engine, text: str, *, add_special: bool) -> list[int]:
    if not text:
        raise RequestError("expected a prompt of at least one token, got empty text")
    check_text("prompt", text)
    token_ids = core.encode(text, add_special=add_special)
    if not token_ids:
        raise RequestError(f"expected a prompt of at least one token, but {settings.shown(text)} encodes to none")
    return token_ids


def check_text(what: str, text: object) -> None:
    """Refuses what no tokenizer can read.

    Args:
        what: Its name, for the message.
        text: What came.

    Raises:
        RequestError: If it is no text, or not valid Unicode.
    """
    if not isinstance(text, str):
        raise RequestError(f"expected {what} to be text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"expected {what} to be valid Unicode, got a lone surrogate at {error.start}") from None


def _token_id(index: int, item: object, vocab_size: int) -> int:
    try:
        token_id = None if isinstance(item, bool) else operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        token_id = None
    if token_id is None or not 0 <= token_id < vocab_size:
        raise RequestError(
            f"expected token ids between 0 and {vocab_size - 1} in a prompt, got {settings.shown(item)} at {index}"
        )
    return token_id


def _render(core: _core.Engine, messages: list[object]) -> str:
    for index, message in enumerate(messages):
        where = f"chat message {index}"
        if not isinstance(message, Mapping):
            raise RequestError(f'expected {where} as {{"role": ..., "content": ...}}, got {type(message).__name__}')
        for key in ("role", "content"):
            if key not in message:
                raise RequestError(f"expected {where} to have {key!r}, got {settings.shown(list(message))}")
            check_text(f"{key!r} of {where}", message[key])
    if not core.has_chat_template:
        raise RequestError(
            "expected a model with a chat template for a list of messages, and this one has none\n"
            "hint: pass the prompt as text (on the command line: --raw)"
        )
    try:
        messages_json = json.dumps([dict(message) for message in messages if isinstance(message, Mapping)])
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"expected chat messages that are JSON: {error}") from None
    return core.render_chat(messages_json)
