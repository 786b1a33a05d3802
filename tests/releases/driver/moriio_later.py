# mypy: disable-error-code="import-not-found"
"""Drive MoRI-IO engines of one release, from 0.24.0 on, through peers and transfers that never end; print what happened.

Run with the release's sources and the stand-in for mori on the path. The first argument is how many seconds a wait may
take that a fault should have ended; names behind it are of the cases to run. A case that does not go as a user would want
says so in its outcome; what to expect of which release is none of this script's business.
"""

from __future__ import annotations

from result import begin_driver, leave, print_result

begin_driver()

import functools
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import vllm
from mori import orders
from moriio_engines import Engine, Pair, set_up
from moriio_worker import HOST, LAYERS, Running, until

gc.freeze()
gc.enable()

patience = 0.0
"""How many seconds a wait may take that a fault should have ended: `played` is told."""
HEALTHY = 10.0
"""Longest time for what no fault is in the way of; it takes a few milliseconds."""
TRANSFER, DEFER = 0.2, 0.4


class Waits(logging.Handler):
    """Counts the waits for a handshake that the release gave up: it logs each."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.number += "_ready_flag" in str(record.msg)


class World(Running):
    """The engine that is looked at, and its peers."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        orders.let(orders.AT_ONCE)
        self.read = read
        self.engine = self._engine(producer=not read, value=1.0 - read)
        self.engines = [self.engine]

    def _engine(self, **options: Any) -> Engine:
        return Engine(read=self.read, transfer=TRANSFER, defer=DEFER, **options)

    def peer(self, answers: str = "yes") -> Engine:
        self.engines.append(self._engine(producer=self.read, value=float(self.read), answers=answers))
        return self.engines[-1]

    def heard(self, pair: Pair) -> None:
        """Wait until the prefill engine has heard of the decode engine's blocks."""
        known = pair.prefill.real.moriio_wrapper.done_remote_allocate_req_dict
        if not until(lambda: pair.transfer_id in known, HEALTHY):
            raise TimeoutError("the prefill engine never heard of the blocks")

    def writes(self, *pairs: Pair, seconds: float = HEALTHY, before_save: Callable[[], None] = lambda: None) -> bool:
        """One step of the prefill engine that computes these prompts, and their ends; whether the step ended."""
        for pair in pairs:
            self.engine.allocate(pair.at_prefill, 0)
        requests = [pair.at_prefill for pair in pairs]
        if not self.runs(lambda: self.engine.step(*requests, before_save=before_save), seconds):
            return False
        for pair in pairs:
            self.engine.finish(pair.at_prefill)
        return True

    def freed(self, pair: Pair, seconds: float | None = None) -> bool:
        """Whether the prompt's blocks in the prefill engine come back."""
        name = pair.at_prefill.request_id

        def reported() -> bool:
            pair.prefill.report()
            return pair.prefill.freed[name] > 0

        return until(reported, patience if seconds is None else seconds)

    def notified(self, pair: Pair, seconds: float) -> bool:
        """Whether the decode engine is told that it has the prompt's KV."""
        name = pair.at_decode.request_id

        def reported() -> bool:
            pair.decode.report()
            return pair.decode.received[name] > 0

        return until(reported, seconds)

    def expect_written(self, pair: Pair, otherwise: str, seconds: float = HEALTHY) -> None:
        if self.expect(self.notified(pair, seconds) and pair.arrived(), otherwise):
            self.expect(self.freed(pair, seconds), "never freed")

    def expect_given_up(self, pair: Pair) -> None:
        """Expect the prompt's blocks back, without the decode engine being told that it has the KV."""
        self.expect(self.freed(pair), "never freed")
        self.expect(not self.notified(pair, 0.05), "peer told of KV that it has not")

    def next_is_written(
        self, peer: Engine | None = None, seconds: float | None = None, after_handshake: bool = False
    ) -> None:
        """Expect a healthy prompt to be written as ever; `met`: the step takes as long as the handshake with its peer."""
        orders.let(orders.AT_ONCE)
        pair = Pair(self.engine, peer or self.peer(), [6, 7], [1, 2])
        pair.allocate()
        name = f"{HOST}:{pair.decode.handshake_port}_dp0"

        def handshake() -> None:
            self.expect(
                not after_handshake or until(lambda: name in self.engine.real._remote_agents, HEALTHY), "no handshake"
            )

        if self.writes(pair, before_save=handshake):
            self.expect_written(pair, "next not served", patience if seconds is None else seconds)

    def reads(self, pair: Pair, seconds: float) -> bool:
        """A prompt that its prefill engine computed, and a step of the decode engine that needs it; whether that ended."""
        prefill = pair.prefill
        prefill.allocate(pair.at_prefill, 0)
        prefill.step(pair.at_prefill)
        pair.at_decode.kv_transfer_params = prefill.finish(pair.at_prefill)
        self.engine.allocate(pair.at_decode, pair.at_decode.num_prompt_tokens - 1)
        return self.runs(lambda: self.engine.step(pair.at_decode), seconds)

    def finish(self) -> None:
        """Look for blocks that were freed more than once, and for what nobody will ask for again."""
        threading.Event().wait(0.05)  # several rounds of the writer thread
        for engine in self.engines:
            engine.report()
            self.expect(all(number == 1 for number in engine.freed.values()), "freed twice")
        prefills = self.engines[1:] if self.read else self.engines[:1]
        if not self.wrong:
            kept = {name for engine in prefills for name in engine.keeps()}
            self.expect(not kept, f"keeps {', '.join(sorted(kept))}")


