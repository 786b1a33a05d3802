"""KV of models that are not full attention alone, or whose scheduler drafts: what leaves at the end; print it, as JSON.

Real: both schedulers, both roles of the connector, their order of calls in a step, Mooncake's engine. A model that
writes numbers into blocks stands for one. `mooncake_groups.py PATIENCE MODEL...`.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import mooncake_engines as engines
import mooncake_layers as layers
import mooncake_sides as sides
import real_scheduler as real
import torch
from mooncake_engines import PATIENCE, PROMPT, SIZE
from mooncake_sides import LAYERS, Side
from ports import free_port
from result import wait
from vllm.config import ParallelConfig, SpeculativeConfig
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec, SlidingWindowSpec

WINDOW = 2 * SIZE
"""Tokens, the one that attends counted."""
OTHER = LAYERS[-1]
"""The layer that is not as the others, where there is one."""
STATE = (4, 64)
"""Shape of a Mamba layer's state."""


class Hybrid(sides.Model):
    """Full attention, and a group of one other layer."""

    def other(self, heads: int) -> Any:
        raise NotImplementedError

    def groups(self, heads: int) -> list[Any]:
        (full,) = super().groups(heads)
        return [
            KVCacheGroupSpec(LAYERS[:-1], full.kv_cache_spec),
            KVCacheGroupSpec([OTHER], self.other(heads)),
        ]

    def state(self, layer: str) -> bool:
        """Whether a layer has one state in the place of a block for each few tokens."""
        return False

    def first(self, layer: str) -> int:
        """The first token that is attended to by the prompt's last one."""
        return PROMPT - WINDOW if layer == OTHER else 0


class Windows(Hybrid):
    def other(self, heads: int) -> Any:
        return SlidingWindowSpec(**sides.shape_of(heads), sliding_window=WINDOW)


class Window(Windows):
    """A sliding window in all layers."""

    def groups(self, heads: int) -> list[Any]:
        return [KVCacheGroupSpec([*LAYERS], self.other(heads))]

    def first(self, layer: str) -> int:
        return PROMPT - WINDOW


class Mamba(Hybrid):
    def other(self, heads: int) -> Any:
        return MambaSpec(block_size=8 * SIZE, shapes=(STATE,), dtypes=(torch.float32,))

    def cache(self, layer: str, heads: int) -> Any:
        return torch.zeros(sides.BLOCKS, *STATE) if layer == OTHER else super().cache(layer, heads)

    def registered(self, caches: dict[str, Any]) -> dict[str, Any]:
        """To 0.28.0 a worker has two tensors of such a layer, the states of its convolution and of its SSM."""
        one = caches[OTHER]
        return caches if hasattr(MambaSpec, "num_heads") else {**caches, OTHER: [one[:, :1], one[:, 1:]]}

    def state(self, layer: str) -> bool:
        return layer == OTHER

    def first(self, layer: str) -> int:
        return 0


class Draft(Hybrid):
    """The last layer is a draft model's, in the group of the others."""

    def groups(self, heads: int) -> list[Any]:
        return sides.Model.groups(self, heads)

    def first(self, layer: str) -> int:
        return 0


MODELS: dict[str, type[Hybrid]] = {"windows": Windows, "window": Window, "mamba": Mamba, "draft": Draft}


