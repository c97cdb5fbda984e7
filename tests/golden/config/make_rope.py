"""Writes rope.json: rotary frequencies as transformers computes them, bit by bit.

    python make_rope.py
"""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "vocab_size": 16,
    "max_position_embeddings": 131072,
}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES = {
    "plain_10000_64": (64, {"rope_type": "default", "rope_theta": 10000.0}),
    "plain_100000_64": (64, {"rope_type": "default", "rope_theta": 100000.0}),
    "plain_500000_128": (128, {"rope_type": "default", "rope_theta": 500000.0}),
    "linear_10000_64": (64, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "llama3_500000_128": (128, {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}),
}


def main():
    results = {}
    for name, (head_dim, rope) in CASES.items():
        settings = {**SIZES, "head_dim": head_dim, "rope_parameters": rope}
        frequencies = LlamaRotaryEmbedding(LlamaConfig(**settings)).inv_freq
        results[name] = {
            "config": {"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2, **settings},
            "bits": frequencies.view(torch.int32).tolist(),
        }
    (Path(__file__).parent / "rope.json").write_text(json.dumps(results, separators=(",", ":")))


if __name__ == "__main__":
    main()
