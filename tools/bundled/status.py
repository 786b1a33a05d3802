"""`status`: the reports that processes left, and what a script and a person ask of them."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...sitecustomize import report
from ...sitecustomize.decision import Patch, variable
from ...sitecustomize.report_thread import HEARTBEAT_SECONDS
from ..errors import UserError
from .naming import known
from .reading import on_one_line, process_of

_LARGEST = 16 << 20  # bytes
_NAMED = re.compile(r".+-\d+-[0-9a-f]{16}\.json")
"""As a process names its report; another file in a directory that somebody named need not be one."""
UNHEARD_SECONDS = 3 * HEARTBEAT_SECONDS
"""After which one who cannot be looked at from here, and has not written, is no witness that anything is alive."""


class Reports(NamedTuple):
    """What a state directory holds. A process of another host or PID namespace (the directory can be shared) cannot be
    looked at from here, and counts as live: its `heartbeat` says when it last wrote.
    """

    live: list[dict[str, Any]]  # oldest first
    seen: list[bool]  # of each of those, whether it was seen to be alive: not only by what it wrote
    ended: list[tuple[int, Path]]  # pids, and the reports that they left
    unreadable: Sequence[Path] = ()  # of another user, or of a form that is not known here


def state_directory(given: Path | None, required: bool = False) -> Path:
    """Where the reports are. A directory that somebody named must exist; the default one may not, yet.

    Where patches are `required`, one that does not exist holds no live process: that is the answer, and no bad input.
    """
    named = given or (Path(os.environ["LIVEPATCH_STATE_DIR"]) if os.environ.get("LIVEPATCH_STATE_DIR") else None)
    if named is not None and not os.path.isdir(named):
        message = f"{named} is not a directory, or not to be seen by this user"
        if not required:
            raise UserError(message)
        print(f"vllm-livepatch: {message}", file=sys.stderr)
    if named is None:
        try:
            os.close(report.opened({}))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UserError(f"{error.filename} is not used: {error.strerror or error}") from error
    return named or Path(report.directory({}))


def read(directory: Path) -> Reports:
    """Every report. Nothing is removed."""
    found: list[tuple[dict[str, Any], bool]] = []
    ended: list[tuple[int, Path]] = []
    unreadable: list[Path] = []
    here = (os.uname().nodename, report.pid_namespace())
    for file in _files(directory):
        try:
            content = json.loads(_read(file))
        except PermissionError:
            unreadable.append(file)
            continue
        except (OSError, ValueError, RecursionError):
            continue  # not a report of ours, or gone
        try:
            process = process_of(content)
        except (ValueError, RecursionError):
            if _NAMED.fullmatch(file.name):  # of a later version: its process may lack what is asked for
                unreadable.append(file)
            continue
        ticks, pid = content.get("start_ticks"), process["pid"]
        can_tell = process["pid_namespace"] is not None and (process["host"], process["pid_namespace"]) == here
        if can_tell and not _alive(pid, ticks):
            ended.append((pid, file))
        else:
            found.append((process, can_tell))
    found.sort(key=lambda one: (one[0]["started"], one[0]["pid"]))
    return Reports([process for process, _ in found], [seen for _, seen in found], ended, unreadable)


def _files(directory: Path) -> list[Path]:
    """In a directory that is there. Raises UserError where nobody here may look into it."""
    try:
        return sorted(Path(entry) for entry in os.scandir(directory) if entry.name.endswith(".json"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror or error}") from error


def processes(directory: Path) -> list[dict[str, Any]]:
    """The reports of live processes, oldest first."""
    return read(directory).live


def prune(reports: Reports) -> list[int]:
    """Remove the reports of processes that are known to have ended: the pids of those that are gone now."""
    gone: list[int] = []
    for pid, file in reports.ended:
        try:
            file.unlink()
            gone.append(pid)
        except OSError:
            continue  # somebody else's, or a read-only place: left for its owner
    return gone


def age(process: dict[str, Any]) -> float | None:
    """How many seconds ago it last wrote, below 0 where its clock is ahead; None for a report of version 0.1."""
    return None if process["heartbeat"] is None else time.time() - process["heartbeat"]


def is_heard_of(process: dict[str, Any]) -> bool:
    """Whether it has written in its last three heartbeats. A clock that is as far ahead tells nothing of that."""
    seconds = age(process)
    return seconds is not None and abs(seconds) <= UNHEARD_SECONDS


def is_missing(process: dict[str, Any], patch: dict[str, Any]) -> bool:
    """Whether a patch was wanted in a process and is not applied."""
    if patch["state"] != "skipped":
        return bool(patch["state"] == "failed")
    toggle = ((process["settings"] or {}).get("toggles") or {}).get(patch["name"], "auto")
    nothing_to_mend = patch["reason"] in ("fixed-upstream", "not-present") and toggle not in ("on", "force")
    return patch["reason"] not in ("off", "optional") and not nothing_to_mend


def unread(reports: Reports) -> str:
    """What cannot be known here, in a sentence; empty where all can."""
    if not reports.unreadable:
        return ""
    number, first = len(reports.unreadable), on_one_line(str(reports.unreadable[0]))
    noun = "report" if number == 1 else "reports"
    why = "another user's, or of another version; ask as the user of the engine, by its own bundle"
    return f"{number} {noun} cannot be read here, such as {first}: {why}"


def unmet(reports: Reports, required: Sequence[str]) -> list[str]:
    """Why not every live process has all of these patches: a sentence each, none where each has them.

    Where its target was not imported a process needs none. One that is not seen to be alive, and was not heard of for
    three heartbeats, is left out. A report of another user may be that of a process that lacks them.
    """
    found: list[str] = [message] if (message := unread(reports)) else []
    witnesses = [
        process for process, seen in zip(reports.live, reports.seen, strict=True) if seen or is_heard_of(process)
    ]
    if not witnesses:
        return [*found, "no live patched process is there" if not reports.live else "no process was heard of lately"]
    for name in required:
        for process in witnesses:
            who = f"pid {process['pid']} on {process['host']}"
            patch = _patch(process, name)
            if patch is None:
                found.append(f"{who} has no patch called {name} in its bundle")
            elif patch["state"] not in ("applied", "armed"):
                why = ": ".join(filter(None, (patch["reason"], patch["detail"])))
                found.append(f"{name} is {patch['state']} in {who} ({why})")
    return found


def required_names(reports: Reports, required: Sequence[str], patches: Iterable[Patch]) -> list[str]:
    """The names that are required, as the patches that are known here, or a process, have them.

    Raises UserError for one that neither has; a report that cannot be read may have any.
    """
    names = {patch.name for patch in patches}
    names |= {str(patch["name"]) for process in reports.live for patch in process["patches"]}
    if reports.unreadable:
        names |= {name.replace("_", "-") for name in required}
    return [known(names, name) for name in required]


def idle(reports: Reports, required: Sequence[str], patches: Iterable[Patch]) -> list[str]:
    """Of patches that are required: which of them no process uses, since none has imported its target; a sentence each.

    That is no fault, and says nothing of whether one that does import it would have the patch.
    """
    off = {patch.name for patch in patches if patch.auto == "off"}
    found = []
    for name in required:
        of_all = [(_patch(process, name), process["settings"] or {}) for process in reports.live]
        if any(patch is None or patch["state"] != "armed" for patch, _ in of_all):
            continue
        toggles = [(settings.get("toggles") or {}).get(name, "auto") for _, settings in of_all]
        turned_off = "off" in toggles or (name in off and "auto" in toggles)
        rest = f", and it is off unless {variable(name)}=on asks for it" if turned_off else ""
        found.append(f"{name} is applied nowhere: no process has imported what it patches{rest}")
    return found


def _patch(process: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((patch for patch in process["patches"] if patch["name"] == name), None)


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
