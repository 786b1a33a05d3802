"""Reports as processes leave them, written by hand: of many processes, of other hosts, of ended ones."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm_livepatch.sitecustomize import report
from vllm_livepatch.sitecustomize.decision import variable
from vllm_livepatch.tools.bundles import catalogue

_numbers = itertools.count()
HERE = os.uname().nodename
DIGEST = "sha256:" + "ab77c0de" * 8


def patch(name: str, state: str = "applied", reason: str | None = None, **more: Any) -> dict[str, Any]:
    verdict = {"applied": "needed", "armed": None, "skipped": "fixed-upstream", "failed": "needed"}[state]
    detail = None if reason is None else f"why it is {reason}"
    form = {"name": name, "state": state, "reason": reason, "detail": detail, "verdict": verdict}
    return {**form, "targets": [], "counters": {}, **more}


def leave(state: Path, *patches: dict[str, Any], silent: float = 0.0, **more: Any) -> Path:
    """Write a report, of another host unless told otherwise, last written so many seconds ago."""
    state.mkdir(exist_ok=True)
    pid = more.get("pid", 1000 + next(_numbers))
    content = {
        "pid": pid,
        "host": "node1",
        "argv": ["python", "-m", "vllm.entrypoints.openai.api_server"],
        "python": "/usr/bin/python3",
        "started": "2026-11-22T06:00:00+00:00",
        "bundle": "/livepatch",
        "version": "0.2.0",
        "digest": DIGEST,
        "settings": {"mode": "auto", "toggles": {}, "options": {}},
        "heartbeat": time.time() - silent,
        "pid_namespace": "pid:[4026531836] another machine",
        "packages": {"vllm": "0.29.0"},
        "patches": list(patches),
        "start_ticks": 1,
        **more,
    }
    file = state / f"{content['host']}-{pid}-{next(_numbers):016x}.json"
    file.write_text(json.dumps(content), "ascii")
    return file


def leave_own(state: Path, *patches: dict[str, Any], alive: bool = True, **more: Any) -> Path:
    """The same of a process that is seen from here: this one, or one that has ended."""
    pid = os.getpid()
    ticks = report.start_ticks(pid) or 0
    here = {"host": HERE, "pid": pid, "pid_namespace": report.pid_namespace(), "start_ticks": ticks - (not alive)}
    return leave(state, *patches, **{**here, **more})


PODS, RELEASES = 200, {"vllm": "0.29.0", "lmcache": "0.5.6"}
PROGRAMS = {
    "api_server": ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m", "--api-key", "hush"],
    "engine_core": ["VLLM::EngineCore", "--kv-transfer-config", '{"kv_connector": "LMCacheMPConnector"}'],
    "lmcache": ["lmcache", "server", "--l1-size-gb", "60", "--eviction-policy", "LRU"],
}
"""The processes of a pod, and the command of each."""


def pods(state: Path, number: int = PODS, **more: Any) -> None:
    """Write the reports of so many pods, each of three processes that have the whole catalogue."""
    own = [own_patches(program) for program in PROGRAMS]
    for pod in range(number):
        for pid, (argv, patches) in enumerate(zip(PROGRAMS.values(), own, strict=True), start=7):
            leave(state, *patches, **{"host": f"vllm-{pod:03}", "pid": pid, "argv": argv, "packages": RELEASES, **more})


def own_patches(program: str) -> list[dict[str, Any]]:
    """What a process of a pod says of each patch of the catalogue, by what its release needs and what it imports."""
    found = []
    for entry in catalogue.load().values():
        release = RELEASES[entry.patch.package]
        variant = next((variant for variant in entry.patch.variants if release in variant.releases), None)
        verdict = variant.verdict if variant else "not-present"
        runs_there = (program == "lmcache") == ("lmcache" in entry.patch.name) and program != "api_server"
        state, counters = "armed", {}
        reason: str | None = None
        detail: str | None = None
        if runs_there and verdict != "needed":
            state, reason = "skipped", verdict
            detail = f"{entry.patch.package} {release} has none of the faults that {entry.patch.name} is about"
        elif runs_there and entry.patch.auto != "needed":
            state, reason = "skipped", "optional"
            detail = f"off by default, {variable(entry.patch.name)}=on asks for it; {release} is a verified release"
        elif runs_there:
            state, reason = "applied", "partly"
            detail = f"{len(entry.patch.targets) - 1} of {len(entry.patch.targets)} modules imported so far"
            counters = dict.fromkeys(list(entry.patch.about.get("counters", ()))[:2], 3)
        about = {"detail": detail, "verdict": verdict if runs_there else None, "version": entry.patch.version}
        targets = [*entry.patch.targets]
        found.append(patch(entry.patch.name, state, reason, targets=targets, counters=counters, **about))
    return found


if __name__ == "__main__":  # python -m tests.unit.fleet DIR: 600 reports, to measure `status` with
    pods(Path(sys.argv[1]))