class Grouped(engines.Engine):
    """An engine whose model may have several groups."""

    side: Side
    anew = 0.0  # added to what is computed, and to what is right

    def blocks_of(self, name: str, layer: str) -> list[int]:
        groups = sides.MODEL.groups(1)
        number = next(number for number, group in enumerate(groups) if layer in group.layer_names)
        return list(self.scheduler.kv_cache_manager.get_block_ids(name)[number])

    def steps(self, scheduled: Any) -> Iterator[tuple[str, int, int]]:
        """Which requests, from which token to which."""
        computed = real.computed_before(scheduled)
        for name, tokens in scheduled.num_scheduled_tokens.items():
            yield name, computed[name], computed[name] + tokens

    def write(self, scheduled: Any, layer: str) -> None:
        """What a step computes."""
        for name, begin, end in self.steps(scheduled):
            for memory, number in self.holds(name, layer, begin, end):
                memory.fill_(number)

    def holds(self, name: str, layer: str, begin: int, end: int) -> Iterator[tuple[Any, float]]:
        """What a layer has of a request, from a token on: the memory of its blocks, and what is in it when all is right."""
        model: Any = sides.MODEL
        cache, blocks = self.side.caches[layer], self.blocks_of(name, layer)
        dimension = list(cache.shape).index(sides.BLOCKS)
        content = self.scheduler.requests[name].prompt_token_ids[0] - 1
        quarter = self.anew + layers.QUARTER * LAYERS.index(layer)
        if model.state(layer):
            yield cache.select(dimension, blocks[-1]), quarter + engines.contents(content, 0, end)
            return
        for place in range(begin // SIZE, -(-end // SIZE)):
            right = quarter + engines.contents(content, place, min(end - place * SIZE, SIZE))
            yield cache.select(dimension, blocks[place]), right


class Prefill(Grouped, layers.Prefill):
    def layer(self, scheduled: Any, layer_name: str) -> None:
        self.write(scheduled, layer_name)

    def waits(self, number: int) -> None: ...


class Decode(Grouped):
    def __init__(self, model_config: Any) -> None:
        super().__init__(model_config, "kv_consumer", Side(model_config, "kv_consumer", "decode", free_port()))
        self.computes_on: dict[str, Any] = {}

    def forward(self, scheduled: Any) -> None:
        """On what a request's first step computes: how many tokens, and how much of what each layer needs is right."""
        model: Any = sides.MODEL
        for new in scheduled.scheduled_new_reqs:
            end = new.num_computed_tokens
            # The last token is computed once more: what came with it is there, but where prefill has not computed it.
            came = end + (not any(map(model.state, LAYERS)))
            found = {}
            for layer in LAYERS:
                held = [
                    memory.unique().tolist() == [number] for memory, number in self.holds_from(new.req_id, layer, came)
                ]
                found[layer] = f"{sum(held)} of {len(held)}"
            self.computes_on.setdefault(new.req_id, [end, *found.values()])
        for layer in LAYERS:
            self.write(scheduled, layer)

    def holds_from(self, name: str, layer: str, end: int) -> Iterator[tuple[Any, float]]:
        model: Any = sides.MODEL
        return self.holds(name, layer, model.first(layer), end)


def run(model_config: Any) -> Any:
    """Asked before prefill begins: the writes after each step, on what decode computes, blocks that do not come back."""
    port = free_port()
    prefill, decode = Prefill(model_config, port), Decode(model_config)
    for cache in decode.side.caches.values():
        cache.fill_(engines.OLD)
    where = {"remote_engine_id": "prefill", "remote_bootstrap_addr": f"http://127.0.0.1:{port}"}
    decode.add("d-one", content=1, do_remote_prefill=True, transfer_id="one", **where)
    decode.step()
    assert wait(lambda: "one" in prefill.worker.reqs_need_send)
    prefill.compute("one", content=1)
    writes = []
    for _ in range(3):
        prefill.step()
        wait(lambda: bool(prefill.link.begun), PATIENCE)
        writes.append(prefill.link.begun)

    def over() -> bool:
        prefill.step()
        decode.step()
        return not prefill.scheduler.requests and not decode.scheduler.requests

    assert wait(over)
    return writes, decode.computes_on["d-one"], prefill.link.writes, prefill.taken(), decode.taken()


def play(model_config: Any) -> Any:
    result = {}
    for name in sys.argv[2:]:
        options = {}
        if name == "draft":
            options["speculative_config"] = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=2,
                target_model_config=model_config,
                target_parallel_config=ParallelConfig(),
            )
        sides.MODEL = MODELS[name](options=options, prefix_caching=name != "mamba")
        result[name] = run(model_config)
    return result


def main() -> None:
    engines.drive(play)


if __name__ == "__main__":
    main()
