"""The identity of each LoRA adapter: its name and a digest of its files, hashed by a thread."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

Files = tuple[tuple[str, int, int, int, int, int], ...]
"""Name, device, inode, size, mtime and ctime of each file of an adapter. Equal: nobody has written to them."""

READ = ("adapter_config.json", "adapter_model.bin", "adapter_model.pt", "adapter_model.safetensors")
"""What vLLM reads in an adapter's folder. The rest, such as a trainer's log or optimizer state, decides no KV."""

LOOK_SECONDS = 1.0
"""So often the thread looks whether files have changed: a worker that has dropped an adapter reads them again."""

SHARE = 20
"""The thread rests this many times longer than its look took: many adapters, or a slow disk, cost 5 % of a core."""

FRESH_SECONDS = 10.0
"""An identity that was not looked at for so long, its file system being stuck perhaps, counts as unknown."""

PART = 1 << 20
"""Bytes that are read at once."""


class Adapter:
    """What is known of one adapter id of this engine. `files` are those that were there before a worker read them."""

    __slots__ = ("digest", "files", "looked", "lost", "name", "request")

    def __init__(self, lora: Any) -> None:
        self.name = str(lora.lora_name)
        self.request = _same(lora)
        self.digest: str | None = None
        self.lost = ""  # why there will never be an identity
        self.looked = float("-inf")  # when the files were last seen to be these
        self.files: Files = ()
        try:
            self.files = listed(lora.lora_path)
        except (OSError, ValueError) as error:  # ValueError: of a path that no file can have
            self.lost = f"its files cannot be read ({type(error).__name__}): give a local folder, not a repository"
        if getattr(lora, "tensorizer_config_dict", None):
            self.lost = "its weights are not read from files"

    def look(self) -> None:
        """Hash the files where that was not done yet, or see whether they are the same. Called by the thread alone."""
        _, _, path, *_ = self.request
        try:
            files = listed(path)
            if self.digest is not None and files == self.files:
                self.looked = time.monotonic()
                return
            hashed = digest_of(path, files)
            stable = listed(path) == files
        except OSError:
            return  # files that are gone, or written to, are no new weights yet: the identity is unknown meanwhile
        if not stable:
            return
        if self.digest is None and files != self.files:
            self.lost = "its files have changed while it was loaded"
        elif self.digest is not None and hashed != self.digest:
            self.lost = "its files have changed since it was loaded: load it under another id (unload it first)"
        else:
            self.digest, self.files, self.looked = hashed, files, time.monotonic()


class Adapters:
    """The adapters of one engine. The scheduler's thread asks; another one reads the files."""

    def __init__(self, said: Callable[[str], None]) -> None:
        """`said` is called with a sentence when an adapter turns out to have no identity."""
        self._said = said
        self.on_replaced: list[Callable[[int], None]] = []
        """Called with an adapter's id when other weights are loaded in its place, under requests that run."""
        self._known: dict[int, Adapter] = {}
        self._named: dict[str, list[Adapter]] = {}
        """The same by name."""
        self._before: dict[
            str, str | None
        ] = {}  # name: the digest of adapters that are gone; None: several, or unknown
        self._wake = threading.Event()
        self._threads: list[threading.Thread] = []
        self._fresh = FRESH_SECONDS

    def met(self, lora: Any) -> Adapter:
        """Note an adapter that a worker may read from now on, if it is new. Stats its files, once."""
        adapter = self._known.get(lora.lora_int_id)
        if adapter is None:
            adapter = self._known[lora.lora_int_id] = Adapter(lora)
            self._named.setdefault(adapter.name, []).append(adapter)
            if adapter.lost:
                self._say(adapter)
            self._wake.set()
            if not self._threads:
                # Two, so that those that are known do not become unknown while a big one is hashed.
                for new in (True, False):
                    given = (weakref.ref(self), self._wake, new)
                    thread = threading.Thread(target=_look, args=given, name="livepatch-adapters", daemon=True)
                    self._threads.append(thread)
                    thread.start()
        elif not adapter.lost and (adapter.request != _same(lora) or getattr(lora, "load_inplace", False)):
            adapter.lost = "other weights were loaded in its place"
            self._say(adapter)
            self._replaced(lora.lora_int_id)
        return adapter

    def is_new(self, lora: Any) -> bool:
        """Whether nothing is known of an adapter's id."""
        return lora.lora_int_id not in self._known

    def forget(self, number: int) -> Adapter | None:
        """Know nothing of an id any more; returns what was known of it."""
        adapter = self._known.pop(number, None)
        if adapter is not None:
            self._named[adapter.name].remove(adapter)
        return adapter

    def removed(self, number: int) -> None:
        """The workers have dropped an adapter: whoever has its id from now on is read from files again."""
        adapter = self.forget(number)
        if adapter is not None:
            digest = None if adapter.lost else adapter.digest
            self._before[adapter.name] = digest if self._before.get(adapter.name, digest) == digest else None
            self._replaced(number)  # requests that run with it have it read again

    def identity(self, lora: Any) -> tuple[str, ...] | None:
        """Name, digest and format of a request's adapter; None while that is unknown, or for ever."""
        adapter = self.met(lora)
        if adapter.lost or adapter.digest is None or time.monotonic() - adapter.looked > self._fresh:
            return None
        return ("lora", adapter.name, adapter.digest, str(bool(getattr(lora, "is_3d_lora_weight", False))))

    def shares_a_name(self, lora: Any) -> bool:
        """Whether this engine has had other weights by the same name: vLLM's own prefix cache may mix them up."""
        mine = self.met(lora)  # it may have been removed since
        others = (None if one.lost else one.digest for one in self._named[mine.name] if one is not mine)
        before = [self._before[mine.name]] if mine.name in self._before else []
        # Of very many by one name, as where each training step loads its own, the first that differs is enough.
        return any(digest is None or digest != mine.digest for digest in itertools.chain(before, others))

    def look(self, new: bool) -> float:
        """Look at those that were not hashed yet, or at the others; returns how long to rest, in seconds.

        An error ends an adapter's identity, not the thread.
        """
        took = 0.0  # without the hashing of new adapters
        for adapter in list(self._known.values()):
            if adapter.lost or (adapter.digest is None) is not new:
                continue
            began = time.monotonic()
            try:
                adapter.look()
            except Exception as error:
                adapter.lost = f"its files cannot be hashed ({type(error).__name__})"
            if not new or adapter.digest is None:
                took += time.monotonic() - began
            if adapter.lost:
                self._say(adapter)
        rest = max(LOOK_SECONDS, SHARE * took)
        if not new:
            self._fresh = FRESH_SECONDS + 2 * (rest + took)
        return rest

    def _replaced(self, number: int) -> None:
        for replaced in self.on_replaced:
            replaced(number)

    def _say(self, adapter: Adapter) -> None:
        which = f"adapter {adapter.name} (id {adapter.request[0]})"
        self._said(f"{which}: {adapter.lost}. Its requests neither load from LMCache nor store there")


