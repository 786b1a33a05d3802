"""Blocks of loads that failed while a prefill engine may still write into them, from 0.30.0 on: nobody is given them.

The request goes on at once, on other blocks. Its worker says with each step which loads are held, and which are not
any more; decode's scheduler keeps a reference of its own to the blocks in between, as a request that shares them would.
"""

from __future__ import annotations

import importlib
import itertools
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

_process = secrets.token_hex(8)
_numbers = itertools.count()


CARRIER = "vllm.v1.simple_kv_offload.metadata"
"""A module of vLLM's, whose `SimpleCPUOffloadWorkerMetadata` carries a `Word` to the scheduler's process."""

HELD, OVER = "livepatch-held", "livepatch-over"

HOLDS = "_livepatch_holds"
"""Attribute of a worker from 0.30.0 on: its `Holds`."""


class Word:
    """What one worker, or all of them, say with a step.

    `held`: a request and its blocks, by key; `over`: the keys of those that nobody can write into any more.
    """

    def __init__(self, held: Mapping[str, tuple[str, frozenset[int]]], over: Iterable[str]) -> None:
        self.held = dict(held)
        self.over = set(over)

    def packed(self) -> dict[Any, int]:
        """As the keys of a dict of builtin types.

        A class of vLLM's own carries it, which joins the dicts of several workers. So a scheduler's process in which
        this bundle is not can read it, and leaves it alone.
        """
        held = {(HELD, key, name, tuple(sorted(blocks))): 1 for key, (name, blocks) in self.held.items()}
        return {**held, **{(OVER, key): 1 for key in self.over}}


def unpacked(carrier: Any) -> Word:
    """What workers say, or nothing where this is somebody else's."""
    word = Word({}, ())
    for entry in getattr(carrier, "completed_store_events", None) or ():
        if isinstance(entry, tuple) and entry[0] == HELD:
            word.held[entry[1]] = entry[2], frozenset(entry[3])
        elif isinstance(entry, tuple) and entry[0] == OVER:
            word.over.add(entry[1])
    return word


LOADS = 256
"""Beyond so many held loads, too, no more are added where that can be avoided: each keeps a socket, of ZMQ's 1,023."""


class Holds:
    """A worker's. Its event loop holds and lets go, and each of its steps takes what is to be reported."""

    def __init__(self) -> None:
        self._now: dict[str, tuple[str, frozenset[int]]] = {}  # engine and blocks of what is held now, by key
        self._blocks: dict[str, Counter[int]] = {}  # by engine: two workers of one may write one block
        self._loads: Counter[str] = Counter()  # by engine
        self._lock = threading.Lock()
        self._held: dict[str, tuple[str, frozenset[int]]] = {}
        self._over: set[str] = set()

    def hold(self, engine: str, name: str, blocks: Iterable[int]) -> str:
        """Of a load from `engine` that is about to be reported as failed. Returns the key to let go of it by."""
        key = f"{os.getpid()}-{_process}-{next(_numbers)}"
        held = frozenset(blocks)
        with self._lock:
            self._held[key] = name, held
            self._now[key] = engine, held
            self._blocks.setdefault(engine, Counter()).update(held)
            self._loads[engine] += 1
        return key

    @property
    def blocks(self) -> int:
        """How many are held now."""
        with self._lock:
            return sum(map(len, self._blocks.values()))

    def too_many(self, room: float) -> bool:
        """Whether more than `room` blocks, or too many loads, are held."""
        with self._lock:
            return sum(map(len, self._blocks.values())) > room or len(self._now) > LOADS

    def too_many_of(self, engine: str, room: float) -> bool:
        """The same, and whether one engine has more than its part. An engine of which nothing is held never has."""
        if not self.too_many(room):
            return False
        with self._lock:
            engines, blocks = len(self._blocks), len(self._blocks.get(engine, ()))
            return blocks * engines > room or self._loads[engine] * engines > LOADS

    def let_go(self, key: str) -> None:
        """Its blocks are free again for everybody."""
        with self._lock:
            self._over.add(key)
            engine, blocks = self._now.pop(key)
            held = self._blocks[engine]
            held.subtract(blocks)
            for block in blocks:
                if not held[block]:
                    del held[block]
            self._loads[engine] -= 1
            if not held:
                del self._blocks[engine], self._loads[engine]

    def word(self) -> Word | None:
        with self._lock:
            if not (self._held or self._over):
                return None
            word = Word(self._held, self._over)
            self._held, self._over = {}, set()
            return word


