"""The report that a patched process leaves for `status`: one JSON file a process, replaced as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any


def directory(environ: Mapping[str, str]) -> str:
    """Where reports go: LIVEPATCH_STATE_DIR, else a per-user directory under the system's temporary one.

    Raises OSError where the system has no temporary directory.
    """
    given = environ.get("LIVEPATCH_STATE_DIR")
    return given or os.path.join(tempfile.gettempdir(), f"vllm-livepatch-{os.getuid()}")


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


class ProcessReport:
    """This process's file. `write` never raises: a report that cannot be left must not hurt the process."""

    def __init__(self, environ: Mapping[str, str], bundle: str) -> None:
        self._environ = environ
        self._bundle = bundle
        self.error: str | None = None
        self.begin()

    def begin(self) -> None:
        """Take this process's identity; once more in a forked child."""
        self._pid = os.getpid()
        self._ticks = start_ticks(self._pid)
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def write(self, packages: Mapping[str, str | None], patches: list[dict[str, Any]]) -> None:
        host = os.uname().nodename
        content = {
            "pid": self._pid,
            "host": host,
            "argv": list(sys.orig_argv),
            "python": sys.executable,
            "started": self._started,
            "bundle": self._bundle,
            "packages": dict(packages),
            "patches": patches,
            "start_ticks": self._ticks,
        }
        where = "the state directory"
        try:
            where = directory(self._environ)
            self._make_usable(where)
            name = f"{host.replace(os.sep, '_')}-{self._pid}-{self._ticks}"
            temporary = os.path.join(where, f".{name}.tmp")
            try:
                with open(temporary, "w", encoding="ascii") as file:
                    json.dump(content, file)
                os.replace(temporary, os.path.join(where, f"{name}.json"))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            self.error = None
        except OSError as error:
            self.error = f"no report in {where}: {error.strerror or error}"

    def _make_usable(self, where: str) -> None:
        os.makedirs(where, mode=0o700, exist_ok=True)
        if not self._environ.get("LIVEPATCH_STATE_DIR"):
            # A name under a shared temporary directory can be taken by anybody: it must be a directory, and ours.
            status = os.lstat(where)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                raise PermissionError(1, "it belongs to somebody else", where)
