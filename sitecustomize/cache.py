"""The user's cache: what can be made again, kept by content. Whatever goes wrong with it only costs time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from . import fingerprint, own_threads

ANSWER_SECONDS = 2.0
"""How long a process waits for its cache, once: parsing all that the patches name takes about as long."""

_Answer = TypeVar("_Answer")
_silent: list[threading.Thread] = []  # who waits for a file system that has not answered in time


def in_time(function: Callable[..., _Answer], *arguments: Any) -> _Answer | None:
    """What `function` of this module answers; None where its file system hangs, as an NFS mount may.

    An import waits for this. A thread of its own is the only way not to wait for ever, and costs about 0.1 ms. Once one
    was given up the process has no cache.
    """
    if _silent:
        return None
    answers: list[_Answer] = []
    try:
        thread = threading.Thread(target=lambda: answers.append(function(*arguments)), daemon=True)
        own_threads.start(thread)
    except RuntimeError:  # at the end of the interpreter, in one that allows no such threads, or where none is left
        return None
    thread.join(ANSWER_SECONDS)
    if thread.is_alive():
        _silent.append(thread)
    return answers[0] if answers else None


def directory(environ: Mapping[str, str], mode: int = os.W_OK | os.X_OK) -> str | None:
    """The user's cache directory for us, else one of the user's own under the temporary directory; None where neither
    can be used, or `mode` is more than we may do there.
    """
    for place, look in _candidates(environ):
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
            status = look(place)
            safe = _above_is_safe(os.path.realpath(place))
        except OSError:
            continue
        # What is read from here is executed, so it must be ours, and under a shared directory no link to elsewhere.
        if safe and stat.S_ISDIR(status.st_mode) and _only_ours(status) and os.access(place, mode):
            return place
    return None


def _only_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _above_is_safe(place: str) -> bool:
    """Whether nobody but us and root can put something else in the place of this directory.

    As sshd asks it: each directory above is ours or root's, and others may not write there, or it is sticky.
    """
    while place != os.path.dirname(place):
        place = os.path.dirname(place)
        status = os.stat(place)
        writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
        if writable or status.st_uid not in (0, os.getuid()):
            return False
    return True


def replace(path: str, data: bytes) -> bool:
    """Write a file whole or not at all; whether it is there now."""
    temporary = f"{path}.{os.urandom(8).hex()}.tmp"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(data)
        os.replace(temporary, path)
        return True
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        return False


def read(path: str) -> bytes | None:
    """The file's bytes, None where it is not ours alone: what is read here is executed."""
    try:
        if not _only_ours(os.lstat(os.path.dirname(path))):
            return None
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            # A second name may have been given to a file of ours by somebody else.
            whole = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and _only_ours(status)
            return file.read() if whole else None
    except OSError:
        return None


def text_digest(text: str) -> str:
    """Of a module's whole text, as a lock has it."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Fingerprints:
    """`fingerprint.of_names`, remembered: parsing a large module takes a tenth of a second, in every process."""

    def __init__(self, place: str | None) -> None:
        self._place = place
        source = getattr(fingerprint.__loader__, "get_source", None)
        # A fingerprint of another form is another fingerprint.
        self._form = "" if source is None else str(source(fingerprint.__name__))

    def of_names(self, source: str, names: Mapping[str, str]) -> dict[str, str | None]:
        """As `fingerprint.of_names`. Raises SourceError."""
        if self._place is None or not self._form:
            return fingerprint.of_names(source, names)
        key = hashlib.sha256(f"{self._form}\0{source}".encode("utf-8", "surrogatepass")).hexdigest()
        path = os.path.join(self._place, "fingerprints", f"{key}.json")
        known = _known(path)
        asked = set(names.values())
        if not asked.issubset(known):
            known.update(fingerprint.of_names(source, {name: name for name in asked}))
            in_time(replace, path, json.dumps(known).encode())
        return {key: known[name] for key, name in names.items()}


def _known(path: str) -> dict[str, str | None]:
    data = in_time(read, path)
    try:
        known: Any = {} if data is None else json.loads(data)
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Callable[[str], os.stat_result]]]:
    """Each place, and how to look at it."""
    for base in (environ.get("XDG_CACHE_HOME", ""), os.path.join(os.path.expanduser("~"), ".cache")):
        if os.path.isabs(base):
            yield os.path.join(base, "vllm-livepatch"), os.stat
            break
    with contextlib.suppress(OSError):  # no temporary directory
        yield os.path.join(tempfile.gettempdir(), f"vllm-livepatch-{os.getuid()}-cache"), os.lstat
