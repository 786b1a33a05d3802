"""Blocks of finished requests come back although the completion of their transfer was lost.

The scheduler's part frees, by the scheduler's own way, what a request has held for longer than any transfer of its
connector takes. The worker's part lets NIXL find leases that ran out behind one that is still renewed (vllm#58222).

Source: vllm#43433, vllm#40344, vllm#58222.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ...sitecustomize.kit import Remembered, leaves

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"

NO_TIMEOUT_SECONDS = 600.0
"""Age for a connector that has no timeout of its own (MoRI-IO to 0.22.1, LMCache): others take eight minutes."""

RENEWED_SECONDS = 3600.0
"""Age for a lease that the other side renews (NIXL from 0.22.1), at least, where somebody has asked for one: its holder
may wait in a queue for longer, and only the workers hear of it. A lease that is renewed no more is theirs to end, after
30 s; by itself this patch ends none."""

REMEMBERED = 65536
"""How many freed ids are remembered, so that their completions are recognised when they come after all."""

Call = Callable[..., Any]
_STATE = "_livepatch_kv_block_reaper"
LEDGER = "_livepatch_transfers"
"""Attribute of a scheduler: what `stale-finished-recving` keeps account in."""
_UNSEEN = object()


class Watch:
    """What is known of one scheduler's held blocks."""

    __slots__ = ("age", "holds", "reaped", "receives", "receiving")

    def __init__(self, age: float) -> None:
        self.age = age  # seconds
        # Request id: when its hold began, the oldest first. (A dict would search for its first entry past all that
        # were taken from its front.)
        self.holds: OrderedDict[str, float] = OrderedDict()
        # Request id: how many completions may still come of what was freed here, the oldest first.
        self.reaped: Remembered[str, int] = Remembered(REMEMBERED)
        self.receiving: set[str] = set()  # requests that are being finished while their KV still arrives
        # Finished requests whose KV still arrives: nothing bounds that. Their hold begins when it has arrived.
        self.receives: dict[str, Any] = {}

    def late(self, output: Any, requests: Mapping[str, Any]) -> set[str]:
        """The ids of an output that were freed here; a request of the same id may wait for a receive of its own.

        Where a later request has the id, the first send that is reported counts as the earlier request's. If that was
        lost for good, the later one is reaped in its turn: late, but never while it is read.
        """
        reaped = self.reaped
        late = set()
        for name in output.finished_sending or ():
            if name in reaped and (reaped[name] or name not in requests or not requests[name].is_finished()):
                late.add(name)
        return late | {name for name in output.finished_recving or () if name in reaped and name not in requests}


def family(connector: Any) -> str:
    """Nixl, Mooncake or MoRIIO, whichever release's class it is; else the class's name."""
    for ancestor in type(connector).__mro__:
        name = ancestor.__name__
        for known in ("Nixl", "MoRIIO", "Mooncake"):
            if name.startswith(known) and not name.startswith("MooncakeStore"):
                return known
    return type(connector).__name__


def default_age(connector: Any) -> float:
    """Seconds after which no transfer of this connector can still run: above its own timeout, of children the longest.

    The transfer may begin when the timeout is nearly over, so a quarter of it and ten seconds are added.
    """
    return max((_age(leaf) for leaf in leaves(connector)), default=NO_TIMEOUT_SECONDS)


def _age(connector: Any) -> float:
    kind = family(connector)
    side = getattr(connector, "connector_scheduler", None)
    timeout: float | None = None
    if kind == "Nixl":
        lease = _lease(connector)
        if lease is not None:
            # What a decode engine keeps for a second turn has a time of its own.
            return max(_beyond(max(lease, getattr(side, "decoder_kv_blocks_ttl", 0))), RENEWED_SECONDS)
        timeout = _variable("VLLM_NIXL_ABORT_REQUEST_TIMEOUT")
    elif kind == "Mooncake":
        timeout = _variable("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT")
    elif kind == "MoRIIO":
        timeout = getattr(side, "_defer_timeout", None)
    return NO_TIMEOUT_SECONDS if timeout is None else _beyond(timeout)


def renewed(connector: Any) -> bool:
    """Whether a decode engine renews what it is to read, for as long as it waits for it: no time is past that lease."""
    return family(connector) == "Nixl" and _lease(connector) is not None


def _lease(connector: Any) -> float | None:
    lease: float | None = getattr(getattr(connector, "connector_scheduler", None), "_kv_lease_duration", None)
    return lease


def _beyond(timeout: float) -> float:
    return timeout * 1.25 + 10


