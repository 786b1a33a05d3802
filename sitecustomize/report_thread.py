"""When the report is written: by a thread of its own, for which neither an import nor the engine waits."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from . import own_threads
from .context import to_stderr

Content = TypeVar("Content")
_Answer = TypeVar("_Answer")

HEARTBEAT_SECONDS = 60.0
"""How often it is written although nothing happened: some kilobytes, by a thread that sleeps until then."""
EXIT_SECONDS = 2.0
FORK_SECONDS = 1.0
CHILD_SECONDS = 10.0
"""A forked child that lives as long is a process of its own, such as an engine core; others leave no report unless
something happens in them."""
_LAST = -100
"""Among the finalizers of multiprocessing: ours after those of others, which may still count something."""


class ReportThread(Generic[Content]):
    """Calls `look`, which gives the content or None, and `write`, which takes as long as the file system takes; `end`
    instead of the last `write`, at the process' exit.

    While `write` does not come back, forks and the exit no longer wait for it. A fork ends the thread once it has done
    what it was asked to (3.12 and later warn of a fork with threads); what is asked next starts it again.
    """

    def __init__(
        self,
        look: Callable[[], Content | None],
        write: Callable[[Content], None],
        end: Callable[[Content | None], None],
        due_in: Callable[[], float] = lambda: float("inf"),
    ) -> None:
        """`due_in` says in how many seconds `look` has something to do although nobody asks."""
        self._look = look
        self._write = write
        self._end = end
        self._due_in = due_in
        self._failed = False  # a step has raised, and that was said
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()  # over what is below: never held while something is written
        self._thread: threading.Thread | None = None
        self._asked = float("inf")  # time.monotonic() at which to write
        self._begun = self._ended = 0  # writes
        self._stopping = self._closed = False
        self._stuck = False  # somebody waited for a write in vain, and it has not come back since
        self._idle = True  # nothing was asked
        self._finalizer: Any = None

    def soon(self, seconds: float) -> None:
        """Have it written in so many seconds at the latest. Waits for nothing."""
        at = time.monotonic() + seconds
        if self._asked <= at:
            return
        with self._changed:
            if self._asked <= at or self._closed:
                return
            self._asked, self._idle = at, False
            self._changed.notify_all()
            if self._thread is None:
                self._start()

    def flush(self, seconds: float) -> bool:
        """Have it written now, and wait so many seconds at most: whether a write that began since has ended."""
        with self._changed:
            wanted = self._begun + 1
        self.soon(0.0)
        with self._changed:
            if self._thread is None or self._stuck:
                return False
            done = self._changed.wait_for(lambda: self._ended >= wanted, seconds)
            self._stuck = not done
            return done

    def is_there(self) -> bool:
        """Whether there is a thread: some interpreters start none, and the system may have none left."""
        return self._thread is not None

    def close(self) -> None:
        """At the process' exit. Where there is no thread, nothing has happened since the last report."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            if self._idle and not self._begun:
                return  # a daemon thread may wait, and ends with the process
            self._asked = time.monotonic()
            if self._thread is None and not self._stuck:
                self._start()  # where the interpreter still allows it
            alone = self._thread is None
        if alone:
            content = self._unfailing(self._look)
            if not self._stuck:
                self._unfailing(self._end, content)
        self._stop(EXIT_SECONDS)

    def about_to_fork(self) -> None:
        self._stop(FORK_SECONDS)

    def forked_child(self) -> None:
        """The thread and who held what it waits for are not here."""
        self._begin()
        self.soon(CHILD_SECONDS)
        self._idle = True

    def _start(self) -> None:
        self._stopping = False
        try:
            self._thread = threading.Thread(target=self._run, name="vllm-livepatch report", daemon=True)
            own_threads.start(self._thread)
        except RuntimeError:  # the interpreter is ending or allows no such threads, or the system has none left
            self._thread = None

    def tell_multiprocessing(self) -> None:
        """Its forked children end by `os._exit`, which runs its finalizers and nothing of `atexit`.

        Not when a child begins: it forgets the finalizers that it finds. Such a child may end before its thread runs.
        """
        util: Any = sys.modules.get("multiprocessing.util")
        if self._finalizer is None and hasattr(util, "Finalize"):
            self._finalizer = util.Finalize(None, self.close, exitpriority=_LAST)

    def _stop(self, seconds: float) -> None:
        with self._changed:
            thread = self._thread
            if thread is None or thread is threading.current_thread() or self._stuck:
                return
            self._stopping = True
            self._changed.notify_all()
        thread.join(seconds)
        if thread.is_alive():
            self._stuck = True
            return
        for _ in range(1000):  # Python counts the system's threads, where one that was joined may stay for a moment
            if not os.path.exists(f"/proc/self/task/{thread.native_id}"):
                break
            os.sched_yield()

    def _run(self) -> None:
        heartbeat = time.monotonic() + self._pause()
        while True:
            with self._changed:
                while not self._stopping and min(self._asked, heartbeat) > time.monotonic():
                    self._changed.wait(min(self._asked, heartbeat) - time.monotonic())
                if self._stopping and self._asked == float("inf"):
                    self._thread = None
                    return
                self._asked = float("inf")
                self._begun += 1
                closed = self._closed
            self._unfailing(self.tell_multiprocessing)
            content = self._unfailing(self._look)
            if closed:
                self._unfailing(self._end, content)
            elif content is not None:
                self._unfailing(self._write, content)
            with self._changed:
                self._ended += 1
                self._stuck = False
                self._changed.notify_all()
            # A look that raised has not done what was due, and would at once be due again.
            heartbeat = time.monotonic() + (HEARTBEAT_SECONDS if content is None else self._pause())

    def _unfailing(self, step: Callable[..., _Answer], *given: Content | None) -> _Answer | None:
        """What a step gives, None where it raises.

        It looks at objects of others, whose code may raise anything: the next report, and the process's last, come all
        the same. Said once.
        """
        try:
            return step(*given)
        except BaseException as error:
            if not self._failed:
                self._failed = True
                to_stderr(f"a report failed, please report it: {type(error).__name__}: {error}")
            return None

    def _pause(self) -> float:
        due_in = self._unfailing(self._due_in)
        return HEARTBEAT_SECONDS if due_in is None else min(HEARTBEAT_SECONDS, max(0.0, due_in))
