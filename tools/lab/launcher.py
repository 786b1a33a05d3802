"""Runs one command such that nothing of it can be left behind. Started by the supervisor, a process a part.

``python launcher.py SUPERVISOR_PID STATUS_FD GRACE_SECONDS COMMAND...``

It writes the command's pid (or why it could not be started) to the descriptor ``STATUS_FD``, hands on its exit code
(128 + N for signal N), and ends every process that the command started: when the command ends by itself, when this
process gets SIGTERM (the command then has GRACE_SECONDS), and when the supervisor dies in whatever way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def main(arguments: list[str]) -> int:
    supervisor, status, grace, command = int(arguments[0]), int(arguments[1]), float(arguments[2]), arguments[3:]
    # Orphans of the command are handed to this process, not to init, so that all of them can be found.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != supervisor:  # it died before the line above could take effect
        return 1
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def prepare() -> None:
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=prepare)
    except OSError as error:
        os.write(status, f"{command[0]}: {error.strerror}".encode())
        return 127
    os.write(status, str(child.pid).encode())
    os.close(status)
    code: int | None = None
    deadline: float | None = None
    while code is None:
        code = _reap(child.pid)
        if code is not None:
            break
        if deadline is None:
            if signal.sigwait(_SIGNALS) != signal.SIGCHLD:
                deadline = time.monotonic() + grace
                os.kill(child.pid, signal.SIGTERM)
        elif signal.sigtimedwait({signal.SIGCHLD}, max(0.0, deadline - time.monotonic())) is None:
            os.kill(child.pid, signal.SIGKILL)
            deadline = time.monotonic() + grace
    _end_descendants()
    return code


def die_with_parent() -> None:
    """For a ``preexec_fn``: the process is killed when the thread that started it ends, in whatever way."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _reap(command: int) -> int | None:
    """Collect every ended child; the command's exit code if it is one of them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == command:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code


def _end_descendants() -> None:
    """Kill what is left. Again and again: a process can have forked between the look and the kill."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for process in psutil.Process().children():
            try:
                os.waitpid(process.pid, 0)
            except ChildProcessError:
                continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
