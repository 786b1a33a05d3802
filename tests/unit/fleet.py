"""Reports as processes leave them, written by hand: of many processes, of other hosts, of ended ones."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

from vllm_livepatch.sitecustomize import report

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