def _variable(name: str) -> float | None:
    """A variable as vLLM reads it, None where this release has none of that name."""
    value = getattr(sys.modules.get("vllm.envs"), name, None)
    return None if value is None else float(value)


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    """At each target: a wrapper, or a look at its calls."""
    seconds: float = livepatch.options["IDLE_SECONDS"]
    only_idle: bool = livepatch.options["ONLY_IDLE"]
    # The connectors that lose completions in these releases; which one serves is only known now.
    needed_by: list[str] = livepatch.facts.get("needed_by", [])
    # To 0.15 `_free_request` does not learn that a receive is pending.
    knows_receives: bool = livepatch.facts.get("knows_receives", True)

    def begun(connector: Any) -> Watch | None:
        """The watch of a scheduler with this connector; None where that needs none and nobody asked for one."""
        if connector is None:
            return None
        names = " and ".join(sorted({family(leaf) for leaf in leaves(connector)}))
        if not livepatch.asked and not any(family(leaf) in needed_by for leaf in leaves(connector)):
            livepatch.count("not_needed")
            return None
        if not (livepatch.asked or seconds) and any(map(renewed, leaves(connector))):
            livepatch.count("not_needed")
            return None
        own = default_age(connector)
        age = seconds or own
        early = f"; that is sooner than the {own:g} s at which {names} can be relied on to have ended" * (age < own)
        livepatch.tell("watching", f"blocks held for {names} come back after {age:g} s{early}")
        return Watch(age)

    def reap(scheduler: Any, state: Watch) -> None:
        """Free what is due; costs nothing for what is not."""
        holds = state.holds
        if only_idle and scheduler.running:
            return
        now = time.monotonic()
        while holds:
            request_id, since = next(iter(holds.items()))
            if now - since < state.age:
                return
            del holds[request_id]
            request = scheduler.requests.get(request_id)
            if request is None or not request.is_finished():  # another request has its id
                continue
            scheduler._free_blocks(request)
            state.reaped.remember(request_id, state.reaped.get(request_id, 0) + 1)
            livepatch.tell("reaped", f"freed the blocks of request {request_id}, held for {now - since:.0f} s")

    def finish(original: Call, scheduler: Any, request_ids: Any, *rest: Any, **named: Any) -> Any:
        state: Watch = getattr(scheduler, _STATE)
        if knows_receives:
            return original(request_ids, *rest, **named)
        asked = scheduler.requests if request_ids is None else request_ids
        ids = [asked] if isinstance(asked, str) else list(asked)
        for request_id in ids:
            request = scheduler.requests.get(request_id)
            waits = request is not None and request.status == type(request.status).WAITING_FOR_REMOTE_KVS
            if waits and request_id not in scheduler.finished_recving_kv_req_ids:
                state.receiving.add(request_id)
        try:
            # What was asked for may be an iterator, used up by now.
            return original(ids, *rest, **named)
        finally:
            state.receiving.clear()

    def free_request(original: Call, scheduler: Any, request: Any, *rest: Any, **named: Any) -> Any:
        state: Watch = getattr(scheduler, _STATE)
        request_id = request.request_id
        delayed = rest[0] if rest else named.get("delay_free_blocks", False)  # from 0.16 on
        receives = delayed or request_id in state.receiving
        result = original(request, *rest, **named)
        if scheduler.requests.get(request_id) is request:
            ledger = vars(scheduler).get(LEDGER)
            known = None if ledger is None else ledger.held.get(request_id)
            if receives or (known is not None and known.receive):  # its blocks are being written to
                livepatch.count("receive_pending")
                state.receives[request_id] = request
            else:
                state.holds[request_id] = time.monotonic()
                state.holds.move_to_end(request_id)
        return result

    def freed(scheduler: Any, request: Any, *rest: Any, **named: Any) -> None:
        state: Watch = getattr(scheduler, _STATE)
        if state.holds or state.receives:
            state.holds.pop(request.request_id, None)
            state.receives.pop(request.request_id, None)

    def added(scheduler: Any, request: Any, *rest: Any, **named: Any) -> None:
        # To 0.21 the engine sleeps while blocks are held and nothing else is to do: who comes next finds them free.
        state: Watch = getattr(scheduler, _STATE)
        ledger = vars(scheduler).get(LEDGER)
        # One whose id is held is to be parked behind that first, and let in when the blocks come back.
        known = ledger is not None and (request.request_id in ledger.held or request.request_id in ledger.parked)
        if state.holds and not known:
            reap(scheduler, state)

    def scheduled(answer: Any, scheduler: Any, *rest: Any, **named: Any) -> None:
        state: Watch = getattr(scheduler, _STATE)
        if state.holds:
            reap(scheduler, state)

    def transfers_ended(original: Call, scheduler: Any, kv_connector_output: Any, *rest: Any, **named: Any) -> Any:
        state: Watch = getattr(scheduler, _STATE)
        if not (state.reaped or state.receives):
            return original(kv_connector_output, *rest, **named)
        received = kv_connector_output.finished_recving
        arrived = state.receives.keys() & received if received else ()
        # `stale-finished-recving` knows itself what is late.
        if not state.reaped or LEDGER in vars(scheduler):
            result = original(kv_connector_output, *rest, **named)
        else:
            result = without_late(original, scheduler, kv_connector_output, *rest, **named)
        for request_id in arrived:
            request = state.receives.pop(request_id, None)
            if request is not None and scheduler.requests.get(request_id) is request:  # kept for its send
                state.holds[request_id] = time.monotonic()
        return result

    def without_late(original: Call, scheduler: Any, output: Any, *rest: Any, **named: Any) -> Any:
        """Leave out what was freed already, between the connector's look at the ids (which may add some) and ours."""
        state, connector = vars(scheduler)[_STATE], scheduler.connector
        held: list[tuple[Any, Any]] = []

        def drop() -> None:
            late = state.late(output, scheduler.requests)
            for request_id in sorted(late):
                livepatch.count("late")
                if request_id in (output.finished_sending or ()):
                    state.reaped[request_id] = max(0, state.reaped[request_id] - 1)
                livepatch.say("late", f"dropped the completion of request {request_id}, whose blocks were freed before")
            if late:
                held.append((output.finished_recving, output.finished_sending))
                output.finished_recving = set(output.finished_recving or ()) - late
                output.finished_sending = set(output.finished_sending or ()) - late

        def see(looked_at: Any) -> Any:
            result = connector_sees(looked_at)
            if looked_at is output:
                try:
                    drop()
                except Exception as error:  # the release's own code is what calls this
                    livepatch.stand_aside("leaving out late completions", error)
            return result

        if connector is None:
            drop()
        else:
            own = vars(connector).get("update_connector_output", _UNSEEN)
            connector_sees = connector.update_connector_output
            connector.update_connector_output = see
        try:
            return original(output, *rest, **named)
        finally:
            if held:
                output.finished_recving, output.finished_sending = held[0]
            if connector is None:
                pass
            elif own is _UNSEEN:
                del connector.update_connector_output
            else:
                connector.update_connector_output = own

    def notifications(original: Call, worker: Any, *rest: Any, **named: Any) -> Any:
        """NIXL looks next for leases that ran out, and stops at the first that did not."""
        result = original(*rest, **named)
        leases: dict[str, float] = worker._reqs_to_send
        now = time.perf_counter()  # the clock of the leases
        # At most once a second, and only where something is stranded: the order is put right, no lease is touched.
        if len(leases) > 1 and now >= vars(worker).get(_STATE, 0.0):
            setattr(worker, _STATE, now + 1)
            if next(iter(leases.values())) > now >= min(leases.values()):
                livepatch.count("stranded", sum(expires <= now for expires in leases.values()))
                worker._reqs_to_send = dict(sorted(leases.items(), key=itemgetter(1)))
        return result

    watched: dict[str, Any] = {
        "finish_requests": finish,
        "_free_request": free_request,
        "_free_blocks": livepatch.before(freed),
        "add_request": livepatch.before(added),
        "_update_after_schedule": livepatch.after(scheduled),
        # What was freed here stays so when the patch stands aside: its completions must still be left out.
        "_update_from_kv_xfer_finished": livepatch.lasting(transfers_ended),
    }

    def made(_: None, scheduler: Any, *rest: Any, **named: Any) -> None:
        """Watch a scheduler whose connector needs it. One with another has nothing of this patch."""
        state = begun(scheduler.connector)
        if state is not None:
            setattr(scheduler, _STATE, state)
            for name, wrapper in watched.items():
                livepatch.around_its(scheduler, name, wrapper)

    return {
        f"{SCHEDULER}.__init__": livepatch.after(made),
        f"{NIXL}.worker:NixlConnectorWorker._get_new_notifs": notifications,
        f"{NIXL}.pull_worker:NixlPullConnectorWorker._get_new_notifs": notifications,
    }
