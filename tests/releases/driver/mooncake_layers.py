"""The same engines as in mooncake_layerwise.py, with several layers: what leaves layer by layer; print what came, as JSON.

A layer is computed, and then the connector called for it, as the release's attention does: by its own decorator. A case
may look, or do something, between two layers. `mooncake_layers.py PATIENCE CASE...`.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import mooncake_engines as engines
import mooncake_layerwise as chunk
import mooncake_sides as sides
from mooncake_engines import PATIENCE, expired
from mooncake_sides import LAYERS
from result import wait
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer

LAYERS += [f"model.layers.{number}.self_attn.attn" for number in (1, 2)]


QUARTER = 0.25
"""What a layer's contents differ by from those of the one before."""


class Prefill(engines.Prefill):
    """A prefill engine whose model has layers."""

    def __init__(self, model_config: Any, port: int, side: sides.Side | None = None) -> None:
        super().__init__(model_config, port, side)
        self.between = self.waits  # called when so many layers have been computed
        self.calls = LAYERS  # for which the connector is called
        self.twice = False  # each layer is computed in two parts, and the connector called for both

    def forward(self, scheduled: Any) -> None:
        context = get_forward_context()
        context.attn_metadata = dict.fromkeys(LAYERS, SimpleNamespace())
        context.no_compile_layers = {name: SimpleNamespace(kv_cache=cache) for name, cache in self.side.caches.items()}
        context.slot_mapping = {}
        right = self.again
        for number, name in enumerate(LAYERS):
            self.side.cache = self.side.caches[name]
            for part in ("first", "last") if self.twice else ("last",):
                self.again = right + QUARTER * number + (7.0 if part == "first" else 0.0)
                (self.attention if name in self.calls else self.layer)(scheduled, name)
                self.between(number + (part == "last"))
        self.again = right

    def waits(self, number: int) -> None:
        """Where the link is held, or refuses a write, the step goes on when one of its first layer has come to that."""
        if number == 1 and not self.link.open.is_set():
            wait(lambda: bool(self.link.begun > self.link.ended), PATIENCE)
        if number == 1 and self.link.refuse:
            wait(lambda: not self.link.refuse, PATIENCE)

    def layer(self, scheduled: Any, layer_name: str) -> None:
        super().forward(scheduled)

    @maybe_transfer_kv_layer
    def attention(self, scheduled: Any, layer_name: str) -> None:
        self.layer(scheduled, layer_name)


class Pair(engines.Pair):
    def __init__(self, model_config: Any) -> None:
        super().__init__(model_config, Prefill)
        self.prefill: Prefill
        self.patched = hasattr(self.prefill.worker, "_livepatch_writes")

    def came(self, places: list[int], *, again: float = 0.0, **what: Any) -> Any:
        """How many of decode's blocks hold what they are to hold: one number, or one of each layer."""
        found = []
        first = self.decode.cache
        for number, cache in enumerate(self.decode.caches.values()):
            self.decode.cache = cache
            found.append(super().came(places, again=again + QUARTER * number, **what))
        self.decode.cache = first
        return found[0] if len(set(found)) == 1 else found

    def step(self, places: list[int], **what: Any) -> list[Any]:
        """A step of prefill's; what has come after each of its layers, and after it."""
        after: list[Any] = []

        def look(number: int) -> None:
            assert self.settled()
            after.append(self.came(places, **what))

        self.prefill.between = look
        self.prefill.step()
        self.prefill.between = self.prefill.waits
        look(0)
        return after


def by_layer(pair: Pair) -> Any:
    """Asked before prefill begins."""
    del pair.prefill.link.writes[:]
    places = pair.ask("layers")
    pair.prefill.compute("layers")
    steps = [pair.step(places) for _ in range(4)]
    return steps, pair.end("layers", places), pair.prefill.link.writes[:], pair.left()


def amid_a_step(pair: Pair) -> Any:
    """Asked when the step has computed two of its layers."""
    places: list[int] = []
    after = []

    def asked(number: int) -> None:
        if number == 2:
            places.extend(pair.ask("amid"))
            wait(lambda: pair.came(places, content=51) == [2, 2, 0], sides.SECONDS if pair.patched else PATIENCE)
        if number >= 2:
            assert pair.settled()
            after.append(pair.came(places, content=51))

    pair.prefill.compute("amid", content=51)
    pair.prefill.between = asked
    pair.prefill.step()
    pair.prefill.between = pair.prefill.waits
    return after, pair.end("amid", places, content=51), pair.left()


def rest_at_the_end(pair: Pair) -> Any:
    """A layer of the first blocks is under way until prefill has ended: its other layers are sent then, and no more."""
    link = pair.prefill.link
    del link.writes[:]
    places = pair.ask("rest")
    pair.prefill.compute("rest", content=52)
    link.open.clear()
    for _ in range(5):
        pair.prefill.step()
    early = pair.outcome("rest", places, PATIENCE)
    link.open.set()
    return early, pair.end("rest", places, content=52), pair.prefill.link.writes[:], pair.left()


