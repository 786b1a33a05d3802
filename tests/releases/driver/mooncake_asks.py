"""Let a release's real Mooncake connectors ask and answer, while legs fail; print what each side is told, as JSON.

Prefill and decode are in this process, so that it decides in which order things happen; those that are killed have one
of their own. `mooncake_asks.py PATIENCE`: how many seconds to wait for what stock never tells.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import attempted, begin_driver, leave, print_result, wait

begin_driver()

import gc
import os
import sys
import tempfile
from pathlib import Path

import calm

calm.keep()

import asyncio
import contextlib
import ctypes
import resource
import signal
import threading
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import mooncake_sides as sides
import real_scheduler as real
import vllm
import zmq
from mooncake_registering import CASES as REGISTERING
from mooncake_registering import HEADS
from mooncake_registering import address as at
from mooncake_sides import Side, decoding, prefilling
from ports import free_port

gc.enable()

PATIENCE = float(sys.argv[1]) if sys.argv[1:] else 5.0
OWN = 100.0
"""Contents: block b of prefill's holds OWN + b."""
OTHERS = 300.0
"""Contents of a block of whoever it was given to next."""
DIE_WITH_PARENT = 1
"""Linux's PR_SET_PDEATHSIG."""
ELSEWHERE = 20
"""Block b of prefill's goes into block b + ELSEWHERE of decode's."""


class Taken:
    """In the place of a prefill worker's decoder: which asks it has taken, and whether they were for blocks."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self.asks: set[tuple[str, bool]] = set()

    def decode(self, data: Any) -> Any:
        meta = self._own.decode(data)
        for transfer, blocks in meta.req_blocks.values():
            self.asks.add((transfer, blocks not in ([], [[]])))
        return meta


class Named:
    """In the place of decode's decoder: the next answer that names nobody names one that lets go, where it is told so."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self.lets_go = ""
        self.by_prefill: bool | None = None  # whether prefill has named it, once it has answered

    def decode(self, data: Any) -> Any:
        answer = self._own.decode(data)
        names = answer.ok_reqs or []
        if self.lets_go and answer.status.name == "FINISH" and names in ([], [self.lets_go]):
            self.by_prefill, answer.ok_reqs, self.lets_go = bool(names), [self.lets_go], ""
        return answer


