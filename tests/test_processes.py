"""Interrupts, forks and threads: nothing hangs, and the interpreter runs while the engine works."""

import asyncio
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream import Engine

Start = Callable[..., "subprocess.Popen[str]"]
PROMPT = "the red fox sees"

WAITS = {
    "stream": "for chunk in engine.stream([0], **LONG): ready()",
    "generate": "ready(); engine.generate([0], **LONG)",
    "batch": "ready(); engine.generate([[0], [1], [2]], **LONG)",
    "queue": "first = engine.stream([0], **LONG); ready(); next(engine.stream([1], **LONG))",
    "prefill": "ready(); engine.generate([5] * 1900, **LONG)",
    "asyncio": "asyncio.run(read())",
}


@pytest.mark.parametrize("wait", WAITS)
def test_hc_098_an_interrupt_ends_the_wait_and_the_request(wait: str, demo_model: Path, python: Start) -> None:
    process = python(
        f"""
        import asyncio, sys, time
        from slipstream import Engine

        LONG = dict(max_tokens=1500, temperature=0, ignore_eos=True, seed=1)
        is_ready = False

        def ready():
            global is_ready
            if not is_ready:
                is_ready = True
                print("ready", flush=True)

        async def read():
            async for chunk in engine.astream([0], **LONG):
                ready()

        engine = Engine(sys.argv[1], max_batch=1, prefix_cache=False, max_context=2048)
        free = engine.load()["free_blocks"]
        try:
            {WAITS[wait]}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        first = None
        deadline = time.monotonic() + 10
        while engine.load()["running"] or engine.load()["waiting"] or engine.load()["free_blocks"] != free:
            assert time.monotonic() < deadline, engine.load()
            time.sleep(0.01)
        assert len(engine.generate([0], max_tokens=3, temperature=0, ignore_eos=True).token_ids) == 3
        print("usable", flush=True)
        """,
        str(demo_model),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()
        time.sleep(0.2)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n", process.communicate()
        assert time.monotonic() - sent < 1
        output, _ = process.communicate(timeout=60)
        assert output == "usable\n"
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


MODELS = {
    "files": "model = sys.argv[1]",
    "memory": """
        import numpy as np
        config = {
            "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 8192, "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        }
        weights = {"model.embed_tokens.weight": (8192, 1024), "model.norm.weight": (1024,)}
        for layer in range(6):
            name = f"model.layers.{layer}."
            weights |= {f"{name}self_attn.{part}_proj.weight": (1024, 1024) for part in "qkvo"}
            weights |= {f"{name}mlp.{part}_proj.weight": (4096, 1024) for part in ("gate", "up")}
            weights |= {f"{name}mlp.down_proj.weight": (1024, 4096), f"{name}input_layernorm.weight": (1024,)}
            weights |= {f"{name}post_attention_layernorm.weight": (1024,)}
        model = config, {name: np.full(shape, 0.01, np.float32) for name, shape in weights.items()}
        """,
}


@pytest.mark.parametrize("wait", [0.02, 0.2, 0.5])
@pytest.mark.parametrize("kind", MODELS)
def test_hc_098_an_interrupt_ends_loading(kind: str, wait: float, demo_model: Path, python: Start) -> None:
    process = python(
        f"""
        import sys
        from slipstream import Engine

        {MODELS[kind].strip()}
        print("ready", flush=True)
        try:
            while True:
                Engine(model).close()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        with Engine(model) as engine:
            assert len(engine.generate([0], max_tokens=3, temperature=0, ignore_eos=True).token_ids) == 3
        print("usable", flush=True)
        """,
        str(demo_model),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()
        time.sleep(wait)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n", process.communicate()
        assert time.monotonic() - sent < 1
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, "usable\n")
    finally:
        process.kill()
        process.wait()


CHILDREN = {
    "engine": "refused(lambda: engine.generate('x', max_tokens=1))",
    "stats": "refused(engine.stats)",
    "stream": "refused(lambda: next(stream))",
    "close": "stream.close(); engine.close()",
    "new": "Engine(sys.argv[1], threads=2).generate('the red fox', max_tokens=3)",
    "exit": "sys.exit(0)",
    "drop": "del stream, engine; import gc; gc.collect()",
}


@pytest.mark.parametrize("child", CHILDREN)
def test_hc_099_a_forked_child_works_or_is_refused_at_once(child: str, target_a: Path, python: Start) -> None:
    process = python(
        f"""
        import os, sys, time
        from slipstream import DeviceError, Engine

        def refused(use):
            try:
                use()
            except DeviceError as error:
                assert "was built in process" in str(error) and "hint: " in str(error), error
            else:
                raise AssertionError("expected DeviceError")

        engine = Engine(sys.argv[1], threads=2)
        stream = engine.stream("the red fox", max_tokens=900, ignore_eos=True)
        next(stream)
        child = os.fork()
        if child == 0:
            {CHILDREN[child]}
            sys.exit(0)
        deadline = time.monotonic() + 10
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, 9)
                os.waitpid(child, 0)
                sys.exit("the child hung")
            time.sleep(0.01)
        assert ended[1] == 0, ended
        assert sum(len(chunk.token_ids) for chunk in stream) > 0
        print("parent works")
        """,
        str(target_a),
    )
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output.splitlines()[-1:]) == (0, ["parent works"]), output


