"""The command line: run, chat, inspect, fetch."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream import __version__, _core, fetch, sources
from slipstream._core import Error, RequestError, Stats
from slipstream.drafters import DraftModel, Eagle, NGram
from slipstream.engine import Engine
from slipstream.streams import TokenStream

STATS = (
    *("prompt_tokens", "cached_tokens", "tokens", "cut_tokens", "steps", "drafted", "accepted", "preemptions"),
    *("acceptance_length", "acceptance_rate", "per_depth", "seconds", "seconds_to_first_token"),
)
"""Names of the counts in ``--json``, as in :class:`slipstream.Stats`."""


class _Commands(typer.core.TyperGroup):
    """Errors of the family are one line and exit status 1; everything else keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Error as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Runs language models with lossless speculative decoding: a drafter changes the time, never the text.",
)

ModelOption = Annotated[
    str,
    typer.Option("--model", "-m", help="demo, a Hugging Face folder, a .gguf file, or a hub id.", show_default=True),
]
DrafterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        "-d",
        help="none, auto, ngram, eagle:PATH or draft:PATH. Give it several times to merge drafters into one tree. "
        "(default: auto)",
    ),
]
MaxTokensOption = Annotated[int | None, typer.Option(help="Most tokens to write.")]
TemperatureOption = Annotated[float, typer.Option(help="0 takes the most probable token each time.")]
TopKOption = Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 is off.")]
TopPOption = Annotated[float, typer.Option(help="Keep the smallest set with this probability; 1 is off.")]
MinPOption = Annotated[float, typer.Option(help="Keep tokens with this share of the best one's probability; 0 is off.")]
SeedOption = Annotated[int | None, typer.Option(help="The same seed gives the same text. (default: drawn)")]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads that compute. (default: one per core)")]
QuantizeOption = Annotated[str | None, typer.Option(help="bf16 halves float32 weights, and changes results.")]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        print(f"slipstream {__version__}")
        raise typer.Exit


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help="What to ask, or with --raw the text to go on with.")],
    model: ModelOption = "demo",
    drafter: DrafterOption = None,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer. May be repeated.")] = None,
    threads: ThreadsOption = None,
    quantize: QuantizeOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Pass the prompt as it is, without the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead.")] = False,
) -> None:
    """Answers one prompt. The text goes to standard output as it is written, speed and acceptance to standard error."""
    given: Any = prompt if raw else [{"role": "user", "content": prompt}]
    with _engine(model, drafter, threads, quantize) as engine:
        stream = engine.stream(
            given,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=stop or [],
        )
        texts: list[str] = []
        token_ids: list[int] = []
        finish_reason: str | None = None
        with stream:
            for chunk in stream:
                texts.append(chunk.text)
                token_ids += chunk.token_ids
                finish_reason = chunk.finish_reason
                if not as_json:
                    print(chunk.text, end="", flush=True)
        if not as_json:
            print(flush=True)
            print(summary(stream), file=sys.stderr)
            return
        print(
            json.dumps(
                {
                    "text": "".join(texts),
                    "token_ids": token_ids,
                    "finish_reason": finish_reason,
                    "stats": {} if stream.stats is None else stats_json(stream.stats),
                    "model": model,
                    "drafter": drafter or ["auto"],
                    "seed": stream.seed,
                }
            )
        )


@app.command()
def chat(
    model: ModelOption = "demo",
    drafter: DrafterOption = None,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.7,
    top_k: TopKOption = 0,
    top_p: TopPOption = 0.95,
    min_p: MinPOption = 0.0,
    seed: SeedOption = None,
    system: Annotated[str | None, typer.Option(help="Instructions before the first message.")] = None,
    threads: ThreadsOption = None,
    quantize: QuantizeOption = None,
) -> None:
    """Talks to a model. Text that a drafter proposed and the target accepted is green.

    /clear forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C ends an answer.
    """
    console = Console(highlight=False)
    opening = [{"role": "system", "content": system}] if system else []
    messages: list[dict[str, str]] = list(opening)
    with _engine(model, drafter, threads, quantize) as engine:
        if not engine.has_chat_template:
            raise RequestError("expected a model with a chat template, got one without\nhint: slipstream run --raw")
        console.print("/clear forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C ends an answer", style="dim")
        for line in _lines(console):
            if line in ("/quit", "/exit"):
                return
            if line == "/clear":
                messages = list(opening)
                console.print("forgotten", style="dim")
                continue
            if line.startswith("/"):
                console.print("known are /clear and /quit", style="dim")
                continue
            asked = [*messages, {"role": "user", "content": line}]
            try:
                stream = engine.stream(
                    asked,
                    max_tokens=max_tokens,
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    min_p=min_p,
                    seed=seed,
                )
                answer = _answer(console, stream)
            except Error as error:
                console.print(f"error: {error}", style="red", markup=False)
                continue
            messages = [*asked, {"role": "assistant", "content": answer}]


def _lines(console: Console) -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and history for input()
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n/quit or Ctrl-D leaves", style="dim")
            continue
        if line:
            yield line


