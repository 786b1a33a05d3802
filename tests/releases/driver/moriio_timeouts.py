# mypy: disable-error-code="import-not-found"
"""Drive one release's MoRI-IO worker through peers and transfers that never end; print what happened as JSON.

Run with the release's sources and the stand-in for mori, and the bundle or not, on the path.
The first argument is how many seconds a wait may take that a fault should have ended; names behind it are of OWN_ERRORS. A case that does not go as a user
would want says so in its outcome; what to expect of which release is none of this script's business.
"""

from __future__ import annotations

from result import begin_driver, leave, print_result

begin_driver()

import contextlib
import functools
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import vllm
from mori import orders
from moriio_worker import LAYERS, STEP, Peer, Running, Sent, Worker, connector, save, set_up, spinning_ends, step, until
from ports import free_port

gc.freeze()  # nor is any of it later: a collection that looked at it all would be a pause of a second
gc.enable()

patience = 0.0
"""How many seconds a wait may take that a fault should have ended: `played` is told."""
SHORT = 0.2
"""The same where a case has gone wrong already."""
HEALTHY = 10.0
"""Longest time for what no fault is in the way of; it takes a few milliseconds."""


class World(Running):
    """A prefill worker, its peers, and what it reported as done."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        orders.let(orders.AT_ONCE)
        self.peers: list[Peer] = []
        self.done: Counter[str] = Counter()
        self.others = set(threading.enumerate())
        self.worker = Worker(**options)
        self.worker.register()

    @property
    def patience(self) -> float:
        """How long to wait for what a fault would keep from coming."""
        return min(patience, SHORT) if self.wrong else patience

    def peer(self, answers: str = "yes", value: float = 0.0) -> Peer:
        self.peers.append(Peer(answers, value))
        return self.peers[-1]

    def writer_is_dead(self) -> bool:
        """Whether the worker's writer thread has ended, which it does of an error only."""
        if not self.worker.real._writer._write_worker_started:
            return False
        own = set(threading.enumerate()) - self.others
        return not any(thread.name == "moriio-write-worker" for thread in own)

    def report(self) -> None:
        """What the worker tells the scheduler at a step's end."""
        self.done.update(self.worker.real.get_finished()[0])

    def ends(self, request: Sent, seconds: float) -> bool:
        """Whether the request is reported as done, so that its blocks come back."""

        def reported() -> bool:
            self.report()
            return self.done[request.request_id] > 0

        return bool(until(lambda: reported() or self.writer_is_dead(), seconds)) and reported()

    def expect_sent(self, request: Sent, otherwise: str, seconds: float = HEALTHY) -> None:
        """Expect the request's KV to be with its peer, the peer to know, and the request to be done."""
        sent = self.ends(request, seconds) and until(lambda: request.key in request.peer.notified, seconds)
        self.expect(sent and request.arrived(self.worker), otherwise)

    def expect_given_up(self, request: Sent) -> None:
        """Expect the request to be done, without its peer being told that it has the KV."""
        self.expect(self.ends(request, self.patience), "request never done")
        self.expect(request.key not in request.peer.notified, "peer told of KV that it has not")

    def send(self, *requests: Sent, seconds: float = HEALTHY, asked: Callable[[], None] | None = None) -> bool:
        """One step of the model that saves these requests; whether it ended."""
        metadata = step(*requests, asked=asked)
        return self.runs(lambda: save(self.worker, metadata), seconds)

    def next_is_served(self, peer: Peer | None = None, seconds: float | None = None) -> None:
        """Expect a healthy request to be served as ever."""
        orders.let(orders.AT_ONCE)
        request = Sent(peer or self.peer(), [6, 7], [1, 0])
        request.allocate(self.worker)
        # A wait that is still on holds the next request up as well.
        self.send(request, seconds=patience if seconds is None else seconds)
        self.expect_sent(request, "next not served", self.patience if seconds is None else seconds)

    def finish(self) -> None:
        """Look for requests that were reported more than once, and for what nobody will ask for again."""
        threading.Event().wait(0.05)  # several rounds of the writer thread
        self.report()
        self.expect(all(number == 1 for number in self.done.values()), "done twice")
        if not self.wrong:
            engine = self.worker.real.moriio_wrapper

            def kept() -> bool:
                writer = self.worker.real._writer
                return any((engine.done_remote_allocate_req_dict, engine.transfer_status, writer._deferred_tasks))

            self.expect(until(lambda: not kept(), HEALTHY), "something is kept")


