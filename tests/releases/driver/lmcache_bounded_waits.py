# mypy: disable-error-code="import-not-found"
"""Stop, kill or hinder a real LMCache server under a real worker's calls; print what each step came to, as JSON.

The arguments are `mq_timeout`, in seconds, and the cases. What a step waited for in vain is the sum of its time-outs.
"""

from __future__ import annotations

from result import attempted, begin_driver, leave, print_result

begin_driver()

import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lmcache_server

lmcache_server.compiled()

import lmcache
from lmcache_operations import packed
from lmcache_server import AFTER_A_PING, Answer, Server, Worker, silence, until

MQ_TIMEOUT = [300.0]
"""`mq_timeout`, in seconds, of all workers."""
FIRST, SECOND, THIRD = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]


class Waits:
    """How many seconds the main thread's waits were that came to nothing, since it was last asked.

    Time passes for the patch by these waits alone, so that a machine that stalls takes none of what a step may wait.
    """

    def __init__(self) -> None:
        self.seconds = self.clock = 0.0
        self.under_the_next: Callable[[], None] | None = None
        self.pauses: dict[int, list[float]] = {}  # of the heartbeats' threads
        main, plain, wait = threading.current_thread(), threading.Event.wait, Answer.wait

        def pausing(event: threading.Event, timeout: float | None = None) -> bool:
            if threading.current_thread() is not main:
                if "_run_loop" in (sys._getframe(1).f_code.co_name, sys._getframe(4).f_code.co_name):  # stock, patched
                    self.pauses.setdefault(threading.get_ident(), []).append(timeout or 0.0)
            return plain(event, timeout)

        def noting(event: Answer, timeout: float | None = None) -> bool:
            if threading.current_thread() is not main:
                return wait(event, timeout)
            if self.under_the_next is not None:
                act, self.under_the_next = self.under_the_next, None
                act()
            came = wait(event, timeout)
            if not came:
                assert timeout is not None
                self.seconds += timeout
                self.clock += timeout
            return came

        threading.Event.wait = pausing  # type: ignore[method-assign]
        Answer.wait = noting  # type: ignore[method-assign]
        for name, module in list(sys.modules.items()):
            if name.endswith("lmcache_bounded_waits.wrappers"):
                module.time = types.SimpleNamespace(  # type: ignore[attr-defined]
                    **{**vars(time), "monotonic": lambda: self.clock}
                )

    def taken(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return round(seconds, 1)


class Asker(Worker):
    """A worker that remembers what its steps waited for."""

    def __init__(self, server: Server, waits: Waits, interval: float = 30.0, *, pings_by_itself: bool = False) -> None:
        super().__init__(server.port, MQ_TIMEOUT[0], interval, pings_by_itself=pings_by_itself)
        self.server, self.waits = server, waits
        self.health = self.adapter._health_event
        waits.taken()

    def stored(self, prompt: int) -> None:
        self.fill(prompt, FIRST)
        self.store(f"store {prompt}", prompt, FIRST)
        self.finished(f"store {prompt}")

    def step(self, loads: dict[str, list[int]], stores: list[str]) -> list[Any]:
        """Loads of the prompt 5 and stores of the prompt 6: what is reported, and how long was waited in vain.

        An error of the step's would end the engine.
        """
        try:
            for name, blocks in loads.items():
                self.load(name, 5, blocks)
            for name in stores:
                self.store(name, 6, FIRST)
            return [*self.finished(*stores), self.waits.taken()]
        except Exception as error:
            return [type(error).__name__, self.waits.taken()]

    def hit_in_vain(self, name: str, prompt: int, tokens: int) -> int:
        """A lookup while the server is stopped. Where LMCache polls for it, from 0.5.5 on, the heartbeat ends it."""
        finds = threading.Timer(0.5, lambda: [event.clear() for event in self.scheduler._health_events.values()])
        if not hasattr(self.scheduler, "req_clients"):
            return self.hit(name, prompt, tokens)
        finds.start()
        try:
            return self.hit(name, prompt, tokens)
        finally:
            finds.join()

    def is_used_again(self) -> list[Any]:
        """Once both sides are well: a prompt is stored, found and loaded."""
        until(self.is_healthy)
        self.stored(7)
        hit = self.hit("again", 7, 65)
        self.load("again", 7, SECOND)
        return [hit, self.finished()[1:], self.holds(7, SECOND)]

    def is_healthy(self) -> bool:
        """After a heartbeat of both sides: those of their own come every 30 s."""
        for beat in (self.adapter._heartbeat, *(self.scheduler._heartbeats or {}).values()):
            if beat is not None:
                beat._execute()
        return bool(self.adapter.is_healthy and self.scheduler.is_healthy)

    def count_registrations(self) -> list[None]:
        """One entry for each time that it registers from now on."""
        count: list[None] = []
        register = self.adapter._send_register_kv_caches_request
        self.adapter._send_register_kv_caches_request = lambda caches: (count.append(None), register(caches))
        return count

    def has_its_own_event(self) -> bool:
        """No patch has left another event in the adapter, or in its heartbeat, than the one that both began with."""
        return self.adapter._health_event is self.adapter._heartbeat._health_event is self.health


def stopped(server: Server, waits: Waits) -> Any:
    """Two loads and two stores of one step, to which nobody answers, and a step after it; then the server goes on."""
    worker = Asker(server, waits)
    worker.stored(5)
    hits = [worker.hit(name, 5, 65) for name in ("a", "b")]
    server.stop()
    result = {"hits": hits, "step": worker.step({"a": SECOND, "b": THIRD}, ["c", "d"])}
    result["next step"] = worker.step({"e": SECOND}, ["f"])
    os.kill(server.pid, signal.SIGCONT)
    return {**result, "again": worker.is_used_again()}


def stopped_after_a_load(server: Server, waits: Waits) -> Any:
    """The first of two loads has come: whatever is reported of it, its contents are there."""
    worker = Asker(server, waits)
    worker.stored(5)
    for name in ("a", "b"):
        worker.hit(name, 5, 65)
    worker.load("a", 5, SECOND)
    server.stop()
    result = worker.step({"b": THIRD}, [])
    os.kill(server.pid, signal.SIGCONT)
    return [result, worker.holds(5, SECOND)]


def answers_pings_before_the_end(server: Server, waits: Waits) -> Any:
    """The worker is registered again between its load, which got no answer, and the end of the step."""
    worker = Asker(server, waits)
    worker.stored(5)
    worker.hit("a", 5, 65)
    server.stop()
    worker.load("a", 5, SECOND)
    os.kill(server.pid, signal.SIGCONT)
    worker.adapter._heartbeat._execute()
    return [worker.finished()[1:], worker.adapter.is_healthy]


def longer_than_for_a_dead_server(waited: float) -> bool:
    """SECONDS, 2 here, less what its pings took."""
    assert waited <= 2.0
    return waited > 1.0


def raises(server: Server, waits: Waits) -> Any:
    """The server answers pings, and not what its handler raised an error at: three stores of one step."""
    worker = Asker(server, waits)
    server.ask("raise")
    *reported, waited = worker.step({}, ["a", "b", "c"])
    server.ask("well")
    return [reported, longer_than_for_a_dead_server(waited), worker.is_used_again()]


def raises_again(server: Server, waits: Waits) -> Any:
    """Two stores to which nobody answers, the worker registered again between them: the second's wait is what is left.

    That is, what the time between them has restored, and half a second.
    """
    worker = Asker(server, waits)
    server.ask("raise")
    first = longer_than_for_a_dead_server(worker.step({}, ["a"])[-1])
    worker.adapter._heartbeat._execute()
    healthy = worker.adapter.is_healthy
    second = longer_than_for_a_dead_server(worker.step({}, ["b"])[-1])
    server.ask("well")
    return [first, healthy, second]


def slow(server: Server, waits: Waits) -> Any:
    """The server lives, and takes its time, which is until it was pinged: it is waited for, and its answers count."""
    worker = Asker(server, waits)
    worker.stored(5)
    worker.hit("a", 5, 65)
    worker.rest()
    module, plain = worker.module, worker.module.send_ping

    def send_ping(*args: Any, **kwargs: Any) -> Any:
        answer = plain(*args, **kwargs)
        server.ask("well")
        return answer

    server.ask("hold")
    module.send_ping = send_ping
    worker.load("a", 5, SECOND)
    module.send_ping = plain
    return [worker.finished()[1:], worker.adapter.is_healthy, worker.holds(5, SECOND)]


def stopped_under_a_store(server: Server, waits: Waits) -> Any:
    """The server makes room for the store once it goes on; by then other contents are in the blocks.

    It gives that room out as filled when the worker's registration ends, filled or not.
    """
    worker = Asker(server, waits)
    worker.fill(8, FIRST)
    server.stop()
    try:
        worker.store("late", 8, FIRST)  # the server takes another prompt for the one of a name that it knows
    except Exception:
        os.kill(server.pid, signal.SIGCONT)
        raise
    result = [*worker.finished("late"), waits.taken()]
    worker.fill(9, FIRST)
    os.kill(server.pid, signal.SIGCONT)
    reader = Asker(server, waits)
    filled: list[int] = []
    until(lambda: worker.is_healthy() and all(late.over for late in vars(worker.adapter).get("_livepatch_late", ())))
    # That it is over is said before it is filled, by another thread it may be.
    until(lambda: filled.append(reader.hit(f"waits for it {len(filled)}", 8, 65)) or filled[-1] > 0)
    worker.adapter.shutdown()
    hit = reader.hit("reads it", 8, 65)
    reader.load("reads it", 8, SECOND)
    return [result, hit, reader.finished()[1:], reader.holds(8, SECOND)]


def lookup(server: Server, waits: Waits) -> Any:
    """The scheduler asks a server that does not answer, until a request is not kept any longer."""
    worker = Asker(server, waits)
    worker.stored(5)
    server.stop()
    waits.taken()
    hit = worker.hit_in_vain("asked", 5, 65)
    waited = waits.taken()
    os.kill(server.pid, signal.SIGCONT)
    return [hit, waited, worker.scheduler._mq_timeout, len(worker.scheduler._heartbeats)]


def cleared(server: Server, waits: Waits) -> Any:
    """Whether the cache counts as cleared where CLEAR takes 2.5 s, longer than SECONDS, after a store and a lookup."""
    worker = Asker(server, waits)
    worker.stored(5)
    worker.hit("before", 5, 65)
    wait = Answer.wait

    def takes(event: Answer, timeout: float | None = None) -> bool:
        assert timeout is not None
        return timeout > 2.5 and wait(event, timeout - 2.5)

    Answer.wait = takes  # type: ignore[method-assign]
    try:
        return worker.scheduler.reset_cache()
    finally:
        Answer.wait = wait  # type: ignore[method-assign]


def time_outs(server: Server, waits: Waits) -> Any:
    """The time-outs of the scheduler's adapter, the worker's and its transfers, after all was asked in vain, and again."""
    worker = Asker(server, waits)
    worker.stored(5)
    server.stop()
    worker.hit_in_vain("asked in vain", 5, 65)
    worker.step({"a": SECOND}, ["b"])
    os.kill(server.pid, signal.SIGCONT)
    registered = worker.count_registrations()
    worker.is_used_again()
    transfers = worker.adapter.transfer_ctx._engine_driven_context
    return [len(registered), worker.scheduler._mq_timeout, worker.adapter._mq_timeout, transfers.mq_timeout]


def used_after_a_lookup(server: Server, waits: Waits) -> Any:
    worker = Asker(server, waits)
    server.stop()
    worker.hit_in_vain("asked, too", 5, 65)
    os.kill(server.pid, signal.SIGCONT)
    return worker.is_used_again()


def session(server: Server, waits: Waits) -> Any:
    """A request ends while its lookup is not answered."""
    worker = Asker(server, waits)
    server.stop()
    waits.taken()
    worker.scheduler.maybe_submit_lookup_request("a", packed([5] * 65))
    worker.scheduler.end_session("a")
    os.kill(server.pid, signal.SIGCONT)
    return waits.taken()


def heartbeats(server: Server, waits: Waits) -> Any:
    """How long each ping may take, with a heartbeat every 30 s; what it comes to.

    Under the fourth a step is not answered.
    """
    worker = Asker(server, waits)
    worker.stored(5)
    beat, answers = worker.adapter._heartbeat, [False, False, True, "lost", True, True]
    worker.rest()
    seen: list[list[Any]] = []

    def send_ping(_client: Any, timeout: float, instance_id: int | None = None) -> bool:
        if timeout < 1.0:  # the step's
            return False
        answer = answers[len(seen)]
        seen.append([timeout])
        if answer == "lost":
            server.ask("raise")
            worker.step({}, ["lost"])
            server.ask("well")
        return bool(answer)

    module, plain, registered = worker.module, worker.module.send_ping, worker.adapter._send_register_kv_caches_request
    count: list[int] = []
    worker.adapter._send_register_kv_caches_request = lambda caches: (count.append(len(seen)), registered(caches))
    module.send_ping = send_ping
    while len(seen) < len(answers):
        beat._execute()
        seen[-1] += [worker.adapter.is_healthy]
        assert beat._interval == 30.0, "what LMCache tells of its threads"
    module.send_ping = plain
    return {"pings": seen, "registered by": count}


def found_again(server: Server, waits: Waits) -> Any:
    """A step and a lookup find their server lost, right after a heartbeat's ping; the next one is due in an hour.

    How long the heartbeats pause, in seconds, and whether both sides find the server well again; how often it is
    pinged while it is stopped, and how many pings of one side are under way at once.
    """
    worker = Asker(server, waits, interval=3600.0, pings_by_itself=True)
    worker.hit("starts a heartbeat", 5, 65)
    worker.stored(5)
    worker.rest()
    beats = [worker.adapter._heartbeat, *(worker.scheduler._heartbeats or {}).values()]
    threads = [beat._thread.ident for beat in beats]
    until(lambda: all(beat.last_summary for beat in beats) and all(waits.pauses.get(ident) for ident in threads))
    module, plain = worker.module, worker.module.send_ping
    sent: dict[int, list[float]] = {}
    under_way: list[int] = []
    most = 0

    def send_ping(client: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        ident = threading.get_ident()
        sent.setdefault(ident, []).append(time.monotonic())
        under_way.append(ident)
        most = max(most, under_way.count(ident))
        try:
            return plain(client, *args, **kwargs)
        finally:
            under_way.remove(ident)

    server.stop()
    module.send_ping = send_ping
    lost = [worker.adapter._health_event, *worker.scheduler._health_events.values()]
    for event in lost:  # as LMCache does after a lookup, and the patch after a step
        event.clear()
    soon = max(waits.pauses[ident][0] for ident in threads) < 1.0
    if soon:
        until(lambda: all(len(sent.get(ident, ())) > 1 for ident in threads))
    os.kill(server.pid, signal.SIGCONT)
    if soon:
        until(lambda: all(event.is_set() for event in lost))
    module.send_ping = plain
    pings = [sent.get(ident, []) for ident in threads]
    apart = min((after - before for times in pings for before, after in pairwise(times)), default=9)
    longest = {max(waits.pauses[ident]) for ident in threads}
    return [sorted(longest), [event.is_set() for event in lost], apart >= 0.5, most]


def lost_again(server: Server, waits: Waits) -> Any:
    """The server answers a ping and is stopped before it registers the worker; how long the heartbeat waits for it."""
    worker = Asker(server, waits)
    worker.beat()
    module, plain, health = worker.module, worker.module.send_ping, worker.adapter._health_event

    def send_ping(*args: Any, **kwargs: Any) -> Any:
        module.send_ping = plain
        answer = plain(*args, **kwargs)
        server.stop()
        return answer

    health.clear()
    module.send_ping = send_ping
    waits.taken()
    worker.adapter._heartbeat._execute()
    result = [worker.adapter.is_healthy, waits.taken()]
    os.kill(server.pid, signal.SIGCONT)
    return [*result, worker.is_used_again()]


def of_one_worker(case: Callable[[Asker], Any], server: Server, waits: Waits) -> Any:
    """What a case comes to, and then: how often its worker registered, how many the server knows, and is used again."""
    if not server.serves:
        server.start()
    worker = Asker(server, waits)
    worker.beat()
    registrations = worker.count_registrations()
    result = case(worker)
    worker.beat()
    result |= {"registered": len(registrations), "known": server.ask("known"), "again": worker.is_used_again()}
    result["events"] = worker.has_its_own_event()
    worker.close()
    return result


def lost_and_forgotten(worker: Asker) -> dict[str, Any]:
    """The server does not answer a step; when it goes on it has forgotten the worker."""
    server = worker.server
    worker.stored(5)
    for name in ("a", "b"):
        worker.hit(name, 5, 65)
    server.stop()
    result = {"step": worker.step({"a": SECOND, "b": THIRD}, ["c", "d"])}
    os.kill(server.pid, signal.SIGCONT)
    return {**result, "forgotten": silence(server, AFTER_A_PING) == 0, "next step": worker.step({"e": SECOND}, ["f"])}


def forgotten_and_lost(worker: Asker) -> dict[str, Any]:
    """The server has forgotten the worker, and does not answer when that would register again."""
    server = worker.server
    worker.stored(5)
    worker.hit("a", 5, 65)
    forgotten = silence(server, AFTER_A_PING) == 0
    server.stop()
    result = {"forgotten": forgotten, "step": worker.step({"a": SECOND}, ["c"])}
    os.kill(server.pid, signal.SIGCONT)
    return result


def lost_under_a_ping(worker: Asker) -> dict[str, Any]:
    """A step is not answered under a ping, and then both are silent for long."""
    server, module, plain = worker.server, worker.module, worker.module.send_ping

    def send_ping(*args: Any, **kwargs: Any) -> Any:
        module.send_ping = lambda *args, **kwargs: False
        server.ask("raise")
        worker.step({}, ["a"])
        server.ask("well")
        silence(server, AFTER_A_PING)
        module.send_ping = plain
        return True

    module.send_ping = send_ping
    return {}


def other_transfers(server: Server, waits: Waits) -> Any:
    """Where the server itself reads and writes the engine's blocks, everything is as it was."""
    worker = Asker(server, waits)
    futures = importlib.import_module("lmcache.v1.multiprocess.futures")

    class Other:
        def create_recorded_event(self) -> None:
            return None

        def submit_store(self, *args: Any) -> Any:
            return futures.MessagingFuture().result(timeout=0.7)

        def submit_retrieve(self, *args: Any, **kwargs: Any) -> Any:
            return futures.MessagingFuture().result(timeout=0.7)

    worker.adapter.transfer_ctx = Other()
    server.leaves_out = True  # and so does everybody: nobody answers these two
    steps = [worker.step({}, ["a"]), worker.step({"b": SECOND}, [])]
    server.leaves_out = False
    worker.adapter._heartbeat._execute()
    return [*([name.replace("LMCache", ""), waited] for name, waited in steps), worker.adapter._heartbeat._interval]


class Device:
    """Stands in for a GPU's streams and events, which wait for nothing: the memory is the processor's."""

    class Stream:
        pass

    class Event:
        def record(self, *_: Any) -> None: ...

        def wait(self, *_: Any, **__: Any) -> None: ...

        def synchronize(self) -> None: ...

    stream = staticmethod(contextlib.nullcontext)

    @staticmethod
    def current_stream() -> None: ...


def asynchronous(server: Server, waits: Waits) -> Any:
    """Where stores are copied in threads of their own, as on GPUs: what a step waits for, and what is given up.

    A load to which nobody answers; a preemption while a store is not answered, and whether it waits for that; a store
    that LMCache reports as ended when the server is gone, though it has not begun to copy, and what is stored then.
    """
    transfers = "lmcache.v1.multiprocess.transfer_context."
    importlib.import_module(transfers + "async_engine_driven").torch_dev = Device
    module = importlib.import_module(transfers + "worker_transfer")
    capable, module._supports_async_primitives = module._supports_async_primitives, lambda: True
    worker = Asker(server, waits)
    module._supports_async_primitives = capable
    pending = worker.adapter.transfer_ctx._pending_stores
    worker.event = Device.Event  # type: ignore[method-assign]
    worker.fill(5, FIRST)
    worker.store("store", 5, FIRST)
    until(lambda: worker.finished("store")[0])
    worker.hit("a", 5, 65)
    server.stop()
    waits.taken()
    load = worker.step({"a": SECOND}, [])
    worker.store("not answered", 6, FIRST)
    under_way = bool(pending)
    worker.adapter.handle_preemptions(True)
    waited = under_way and not pending
    worker.fill(11, FIRST)
    worker.store("given up", 11, FIRST)
    worker.adapter._health_event.clear()  # as the heartbeat does
    given_up = worker.finished("given up")[0], bool(pending)
    worker.fill(12, FIRST)  # the blocks are another request's
    os.kill(server.pid, signal.SIGCONT)
    until(lambda: not pending)
    reader = Asker(server, waits)
    result: list[int] = []
    until(lambda: result.append(reader.hit(f"reads it {len(result)}", 11, 65)) or result[-1] > 0)
    reader.load(f"reads it {len(result) - 1}", 11, SECOND)
    return [
        load,
        waited,
        given_up,
        result[-1],
        reader.finished()[2],
        reader.holds(11, SECOND),
        reader.holds(12, SECOND),
    ]


def killed(server: Server, later: Server, waits: Waits) -> Any:
    """The server is killed under a load; two loads and two stores of one step; then another one takes its place."""
    worker = Asker(server, waits)
    worker.stored(5)
    for name in ("a", "b"):
        worker.hit(name, 5, 65)
    server.stop()  # so that it cannot answer before it is killed
    waits.under_the_next = server.kill
    result = {"step": worker.step({"a": SECOND, "b": THIRD}, ["c", "d"])}
    later.start()
    return {**result, "again": worker.is_used_again()}


def killed_under_a_store(server: Server, waits: Waits) -> Any:
    """Over shared memory, too: what is stored is skipped."""
    worker = Asker(server, waits)
    server.stop()
    waits.under_the_next = server.kill
    return worker.step({}, ["a", "b"])


def maps_nothing_of_a_dead_server(server: Server, later: Server, waits: Waits) -> Any:
    """The server is killed under a store, and another takes its place: also the name of its shared memory.

    Whether the first one's memory is still mapped, which the kernel keeps for as long.
    """
    worker = Asker(server, waits)
    pool = os.fstat(worker.adapter.transfer_ctx._engine_driven_context._shm._fd).st_ino
    server.stop()
    waits.under_the_next = server.kill
    result = worker.step({}, ["a"])
    later.start()
    again = worker.is_used_again()
    gc.collect()
    mapped = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()}
    return [result, again, str(pool) in mapped]


ONE_SERVER: tuple[Callable[[Server, Waits], Any], ...] = (
    stopped,
    stopped_after_a_load,
    answers_pings_before_the_end,
    raises,
    raises_again,
    slow,
    stopped_under_a_store,
    lookup,
    cleared,
    time_outs,
    used_after_a_lookup,
    session,
    heartbeats,
    found_again,
    lost_again,
    other_transfers,
    asynchronous,
)
ONE_WORKER: tuple[Callable[[Asker], Any], ...] = (lost_and_forgotten, forgotten_and_lost, lost_under_a_ping)
"""Of a server that knows no other: whether it knows this one is asked."""


def played(mq_timeout: float, *names: str) -> dict[str, Any]:
    """What each of these cases came to."""
    MQ_TIMEOUT[0] = mq_timeout
    importlib.import_module("lmcache.v1.multiprocess.server")
    importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")
    # All servers first: a process that has used ZMQ cannot be forked.
    server = Server()
    later = Server(server.port, held=True)
    messages = Server(held=True, shared=False)
    forgetful = Server(held=True)
    last = Server(forgetful.port, held=True)
    waits = Waits()
    cases: dict[str, Callable[[], Any]] = {one.__name__: partial(one, server, waits) for one in ONE_SERVER}
    for case in ONE_WORKER:
        cases[case.__name__] = partial(of_one_worker, case, forgetful, waits)
    cases["stopped_through_messages"] = lambda: (messages.start(), stopped(messages, waits))[1]
    cases["killed"] = lambda: killed(server, later, waits)
    cases["killed_under_a_store"] = lambda: killed_under_a_store(later if "killed" in names else server, waits)
    cases["maps_nothing_of_a_dead_server"] = lambda: maps_nothing_of_a_dead_server(forgetful, last, waits)
    came: dict[str, Any] = {}
    for name in names:
        began = time.monotonic()
        came[name] = attempted(cases[name])
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    for one in (server, later, messages, forgetful, last):
        one.kill()
    return came


def main() -> None:
    vllm = importlib.import_module("vllm")
    found = played(float(sys.argv[1]), *sys.argv[2:])
    print_result({"cases": found}, lmcache, vllm)
    leave()  # not by the adapters' shutdown: their servers are gone


if __name__ == "__main__":
    main()
