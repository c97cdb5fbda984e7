"""Write random GGUF blocks and their f32 values, as the `gguf` package computes them, to `blocks/`.

Each file holds the blocks' bytes, then the expected values as little-endian f32.
Run: `python tests/golden/make_blocks.py` (needs gguf and numpy).
"""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

# Byte offsets of the f16 scales, which must be finite; all other bytes are free.
SCALES = {
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def main() -> None:
    """Write one file per type."""
    folder = Path(__file__).parent / "blocks"
    folder.mkdir(exist_ok=True)
    for seed, name in enumerate(["F32", "F16", "BF16", *SCALES]):
        random = np.random.default_rng(seed)
        kind = GGMLQuantizationType[name]
        length, size = GGML_QUANT_SIZES[kind]
        count = {1: 1000, 32: 100, 256: 14}[length]
        if name in SCALES:
            blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
            for offset in SCALES[name]:
                scale = (random.standard_normal(count) * 10.0 ** random.integers(-5, 2, count)).astype(np.float16)
                blocks[:, offset : offset + 2] = scale[:, None].view(np.uint8)
        else:
            values = (random.standard_normal(count) * 10.0 ** random.integers(-5, 4, count)).astype(np.float32)
            stored = {
                "F32": values,
                "F16": values.astype(np.float16),
                "BF16": (values.view(np.uint32) >> 16).astype(np.uint16),
            }
            blocks = stored[name][:, None].view(np.uint8)
        expected = dequantize(blocks, kind).astype("<f4")
        (folder / f"{name}.bin").write_bytes(blocks.tobytes() + expected.tobytes())


if __name__ == "__main__":
    main()