class Pair:
    """A prefill engine and a decode engine."""

    OWN = OWN
    named: Named

    def __init__(self, prefill: Side, decode: Side) -> None:
        self.prefill, self.decode = prefill, decode
        prefill.fill(range(sides.BLOCKS), OWN)
        self.taken = Taken(prefill.worker._xfer_meta_decoder)
        prefill.worker._xfer_meta_decoder = self.taken

    def step(self) -> None:
        self.prefill.step()
        self.decode.step()

    def leg(self, name: str, blocks: list[int], status: str | None = "FINISHED_LENGTH_CAPPED") -> Any:
        """Prefill's part: admitted, computed, and ended."""
        request = prefilling(f"p-{name}", name, len(blocks))
        self.prefill.admit(request, blocks)
        self.prefill.step()
        if status is not None:
            self.end(request, blocks, status)
        return request

    def end(self, request: Any, blocks: list[int], status: str = "FINISHED_LENGTH_CAPPED") -> None:
        self.prefill.finish(request, blocks, status)
        self.prefill.step()

    def ask(self, name: str, blocks: list[int], of: Any = None) -> Any:
        """Decode's part: admitted, and told to load."""
        request = decoding(f"d-{name}", name, len(blocks), of or self.prefill)
        places = [number + ELSEWHERE for number in blocks]
        self.decode.fill(places, -OWN)
        self.decode.invalid.difference_update(places)  # another's, of a case before
        self.decode.received.discard(f"d-{name}")  # it asks once more
        self.decode.admit(request, places)
        self.decode.step()
        return request

    def arrived(self, name: str, for_blocks: bool = True) -> None:
        """Wait until prefill has looked at an ask: asks come over connections of their own."""
        assert wait(lambda: (name, for_blocks) in self.taken.asks)
        self.turns()

    def turns(self) -> None:
        """Wait until prefill's loop has taken what was given to it."""

        async def turns() -> None:
            for _ in range(50):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(turns(), self.prefill.worker.sender_loop).result()

    def lets_go(self, name: str) -> None:
        """A client of decode's hangs up: prefill is asked for nothing, but to let go."""
        self.decode.finish(decoding(f"d-{name}-over", name, 2, self.prefill), [], "FINISHED_ABORTED")
        self.decode.step()
        self.arrived(name, for_blocks=False)

    def given_to_others(self, blocks: list[int]) -> Any:
        """Decode's blocks of a load that failed; what they hold then, in the end."""
        places = [number + ELSEWHERE for number in blocks]
        self.decode.fill(places, OTHERS)
        return lambda: self.decode.holds(places) == [OTHERS + number for number in places]

    def loaded(self, name: str, blocks: list[int], patience: float | None = None) -> str:
        """What decode is told of a load, and if that is so."""
        places = [number + ELSEWHERE for number in blocks]

        def reported() -> bool:
            self.step()
            return f"d-{name}" in self.decode.received

        if not wait(reported, PATIENCE if patience is None else patience):
            return "nothing is told"
        if set(places) <= self.decode.invalid:
            return "failed"
        contents = self.decode.holds(places)
        return "its own" if contents == [OWN + number for number in blocks] else f"wrong: {contents}"

    def let_go(self, name: str, patience: float | None = None) -> bool:
        """Whether prefill is told that it may give the blocks away."""

        def reported() -> bool:
            self.step()
            return f"p-{name}" in self.prefill.sent

        return wait(reported, PATIENCE if patience is None else patience)

    def asking(self, name: str | None = None, side: Side | None = None) -> int:
        """Asks of decode's that have no answer yet, or those of them for one request to one prefill worker."""
        frames = (task.get_coro().cr_frame for task in asyncio.all_tasks(self.decode.worker.receiver_loop))
        asks = [frame.f_locals for frame in frames if frame and frame.f_code.co_name == "receive_kv_from_single_worker"]
        if name is not None and side is not None:
            asks = [ask for ask in asks if f"d-{name}" in ask["pull_metas"] and ask["worker_addr"] == at(side)]
        return len(asks)


def failure(pair: Pair, otherwise: float = PATIENCE) -> float:
    """How long to wait for a failure's word: from 0.30.0 on most come on stock, too, and are not to be missed."""
    return 60.0 if hasattr(pair.decode.connector, "get_transfer_results") else otherwise


def in_turn(pair: Pair) -> Any:
    """Prefill first, then decode, as a router does that asks one after the other."""
    pair.leg("in-turn", [1, 2, 3])
    pair.ask("in-turn", [1, 2, 3])
    return pair.loaded("in-turn", [1, 2, 3], 60), pair.let_go("in-turn", 60)


def at_once(pair: Pair) -> Any:
    """Decode asks before prefill has begun."""
    pair.ask("at-once", [1, 2])
    pair.arrived("at-once")
    pair.leg("at-once", [1, 2])
    return pair.loaded("at-once", [1, 2], 60), pair.let_go("at-once", 60)


def fewer(pair: Pair) -> Any:
    """Prefill has fewer blocks than decode asks for; beside it, one that has them all."""
    pair.leg("fewer", [1, 2])
    pair.leg("beside", [4, 5])
    pair.decode.admit(decoding("d-beside", "beside", 2, pair.prefill), [24, 25])
    pair.ask("fewer", [1, 2, 3])  # both in one ask
    return pair.loaded("fewer", [1, 2, 3], failure(pair)), pair.loaded("beside", [4, 5], failure(pair))


def stopped(pair: Pair) -> Any:
    """Both legs are sent; prefill's ends by a stop token, so that there is nothing to fetch."""
    pair.ask("stopped", [1, 2])
    pair.arrived("stopped")
    pair.leg("stopped", [1, 2], "FINISHED_STOPPED")
    return pair.loaded("stopped", [1, 2])


def aborted(pair: Pair) -> Any:
    """Prefill's leg is aborted while it computes, and decode asks after that."""
    pair.leg("aborted", [1, 2], "FINISHED_ABORTED")
    pair.ask("aborted", [1, 2])
    return pair.loaded("aborted", [1, 2])


