"""What a patch's own code is given: options, the facts of the variant found, counters, and lines on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from . import guard, no_function, redaction
from .seen_through import SeenThrough

SAY_EVERY_SECONDS = 30.0
STDERR_SECONDS = 1.0
"""How long a line waits for a stderr that takes nothing, such as a pipe that is full and that nobody reads."""

_Error = TypeVar("_Error", bound=BaseException)
_Wrapper = TypeVar("_Wrapper", bound="Callable[..., Any] | guard.Before | guard.After | no_function.Proxy")
_Function = Callable[..., Any]


class PatchContext:
    """`changed` is called after every count, so that the report follows; `failed` once, with a sentence, when the patch
    stands aside.

    An error of a wrapper's own never reaches the engine: the call is answered by the release's own code, and from then
    on the patch stands aside, which is every wrapper's part of it (docs/wrappers.md).
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        facts: Mapping[str, Any],
        changed: Callable[[], None],
        patch_set: Callable[[], str] = lambda: "",
        asked: bool = False,
        failed: Callable[[str], None] = lambda detail: None,
    ) -> None:
        self.name = name
        self.options = options
        self.facts = facts
        self.asked = asked  # by name, with `on` or `force`: also where it is not needed by default
        self.counters: dict[str, int] = {}
        self.covered: dict[tuple[str, str], int] = {}  # by target, and by whose wrapper answered without ours
        self.patch_set = patch_set  # a digest of what patches make of code that torch.compile traces
        self._changed = changed
        self._logged: dict[str, tuple[float, int]] = {}  # kind: when, and how often since
        self.aside = False  # whether the release's own code answers in this process
        self._failed = failed
        self._first = threading.Lock()  # taken by the first error, and kept
        self._put_back: list[Callable[[], None]] = []
        self._lasting: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # else engines would stay
        self._lasting_for_good: list[object] = []

    def count(self, kind: str, number: int = 1) -> None:
        """Add to a counter that `status` shows; not where torch.compile traces: it would count once, not each call."""
        if guard.traced():
            return
        self.counters[kind] = self.counters.get(kind, 0) + number
        self._changed()

    def passed(self, target: str, by: str) -> None:
        """Another patch's wrapper has answered a call, which does not come to this patch's beneath it."""
        if not guard.traced():
            self.covered[target, by] = self.covered.get((target, by), 0) + 1
            self.count("covered")

    def say(self, kind: str, message: str) -> None:
        """One line on stderr, at most one every 30 seconds for each kind; what was held back is counted.

        None where torch.compile traces.
        """
        if guard.traced():
            return
        now = time.monotonic()
        when, held_back = self._logged.get(kind, (float("-inf"), 0))
        if now - when < SAY_EVERY_SECONDS:
            self._logged[kind] = (when, held_back + 1)
            return
        self._logged[kind] = (now, 0)
        more = f" ({held_back} more like it since the last line)" if held_back else ""
        to_stderr(f"{self.name}: {message}{more}")

    def tell(self, kind: str, message: str, number: int = 1) -> None:
        """Count, and say so."""
        self.count(kind, number)
        self.say(kind, message)

    # Errors of a patch's own

    def deliberate(self, error: _Error) -> _Error:
        """Mark an error as meant for the caller: `raise livepatch.deliberate(ValueError(...)) from cause`."""
        guard.deliberate(error)
        return error

    def on_stand_aside(self, put_back: Callable[[], None]) -> None:
        """Call `put_back` when the patch stands aside, before the release's own code answers. The last is called first.

        It gives back what the patch holds and the release's code would miss. It is kept for the life of the process.
        """
        self._put_back.append(put_back)

    def lasting(self, wrapper: _Wrapper) -> _Wrapper:
        """Let a wrapper go on after the patch has stood aside, for what the patch did before; it asks `aside`."""
        try:
            self._lasting[id(wrapper)] = wrapper
        except TypeError:  # its class has slots, and no place for a weak reference
            self._lasting_for_good.append(wrapper)
        return wrapper

    def before(self, look: Callable[..., None]) -> guard.Before:
        """In a wrapper's place: `look(instance, ...)`, with what the caller gives, before each call of a method."""
        return guard.Before(look)

    def after(self, look: Callable[..., None]) -> guard.After:
        """In a wrapper's place: `look(answer, instance, ...)` after each call of a method that returned."""
        return guard.After(look)

    def shortcut(
        self, make: Callable[[_Function, _Function], _Function], wrapper: guard.Wrapper | guard.Before | guard.After
    ) -> guard.Shortcut:
        """In a wrapper's place, where each step of an engine calls a method: `make(release, guarded)` stands there.

        It gives a function with the method's parameters. That calls `release`, the release's own code, where this call
        is none of the patch's business, and else `guarded`, which is `wrapper` around it. What that function does by
        itself is not guarded: nothing there may raise.
        """
        return guard.Shortcut(make, wrapper)

    def wrapt(self, wrapper: guard.Wrapper) -> no_function.Proxy:
        """In a wrapper's place, for a callable that is no function of Python: wrapt's proxy, which calls `wrapper`."""
        return no_function.Proxy(wrapper)

    def after_import(
        self, change: Callable[[ModuleType], object], holds: Callable[[ModuleType], object]
    ) -> no_function.AfterImport:
        """In a wrapper's place, for a constant, a class or a registry: `change(module)` when the module has run.

        `holds(module)` says whether it is changed, as its callers find it: asked then, and at each report. What stood
        at the target is put back by itself, all else that `change` does by `on_stand_aside`.
        """
        return no_function.AfterImport(change, holds)

    def lasts(self, wrapper: object) -> bool:
        return self._lasting.get(id(wrapper)) is wrapper or any(wrapper is one for one in self._lasting_for_good)

    def around(
        self,
        function: Callable[..., Any],
        wrapper: guard.Wrapper | guard.Before | guard.After | guard.Shortcut,
        of: Any = None,
    ) -> Callable[..., Any]:
        """`wrapper` around something that is no target, such as a method of one object, guarded as a target is.

        `of` is that object: the wrapper is given it also where somebody has put a plain function in the method's place.
        """
        where = getattr(function, "__qualname__", type(function).__qualname__)
        return guard.around(function, wrapper, self, where, of)

    def around_its(
        self, owner: Any, name: str, wrapper: guard.Wrapper | guard.Before | guard.After | guard.Shortcut
    ) -> None:
        """Put `wrapper` around a method of one object, from now on."""
        setattr(owner, name, self.around(getattr(owner, name), wrapper, owner))

    def over(self, method: Callable[..., Any], call: Callable[..., Any]) -> SeenThrough:
        """`call`, to be put in the method's place on its object: who looks there sees all else of the method."""
        return SeenThrough(call, method)

    def stand_aside(self, where: str, error: Exception) -> None:
        """Leave everything to the release's own code from now on. `where` names what was called.

        Also for a patch that finds an error of its own and has a better answer to this one call than the release's.
        """
        if self._first.acquire(blocking=False):
            detail = f"{where}: {_described(error)}; the release's own code answers from now on"
            self._failed(detail + self._withdrawn())

    def withdraw(self) -> None:
        """Stand aside without a word."""
        if self._first.acquire(blocking=False):
            self._withdrawn()

    def withdraw_at_next_call(self) -> None:
        """Stand aside without a word in the thread that calls a wrapper next: what is given back is that thread's."""
        self.__class__ = _Leaving

    def _withdrawn(self) -> str:
        self.aside = True
        failures = ""
        for put_back in reversed(self._put_back):
            try:
                put_back()
            except Exception as error:
                failures += f"; not all that the patch held could be given back: {_described(error)}"
        return failures

    def forget(self) -> None:
        """Begin anew, as a forked child does."""
        self.counters.clear()
        self.covered.clear()
        self._logged.clear()


