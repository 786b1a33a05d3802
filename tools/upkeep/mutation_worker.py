"""Runs tests in a copy of the tree, each request in its own process. `mutation` starts it, in the copy's environment.

A request is a line of JSON on stdin: `tests` (pytest's arguments), `seconds` (the limit), `probes` (the file that
instrumented functions write their names to, or null), `warm` (whether they are release tests, which share a server).
The answer is a line of JSON on stdout: `code` (pytest's, null past the limit) and `tests`: for each test its `seconds`,
whether it `passed`, and what it `reached`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# What the tests import of others: imported once, here. Nothing of this project's, which is what changes.
PRELOADED = (
    "hypothesis packaging.version prometheus_client pypi_simple requests rich.console tomli_w typer typer.testing"
    " unidiff unittest.mock wrapt yaml numpy cyclonedx.model.bom xdist.plugin pytest_mock pytest_rerunfailures"
)

SERVED = "LIVEPATCH_TEST_WARM"  # see tests/releases/interpreter.py


class Record:
    """A pytest plugin: how long each test took, whether it passed, and which instrumented functions ran."""

    def __init__(self, probes: str | None) -> None:
        self.probes = Path(probes) if probes else None
        self.tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        found = self.tests[item.nodeid] = {"seconds": 0.0, "passed": True, "reached": []}
        began = time.monotonic()
        if self.probes:
            self.probes.write_bytes(b"")
        try:
            return (yield)
        finally:
            found["seconds"] = round(time.monotonic() - began, 2)
            if self.probes:
                found["reached"] = sorted(set(self.probes.read_text("utf-8").split()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.tests[report.nodeid]["passed"] = False


class Warm:
    """The release tests' server of interpreters, which takes 15 s to start: one for all requests."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self.server is None:
            self.folder = tempfile.mkdtemp(prefix="livepatch-warm-")
            os.environ[SERVED] = self.folder
            command = [sys.executable, os.path.abspath("tests/releases/interpreter.py"), self.folder]
            self.server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            while not os.path.exists(os.path.join(self.folder, "answers")) and self.server.poll() is None:
                time.sleep(0.1)
            with open(os.path.join(self.folder, "answers")) as answers:
                ready = answers.readline().strip()
            if ready != "ready":
                raise RuntimeError("the release tests' server does not start")

    def end(self) -> None:
        if self.server is not None and self.folder is not None:
            self.server.kill()
            self.server.wait()
            self.server = None
            shutil.rmtree(self.folder, ignore_errors=True)


WARM = Warm()


def run(request: dict[str, Any], result: Path) -> dict[str, Any]:
    if request.get("warm"):
        WARM.start()
    result.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _child(request, result)
    handle = os.pidfd_open(child)
    ended, _, _ = select.select([handle], [], [], request["seconds"])
    os.close(handle)
    if not ended:
        # The child leads its own group: what the tests started goes with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        WARM.end()  # it may be about to answer a job of that child's
    _, status = os.waitpid(child, 0)
    tests = json.loads(result.read_text("utf-8")) if result.exists() else {}
    return {"code": os.waitstatus_to_exitcode(status) if ended else None, "tests": tests}


def _child(request: dict[str, Any], result: Path) -> None:
    code = 3
    try:
        os.setsid()
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silent, stream)
        record = Record(request["probes"])
        code = int(pytest.main(["-q", "-p", "no:cacheprovider", *request["tests"]], plugins=[record]))
        result.write_text(json.dumps(record.tests), "utf-8")
    finally:
        os._exit(code)


def main() -> None:
    result = Path(sys.argv[1])
    sys.path.insert(0, os.getcwd())
    sys.dont_write_bytecode = True
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name in PRELOADED.split():
        importlib.import_module(name)
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line), result)) + "\n")
    WARM.end()


if __name__ == "__main__":
    main()
