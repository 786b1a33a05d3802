"""What the unit tests share: a fake engine, patches for it, a bundle of them, and fresh interpreters to try it in."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import marshal
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import tomli_w
from vllm_livepatch.sitecustomize import fingerprint
from vllm_livepatch.tools import cli
from vllm_livepatch.tools.bundles import bundle, catalogue, placing

# Not the tests' own environment: its .pth files would be in every comparison.
PYTHON: str = getattr(sys, "_base_executable", sys.executable)
DEADLINE = 240.0  # seconds; nothing here takes as long unless it hangs, on a machine with much other work too

STEP = "fakeengine.scheduler:Scheduler.step"
WORK = "fakeengine.worker:work"
ENGINE = {
    "fakeengine/__init__.py": "",
    "fakeengine/_version.py": '__version__ = "1.0"\n',
    "fakeengine/scheduler.py": """\
        class Scheduler:
            def step(self, number):
                return [number]

            def free(self):
                return "freed"
        """,
    "fakeengine/worker.py": """\
        def work(item):
            return [item]
        """,
}
# The marker goes in front of the stock result, so that a second application would show as a second marker.
AROUND = """\
    def wrappers(livepatch):
        def around(wrapped, instance, args, kwargs):
            livepatch.count("calls")
            return ["patched", *wrapped(*args, **kwargs)]

        return dict.fromkeys(TARGETS, around)
    """
PASTED_LOADER = """
class Loader:
    def __init__(self, loader):
        self.loader = loader
    def __getattr__(self, name):
        return getattr(self.loader, name)
    def create_module(self, spec):
        return self.loader.create_module(spec)
    def exec_module(self, module):
        self.loader.exec_module(module)
        pasted(module)
"""
"""What recipes for start scripts have: a loader that does something once another one has run."""
USE_STEP = "from fakeengine.scheduler import Scheduler; print(Scheduler().step(7))"
STOCK, PATCHED = "[7]\n", "['patched', 7]\n"


@dataclass(frozen=True)
class Done:
    """How a process ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.err.splitlines()

    @property
    def greeting(self) -> str:
        """The process's one line, which comes when it is known what came of the patches: here, at its end."""
        (found,) = (line for line in self.lines if "; LIVEPATCH=off turns it off" in line)
        return found

    @property
    def others(self) -> list[str]:
        """All lines but that."""
        return [line for line in self.lines if line != self.greeting]


