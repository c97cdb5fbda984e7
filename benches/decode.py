"""Decoding with and without speculation: the same tokens, and how long they took.

The two engines take turns, so that what else the machine does meets both; results are medians over turns.
The run fails if any token differs: a speed of other text would mean nothing.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import slipstream
from slipstream import Completion, Engine, _core
from slipstream.cli import parse_drafter

TEXT = """\
The lighthouse keeper climbed the stairs every evening at sunset. He carried a lantern in one hand and a can of oil in \
the other. At the top he cleaned the glass, filled the lamp, and lit the wick. Then he sat by the window and watched \
the ships pass in the dark. In the morning he put out the lamp and went down to sleep.

One night a storm came from the west. The wind broke a window, and the rain reached the lamp. The keeper held his coat \
over the flame until the glass was dry again. A fishing boat saw the light and found the harbor. In the morning its \
captain climbed the stairs with a basket of fish, and the two men had breakfast by the sea.

After that the captain came every Sunday. He brought bread and news from the town, and the keeper told him which ships \
had passed. When the captain grew old and sold his boat, he moved into the small house beside the lighthouse. Now two \
lamps burn on the cliff at night, one for the ships and one for the table where they play cards."""
DEMO_PROMPT = f"Repeat this text exactly, word for word:\n\n{TEXT}"
"""An answer that repeats its prompt: what prompt lookup is made for, and the most that it can gain."""


def main() -> int:
    """Runs the comparison; returns 1 if a token differed."""
    options = _options()
    target = options.model
    if options.prompts is None:
        prompts = [DEMO_PROMPT]
        print("one prompt: repeat a text word for word, which is what prompt lookup is made for")
    else:
        prompts = read_prompts(options.prompts)[: options.limit]
    drafters = [parse_drafter(text) for text in options.drafter or ["auto"]]
    chosen = [drafter for drafter in drafters if drafter is not None]
    with (
        Engine(target, None, threads=options.threads, quantize=options.quantize) as plain,
        Engine(target, chosen, threads=options.threads, quantize=options.quantize) as speculative,
    ):
        _warm_up(plain, speculative)
        limits = [_core.read_bandwidth(options.threads)]
        results = [_compare(plain, speculative, prompt, options, is_shown=options.demo) for prompt in prompts]
        limits.append(_core.read_bandwidth(options.threads))
        info = plain.info()
    report = _report(results, options, info, statistics.median(limits))
    _print_report(report)
    if options.json:
        print(json.dumps(report))
    return 0 if report["identical"] else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="one prompt on the demo model, both texts streamed")
    parser.add_argument("--model", default="demo", help="demo, folder, .gguf file or hub id (default: demo)")
    parser.add_argument("--drafter", action="append", help="auto, ngram, eagle:PATH or draft:PATH; may be repeated")
    parser.add_argument(
        "--prompts", type=Path, help="one prompt a line: JSON with turns, prompt or text, or plain text"
    )
    parser.add_argument("--limit", type=int, help="use only the first prompts of the file")
    parser.add_argument("--repeat", type=int, default=1, help="turns of both engines per prompt (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=256, help="most tokens per answer (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of every request (default: 0)")
    parser.add_argument("--threads", type=int, help="threads that compute (default: one per core)")
    parser.add_argument("--quantize", choices=["bf16"], help="round weights to bf16 (default: keep them as they are)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser.parse_args()


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file, one a line; of a conversation, its first turn.

    Args:
        path: Lines of JSON objects with ``turns``, ``prompt`` or ``text``, or of plain text.
    """
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip():
            continue
        item: Any = json.loads(line) if line.lstrip().startswith("{") else line
        if isinstance(item, dict):
            item = item["turns"][0] if "turns" in item else item.get("prompt", item.get("text"))
        prompts.append(str(item))
    return prompts


def _warm_up(*engines: Engine) -> None:
    for engine in engines:
        engine.generate([0], max_tokens=4, temperature=0, ignore_eos=True)


