"""Runs language models with lossless speculative decoding, on a Rust engine.

>>> from slipstream import Engine, NGram
>>> with Engine("demo", NGram()) as engine:
...     for chunk in engine.stream([{"role": "user", "content": "Hello"}], temperature=0):
...         print(chunk.text, end="")

The same request and seed give the same tokens with any drafter: a drafter changes the time, never the text.
"""

from slipstream._core import (
    CapacityError,
    Chunk,
    ConfigError,
    DeviceError,
    Error,
    ModelError,
    RequestError,
    SamplingParams,
    Stats,
    __version__,
)
from slipstream.drafters import DraftModel, Eagle, NGram
from slipstream.engine import Completion, Engine

__all__ = [
    "CapacityError",
    "Chunk",
    "Completion",
    "ConfigError",
    "DeviceError",
    "DraftModel",
    "Eagle",
    "Engine",
    "Error",
    "ModelError",
    "NGram",
    "RequestError",
    "SamplingParams",
    "Stats",
    "__version__",
]