def healthy(world: World) -> None:
    """A prompt for a new peer, then one for the same peer whose blocks are there before the step."""
    peer = world.peer()
    first = Pair(world.engine, peer, [1, 2, 3], [5, 6, 4])
    world.writes(first)
    first.allocate()
    world.expect_written(first, "not sent")
    second = Pair(world.engine, peer, [4, 5], [7, 3])
    second.allocate()
    world.heard(second)
    world.writes(second)
    world.expect_written(second, "not sent")


def nothing_to_save(world: World) -> None:
    """A step that saves nothing, as in the middle of a chunked prefill."""
    world.runs(lambda: world.engine.step(), patience)
    world.next_is_written(seconds=HEALTHY)


def silent_peer(world: World) -> None:
    """The peer never answers the handshake; another one does."""
    waits = Waits()
    logging.getLogger(vllm.__name__).addHandler(waits)
    pair = Pair(world.engine, world.peer("no"), [1], [2])
    world.writes(pair)
    logging.getLogger(vllm.__name__).removeHandler(waits)
    world.expect(waits.number == 1, f"waits {waits.number} times for {len(LAYERS)} layers")
    ended = time.monotonic()
    world.next_is_written()
    # The scheduler gives a request up by itself, if at all, after DEFER.
    world.expect(world.freed(pair, max(0.05, ended + patience - time.monotonic())), "never freed")


def refused_handshake(world: World) -> None:
    """The peer answers the handshake with something else."""
    peer = world.peer("garbage")
    pair = Pair(world.engine, peer, [1], [2])
    peer.allocate(pair.at_decode, pair.at_decode.num_prompt_tokens)
    world.heard(pair)
    world.writes(pair)
    world.expect(world.freed(pair), "never freed")
    # The handshakes that failed are queued as ended: another one is not waited for as long as any of them is left.
    world.next_is_written(after_handshake=True)


def _fails(world: World, ends: Callable[[int], str]) -> Pair:
    """A prompt whose blocks at the peer are known after the step: the writer's thread waits for its transfers."""
    orders.let(ends)
    pair = Pair(world.engine, world.peer(), [1], [2])
    world.writes(pair)
    pair.allocate()
    world.expect(until(lambda: orders.begun() == len(LAYERS), HEALTHY), "not begun")
    return pair


def transfer_never_ends(world: World) -> None:
    """One of two transfers stays in progress: it may read its blocks at any time."""
    pair = _fails(world, lambda number: orders.NEVER if number == 0 else orders.AT_ONCE)
    world.next_is_written(pair.decode)
    world.expect(not world.freed(pair), "freed while it is read")
    world.expect(not world.notified(pair, 0.05), "peer told of KV that it has not")


def transfer_fails(world: World) -> None:
    """One of two transfers fails."""
    pair = _fails(world, lambda number: orders.FAILED if number == 0 else orders.AT_ONCE)
    world.expect_given_up(pair)
    world.next_is_written(pair.decode)