def _compare(
    plain: Engine, speculative: Engine, prompt: str, options: argparse.Namespace, *, is_shown: bool
) -> dict[str, Any]:
    given: Any = [{"role": "user", "content": prompt}] if plain.has_chat_template else prompt
    runs: dict[str, list[Completion]] = {"plain": [], "speculative": []}
    for turn in range(options.repeat):
        pair = [("plain", plain), ("speculative", speculative)]
        for name, engine in reversed(pair) if turn % 2 else pair:
            runs[name].append(_run(engine, given, options, f"{name} decoding" if is_shown else None))
    every_run = runs["plain"] + runs["speculative"]
    tokens = {tuple(run.token_ids) for run in every_run}
    speeds = {name: statistics.median(_speed(run) for run in of_kind) for name, of_kind in runs.items()}
    return {
        "identical": len(tokens) == 1,
        "tokens": len(every_run[0].token_ids),
        "plain": speeds["plain"],
        "speculative": speeds["speculative"],
        "ratio": speeds["speculative"] / speeds["plain"],
        "acceptance_length": runs["speculative"][0].stats.acceptance_length,
        "acceptance_rate": runs["speculative"][0].stats.acceptance_rate,
    }


def _run(engine: Engine, given: Any, options: argparse.Namespace, title: str | None) -> Completion:
    settings = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": options.seed}
    if title is None:
        done: Completion = engine.generate(given, **settings)
        return done
    print(f"--- {title}", flush=True)
    texts, token_ids, reason = [], [], ""
    with engine.stream(given, **settings) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
            texts.append(chunk.text)
            token_ids += chunk.token_ids
            reason = chunk.finish_reason or reason
        print("\n", flush=True)
        assert stream.stats is not None, "a stream that ended has stats"
        return Completion("".join(texts), token_ids, reason, stream.stats, stream.seed)


def _speed(run: Completion) -> float:
    """Tokens per second after the first, so that the prompt's length does not matter."""
    first = run.stats.seconds_to_first_token or 0.0
    seconds = run.stats.seconds - first
    return (len(run.token_ids) - 1) / seconds if seconds > 0 and len(run.token_ids) > 1 else float("nan")


def _report(
    results: list[dict[str, Any]], options: argparse.Namespace, info: dict[str, Any], limit: float
) -> dict[str, Any]:
    def median(name: str) -> float:
        values: list[float] = [result[name] for result in results]
        return statistics.median(values)

    return {
        "version": slipstream.__version__,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": info["threads"],
        "model": options.model,
        "quantize": options.quantize,
        "drafter": options.drafter or ["auto"],
        "prompts": len(results),
        "repeat": options.repeat,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "identical": all(result["identical"] for result in results),
        "plain_tokens_per_second": median("plain"),
        "speculative_tokens_per_second": median("speculative"),
        "ratio": median("ratio"),
        "acceptance_length": median("acceptance_length"),
        "acceptance_rate": median("acceptance_rate"),
        "weight_bytes_per_step": info["weight_bytes_per_pass"],
        "read_bytes_per_second": limit,
        "share_of_read": median("plain") * info["weight_bytes_per_pass"] / limit,
    }


def _print_report(report: dict[str, Any]) -> None:
    verdict = "the same tokens" if report["identical"] else "TOKENS DIFFER"
    print(f"plain decoding       {report['plain_tokens_per_second']:8.1f} tokens/s")
    print(f"speculative decoding {report['speculative_tokens_per_second']:8.1f} tokens/s, {verdict}")
    print(
        f"ratio                {report['ratio']:8.2f}, {report['acceptance_length']:.2f} tokens per step, "
        f"{report['acceptance_rate']:.0%} of drafted tokens accepted"
    )
    print(
        f"limit                plain decoding reads weights at {report['share_of_read']:.0%} of the "
        f"{report['read_bytes_per_second'] / 1e9:.1f} GB/s of a loop that only reads"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except slipstream.Error as error:
        sys.exit(f"error: {error}")
