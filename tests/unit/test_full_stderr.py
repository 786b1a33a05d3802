"""A stderr that nobody reads: neither an import, a fork nor the exit waits for it, and the line is given up."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize import context

from tests.unit import interpreters
from tests.unit.support import PATCHED, PYTHON, USE_STEP, Done, Sandbox


def fill(descriptor: int) -> None:
    """Write into a pipe until there is room for no byte, its flags as they were."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    for size in (65536, 1):
        try:
            while True:
                os.write(descriptor, b"." * size)
        except BlockingIOError:
            continue
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The reading end of a full pipe, and the other."""
    read, write = os.pipe()
    fill(write)
    yield read, write
    for descriptor in (read, write):
        os.close(descriptor)


def unheard(sandbox: Sandbox, code: str, stderr: int, python: str = PYTHON, **more: str) -> Done:
    """How a process ends whose stderr is the full pipe. That it ends is what is tested: `finish` waits for a minute."""
    process = subprocess.Popen(
        [python, "-c", code],
        env=sandbox.environ(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )
    try:
        out = process.communicate(timeout=60)[0].decode()
    finally:
        process.kill()
    assert not fcntl.fcntl(stderr, fcntl.F_GETFL) & os.O_NONBLOCK  # others share it
    return Done(process.returncode, out, "")


FORK = """
import os
pid = os.fork()
if not pid: os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
CHILD = """
import multiprocessing, sys
child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(3,))
child.start(); child.join(); print(child.exitcode)
"""


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
@pytest.mark.parametrize(("then", "out"), [("", ""), (FORK, "3\n"), (CHILD, "3\n")], ids=["exit", "fork", "child"])
def test_nothing_waits_for_a_reader(patched: Sandbox, pipe: tuple[int, int], then: str, out: str, version: str) -> None:
    done = unheard(patched, f"{USE_STEP}\n{then}", pipe[1], str(interpreters.find(version)))
    assert (done.code, done.out) == (0, PATCHED + out)


def test_strict_ends_with_its_code(patched: Sandbox, pipe: tuple[int, int]) -> None:
    patched.write({"fakeengine/scheduler.py": "class Scheduler:\n    def step(self, number):\n        return number\n"})
    done = unheard(patched, USE_STEP, pipe[1], LIVEPATCH="strict")
    assert (done.code, done.out) == (78, "")


@pytest.mark.parametrize(("mode", "code"), [("auto", 0), ("strict", 78)])
def test_a_damaged_bundle_does_not_hang_either(patched: Sandbox, pipe: tuple[int, int], mode: str, code: int) -> None:
    (patched.package / "sitecustomize/hook.py").write_text("")
    assert unheard(patched, USE_STEP, pipe[1], LIVEPATCH=mode).code == code


class Stderr:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.flushed = 0

    def fileno(self) -> int:
        return self.descriptor

    def flush(self) -> None:
        self.flushed += 1


def test_what_nobody_reads_is_waited_for_once(monkeypatch: pytest.MonkeyPatch, pipe: tuple[int, int]) -> None:
    """Twenty patches that are not applied must not take twenty times as long; who reads again, gets all that follows."""
    waits: list[float] = []
    real = select.poll

    class Poll:
        def __init__(self) -> None:
            self.poller = real()
            self.register = self.poller.register

        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            waits.append(milliseconds)
            return self.poller.poll(0)

    monkeypatch.setattr(select, "poll", Poll)
    monkeypatch.setattr(context, "_unread", [])
    stderr = Stderr(pipe[1])
    monkeypatch.setattr(sys, "stderr", stderr)
    for text in ("lost", "lost, too"):
        context.line(text)
    assert waits == [context.STDERR_SECONDS * 1000, 0, 0, 0]
    assert stderr.flushed == 0  # it would wait, too
    while select.select([pipe[0]], [], [], 0)[0]:
        os.read(pipe[0], 65536)
    context.line("read")
    context.line("x" * 10000)
    assert stderr.flushed == 2
    assert os.read(pipe[0], 65536).decode() == f"vllm-livepatch: read\nvllm-livepatch: {'x' * 10000}\n"
    assert waits[4:] == [0, *[context.STDERR_SECONDS * 1000] * 5]


def test_a_file_takes_every_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        stream.write("before, ")
        context.line("y" * 10000)
    assert (tmp_path / "stderr").read_text() == f"before, vllm-livepatch: {'y' * 10000}\n"
