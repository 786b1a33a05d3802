"""`status`: the reports that processes left, and what a script and a person ask of them."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...sitecustomize import report
from ...sitecustomize.decision import Patch, variable
from ...sitecustomize.report_thread import HEARTBEAT_SECONDS
from ..errors import UserError
from .naming import known
from .reading import content_of, on_one_line, process_of

_LARGEST = 16 << 20  # bytes
_NAMED = re.compile(r".+-\d+-[0-9a-f]{16}\.json")
"""As a process names its report; another file in a directory that somebody named need not be one."""
UNHEARD_SECONDS = 3 * HEARTBEAT_SECONDS
"""After which one who cannot be looked at from here, and has not written, is no witness that anything is alive."""


class Reports(NamedTuple):
    """What a state directory holds. A process of another PID namespace or host (the directory can be shared) is known
    by the lock on its report. Where that tells nothing it counts as live: its `heartbeat` says when it last wrote.
    """

    live: list[dict[str, Any]]  # oldest first
    seen: list[bool]  # of each of those, whether it was seen to be alive: not only by what it wrote
    ended: list[tuple[int, Path]]  # pids, and the reports that they left
    unreadable: Sequence[Path] = ()  # of another user, or of a form that is not known here
    files: Sequence[Path] = ()  # the report of each process that counts as live

    @property
    def silent(self) -> list[dict[str, Any]]:
        """The processes that nobody saw alive, and that have not written in their last three heartbeats."""
        pairs = zip(self.live, self.seen, strict=True)
        return [process for process, seen in pairs if not seen and not is_heard_of(process)]

    @property
    def witnesses(self) -> list[dict[str, Any]]:
        """The processes that are known to be alive: all but the silent ones."""
        return [process for process, seen in zip(self.live, self.seen, strict=True) if seen or is_heard_of(process)]


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
    found: list[tuple[dict[str, Any], bool, Path]] = []
    ended: list[tuple[int, Path]] = []
    unreadable: list[Path] = []
    here = os.uname().nodename, report.pid_namespace()
    for file in _files(directory):
        try:
            text, held = _read(file)
            content = content_of(text)
        except PermissionError:
            unreadable.append(file)
            continue
        except (OSError, ValueError, RecursionError):
            continue  # not a report of ours, or gone
        try:
            process = process_of(text, content)
        except (ValueError, RecursionError):
            if _NAMED.fullmatch(file.name):  # of a later version: its process may lack what is asked for
                unreadable.append(file)
            continue
        held = held if content.get("locked") is True else None
        seen = _is_alive(process, content.get("start_ticks"), held, here)
        if seen is False:
            ended.append((process["pid"], file))
        else:
            found.append((process, seen is True, file))
    found.sort(key=lambda one: (one[0]["started"], one[0]["pid"]))
    files = [file for _, _, file in found]
    return Reports([process for process, _, _ in found], [seen for _, seen, _ in found], ended, unreadable, files)


def _is_alive(process: dict[str, Any], ticks: Any, held: bool | None, here: tuple[str, str | None]) -> bool | None:
    """Whether its process lives, None where that cannot be known. `held` is whether somebody has the lock on its
    report, None where nobody took one; `here` is this host and PID namespace.

    A lock that another kernel took is not always seen here (NFS with `nolock`, a directory that two virtual machines
    share), and a program that closes all descriptors gives its lock back. So one that nobody holds is believed of this
    kernel's processes that cannot be looked at from here, and else after three silent heartbeats.
    """
    namespace = process["pid_namespace"]
    if namespace is not None and (process["host"], namespace) == here:
        if not _runs(process["pid"], ticks):
            return False
        return held is not False or is_heard_of(process)  # another program of the same pid (`exec`) is silent
    if held is not False:
        return held
    same_kernel = None not in (namespace, here[1]) and namespace.split()[-1:] == str(here[1]).split()[-1:]
    return False if same_kernel or not is_heard_of(process) else None


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
    return [pid for pid, file in reports.ended if _is_removed(file)]


def forget(reports: Reports, hosts: Sequence[str]) -> tuple[Reports, list[str]]:
    """Remove the reports of silent processes of these hosts; `*` and `?` stand for any characters.

    Returns what is left, and a sentence for each name. A process that lives after all writes its report again.
    """
    silent = {id(process) for process in reports.silent}
    left = list(zip(reports.live, reports.seen, reports.files, strict=True))
    sentences = []
    for name in hosts:
        of_host = [one for one in left if fnmatch.fnmatchcase(one[0]["host"], name)]
        gone = [one for one in of_host if id(one[0]) in silent and _is_removed(one[2])]
        removed = {file for _, _, file in gone}
        left = [one for one in left if one[2] not in removed]
        stay = f"; {len(of_host) - len(gone)} other reports of it stay" if len(of_host) > len(gone) else ""
        sentences.append(f"removed the reports of {len(gone)} silent processes of {on_one_line(name)}{stay}")
    live, seen, files = [one[0] for one in left], [one[1] for one in left], [one[2] for one in left]
    return reports._replace(live=live, seen=seen, files=files), sentences


def _is_removed(file: Path) -> bool:
    try:
        file.unlink()
    except OSError:
        return False  # somebody else's, or a read-only place: left for its owner
    return True


def age(process: dict[str, Any]) -> float | None:
    """How many seconds ago it last wrote, below 0 where its clock is ahead; None for a report of version 0.1."""
    return None if process["heartbeat"] is None else time.time() - process["heartbeat"]


def is_heard_of(process: dict[str, Any]) -> bool:
    """Whether it has written in its last three heartbeats. A clock that is as far ahead tells nothing of that."""
    seconds = age(process)
    return seconds is not None and abs(seconds) <= UNHEARD_SECONDS


def is_missing(patch: dict[str, Any]) -> bool:
    """Whether a patch was wanted in its process and is not applied."""
    if patch["state"] != "skipped":
        return bool(patch["state"] == "failed")
    return patch["reason"] not in ("off", "optional", "fixed-upstream", "not-present", "unneeded")


def unread(reports: Reports) -> str:
    """What cannot be known here, in a sentence; empty where all can."""
    if not reports.unreadable:
        return ""
    number, first = len(reports.unreadable), on_one_line(str(reports.unreadable[0]))
    noun = "report" if number == 1 else "reports"
    why = "another user's, or of another version; ask as the user of the engine, by its own bundle"
    return f"{number} {noun} cannot be read here, such as {first}: {why}"


class Required(NamedTuple):
    """A patch that has to be applied everywhere, at least of this version."""

    name: str
    version: int | None = None


def unmet(reports: Reports, required: Sequence[Required], digest: str | None = None) -> list[str]:
    """Why not every live process has all of these patches, and runs the bundle of this digest: a sentence each, none
    where each does.

    Where its target was not imported a process needs none. One that is not seen to be alive, and was not heard of for
    three heartbeats, is left out. A report of another user may be that of a process that lacks them.
    """
    found: list[str] = [message] if (message := unread(reports)) else []
    if not reports.witnesses:
        return [*found, "no live patched process is there" if not reports.live else "no process was heard of lately"]
    return [*found, *(why for process in reports.witnesses for why in _lacks(process, required, digest))]


def _lacks(process: dict[str, Any], required: Sequence[Required], digest: str | None) -> Iterator[str]:
    """What one process lacks, a sentence each."""
    who = f"pid {process['pid']} on {process['host']}"
    if digest not in (None, process["digest"]):
        yield f"{who} runs the bundle {process['digest'] or 'of an unknown digest'}, not {digest}"
    for name, version in required:
        patch = _patch(process, name)
        if patch is None:
            yield f"{who} has no patch called {name} in its bundle"
        elif patch["state"] not in ("applied", "armed"):
            why = ": ".join(filter(None, (patch["reason"], patch["detail"])))
            yield f"{name} is {patch['state']} in {who} ({why})"
        elif version is not None and (patch.get("version") or 0) < version:
            yield f"{name} is of version {patch.get('version') or 'unknown'} in {who}, and {version} is required"


def answer(reports: Reports, required: Sequence[Required], digest: str | None = None) -> str:
    """Whether every live process has what is required, as `unmet` decides it, in a line."""
    asked = [name if version is None else f"{name}@{version}" for name, version in required]
    what = ", ".join([*asked, *([f"the bundle {digest}"] if digest else [])])
    found = len(reports.witnesses)
    lacking = sum(any(_lacks(process, required, digest)) for process in reports.witnesses)
    silent = f"; silent ones that do not count: {len(reports.silent)}" if reports.silent else ""
    if lacking:
        return f"no: {lacking} of {found} live processes lack {what}{silent}"
    if others := unmet(reports, required, digest):
        return f"no: {what} was asked for, and {others[0]}"
    armed = sum(_is_armed(process, required) for process in reports.witnesses)
    unused = f" (armed in {armed} of them, which have not imported its target)" if armed else ""
    return f"yes: {found} of {found} live processes have {what}{unused}{silent}"


def _is_armed(process: dict[str, Any], required: Sequence[Required]) -> bool:
    return any((_patch(process, name) or {}).get("state") == "armed" for name, _ in required)


def requirements(reports: Reports, required: Sequence[str], patches: Iterable[Patch]) -> list[Required]:
    """What is required (NAME, or NAME@VERSION), named as the patches that are known here, or a process, have it.

    Raises UserError for a name that neither has, and for a version that is no number; a report that cannot be read may
    have any name.
    """
    names = {patch.name for patch in patches}
    names |= {str(patch["name"]) for process in reports.live for patch in process["patches"]}
    found = []
    for asked in required:
        name, at, version = asked.partition("@")
        if at and not (version.isascii() and version.isdigit()):
            raise UserError(f"--require {asked}: behind @ stands the number of a version, as `show {name}` has it")
        anything = {name.replace("_", "-")} if reports.unreadable else set()
        found.append(Required(known(names | anything, name), int(version) if at else None))
    return found


def idle(reports: Reports, required: Sequence[Required], patches: Iterable[Patch]) -> list[str]:
    """Of patches that are required: which of them no process uses, since none has imported its target; a sentence each.

    That is no fault, and says nothing of whether one that does import it would have the patch.
    """
    off = {patch.name for patch in patches if patch.auto == "off"}
    found = []
    for name, _ in required:
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


def _read(file: Path) -> tuple[str, bool | None]:
    """A report's text, and whether somebody holds the lock on it, None where the file system cannot tell.

    Raises OSError for what is no plain file: who may write here may have put a pipe, or a link.
    """
    while True:
        opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(opened, "rb") as stream:
            status = os.fstat(opened)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
                raise OSError("not a report")
            text = stream.read(_LARGEST).decode("ascii")
            held = report.is_held(opened)
            # One that was replaced meanwhile has lost its lock to the next, which lives. While it is open, that one
            # cannot have its inode.
            if held is not False or os.path.samestat(status, os.lstat(file)):
                return text, held


def _runs(pid: int, ticks: int | None) -> bool:
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