def aborted_in_queue(pair: Pair) -> Any:
    """Some legs are aborted before they were admitted, in the same step as one for which decode waits."""
    pair.ask("queued", [1, 2])
    pair.arrived("queued")
    request = pair.leg("queued", [1, 2], None)
    for number in range(8):
        pair.prefill.finish(prefilling(f"p-never-{number}", f"never-{number}", 2), [], "FINISHED_ABORTED")
    pair.end(request, [1, 2], "FINISHED_ABORTED")
    return pair.loaded("queued", [1, 2])


def begun_again(pair: Pair) -> Any:
    """The leg was aborted, and comes once more."""
    pair.leg("again", [1, 2], "FINISHED_ABORTED")
    pair.leg("again", [4, 5])
    pair.ask("again", [4, 5])
    return pair.loaded("again", [4, 5], 60), pair.let_go("again", 60)


def begun_again_at_once(pair: Pair) -> Any:
    """The same within one step, while decode waits; and another leg ends in the step in which the second one does."""
    pair.ask("once-more", [4, 5])
    pair.arrived("once-more")
    first = pair.leg("once-more", [1, 2], None)
    pair.prefill.finish(first, [1, 2], "FINISHED_ABORTED")
    second = prefilling("p-once-more-2", "once-more", 2)
    pair.prefill.admit(second, [4, 5])
    pair.prefill.step()
    beside = pair.leg("beside-it", [7, 8], None)
    pair.prefill.finish(second, [4, 5], "FINISHED_LENGTH_CAPPED")
    pair.end(beside, [7, 8])
    pair.ask("beside-it", [7, 8])
    return pair.loaded("once-more", [4, 5]), pair.loaded("beside-it", [7, 8])


def no_leg(pair: Pair) -> Any:
    """Prefill's leg never comes, within the time for which it may."""
    with seconds("1"):
        pair.ask("no-leg", [1, 2])
        result = pair.loaded("no-leg", [1, 2], failure(pair) + 2)
        left = "no-leg" in pair.prefill.worker.reqs_need_send
    return result, left


def let_go_first(pair: Pair) -> Any:
    """A client hangs up, and of decode's two asks the one that lets go is there first."""
    pair.leg("hung-up", [1, 2])
    pair.lets_go("hung-up")
    with seconds("8"):  # the patch takes a part of it
        pair.ask("hung-up", [1, 2])
        return pair.loaded("hung-up", [1, 2]), pair.let_go("hung-up", 60)


def tried_again(pair: Pair) -> Any:
    """A client hangs up before either leg was admitted, and tries again by the same transfer."""
    pair.lets_go("tried")
    pair.prefill.finish(prefilling("p-tried-first", "tried", 2), [], "FINISHED_ABORTED")
    pair.prefill.step()
    pair.leg("tried", [1, 2])
    pair.ask("tried", [1, 2])
    return pair.loaded("tried", [1, 2]), pair.let_go("tried", 60)


def decode_first(pair: Pair, name: str, blocks: list[int]) -> Any:
    """Both legs are sent at once, and decode's is there first."""
    pair.ask(name, blocks)
    pair.arrived(name)
    pair.leg(name, blocks)
    return pair.loaded(name, blocks), pair.let_go(name)


def tried_again_first(pair: Pair) -> Any:
    """A client hangs up when prefill has ended, and tries again: of the new legs decode's is there first."""
    pair.leg("once", [1, 2])
    pair.lets_go("once")
    assert pair.let_go("once", 60)
    pair.prefill.sent.remove("p-once")
    return decode_first(pair, "once", [4, 5])


def tried_again_unheard(pair: Pair) -> Any:
    """A client hangs up before prefill hears of it, and tries again: decode asks before prefill's leg comes."""
    pair.lets_go("unheard")
    return decode_first(pair, "unheard", [1, 2])


def tried_again_apart(pair: Pair) -> Any:
    """A client hangs up amid its prefill, and tries again: decode asks before the new prefill begins."""
    first = pair.leg("apart", [1, 2], None)
    pair.lets_go("apart")
    pair.end(first, [1, 2], "FINISHED_ABORTED")
    return decode_first(pair, "apart", [4, 5])


