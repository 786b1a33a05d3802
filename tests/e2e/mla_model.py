"""A tiny random model with MLA (DeepSeek-V2's, without experts), made without a network.

The heads have the sizes that vLLM's MLA on CPU is written for: 512 numbers of latent vector and 64 of rotated key.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from vllm_livepatch.tools.lab import model

LAYERS = 4
LATENT, ROTATED = 512, 64
HIDDEN, WIDTH, HEADS, PLAIN, VALUE = 128, 256, 2, 32, 32

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": model.VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROTATED,
    "qk_nope_head_dim": PLAIN,
    "v_head_dim": VALUE,
    "q_lora_rank": None,
    # The config wants experts; none of its layers has any.
    "first_k_dense_replace": LAYERS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
    "moe_layer_freq": 1,
    "max_position_embeddings": model.CONTEXT,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def make(directory: Path, seed: int) -> Path:
    """Write config, weights and the lab's tokenizer into ``directory`` and return it."""
    model.make(directory, seed)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1), encoding="utf-8")
    draw = np.random.default_rng(seed)

    def matrix(out: int, inner: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = draw.standard_normal((out, inner), dtype=np.float32)
        values *= gain / math.sqrt(inner)
        return values

    ones = np.ones(HIDDEN, dtype=np.float32)
    tensors = {"model.embed_tokens.weight": matrix(model.VOCABULARY, HIDDEN, gain=math.sqrt(HIDDEN))}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        # As in the lab's model: the context decides which tokens come next.
        tensors[prefix + "self_attn.q_proj.weight"] = matrix(HEADS * (PLAIN + ROTATED), HIDDEN, gain=2.0)
        tensors[prefix + "self_attn.kv_a_proj_with_mqa.weight"] = matrix(LATENT + ROTATED, HIDDEN, gain=2.0)
        tensors[prefix + "self_attn.kv_a_layernorm.weight"] = np.ones(LATENT, dtype=np.float32)
        tensors[prefix + "self_attn.kv_b_proj.weight"] = matrix(HEADS * (PLAIN + VALUE), LATENT, gain=2.0)
        tensors[prefix + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * VALUE, gain=2.0)
        tensors[prefix + "mlp.gate_proj.weight"] = matrix(WIDTH, HIDDEN)
        tensors[prefix + "mlp.up_proj.weight"] = matrix(WIDTH, HIDDEN)
        tensors[prefix + "mlp.down_proj.weight"] = matrix(HIDDEN, WIDTH)
        tensors[prefix + "input_layernorm.weight"] = ones.copy()
        tensors[prefix + "post_attention_layernorm.weight"] = ones.copy()
    tensors["model.norm.weight"] = ones.copy()
    tensors["lm_head.weight"] = matrix(model.VOCABULARY, HIDDEN)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
