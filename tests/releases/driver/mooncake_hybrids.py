"""KV of models with another group beside full attention: only the latter leaves early; print what came, as JSON.

Both sides have the release's real scheduler, whose block pool gives out the blocks of all groups; the rest is as in
mooncake_groups.py. `mooncake_hybrids.py PATIENCE MODEL CASE...`.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any

import mooncake_engines as engines
import mooncake_groups as groups
import mooncake_sides as sides
import torch
from mooncake_engines import OLD, PATIENCE, PROMPT, SIZE, expired
from mooncake_sides import LAYERS
from ports import free_port
from result import wait
from vllm.v1.kv_cache_interface import KVCacheGroupSpec


class Shared(groups.Windows):
    """The layer with a window shares its memory with the first one, as vLLM makes the caches."""

    def cache(self, layer: str, heads: int) -> Any:
        if layer == LAYERS[0]:
            self.memory = self.made(heads)
        return self.memory if layer in (LAYERS[0], groups.OTHER) else self.made(heads)

    def made(self, heads: int) -> Any:
        return super().cache(LAYERS[0], heads)


class Rows(Shared):
    """The same, and heads lie within tokens: from 0.32.0 on the release has one region of both groups."""

    def made(self, heads: int) -> Any:
        blocks, heads, tokens, size = super().made(heads).shape
        return torch.zeros(blocks, tokens, heads, size).permute(0, 2, 1, 3)


class Between(groups.Windows):
    """The group of full attention stands between two with windows, one of which is twice as long."""

    def groups(self, heads: int) -> list[Any]:
        full, window = super().groups(heads)
        twice = replace(window.kv_cache_spec, sliding_window=2 * groups.WINDOW)
        return [
            window,
            KVCacheGroupSpec([LAYERS[0]], full.kv_cache_spec),
            KVCacheGroupSpec([LAYERS[1]], twice),
        ]

    def first(self, layer: str) -> int:
        return PROMPT - 2 * groups.WINDOW if layer == LAYERS[1] else super().first(layer)


class Behind(groups.Mamba):
    """The group with states comes first."""

    def groups(self, heads: int) -> list[Any]:
        return super().groups(heads)[::-1]


MODELS = {
    "windows": groups.Windows,
    "shared": Shared,
    "rows": Rows,
    "between": Between,
    "mamba": groups.Mamba,
    "behind": Behind,
}
STATES = ("mamba", "behind")


class Pair(engines.Pair):
    """Both with real schedulers."""

    prefill: groups.Prefill
    decoding: groups.Decode

    def __init__(self, model_config: Any) -> None:
        self.port = free_port()
        self.prefill = groups.Prefill(model_config, self.port)
        self.decoding = groups.Decode(model_config)
        self.decode = self.decoding.side

    def asks(self, name: str, content: int, prompt: int = PROMPT, clean: bool = True) -> None:
        """Decode asks for a prompt, whose blocks hold nothing yet."""
        if clean:
            for cache in self.decode.caches.values():
                cache.fill_(OLD)
        where = {"remote_engine_id": "prefill", "remote_bootstrap_addr": f"http://127.0.0.1:{self.port}"}
        self.decoding.add(f"d-{name}", prompt, content, do_remote_prefill=True, transfer_id=name, **where)
        self.decoding.step()
        assert wait(lambda: name in self.prefill.worker.reqs_need_send)

    def arrived(self, name: str) -> Any:
        """How many blocks of each layer hold what they are to hold; or what is wrong of those that hold something."""
        model: Any = sides.MODEL
        end = PROMPT - any(map(model.state, LAYERS))
        found = []
        for layer in LAYERS:
            held = [
                (memory.unique().tolist(), number)
                for memory, number in self.decoding.holds_from(f"d-{name}", layer, end)
            ]
            wrong = [one for one, number in held if one not in ([number], [OLD])]
            found.append(f"wrong: {wrong}" if wrong else sum(one == [number] for one, number in held))
        return found

    def right(self, name: str) -> bool:
        """Whether what has come is what prefill computed, and of the first layer of full attention two blocks have."""
        came = self.arrived(name)
        return came[0] == 2 and not any(isinstance(one, str) for one in came)

    def over(self, name: str) -> Any:
        """Both go on to the end: on what decode computes, and the blocks that either does not give back."""

        def ended() -> bool:
            self.prefill.step()
            self.decoding.step()
            return not self.prefill.scheduler.requests and not self.decoding.scheduler.requests

        ends = wait(ended)
        return self.decoding.computes_on.get(f"d-{name}"), ends, self.prefill.taken(), self.decoding.taken()

    def amid(self, name: str, content: int) -> bool:
        """Asked for, and a step is computed, whose early write is held."""
        self.asks(name, content)
        self.prefill.compute(name, content=content)
        begun = self.prefill.link.begun
        self.prefill.link.open.clear()
        self.prefill.step()
        return wait(lambda: self.prefill.link.begun > begun, PATIENCE)


def chunks(pair: Pair) -> Any:
    """Asked before prefill begins: what has come after each step, at the end, and by all writes."""
    before = pair.prefill.link.blocks()
    pair.asks("chunks", 1)
    pair.prefill.compute("chunks", content=1)
    after = []
    for _ in range(4):
        pair.prefill.step()
        assert pair.settled()
        after.append(pair.arrived("chunks"))
    return after, pair.over("chunks"), round(pair.prefill.link.blocks() - before, 1)


def by_layer(pair: Pair) -> Any:
    """The same: what has come after each layer of the first two steps, and after these."""
    pair.asks("layers", 2)
    pair.prefill.compute("layers", content=2)
    after: list[Any] = []

    def look(number: int) -> None:
        assert pair.settled()
        after.append(pair.arrived("layers"))

    for _ in range(2):
        pair.prefill.between = look
        pair.prefill.step()
        pair.prefill.between = pair.prefill.waits
        look(0)
    return after, pair.over("layers")


def hits(pair: Pair) -> Any:
    """Both have the first blocks of a prompt, where their schedulers keep blocks that were computed before."""
    pair.asks("first", 3, 4 * SIZE + 8)
    pair.prefill.compute("first", 4 * SIZE + 8, content=3)
    pair.over("first")
    begun = pair.prefill.link.begun
    pair.asks("hits", 3, clean=False)
    pair.prefill.compute("hits", content=3)
    pair.prefill.step()
    assert pair.settled()
    return pair.prefill.link.begun > begun, pair.over("hits")


def same_step(pair: Pair) -> Any:
    """Two prompts are computed in the same steps."""
    for number in (4, 5):
        pair.asks(f"same-{number}", number, clean=number == 4)
        pair.prefill.compute(f"same-{number}", content=number)
    for _ in range(2):
        pair.prefill.step()
        assert pair.settled()
    before = [pair.arrived(f"same-{number}") for number in (4, 5)]
    return before, pair.over("same-4"), pair.decoding.computes_on["d-same-5"]


def end_of_a_block(pair: Pair) -> Any:
    """All blocks of full attention may have left when the prompt ends: its tokens fill them."""
    pair.asks("whole", 6, 4 * SIZE + WITHOUT[sides.MODEL.prefix_caching])
    pair.prefill.compute("whole", 4 * SIZE + WITHOUT[sides.MODEL.prefix_caching], content=6)
    pair.prefill.step()
    pair.prefill.step()
    assert pair.settled()
    early = pair.prefill.link.begun
    return early > 0, pair.over("whole")[1:], pair.decoding.computes_on["d-whole"][:3]


WITHOUT = {True: 0, False: 1}
"""Tokens that a model with states computes on the decode side only."""


def aborted(pair: Pair) -> Any:
    """The prefill is aborted while an early write is under way, and other prompts take the blocks that are free."""
    prefill, link = pair.prefill, pair.prefill.link
    under_way = pair.amid("aborted", 7)
    prefill.abort("p-aborted")
    prefill.fill(8)
    held = prefill.taken() > 0
    link.open.set()
    assert pair.settled()
    came = pair.right("aborted")
    pair.decoding.abort("d-aborted")
    return under_way, held, came, pair.left()


def preempted(pair: Pair) -> Any:
    """The prefill is preempted while an early write is under way, and computed anew, to other contents."""
    prefill, link = pair.prefill, pair.prefill.link
    under_way = pair.amid("preempted", 8)
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    prefill.anew = pair.decoding.anew = 50.0
    stepping = threading.Thread(target=prefill.step)
    stepping.start()
    stepping.join(PATIENCE if under_way else sides.SECONDS)
    held = stepping.is_alive()
    link.open.set()
    stepping.join()
    end = pair.over("preempted")
    prefill.anew = pair.decoding.anew = 0.0
    return under_way, held, end


def preempted_later(pair: Pair) -> Any:
    """The same after two steps, with nothing under way: what has left is sent once more."""
    pair.asks("later", 9)
    pair.prefill.compute("later", content=9)
    for _ in range(2):
        pair.prefill.step()
        assert pair.settled()
    assert pair.prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    pair.prefill.anew = pair.decoding.anew = 50.0
    end = pair.over("later")
    pair.prefill.anew = pair.decoding.anew = 0.0
    return end


def drained(pair: Pair) -> Any:
    """An early write is under way when the prefill ends."""
    under_way = pair.amid("drained", 10)
    for _ in range(5):
        pair.prefill.step()
    pair.decoding.step()
    early = "d-drained" in pair.decoding.computes_on
    pair.prefill.link.open.set()
    return under_way, early, pair.over("drained")


def failed(pair: Pair) -> Any:
    """An early write fails, and a rest of it comes when other prompts were computed in what is free."""
    prefill, link = pair.prefill, pair.prefill.link
    pair.asks("failed", 11)
    prefill.compute("failed", content=11)
    link.refuse = 1
    prefill.step()
    wait(lambda: not link.refuse, PATIENCE)
    for _ in range(5):
        prefill.step()
    prefill.fill(8)
    link.refuse = 0
    link.later()
    pair.decoding.step()
    told = "d-failed" in pair.decoding.computes_on
    came = pair.right("failed")
    given_up = expired(pair, "failed")
    pair.decoding.abort("d-failed")
    return told, came, given_up, pair.left()


def decode_aborted(pair: Pair) -> Any:
    """Decode's request is aborted while an early write for it is under way, and decode computes others."""
    decoding, link = pair.decoding, pair.prefill.link
    under_way = pair.amid("gone", 12)
    decoding.abort("d-gone")
    taken = decoding.taken()
    model: Any = sides.MODEL
    for number in range(3):
        decoding.add(f"other-{number}", content=30 + number, tokens=20)
    for _ in range(10):
        decoding.step()
    link.open.set()
    assert pair.settled()
    right = [
        memory.unique().tolist() == [value]
        for request in decoding.scheduler.running
        for layer in LAYERS
        if not model.state(layer)
        for memory, value in decoding.holds(request.request_id, layer, model.first(layer), 7 * SIZE)
    ]
    return under_way, taken > 0, bool(right) and all(right), pair.over("gone")[1:]


def regions(pair: Pair) -> Any:
    """Which group's each region is that the release writes to; -1: several groups'."""
    return pair.prefill.worker.registered_group_indices


CASES = (
    regions,
    chunks,
    by_layer,
    hits,
    same_step,
    end_of_a_block,
    aborted,
    preempted,
    preempted_later,
    drained,
    decode_aborted,
    failed,
)


def play(model_config: Any) -> Any:
    pair = Pair(model_config)
    engines.any_size_by_layer()
    return engines.played(CASES, pair, sys.argv[3:])


def main() -> None:
    model = sys.argv[2]
    sides.MODEL = MODELS[model](prefix_caching=model not in STATES)
    engines.drive(play)


if __name__ == "__main__":
    main()
