"""Every kind of target gives the same tokens, and what is none is refused in words."""

import importlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipstream import ConfigError, DraftModel, Eagle, Engine, ModelError, sources, tensors

PROMPT_IDS = [1, 87, 260, 272, 72, 71, 283, 91, 264, 72, 316]
SETTINGS: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}


def tokens_of(target: Any, drafter: Any = None, **settings: Any) -> list[int]:
    """Greedy tokens of a target."""
    with Engine(target, drafter, threads=1, **settings) as engine:
        return engine.generate(PROMPT_IDS, **SETTINGS).token_ids


@pytest.fixture(scope="module")
def expected(target_a: Path) -> list[int]:
    """Greedy tokens of the folder."""
    return tokens_of(target_a)


@pytest.fixture(scope="module")
def config(target_a: Path) -> dict[str, Any]:
    """The config as a dict."""
    loaded: dict[str, Any] = json.loads((target_a / "config.json").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def arrays(target_a: Path) -> dict[str, NDArray[Any]]:
    """The weights as NumPy arrays."""
    safetensors_numpy = importlib.import_module("safetensors.numpy")
    loaded: dict[str, NDArray[Any]] = safetensors_numpy.load_file(target_a / "model.safetensors")
    return loaded


@pytest.fixture(scope="module")
def torch() -> Any:
    """The torch module."""
    return importlib.import_module("torch")


@pytest.fixture(scope="module")
def model(target_a: Path, torch: Any) -> Any:
    """The model as transformers loads it."""
    transformers = importlib.import_module("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(target_a, dtype=torch.float32)


def test_paths_of_both_types(target_a: Path, expected: list[int]) -> None:
    assert tokens_of(str(target_a)) == expected


def test_a_config_and_numpy_arrays(config: dict[str, Any], arrays: dict[str, Any], expected: list[int]) -> None:
    assert tokens_of((config, arrays)) == expected
    assert tokens_of((json.dumps(config), arrays)) == expected
    reversed_rows = {name: np.asfortranarray(array) for name, array in arrays.items()}
    assert tokens_of((config, reversed_rows)) == expected


def test_a_config_and_torch_tensors(config: dict[str, Any], model: Any, expected: list[int]) -> None:
    assert tokens_of((config, model.state_dict())) == expected
    assert tokens_of((model.config, model.state_dict())) == expected


def test_a_loaded_transformers_model_brings_its_tokenizer(target_a: Path, model: Any, expected: list[int]) -> None:
    with Engine(model, threads=1) as engine, Engine(target_a, threads=1) as from_folder:
        assert engine.generate(PROMPT_IDS, **SETTINGS).token_ids == expected
        assert engine.encode("the red fox") == from_folder.encode("the red fox")


def test_bf16_tensors_are_the_bf16_file(
    torch: Any, target_a: Path, tmp_path: Path, config: dict[str, Any], model: Any
) -> None:
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    safetensors_torch = importlib.import_module("safetensors.torch")
    safetensors_torch.save_file(halved, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert tokens_of((config, halved)) == tokens_of(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "file", "tokenizers", "transformers"])
def test_a_tokenizer_of_every_kind(
    kind: str, target_a: Path, config: dict[str, Any], arrays: dict[str, Any], engine: Engine
) -> None:
    tokenizer: Any = {"folder": target_a, "file": str(target_a / "tokenizer.json")}.get(kind)
    if kind == "tokenizers":
        tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(target_a / "tokenizer.json"))
    if kind == "transformers":
        tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(target_a)
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with Engine((config, arrays, tokenizer), threads=1) as built:
        assert built.encode("the red fox") == engine.encode("the red fox")
        assert built.has_chat_template == (kind == "transformers")


def test_tied_embeddings_are_passed_once(torch: Any, arrays: dict[str, Any]) -> None:
    embedding = arrays["model.embed_tokens.weight"]
    passed, is_tied = tensors.from_state_dict({"model.embed_tokens.weight": embedding, "lm_head.weight": embedding})
    assert ([tensor[0] for tensor in passed], is_tied) == (["model.embed_tokens.weight"], True)
    tensor = torch.from_numpy(embedding)
    passed, is_tied = tensors.from_state_dict({"lm_head.weight": tensor, "model.embed_tokens.weight": tensor})
    assert ([tensor[0] for tensor in passed], is_tied) == (["model.embed_tokens.weight"], True)
    passed, is_tied = tensors.from_state_dict(
        {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.copy()}
    )
    assert (len(passed), is_tied) == (2, False)


def test_arrays_are_passed_without_a_copy(torch: Any) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    (_, dtype, shape, view), *_ = tensors.from_state_dict({"x": array})[0]
    assert (dtype, shape, view.tobytes()) == ("f32", (2, 3), array.tobytes())
    assert np.shares_memory(view, array)
    tensor = torch.ones(2, 3, dtype=torch.bfloat16)
    (_, dtype, shape, view), *_ = tensors.from_state_dict({"x": torch.nn.Parameter(tensor)})[0]
    assert (dtype, shape, view.size) == ("bf16", (2, 3), 12)
    assert view.ctypes.data == tensor.data_ptr()
    (_, _, shape, view), *_ = tensors.from_state_dict({"x": np.array(2.0, dtype=">f4")})[0]
    assert (shape, view.tobytes()) == ((), np.float32(2).tobytes())


@pytest.mark.parametrize(
    ("state_dict", "kind", "named"),
    [
        *((({}), ConfigError, "an empty one"), ([1], ConfigError, "list"), (None, ConfigError, "NoneType")),
        *(({"x": [1.0]}, ConfigError, "x: expected a torch tensor"), ({1: np.zeros(1)}, ConfigError, "to be text")),
        *(
            ({"x": np.zeros(2)}, ModelError, "got float64"),
            ({"x": np.zeros(2, dtype=np.int64)}, ModelError, "got int64"),
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_wrong_state_dicts_are_refused(state_dict: Any, kind: type[Exception], named: str) -> None:
    with pytest.raises(kind, match=named):
        sources.resolve(({}, state_dict))


def test_tensors_without_data_are_refused(torch: Any) -> None:
    with pytest.raises(ModelError, match="meta device"):
        tensors.from_state_dict({"x": torch.ones(2, device="meta")})
    with pytest.raises(ModelError, match="got float64"):
        tensors.from_state_dict({"x": torch.ones(2, dtype=torch.float64)})


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        *((None, ConfigError), (5, ConfigError), ("", ConfigError), (("a",), ConfigError), ("a\0b", ConfigError)),
        *((b"demo", ConfigError), ("./missing", ModelError), ("/missing", ModelError), ("missing.gguf", ModelError)),
        *(("~/missing", ModelError), ("org/missing.gguf", ModelError), ("missing", ModelError)),
        *(
            (("{", {"x": np.zeros(1, dtype=np.float32)}), ConfigError),
            (([], {"x": np.zeros(1, dtype="f4")}), ConfigError),
        ),
        (({"inf": float("inf")}, {"x": np.zeros(1, dtype="f4")}), ConfigError),
        (({}, {"x": np.zeros(1, dtype="f4")}, 5), ConfigError),
        (({}, {"x": np.zeros(1, dtype="f4")}, "/missing.json"), ModelError),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_is_no_target_is_refused(given: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="expected"):
        sources.resolve(given)


def without(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Makes one module impossible to import."""
    real: Callable[..., Any] = importlib.import_module

    def import_module(name: str, package: str | None = None) -> Any:
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)


def test_a_hub_id_needs_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "huggingface_hub")
    with pytest.raises(ModelError, match=r"'org/name' does not exist here(.|\n)*hint: pip install"):
        sources.resolve("org/name")


def test_a_hub_id_downloads_only_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, target_a: Path, expected: list[int]
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(hub_id: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((hub_id, allow_patterns))
        return str(target_a)

    fake = types.ModuleType("huggingface_hub")
    fake.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    assert tokens_of("org/name") == expected
    assert [hub_id for hub_id, _ in asked] == ["org/name"]
    assert "tokenizer.json" in asked[0][1]
    assert not any(pattern.endswith(".bin") for pattern in asked[0][1])


def test_a_failing_download_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise OSError("no network\nlong story")

    fake = types.ModuleType("huggingface_hub")
    fake.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    with pytest.raises(ModelError, match=r"'org/name' could not be downloaded: no network$"):
        sources.resolve("org/name")


def test_a_mistyped_path_is_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        sources.resolve("models/name")


def test_a_missing_demo_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="hint: fetch it with `slipstream fetch demo`"):
        sources.resolve("demo")


def test_a_bin_head_is_the_safetensors_head(
    torch: Any, target_a: Path, head_a: Path, head_a_bin: Path, expected: list[int]
) -> None:
    assert torch is not None
    drafted = []
    for head in (head_a, head_a_bin):
        with Engine(target_a, Eagle(head, fixed_tree=True), threads=1) as engine:
            done = engine.generate(PROMPT_IDS, **SETTINGS)
        assert done.token_ids == expected
        drafted.append((done.stats.drafted, done.stats.accepted, done.stats.steps))
    assert drafted[0] == drafted[1]
    assert drafted[0][1] > 0


def test_a_bin_head_without_torch_says_how_to_convert_it(monkeypatch: pytest.MonkeyPatch, head_a_bin: Path) -> None:
    without(monkeypatch, "torch")
    with pytest.raises(ModelError, match=r"needs torch to be read\nhint: (.|\n)*save_file"):
        sources.resolve(head_a_bin)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"<html>", b"\x80\x02N."], ids=repr)
def test_a_file_that_torch_did_not_write_is_refused(torch: Any, tmp_path: Path, content: bytes) -> None:
    assert torch is not None
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError, match="expected a dict of tensors saved by torch"):
        sources.resolve(tmp_path)


def test_drafters_take_what_targets_take(
    target_a: Path, config: dict[str, Any], arrays: dict[str, Any], head_a: Path, expected: list[int]
) -> None:
    safetensors_numpy = importlib.import_module("safetensors.numpy")
    head_config = json.loads((head_a / "config.json").read_text(encoding="utf-8"))
    head = (head_config, safetensors_numpy.load_file(head_a / "model.safetensors"))
    for drafter in (DraftModel((config, arrays), num_layers=2), DraftModel(target_a), Eagle(head)):
        assert tokens_of(target_a, drafter) == expected


def test_torch_is_not_imported_for_files(target_a: Path, python: Callable[..., Any]) -> None:
    process = python(
        """
        import sys
        import slipstream

        with slipstream.Engine(sys.argv[1], "ngram", threads=1) as engine:
            engine.generate("the red fox", max_tokens=3)
        print(sorted({"torch", "transformers", "huggingface_hub"} & set(sys.modules)))
        """,
        str(target_a),
    )
    output, _ = process.communicate(timeout=60)
    assert output == "[]\n"
