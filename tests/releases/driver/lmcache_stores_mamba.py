# mypy: disable-error-code="import-not-found"
"""What LMCache's connector and server store of a hybrid model, whose group of states has mostly null blocks; one JSON object.

As `lmcache_stores`, beside full attention with a group of Mamba in vLLM's `align` mode: a step leaves the state at its end
in that group's last block. A state is a digest of all tokens up to it.

The arguments are the cases.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import lmcache_stores as stores
import real_scheduler as real
import torch
from lmcache_identity import BLOCK, left_by, vllm
from lmcache_stores import APART, BASE, Engine, asked, prompt
from result import leave, print_result
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.structured_output import StructuredOutputManager

HEADS, WIDTH = 2, 32
"""Of attention's cache; a state's page is as large."""


class Hybrid(Engine):
    def __init__(self, server: Any, *, budget: int = 256) -> None:
        super().__init__(server, [BLOCK], budget=budget)
        # LMCache has moved the page into memory that it shares.
        self.states = self.worker.worker_adapter.kv_caches["layer1"].reshape(real.NUM_BLOCKS, -1)

    def make_scheduler(self, config: Any, windows: Any) -> Any:
        cache = config.cache_config
        cache.mamba_cache_mode, cache.mamba_block_size = "align", BLOCK
        for name in ("prefix_match_unit", "hash_block_size"):
            if hasattr(cache, name):
                setattr(cache, name, BLOCK)
        config.scheduler_config.disable_hybrid_kv_cache_manager = False
        full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float32)
        state = MambaSpec(
            block_size=BLOCK,
            mamba_cache_mode="align",
            shapes=((4, 64),),
            dtypes=(torch.float32,),
            page_size_padded=full.page_size_bytes,
        )
        real.init_none_hash(real.sha256)
        groups = [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate((full, state))]
        given = inspect.signature(real.Scheduler.__init__).parameters
        return real.Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=real.NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
            **({"hash_block_size": BLOCK} if "hash_block_size" in given else {}),
        )

    def make_caches(self) -> list[Any]:
        page = torch.zeros(real.NUM_BLOCKS, 2 * BLOCK * HEADS * WIDTH)
        return [torch.zeros(real.NUM_BLOCKS, 2, BLOCK, HEADS, WIDTH), [page]]

    def compute(self, request: Any, start: int, end: int) -> bool:
        values = left_by(SimpleNamespace(**stores.as_read(request, end)), BASE, end)
        full, state = self.tables[request.request_id]
        cache = self.caches[0]
        for place in range(start, end):
            cache[full[place // BLOCK], :, place % BLOCK] = values[place]
        right = all(
            bool((cache[full[place // BLOCK], :, place % BLOCK] == values[place]).all()) for place in range(end)
        )
        if start:
            right = right and bool((self.states[state[(start - 1) // BLOCK]] == values[start - 1]).all())
        self.states[state[(end - 1) // BLOCK]] = values[end - 1]
        return right


def hybrid(server: Any, budget: int, *asks: int) -> list[Any]:
    """A prompt of 160 tokens, computed in steps of `budget`; then others ask for the first of them."""
    one, *others = (Hybrid(server, budget=budget) for _ in range(1 + len(asks)))
    ids = prompt(1, 160)
    came = [one.run(asked([*ids, 210]))]
    server.ask("settle")
    return came + [other.run(asked([*ids[:tokens], *[212] * 20])) for other, tokens in zip(others, asks, strict=True)]


stores.CASES |= {
    "together": (lambda server: hybrid(server, 256, 64, 160), ()),
    "apart": (lambda server: hybrid(server, 256, 64, 160), (APART,)),
    "in_part": (lambda server: hybrid(server, 80, 96, 160), (APART,)),
}
"""`in_part`: a step ends amid a chunk, whose other block has no state."""


def main() -> None:
    found = stores.played(*sys.argv[1:])
    print_result({"cases": found}, importlib.import_module("lmcache"), vllm)
    leave()


if __name__ == "__main__":
    main()
