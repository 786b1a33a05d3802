"""Threads of ours. The program's signals are not for them."""

from __future__ import annotations

import _thread
import signal
import sys
import threading

# The kernel ends a process that faults while these are blocked: faulthandler's trace would be lost.
_OF_A_FAULT = {signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}


def start(thread: threading.Thread) -> None:
    """Start a thread in which every signal is blocked.

    The kernel gives a process's signal to any thread that does not block it. One of ours would take, and the process
    would die of, a signal that the program's own threads block and wait for (`signal.sigwait`). A thread begins with
    the mask of the thread that starts it, so that the mask is set here, and is the caller's own again at the end.
    Raises RuntimeError where no thread can be had.
    """
    if not _in_main_interpreter():
        raise RuntimeError("a subinterpreter ends the process when it ends before all of its threads")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OF_A_FAULT)
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_main_interpreter() -> bool:
    asked = getattr(_thread, "_is_main_interpreter", None)
    if asked is None:  # to Python 3.11
        try:
            __import__("_xxsubinterpreters")
        except ImportError:  # a Python without: neither can a program make one so
            return True
        interpreters = sys.modules["_xxsubinterpreters"]
        return bool(interpreters.get_current() == interpreters.get_main())
    return bool(asked())
