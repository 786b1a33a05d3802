"""Two processes that play one story: this one, and another with another bundle, or with none, which does as it is told.

Only functions and classes, so that importing this does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import result

SECONDS = 300.0
"""Longest time for one answer of the other process."""


class Half:
    """What one process has of the story. It steps as an engine does, also while nothing is asked of it."""

    def step(self) -> None:
        """One step, where it makes any by itself."""

    def do(self, name: str, *arguments: Any) -> Any:
        """Play one part of the story, in this process."""
        return getattr(self, name)(*arguments)

    def serve(self) -> None:
        """Do what the other process says on stdin, until it says no more; answers go to the stdout that was taken."""
        answers = result._stdout
        assert answers is not None
        while True:
            if not select.select([sys.stdin], [], [], 0.001)[0]:
                self.step()
                continue
            line = sys.stdin.readline()
            if not line:
                return
            answers.write(json.dumps(self.do(*json.loads(line))) + "\n")
            answers.flush()


class Other:
    """The half in the other process: `script`, run with `arguments`, and with a bundle's folder or `none`."""

    def __init__(self, script: str, arguments: Sequence[str], bundle: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, script, *arguments],
            env=environ_with(bundle, script),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.step: Callable[[], None] = lambda: None  # of this process's half, meanwhile

    def do(self, *asked: Any) -> Any:
        """Have it play one part of the story."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        latest = time.monotonic() + SECONDS
        while not select.select([self.process.stdout], [], [], 0.001)[0]:
            assert time.monotonic() < latest, f"the other process does not answer {asked}"
            self.step()
        answer = self.process.stdout.readline()
        assert answer, f"the other process has ended at {asked}"
        return json.loads(answer)

    def end(self) -> None:
        """Let it end."""
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate(timeout=60)


def environ_with(bundle: str, script: str) -> dict[str, str]:
    """This process's environment, with another bundle in the place of its own, and the script's folder on the path."""
    ours = [entry for entry in os.environ["PYTHONPATH"].split(os.pathsep) if not is_bundle(entry)]
    path = [*([bundle] if bundle != "none" else []), *ours, str(Path(script).parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def is_bundle(entry: str) -> bool:
    """Whether an entry of the path is a bundle's folder."""
    return (Path(entry) / "sitecustomize.py").exists()