class _Load:
    """A load that runs: its request, and the blocks that it was given by then."""

    def __init__(self, request: Any, blocks: Any) -> None:
        self.request = request
        self.blocks = [block for group in blocks.blocks for block in group]
        self.failed = False


class Keeper:
    """The scheduler's side: it keeps what workers hold."""

    def __init__(self, livepatch: PatchContext) -> None:
        self._livepatch = livepatch
        self._pool: Any = None
        self._loads: dict[str, _Load] = {}  # by request
        self._kept: dict[str, list[Any]] = {}  # blocks, by key

    def bind_gpu_block_pool(self, original: Call, connector: Any, gpu_block_pool: Any, *rest: Any, **named: Any) -> Any:
        self._pool = gpu_block_pool
        return original(gpu_block_pool, *rest, **named)

    def update_state_after_alloc(
        self,
        original: Call,
        connector: Any,
        request: Any,
        blocks: Any,
        num_external_tokens: int,
        *rest: Any,
        **named: Any,
    ) -> Any:
        if num_external_tokens:
            self._loads[request.request_id] = _Load(request, blocks)
        return original(request, blocks, num_external_tokens, *rest, **named)

    def update_connector_output(
        self, original: Call, connector: Any, connector_output: Any, *rest: Any, **named: Any
    ) -> Any:
        """Before the scheduler frees what has ended, and lets go on who has failed."""
        word = unpacked(connector_output.kv_connector_worker_meta)
        for key, (name, blocks) in word.held.items():
            self._keep(key, name, blocks)
        for key in word.over:
            self._pool.free_blocks(self._kept.pop(key, ()))
        for name in connector_output.finished_recving or ():
            load = self._loads.pop(name, None)
            if load is not None and load.failed and load.request.status.name == "WAITING_FOR_REMOTE_KVS":
                # All of its blocks are freed, and it begins anew: it would compute on those that it has.
                load.request.num_computed_tokens = 0
        return original(connector_output, *rest, **named)

    def _keep(self, key: str, name: str, blocks: frozenset[int]) -> None:
        load = self._loads.get(name)
        if load is None:  # it began before this patch was there
            self._livepatch.say("unknown", f"a load failed, and may still be written, that is not known: {name}")
            return
        load.failed = True
        kept = [block for block in load.blocks if block.block_id in blocks and not block.is_null]
        self._pool.touch(kept)
        self._kept[key] = kept


def carry(livepatch: PatchContext, connector: Any) -> None:
    """Of a connector that was made just now: its worker reports what it holds, or its scheduler hears that."""
    worker = connector.connector_worker
    if worker is None:
        keeper = Keeper(livepatch)
        for name in ("bind_gpu_block_pool", "update_state_after_alloc", "update_connector_output"):
            livepatch.around_its(connector, name, livepatch.lasting(getattr(keeper, name)))
        return
    carrier = importlib.import_module(CARRIER).SimpleCPUOffloadWorkerMetadata
    holds = vars(worker)[HOLDS] = Holds()

    def word(original: Call, instance: Any, *rest: Any, **named: Any) -> Any:
        report = holds.word()
        return original(*rest, **named) if report is None else carrier(report.packed())

    livepatch.around_its(connector, "build_connector_worker_meta", livepatch.lasting(word))
