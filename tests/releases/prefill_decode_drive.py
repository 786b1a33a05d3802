"""Runs of driver/prefill_decode.py, which two test modules read: one process a release and manner."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from filelock import FileLock
from vllm_livepatch.tools.lab import environments
from vllm_livepatch.tools.releases import registry

DRIVER = Path(__file__).parent / "driver" / "prefill_decode.py"

RELEASES = [pin.version for pin in registry.pins("vllm")]
_ON = {"LIVEPATCH_NIXL_UCX_ERROR_HANDLING": "on", "LIVEPATCH_STABLE_REQUEST_IDS": "on"}
MANNERS: dict[str, dict[str, str] | None] = {
    "stock": None,
    "patched": _ON,
    "not asked": {},
    "peer": {**_ON, "LIVEPATCH_NIXL_UCX_ERROR_HANDLING_MODE": "peer"},
}
"""The ways to run a release: without the bundle, or with it and these variables."""


@dataclass(frozen=True)
class Run:
    """What the driver printed, and what the bundle reported of each patch (nothing where there is no bundle)."""

    ids: dict[str, Any]
    agents: dict[str, Any]
    patches: dict[str, dict[str, Any]]


def drive(release: str, manner: str, warm: interpreter.Interpreter, python: Path, bundle: Path, shared: Path) -> Run:
    """Return a run of the driver on a release; the first who asks in this session runs it. Fails where it cannot."""
    work = shared / f"{release} {manner}"
    work.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{work}.lock"):
        if not (work / "result.json").exists():
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            _run(release, manner, warm, python, bundle, work)
        else:  # a run of this test module's as much as of the one that made it
            executed.note("prefill_decode", {"vllm": release}, work / "state" if MANNERS[manner] is not None else None)
    result = json.loads((work / "result.json").read_text(encoding="utf-8"))
    patches: dict[str, dict[str, Any]] = {}
    for file in (work / "state").glob("*.json"):
        report = json.loads(file.read_text(encoding="utf-8"))
        assert report["packages"]["vllm"] == release
        patches = {patch["name"]: patch for patch in report["patches"]}
    return Run(result["ids"], result["agents"], patches)


def shared_directory(factory: pytest.TempPathFactory) -> Path:
    """The directory that all of a session's test processes see."""
    base = factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "prefill_decode"


def _run(release: str, manner: str, warm: interpreter.Interpreter, python: Path, bundle: Path, work: Path) -> None:
    variables = MANNERS[manner]
    result = warm.run(
        "prefill_decode",
        {"vllm": release},
        work,
        bundle=None if variables is None else bundle,
        environ=variables,
        path=[nixl_site(python)],
    )
    (work / "result.json").write_text(json.dumps(result), encoding="utf-8")


def nixl_site(python: Path) -> Path:
    """A directory with the real NIXL for `python`: LIVEPATCH_TEST_NIXL, else the cached one."""
    given = os.environ.get("LIVEPATCH_TEST_NIXL")
    return Path(given) if given else environments.nixl(python)
