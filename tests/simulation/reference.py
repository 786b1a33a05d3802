# mypy: disable-error-code="import-not-found"
"""A scheduler policy that is right because it cannot be deceived, and some that are wrong.

The reference stands around the real scheduler, without a look at our patches. It does not believe completions: it asks
the world which transfers are really outstanding, and holds a request's blocks, and its id, until none is. So a world in
which it fails is itself wrong. The wrong ones differ from it in one thing each: a set of worlds that lets one of them
pass looks at too little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import real_scheduler as real

if TYPE_CHECKING:
    from tests.simulation.transfers import Client
    from tests.simulation.world import World


class Reference:
    """Hold until all transfers have ended."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.scheduler = scheduler = world.scheduler
        self.parked: dict[str, Any] = {}
        self.free = scheduler._free_blocks
        self.update = scheduler._update_from_kv_xfer_finished
        self.handle = scheduler._handle_invalid_blocks
        world.foresees = True
        scheduler.requires_kv_delivery = False  # a token that is dropped at each preemption never ends: vllm#49674
        self.add = scheduler.add_request
        self.finish = scheduler.finish_requests
        self.count = scheduler.get_num_unfinished_requests
        scheduler._free_blocks = self.free_blocks
        scheduler._update_from_kv_xfer_finished = self.transfers_ended
        scheduler._handle_invalid_blocks = self.handle_invalid_blocks
        scheduler.add_request = self.add_request
        scheduler.finish_requests = self.finish_requests
        scheduler.get_num_unfinished_requests = self.get_num_unfinished_requests

    def client(self, request: Any) -> Client:
        return self.world.by_request[id(request)]

    def outstanding(self, request: Any) -> bool:
        """Whether a transfer of the request may still touch its blocks, or be reported."""
        return any(each.outstanding for each in self.client(request).transfers)

    def free_blocks(self, request: Any) -> None:
        if not self.outstanding(request):
            self.free(request)

    def received(self, request: Any) -> bool:
        """Whether a request may run that a receive was reported of."""
        loading = real.status_name(request) == "WAITING_FOR_REMOTE_KVS"
        return loading and not self.client(request).outstanding("load")

    def transfers_ended(self, output: Any) -> None:
        requests = self.scheduler.requests
        recving = {name for name in output.finished_recving or () if name in requests and self.received(requests[name])}
        self.update(real.transfers(recving, self.also_sent(output)))
        for request in [each for each in requests.values() if each.is_finished() and not self.outstanding(each)]:
            self.free(request)
        lingering = self.scheduler.finished_recving_kv_req_ids
        lingering -= {name for name in lingering if name not in requests}
        for name in [name for name in self.parked if name not in requests]:
            self.add(self.parked.pop(name))

    def handle_invalid_blocks(self, blocks: Any, *args: Any) -> Any:
        """Nobody finds in the prefix cache what was not loaded."""
        self.scheduler.kv_cache_manager.evict_blocks(set(blocks))
        return self.handle(blocks, *args)

    def also_sent(self, output: Any) -> set[str]:
        """Sends that the release's own code is told of: none, since it would free by them."""
        return set()

    def add_request(self, request: Any) -> None:
        held = self.scheduler.requests.get(request.request_id)
        if held is not None and held.is_finished():
            self.parked[request.request_id] = request
        else:
            self.add(request)

    def finish_requests(self, request_ids: Any, status: Any) -> Any:
        for name in [request_ids] if isinstance(request_ids, str) else request_ids:
            self.parked.pop(name, None)
        return self.finish(request_ids, status)

    def get_num_unfinished_requests(self) -> int:
        return int(self.count()) + len(self.parked)


class FirstCompletion(Reference):
    """Wrong: frees as soon as one of a request's transfers has ended."""

    def outstanding(self, request: Any) -> bool:
        transfers = self.client(request).transfers
        return bool(transfers) and all(each.outstanding for each in transfers[-2:])


class SendsOnly(Reference):
    """Wrong: a load that is under way holds nothing."""

    def outstanding(self, request: Any) -> bool:
        return self.client(request).outstanding("send")