def _look(of: weakref.ref[Adapters], wake: threading.Event, new: bool) -> None:
    """A thread's life, which ends with the engine: a process may make and drop many."""
    while (adapters := of()) is not None:
        if new:
            wake.clear()
        rest = adapters.look(new)
        del adapters
        if new:
            wake.wait(rest)
        else:
            time.sleep(rest)


def _same(lora: Any) -> tuple[Any, ...]:
    """What two requests for one adapter have in common."""
    path = lora.lora_path
    return lora.lora_int_id, str(lora.lora_name), path, bool(getattr(lora, "is_3d_lora_weight", False))


def listed(path: str) -> Files:
    """The files that vLLM reads of an adapter. Raises OSError where there are none, or one may never end, as a FIFO."""
    found = []
    for name in READ:
        with contextlib.suppress(FileNotFoundError):
            of = os.stat(os.path.join(os.path.expanduser(path), name))
            if not stat.S_ISREG(of.st_mode):
                raise OSError(f"{name} is no regular file")
            found.append((name, of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns))
    if not found:
        raise FileNotFoundError(path)
    return tuple(found)


def digest_of(path: str, files: Files) -> str:
    """128 bits, in hexadecimal, of names and contents."""
    digest = hashlib.blake2b(digest_size=16, person=b"livepatch-lora")
    for name, _, _, size, *_ in files:
        digest.update(f"{len(name)}/{name}/{size}/".encode())
        with open(os.path.join(os.path.expanduser(path), name), "rb") as file:
            while part := file.read(PART):
                digest.update(part)
    return digest.hexdigest()
