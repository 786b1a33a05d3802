"""A tiny random Llama and its tokenizer, made without a network.

The weights are drawn from a fixed seed and are large enough that attention is sharp: what a prompt's KV cache
holds decides which tokens come next, so a wrong, stale or misplaced KV block changes the output. (The engine's own
``--load-format dummy`` draws weights of about 1e-3, under which the output hardly depends on the context at all.)
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

NAME = "tiny-random-llama"
VOCABULARY = 512
HIDDEN = 128
HEADS = 2
LAYERS = 2
INTERMEDIATE = 256
CONTEXT = 2048
SPECIAL = ["<unk>", "<s>", "</s>"]

_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": CONTEXT,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Outputs are compared between batches of different make-up: half precision would round differently in each.
    "torch_dtype": "float32",
}


def _weights(seed: int, config: Mapping[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of the checkpoint; matrices are ``(out, in)``, float32."""
    draw = np.random.default_rng(seed)
    hidden, width = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]

    def matrix(out: int, inner: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = draw.standard_normal((out, inner), dtype=np.float32)
        values *= gain / math.sqrt(inner)
        return values

    ones = np.ones(hidden, dtype=np.float32)
    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, hidden, gain=math.sqrt(hidden))}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        # A gain of 2 on queries and keys makes the attention scores' deviation about 4: few positions dominate.
        tensors[prefix + "self_attn.q_proj.weight"] = matrix(heads, hidden, gain=2.0)
        tensors[prefix + "self_attn.k_proj.weight"] = matrix(heads, hidden, gain=2.0)
        tensors[prefix + "self_attn.v_proj.weight"] = matrix(heads, hidden, gain=2.0)
        tensors[prefix + "self_attn.o_proj.weight"] = matrix(hidden, heads, gain=2.0)
        tensors[prefix + "mlp.gate_proj.weight"] = matrix(width, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = matrix(width, hidden)
        tensors[prefix + "mlp.down_proj.weight"] = matrix(hidden, width)
        tensors[prefix + "input_layernorm.weight"] = ones.copy()
        tensors[prefix + "post_attention_layernorm.weight"] = ones.copy()
    tensors["model.norm.weight"] = ones.copy()
    tensors["lm_head.weight"] = matrix(VOCABULARY, hidden)
    return tensors


def _tokenizer() -> dict[str, Any]:
    """One word, one token: ``w0`` ... separated by blanks, so a prompt's length in tokens is plain to see."""
    words = [*SPECIAL, *(f"w{number}" for number in range(VOCABULARY - len(SPECIAL)))]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, word in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            "unk_token": SPECIAL[0],
        },
    }


def make(directory: Path, seed: int = 0, shape: Mapping[str, Any] | None = None) -> Path:
    """Write config, weights and tokenizer into ``directory`` and return it. The same seed, the same bytes.

    ``shape``: what the config has otherwise, as many heads for keys and values as for queries.
    """
    config = {**_CONFIG, **(shape or {})}
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Any]] = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": SPECIAL[0],
            "bos_token": SPECIAL[1],
            "eos_token": SPECIAL[2],
            "model_max_length": CONTEXT,
            "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    save_file(_weights(seed, config), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def token(word: str) -> int:
    """The token of a word of a prompt or an answer."""
    return len(SPECIAL) + int(word.removeprefix("w"))


def prompts(count: int, tokens: int, seed: int | str) -> list[str]:
    """``count`` prompts of exactly ``tokens`` tokens each, no two of which share a prefix block."""
    draw = random.Random(seed)
    last = VOCABULARY - len(SPECIAL) - 1
    return [" ".join(f"w{draw.randint(0, last)}" for _ in range(tokens)) for _ in range(count)]