def tried_again_at_once(pair: Pair) -> Any:
    """The same; the new prefill begins in the step in which the first one is given up, and decode asks after that."""
    first = pair.leg("quickly", [1, 2], None)
    pair.lets_go("quickly")
    pair.prefill.finish(first, [1, 2], "FINISHED_ABORTED")
    second = prefilling("p-quickly-2", "quickly", 2)
    pair.prefill.admit(second, [4, 5])
    pair.prefill.step()
    pair.turns()
    pair.ask("quickly", [4, 5])
    pair.arrived("quickly")
    pair.end(second, [4, 5])
    return pair.loaded("quickly", [4, 5]), pair.let_go("quickly-2")


def tried_again_twice(pair: Pair) -> Any:
    """A client hangs up and tries again amid its first prefill, which ends: it loads what that one computed."""
    first = pair.leg("under-way", [1, 2], None)
    pair.lets_go("under-way")
    pair.ask("under-way", [1, 2])
    pair.arrived("under-way")
    pair.end(first, [1, 2])
    loaded = pair.loaded("under-way", [1, 2]), pair.let_go("under-way")
    pair.prefill.sent.remove("p-under-way")
    pair.leg("under-way", [4, 5])
    kept = pair.let_go("under-way", 0.5)
    pair.ask("under-way", [4, 5])
    return *loaded, kept, pair.loaded("under-way", [4, 5]), pair.let_go("under-way")


def let_go_named(pair: Pair) -> Any:
    """A client hangs up when prefill has ended: whether prefill's answer names the request that lets go.

    And whether decode takes it for a load that has ended, once it is named.
    """
    name = pair.named.lets_go = "d-named-over"
    pair.leg("named", [1, 2])
    pair.lets_go("named")
    assert wait(lambda: pair.named.by_prefill is not None)
    assert wait(lambda: not pair.asking("named-over", pair.prefill))
    pair.step()
    taken = name in pair.decode.received
    if not pair.named.by_prefill:
        pair.decode.received.discard(name)
    return pair.named.by_prefill, taken, pair.let_go("named", 60)


def let_go_before(pair: Pair) -> Any:
    """The same where both legs are sent at once, and prefill's comes last: it is for nobody."""
    pair.lets_go("early")
    with seconds("8"):  # the patch takes a part of it
        pair.ask("early", [1, 2])
        outcome = pair.loaded("early", [1, 2])
    untouched = pair.given_to_others([1, 2])
    pair.leg("early", [1, 2])
    return outcome, pair.let_go("early", 60), untouched()


def let_go_last(pair: Pair) -> Any:
    """Decode asks, its client hangs up, and prefill's leg comes after that."""
    pair.ask("last", [1, 2])
    pair.arrived("last")
    pair.lets_go("last")
    outcome = pair.loaded("last", [1, 2])
    if outcome != "failed":  # it still waits, and would be written
        return outcome
    untouched = pair.given_to_others([1, 2])
    pair.leg("last", [1, 2])
    return outcome, pair.let_go("last", 60), untouched()


def let_go_amid(pair: Pair) -> Any:
    """A client hangs up while its blocks are written: prefill's are read until that has ended."""
    engine, writes, go_on = pair.prefill.worker.engine, threading.Event(), threading.Event()

    def write(*call: Any) -> Any:
        writes.set()
        go_on.wait()
        return engine.batch_transfer_sync_write(*call)

    pair.prefill.worker.engine = SimpleNamespace(batch_transfer_sync_write=write)
    pair.leg("amid", [1, 2])
    pair.ask("amid", [1, 2])
    assert writes.wait(60)
    pair.lets_go("amid")
    pair.step()
    freed = "p-amid" in pair.prefill.sent
    if freed:
        pair.prefill.fill([1, 2], OTHERS)
    go_on.set()
    outcome = pair.loaded("amid", [1, 2], 60)
    pair.prefill.worker.engine = engine
    pair.prefill.fill([1, 2], OWN)
    return freed, outcome, pair.let_go("amid", 60)


