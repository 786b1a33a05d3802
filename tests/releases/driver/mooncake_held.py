"""Let a prefill engine's write fail, or take too long, and come after all; print what decode's requests have, as JSON.

Decode is the release's scheduler and its connector's worker, with a model that writes one number into each block; what
comes late comes through Mooncake's real engine. `mooncake_held.py PATIENCE CASE...`, as `mooncake_layerwise.py`.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import mooncake_engines as engines  # its first lines are this driver's too

# isort: split
import contextlib
import copy
import io
import pickle
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any

import real_scheduler as real
import zmq
from mooncake_engines import PATIENCE, SIZE
from result import wait
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorWorkerMetadata

ANOTHER = 70000.0
"""Added to what prefill computes: what comes late is somebody else's."""
TOKENS = 16
"""How many a request computes whose prompt takes the rest of what the model may have."""
PLACES = 8
"""Blocks of a prompt."""


class Reader(pickle.Unpickler):
    """As in a scheduler's process in which the bundle is not."""

    def find_class(self, module: str, name: str) -> Any:
        assert module.partition(".")[0] in ("builtins", "vllm"), f"{module}.{name} is the bundle's"
        return super().find_class(module, name)


def joined(output: Any, multiple: bool) -> Any:
    """A worker's output as the release's executor gives it to the scheduler, of two workers.

    The second says the same, by keys of its own. With `multiple` it goes by way of MultiConnector's classes.
    """
    outputs = [copy.copy(output), copy.copy(output)]
    if output.kv_connector_output is None:
        return outputs
    own, other = (copy.copy(output.kv_connector_output) for _ in outputs)
    outputs[0].kv_connector_output, outputs[1].kv_connector_output = own, other
    meta = own.kv_connector_worker_meta
    if meta is not None:
        events = {(mark, f"{key}-2", *rest): 1 for mark, key, *rest in meta.completed_store_events}
        other.kv_connector_worker_meta = type(meta)(events)
        if multiple:
            for one in (own, other):
                one.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata((None, one.kv_connector_worker_meta))
    for one in outputs:
        one.kv_connector_output = Reader(io.BytesIO(pickle.dumps(one.kv_connector_output))).load()
    return outputs


class Door:
    """A port through which prefill's worker is reached, and that can be closed as a process's end closes it."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                one = self._listener.accept()[0]
            except OSError:
                return
            other = socket.create_connection(("127.0.0.1", self._to))
            self._open += [one, other]
            for pair in ((one, other), (other, one)):
                threading.Thread(target=passed_on, args=pair, daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, *self._open):
            hung_up(one)


def passed_on(source: socket.socket, place: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            place.sendall(data)
    hung_up(place)


def hung_up(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


class Delivered:
    """A connector, of which one method is another's."""

    def __init__(self, own: Any, deliver: Any) -> None:
        self._own, self.update_connector_output = own, deliver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class World:
    """A prefill engine, and a decode engine whose requests it serves."""

    def __init__(self, model_config: Any) -> None:
        self.pair = engines.Pair(model_config)
        self.prefill, self.decode, self.link = self.pair.prefill, self.pair.decoding, self.pair.prefill.link
        self.prefill.again = ANOTHER
        worker = self.decode.side.worker
        self.door = Door(self.prefill.worker.side_channel_port)
        worker._remote_agents["prefill"] = {0: {0: self.door.address}}
        worker._tp_size["prefill"] = 1
        self.aggregator = KVOutputAggregator(2)
        self.update = self.decode.scheduler.update_from_output
        self.decode.scheduler.update_from_output = self.updated
        self.several(False)
        self.decode.step()
        self.recomputes(True)

    def several(self, multiple: bool) -> None:
        """Whether decode's connector is the second one of a MultiConnector."""
        connector = self.decode.scheduler.connector
        self.multiple = multiple
        multi = MultiConnector.__new__(MultiConnector)
        multi._connectors = [SimpleNamespace(update_connector_output=lambda output: None), connector]
        self.deliver = multi.update_connector_output if multiple else connector.update_connector_output

    def updated(self, scheduled: Any, output: Any) -> Any:
        """A step's end, with two workers."""
        joint = self.aggregator.aggregate(joined(output, self.multiple))
        scheduler = self.decode.scheduler
        own = scheduler.connector
        scheduler.connector = Delivered(own, self.deliver)
        try:
            return self.update(scheduled, joint)
        finally:
            scheduler.connector = own

    def recomputes(self, value: bool) -> None:
        """`kv_load_failure_policy`."""
        self.decode.scheduler.recompute_kv_load_failures = value

    def load(self, name: str, content: int) -> Any:
        """A request whose KV prefill has, and that decode has asked it for."""
        self.prefill.compute(name, content=content)
        for _ in range(5):
            self.prefill.step()
        where = {"remote_engine_id": "prefill", "remote_bootstrap_addr": f"http://127.0.0.1:{self.prefill.side.port}"}
        request = self.decode.add(
            f"d-{name}", content=content, tokens=TOKENS, do_remote_prefill=True, transfer_id=name, **where
        )
        self.decode.step()
        return request

    def runs(self, request: Any) -> bool:
        """Whether decode's request comes to run."""

        def running() -> bool:
            self.decode.step()
            return request in self.decode.scheduler.running and request.num_computed_tokens >= request.num_prompt_tokens

        return wait(running, PATIENCE)

    def right(self, request: Any, content: int) -> bool:
        """Whether a running request has what was computed for the whole blocks of its prompt."""
        whole = request.num_prompt_tokens // SIZE
        return self.decode.computed(self.decode.blocks(request.request_id)[:whole], content)

    def fill(self) -> list[tuple[Any, int]]:
        """Others take all blocks that are free, and go on running."""
        others = []
        while real.free_blocks(self.decode.scheduler) > 2 * PLACES:
            content = 30 + len(others)
            others.append((self.decode.add(f"other-{content}", 4 * SIZE, content, tokens=100), content))
            assert self.runs(others[-1][0])
        return others

    def over(self, *requests: Any) -> None:
        for request in requests:
            self.decode.abort(request.request_id)
        self.decode.step()

    def held(self) -> int:
        """Blocks that nobody has, and that are not free."""
        used = set()
        for name in self.decode.scheduler.requests:
            used.update(self.decode.blocks(name))
        return self.decode.taken() - len(used)

    def come_back(self, number: int = 0) -> bool:
        """Whether they are so few in the end."""
        return wait(lambda: (self.decode.step(), self.held() == number)[1], PATIENCE)