@contextlib.contextmanager
def long_waits() -> Iterator[list[float]]:
    """The waits of a step's thread for an event of which each may take most of HANDSHAKE_SECONDS."""
    seconds = float(os.environ.get("LIVEPATCH_MORIIO_TIMEOUTS_HANDSHAKE_SECONDS", "30"))
    wait, found = threading.Event.wait, []

    def noted(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread().name == STEP and timeout is not None and timeout > seconds / 2:
            found.append(timeout)
        return wait(event, timeout)

    threading.Event.wait = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        threading.Event.wait = wait  # type: ignore[method-assign]


def healthy(world: World) -> None:
    """A request to a new peer, then one to the same peer."""
    peer = world.peer()
    for blocks, remote in (([0, 1, 2], [5, 6, 3]), ([3, 4], [0, 7])):
        request = Sent(peer, blocks, remote)
        request.allocate(world.worker)
        world.send(request)
        world.expect_sent(request, "not sent")


def late_peer(world: World) -> None:
    """Blocks at the peer, and the transfers, are there only after a while."""
    orders.let(orders.LATE)
    request = Sent(world.peer(), [1], [2])
    world.send(request)
    threading.Event().wait(0.1)
    request.allocate(world.worker)
    world.expect(until(lambda: orders.begun() == len(LAYERS), HEALTHY), "not sent")
    threading.Event().wait(0.1)
    orders.release()
    world.expect_sent(request, "not sent")


def two_to_a_new_peer(world: World) -> None:
    """Two requests of one step to a peer that was never met, and that answers when both were looked at."""
    peer = world.peer("no")
    requests = Sent(peer, [0, 1], [5, 6]), Sent(peer, [2, 3], [3, 4])
    for request in requests:
        request.allocate(world.worker)
    world.send(*requests, asked=peer.answer)
    for request in requests:
        world.expect_sent(request, "KV lost", world.patience)


def nothing_to_save(world: World) -> None:
    """A step that saves nothing, as in the middle of a chunked prefill."""
    world.send(seconds=world.patience)
    world.next_is_served(seconds=HEALTHY)


def silent_peer(world: World) -> None:
    """The peer never answers the handshake; another one does."""
    request = Sent(world.peer("no"), [0], [1])
    begin, busy = time.monotonic(), time.process_time()
    with long_waits() as waits:
        returned = world.send(request, seconds=world.patience)
    world.expect(not returned or time.process_time() - busy < (time.monotonic() - begin) / 2, "spins")
    # The model waits meanwhile.
    world.expect(len(waits) <= 1, f"waits {len(waits)} times for {len(LAYERS)} layers")
    world.expect_given_up(request)
    world.next_is_served()


def refused_handshake(world: World) -> None:
    """The peer answers the handshake with something else."""
    request = Sent(world.peer("garbage"), [0], [1])
    request.allocate(world.worker)
    world.send(request)
    world.expect_given_up(request)
    world.next_is_served()


def transfer_never_ends(world: World) -> None:
    """One of two transfers stays in progress: it may read its blocks at any time."""
    orders.let(lambda number: orders.NEVER if number == 0 else orders.AT_ONCE)
    request = Sent(world.peer(), [0], [1])
    request.allocate(world.worker)
    world.send(request)
    world.expect(until(lambda: orders.begun() == len(LAYERS), HEALTHY), "not begun")
    world.next_is_served(request.peer)
    world.report()
    world.expect(not world.done[request.request_id], "done while it is read")
    world.expect(request.key not in request.peer.notified, "peer told of KV that it has not")


def transfer_ends_late(world: World) -> None:
    """One of two transfers ends after its time, from blocks that are still its own."""
    orders.let(lambda number: orders.LATE if number == 0 else orders.AT_ONCE)
    ends_late(world)


def layer_raises_while_pending(world: World) -> None:
    """The second layer's transfer cannot be begun while the first layer's is under way."""
    orders.let(lambda number: orders.REFUSED if number == 1 else orders.LATE)
    ends_late(world, layers=1)


def ends_late(world: World, layers: int = len(LAYERS)) -> None:
    request = Sent(world.peer(), [0], [2])
    request.allocate(world.worker)
    world.send(request)
    world.expect(until(lambda: orders.begun() == len(LAYERS), HEALTHY), "not begun")
    world.next_is_served(request.peer)
    world.report()
    if world.done[request.request_id]:
        world.expect(False, "done while it is read")
        for cache in world.worker.caches.values():  # the blocks are another request's
            cache[:, request.blocks] = -1
    orders.release()
    world.expect(world.ends(request, world.patience), "request never done")
    world.expect(request.arrived(world.worker, LAYERS[:layers]), "KV of another request sent")


def transfer_fails(world: World) -> None:
    """One of two transfers fails."""
    orders.let(lambda number: orders.FAILED if number == 0 else orders.AT_ONCE)
    request = Sent(world.peer(), [0], [1])
    request.allocate(world.worker)
    world.send(request)
    world.expect_given_up(request)
    world.next_is_served(request.peer)


def transfer_of_another_fails(world: World) -> None:
    """Of two requests, the first one's transfer fails while the second one ends."""
    peer = world.peer()
    first = Sent(peer, [0], [1])
    first.allocate(world.worker)
    world.send(first)
    world.expect_sent(first, "not sent")
    failing, healthy = Sent(peer, [2], [3]), Sent(peer, [4], [5])
    # Layer by layer, in the order of the step: the failing one's first layer comes first.
    orders.let(lambda number: orders.FAILED if number == 0 else orders.AT_ONCE)
    for request in (healthy, failing):
        request.allocate(world.worker)
    world.send(failing, healthy)
    world.expect_given_up(failing)
    world.expect_sent(healthy, "healthy request charged", world.patience)


def write_raises(world: World) -> None:
    """A transfer cannot even be begun, in the second layer."""
    orders.let(lambda number: orders.REFUSED if number == 1 else orders.AT_ONCE)
    request = Sent(world.peer(), [0], [1])
    request.allocate(world.worker)
    world.send(request)
    world.expect_given_up(request)
    world.next_is_served(request.peer)


def never_allocated(world: World) -> None:
    """The peer never has blocks for the request."""
    request = Sent(world.peer(), [0], [1])
    world.send(request)
    world.expect_given_up(request)
    world.next_is_served(request.peer, HEALTHY)


def same_id_later(world: World) -> None:
    """A request fails; then one with its id is healthy."""
    orders.let(orders.FAILED)
    peer = world.peer()
    failing = Sent(peer, [0], [1])
    failing.allocate(world.worker)
    world.send(failing)
    world.expect_given_up(failing)
    world.done.clear()
    orders.let(orders.AT_ONCE)
    again = Sent(peer, [2], [3], failing.request_id)
    again.allocate(world.worker)
    world.send(again, seconds=world.patience)
    world.expect_sent(again, "next not served", world.patience)


def completed_by_waiting(world: World) -> None:
    """A transfer between GPUs of one machine that completes only within `Wait`."""
    orders.let(orders.IN_WAIT)
    request = Sent(world.peer(), [0, 1], [3, 4])
    request.allocate(world.worker)
    world.send(request)
    world.expect_sent(request, "not sent", world.patience)


def read(world: World) -> None:
    """A decode worker has a step with nothing to read; then it reads from a new peer, and in the same step again."""
    world.runs(lambda: world.worker.real.start_load_kv(step(write=False)), HEALTHY)
    peer = world.peer("no", value=3.0)
    requests = Sent(peer, [0, 1], [5, 6]), Sent(peer, [2, 3], [3, 4])
    metadata = step(*requests, write=False, asked=peer.answer)
    world.runs(lambda: world.worker.real.start_load_kv(metadata), HEALTHY)
    world.expect(all(request.arrived(world.worker) for request in requests), "KV lost")


def read_from_silent_peer(world: World) -> None:
    """A decode worker reads from a peer that never answers the handshake, then from one that does."""
    silent = Sent(world.peer("no"), [0], [1])
    lost = step(silent, write=False)
    world.runs(lambda: world.worker.real.start_load_kv(lost), world.patience)
    answering = Sent(world.peer(value=3.0), [2, 3], [3, 4])
    found = step(answering, write=False)
    world.runs(lambda: world.worker.real.start_load_kv(found), world.patience)
    world.expect(answering.arrived(world.worker), "next not served")


def own_error_in_wait(world: World) -> None:
    """The patch errs where it waits for transfers: the release's own wait still waits for them."""
    orders.let(orders.LATE)
    module = next(found for name, found in sys.modules.items() if name.endswith("moriio_timeouts.wrappers"))
    module.wait_for = None
    request = Sent(world.peer(), [0], [1])
    request.allocate(world.worker)
    world.send(request)
    engine = world.worker.real.moriio_wrapper
    too_early = until(lambda: request.key in request.peer.notified or engine.done_req_ids, 0.5)
    world.expect(not too_early, "peer told of KV that it has not")
    orders.release()
    world.expect_sent(request, "not sent")


def own_error_in_handshake(world: World) -> None:
    """The patch errs where it waits for a handshake: the release's own code waits for it."""
    peer = world.peer()
    request = Sent(peer, [0], [1])
    request.allocate(world.worker)
    world.send(request)
    world.expect_sent(request, "not sent")
    world.worker.real._ready_requests.under_way = None
    request = Sent(world.peer(), [2], [3])
    request.allocate(world.worker)
    world.send(request)
    world.expect_sent(request, "not sent")


CASES: dict[str, tuple[Callable[[World], None], dict[str, Any]]] = {
    "healthy": (healthy, {}),
    "late_peer": (late_peer, {}),
    "two_to_a_new_peer": (two_to_a_new_peer, {}),
    "nothing_to_save": (nothing_to_save, {}),
    "silent_peer": (silent_peer, {}),
    "refused_handshake": (refused_handshake, {}),
    "transfer_never_ends": (transfer_never_ends, {}),
    "transfer_ends_late": (transfer_ends_late, {}),
    "layer_raises_while_pending": (layer_raises_while_pending, {}),
    "transfer_fails": (transfer_fails, {}),
    "transfer_of_another_fails": (transfer_of_another_fails, {}),
    "write_raises": (write_raises, {}),
    "never_allocated": (never_allocated, {}),
    "same_id_later": (same_id_later, {}),
    "completed_by_waiting": (completed_by_waiting, {"backend": "xgmi"}),
    "read": (read, {"producer": False, "read": True}),
    "read_from_silent_peer": (read_from_silent_peer, {"producer": False, "read": True}),
}
OWN_ERRORS: dict[str, tuple[Callable[[World], None], dict[str, Any]]] = {
    "own_error_in_wait": (own_error_in_wait, {}),
    "own_error_in_handshake": (own_error_in_handshake, {}),
}
"""Each in a process of its own: the patch stands aside from then on."""


def drive(case: Callable[[World], None], options: dict[str, Any]) -> str:
    world = World(**options)
    with spinning_ends(world.worker, world.peers):
        case(world)
        world.finish()
    orders.let(orders.AT_ONCE)
    world.worker.close()
    return "; ".join(world.wrong) or "survives"


def port_is_taken() -> str:
    """The worker cannot listen for handshakes: another process has the port."""
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", port))
        taken.listen()
        worker = Worker(port=port)
        raised: list[Exception] = []
        ended = threading.Event()

        def register() -> None:
            try:
                worker.register()
            except Exception as error:
                raised.append(error)
            ended.set()

        threading.Thread(target=register, daemon=True).start()
        if not ended.wait(patience):
            return "never returns"
        worker.close()
    return f"raises {type(raised[0]).__name__}" if raised else "serves without listening"


def played(seconds: float, names: Collection[str] = ()) -> dict[str, Callable[[], str]]:
    """The cases that the release can have by their names, or these of OWN_ERRORS: each says what it came to."""
    global patience
    patience = seconds
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    set_up()
    threading.excepthook = lambda hook: None  # stock's writer threads die of what the outcome says
    cases = {name: OWN_ERRORS[name] for name in names} or CASES
    made: dict[str, Callable[[], str]] = {
        name: functools.partial(drive, case, options)
        for name, (case, options) in cases.items()
        if "backend" not in options or knows_xgmi()
    }
    return made if names else {**made, "port_is_taken": port_is_taken}


def knows_xgmi() -> bool:
    return hasattr(connector.MoRIIOConfig, "backend")


def main() -> None:
    outcomes = {}
    for name, case in played(float(sys.argv[1]), sys.argv[2:]).items():
        begin = time.monotonic()
        outcomes[name] = case()
        print(f"{name}: {outcomes[name]} ({time.monotonic() - begin:.2f} s)", file=sys.stderr)
    print_result({"cases": outcomes, "knows_xgmi": knows_xgmi()}, vllm)
    leave()


if __name__ == "__main__":
    main()