def let_go_beside(pair: Pair) -> Any:
    """Of two loads that were asked for in one message, one's client hangs up in the turn in which the other's prefill ends.

    The prefill of the one that hung up begins while the other's blocks are written.
    """
    worker, engine = pair.prefill.worker, pair.prefill.worker.engine
    writes, go_on = threading.Event(), threading.Event()

    def write(*call: Any) -> Any:
        writes.set()
        go_on.wait()
        return engine.batch_transfer_sync_write(*call)

    other = pair.leg("ends", [4, 5], None)
    pair.decode.fill([24, 25], -OWN)
    pair.decode.invalid -= {24, 25}
    pair.decode.admit(decoding("d-ends", "ends", 2, pair.prefill), [24, 25])
    pair.ask("hangs-up", [1, 2])
    pair.arrived("hangs-up")
    worker.engine = SimpleNamespace(batch_transfer_sync_write=write)
    ended, waited_for = worker.reqs_need_send["ends"].ready, worker.reqs_need_send["hangs-up"].ready
    ended.set = lambda: None  # not before the other client hangs up
    pair.end(other, [4, 5])
    waited_for.set = lambda: (asyncio.Event.set(ended), asyncio.Event.set(waited_for))
    pair.lets_go("hangs-up")
    if not writes.wait(PATIENCE):  # stock waits for both prefills
        worker.sender_loop.call_soon_threadsafe(asyncio.Event.set, ended)
    request = pair.leg("hangs-up", [1, 2], None)
    pair.turns()
    go_on.set()
    beside = pair.loaded("ends", [4, 5], 60)
    worker.engine = engine
    pair.end(request, [1, 2])
    return beside, pair.loaded("hangs-up", [1, 2]), pair.let_go("hangs-up", 60)


def slots(pair: Pair) -> Any:
    """As many decode requests as prefill has tasks are aborted before they were admitted; another is asked for."""
    number, before = pair.prefill.worker.num_sender_tasks, pair.asking()
    for one in range(number):
        pair.lets_go(f"over-{one}")
    answered = wait(lambda: pair.asking() <= before, PATIENCE)
    pair.leg("behind", [1, 2])
    pair.ask("behind", [1, 2])
    served = pair.loaded("behind", [1, 2])
    for one in range(number):  # their prefills come after all
        pair.leg(f"over-{one}", [7, 8])
    let_go = all(pair.let_go(f"over-{one}", 60) for one in range(number))
    return served, answered, let_go, pair.loaded("behind", [1, 2], 60)


def waiting(pair: Pair) -> Any:
    """As many decode requests as prefill has tasks wait for prefills that are not over; another's is."""
    number = pair.prefill.worker.num_sender_tasks
    for one in range(number):
        pair.ask(f"slow-{one}", [10 + one])
        pair.arrived(f"slow-{one}")
    pair.leg("ready", [1, 2])
    pair.ask("ready", [1, 2])
    served = pair.loaded("ready", [1, 2])
    for one in range(number):
        pair.leg(f"slow-{one}", [10 + one])
    return served, [pair.loaded(f"slow-{one}", [10 + one], 60) for one in range(number)]


def unreachable(pair: Pair) -> Any:
    """The bootstrap server is not there."""
    pair.ask("unreachable", [1, 2], SimpleNamespace(engine_id="nobody", port=free_port()))
    return pair.loaded("unreachable", [1, 2], failure(pair))


def unknown(pair: Pair) -> Any:
    """The bootstrap server is there, and knows another engine."""
    pair.ask("unknown", [1, 2], SimpleNamespace(engine_id="nobody", port=pair.prefill.port))
    return pair.loaded("unknown", [1, 2], failure(pair))


def some_unknown(pair: Pair) -> Any:
    """The bootstrap server knows one of two workers of a prefill engine that decode is to ask, as while they start."""
    worker, name = pair.decode.worker, "some"
    worker._remote_agents[name] = {0: {0: at(pair.prefill)}}
    worker._tp_size[name] = 2
    sizes = getattr(getattr(worker, "kv_topo", None), "remote_tp_size", None)
    if sizes is not None:
        sizes[name] = 2
    pair.ask(name, [1, 2], SimpleNamespace(engine_id=name, port=pair.prefill.port))
    early = pair.loaded(name, [1, 2], 1)
    untouched = pair.given_to_others([1, 2]) if early == "failed" else lambda: True
    asked = wait(lambda: (name, True) in pair.taken.asks, 1)
    outcome = early
    if asked:
        pair.leg(name, [1, 2])
        outcome = pair.loaded(name, [1, 2]) if early != "failed" else early
        pair.let_go(name)
    return early, asked, outcome, untouched()


