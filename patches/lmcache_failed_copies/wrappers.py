"""LMCache's server gives out no chunk that a store reserved and, because of an error, did not fill.

For a store the server reserves an object for each chunk, copies, and ends the objects' write locks. After an error
amid the copies LMCache 0.4.4 to 0.4.6 ends these locks all the same; to 0.4.3, and from 0.4.7 to 0.5.5, it leaves them
to their time (600 s), after which an object counts as filled. Here each object that a store reserves has a lock that
no time ends. When the store ends without having filled an object, and its copies have come to their end on the
device's stream, the object is deleted, by LMCache's own code.

Source: docs/never-wrong.md, "LMCache: an error amid a store"; nothing upstream. LMCache 0.5.6 keeps what a store
reserved apart from what can be read.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

STORAGE = "lmcache.v1.distributed.storage_manager:StorageManager"
MODULES = "lmcache.v1.multiprocess.modules"
SUBMIT = "lmcache.v1.multiprocess.native_completion:submit_callback_to_stream"
BY_STREAM = (
    "lmcache.v1.multiprocess.server:MPCacheEngine.store",
    f"{MODULES}.gpu_transfer:GPUTransferModule.store",
    f"{MODULES}.lmcache_driven_transfer:LMCacheDrivenTransferModule.store",
)
"""Stores whose copies are launched on a device's stream; a call behind them on that stream ends the locks."""
AT_ONCE = (
    f"{MODULES}.non_gpu_transfer:NonGPUTransferModule.commit_store",
    f"{MODULES}.server_transfer:PickleTransferStrategy.commit_store",
)
"""Stores of what a worker sent in a message. They have copied, and ended the locks, when they return."""


class Unfilled:
    """The write lock of one object, for as long as its store has not filled it. LMCache's own ends after a time."""

    def __init__(self, aside: Callable[[], bool], store: Store, l1: Any, key: Any, entry: Any) -> None:
        self.aside, self.store = aside, store
        self.l1 = l1
        self.key = key
        self.entry = entry
        self.own = entry.write_lock
        self.deleting = 0  # the thread that deletes the object: for this thread alone the object is not locked
        entry.write_lock = self

    def is_locked(self) -> bool:
        if self.aside():
            return bool(self.own.is_locked())
        return self.deleting != threading.get_ident()

    def lock(self) -> None:
        self.own.lock()

    def unlock(self) -> None:
        """LMCache ends the write: the object is filled."""
        self.entry.write_lock = self.own
        self.own.unlock()

    def stands(self) -> bool:
        """Whether the object is still reserved: not filled, nor dropped by an operator's command. Under L1's lock."""
        return self.entry.write_lock is self and self.l1._objects.get(self.key) is self.entry

    def delete(self) -> bool:
        """Deletes the object, which nothing reads or writes, and frees its memory. Returns whether it was there."""
        with self.l1._lock:
            if not self.stands():
                return False
            self.deleting = threading.get_ident()
        self.l1.delete([self.key])
        return True


class Store:
    """One call that stores, and the objects that it reserved."""

    def __init__(self, *, by_stream: bool = False) -> None:
        self.reserved: list[Unfilled] = []
        self.filled = (
            True  # whether an object whose write LMCache ends is filled; with an `End`, not until it is reached
        )
        self.by_stream = by_stream
        self.stream: Any = None
        self.handed_over = False  # a call behind the copies on the stream ends the writes
        self.end: End | None = None

    def reserve(self, aside: Callable[[], bool], l1: Any, objects: Mapping[Any, Any]) -> None:
        if self.by_stream and objects:
            self.stream = current_stream()
        with l1._lock:
            for key, memory in objects.items():
                entry = l1._objects.get(key)
                if entry is not None and entry.memory_obj is memory and entry.write_lock.is_locked():
                    self.reserved.append(Unfilled(aside, self, l1, key, entry))


class End:
    """Stands behind the last key of a store. To 0.4.6 nothing else tells whether an error ended the copies: the loop
    that copies looks up key after key in a dictionary, and looks this one up when it has copied all chunks.
    """

    def __init__(self, store: Store, keys: list[Any]) -> None:
        self.store, self.keys = store, keys
        keys.append(self)

    def __hash__(self) -> int:
        self.store.filled = True
        self.take_away()
        return 0

    def take_away(self) -> None:
        if self.keys and self.keys[-1] is self:
            self.keys.pop()


