"""`status`: the reports that live processes left, read; those of ended ones, removed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm_livepatch.sitecustomize import report
from vllm_livepatch.tools.errors import UserError

_KEYS = ("pid", "host", "argv", "python", "started", "bundle", "packages", "patches")


def state_directory(given: Path | None) -> Path:
    """Where the reports are. A directory that somebody named must exist; the default one may not, yet."""
    named = given or (Path(os.environ["LIVEPATCH_STATE_DIR"]) if os.environ.get("LIVEPATCH_STATE_DIR") else None)
    if named is not None and not named.is_dir():
        raise UserError(f"{named} is not a directory")
    return named or Path(report.directory({}))


def processes(directory: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The reports of live processes, oldest first, and the pids of ended ones, whose reports this removes.

    A process of another host (a state directory can be shared) cannot be looked at from here, and counts as live.
    """
    live: list[dict[str, Any]] = []
    ended: list[int] = []
    host = os.uname().nodename
    for file in sorted(directory.glob("*.json")) if directory.is_dir() else ():
        try:
            found = json.loads(file.read_text("ascii"))
            process = {key: found[key] for key in _KEYS}
            ticks = found.get("start_ticks")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not a report of ours, or being replaced by another file system's rules
        if process["host"] == host and not _alive(process["pid"], ticks):
            ended.append(process["pid"])
            try:
                file.unlink()
            except OSError:
                continue  # somebody else's, or a read-only place: left for its owner
        else:
            live.append(process)
    return sorted(live, key=lambda process: (process["started"], process["pid"])), ended


def _alive(pid: int, ticks: int | None) -> bool:
    now = report.start_ticks(pid)
    return now is not None and (ticks is None or now == ticks)
