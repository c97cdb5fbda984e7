"""Weights that are already in memory: torch tensors and NumPy arrays as bytes, without a copy where possible."""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream import settings
from slipstream._core import ConfigError, ModelError

Tensor = tuple[str, str, tuple[int, ...], NDArray[np.uint8]]
"""Name, dtype (``"f32"``, ``"f16"`` or ``"bf16"``), shape, bytes in row-major order."""

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_BUFFERS = ("position_ids", "attn.bias", "attn.masked_bias")  # older state dicts carry them; they are no weights
_INPUT_EMBEDDING = "embed_tokens.weight"
_OUTPUT_EMBEDDING = "lm_head.weight"


def from_state_dict(state_dict: object) -> tuple[list[Tensor], bool]:
    """The tensors of a state dict, and whether its output embedding is its input embedding.

    Tensors elsewhere than in the CPU's memory, or not contiguous, are copied; the others are passed as they are.

    Args:
        state_dict: Names to torch tensors or NumPy arrays of float32, float16 or bfloat16.

    Raises:
        ConfigError: If it is no mapping of names to arrays.
        ModelError: If a tensor has another dtype, or no data.
    """
    if not isinstance(state_dict, Mapping) or not state_dict:
        got = "an empty one" if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ConfigError(f"expected a state dict of names to torch or NumPy arrays, got {got}")
    tensors: list[Tensor] = []
    for name, value in state_dict.items():
        if not isinstance(name, str):
            raise ConfigError(f"expected the names of a state dict to be text, got {settings.shown(name)}")
        if name.endswith(_BUFFERS):
            continue
        tensors.append(_tensor(name.removeprefix("_orig_mod."), value))  # torch.compile's prefix
    by_name = {tensor[0]: tensor for tensor in tensors}
    output = by_name.get(_OUTPUT_EMBEDDING)
    if output is None or not any(
        _is_same(output, by_name[name]) for name in by_name if name.endswith(_INPUT_EMBEDDING)
    ):
        return tensors, False
    return [tensor for tensor in tensors if tensor is not output], True


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one[1:3] == other[1:3] and one[3].ctypes.data == other[3].ctypes.data and one[3].size > 0


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        return _from_numpy(name, value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_torch(name, value, torch)
    raise ConfigError(f"{name}: expected a torch tensor or a NumPy array, got {type(value).__name__}")


def _dtype(name: str, given: str, hint: str) -> str:
    dtype = _DTYPES.get(given)
    if dtype is None:
        raise ModelError(f"{name}: expected float32, float16 or bfloat16, got {given}\nhint: {hint}")
    return dtype


def _from_numpy(name: str, array: NDArray[Any]) -> Tensor:
    dtype = _dtype(name, array.dtype.name, "convert it with .astype(numpy.float32)")
    contiguous = np.ascontiguousarray(array)
    if not contiguous.dtype.isnative:
        contiguous = contiguous.astype(contiguous.dtype.newbyteorder("="))
    return name, dtype, array.shape, contiguous.reshape(-1).view(np.uint8)


def _from_torch(name: str, tensor: Any, torch: Any) -> Tensor:
    dtype = _dtype(name, str(tensor.dtype).removeprefix("torch."), "convert it with .float()")
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        where = "on the meta device" if tensor.device.type == "meta" else f"of layout {tensor.layout}"
        raise ModelError(f"{name}: expected a dense tensor with data, got one {where}\nhint: load the model first")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return name, dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy()