def failed(world: World) -> Any:
    """A write fails, and comes late; decode computes the request itself meanwhile."""
    world.link.refuse = 1
    request = world.load("failed", 1)
    runs = world.runs(request)
    held = world.held()
    before = runs and world.right(request, 1)
    world.link.later()
    after = runs and world.right(request, 1)
    world.over(request)
    return runs, before, after, held


def failed_behind_a_hit(world: World) -> Any:
    """The same, of a prompt of which decode has the first blocks; its connector is one of several."""
    world.several(True)
    first = world.decode.add("first", prompt=3 * SIZE, content=2, tokens=1)
    assert wait(lambda: (world.decode.step(), first.request_id not in world.decode.scheduler.requests)[1])
    world.link.refuse = 1
    request = world.load("hit", 2)
    runs = world.runs(request)
    before = runs and world.right(request, 2)
    world.link.later()
    after = runs and world.right(request, 2)
    world.over(request)
    world.several(False)
    return world.link.writes[-1], runs, before, after


def given_away(world: World) -> Any:
    """A write fails, and so does its request; the blocks are others' when it comes late."""
    world.recomputes(False)
    world.link.refuse = 1
    request = world.load("given-away", 3)
    ended = wait(lambda: (world.decode.step(), request.is_finished())[1], PATIENCE)
    world.decode.step()
    others = world.fill()
    before = all(world.right(*other) for other in others)
    world.link.later()
    after = all(world.right(*other) for other in others)
    world.recomputes(True)
    world.over(request, *(other for other, _ in others))
    return ended, len(others) > 1, before, after


def overdue(world: World) -> Any:
    """A write takes longer than decode waits; then it comes, and is answered."""
    held = world.held()
    world.link.open.clear()
    with hurry(world):
        request = world.load("overdue", 4)
        runs = world.runs(request)
    before = runs and world.right(request, 4)
    more = world.held() - held
    world.link.open.set()
    assert wait(lambda: world.link.begun == world.link.ended)
    after = runs and world.right(request, 4)
    back = world.come_back(held)
    world.over(request)
    return runs, before, after, more, back


def gone(world: World) -> Any:
    """So many blocks are held that a load is not begun, and prefill lets go of it; then prefill's process ends.

    What was held for this one comes back when decode would have given up; for the others it waits longer here.
    """
    world.link.refuse = 1
    with hurry(world, 20):
        request = world.load("gone", 5)
    runs = world.runs(request)
    held, begun = world.held(), world.link.begun
    another = world.load("another", 6)
    computed = world.runs(another) and world.right(another, 6)
    asked = world.link.begun > begun
    let_go = wait(lambda: (world.prefill.step(), "p-another" not in world.prefill.scheduler.requests)[1], PATIENCE)
    world.over(request, another)
    world.door.close()
    return runs, held, asked, computed, let_go, world.come_back(max(0, held - PLACES))


class hurry:
    """Decode waits for an answer for a second, or so many, and not for the release's time.

    It ends when decode's other thread has made its socket: on a busy machine that may be later than the step.
    """

    def __init__(self, world: World, seconds: int = 1) -> None:
        self._made = False
        self._module, self._seconds = world.decode.side.module, seconds
        self._own = self._module.make_zmq_socket

    def __enter__(self) -> None:
        def time_of(option: int, value: int) -> int:
            return 1000 * self._seconds if option == zmq.RCVTIMEO else value

        def make(*args: Any, **kwargs: Any) -> Any:
            made = self._own(*args, **kwargs)
            options = made.setsockopt
            made.setsockopt = lambda option, value: options(option, time_of(option, value))
            self._made = True
            return made

        self._module.make_zmq_socket = make

    def __exit__(self, *error: object) -> None:
        assert wait(lambda: self._made)
        self._module.make_zmq_socket = self._own


CASES = (overdue, failed, failed_behind_a_hit, given_away, gone)
"""The one whose time is a second comes first: nothing else is held then, that would take it over the share."""


def main() -> None:
    engines.drive(lambda model_config: engines.played(CASES, World(model_config), sys.argv[2:]))


if __name__ == "__main__":
    main()
