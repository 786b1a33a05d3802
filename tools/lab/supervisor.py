"""Brings up a set of parts (servers), watches over them, and leaves nothing behind.

A part that dies, that never gets up, or that falls silent ends the whole within seconds, as a ``PartFailed`` that
carries the part's name, its exit code and the end of *its* log. Whatever ends the supervisor (an exception, Ctrl-C,
SIGKILL) ends the parts and all of their children: each part runs in a session of its own under ``launcher.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import aiohttp
import psutil

T = TypeVar("T")
TAIL_LINES = 40
_LAUNCHER = Path(__file__).with_name("launcher.py")
HEALTHY = 200
_POLL_SECONDS = 0.2
_LOOK_SECONDS = 1.0
_BUSY_SHARE = 0.1
_LINGER_SECONDS = 5.0
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Part:
    """One server: what to run and how to see that it serves."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    """The whole environment; nothing is inherited. It is written into the output directory."""
    health: str
    """A URL that answers 200 when the part serves."""
    up_within: float = 300.0
    """Seconds until its health must answer for the first time."""
    unhealthy_for: float = 10.0
    """Seconds for which it may answer, before it is up, that it is not well: a server says so that failed in part."""
    silent_for: float = 30.0
    """Seconds without a sign of life that end the whole. Once up, only an answer counts; until then also a longer
    log, or processor time."""
    beside: bool = False
    """Start together with the part before it (which is needed only late in this one's start)."""
    grace: float = 5.0
    """Seconds between SIGTERM and being killed."""


class PartFailed(RuntimeError):
    """A part died, did not get up, or fell silent. ``str()`` is for people: what happened, and the end of its log."""

    def __init__(self, part: str, what: str, log: Path, exit_code: int | None = None) -> None:
        self.part, self.what, self.log, self.exit_code = part, what, log, exit_code
        self.tail = tail(log)
        end = "\n".join(f"  | {line}" for line in self.tail) or "  | (nothing was written)"
        super().__init__(f"{part} {what}. The last lines of {log}:\n{end}")


@dataclass
class _Running:
    part: Part
    process: subprocess.Popen[bytes]
    pid: int
    log: Path
    started: float
    up: asyncio.Event = field(default_factory=asyncio.Event)
    up_after: float | None = None
    last_sign: float = 0.0
    unwell_since: float | None = None
    """Since when, in monotonic seconds, it has answered that it is not well, and was not up yet."""
    log_size: int = 0
    processor_seconds: float = 0.0
    watcher: asyncio.Task[None] | None = None
    """None while a fault has this part: it may be dead or silent then."""
    stopped: bool = False


class Supervisor:
    """Use as ``async with Supervisor(directory) as parts``, from the main thread.

    ``directory`` gets ``NAME.log`` and ``NAME.json`` (pid, command, environment) for every part, and is where they run.
    ``say`` gets the progress, a line at a time; ``up`` the name of a part, each time that one has begun to serve.
    """

    def __init__(
        self,
        directory: Path,
        say: Callable[[str], None] = lambda line: None,
        up: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.directory = directory
        self._say, self._up = say, up
        self.restarts: Counter[str] = Counter()
        """How often each part was brought back."""
        self._running: list[_Running] = []
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Supervisor:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._http = aiohttp.ClientSession()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        if self._http is not None:
            await self._http.close()

    async def start(self, parts: Sequence[Part]) -> None:
        """Start the parts in the given order, each when the ones before it serve. Raises ``PartFailed``."""
        for part in parts:
            if not part.beside:
                await self.guard(self._all_up())
            self._say(f"starting {part.name}")
            running = self._launch(part)
            self._running.append(running)
            self._look_after(running)
        await self.guard(self._all_up())

    async def run(self, part: Part) -> None:
        """Run a program that ends by itself, with log and record as the parts have. Raises ``PartFailed`` if it fails.

        It is ended when this is cancelled. Its health is not looked at.
        """
        running = self._launch(part)
        process = running.process
        try:
            while process.poll() is None:
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()  # the launcher, which ends what it started, in time
                await asyncio.shield(asyncio.to_thread(process.wait))
        if process.returncode:
            raise PartFailed(part.name, _ending(process.returncode), running.log, process.returncode)

    def kill(self, name: str) -> None:
        """Kill a part at once, with all that it started, as a fault: the others go on, and so does the guarded work."""
        running = self._part(name)
        self._leave_alone(running)
        for process in _tree(running.pid):
            with contextlib.suppress(psutil.Error):
                process.kill()
        running.process.wait()
        running.stopped = False
        running.up.set()  # who brings it back waits no more
        self._say(f"{name} was killed")

    async def restart(self, name: str) -> None:
        """Bring a killed part back, as it was, and return when it serves or was killed again. Raises ``PartFailed``."""
        index = self._running.index(self._part(name))
        self._running[index] = running = self._launch(self._running[index].part, mode="ab")
        self._look_after(running)
        self.restarts[name] += 1
        await running.up.wait()

    def pause(self, name: str) -> None:
        """Stop all of a part's processes (SIGSTOP), as a fault; its silence is not held against it."""
        running = self._part(name)
        self._leave_alone(running)
        self._signal(running, signal.SIGSTOP)
        running.stopped = True
        self._say(f"{name} was stopped")

    def resume(self, name: str) -> bool:
        """Let a stopped part go on. Returns False for one that was killed in the meantime: it is left alone."""
        running = self._part(name)
        if not running.stopped:
            return False
        running.stopped = False
        self._signal(running, signal.SIGCONT)
        running.last_sign = time.monotonic()
        self._look_after(running)
        self._say(f"{name} goes on")
        return True

    def _part(self, name: str) -> _Running:
        (found,) = (running for running in self._running if running.part.name == name)
        return found

    def _signal(self, running: _Running, number: signal.Signals) -> None:
        for process in _tree(running.pid):
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def _look_after(self, running: _Running) -> None:
        running.watcher = asyncio.create_task(self._watch(running))

    def _leave_alone(self, running: _Running) -> None:
        if running.watcher is not None:
            running.watcher.cancel()
            running.watcher = None

    @property
    def _watchers(self) -> list[asyncio.Task[None]]:
        return [running.watcher for running in self._running if running.watcher is not None]

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which is cancelled as soon as a part fails: then raises ``PartFailed``.

        Raises ``PartFailed`` also when the work fails first, as it does when it talks to a part that is dying.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done() and not any(watcher.done() for watcher in self._watchers):
                # Who is watched changes with the faults: a watcher that was called off ends one turn of this.
                await asyncio.wait({task, *self._watchers}, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if self._watchers and task.done() and not task.cancelled() and task.exception() is not None:
                await asyncio.wait(self._watchers, timeout=_LINGER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for watcher in self._watchers:
                if watcher.done():
                    watcher.result()
            return await task
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def processes(self) -> list[dict[str, Any]]:
        """Every live process of every part: ``{"part", "pid", "name", "command"}``."""
        found = []
        for running in self._running:
            for process in _tree(running.pid):
                with contextlib.suppress(psutil.Error):
                    entry = {"part": running.part.name, "pid": process.pid, "name": process.name()}
                    found.append({**entry, "command": process.cmdline()})
        return found

    def up_seconds(self) -> dict[str, float]:
        """How long each part took from its start to its first healthy answer."""
        return {entry.part.name: round(entry.up_after, 1) for entry in self._running if entry.up_after is not None}

    async def stop(self) -> None:
        """End all parts, and wait until they are gone. Never raises for a part that is dead already."""
        watchers = self._watchers
        for running in self._running:
            self._leave_alone(running)
        await asyncio.gather(*watchers, return_exceptions=True)
        for running in self._running:
            self._signal(running, signal.SIGCONT)  # one that is stopped would not hear of its end
            running.process.terminate()
        while self._running:
            running = self._running[-1]
            deadline = time.monotonic() + 2 * running.part.grace + 5
            while running.process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_SECONDS / 4)
            if running.process.poll() is None:  # the launcher itself is stuck: end what it was to end
                for process in reversed(_tree(running.process.pid)):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
                running.process.wait()
            self._running.pop()

    def _launch(self, part: Part, mode: Literal["ab", "wb"] = "wb") -> _Running:
        log = self.directory / f"{part.name}.log"
        read, write = os.pipe()
        # -I: the part's PYTHONPATH is not for the launcher.
        launcher = [sys.executable, "-I", str(_LAUNCHER), str(os.getpid()), str(write), str(part.grace)]
        with log.open(mode) as stream:
            process = subprocess.Popen(
                [*launcher, *part.command],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=dict(part.environment),
                cwd=self.directory,  # where the caller is, a folder "mooncake" would be a package to what "-m" runs
                pass_fds=[write],
                start_new_session=True,
            )
        os.close(write)
        with os.fdopen(read) as status:
            answer = status.read()
        if not answer.isdecimal():
            process.wait()
            raise PartFailed(part.name, f"could not be started: {answer or 'its launcher died'}", log)
        record = {
            "part": part.name,
            "pid": int(answer),
            "command": list(part.command),
            "environment": dict(part.environment),
            "log": log.name,
            "started": time.time(),
        }
        (self.directory / f"{part.name}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        now = time.monotonic()
        return _Running(part, process, int(answer), log, started=now, last_sign=now)

    async def _all_up(self) -> None:
        for running in self._running:
            await running.up.wait()

    async def _watch(self, running: _Running) -> None:
        """Return never; raise ``PartFailed`` when this part's time has come."""
        part, looked = running.part, 0.0
        while True:
            code = running.process.poll()
            if code is not None:
                raise PartFailed(part.name, _ending(code), running.log, code)
            now = time.monotonic()
            if now - looked >= _LOOK_SECONDS:
                status = await self._status(part)
                healthy = status == HEALTHY
                now, before, looked = time.monotonic(), looked, time.monotonic()
                if healthy and not running.up.is_set():
                    running.up_after = now - running.started
                    self._say(f"{part.name} is up after {running.up_after:.0f} s")
                    self._up(part.name)
                    running.up.set()
                if healthy or (not running.up.is_set() and _stirring(running, now - before)):
                    running.last_sign = now
                unwell = status is not None and not healthy and not running.up.is_set()
                running.unwell_since = (running.unwell_since or now) if unwell else None
                if running.unwell_since is not None and now - running.unwell_since > part.unhealthy_for:
                    what = f"has answered HTTP {status} for {part.unhealthy_for:.0f} s where it is asked for its health"
                    raise PartFailed(part.name, what, running.log)
                if now - running.last_sign > part.silent_for:
                    raise PartFailed(part.name, f"has been silent for {part.silent_for:.0f} s", running.log)
                if not running.up.is_set() and now - running.started > part.up_within:
                    raise PartFailed(part.name, f"did not get up within {part.up_within:.0f} s", running.log)
            await asyncio.sleep(_POLL_SECONDS)

    async def _status(self, part: Part) -> int | None:
        """Of the answer to the question for its health; None where there is none."""
        assert self._http is not None, "use 'async with'"
        patience = aiohttp.ClientTimeout(total=min(5.0, part.silent_for / 2))
        try:
            async with self._http.get(part.health, timeout=patience) as answer:
                return answer.status
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return None


async def together(*work: Coroutine[Any, Any, None]) -> None:
    """All of them; when one fails the others are cancelled (``asyncio.gather`` would let them go on)."""
    tasks = [asyncio.ensure_future(entry) for entry in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def tail(log: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log, without colours; none if there is no such file."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - 1024 * lines))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [_ANSI.sub("", line) for line in text.splitlines()[-lines:]]


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _stirring(running: _Running, seconds: float) -> bool:
    """Whether a part that does not answer yet wrote to its log, or used a processor for a share of ``seconds``."""
    size, used = running.log.stat().st_size, 0.0
    for process in _tree(running.pid):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            used += times.user + times.system
    stirs = size > running.log_size or used - running.processor_seconds > _BUSY_SHARE * seconds
    running.log_size, running.processor_seconds = size, used
    return stirs


def _ending(code: int) -> str:
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(code - 128).name} (exit code {code})"
    return f"ended with exit code {code}"