STORE: contextvars.ContextVar[Store | None] = contextvars.ContextVar("livepatch_store", default=None)
"""The store that this thread makes."""


@contextlib.contextmanager
def making(store: Store) -> Iterator[None]:
    before = STORE.set(store)
    try:
        yield
    finally:
        STORE.reset(before)
        if store.end is not None:
            store.end.take_away()


def current_stream() -> Any:
    """The stream on which a store copies: it is the current one while the store reserves."""
    import torch

    device = getattr(sys.modules["lmcache"], "torch_dev", torch.cuda)  # 0.4.4 knows CUDA alone
    return device.current_stream()


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    ends_anyway: bool = livepatch.facts.get("ends_anyway", False)
    submits: bool = livepatch.facts.get("submits", True)

    def aside() -> bool:
        """A patch that stands aside leaves LMCache's own locks, and their time."""
        return livepatch.aside

    def delete(unfilled: list[Unfilled]) -> None:
        number = sum(one.delete() for one in unfilled)
        if number:
            livepatch.tell(
                "deleted", f"a store failed: {number} chunks that it reserved and did not fill were deleted", number
            )

    def by_stream(original: Call, module: Any, *rest: Any, **named: Any) -> Any:
        store = Store(by_stream=True)
        try:
            with making(store):
                answer = original(*rest, **named)
                store.handed_over |= not submits
        finally:
            if not store.handed_over:
                delete_behind_copies(store)
            store.reserved.clear()
        if store.end is not None and not store.filled:
            return (answer[0], False)  # as from 0.4.7 on: the worker's log says that the store failed
        return answer

    def delete_behind_copies(store: Store) -> None:
        """Deletes what no call on the stream ends, when nothing on the stream writes there any more."""
        try:
            if store.reserved:
                store.stream.synchronize()
        except Exception as error:
            number = len(store.reserved)
            why = f"the device did not come to the end of a store that failed ({error!r})"
            livepatch.tell("kept", f"{why}: its {number} chunks stay reserved until the server is restarted", number)
        else:
            delete(store.reserved)

    def at_once(original: Call, strategy: Any, *rest: Any, **named: Any) -> Any:
        store = Store()
        try:
            with making(store):
                return original(*rest, **named)
        finally:
            delete(store.reserved)
            store.reserved.clear()

    def reserve_write(original: Call, storage: Any, keys: Any, *rest: Any, **named: Any) -> Any:
        # A copy: LMCache's recorder of calls keeps what it is given, and could not write down an `End`.
        answer = original([*keys], *rest, **named)
        store = STORE.get()
        if store is not None:
            store.reserve(aside, storage._l1_manager, answer)
            if ends_anyway and store.by_stream:
                store.end, store.filled = End(store, keys), False
        return answer

    def finish_write(original: Call, storage: Any, keys: Any, *rest: Any, **named: Any) -> Any:
        """LMCache ends writes; what was not filled is deleted instead."""
        entries = map(storage._l1_manager._objects.get, keys)
        locks = [entry.write_lock for entry in entries if entry is not None]
        unfilled = [lock for lock in locks if isinstance(lock, Unfilled) and not lock.store.filled]
        if not unfilled:
            return original(keys, *rest, **named)
        delete(unfilled)
        failed = {lock.key for lock in unfilled}
        return original([key for key in keys if key not in failed], *rest, **named)

    def submit(original: Call, stream: Any, kind: str, *rest: Any, **named: Any) -> Any:
        answer = original(stream, kind, *rest, **named)
        store = STORE.get()
        if store is not None and kind == "finish_write":
            store.handed_over = True
        return answer

    return {
        **dict.fromkeys(BY_STREAM, by_stream),
        **dict.fromkeys(AT_ONCE, at_once),
        f"{STORAGE}.reserve_write": reserve_write,
        f"{STORAGE}.finish_write": finish_write,
        SUBMIT: submit,
    }
