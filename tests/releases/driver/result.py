"""A driver's result: the stdout that is kept for it, the cases that it is made of, and its one JSON object.

Other drivers' modules may be imported beside this one; only functions act, so that importing this does nothing.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import IO, Any, NoReturn

HERE = os.path.dirname(os.path.abspath(__file__))
_stdout: IO[str] | None = None
"""Where the result goes, once a driver has taken it."""


def take_stdout() -> None:
    """Keep stdout for the result; what others print goes to stderr. Before vLLM and LMCache are imported: they log to it.

    Where a driver's module imports another's, the first has taken it.
    """
    global _stdout
    if _stdout is None:
        _stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)


def stand_in() -> None:
    """Have the stand-ins for a device's libraries imported, also where such a library is installed: here is no device."""
    beside, above = (os.path.normpath(os.path.join(HERE, *up, "standins")) for up in ([".."], ["..", ".."]))
    sys.path.insert(1, beside if os.path.isdir(beside) else above)


def begin_driver() -> None:
    """Take stdout, and collect no garbage until the driver says so.

    Thousands of modules are about to be created, none of them garbage: collecting meanwhile costs 2 s of 10.
    """
    gc.disable()
    take_stdout()


def wait(true: Callable[[], object], seconds: float = 60.0) -> bool:
    """Await what another thread or process does, of which there is no event here; whether it came about in time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """The same, of what has to come about."""
    assert wait(true, seconds), "it never came about"


class NotBuilt(Exception):
    """What a case is made of does not fit the code that is installed: nothing is known of that code."""


_BUILDING = (AttributeError, ImportError, NameError, TypeError)
_CALLED = re.compile(r"([\w.<>]+)\(\) (got|takes|missing)\b")


def _is_ours(file: str) -> bool:
    return os.path.dirname(os.path.abspath(file)) == HERE or os.path.basename(file) == "proof.py"


def _is_of_ours(name: str) -> bool:
    """Whether a class or function of this name is one of a driver's or a proof's."""
    modules = [module for module in list(sys.modules.values()) if _is_ours(getattr(module, "__file__", None) or "")]
    return any(getattr(vars(module).get(name), "__module__", None) == module.__name__ for module in modules)


def does_not_fit(error: BaseException) -> bool:
    """Whether it was raised because a driver or its doubles do not fit the code: by their own use of it, or by its of them."""
    if isinstance(error, NotBuilt):
        return True
    if not isinstance(error, _BUILDING):
        return False
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    if not frames or _is_ours(frames[-1].filename):
        return True
    if isinstance(error, AttributeError) and error.obj is not None:
        kind = error.obj if isinstance(error.obj, type) else type(error.obj)
        if kind is SimpleNamespace:  # what stands in for their objects
            return True
        return _is_ours(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
    called = _CALLED.match(str(error))
    return bool(called) and _is_of_ours(called[1].partition(".")[0])  # type: ignore[index]


def trouble(error: BaseException) -> str:
    """An error in a line: of what type, what it says, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    said = (str(error).splitlines() or [""])[0]
    if isinstance(error, NotBuilt) and error.__cause__ is not None:
        return said  # which has it of its cause
    ours = [frame for frame in frames if _is_ours(frame.filename)]
    places = [f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in (*frames[-1:], *ours[-1:])]
    where = f" ({', by '.join(dict.fromkeys(places))})" if places else ""
    return f"{said}{where}" if isinstance(error, NotBuilt) else f"{type(error).__name__}: {said}{where}"


def _checked(error: Exception) -> None:
    if does_not_fit(error):
        raise NotBuilt(trouble(error)) from error


def attempted(case: Callable[[], Any]) -> Any:
    """What a case came to; an error is an outcome too, so that one case's does not hide the others'. Raises NotBuilt."""
    try:
        return case()
    except Exception as error:
        traceback.print_exc()
        _checked(error)
        return "raises: " + traceback.format_exc().strip().splitlines()[-1]


def all_attempted(cases: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each case came to, by its name."""
    return {name: attempted(case) for name, case in cases.items()}


def raised(error: Exception) -> str:
    """An error as an outcome: what it is, and in which function it was raised. Raises NotBuilt."""
    _checked(error)
    return f"{type(error).__name__} in {traceback.extract_tb(error.__traceback__)[-1].name}"


def outcome_of(run: Callable[[], str]) -> str:
    """What a run came to: its own word, or what it raised."""
    try:
        return run()
    except Exception as error:
        traceback.print_exc()
        return raised(error)


class Expecting:
    """A case's world, in which it is noted what is wrong."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def expect(self, true: object, otherwise: str) -> bool:
        """Note what is wrong where `true` is not; whether it is."""
        if not true and otherwise not in self.wrong:
            self.wrong.append(otherwise)
        return bool(true)


def print_result(result: Mapping[str, Any], *packages: ModuleType) -> None:
    """Print the result, with the file that each package was imported from: it must be the release's that was asked for."""
    files = {package.__name__: package.__file__ for package in packages}
    print(json.dumps({**files, **result}), file=_stdout, flush=True)


def leave() -> NoReturn:
    """End this process, and wait for nothing: not for threads or sockets, nor for modules and agents to be taken apart."""
    sys.stderr.flush()
    atexit._run_exitfuncs()  # the bundle's last report among them
    os._exit(0)
