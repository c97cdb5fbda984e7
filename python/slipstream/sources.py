"""What a target, draft model or head may be, and how each becomes a source that the core reads."""

import importlib
import importlib.util
import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream import fetch, settings, tensors
from slipstream._core import ConfigError, ModelError, Source

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_EXPECTED = (
    'a folder, a .gguf file, a hub id, "demo", a loaded transformers model, or (config, state_dict) with an optional '
    "tokenizer"
)


def resolve(given: object) -> Source:
    """A source from anything that a target may be.

    Args:
        given: ``"demo"``; a Hugging Face folder or ``.gguf`` file; a hub id ``"org/name"``, downloaded if
            ``huggingface_hub`` is installed; a loaded transformers model, or ``(model, tokenizer)``;
            ``(config, state_dict)`` or ``(config, state_dict, tokenizer)``.

    Raises:
        ConfigError: If it is none of these.
        ModelError: If it does not exist or cannot be read.
    """
    if isinstance(given, Source):
        return given
    if isinstance(given, (str, os.PathLike)):
        return _from_text(given)
    if _is_model(given):
        return _from_model(given, None)
    if isinstance(given, (tuple, list)):
        if len(given) == 2 and _is_model(given[0]):
            return _from_model(given[0], given[1])
        if len(given) in (2, 3):
            return _from_parts(given[0], given[1], given[2] if len(given) == 3 else None)
    raise ConfigError(f"expected {_EXPECTED}, got {type(given).__name__}")


def _from_text(given: str | os.PathLike[str]) -> Source:
    text = os.fspath(given)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"expected {_EXPECTED}, got {settings.shown(text)}")
    if isinstance(given, str) and text == "demo":
        path = fetch.demo_path()
        if path is None:
            raise ModelError("the demo model is not on this machine yet\nhint: fetch it with `slipstream fetch demo`")
        return Source.path(str(path))
    path = Path(text).expanduser()
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:  # a name that no file system takes
        raise ModelError(f"expected {_EXPECTED}, got {settings.shown(text)}: {error.strerror}") from None
    if is_folder:
        return _from_folder(path)
    if is_there:
        return Source.path(str(path))
    if isinstance(given, str) and _is_hub_id(text):
        return _from_folder(_download(text))
    raise ModelError(f"expected a folder, a .gguf file or a hub id, but {settings.shown(text)} does not exist")


def _is_hub_id(text: str) -> bool:
    if not _HUB_ID.fullmatch(text) or text.endswith((".gguf", ".bin", ".safetensors")):
        return False
    return not Path(text.split("/")[0]).is_dir()  # "models/x" beside a folder "models" is a mistyped path


def _download(hub_id: str) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ModelError(
            f"{hub_id!r} does not exist here, and hub ids need huggingface_hub\n"
            "hint: pip install 'slipstream[hub]', or pass the path of a local folder"
        ) from None

    def snapshot(*patterns: str) -> Path:
        try:
            return Path(hub.snapshot_download(hub_id, allow_patterns=list(patterns), ignore_patterns=["*/*"]))
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelError(f"{hub_id!r} could not be downloaded: {first_line}") from error

    folder = snapshot(*_HUB_FILES, "model*.safetensors", "model.safetensors.index.json")
    if not any(folder.glob("*.safetensors")):
        folder = snapshot(*_HUB_FILES, "pytorch_model*.bin", "pytorch_model.bin.index.json")
    return folder


def _from_folder(folder: Path) -> Source:
    if any(folder.glob("*.safetensors")) or not any(folder.glob("pytorch_model*.bin")):
        return Source.path(str(folder))
    state_dict: dict[str, Any] = {}
    for part in sorted(folder.glob("pytorch_model*.bin")):
        state_dict |= _load_bin(part)
    config = _read_json(folder / "config.json")
    return _from_parts(config, state_dict, folder, _read_text(folder / "generation_config.json"))


