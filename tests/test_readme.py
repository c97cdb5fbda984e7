"""What the README shows runs, and what it names exists."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conftest import REPOSITORY
from slipstream.cli import app

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block: str, demo_model: Path) -> None:
    assert demo_model.exists()
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_there_are_python_blocks() -> None:
    assert BLOCKS


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    for link in links:
        assert (REPOSITORY / link).exists(), link


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^\$ make ([a-z-]+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^\$ slipstream ([a-z]+)", README, flags=re.MULTILINE))))
def test_commands_and_their_options_exist(command: str) -> None:
    help_text = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, [command, "--help"]).output
    shown = re.findall(rf"^\$ slipstream {command}(.*?)(?:#|$)", README, flags=re.MULTILINE)
    for option in re.findall(r"--[a-z-]+", " ".join(shown)):
        assert option in help_text, option
