"""One side of a comparison: a deployment that is asked undisturbed, loaded and hurt, and looked at afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

import aiohttp
from vllm_livepatch.tools.lab import faults, logs, topology
from vllm_livepatch.tools.lab.client import Client, RequestFailed
from vllm_livepatch.tools.lab.faults import Fault
from vllm_livepatch.tools.lab.supervisor import PartFailed, Supervisor, together
from vllm_livepatch.tools.lab.tally import KINDS, Tally
from vllm_livepatch.tools.lab.topology import Deployment, Topology
from vllm_livepatch.tools.lab.watch import Watch

USAGE = "vllm:kv_cache_usage_perc"
LOADED = "vllm:external_prefix_cache_hits_total"
_REST_SECONDS = 4.0
"""What an engine costs that holds nothing, to compare with."""
_PROGRESS_SECONDS = 15.0
_FIRST_TRIES = 5
"""A first transfer shakes hands with a peer that may still be busy: upstream gives that 5 s, then fails the request."""
_NUDGE = ("w1 w2 w3 w4",)
_FIRST = (" ".join(f"w{number}" for number in range(3 * topology.BLOCK_SIZE)),)
"""Less than a block is not transferred."""
_NUDGE_SECONDS = 2.0
LOADING = "loading"
"""A file beside the parts' logs, from when the load begins."""

Say = Callable[[str], None]


class Work(Protocol):
    """A load: what it does first, to learn the right answers, and then under whatever happens."""

    async def undisturbed(self) -> int: ...

    async def load(self, seconds: float) -> None: ...

    def figures(self) -> dict[str, Any]:
        """What it has beside the tally, for JSON."""