def test_hc_099_importing_before_a_fork_is_harmless(target_a: Path, python: Start) -> None:
    process = python(
        """
        import multiprocessing, sys
        import slipstream

        def use(path):
            with slipstream.Engine(path, "ngram", threads=2) as engine:
                print(len(engine.generate("the red fox", max_tokens=5, ignore_eos=True).token_ids), flush=True)

        child = multiprocessing.get_context("fork").Process(target=use, args=(sys.argv[1],))
        child.start()
        child.join(10)
        assert child.exitcode == 0, child.exitcode
        """,
        str(target_a),
    )
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "5\n")


def counted_per_second(during: Callable[[], object]) -> float:
    """How fast a Python thread counts while something else runs in this one."""
    count = 0
    is_over = False

    def run() -> None:
        nonlocal count
        while not is_over:
            count += 1

    thread = threading.Thread(target=run)
    start = time.perf_counter()
    thread.start()
    during()
    is_over = True
    thread.join()
    return count / (time.perf_counter() - start)


def test_hc_097_the_interpreter_runs_while_the_engine_works(demo_model: Path) -> None:
    idle = counted_per_second(lambda: time.sleep(0.5))
    with Engine(demo_model, threads=1) as engine:
        during_prompt = counted_per_second(lambda: engine.generate([5] * 300, max_tokens=1))
        during_answer = counted_per_second(lambda: engine.generate([5], max_tokens=40, ignore_eos=True))
    during_build = counted_per_second(lambda: Engine(demo_model, threads=1).close())
    # Half of the idle rate is the aim; a shared machine has no core to spare all the time.
    assert min(during_prompt, during_answer, during_build) > 0.3 * idle


def work_in_threads(engine: Engine, operations: int) -> None:
    """Streams, batches, cancellations and counts from six threads at once, with random pauses."""
    errors: list[BaseException] = []
    shared: list[object] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(operations // 6):
                kind = choose.randrange(6)
                length = choose.randrange(1, 12)
                if kind == 0:
                    list(engine.stream(PROMPT, max_tokens=length))
                elif kind == 1:
                    engine.generate([PROMPT, PROMPT], max_tokens=length)
                elif kind == 2:
                    stream = engine.stream(PROMPT, max_tokens=500, ignore_eos=True)
                    shared.append(stream)
                    next(stream)
                elif kind == 3 and shared:
                    shared.pop().close()  # type: ignore[attr-defined]
                elif kind == 4:
                    asyncio.run(read(length))
                else:
                    engine.stats()
                    engine.load()
                time.sleep(choose.random() * 0.001)
        except IndexError:
            pass  # another thread took the last shared stream
        except BaseException as error:
            errors.append(error)

    async def read(length: int) -> None:
        async for _ in engine.astream(PROMPT, max_tokens=length):
            pass

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive(), "a thread hangs"
    assert not errors, errors[0]
    shared.clear()


def test_hc_100_threads_share_an_engine(engine: Engine, no_leak: Callable[[], None]) -> None:
    work_in_threads(engine, 600)
    no_leak()


@pytest.mark.slow
def test_hc_100_threads_share_an_engine_for_long(engine: Engine, no_leak: Callable[[], None]) -> None:
    work_in_threads(engine, 10_000)
    no_leak()


def test_hc_097_several_engines_in_several_threads(target_a: Path) -> None:
    results: list[list[int]] = []

    def work() -> None:
        with Engine(target_a, "ngram", threads=1) as engine:
            results.append(engine.generate(PROMPT, max_tokens=50, temperature=0, ignore_eos=True).token_ids)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    assert all(result == results[0] for result in results)