def _load_bin(path: Path) -> dict[str, Any]:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise ModelError(
            f"{path}: expected safetensors; a pytorch_model.bin needs torch to be read\n"
            "hint: pip install 'slipstream[torch]', or convert it once where torch is: "
            "safetensors.torch.save_file(torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors')"
        ) from None
    try:
        is_zip = zipfile.is_zipfile(path)  # older files are no archives and cannot be mapped
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (
        OSError,
        RuntimeError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        pickle.UnpicklingError,
        struct.error,
    ) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{path}: expected a dict of tensors saved by torch: {first_line}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{path}: expected a dict of tensors saved by torch, got {type(loaded).__name__}")
    return loaded


def _is_model(given: object) -> bool:
    return hasattr(given, "config") and callable(getattr(given, "state_dict", None))


def _from_model(model: Any, tokenizer: object) -> Source:
    if tokenizer is None:
        name = getattr(model, "name_or_path", None) or getattr(model.config, "_name_or_path", None)
        if isinstance(name, str) and name and (Path(name) / "tokenizer.json").is_file():
            tokenizer = name
    generation = getattr(model, "generation_config", None)
    generation_json = None if generation is None else _to_json("generation config", _to_dict(generation))
    return _from_parts(model.config, model.state_dict(), tokenizer, generation_json)


def _from_parts(config: object, state_dict: object, tokenizer: object, generation_json: str | None = None) -> Source:
    settings_dict = dict(_to_dict(config))
    weights, is_tied = tensors.from_state_dict(state_dict)
    if is_tied:
        settings_dict["tie_word_embeddings"] = True
    tokenizer_json, tokenizer_config, chat_template = _tokenizer_parts(tokenizer)
    return Source.parts(
        _to_json("config", settings_dict),
        weights,
        generation_config_json=generation_json,
        tokenizer_json=tokenizer_json,
        tokenizer_config_json=tokenizer_config,
        chat_template=chat_template,
    )


def _to_dict(config: object) -> Mapping[str, Any]:
    if isinstance(config, (str, bytes)):
        try:
            config = json.loads(config)
        except ValueError as error:
            raise ConfigError(f"expected a config as JSON, got {settings.shown(config)}: {error}") from None
    elif callable(getattr(config, "to_dict", None)):
        config = config.to_dict()  # type: ignore[attr-defined]
    if not isinstance(config, Mapping):
        raise ConfigError(f"expected a config as dict, JSON or object with to_dict, got {type(config).__name__}")
    return config


def _to_json(what: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value, allow_nan=False, default=lambda item: str(item).removeprefix("torch."))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"expected a {what} that is JSON: {error}") from None


def _tokenizer_parts(tokenizer: Any) -> tuple[bytes | None, str | None, str | None]:
    """``tokenizer.json``, ``tokenizer_config.json`` and chat template of a folder, file or loaded tokenizer."""
    if tokenizer is None:
        return None, None, None
    if isinstance(tokenizer, (str, os.PathLike)):
        path = Path(os.fspath(tokenizer)).expanduser()
        folder = path if path.is_dir() else path.parent
        file = path / "tokenizer.json" if path.is_dir() else path
        text = _read_text(file)
        if text is None and not path.is_dir():
            raise ModelError(f"expected a tokenizer.json or its folder, but {path} does not exist")
        config, template = _read_text(folder / "tokenizer_config.json"), _read_text(folder / "chat_template.jinja")
        return None if text is None else text.encode(), config, template
    if callable(getattr(tokenizer, "to_str", None)):
        return tokenizer.to_str().encode(), None, None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            "expected a tokenizer as path, tokenizers.Tokenizer or fast transformers tokenizer, got "
            f"{type(tokenizer).__name__}\nhint: transformers.AutoTokenizer.from_pretrained(...) loads a fast one"
        )
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    roles = ("bos_token", "eos_token", "pad_token", "unk_token", "add_bos_token", "add_eos_token")
    config_dict = {role: value for role in roles if isinstance(value := getattr(tokenizer, role, None), (str, bool))}
    return backend.to_str().encode(), _to_json("tokenizer config", config_dict), template


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: expected UTF-8 text: {error}") from error


def _read_json(path: Path) -> object:
    text = _read_text(path)
    if text is None:
        raise ModelError(f"{path}: expected a config beside the weights, but there is none")
    try:
        return json.loads(text)
    except ValueError as error:
        raise ModelError(f"{path}: expected JSON: {error}") from error