def never_sent(pair: Pair) -> Any:
    """Decode has no socket left to ask by, and then has some again. Prefill is well."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))  # each socket takes a file
    context = zmq.Context.shadow(pair.decode.worker.async_zmq_ctx.underlying)
    sockets = []
    with contextlib.suppress(zmq.ZMQError):
        while True:
            sockets.append(context.socket(zmq.PAIR))
    pair.leg("never-sent", [1, 2])
    pair.ask("never-sent", [1, 2])
    outcome = pair.loaded("never-sent", [1, 2], failure(pair))
    arrived = ("never-sent", True) in pair.taken.asks
    for one in sockets:
        one.close(linger=0)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    pair.leg("sent", [1, 2])

    def sent() -> bool:  # sockets are closed by a thread of ZMQ's
        with contextlib.suppress(zmq.ZMQError):
            context.socket(zmq.PAIR).close(linger=0)
            return True
        return False

    assert wait(sent)
    pair.ask("sent", [1, 2])
    return outcome, arrived, pair.loaded("sent", [1, 2], 60)


def broken(pair: Pair) -> Any:
    """A write fails, in part, and the other part comes later: Mooncake says so before all of a batch has ended.

    The other time, prefill has too few blocks for another request of the same ask: its answer says both.
    """
    return written_later(pair, "broken", [1, 2]), written_later(pair, "broken-beside", [4, 5], beside="few")


def written_later(pair: Pair, name: str, blocks: list[int], beside: str | None = None) -> Any:
    engine = pair.prefill.worker.engine
    late: list[Any] = []

    def fails(*call: Any) -> int:
        late.append(call)
        return -1

    pair.prefill.worker.engine = SimpleNamespace(batch_transfer_sync_write=fails)
    pair.leg(name, blocks)
    if beside is not None:
        pair.leg(beside, [7])
        pair.decode.admit(decoding(f"d-{beside}", beside, 2, pair.prefill), [27, 28])
    pair.ask(name, blocks)
    outcome = pair.loaded(name, blocks, failure(pair, 1.0))
    pair.prefill.worker.engine = engine
    engine.batch_transfer_sync_write(*late[0])
    return outcome


def one_of_two(pair: Pair, other: Side) -> Any:
    """Decode asks two workers of a prefill engine: one has too few blocks, the other still writes.

    They are those of two engines of one stage each; decode takes them for two stages of one.
    """
    engine, writes, go_on = other.worker.engine, threading.Event(), threading.Event()

    def write(*call: Any) -> Any:
        writes.set()
        go_on.wait()
        return engine.batch_transfer_sync_write(*call)

    other.worker.engine = SimpleNamespace(batch_transfer_sync_write=write)
    second = Pair(other, pair.decode)
    pair.leg("two", [1])
    second.leg("two", [1, 2])
    stages = {stage: at(side) for stage, side in enumerate((pair.prefill, other))}
    pair.decode.worker._remote_agents["both"] = {0: stages}
    pair.decode.worker._tp_size["both"] = 1
    pair.ask("two", [1, 2], SimpleNamespace(engine_id="both", port=pair.prefill.port))
    assert writes.wait(60)
    assert wait(lambda: not pair.asking("two", pair.prefill))
    pair.step()
    early = "d-two" in pair.decode.received
    untouched = pair.given_to_others([1, 2]) if early else lambda: True
    go_on.set()
    assert wait(lambda: not pair.asking("two", other))
    result = early, pair.loaded("two", [1, 2], 60), untouched()
    other.worker.engine = engine
    return result


def stray(pair: Pair) -> Any:
    """Somebody sends prefill a message of more parts than an ask has, and one that cannot be read."""
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(at(pair.prefill))
    stranger.send_multipart([b"", b"hello"])
    stranger.send(b"hello")
    answered = bool(stranger.poll(1000 * PATIENCE))
    stranger.close(linger=0)
    pair.leg("stray", [1, 2])
    pair.ask("stray", [1, 2])
    return answered, pair.loaded("stray", [1, 2])


def odd_id(pair: Pair) -> Any:
    """A client names its transfer by a list; another's prefill ends in the same step."""
    odd, beside = prefilling("p-odd", [1], 2), prefilling("p-beside-odd", "beside-odd", 2)  # type: ignore[arg-type]
    pair.prefill.admit(odd, [1, 2])
    pair.prefill.step()
    pair.prefill.admit(beside, [4, 5])
    pair.prefill.step()
    pair.prefill.finish(odd, [1, 2], "FINISHED_LENGTH_CAPPED")
    pair.end(beside, [4, 5])
    pair.ask("beside-odd", [4, 5])
    return pair.loaded("beside-odd", [4, 5])


