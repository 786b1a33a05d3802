"""Let a prefill engine be refused, cut off, silent or gone while it writes or not; print what decode's requests have.

As `mooncake_held.py`: decode is the release's scheduler and its connector's worker, and Mooncake's real engine writes.
`mooncake_unreachable.py PATIENCE CASE...`.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import mooncake_engines as engines  # its first lines are this driver's too

# isort: split
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mooncake_held import ANOTHER, Door, World, hung_up, hurry
from result import wait

FIRST = 2.0
"""Seconds in which the patch looks several times."""
SHORT = 3
"""Seconds that decode waits for an answer, in place of the release's 540."""


class Silent:
    """A port that answers nothing: its queue is full, and the kernel drops whatever else comes."""

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen(0)
        place = self._listener.getsockname()
        self.address = f"tcp://127.0.0.1:{place[1]}"
        self._fill = [socket.socket() for _ in range(4)]
        for one in self._fill:
            one.setblocking(False)
            one.connect_ex(place)

    def close(self) -> None:
        for one in (self._listener, *self._fill):
            hung_up(one)


class Unreachable(World):
    """A prefill engine that decode reaches by more names than one."""

    def named(self, engine: str, address: str) -> None:
        worker = self.decode.side.worker
        worker._remote_agents[engine] = {0: {0: address}}
        worker._tp_size[engine] = 1
        sizes = getattr(getattr(worker, "kv_topo", None), "remote_tp_size", None)
        if sizes is not None:
            sizes[engine] = 1

    def through(self, engine: str) -> Door:
        """A door to prefill, by which decode knows it as this engine."""
        door = Door(self.prefill.worker.side_channel_port)
        self.named(engine, door.address)
        return door

    def ask(self, name: str, content: int, engine: str) -> Any:
        """As `load`, of an engine by its name."""
        self.prefill.compute(name, content=content)
        for _ in range(5):
            self.prefill.step()
        where = {"remote_engine_id": engine, "remote_bootstrap_addr": f"http://127.0.0.1:{self.prefill.side.port}"}
        request = self.decode.add(f"d-{name}", content=content, do_remote_prefill=True, transfer_id=name, **where)
        request.sampling_params.max_tokens = request.max_tokens = 16
        self.decode.step()
        return request

    def waits(self, request: Any) -> bool:
        """Whether a request waits for what it has asked for, for a while."""
        return not wait(lambda: (self.decode.step(), request.status.name != "WAITING_FOR_REMOTE_KVS")[1], FIRST)

    def loaded(self, request: Any, content: int) -> bool:
        """Whether a running request has in its whole blocks what prefill has computed."""
        whole = request.num_prompt_tokens // engines.SIZE
        blocks = self.decode.blocks(request.request_id)[:whole]
        right = [ANOTHER + engines.contents(content, place, engines.SIZE) for place in range(whole)]
        return bool(self.decode.side.holds(blocks) == right)

    @contextmanager
    def writing(self, name: str, content: int, engine: str) -> Iterator[Any]:
        """A request for which prefill writes at the end, and is about to before."""
        begun = self.prefill.link.begun
        self.link.open.clear()
        request = self.ask(name, content, engine)
        assert wait(lambda: self.prefill.link.begun > begun)
        yield request
        self.link.open.set()
        assert wait(lambda: self.link.begun == self.link.ended)


def refused(world: Unreachable) -> Any:
    """New connections are refused, as by a firewall; the one by which decode asked lives on, and prefill writes."""
    door = world.through("refused")
    with world.writing("refused", 1, "refused") as request:
        hung_up(door._listener)
        waits = world.waits(request)
        others = world.fill()
        before = all(world.right(*other) for other in others)
    after = all(world.right(*other) for other in others)
    loaded = world.runs(request) and world.loaded(request, 1)
    world.over(request, *(other for other, _ in others))
    door.close()
    return waits, before, after, loaded


def cut(world: Unreachable) -> Any:
    """The connection is ended too, as by a firewall that answers with resets; prefill lives, and writes."""
    door = world.through("cut")
    with world.writing("cut", 2, "cut") as request:
        door.close()
        waits = world.waits(request)
        runs = not waits and world.runs(request)
        others = world.fill()
        held = world.held()
        before = all(world.right(*other) for other in others) and (waits or world.right(request, 2))
    after = all(world.right(*other) for other in others) and (waits or world.right(request, 2))
    if not waits:  # else its end would never be told, and its blocks would be no others' for good
        world.over(request)
    world.over(*(other for other, _ in others))
    return waits, runs, held, before, after


def silent(world: Unreachable) -> Any:
    """Two loads are asked for at an address that drops what comes: nothing left. Another engine is well."""
    port = Silent()
    world.named("silent", port.address)
    held = world.held()
    with hurry(world):
        requests = [world.ask(f"silent-{number}", 3 + number, "silent") for number in (0, 1)]
        run = [world.runs(request) for request in requests]
    more = world.held() - held
    world.over(*requests)
    door = world.through("well")
    well = world.ask("well", 5, "well")
    loaded = world.runs(well) and world.loaded(well, 5)
    world.over(well)
    port.close()
    door.close()
    return run, more, loaded


def deleted(world: Unreachable) -> Any:
    """A write fails, and the pod is deleted: that closes its connections, and nothing is at its address any more."""
    door = world.through("deleted")
    held = world.held()
    with hurry(world, SHORT):
        world.link.refuse = 1
        request = world.ask("deleted", 6, "deleted")
        wait(lambda: not world.link.refuse, FIRST)
        runs = world.runs(request)
    more = world.held() - held
    where = int(door.address.rpartition(":")[2])
    door.close()
    port = Silent(where)
    other = world.through("other")
    well = world.ask("other", 8, "other")
    loaded = world.runs(well) and world.loaded(well, 8)
    world.over(well, request)
    back = world.come_back(held)
    port.close()
    other.close()
    return runs, more, loaded, back


def empty(world: Unreachable) -> Any:
    """Whether nothing is held: then the release can reset its prefix cache, with no request there."""
    return world.held(), world.decode.scheduler.reset_prefix_cache()


CASES = (refused, silent, deleted, empty, cut)


def main() -> None:
    engines.drive(lambda model_config: engines.played(CASES, Unreachable(model_config), sys.argv[2:]))


if __name__ == "__main__":
    main()
