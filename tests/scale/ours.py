"""What the bundle does and keeps in this process: operations of its code, sizes of its containers, threads and files.

A stock process has no code of the bundle's, so all of it is empty there. Nothing here reads a clock, but `slow_fronts`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

PACKAGE = "_vllm_livepatch"
"""The one importable name of a bundle's that holds its code."""
FOLDER = f"/{PACKAGE}/"
CONTAINERS = (dict, list, set, deque, OrderedDict)
REPEATS = 50
LOOKS = 5
SLOW = 20.0
"""So many times what it costs in a fresh copy: what a dict's first entry costs that is behind removed ones."""


class Operations:
    """Counts the instructions of Python that the bundle's code executes in this thread, by patch, while it is entered."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()

    def __enter__(self) -> Operations:
        sys.settrace(self._called)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        _, ours, rest = frame.f_code.co_filename.partition(FOLDER)
        if not ours:
            return None
        parts = rest.split("/")
        name, counted = parts[1] if parts[0] == "patches" else "runtime", self.counted
        frame.f_trace_lines, frame.f_trace_opcodes = False, True

        def instruction(frame: FrameType, event: str, _: Any) -> Any:
            if event == "opcode":
                counted[name] += 1
            return instruction

        return instruction


def kept(roots: Iterable[Any] = ()) -> dict[str, int]:
    """How many entries each container of the bundle's has, those of containers within it included, and how many objects
    of each of its classes there are. `roots` are a release's objects that patches leave attributes on."""
    sizes: Counter[str] = Counter()
    for label, value in _owned(roots):
        sizes[label] += _entries(value, set()) if _is_container(value) else 1
    return {label: size for label, size in sizes.items() if size}


def slow_fronts(roots: Iterable[Any] = ()) -> list[str]:
    """Names the dicts and sets whose first entry has to be searched for, past entries that were removed before it.

    The search is the interpreter's own, so that no count of instructions shows it. It is timed, against a fresh copy in
    which there is nothing to search: a factor of hundreds, so that a busy machine changes nothing.
    """
    return sorted(
        label
        for label, value in _owned(roots)
        if type(value) in (dict, set) and len(value) > 1000 and _first(value) > SLOW * _first(type(value)(value))
    )


def _first(container: Any) -> float:
    """Seconds that it takes at best to find the first entry."""
    best = 1.0
    for _ in range(REPEATS):
        begin = time.perf_counter()
        next(iter(container))
        best = min(best, time.perf_counter() - begin)
    return best


def threads_and_files() -> dict[str, int]:
    """How many threads this process has, how many files it has open, and at how many ports it listens.

    The least of several looks: a thread of the bundle's has its report open for a moment, and what has leaked stays.
    """
    looks = [_threads_and_files() for _ in range(LOOKS)]
    return {name: min(look[name] for look in looks) for name in looks[0]}


def _threads_and_files() -> dict[str, int]:
    gc.collect()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")) - 1,
        "ports": _listening(),
    }


def _listening() -> int:
    """Sockets of this process that strangers can connect to."""
    mine = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed by now
            mine.add(os.readlink(f"/proc/self/fd/{entry}"))
    tables = [Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return sum(row[3] == "0A" and f"socket:[{row[9]}]" in mine for row in rows)


def _owned(roots: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Each object of the bundle's classes, by the class's name, and each of its containers, by whose it is."""
    gc.collect()
    seen: set[int] = set()

    def containers(owner: str, named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, value in named:
            if _is_container(value) and id(value) not in seen:
                seen.add(id(value))
                yield f"{owner}.{name}", value

    for thing in gc.get_objects():
        kind = type(thing)
        if kind is ModuleType:
            name = vars(thing).get("__name__")
            if isinstance(name, str) and name.startswith(PACKAGE):
                own = [(key, value) for key, value in vars(thing).items() if not key.startswith("__")]
                yield from containers(_short(name), own)
        elif kind is FunctionType:
            if thing.__closure__ and FOLDER in thing.__code__.co_filename:
                cells = zip(thing.__code__.co_freevars, thing.__closure__, strict=True)
                yield from containers(_short(thing.__module__), [(n, c.cell_contents) for n, c in cells if _filled(c)])
        elif isinstance(kind.__module__, str) and kind.__module__.startswith(PACKAGE):
            label = f"{_short(kind.__module__)}.{kind.__name__}"
            yield label, thing
            yield from containers(label, _attributes(thing))
    for root in roots:
        left = [(name, value) for name, value in vars(root).items() if name.startswith("_livepatch")]
        yield from containers(type(root).__name__, left)


def _short(module: str) -> str:
    """A module's name within the bundle, which has the bundle's digest in it."""
    return module.partition(".")[2].replace("patches.", "").replace("sitecustomize.", "")


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # nothing was assigned yet
        return False


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """An object's attributes, in its dict and in its slots; no descriptor of anybody's is asked for more."""
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(thing, name):
                yield name, getattr(thing, name)


def _entries(value: Any, seen: set[int]) -> int:
    """A container's entries and those of containers in it."""
    if not (_is_container(value) or type(value) is tuple) or id(value) in seen:
        return 0
    seen.add(id(value))
    inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
    own = 0 if type(value) is tuple else len(value)
    return own + sum(_entries(each, seen) for each in list(inner))


def _is_container(value: Any) -> bool:
    """The kit's `Remembered` is one, too."""
    return type(value) in CONTAINERS or issubclass(type(value), OrderedDict)
