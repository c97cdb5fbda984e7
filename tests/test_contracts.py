"""House rules that no compiler checks: who may import whom, where unsafe code stands, and that names are documented."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from conftest import REPOSITORY

ENGINE = REPOSITORY / "rust" / "engine" / "src"
MAX_LINES = 450

# What each module of the engine may import (`use crate::`). A new arrow is a decision: write it here first.
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
    "model": "error request rows",
    "load": "error request text model",
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
    """The engine's top-level module that a file belongs to."""
    return path.relative_to(ENGINE).parts[0].removesuffix(".rs")


def code_of(path: Path) -> str:
    """A Rust file without comments and strings."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r'"(?:\\.|[^"\\])*"', '""', text)


def imports_of(path: Path) -> set[str]:
    """The engine's modules that a file names after `crate::`, in groups too."""
    found: set[str] = set()
    for group, single in re.findall(r"\bcrate::(?:\{([^;]*?)\}\s*;|(\w+))", code_of(path)):
        flat = re.sub(r"::\{[^{}]*\}", "", group)
        found |= {item.strip().split("::")[0] for item in flat.split(",") if item.strip()} if group else {single}
    return found


def test_engine_modules_import_what_their_row_names() -> None:
    for path in sorted(ENGINE.rglob("*.rs")):
        module = module_of(path)
        if module == "lib":
            continue
        assert module in ARROWS, f"{path.name}: a new module needs a row"
        imported = {name for name in imports_of(path) if name in ARROWS} - {module}
        extra = imported - set(ARROWS[module].split())
        assert not extra, f"{path.relative_to(REPOSITORY)} may not import {sorted(extra)}"


def test_the_table_has_no_cycle() -> None:
    order: list[str] = []
    while len(order) < len(ARROWS):
        ready = [name for name, arrows in ARROWS.items() if name not in order and set(arrows.split()) <= set(order)]
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


@pytest.mark.parametrize("name", sorted(set(slipstream.__all__) - {"__version__"}))
def test_public_names_are_documented(name: str) -> None:
    item = getattr(slipstream, name)
    assert (item.__doc__ or "").strip(), name
    undocumented = [
        attribute
        for attribute, value in vars(item).items()
        if not attribute.startswith("_") and callable(value) and not (value.__doc__ or "").strip()
    ]
    assert not undocumented, f"{name}: {undocumented}"


@pytest.mark.parametrize("name", ["ConfigError", "ModelError", "RequestError", "CapacityError", "DeviceError"])
def test_errors_are_one_family(name: str) -> None:
    kind = getattr(slipstream, name)
    assert issubclass(kind, slipstream.Error)
    assert issubclass(kind, ValueError) == (name in ("ConfigError", "RequestError"))


def test_the_stub_tells_what_the_extension_has() -> None:
    command = [sys.executable, "-m", "mypy.stubtest", "--mypy-config-file=pyproject.toml", "slipstream._core"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