class Setup:
    """Use as ``async with``, once its parts are up. ``alive`` turns false when a part dies: that is a result."""

    def __init__(self, name: str, parts: Supervisor, described: Topology, deployed: Deployment, say: Say) -> None:
        self.name, self.parts, self.url, self.alive = name, parts, deployed.url, True
        self.tally = Tally()
        self.engines: dict[str, Client] = {}
        self._deployed, self._say = deployed, say
        self._roles = {role.name: role.kind for role in described.roles}
        self._stack = contextlib.AsyncExitStack()
        self._watch = Watch(self._urls(), parts.processes, self.tally)
        self._loaded_before: dict[str, int] = {}
        self._back: list[tuple[str, float]] = []
        self._result: dict[str, Any] = {"boot_seconds": parts.up_seconds(), "survived": True, "death": None}

    async def __aenter__(self) -> Setup:
        for name, url in self._urls().items():
            self.engines[name] = await self.client(url)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _urls(self) -> dict[str, str]:
        engines = [part for part in self._deployed.parts if self._roles[part.name] == "engine"]
        return {part.name: part.health.removesuffix("/health") for part in engines}

    async def client(self, url: str, timeout: float = 60.0) -> Client:
        """A client of the deployment, closed with the setup."""
        return await self._stack.enter_async_context(Client(url, topology.MODEL_NAME, timeout))

    async def prepare(self, work: Work, client: Client) -> None:
        """Ask for everything once. Raises ``PartFailed``, ``RequestFailed``, ``aiohttp.ClientError``."""
        self._work = work
        await self.parts.guard(_first_transfer(client))
        count = await self.parts.guard(work.undisturbed())
        self._loaded_before = await self._loaded()
        self._say(f"{count} requests asked undisturbed; the load begins")

    async def load(self, seconds: float, hurt: Sequence[Fault]) -> None:
        """One round: load, with the faults that fall into it.

        Raises ``PartFailed`` only for what is no part of the deployment.
        """
        (self.parts.directory / LOADING).touch()
        work = [self._work.load(seconds), *(self._hurting(fault) for fault in hurt)]
        watchers = [asyncio.create_task(self._watch.look()), asyncio.create_task(self._narrate())]
        try:
            await self.parts.guard(together(*work))
        except PartFailed as failed:
            if failed.part not in self._roles:
                raise
            self._bury(failed)
            return
        finally:
            for watcher in watchers:
                watcher.cancel()
            self.tally.pause()

    async def settle(self, deadline: float, gone: Sequence[str]) -> None:
        """Wait for the blocks of all engines but those that are ``gone`` to come back, ``deadline`` seconds at most."""
        self._say("the load is over; waiting for blocks to come back")
        left = {name: engine for name, engine in self.engines.items() if name not in gone}
        self.tally.go()  # what is held now belongs into the same picture
        watcher = asyncio.create_task(self._watch.look())
        try:
            begun = time.monotonic()
            at_end = {name: await self.parts.guard(_left(engine, deadline)) for name, engine in left.items()}
            self._result |= {"kv_usage_at_end": at_end, "back_after": round(time.monotonic() - begun, 1)}
            await self.parts.guard(asyncio.sleep(_REST_SECONDS))
            now, before = await self._loaded(), self._loaded_before
            # One that was killed counts nothing, one that came back counts from 0.
            self._result["loaded_tokens"] = sum(max(0, now[name] - before.get(name, 0)) for name in now)
        except PartFailed as failed:
            self._bury(failed)
        finally:
            watcher.cancel()
            self.tally.pause()

    def result(self, seconds: float) -> dict[str, Any]:
        """What was seen; ``seconds`` is how long the load was to last."""
        records = self.parts.processes()
        (self.parts.directory / "processes.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
        found = {**self._result, **self.tally.summary(seconds), "restarts": dict(self.parts.restarts)}
        # Of each part that came back: until something was loaded from a store, or an engine, again.
        found["loaded_again"] = [[part, self._watch.loaded_again(moment)] for part, moment in self._back]
        found["errors_logged"] = logs.errors(self.parts.directory, self._roles)
        found["assertion"] = logs.assertion(self.parts.directory, self._roles)
        return {**found, **self._work.figures(), **self._watch.result()}

    def _bury(self, failed: PartFailed) -> None:
        self.alive = False
        self._say(f"{failed.part} {failed.what}")
        self._result |= {"survived": False, "death": f"{failed.part} {failed.what}", "log_tail": failed.tail}
        self._result["died_after"] = self.tally.died_after()

    async def _hurting(self, fault: Fault) -> None:
        await self.tally.going.wait()
        if await faults.play(fault, self.parts):
            self._back.append((fault.part, self.tally.elapsed()))

    async def _loaded(self) -> dict[str, int]:
        """Tokens that came from a KV store or another engine, so far, by engine; without those that do not answer."""
        found = {}
        for name, engine in self.engines.items():
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, KeyError):
                found[name] = int(await engine.metric(LOADED))
        return found

    async def _narrate(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            self._say(", ".join(f"{self.tally.count(kind)} {kind}" for kind in KINDS))


def falling_into(planned: Sequence[Fault], start: float, seconds: float, last: bool) -> list[Fault]:
    """The faults of the round that begins after ``start`` seconds of load, at moments counted from there."""
    return [
        replace(fault, at=fault.at - start)
        for fault in planned
        if start <= fault.at and (last or fault.at < start + seconds)
    ]


async def drained(client: Client, deadline: float = 30.0) -> float:
    """The KV usage (0 to 1) once it is back to 0, or what it still is at the deadline (seconds)."""
    begun, nudged = time.monotonic(), float("-inf")
    while True:
        # The gauge is published by steps of the engine: an idle one goes on showing what its last step saw.
        if time.monotonic() - nudged > _NUDGE_SECONDS:
            await client.complete(_NUDGE, 1)
            nudged = time.monotonic()
        usage = await client.metric(USAGE)
        if usage == 0 or time.monotonic() - begun > deadline:
            return usage
        await asyncio.sleep(0.2)


async def _left(client: Client, deadline: float) -> float | None:
    """As ``drained``; None where the engine does not answer."""
    try:
        return await drained(client, deadline)
    except (aiohttp.ClientError, asyncio.TimeoutError, RequestFailed):
        return None


async def _first_transfer(client: Client) -> None:
    for remaining in reversed(range(_FIRST_TRIES)):
        try:
            await client.complete(_FIRST, 1)
            return
        except (aiohttp.ClientError, RequestFailed):
            if not remaining:
                raise


def guarded(others: Sequence[Setup], work: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None]:
    """``work``, which the failure of a part of the other setups, waiting for their turn, ends as well."""
    for other in others:
        work = other.parts.guard(work)
    return work
