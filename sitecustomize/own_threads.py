"""Threads of ours. The program's signals are not for them."""

from __future__ import annotations

import signal
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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OF_A_FAULT)
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