def transfer_never_ends_in_step(world: World) -> None:
    """One of two transfers stays in progress, and both were begun when the step ends: the step waits for them."""
    _fails_in_step(world, orders.NEVER)


def transfer_fails_in_step(world: World) -> None:
    """One of two transfers fails, and both were begun when the step ends."""
    _fails_in_step(world, orders.FAILED)


def _fails_in_step(world: World, ends: str) -> None:
    peer = world.peer()
    world.next_is_written(peer, HEALTHY)  # what meets a peer may write its first layer only when the step ends
    orders.let(lambda number: ends if number == 0 else orders.AT_ONCE)
    pair = Pair(world.engine, peer, [1], [2])
    pair.allocate()
    world.heard(pair)

    def both_written() -> None:
        counted = world.engine.real.moriio_wrapper.done_remote_allocate_req_dict[pair.transfer_id]
        world.expect(until(lambda: counted.writes_done == len(LAYERS), HEALTHY), "not begun")

    if world.writes(pair, before_save=both_written):
        world.expect_given_up(pair)
        world.next_is_written(peer)


def never_allocated(world: World) -> None:
    """The peer never has blocks for the prompt."""
    peer = world.peer()
    pair = Pair(world.engine, peer, [1], [2])
    world.writes(pair)
    world.expect_given_up(pair)
    world.next_is_written(peer, HEALTHY)


def read(world: World) -> None:
    """A decode engine has a step with nothing to read; then it reads from a new peer, and once more."""
    world.runs(lambda: world.engine.step(), HEALTHY)
    peer = world.peer()
    for blocks, remote in (([1, 2], [5, 6]), ([3, 4], [2, 7])):
        pair = Pair(peer, world.engine, blocks, remote)
        world.reads(pair, HEALTHY)
        world.expect(pair.arrived(), "not read")
        world.engine.report()
        world.expect(world.freed(pair, HEALTHY), "never freed")


def read_refused(world: World) -> None:
    """A decode engine reads from a peer that answers the handshake with something else."""
    if world.reads(Pair(world.peer("garbage"), world.engine, [1], [2]), HEALTHY):
        world.expect(False, "runs without KV")


def read_from_silent_peer(world: World) -> None:
    """A decode engine reads from a peer that never answers the handshake, then from one that does."""
    if not world.reads(Pair(world.peer("no"), world.engine, [1], [2]), patience):
        return
    pair = Pair(world.peer(), world.engine, [3, 4], [5, 6])
    world.reads(pair, patience)
    world.expect(pair.arrived(), "next not served")


CASES: dict[str, tuple[Callable[[World], None], bool]] = {
    "healthy": (healthy, False),
    "nothing_to_save": (nothing_to_save, False),
    "silent_peer": (silent_peer, False),
    "refused_handshake": (refused_handshake, False),
    "transfer_never_ends": (transfer_never_ends, False),
    "transfer_fails": (transfer_fails, False),
    "transfer_never_ends_in_step": (transfer_never_ends_in_step, False),
    "transfer_fails_in_step": (transfer_fails_in_step, False),
    "never_allocated": (never_allocated, False),
    "read": (read, True),
    "read_refused": (read_refused, True),
    "read_from_silent_peer": (read_from_silent_peer, True),
}
"""Each with whether the engine that is looked at reads."""


def drive(case: Callable[[World], None], reads: bool) -> str:
    world = World(reads)
    case(world)
    world.finish()
    for engine in world.engines:
        engine.close()
    return "; ".join(world.wrong) or "survives"


def played(seconds: float, names: Collection[str] = ()) -> dict[str, Callable[[], str]]:
    """The cases by their names, or these of them: each says what it came to."""
    global patience
    patience = seconds
    logging.getLogger("vllm").propagate = False
    set_up()
    return {name: functools.partial(drive, *CASES[name]) for name in names or CASES}


def main() -> None:
    outcomes = {}
    for name, case in played(float(sys.argv[1]), sys.argv[2:]).items():
        begin = time.monotonic()
        outcomes[name] = case()
        print(f"{name}: {outcomes[name]} ({time.monotonic() - begin:.2f} s)", file=sys.stderr)
    print_result({"cases": outcomes}, vllm)
    leave()


if __name__ == "__main__":
    main()
