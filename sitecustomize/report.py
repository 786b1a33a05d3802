"""The report that a patched process leaves for `status`: one JSON file a process, replaced as a whole.

Others may be able to write to the directory: names cannot be foreseen, links are not followed, the file is its owner's.

The process holds a record lock (`fcntl`) on its report, which the kernel takes back when the process ends, however that
ends: by the lock a reader in any container of the machine knows. A forked child does not have its parent's record
locks, as it would have those of `flock` and of open file descriptions. They end when the process closes any descriptor
of that file, and nothing else in the process opens it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from .redaction import without_secrets

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PATH = getattr(os, "O_PATH", os.O_RDONLY)  # it need not be readable to be written to


_FLOCK = "hhqqi"  # type, whence, start, length (0: to the end), pid


def _hold(file: int) -> bool:
    """Lock a file of ours for as long as this process has it open. False on a file system without locks."""
    try:
        fcntl.fcntl(file, fcntl.F_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        return True
    except OSError:
        return False


def is_held(file: int) -> bool | None:
    """Whether another process holds the lock on an open file; None where the file system cannot tell."""
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return bool(struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)
    except OSError:
        return None


def directory(environ: Mapping[str, str]) -> str:
    """Where reports go: LIVEPATCH_STATE_DIR, else a per-user directory under the system's temporary one."""
    given = environ.get("LIVEPATCH_STATE_DIR")
    if given:
        return given
    try:
        temporary = tempfile.gettempdir()
    except OSError:  # none can be written to; `status` may read what was written before
        temporary = os.environ.get("TMPDIR") or "/tmp"
    return os.path.join(temporary, f"vllm-livepatch-{os.getuid()}")


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; with the pid this names a process for good.

    None where there is no such process, or no /proc. A zombie counts as none.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def pid_namespace() -> str | None:
    """Where this process's pid means what it says: the namespace, and the boot of the machine that it is on.

    The first namespace has the same number on every machine. None where there is no /proc, or it is that of another
    namespace (`unshare --pid` without `--mount-proc`): what it says of a pid is true of another process.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return None
        namespace = os.readlink("/proc/self/ns/pid")
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return f"{namespace} {file.read().strip().decode('ascii', 'replace')}"
    except OSError:
        return None


def opened(environ: Mapping[str, str]) -> int:
    """A descriptor of the directory. Raises OSError.

    One that nobody named is used only if it is ours alone: its name is under a directory that anybody can write to.
    """
    where = directory(environ)
    named = bool(environ.get("LIVEPATCH_STATE_DIR"))
    found = os.open(where, _PATH | os.O_DIRECTORY | os.O_CLOEXEC | (0 if named else os.O_NOFOLLOW))
    status = os.fstat(found)
    refused = ""
    if not named and status.st_uid != os.getuid():
        refused = "it belongs to somebody else"
    elif not named and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        refused = "others may write to it"
    if refused:
        os.close(found)
        raise PermissionError(1, refused, where)
    return found


class ProcessReport:
    """This process's file. `write` never raises: a report that cannot be left must not hurt the process."""

    def __init__(self, environ: Mapping[str, str], about: Mapping[str, Any]) -> None:
        """`about` is what the report says of the bundle and its settings."""
        self._environ = environ
        self._about = dict(about)
        self.error: str | None = None
        self._argv: list[str] = []  # as it is shown, once it was asked for: a long one takes a tenth of a second
        self._held: tuple[int, os.stat_result] | None = None  # the descriptor that has the lock, and its file
        self.begin()

    def begin(self) -> None:
        """Take this process's identity; once more in a forked child."""
        self._let_go()  # a copy of the parent's descriptor: without its lock
        self._pid = os.getpid()
        self._ticks = start_ticks(self._pid)
        self._namespace = pid_namespace()
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._token = os.urandom(8).hex()
        self._written = False

    def late(self) -> None:
        """A write was waited for, and has not come back."""
        self.error = self.error or f"no report yet in {directory(self._environ)}, which is slow to answer"

    def write(self, packages: Mapping[str, str | None], patches: list[dict[str, Any]]) -> None:
        host = os.uname().nodename
        self._argv = self._argv or without_secrets(sys.orig_argv)
        content: dict[str, Any] = {
            "pid": self._pid,
            "host": host,
            "argv": self._argv,
            "python": sys.executable,
            "started": self._started,
            **self._about,
            "heartbeat": round(time.time(), 3),
            "pid_namespace": self._namespace,
            "packages": dict(packages),
            "patches": patches,
            "start_ticks": self._ticks,
        }
        try:
            os.makedirs(directory(self._environ), mode=0o700, exist_ok=True)
            place = opened(self._environ)
            try:
                self._replace(place, self._name(), content)
                self._written = True
            finally:
                os.close(place)
            self.error = None
        except OSError as error:
            self.error = f"no report in {directory(self._environ)}: {error.strerror or error}"

    def remove(self) -> None:
        """The process ends: it is nobody whose report `status` should show."""
        if not self._written:
            return
        with contextlib.suppress(OSError):
            place = opened(self._environ)
            try:
                os.unlink(self._name(), dir_fd=place)
            finally:
                os.close(place)
        self._let_go()

    def _name(self) -> str:
        return f"{os.uname().nodename.replace(os.sep, '_')}-{self._pid}-{self._token}.json"

    def _replace(self, place: int, name: str, content: dict[str, Any]) -> None:
        temporary = f".{os.urandom(8).hex()}.tmp"
        file = os.open(temporary, _NEW_FILE, 0o600, dir_fd=place)
        try:
            # Before it has its name, so that a file of that name is never without the lock of a process that lives.
            content["locked"] = held = _hold(file)
            data = json.dumps(content).encode("ascii")
            while data:
                data = data[os.write(file, data) :]
            os.replace(temporary, name, src_dir_fd=place, dst_dir_fd=place)
        except BaseException:
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=place)
            raise
        self._let_go()
        if held:
            self._held = file, os.fstat(file)
        else:
            os.close(file)

    def _let_go(self) -> None:
        """Close what had the lock, unless the program has, as a daemon does, and the number is another file's now."""
        held, self._held = self._held, None
        if held is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(held[0]), held[1]):
                    os.close(held[0])