def killed(pair: Pair, mortal: Mortal, again: Mortal) -> Any:
    """Prefill's process is killed while decode waits for it; then it is there again, as the same engine."""
    mortal.start()
    pair.ask("killed", [1, 2], mortal)
    assert mortal.read() == "asked"
    mortal.kill()
    result = [pair.loaded("killed", [1, 2])]
    pair.ask("after", [1, 2], mortal)
    result.append(pair.loaded("after", [1, 2]))
    again.start()
    pair.ask("back", [1, 2], again)
    result.append(pair.loaded("back", [1, 2]))
    again.kill()
    return result


class Mortal:
    """A prefill engine in a process of its own, made before this one has threads. It serves whatever it is asked for."""

    def __init__(self, model_config: Any, port: int, finishes: bool) -> None:
        self.engine_id, self.port = "mortal", port
        ours, theirs = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
            os.read(ours[0], 1)
            serve(Side(model_config, "kv_producer", self.engine_id, port, heads=HEADS), theirs[1], finishes)
        self._tell, self._hear = ours[1], theirs[0]

    def start(self) -> None:
        os.write(self._tell, b"1")
        assert self.read() == "up"

    def read(self) -> str:
        return os.read(self._hear, 64).decode()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def serve(side: Side, pipe: int, finishes: bool) -> None:
    side.fill(range(sides.BLOCKS), OWN)
    os.write(pipe, b"up")
    done: set[str] = set()
    while True:
        wait(lambda: bool(set(side.worker.reqs_need_send) - done), 1e6)
        for transfer in set(side.worker.reqs_need_send) - done:
            done.add(transfer)
            if finishes:
                request = prefilling(f"p-{transfer}", transfer, 2)
                side.admit(request, [1, 2])
                side.step()
                side.finish(request, [1, 2], "FINISHED_LENGTH_CAPPED")
                side.step()
            else:
                os.write(pipe, b"asked")


class seconds:
    """How long the release waits for the other side, meanwhile."""

    def __init__(self, value: str) -> None:
        self._value = value

    def __enter__(self) -> None:
        os.environ[ABORT] = self._value

    def __exit__(self, *error: object) -> None:
        os.environ[ABORT] = "600"


def two_legs(pair: Pair, name: str = "twice") -> Any:
    """Two prefill requests come with one transfer, and both end. Decode asks for the first."""
    first = pair.leg(name, [1, 2], None)
    second = prefilling(f"p-{name}-2", name, 2)
    pair.prefill.admit(second, [4, 5])
    pair.prefill.step()
    pair.end(first, [1, 2])
    pair.end(second, [4, 5])
    pair.ask(name, [1, 2])
    return pair.loaded(name, [1, 2]), pair.let_go(name), pair.let_go(f"{name}-2")


def two_legs_later(pair: Pair) -> Any:
    """The same; decode asks for the second, too."""
    came, *_ = two_legs(pair, "twice-asked")
    if came != "its own":
        return came, came
    pair.ask("twice-asked", [4, 5])
    return came, pair.loaded("twice-asked", [4, 5])


def two_legs_at_once(pair: Pair) -> Any:
    """The same, and both end in one step."""
    first, second = (prefilling(f"p-at-a-time{more}", "at-a-time", 2) for more in ("", "-2"))
    pair.prefill.admit(first, [1, 2])
    pair.prefill.step()
    pair.prefill.admit(second, [4, 5])
    pair.prefill.step()
    pair.prefill.finish(first, [1, 2], "FINISHED_LENGTH_CAPPED")
    pair.end(second, [4, 5])
    pair.ask("at-a-time", [1, 2])
    return pair.loaded("at-a-time", [1, 2]), pair.let_go("at-a-time"), pair.let_go("at-a-time-2")