class _Leaving(PatchContext):
    """Stands aside when a wrapper asks whether it does: to ask costs other calls nothing."""

    @property
    def aside(self) -> bool:  # type: ignore[override]
        self.__class__ = PatchContext  # type: ignore[assignment]
        self.withdraw()
        return True


def _described(error: BaseException) -> str:
    """One line: the error, and the line that raised it."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "its text cannot be made"
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    place = f" ({os.path.basename(last.tb_frame.f_code.co_filename)}, line {last.tb_lineno})" if last else ""
    return f"{type(error).__name__}: {text}{place}"


before_lines: list[Callable[[], None]] = []
"""Called before any line is written: the process's own line comes first."""


def to_stderr(message: str) -> None:
    """Say one line, behind the process's own."""
    for say in before_lines:
        say()
    line(message)


_CONTROLS = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
"""A client that names its request with a line's end would write lines of ours, with an escape into a terminal."""

_unread: list[int] = []
"""The stderr that was waited for in vain, until it takes something again."""


def line(message: str) -> None:
    """One line, whole or not at all: processes that share a stderr do not mix theirs, and a closed one hurts nobody.

    An import, a fork and the process's end wait for it, so that a line that nobody takes is given up. Without secrets.
    With LIVEPATCH_LOG=json it is an object: `time` (seconds since 1970), `logger`, `pid`, `message`.
    """
    message = redaction.sentence(message)
    text = f"vllm-livepatch: {message.translate(_CONTROLS)}\n"
    if os.environ.get("LIVEPATCH_LOG", "").strip().lower() == "json":
        entry = {"time": round(time.time(), 3), "logger": "vllm-livepatch", "pid": os.getpid(), "message": message}
        text = json.dumps(entry) + "\n"
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no stderr, or a closed one
        try:
            descriptor = sys.stderr.fileno()
        except (OSError, ValueError):  # somebody's own, without a file
            sys.stderr.write(text)
            sys.stderr.flush()
            return
        data = text.encode("utf-8", "backslashreplace")
        if _takes(descriptor):
            sys.stderr.flush()
        # Past the buffer: what that cannot write becomes the process's exit code, 120. A pipe that takes anything takes
        # so much in one piece. It is not made non-blocking: who else has it would find it so.
        while data and _takes(descriptor):
            data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]


def _takes(descriptor: int) -> bool:
    """Whether a write would not wait. Once this was waited for in vain, it is only looked at."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    found = bool(poll.poll(0 if descriptor in _unread else STDERR_SECONDS * 1000))
    _unread[:] = [] if found else [descriptor]
    return found
