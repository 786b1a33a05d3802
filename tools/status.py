"""`status`: the reports that live processes left, read; those of ended ones, removed."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from vllm_livepatch.sitecustomize import report
from vllm_livepatch.tools.errors import UserError

_KEYS = ("pid", "host", "argv", "python", "started", "bundle", "packages", "patches")
_LATER_KEYS = ("version", "digest", "settings", "heartbeat", "pid_namespace")  # reports of version 0.1 lack them
_LARGEST = 16 << 20  # bytes


def state_directory(given: Path | None) -> Path:
    """Where the reports are. A directory that somebody named must exist; the default one may not, yet."""
    named = given or (Path(os.environ["LIVEPATCH_STATE_DIR"]) if os.environ.get("LIVEPATCH_STATE_DIR") else None)
    if named is not None and not named.is_dir():
        raise UserError(f"{named} is not a directory")
    if named is None:
        try:
            os.close(report.opened({}))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UserError(f"{error.filename} is not used: {error.strerror or error}") from error
    return named or Path(report.directory({}))


def processes(directory: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The reports of live processes, oldest first, and the pids of ended ones, whose reports this removes.

    A process of another host or PID namespace (a state directory can be shared) cannot be looked at from here, and
    counts as live: its `heartbeat` says when it last wrote.
    """
    live: list[dict[str, Any]] = []
    ended: list[int] = []
    here = (os.uname().nodename, report.pid_namespace())
    for file in sorted(directory.glob("*.json")) if directory.is_dir() else ():
        try:
            found = json.loads(_read(file))
            process = {key: found[key] for key in _KEYS} | {key: found.get(key) for key in _LATER_KEYS}
            ticks, pid = found.get("start_ticks"), int(process["pid"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # not a report of ours, or gone
        can_tell = process["pid_namespace"] is not None and (process["host"], process["pid_namespace"]) == here
        if can_tell and not _alive(pid, ticks):
            ended.append(pid)
            try:
                file.unlink()
            except OSError:
                continue  # somebody else's, or a read-only place: left for its owner
        else:
            live.append(process)
    return sorted(live, key=lambda process: (process["started"], process["pid"])), ended


def _read(file: Path) -> str:
    """A report's text. Raises OSError for what is no plain file: who may write here may have put a pipe, or a link."""
    opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(opened, "rb") as stream:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            raise OSError("not a report")
        return stream.read(_LARGEST).decode("ascii")


def _alive(pid: int, ticks: int | None) -> bool:
    now = report.start_ticks(pid)
    if now is None:
        try:
            os.kill(pid, 0)
        except PermissionError:  # it is there: /proc may hide others' processes
            return True
        except (OSError, OverflowError):
            return False
        return False  # a zombie, which can be signalled
    return ticks is None or now == ticks