class LoadsOnly(Reference):
    """Wrong: an announced send holds nothing."""

    def outstanding(self, request: Any) -> bool:
        return self.client(request).outstanding("load")


class DropsReceives(Reference):
    """Wrong: a receive of a request whose client has gone is dropped as stale, and its blocks never come back."""

    def outstanding(self, request: Any) -> bool:
        client = self.client(request)
        aborted_load = any(each.kind == "load" and each.ended for each in client.transfers) and not client.delivered
        return super().outstanding(request) or (client.ended == "aborted" and aborted_load)


class PromotesAtSend(Reference):
    """Wrong: takes any completion of an id for the receive that it waits for."""

    def transfers_ended(self, output: Any) -> None:
        output.finished_recving = set(output.finished_recving or ()) | set(output.finished_sending or ())
        super().transfers_ended(output)

    def received(self, request: Any) -> bool:
        return bool(real.status_name(request) == "WAITING_FOR_REMOTE_KVS")


class BelievesDuplicates(Reference):
    """Wrong: whatever receive comes for a request that has ended frees its blocks."""

    def transfers_ended(self, output: Any) -> None:
        for name in output.finished_recving or ():
            request = self.scheduler.requests.get(name)
            if request is not None and request.is_finished():
                self.free(request)
        super().transfers_ended(output)


class BelievesSends(Reference):
    """Wrong: whatever send comes for a request that has ended frees its blocks."""

    def also_sent(self, output: Any) -> set[str]:
        requests = self.scheduler.requests
        return {name for name in output.finished_sending or () if name in requests and requests[name].is_finished()}

    def free_blocks(self, request: Any) -> None:
        self.free(request)


class AddsAtOnce(Reference):
    """Wrong: a request whose id is still held takes the old one's place."""

    def add_request(self, request: Any) -> None:
        held = self.scheduler.requests.get(request.request_id)
        if held is not None and held.is_finished():
            del self.scheduler.requests[request.request_id]
        self.add(request)


class ForgetsParked(Reference):
    """Wrong: a request that waits for its id is not counted, and so its engine may sleep."""

    def get_num_unfinished_requests(self) -> int:
        return int(self.count())


class LoadsDeadlock(Reference):
    """Wrong: of two requests whose loads have arrived, each waits until the other's blocks are free."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.allocate = self.scheduler.kv_cache_manager.allocate_slots
        self.scheduler.kv_cache_manager.allocate_slots = self.allocate_slots

    def arrived(self, request: Any) -> bool:
        loads = [each for each in self.client(request).transfers if each.kind == "load"]
        waits = real.status_name(request) in ("WAITING", "WAITING_FOR_REMOTE_KVS")
        holds = any(map(any, self.world.tables(request.request_id)))
        return waits and holds and bool(loads) and all(each.reported for each in loads)

    def allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        others = [each for each in self.scheduler.requests.values() if each is not request and self.arrived(each)]
        return None if others and self.arrived(request) else self.allocate(request, *args, **kwargs)


class PastTheFence(Reference):
    """Wrong: gives blocks back by the manager's own way, past the fence of a step in flight."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.free = self.free_at_once

    def free_at_once(self, request: Any) -> None:
        self.scheduler.kv_cache_manager.free(request)
        del self.scheduler.requests[request.request_id]


WRONG: dict[str, Callable[[World], object]] = {
    "first-completion": FirstCompletion,
    "sends-only": SendsOnly,
    "loads-only": LoadsOnly,
    "drops-receives": DropsReceives,
    "promotes-at-send": PromotesAtSend,
    "believes-duplicates": BelievesDuplicates,
    "believes-sends": BelievesSends,
    "adds-at-once": AddsAtOnce,
    "forgets-parked": ForgetsParked,
    "loads-deadlock": LoadsDeadlock,
    "past-the-fence": PastTheFence,
}
"""Each wrong policy by its name on the command line."""

POLICIES: dict[str, Callable[[World], object]] = {"reference": Reference, **WRONG}