def _answer(console: Console, stream: TokenStream) -> str:
    """Prints an answer as it is written; Ctrl-C ends it and keeps what there is."""
    texts: list[str] = []
    try:
        with stream:
            for chunk in stream:
                texts.append(chunk.text)
                for text, is_accepted in chunk.pieces:
                    console.print(Text(text, style="green" if is_accepted else ""), end="", soft_wrap=True)
        console.print()
        console.print(summary(stream), style="dim", soft_wrap=True)
    except KeyboardInterrupt:
        console.print("\ncancelled", style="dim")
    return "".join(texts)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="demo, a folder, or a .gguf file: a model, or an EAGLE head.")],
    head: Annotated[str | None, typer.Option(help="An EAGLE head: does it fit the model?")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Tells what a model or head is and what memory it needs, without loading it."""
    described: dict[str, Any] = {"model": _described(path)}
    differing: list[str] = []
    if head is not None:
        described["head"] = _described(head)
        if described["head"]["kind"] != "eagle":
            differing.append(f"{head} is no EAGLE head")
        for name in ("hidden_size", "vocab_size"):
            model_value, head_value = described["model"].get(name), described["head"].get(name)
            if model_value != head_value:
                differing.append(f"{name} is {model_value} in the model and {head_value} in the head")
        described["fits"] = not differing
    if as_json:
        print(json.dumps(described))
        return
    console = Console(highlight=False)
    table = Table(show_header=False, box=None)
    for facts in described.values():
        if isinstance(facts, dict):
            table.add_row(Text(str(facts["kind"]), style="bold"), "")
            for name, value in _rows(facts):
                table.add_row(f"  {name}", Text(value))
    console.print(table)
    if head is not None:
        verdict = f"the head does not fit: {'; '.join(differing)}" if differing else "the head fits the model"
        console.print(Text(verdict), soft_wrap=True)


def _described(path: str) -> dict[str, Any]:
    """What the core knows, and the memory that the weights need in each storage."""
    facts = _core.inspect(sources.resolve(path))
    parameters = facts.get("parameters")
    if isinstance(parameters, int):
        facts["weight_bytes"] = {"f32": 4 * parameters, "bf16": 2 * parameters}
    file = fetch.demo_path() if path == "demo" else Path(path).expanduser()
    stored = [file] if file is not None and file.is_file() else list((file or Path()).glob("*.safetensors"))
    if stored and "weight_bytes" in facts:
        facts["weight_bytes"]["as stored"] = sum(part.stat().st_size for part in stored)
    return facts


def _rows(facts: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Facts by name, those of a group as ``group.name``; numbers of bytes also in units a person reads."""
    for name, value in facts.items():
        full_name = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _rows(value, f"{full_name}.")
        elif isinstance(value, int) and "bytes" in full_name:
            yield full_name, f"{value} ({value / 2**20:.1f} MiB)" if value >= 2**20 else f"{value}"
        elif isinstance(value, (list, tuple)):
            yield full_name, ", ".join(str(item) for item in value)
        else:
            yield full_name, str(value)


@app.command(name="fetch")
def fetch_command(
    name: Annotated[str, typer.Argument(help="demo: SmolLM2-135M-Instruct in 4-bit blocks, 98 MB.")] = "demo",
) -> None:
    """Fetches the demo model into the cache, once; $SLIPSTREAM_CACHE says where."""
    if name != "demo":
        raise typer.BadParameter(f"expected demo, got {name!r}", param_hint="NAME")
    print(fetch.fetch_demo(progress=True))


def _engine(model: str, drafter: list[str] | None, threads: int | None, quantize: str | None) -> Engine:
    drafters = [parse_drafter(text) for text in drafter or ["auto"]]
    chosen = [settings for settings in drafters if settings is not None]
    if len(chosen) < len(drafters) and len(drafters) > 1:
        raise typer.BadParameter("none goes with no other drafter", param_hint="--drafter")
    if model == "demo":
        fetch.fetch_demo(progress=True)
    return Engine(model, chosen, threads=threads, quantize=quantize)


def parse_drafter(text: str) -> NGram | Eagle | DraftModel | None:
    """A drafter as the command line writes it; ``None`` for ``none``.

    Args:
        text: ``none``, ``auto``, ``ngram``, ``eagle:PATH`` or ``draft:PATH``.

    Raises:
        typer.BadParameter: If it is none of these.
    """
    kind, _, path = text.partition(":")
    if text == "none":
        return None
    if text in ("auto", "ngram"):
        return NGram()
    if kind == "eagle" and path:
        return Eagle(path)
    if kind == "draft" and path:
        return DraftModel(path)
    raise typer.BadParameter(
        f"expected none, auto, ngram, eagle:PATH or draft:PATH, got {text!r}", param_hint="--drafter"
    )


def stats_json(stats: Stats) -> dict[str, Any]:
    """A request's counts as ``--json`` prints them.

    Args:
        stats: The counts of a request that ended.
    """
    return {name: getattr(stats, name) for name in STATS}


def summary(stream: TokenStream) -> str:
    """One line on a request that ended: tokens, speed, tokens per step, share of drafts accepted.

    Args:
        stream: Its stream.
    """
    stats = stream.stats
    if stats is None:
        return "cancelled"
    speed = stats.tokens / stats.seconds if stats.seconds > 0 else 0.0
    drafted = f"{stats.acceptance_rate:.0%} of {stats.drafted} drafted accepted" if stats.drafted else "none drafted"
    return (
        f"{stats.tokens} tokens in {stats.seconds:.2f} s, {speed:.1f} tokens/s, "
        f"{stats.acceptance_length:.2f} tokens per step, {drafted}, seed {stream.seed}"
    )


def main() -> None:
    """Runs the command line."""
    app()