def some_layers(pair: Pair) -> Any:
    """The connector is called for the first layer only, and in one step for none: the others leave when it has ended."""
    del pair.prefill.link.writes[:]
    places = pair.ask("some")
    pair.prefill.compute("some", content=53)
    steps = []
    for calls in (LAYERS[:1], [], LAYERS, LAYERS[2:]):
        pair.prefill.calls = calls
        steps.append(pair.step(places, content=53))
    pair.prefill.calls = LAYERS
    return steps, pair.end("some", places, content=53), pair.prefill.link.writes[:], pair.left()


def twice(pair: Pair) -> Any:
    """A step computes each layer in two parts: what left after the first counts for nothing, and no more leaves by layers."""
    places = pair.ask("two-parts")
    pair.prefill.compute("two-parts", content=54)
    pair.prefill.twice = True
    pair.prefill.between = lambda number: pair.settled() or None
    pair.prefill.step()
    pair.prefill.between, pair.prefill.twice = pair.prefill.waits, False
    assert pair.settled()
    first = pair.came(places, content=54)
    second = pair.step(places, content=54)
    return first, second, pair.end("two-parts", places, content=54), pair.left()


def two_asks(pair: Pair) -> Any:
    """Two of decode's ask for one transfer, one before the first step and one amid it."""
    one = pair.ask("asks")
    other: list[int] = []
    pair.prefill.compute("asks", content=55)

    def asked(number: int) -> None:
        if number == 2:
            other.extend(pair.ask("asks-2", transfer="asks"))
            wait(lambda: pair.came(other, content=55) == [2, 2, 0], sides.SECONDS if pair.patched else PATIENCE)

    pair.prefill.between = asked
    pair.prefill.step()
    pair.prefill.between = pair.prefill.waits
    assert pair.settled()
    after = [pair.came(one, content=55), pair.came(other, content=55)]
    return (
        after,
        pair.end("asks", one, content=55),
        pair.outcome("asks-2", other),
        pair.came(other, content=55),
        pair.left(),
    )


def failed_later(pair: Pair) -> Any:
    """The write of a step's second layer fails, and a rest of it comes later: no more is written, and nothing is said."""
    link = pair.prefill.link
    places = pair.ask("later")
    pair.prefill.compute("later", content=56)
    del link.writes[:]

    def refuses(number: int) -> None:
        if number == 1:
            assert pair.settled()
            link.refuse = 1
        elif number == 2:
            wait(lambda: not link.refuse, sides.SECONDS if pair.patched else PATIENCE)

    pair.prefill.between = refuses
    pair.prefill.step()
    pair.prefill.between = lambda number: None
    for _ in range(5):
        pair.prefill.step()
    pair.prefill.between = pair.prefill.waits
    outcome = pair.outcome("later", places, PATIENCE)
    link.refuse = 0
    pair.prefill.fill(8)
    held = pair.prefill.taken()
    link.later()
    came = pair.came(places, content=56)
    return outcome, link.writes[:], held, came, expired(pair, "later"), pair.left()


def anew(pair: Pair) -> Any:
    """The scheduler goes back, as after a load that failed: what has left by layers counts for nothing."""
    prefill, link = pair.prefill, pair.prefill.link
    places = pair.ask("anew")
    request = prefill.compute("anew", content=57)
    prefill.step()
    prefill.step()
    assert pair.settled()
    request.num_computed_tokens = 0
    prefill.again = 50.0
    del link.writes[:]
    outcome = pair.end("anew", places, content=57, again=50.0)
    prefill.again = 0.0
    return outcome, link.writes[:], pair.left()


CASES = (
    by_layer,
    amid_a_step,
    rest_at_the_end,
    some_layers,
    chunk.late,
    chunk.hits,
    chunk.same_step,
    chunk.aborted,
    chunk.begun_again,
    chunk.preempted,
    chunk.drained,
    chunk.many,
    chunk.more,
    chunk.failed,
    chunk.failed_and_aborted,
    chunk.failed_and_let_go,
    chunk.failed_and_again,
    chunk.decode_aborted,
    two_asks,
    failed_later,
    anew,
    chunk.stuck,
    chunk.stuck_again,
    chunk.asked_first,
    chunk.again_and_again,
    chunk.asleep,
    chunk.both_given_up,
    chunk.timed_out,
    chunk.forgotten,
    twice,
)


def main() -> None:
    def play(model_config: Any) -> Any:
        pair = Pair(model_config)
        engines.any_size_by_layer()
        return engines.played(CASES, pair, sys.argv[2:])

    engines.drive(play, others=sides.MODEL.config)


if __name__ == "__main__":
    main()
