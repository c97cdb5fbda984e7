"""House rules that no compiler checks: who may import whom, where unsafe code stands, and that names are documented."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from conftest import REPOSITORY
from slipstream import _core

ENGINE = REPOSITORY / "rust" / "engine" / "src"
MAX_LINES = 450

# What each module of the engine may import (`use crate::`). A new arrow is a decision: write it here first. `a::b` is
# one item of a module, or a module inside one with a row of its own: a spec is plain data that files are read into.
ARROWS = {
    "loom": "",
    "error": "",
    "request": "error",
    "text": "request",
    "metrics": "request",
    "tree": "request",
    "stream": "error request metrics loom",
    "batch": "error request",
    "prefix": "request",
    "kv": "error request batch prefix tree",
    "scheduler": "error request batch stream text kv metrics",
    "sampler": "request batch tree",
    "rows": "error request batch tree kv sampler",
    "verify": "request tree",
    "model::spec": "error request",
    "load": "error request text model::spec",
    "model": "error request rows load::TensorStore model::spec",
    "budget": "request batch tree",
    "draft": "error request batch tree kv rows sampler budget verify model load",
    "cycle": "error request batch tree kv draft budget rows sampler model verify",
    "engine": "error request batch stream kv scheduler metrics cycle",
    "assemble": "error request text kv scheduler sampler verify model load budget draft cycle engine",
}


def source_files(*suffixes: str) -> list[Path]:
    """Files of our own with one of the suffixes."""
    roots = ("rust", "python", "tests", "benches")
    files = [path for root in roots for path in (REPOSITORY / root).rglob("*") if path.suffix in suffixes]
    return [path for path in files if "golden" not in path.parts and "target" not in path.parts]


def module_of(path: Path) -> str:
    """The row of the table that a file of the engine belongs to: the innermost module that has one."""
    parts = path.relative_to(ENGINE).with_suffix("").parts
    inner = "::".join(parts[:2])
    return inner if inner in ARROWS else parts[0]


def code_of(path: Path) -> str:
    """A Rust file without comments and strings."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r'"(?:\\.|[^"\\])*"', '""', text)


def flattened(tree: str) -> list[str]:
    """The paths of a use tree: `a::{b, c::{d, e}}` is `a::b`, `a::c::d` and `a::c::e`."""
    while group := re.search(r"([\w:]*)\{([^{}]*)\}", tree):
        items = [item.strip() for item in group[2].split(",") if item.strip()]
        tree = tree[: group.start()] + ", ".join(group[1] + item for item in items) + tree[group.end() :]
    return [path.split(" as ")[0].strip() for path in tree.split(",") if path.strip()]


def imports_of(path: Path) -> set[str]:
    """The paths that a file of the engine names after `crate::`, in groups too."""
    code = code_of(path)
    trees = re.findall(r"\buse crate::([^;]*);", code)
    elsewhere = re.findall(r"\bcrate::([\w:]+)", re.sub(r"\buse [^;]*;", "", code))
    return {path for tree in trees for path in flattened(tree)} | set(elsewhere)


def is_allowed(imported: str, row: str) -> bool:
    """Whether a path is in one of the row's modules, or is one of its items."""
    return any(f"{imported}::".startswith(f"{arrow}::") for arrow in ARROWS[row].split())


def test_paths_of_use_trees() -> None:
    assert flattened("load::TensorStore") == ["load::TensorStore"]
    assert flattened("{a::{B, c::{self, D}}, e}") == ["a::B", "a::c::self", "a::c::D", "e"]
    assert is_allowed("model::spec::ModelSpec", "load")
    assert not is_allowed("model::Decoder", "load")
    assert not is_allowed("load::TensorStores", "model")


def test_engine_modules_import_what_their_row_names() -> None:
    for path in sorted(ENGINE.rglob("*.rs")):
        module = module_of(path)
        if module == "lib":
            continue
        assert module in ARROWS, f"{path.name}: a new module needs a row"
        others = {imported for imported in imports_of(path) if not f"{imported}::".startswith(f"{module}::")}
        extra = {imported for imported in others if not is_allowed(imported, module)}
        assert not extra, f"{path.relative_to(REPOSITORY)} may not import {sorted(extra)}"


def test_the_table_has_no_cycle() -> None:
    order: list[str] = []
    while len(order) < len(ARROWS):
        left = {name: arrows.split() for name, arrows in ARROWS.items() if name not in order}
        ready = [
            name
            for name, arrows in left.items()
            if all((arrow if arrow in ARROWS else arrow.split("::")[0]) in order for arrow in arrows)
        ]
        assert ready, f"modules in a cycle: {sorted(set(ARROWS) - set(order))}"
        order += ready


@pytest.mark.parametrize("crate", ["engine", "bindings"])
def test_unsafe_stands_in_kernels_only(crate: str) -> None:
    for path in (REPOSITORY / "rust" / crate / "src").rglob("*.rs"):
        code = code_of(path).replace("unsafe_code", "")
        assert not re.search(r"\bunsafe\b", code), path


def test_engine_forbids_unsafe_code() -> None:
    assert "#![forbid(unsafe_code)]" in (ENGINE / "lib.rs").read_text(encoding="utf-8")


def test_every_unsafe_block_says_why_it_is_sound() -> None:
    for path in (REPOSITORY / "rust" / "kernels").rglob("*.rs"):
        lines = path.read_text(encoding="utf-8").splitlines()
        for index, line in enumerate(lines):
            code = line.split("//")[0]
            if re.search(r"\bunsafe\s*(\{|impl\b)", code):
                before = "\n".join(lines[max(0, index - 8) : index + 1])
                assert "SAFETY:" in before, f"{path.relative_to(REPOSITORY)}:{index + 1}: no SAFETY note"


def test_engine_shares_no_lock() -> None:
    for path in ENGINE.rglob("*.rs"):
        assert not re.search(r"\b(Mutex|RwLock|Rc)\b", code_of(path)), path


def test_files_fit_the_budget() -> None:
    long = {
        str(path.relative_to(REPOSITORY)): count
        for path in source_files(".rs", ".py", ".pyi")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long


def test_one_version() -> None:
    for manifest in ("Cargo.toml", "pyproject.toml"):
        text = (REPOSITORY / manifest).read_text(encoding="utf-8")
        found = re.search(r'^version = "([^"]+)"', text, flags=re.MULTILINE)
        assert found is not None, manifest
        assert found[1] == slipstream.__version__, manifest


def undocumented_in(item: object) -> list[str]:
    """Public methods and properties without a docstring."""
    return [
        attribute
        for attribute, value in getattr(item, "__dict__", {}).items()
        if not attribute.startswith("_") and (callable(value) or inspect.isdatadescriptor(value))
        if not (getattr(value, "__doc__", None) or "").strip()
    ]


@pytest.mark.parametrize("name", sorted(set(slipstream.__all__) - {"__version__"}))
def test_public_names_are_documented(name: str) -> None:
    item = getattr(slipstream, name)
    assert (item.__doc__ or "").strip(), name
    assert not undocumented_in(item), name


@pytest.mark.parametrize("name", sorted(set(_core.__all__) - {"__version__"}))
def test_compiled_names_are_documented(name: str) -> None:
    item = getattr(_core, name)
    assert (item.__doc__ or "").strip(), name
    assert item.__module__ == "slipstream._core"
    assert not undocumented_in(item), name


@pytest.mark.parametrize("name", ["ConfigError", "ModelError", "RequestError", "CapacityError", "DeviceError"])
def test_errors_are_one_family(name: str) -> None:
    kind = getattr(slipstream, name)
    assert issubclass(kind, slipstream.Error)
    assert issubclass(kind, ValueError) == (name in ("ConfigError", "RequestError"))


def test_the_stub_tells_what_the_extension_has() -> None:
    command = [sys.executable, "-m", "mypy.stubtest", "--mypy-config-file=pyproject.toml", "slipstream._core"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
