"""Drafters' settings: what proposes tokens, and how large a draft tree it may grow.

All are frozen and read nothing; files are opened when an engine is built.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any

from slipstream import settings
from slipstream._core import ConfigError

MAX_DEPTH = 32
"""Deepest draft tree."""

MAX_NODES = 1024
"""Most nodes below the root of a draft tree."""


def _check_tree(top_k: object, max_depth: object, max_nodes: object, fixed_tree: object) -> None:
    top_k = settings.count("top_k", top_k, 1, MAX_NODES)
    max_depth = settings.count("max_depth", max_depth, 1, MAX_DEPTH)
    max_nodes = settings.count("max_nodes", max_nodes, 1, MAX_NODES)
    most = top_k + max_depth * top_k**2
    if settings.flag("fixed_tree", fixed_tree) and max_nodes > most:
        raise ConfigError(
            f"expected max_nodes of at most {most} for a fixed tree of top_k={top_k} and max_depth={max_depth}, "
            f"got {max_nodes}\nhint: top_k + max_depth * top_k**2 nodes are all that can be drafted"
        )


@dataclass(frozen=True)
class NGram:
    """Prompt lookup: proposes what followed the last tokens when they came before, in prompt and output.

    Costs no weights and almost no time; pays where the output repeats its input.

    Attributes:
        min_match: Fewest last tokens that must have come before. Default 2.
        max_match: Most last tokens compared; the longest match wins. Default 5.
        max_nodes: Most draft nodes a step, 1 to 1024. Default 10.

    Raises:
        ConfigError: If a value is outside its range.
    """

    min_match: int = 2
    max_match: int = 5
    max_nodes: int = 10

    def __post_init__(self) -> None:
        """Checks the ranges."""
        settings.count("max_match", self.max_match, 1, 64)
        settings.count("min_match", self.min_match, 1, 64)
        if self.min_match > self.max_match:
            raise ConfigError(f"expected min_match of at most max_match, got {self.min_match} and {self.max_match}")
        settings.count("max_nodes", self.max_nodes, 1, MAX_NODES)


@dataclass(frozen=True)
class DraftModel:
    """A smaller decoder with the target's vocabulary.

    Attributes:
        source: Anything that a target may be (see :class:`slipstream.Engine`).
        num_layers: Use only its first layers. Default ``None``, all of them.
        max_depth: Deepest path drafted in a step, 1 to 32. Default 5.
        top_k: Children drafted per node, at least 1. Default 4.
        max_nodes: Most draft nodes a step, 1 to 1024. Default 16.
        noise: Draft with the request's own coins, so that a sampled draft is accepted more often. Default ``True``.
        fixed_tree: Draft exactly ``max_nodes`` nodes each step, whatever they are worth. Default ``False``.

    Raises:
        ConfigError: If a value is outside its range.
    """

    source: Any
    _: KW_ONLY
    num_layers: int | None = None
    max_depth: int = 5
    top_k: int = 4
    max_nodes: int = 16
    noise: bool = True
    fixed_tree: bool = False

    def __post_init__(self) -> None:
        """Checks the ranges."""
        settings.optional_count("num_layers", self.num_layers, 1, 4096)
        settings.flag("noise", self.noise)
        _check_tree(self.top_k, self.max_depth, self.max_nodes, self.fixed_tree)


@dataclass(frozen=True)
class Eagle:
    """An EAGLE-1/2 head: one layer over the target's own features, with EAGLE-2's dynamic tree.

    Attributes:
        path: Folder of the head, hub id, or ``(config, state_dict)``.
        max_depth: Deepest path drafted in a step, 1 to 32. Default 7.
        top_k: Children drafted per node, at least 1. Default 10.
        max_nodes: Most draft nodes a step, 1 to 1024. Default 60.
        noise: Draft with the request's own coins, so that a sampled draft is accepted more often. Default ``True``.
        fixed_tree: Draft exactly EAGLE-2's tree each step, whatever its nodes are worth. Default ``False``.

    Raises:
        ConfigError: If a value is outside its range.
    """

    path: Any
    _: KW_ONLY
    max_depth: int = 7
    top_k: int = 10
    max_nodes: int = 60
    noise: bool = True
    fixed_tree: bool = False

    def __post_init__(self) -> None:
        """Checks the ranges."""
        settings.flag("noise", self.noise)
        _check_tree(self.top_k, self.max_depth, self.max_nodes, self.fixed_tree)
