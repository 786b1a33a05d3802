"""Others who put themselves into each Python process: OpenTelemetry's and Datadog's own commands, from the registry."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from vllm_livepatch.tools.lab import environments

from tests.unit.support import PATCHED, STOCK, USE_STEP, Sandbox, finish

PAGE = (Path(__file__).parents[2] / "docs/operate.md").read_text("utf-8")
CHILD = f"import subprocess, sys\n{USE_STEP}\nsys.stdout.flush()\n"
CODE = f"{CHILD}subprocess.run([sys.executable, '-c', {CHILD!r}])"
"""An engine, and one that it spawns."""


@pytest.fixture(scope="module")
def place() -> Path:
    return environments.injectors().parent


@pytest.fixture
def engine(patched: Sandbox, place: Path) -> Path:
    """`vllm`, as what is pasted calls it."""
    engine = patched.root / "bin/vllm"
    engine.parent.mkdir()
    engine.write_text(f"#!{place}/python\n{CODE}\n")
    engine.chmod(0o755)
    return engine


def environ(sandbox: Sandbox, engine: Path, *path: Path) -> dict[str, str]:
    silent = {"DD_TRACE_ENABLED": "false", "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false"}
    return sandbox.environ(path=path, **silent) | {"PATH": f"{engine.parent}:{os.environ['PATH']}"}


def test_datadog_in_any_order(patched: Sandbox, place: Path, engine: Path) -> None:
    (own,) = place.parent.glob("lib/python*/site-packages/ddtrace/bootstrap")
    both = [patched.bundle, patched.site]
    for command, path in (([place / "ddtrace-run"], both), ([], [own, *both]), ([], [both[0], own, both[1]])):
        done = finish([*command, engine], environ(patched, engine, *path))
        assert (done.code, done.out) == (0, PATCHED * 2), done.err


def test_opentelemetry_as_the_page_says(patched: Sandbox, place: Path, engine: Path) -> None:
    (line,) = re.findall(r"`(opentelemetry-instrument sh .*?) MODEL`", PAGE)
    line = line.replace("opentelemetry", f"{place}/opentelemetry").replace("/livepatch", str(patched.bundle))
    done = finish(["sh", "-c", f"{line} MODEL"], environ(patched, engine, patched.site))
    assert (done.code, done.out) == (0, PATCHED * 2), done.err
    alone = finish([place / "opentelemetry-instrument", engine], environ(patched, engine, patched.bundle, patched.site))
    assert (alone.code, alone.out) == (0, STOCK * 2), alone.err