def finish(command: Sequence[str | Path], environ: Mapping[str, str], **options: Any) -> Done:
    """Run a process to its end, with nothing on its stdin and nothing in its environment but `environ`."""
    options = {"stdin": subprocess.DEVNULL, "timeout": DEADLINE, **options}
    ended = subprocess.run([str(word) for word in command], env=dict(environ), capture_output=True, **options)
    return Done(ended.returncode, ended.stdout.decode("utf-8", "replace"), ended.stderr.decode("utf-8", "replace"))


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `condition` gives, once it gives something; asked again until the deadline, which fails the test."""
    pause, deadline = threading.Event(), time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, "it did not happen in time"
        pause.wait(0.02)


async def awaited(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The same amid an event loop."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.001)
    return found


@cache
def bytecode(source: bytes) -> bytes:
    """What Python keeps of a source's code. An import compares the source's hash, so an edited source is compiled again."""
    code = marshal.dumps(compile(source, "", "exec", dont_inherit=True))
    checked = (3).to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + checked + importlib.util.source_hash(source) + code


def package_of(bundle: Path) -> Path:
    """The package of the one generation that a bundle has."""
    (found,) = bundle.glob("livepatch-*/_vllm_livepatch")
    return found


Ask = Callable[..., Done]
"""Asks a command in one of its ways."""


class Sandbox:
    """One place with a fake engine (`site`), patches, a bundle, a home and a state directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.site = root / "site"
        self.patches = root / "patches"
        self.bundle = root / "bundle"
        self.home = root / "home"
        self.state = root / "state"
        self.home.mkdir(parents=True)
        self.write(ENGINE)

    def write(self, files: Mapping[str, str], place: Path | None = None) -> Path:
        """Write sources, in `site` unless told otherwise."""
        place = place or self.site
        for name, text in files.items():
            file = place / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(dedent(text), "utf-8")
        return place

    def fingerprints(self, *names: str) -> dict[str, str]:
        """Of module:qualname, as the engine in `site` is now; what is not there gets a fingerprint of nothing."""
        found: dict[str, str] = {}
        for name in names:
            module, _, qualname = name.partition(":")
            file = self.site.joinpath(*module.split("."))
            file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            source = file.read_text("utf-8") if file.is_file() else ""
            found[name] = fingerprint.of_names(source, {name: qualname})[name] or "0" * 16
        return found

    def patch(
        self, name: str = "around", targets: Sequence[str] = (STEP,), code: str = AROUND, **facts: Any
    ) -> dict[str, Any]:
        """Write a patch folder whose one variant is the engine as it is, and give its facts. `facts` overrule."""
        targets = list(targets)
        written = {
            "title": f"{name}, for the tests",
            "package": "fakeengine",
            "targets": targets,
            "variant": [{"releases": ["1.0"], "code": self.fingerprints(*targets, *facts.get("calls", ()))}],
            **facts,
        }
        folder = self.patches / name.replace("-", "_")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "patch.toml").write_text(tomli_w.dumps(written), "utf-8")
        (folder / "wrappers.py").write_text(f"TARGETS = {targets!r}\n\n\n{dedent(code)}", "utf-8")
        return written

    def entries(self) -> dict[str, catalogue.Entry]:
        """The sandbox's own patches, as `--patch-dir` and `--patch` would choose them."""
        return {entry.patch.name: entry for entry in map(catalogue.read, sorted(self.patches.iterdir()))}

    def generate(self) -> Path:
        placing.write_directory(bundle.contents(self.entries()), self.bundle)
        return self.bundle

    def _compile(self) -> None:
        """Leave the bytecode of the runtime that the bundle's first process would: to compile it takes a quarter of a second."""
        for file in self.bundle.glob("livepatch-*/_vllm_livepatch/sitecustomize/*.py"):
            kept = Path(importlib.util.cache_from_source(str(file)))
            with contextlib.suppress(OSError, SyntaxError, ValueError):  # a damaged source leaves none
                kept.parent.mkdir(exist_ok=True)
                if not kept.exists():
                    kept.write_bytes(bytecode(file.read_bytes()))

    @property
    def package(self) -> Path:
        """The bundle's own package: the rest of the bundle, beside the entry that names its folder."""
        return package_of(self.bundle)

    def environ(self, *, path: Sequence[Path | str] | None = None, **more: str) -> dict[str, str]:
        """A process's whole environment. `path` is PYTHONPATH: the bundle, then the engine, unless told otherwise."""
        path = (self.bundle, self.site) if path is None else path
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "LC_ALL": "C.UTF-8",
            "LIVEPATCH_STATE_DIR": str(self.state),
            "LIVEPATCH_STATE_KEEP": "1",  # what a process reported is looked at when it has ended
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            **more,
        }

    def python(
        self,
        code: str,
        *flags: str,
        python: str = PYTHON,
        path: Sequence[Path | str] | None = None,
        **more: str,
    ) -> Done:
        """Run code in a fresh interpreter with the bundle and the engine on its path."""
        if python == PYTHON and not flags and not any(name.startswith("PYTHON") for name in more):
            self._compile()
        return finish([python, *flags, "-c", dedent(code)], self.environ(path=path, **more), cwd=self.root)

    def bare(self, code: str, *flags: str, python: str = PYTHON, **more: str) -> Done:
        """The same without the bundle."""
        return self.python(code, *flags, python=python, path=[self.site], **more)

    def reports(self) -> list[dict[str, Any]]:
        """Every report that a process left."""
        return [json.loads(file.read_text("ascii")) for file in sorted(self.state.glob("*.json"))]

    def report(self) -> dict[str, Any]:
        """The report of the only process that left one."""
        (found,) = self.reports()
        return dict(found)

    def reported(self, name: str = "around") -> dict[str, Any]:
        """What the only report says of one patch."""
        (found,) = [patch for patch in self.report()["patches"] if patch["name"] == name]
        return dict(found)


class Cli:
    """The command line: called here, or in a process of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capfd = capfd

    def __call__(self, *arguments: str) -> Done:
        self._monkeypatch.setattr(sys, "argv", ["vllm-livepatch", *arguments])
        self._capfd.readouterr()
        try:
            cli.main()
        except SystemExit as ended:
            captured = self._capfd.readouterr()
            return Done(ended.code if isinstance(ended.code, int) else 1, captured.out, captured.err)

    def process(self, *arguments: str, environ: Mapping[str, str] | None = None, stdout: int | None = None) -> Done:
        command = [sys.executable, "-m", "vllm_livepatch.tools.cli", *arguments]
        pipe = subprocess.PIPE
        ended = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=stdout or pipe, stderr=pipe, timeout=DEADLINE
        )
        return Done(ended.returncode, (ended.stdout or b"").decode(), ended.stderr.decode())
