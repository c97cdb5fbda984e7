"""A Llama decoder in NumPy and float64, and tiny models whose every probability can be computed with it."""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = dict[str, NDArray[np.float32]]
Model = tuple[dict[str, Any], Weights]
"""A config and a state dict: what an engine takes as a target."""


def random_model(seed: int, vocab_size: int = 13, num_layers: int = 2, spread: float = 0.35) -> Model:
    """A Llama of hidden size 32 with random weights; ``spread`` is the standard deviation of its output head."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, deviation: float = 0.3) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) * deviation).astype(np.float32)

    weights: Weights = {
        "model.embed_tokens.weight": normal(vocab_size, 32, deviation=1.0),
        "model.norm.weight": 1 + normal(32, deviation=0.1),
        "lm_head.weight": normal(vocab_size, 32, deviation=spread),
    }
    shapes = {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
    }
    for layer in range(num_layers):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = normal(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = 1 + normal(32, deviation=0.1)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    return config, weights


def changed(model: Model, **fields: Any) -> Model:
    """The model with other fields in its config."""
    return {**model[0], **fields}, model[1]


def constant_model(probabilities: list[float]) -> Model:
    """A model whose next token has these probabilities, whatever came before."""
    config, weights = random_model(0, vocab_size=len(probabilities), num_layers=2)
    for name, weight in weights.items():
        weight[:] = 1.0 if name.endswith("norm.weight") or "embed" in name else 0.0
    config["rms_norm_eps"] = 1e-12
    weights["lm_head.weight"][:, 0] = np.log(probabilities)  # the normed hidden state is all ones
    return config, weights


def random_head(seed: int, vocab_size: int = 13) -> Model:
    """An EAGLE-1/2 head for :func:`random_model` with random weights."""
    config, weights = random_model(seed, vocab_size, num_layers=1)
    head = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if ".layers.0." in name and "input_layernorm" not in name
    }
    rng = np.random.default_rng(seed)
    head["fc.weight"] = (rng.standard_normal((32, 64)) * 0.2).astype(np.float32)
    return {**config, "bias": False}, head


def logits(model: Model, token_ids: tuple[int, ...]) -> Array:
    """Logits of the token after each of ``token_ids``, of shape ``(tokens, vocabulary)``."""
    config, weights = model
    heads, groups, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    count = len(token_ids)

    def apply(name: str, x: Array) -> Array:
        mapped: Array = x @ weights[f"{name}.weight"].T.astype(np.float64)
        return mapped

    def norm(name: str, x: Array) -> Array:
        scale = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config["rms_norm_eps"])
        normed: Array = x / scale * weights[f"{name}.weight"]
        return normed

    angle = np.arange(count)[:, None] * config["rope_theta"] ** (-np.arange(0, width, 2) / width)
    cos, sin = (np.tile(part, 2)[:, None, :] for part in (np.cos(angle), np.sin(angle)))

    def rotate(x: Array) -> Array:
        first, second = np.split(x, 2, axis=-1)
        rotated: Array = x * cos + np.concatenate([-second, first], axis=-1) * sin
        return rotated

    hidden = weights["model.embed_tokens.weight"][list(token_ids)].astype(np.float64)
    future = np.triu(np.full((count, count), -np.inf), 1)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        x = norm(f"{at}.input_layernorm", hidden)
        query = rotate(apply(f"{at}.self_attn.q_proj", x).reshape(count, heads, width))
        key = rotate(apply(f"{at}.self_attn.k_proj", x).reshape(count, groups, width))
        value = apply(f"{at}.self_attn.v_proj", x).reshape(count, groups, width)
        key, value = (np.repeat(part, heads // groups, axis=1) for part in (key, value))
        weight = softmax(np.einsum("qhd,khd->hqk", query, key) / np.sqrt(width) + future)
        mixed = np.einsum("hqk,khd->qhd", weight, value).reshape(count, heads * width)
        hidden = hidden + apply(f"{at}.self_attn.o_proj", mixed)
        x = norm(f"{at}.post_attention_layernorm", hidden)
        gate = apply(f"{at}.mlp.gate_proj", x)
        hidden = hidden + apply(f"{at}.mlp.down_proj", gate / (1 + np.exp(-gate)) * apply(f"{at}.mlp.up_proj", x))
    return apply("lm_head", norm("model.norm", hidden))


def softmax(x: Array) -> Array:
    """Probabilities along the last axis."""
    exponential = np.exp(x - np.max(x, axis=-1, keepdims=True))
    result: Array = exponential / np.sum(exponential, axis=-1, keepdims=True)
    return result


def filtered(row: Array, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Array:
    """Probabilities of one row of logits under the sampling settings, in Hugging Face's order."""
    row = row / temperature
    if top_k:
        row = np.where(row < np.sort(row)[-top_k], -np.inf, row)
    order = np.argsort(-row, kind="stable")
    before = np.cumsum(softmax(row)[order]) - softmax(row)[order]
    row[order[before >= top_p]] = -np.inf
    chance = softmax(row)
    return softmax(np.where(chance < min_p * chance.max(), -np.inf, row))


def joint(model: Model, prompt: tuple[int, ...], depth: int, **settings: Any) -> Array:
    """Exact distribution of the next ``depth`` tokens, of shape ``(vocabulary,) * depth``."""

    @functools.cache
    def next_of(path: tuple[int, ...]) -> Array:
        return filtered(logits(model, prompt + path)[-1], **settings)

    def below(path: tuple[int, ...]) -> Array:
        chance = next_of(path)
        if len(path) == depth - 1:
            return chance
        return np.stack([chance[token] * below((*path, token)) for token in range(len(chance))])

    return below(())