def two_legs_in_turn(pair: Pair) -> Any:
    """The second ends when the first was sent, in one step with another's."""
    first = pair.leg("one-by-one", [1, 2], None)
    second, beside = (
        prefilling("p-one-by-one-2", "one-by-one", 2),
        prefilling("p-beside-one-by-one", "beside-one-by-one", 2),
    )
    pair.prefill.admit(second, [4, 5])
    pair.prefill.step()
    pair.prefill.admit(beside, [7, 8])
    pair.prefill.step()
    pair.end(first, [1, 2])
    pair.ask("one-by-one", [1, 2])
    loaded = pair.loaded("one-by-one", [1, 2])
    if loaded != "its own" or not pair.let_go("one-by-one"):
        return loaded, False, loaded
    pair.prefill.finish(second, [4, 5], "FINISHED_LENGTH_CAPPED")
    pair.end(beside, [7, 8])
    pair.ask("beside-one-by-one", [7, 8])
    return loaded, True, pair.loaded("beside-one-by-one", [7, 8])


def two_legs_one_aborted(pair: Pair) -> Any:
    """The client of the second hangs up when the first has ended."""
    first = pair.leg("one-left", [1, 2], None)
    second = prefilling("p-one-left-2", "one-left", 2)
    pair.prefill.admit(second, [4, 5])
    pair.prefill.step()
    pair.end(first, [1, 2])
    pair.end(second, [4, 5], "FINISHED_ABORTED")
    pair.ask("one-left", [1, 2])
    loaded = pair.loaded("one-left", [1, 2])
    return loaded, loaded == "its own" and pair.let_go("one-left")


ABORT = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"
CASES = (
    in_turn,
    at_once,
    fewer,
    stopped,
    aborted,
    aborted_in_queue,
    begun_again,
    begun_again_at_once,
    no_leg,
    unreachable,
    unknown,
    some_unknown,
    never_sent,
    broken,
)
LET_GO = (
    tried_again,
    tried_again_first,
    tried_again_unheard,
    tried_again_apart,
    tried_again_at_once,
    tried_again_twice,
    let_go_named,
    let_go_first,
    let_go_before,
    let_go_last,
    let_go_amid,
    let_go_beside,
)
LAST = (
    two_legs,
    two_legs_at_once,
    waiting,
    slots,
    stray,
    odd_id,
    two_legs_in_turn,
    two_legs_one_aborted,
    two_legs_later,
)


def played(wanted: Iterable[str] = (), kind: type[Pair] = Pair) -> dict[str, Any]:
    """What each case came to, between a pair of this kind; all cases, or those that are wanted."""
    chosen = {*wanted}
    result: dict[str, Any] = {}

    def play(pair: Pair, *cases: Callable[..., Any], beside: Iterable[Any] = ()) -> None:
        for case in cases:
            if not chosen or case.__name__ in chosen:
                result[case.__name__] = attempted(partial(case, pair, *beside))

    real.quiet()
    os.environ[ABORT] = "600"
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory), HEADS)
        sides.begin_distributed(model_config, Path(directory) / "rendezvous")
        port = free_port()
        mortals = [Mortal(model_config, port, finishes) for finishes in (False, True)]
        prefill = Side(model_config, "kv_producer", "prefill", free_port(), heads=HEADS)
        decode = Side(model_config, "kv_consumer", "decode", free_port(), heads=HEADS)
        named = decode.worker._xfer_resp_decoder = Named(
            decode.worker._xfer_resp_decoder
        )  # before what a patch puts there
        pair = kind(prefill, decode)
        pair.named = named
        play(pair, *CASES, *LET_GO, *REGISTERING)
        play(pair, killed, beside=mortals)
        # What stock never answers keeps its tasks for good.
        apart = Side(model_config, "kv_producer", "apart", free_port(), heads=HEADS, num_workers=1)
        if hasattr(decode.module.MooncakeXferMetadata, "remote_pp_size"):  # a prefill engine may have several stages
            play(pair, one_of_two, beside=[apart])
        for case in LAST:
            play(kind(apart, decode), case)
    return result


def main() -> None:
    print_result({"pid": os.getpid(), "cases": played()}, vllm)
    leave()


if __name__ == "__main__":
    main()
