"""A finished request's blocks come back when every transfer of theirs has ended, and not before.

The scheduler acts only on completions that it can act on; the connector still sees them all.

Source: vllm#43226, vllm#46240, vllm PR#53631, vllm PR#56089, vllm PR#52954.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...sitecustomize.kit import attached
from . import early_sends
from .ledger import Held, Ids, Ledger, Sorted

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

LEDGER = "_livepatch_transfers"
"""Attribute of a scheduler: its `Ledger`. `kv-block-reaper` looks for it."""

HEARING = "_livepatch_hearing"
"""Attribute of a scheduler, while it is to be seen of what its workers have heard: what stands for its
`update_from_output`."""

ARRIVED = "_livepatch_arrived"
"""Attribute of a request that was preempted: how often, when its load had arrived."""


def ledger_of(scheduler: Any) -> Ledger:
    """The scheduler's ledger, made when it is first asked for."""
    return attached(scheduler, LEDGER, lambda: Ledger(scheduler.connector))


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    """The wrapper of each target, and what comes before it."""
    # What `finish_requests` returns of each request that it aborted: nothing, (id, client index), or the request.
    aborted_as: str = livepatch.facts.get("aborted_as", "request")
    # To 0.15 the id of a load that has arrived stays behind when its request is aborted.
    lingers: bool = livepatch.facts.get("lingers", False)

    def sorted_out(scheduler: Any, ledger: Ledger, output: Any) -> Sorted:
        requests, aside = scheduler.requests, livepatch.aside
        found = Sorted()
        # The workers hear with the next step that these have finished, and LMCache's sends none before.
        untold = scheduler.finished_req_ids if ledger.announces_always else ()
        for request_id in ledger.unsorted[0].union(output.finished_recving or ()):
            request = requests.get(request_id)
            held = ledger.held.get(request_id)
            if request is not None and request.status == type(request.status).WAITING_FOR_REMOTE_KVS:
                found.ready.add(request_id)
            elif held is not None and held.receive:
                found.received.append(held)
            elif aside and held is None:
                found.ready.add(request_id)
            else:
                found.dropped.append(("recv_unknown" if request is None else "recv_not_waiting", request_id))
        for request_id in ledger.unsorted[1].union(output.finished_sending or ()):
            request = requests.get(request_id)
            held = ledger.held.get(request_id)
            if request_id in ledger.given_up:
                found.late.append(request_id)
                found.dropped.append(("send_late", request_id))
            elif held is not None and held.send and (request_id in untold or held.announced is not None):
                # The empty send of an earlier request with its id: this one ran and ended in the one step between.
                found.dropped.append(("send_late", request_id))
            elif held is not None and held.send:
                found.sent.append(held)
            elif held is None and (aside or (request is not None and request.is_finished())):
                found.passed.add(request_id)  # of its send nothing is known here: the release acts
            elif request is None:
                found.dropped.append(("send_unknown", request_id))
            else:
                kind = "send_not_announced" if request.is_finished() else "send_not_finished"
                found.dropped.append((kind, request_id))
        if ledger.announces_always and ledger.held and output.invalid_block_ids:
            found.received += refused(scheduler, ledger, output.invalid_block_ids)
        return found

    def refused(scheduler: Any, ledger: Ledger, failed: set[int]) -> Iterator[Held]:
        """The held requests whose load LMCache has refused, or given up: to 0.4.7 only their blocks are reported."""
        for request_id, held in ledger.held.items():
            if held.receive and held.empty_send:
                blocks, *more = scheduler.kv_cache_manager.get_block_ids(request_id)
                if not more and not failed.isdisjoint(blocks):  # of several groups, a block's id would be ambiguous
                    yield held

    def actionable(scheduler: Any, output: Any) -> tuple[Ids, Ids]:
        """The received and sent ids (either may be None) of a worker's output that the scheduler is to act on now.

        A receive readies a request that waits for it. A finished request is named once, as sent, when the last of its
        transfers has ended: that frees its blocks in every release.
        """
        ledger = ledger_of(scheduler)
        try:
            found = sorted_out(scheduler, ledger, output)
        except Exception as error:
            livepatch.stand_aside("sorting completions", error)
            held = ledger.held.keys()  # whose blocks are not safe with the release: they are sorted with the next
            received, sent = output.finished_recving or set(), output.finished_sending or set()
            ledger.unsorted = ledger.unsorted[0] | (received & held), ledger.unsorted[1] | (sent & held)
            return received - held, sent - held
        ledger.unsorted = set(), set()
        for one in found.received:
            one.receive = False
        for one in found.sent:
            one.send = False
        for request_id in found.ready:
            request = scheduler.requests.get(request_id)
            if request is not None and request.num_preemptions:
                setattr(request, ARRIVED, request.num_preemptions)
        for request_id in found.late:
            ledger.came_late(request_id)
        for kind, request_id in found.dropped if ledger.empties else ():
            if kind.startswith("send"):
                ledger.empties.pop(request_id, None)
        ended = {one.request.request_id: one for one in (*found.received, *found.sent)}
        freed = {name for name, one in ended.items() if not one.receive and (one.empty_send or not one.send)}
        try:
            report(found, {name: one for name, one in ended.items() if name not in freed})
        except Exception as error:
            livepatch.stand_aside("reporting completions", error)
        return found.ready or None, freed | found.passed or None

    def as_it_should_be(scheduler: Any, ledger: Ledger, output: Any) -> bool:
        """Whether the scheduler can act on all completions as they are; then they are entered in the ledger.

        So it is in every step without a fault: `sorted_out` would find nothing else, at several times the cost.
        """
        held, requests = ledger.held, scheduler.requests
        if ledger.given_up or any(ledger.unsorted) or output.invalid_block_ids:
            return False
        received, sent = output.finished_recving or (), output.finished_sending or ()
        for request_id in received:
            request = requests.get(request_id)
            if request is None or request.num_preemptions:
                return False
            if request.status != type(request.status).WAITING_FOR_REMOTE_KVS:
                return False
        untold = scheduler.finished_req_ids if ledger.announces_always and sent else ()
        for request_id in sent:
            one = held.get(request_id)
            if one is None or one.receive or not one.send or one.announced is not None:
                return False
            if request_id in untold or request_id in received:
                return False
        for request_id in sent:
            held[request_id].send = False
        return True

    def report(found: Sorted, kept: Mapping[str, Held]) -> None:
        for kind, request_id in found.dropped:
            livepatch.tell(kind, f"dropped a completion the scheduler cannot act on: {kind}, request {request_id}")
        for request_id, held in kept.items():
            kind, ended, pending = "held_for_send", "receive", "send"
            if held.receive:
                kind, ended, pending = "held_for_receive", "send", "receive"
            livepatch.tell(kind, f"request {request_id}: its {ended} has ended, its {pending} has not; blocks are kept")

    def sort(scheduler: Any, ledger: Ledger, output: Any) -> None:
        try:
            if as_it_should_be(scheduler, ledger, output):
                return
        except Exception as error:
            livepatch.stand_aside("looking at completions", error)
        ledger.raw = output.finished_recving, output.finished_sending
        output.finished_recving, output.finished_sending = actionable(scheduler, output)

    def stand_in(scheduler: Any, ledger: Ledger, connector: Any) -> None:
        """Stand where the scheduler tells its connector, which it does first in every release.

        The connector may change what is passed to it (MoRI-IO does), so the ids are sorted between the connector's look
        at them and the scheduler's; afterwards the output has again what the connector left in it.
        """
        method = connector.update_connector_output

        def update_connector_output(output: Any) -> Any:
            result = method(output)
            ended = output.finished_recving or output.finished_sending or output.invalid_block_ids
            # Another caller's passes through.
            if ended and output is ledger.output and ledger.see is see:
                sort(scheduler, ledger, output)
            return result

        see = ledger.see = connector.update_connector_output = livepatch.over(method, update_connector_output)

    def update(original: Call, scheduler: Any, kv_connector_output: Any, *rest: Any, **named: Any) -> Any:
        output = kv_connector_output
        ledger = ledger_of(scheduler)
        connector = scheduler.connector
        if connector is None:
            if output.finished_recving or output.finished_sending or output.invalid_block_ids:
                sort(scheduler, ledger, output)
        elif connector.update_connector_output is not ledger.see:
            stand_in(scheduler, ledger, connector)
        ledger.output = output
        try:
            return original(output, *rest, **named)
        finally:
            ledger.output = None
            if ledger.raw is not None:
                output.finished_recving, output.finished_sending = ledger.raw
                ledger.raw = None

    def finish(original: Call, scheduler: Any, request_ids: Any, finished_status: Any, *rest: Any, **named: Any) -> Any:
        """Note whose receive is pending, and abort parked requests, too."""
        asked = scheduler.requests if request_ids is None else request_ids
        ids = [asked] if isinstance(asked, str) else list(asked)
        ledger = ledger_of(scheduler)
        received = scheduler.finished_recving_kv_req_ids
        deferred = getattr(scheduler, "deferred_loads", ())  # admitted, but their receive was not begun
        for request_id in ids:
            request = scheduler.requests.get(request_id)
            if request is not None and request.status == type(request.status).WAITING_FOR_REMOTE_KVS:
                if request_id not in received and request_id not in deferred:
                    ledger.receiving.add(request_id)
                if lingers:  # the next request of that id would run before its KV has arrived
                    received.discard(request_id)
                    scheduler.failed_recving_kv_req_ids.discard(request_id)
        # All: those also that would be let in while the requests before them are being finished.
        gone = [ledger.parked.pop(request_id) for request_id in list(ledger.parked)] if request_ids is None else []
        ledger.finishing = True
        try:
            result = original(None if request_ids is None else ids, finished_status, *rest, **named)
        finally:
            ledger.finishing = False
            ledger.receiving.clear()
        gone += [ledger.parked.pop(request_id) for request_id in ids if request_id in ledger.parked]
        for request in itertools.chain(*gone):
            request.status = finished_status
            if isinstance(result, list):
                result.append(request if aborted_as == "request" else (request.request_id, request.client_index))
        settle_parked(scheduler, ledger)
        return result

    def stopped_while_loading(scheduler: Any, ledger: Ledger, request: Any) -> bool:
        """Whether a preempted request loads again when its last token arrives, which was under way before.

        That takes three steps under way, or more (pipeline stages), and a release to 0.17: those to 0.26 end at the
        next step by themselves, and from 0.27 it is not let in before its steps have ended.
        Its status does not tell any more: but who neither runs nor waits for a load has no blocks, or its load has
        arrived. A streaming session has some while it waits for more input.
        """
        return (
            not ledger.finishing
            and request.num_preemptions > 0
            and getattr(request, ARRIVED, 0) != request.num_preemptions
            and getattr(request, "streaming_queue", None) is None
            and request not in scheduler.running
            and any(scheduler.kv_cache_manager.get_block_ids(request.request_id))
        )

    def connector_finished(original: Call, scheduler: Any, request: Any, *rest: Any, **named: Any) -> Any:
        """Note what is outstanding; a pending receive keeps the blocks in every release, as from 0.16."""
        ledger = ledger_of(scheduler)
        receives = request.request_id in ledger.receiving or stopped_while_loading(scheduler, ledger, request)
        manager: dict[str, Any] = vars(scheduler.kv_cache_manager) if receives else {}
        # The release frees what lies before a sliding window: a load may still write it.
        manager["remove_skipped_blocks"] = lambda *args, **kwargs: None
        try:
            announced, params = original(request, *rest, **named)
        finally:
            del manager["remove_skipped_blocks"]
        held = ledger.held.get(request.request_id)
        if held is not None and held.request is request:
            return True, params  # to 0.15 a token that was under way finishes a held request once more
        if (receives or announced) and not livepatch.aside:
            empty = receives and ledger.announces_always and not request.num_preemptions
            kept = ledger.held[request.request_id] = Held(request, receives, bool(announced), empty)
            if announced and (empty or request.request_id in ledger.empties):
                hear(scheduler)
                kept.announced = scheduler.finished_req_ids
            return True, params
        return announced, params

    def hear(scheduler: Any) -> None:
        """Look at each step that ends, until the workers have heard of the requests that must be distinguished."""
        own = vars(scheduler)
        if HEARING not in own:
            made = livepatch.around(scheduler.update_from_output, heard, scheduler)
            own[HEARING] = made, own.get("update_from_output")
            own["update_from_output"] = made

    @livepatch.lasting
    def heard(original: Call, scheduler: Any, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        finished, ledger = scheduler_output.finished_req_ids, ledger_of(scheduler)
        for one in ledger.held.values():
            if one.announced is finished:
                one.announced = None
        try:
            return original(scheduler_output, *rest, **named)
        finally:
            ledger.empties = {name: others for name, others in ledger.empties.items() if others is not finished}
            if not ledger.empties and all(one.announced is None for one in ledger.held.values()):
                hear_no_more(vars(scheduler))

    def hear_no_more(own: dict[str, Any]) -> None:
        made, before = own[HEARING]
        if own["update_from_output"] is made:  # else somebody else's is around it
            del own["update_from_output"], own[HEARING]
            if before is not None:
                own["update_from_output"] = before

    def free_blocks(original: Call, scheduler: Any, request: Any, *rest: Any, **named: Any) -> Any:
        result = original(request, *rest, **named)
        ledger: Ledger | None = getattr(scheduler, LEDGER, None)
        held = None if ledger is None else ledger.held.get(request.request_id)
        if ledger is not None and held is not None and held.request is request:
            del ledger.held[request.request_id]
            if held.send and not held.empty_send:
                ledger.give_up_send(request.request_id)
            elif held.send and held.announced is not None:
                ledger.empties[request.request_id] = held.announced
        if ledger is not None and request.request_id in ledger.parked:
            first, *others = ledger.parked.pop(request.request_id)
            scheduler.add_request(first)
            while others and getattr(first, "resumable", False):  # a streaming session's next input, or its end
                first = others.pop(0)
                scheduler.add_request(first)
            if others:
                ledger.parked[request.request_id] = others
            settle_parked(scheduler, ledger)
        return result

    def add_request(original: Call, scheduler: Any, request: Any, *rest: Any, **named: Any) -> Any:
        """A request waits until transfers of an earlier one with its id have ended: nobody could tell them apart."""
        ledger: Ledger | None = getattr(scheduler, LEDGER, None)
        held = None if ledger is None else ledger.held.get(request.request_id)
        session = held is not None and getattr(held.request, "streaming_queue", None) is not None
        if ledger is None or session or (held is None and request.request_id not in ledger.parked):
            return original(request, *rest, **named)
        ledger.parked.setdefault(request.request_id, []).append(request)
        settle_parked(scheduler, ledger)
        livepatch.tell("parked", f"request id {request.request_id} is used again while transfers of it run: it waits")
        return None

    def settle_parked(scheduler: Any, ledger: Ledger) -> None:
        """While requests are parked the scheduler counts them as unfinished, so that the engine steps on."""
        own = vars(scheduler)
        if ledger.parked and "get_num_unfinished_requests" not in own:
            count = scheduler.get_num_unfinished_requests

            def with_parked() -> int:
                state = getattr(scheduler, "_pause_state", None)  # from 0.17; a paused engine is to come to rest
                paused = state is not None and state.name != "UNPAUSED"
                return int(count()) + (0 if paused else sum(map(len, ledger.parked.values())))

            own["get_num_unfinished_requests"] = with_parked
        elif not ledger.parked:
            own.pop("get_num_unfinished_requests", None)

    # What each step calls, where no fault is: with what cannot raise. All else is the wrappers'.

    def in_each_answer(release: Call, guarded: Call) -> Call:
        def _update_from_kv_xfer_finished(scheduler: Any, kv_connector_output: Any) -> Any:
            ledger: Ledger | None = scheduler.__dict__.get(LEDGER)
            connector = scheduler.connector
            if ledger is None or connector is None or connector.update_connector_output is not ledger.see:
                return guarded(scheduler, kv_connector_output)
            ledger.output = kv_connector_output
            try:
                return release(scheduler, kv_connector_output)
            finally:
                ledger.output = None
                if ledger.raw is not None:
                    kv_connector_output.finished_recving, kv_connector_output.finished_sending = ledger.raw
                    ledger.raw = None

        return _update_from_kv_xfer_finished

    def of_the_healthy(release: Call, guarded: Call) -> Call:
        def _connector_finished(scheduler: Any, request: Any) -> Any:
            ledger: Ledger | None = scheduler.__dict__.get(LEDGER)
            request_id = request.request_id
            if (
                ledger is None
                or ledger.receiving
                or request.num_preemptions
                or request_id in ledger.held
                or request_id in ledger.empties
                or livepatch.aside
            ):
                return guarded(scheduler, request)
            answer = release(scheduler, request)
            if answer[0]:
                ledger.held[request_id] = Held(request, False, True, False)
            return answer

        return _connector_finished

    def of_the_sent(release: Call, guarded: Call) -> Call:
        def _free_blocks(scheduler: Any, request: Any) -> Any:
            ledger: Ledger | None = scheduler.__dict__.get(LEDGER)
            request_id = request.request_id
            if ledger is None or not (ledger.parked or request_id in ledger.held):
                return release(scheduler, request)
            held = ledger.held.get(request_id)
            if ledger.parked or held is None or held.request is not request or held.send:
                return guarded(scheduler, request)
            answer = release(scheduler, request)
            ledger.held.pop(request_id, None)
            return answer

        return _free_blocks

    def of_new_ids(release: Call, guarded: Call) -> Call:
        def add_request(scheduler: Any, request: Any) -> Any:
            ledger: Ledger | None = scheduler.__dict__.get(LEDGER)
            if ledger is None or not (ledger.parked or request.request_id in ledger.held):
                return release(scheduler, request)
            return guarded(scheduler, request)

        return add_request

    # Should the patch stand aside, what it holds must still not be freed before its transfers have ended.
    last = livepatch.lasting
    return {
        f"{SCHEDULER}._update_from_kv_xfer_finished": livepatch.shortcut(in_each_answer, last(update)),
        f"{SCHEDULER}.finish_requests": last(finish),
        f"{SCHEDULER}._connector_finished": livepatch.shortcut(of_the_healthy, last(connector_finished)),
        f"{SCHEDULER}._free_blocks": livepatch.shortcut(of_the_sent, last(free_blocks)),
        f"{SCHEDULER}.add_request": livepatch.shortcut(of_new_ids, last(add_request)),
        **early_sends.wrappers(livepatch),
    }
