"""The same as in mooncake_layers.py, of a model with MLA: one latent vector a token in the place of K and V of each head.

Set: the attention's backend is Triton's, of which a connector asks for its name, shape and block sizes alone. The CPU's
platform has none to 0.27.1, and one for blocks of 16 tokens in 0.28.0. `mooncake_mla.py PATIENCE CASE...`.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import mooncake_layers as layers
import mooncake_sides as sides
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MLAAttentionSpec

RANK, ROPE = 48, 16
"""What a token's vector is made of."""


class Model(sides.Model):
    def groups(self, heads: int) -> list[Any]:
        shape = {**sides.shape_of(1), "head_size": RANK + ROPE}
        return [KVCacheGroupSpec([*sides.LAYERS], MLAAttentionSpec(**shape))]

    def cache(self, layer: str, heads: int) -> Any:
        return torch.zeros(sides.BLOCKS, 32, RANK + ROPE)


def backend(*asked: Any, **named: Any) -> str:
    return "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"


def main() -> None:
    CpuPlatform.get_attn_backend_cls = staticmethod(backend)
    config = {
        "model_type": "deepseek_v2",
        "kv_lora_rank": RANK,
        "q_lora_rank": None,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    }
    sides.MODEL = Model(config)
    layers.main()


if __name__ == "__main__":
    main()
