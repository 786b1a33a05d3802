"""Early writes of one prefill worker: parts of what decode engines have asked for, before the prefill has ended.

An early write is the release's own answer to an ask for less, under a transfer of our own, answered here.
It is begun only while the ask has no answer, the release keeps its transfer, and the prefill has not ended: while the
release itself would still write there. Whoever is to answer an ask, or to give prefill's blocks away, first awaits
what is under way. Nothing tells when the rest of a write that failed has ended: its request is not answered, and
prefill's blocks are held as the release holds those of a failed write of its own.

All of it is used by the worker's event loop alone, but for what says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import sys
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .layers import Begun
from .parts import Answer, Ask, Group, Part

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

    from .computed import Progress
    from .layers import Layers

UNCERTAIN = "Mooncake transfer engine returned"
"""What the release answers after a write that failed, of which a rest may still be under way (Mooncake's
MultiTransport::getBatchTransferStatus answers FAILED at the first of a batch that did)."""

NEVER = sys.maxsize
"""After how many asks the release gives the blocks of such a transfer away. It counts to no such number: they come
back after its time-out, as those of a transfer that it could not send."""

PIECE_BYTES = 1 << 24
"""How much one early write brings, about: whoever waits for its end waits for no more than that."""

BACK_SECONDS = 10.0
"""How long a step waits for early writes that read what it is about to compute on. One to a decode engine that is
stopped, or cut off, may never end."""

LAYERS_BYTES = 1 << 20
"""What layers bring at least while their step is computed: many small writes take longer than a few large ones."""

_numbers = itertools.count()


class Writes:
    """The early writes of one worker, half as many at once as it has threads to write."""

    def __init__(
        self, livepatch: PatchContext, worker: Any, layers: Layers | None = None, group: Group | None = None
    ) -> None:
        self._livepatch = livepatch
        self._worker = worker
        self._group = group or Group()
        self.layers = layers
        self._whole: dict[str, tuple[list[int], int]] = {}  # by transfer, as `computed` tells it
        self._coming: dict[str, tuple[list[int], int]] = {}  # the same, as it will be when this step has ended
        self._saved: list[str] = []  # the layers that this step has computed
        self._step = 0
        self._only: dict[int, Sequence[str]] = {}  # by the identity of an early ask's metadata: which layers
        self._last: Any = None  # the event on the device behind what was handed over last
        self._asks: dict[int, Ask] = {}  # by the identity of the ask's metadata
        self._failed: list[tuple[str, frozenset[int], float]] = []  # of writes that failed: the transfer, prefill's
        # blocks that were read, and the `perf_counter` until which a rest is taken to read them
        self._waiting: OrderedDict[Part, None] = OrderedDict()  # for a place, the oldest first
        self._places = max(1, worker.num_sender_workers // 2)
        own = worker.kv_cache_config.kv_cache_groups[self._group.index]
        self._block_bytes = max(1, own.kv_cache_spec.page_size_bytes * len(own.layer_names))
        self._piece = max(1, PIECE_BYTES // self._block_bytes)

    # What the steps tell

    def beginning(self, progress: Progress) -> None:
        """A step is about to be computed, layer by layer."""
        self._step += 1
        self._coming, self._saved = dict(progress["whole"]), []

    def saved(self, layer: str, event: Any) -> None:
        """The step has computed a layer, or will have when `event` is."""
        if layer in self._saved:
            # Where a step computes a layer in several parts, the first does not bring all of it.
            self._livepatch.say("layers", "a step computes a layer more than once: blocks leave after steps only")
            self._coming, self._saved, self.layers = {}, [], None
            for part in self._parts():
                part.begun = None
        elif self._coming and self.layers is not None and layer in self.layers.names:
            self._saved.append(layer)
            self._last = event
            self._look(set(self._coming))

    def computed(self, progress: Progress, event: Any) -> None:
        """A step has been computed, or will have been when `event` is."""
        self._coming, self._saved = {}, []
        self._whole.update(progress["whole"])
        self._last = event
        self._look(set(progress["whole"]))

    def over(self, transfers: Iterable[str]) -> None:
        """The release sends these now: what was not handed over early."""
        for transfer in transfers:
            self._whole.pop(transfer, None)
            self._coming.pop(transfer, None)

    async def back(self, transfers: Iterable[str]) -> None:
        """Blocks of these are about to be given to others: what is still sent of them counts for nothing."""
        gone = set(transfers)
        self.over(gone)
        for part in self._parts():
            part.void |= part.transfer in gone
        await self.drained(gone)

    async def asleep(self) -> None:
        """The memory is about to be taken away, with what is in it."""
        await self.back({*self._whole, *self._coming, *(part.transfer for part in self._parts())})

    async def drained(
        self, transfers: Iterable[str], entries: Sequence[Any] | None = None, blocks: Collection[int] = ()
    ) -> None:
        """Nothing of these is under way, nor will be, whoever asked for them.

        `entries`: only what reads the blocks of these, which the release keeps of the transfers, or any of `blocks`.
        """
        gone = set(transfers)
        parts = [part for part in self._parts() if part.transfer in gone and part.may_read(entries, blocks)]
        for part in parts:
            part.closed = True
        for part in parts:
            await part.drained()

    async def given_up(
        self, worker: Any, name: str, transfer: str, metadata: Any, blocks: Collection[int] = ()
    ) -> None:
        """A prefill was given up. The release hears of it now, and of its blocks when nothing reads them.

        `metadata` is an empty one of the release's. What the release lets go of now may be another prefill's of the
        transfer: what read the blocks of this one began, or failed, under what it has let go of before.
        """
        self.over([transfer])
        entry = await report_given_up(worker, transfer, metadata)
        await self.drained([transfer], None if entry is None else [entry], blocks)
        failed = [until for of, read, until in self._failed if of == transfer and not read.isdisjoint(blocks)]
        if failed:
            # They come back when the release gives up those of a transfer that it could not send.
            key = f"livepatch-held-{next(_numbers)}"
            kind = module_of(worker)["SendBlockMeta"]
            worker.reqs_need_send[key] = kind(name, key, [], asyncio.Event(), expire_time=max(failed))
        else:
            worker.finished_sending_reqs.add(name)

    # Asks

    def begin(self, ask: Ask) -> None:
        # Of several workers of prefill's that write for one of decode's, one may answer with an error while another
        # writes, and to 0.32.0 decode lets the blocks go at the first.
        alone = ask.meta.remote_tp_size >= self._worker.tp_size
        for name, (transfer, groups) in ask.meta.req_blocks.items():
            ask.unanswered.add(name)
            if alone and len(groups) == self._group.number and groups[self._group.index]:
                ask.parts[name] = Part(ask, name, transfer, list(groups[self._group.index]), self._group)
        self._asks[id(ask.meta)] = ask
        # When the release has looked at the ask.
        asyncio.get_running_loop().call_soon(self._look, {part.transfer for part in ask.parts.values()})

    async def end(self, ask: Ask) -> None:
        for part in ask.parts.values():
            await part.drained()
        self._asks.pop(id(ask.meta), None)

    def of(self, meta: Any) -> Ask | None:
        return self._asks.get(id(meta))

    def only(self, meta: Any) -> Sequence[str] | None:
        """Which layers an early write brings; None: all."""
        return self._only.get(id(meta))

    def kept(self, part: Part) -> Any:
        """What the release keeps of a part's transfer."""
        return self._worker.reqs_need_send.get(part.transfer)

    def _parts(self) -> list[Part]:
        return [part for ask in self._asks.values() for part in ask.parts.values()]

    # Writing

    def _look(self, transfers: set[str]) -> None:
        """Begin what can be begun. It is called by the event loop, which keeps errors to itself."""
        try:
            for part in self._parts():
                if part.transfer in transfers:
                    self._begin(part)
        except Exception as error:
            self._livepatch.stand_aside("writing early", error)

    def _begin(self, part: Part) -> None:
        if part.under_way is not None or self._next(part) is None or part in self._waiting:
            return
        if not self._places:
            self._waiting[part] = None
            return
        self._places -= 1
        part.under_way = asyncio.ensure_future(self._write(part))

    def _may(self, part: Part) -> bool:
        """Whether the release itself would still write there."""
        entry = self.kept(part)
        if part.closed or self._livepatch.aside or entry is None or entry.ready.is_set():
            return False
        return part.entry is None or part.entry is entry

    def _next(self, part: Part) -> tuple[list[int], Sequence[str] | None] | None:
        """Which blocks of the prompt's can be sent now, behind those that were, and which layers of them; None: all."""
        whole, blocks = self._whole.get(part.transfer) or ([], 0)
        coming, blocks = self._coming.get(part.transfer) or (whole, blocks)
        first = blocks - len(part.remote)
        if first < 0 or not blocks or not self._may(part):
            return None
        self._promote(part)
        done = first + len(part.local)
        begun = part.begun
        if begun is None and done < len(whole):
            return whole[done : done + self._piece], None
        if self.layers is None:
            return None
        number = max(1, len(self.layers.names) - 1)
        most = self._piece * number  # blocks of one layer
        local = coming[done : done + most] if begun is None else begun.local
        begun = begun or Begun(local, self._step)
        ended = done + len(local) <= len(whole)
        computed = None if ended else self._saved if begun.step == self._step else []
        names = self.layers.lacking(begun, computed)
        each = self._block_bytes * len(local) / number
        names = names[: max(1, int(PIECE_BYTES / max(1, each)))]
        if not local or not names or (not ended and each * len(names) < LAYERS_BYTES):
            return None
        return local, names

    def _promote(self, part: Part) -> None:
        """Blocks are sent when all their layers are, the last (OTHERS) when the step that computed them has ended."""
        begun = part.begun
        if self.layers is not None and begun is not None and not self.layers.lacking(begun):
            part.local += begun.local
            part.begun = None
            self._livepatch.count("early", len(begun.local))

    async def _write(self, part: Part) -> None:
        try:
            await self._written(part)
        except Exception as error:
            part.closed = True
            self._livepatch.stand_aside("writing early", error)
        finally:
            part.under_way = None
            self._places += 1
            self._waiting[part] = None  # behind those that wait
            self._go_on()

    def _go_on(self) -> None:
        """A place is free. Nobody awaits the task that calls this: an error would be lost with it."""
        try:
            for _ in range(len(self._waiting)):
                self._begin(self._waiting.popitem(last=False)[0])
        except Exception as error:
            self._livepatch.stand_aside("writing early", error)

    async def _written(self, part: Part) -> None:
        worker, done, found = self._worker, len(part.local), self._next(part)
        if found is None:  # any more, since it was to begin
            return
        local, layers = found
        known = self._coming.get(part.transfer) or self._whole[part.transfer]
        part.entry, part.blocks = self.kept(part), known[1]
        if layers is not None and part.begun is None:
            part.begun = Begun(local, self._step)
        begun = part.begun
        if self._last is not None:
            await asyncio.get_running_loop().run_in_executor(worker._sender_executor, self._last.synchronize)
            if not self._may(part):
                return
        transfer = f"livepatch-early-{next(_numbers)}"
        meta = copy.copy(part.ask.meta)
        meta.req_blocks = {part.name: (transfer, self._group.alone(part.remote[done : done + len(local)]))}
        answer = Answer()
        # Of two to be sent, so that the release reports no end of it.
        own = type(part.entry)("", transfer, self._group.alone(local), asyncio.Event(), need_send=2)
        own.ready.set()
        worker.reqs_need_send[transfer] = own
        if layers is not None:
            self._only[id(meta)] = layers
        part.entry.sending += 1  # so the release lets no time-out give the blocks away meanwhile
        part.reads = frozenset(local)
        try:
            await part.ask.send(part.ask.identity, answer, meta)
            response = worker._xfer_resp_decoder.decode(answer.data)
            message = response.err_msg or ""
        except Exception as error:  # what was begun is not known
            response, message = None, f"{UNCERTAIN} {type(error).__name__}: {error}"
        finally:
            part.entry.sending -= 1
            part.reads = frozenset()
            worker.reqs_need_send.pop(transfer, None)
            self._only.pop(id(meta), None)
        if response is not None and part.name in (response.ok_reqs or ()):
            if layers is None:
                part.local += local
                self._livepatch.count("early", len(local))
            elif begun is not None:
                begun.left.update(layers)
                self._livepatch.count("layers", len(layers))
            return
        part.closed = True  # it was refused, and the release will say why; or worse
        if UNCERTAIN in message:
            part.failed = message
            part.entry.need_send = NEVER
            now = time.perf_counter()
            timeout = module_of(worker)["envs"].VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
            failed = part.transfer, frozenset(local), now + timeout
            self._failed = [one for one in self._failed if one[2] > now] + [failed]
            self._livepatch.tell("failed", f"an early write failed, and its request is not answered: {message}")


async def report_given_up(worker: Any, transfer: str, metadata: Any) -> Any:
    """The release hears of a prefill that was given up. What it kept of its transfer until now, if anything."""
    entry = worker.reqs_need_send.get(transfer)
    if entry is not None and entry.ready.is_set():
        return None  # it is another's, that has ended, and waits to be fetched
    metadata.reqs_not_processed = {transfer}
    with contextlib.suppress(KeyError):  # the release's, which does not know the transfer
        await worker.record_send_reqs(metadata)
    return entry


async def let_go(worker: Any, name: str, transfer: str, metadata: Any) -> None:
    """`Writes.given_up`, of a worker that sends nothing early: nothing reads the blocks."""
    await report_given_up(worker, transfer, metadata)
    worker.finished_sending_reqs.add(name)


def module_of(worker: Any) -> dict[str, Any]:
    """The release's module."""
    return vars(sys.modules[type(worker).__module__])


def response_of(worker: Any, status: str, **fields: Any) -> Any:
    """An answer of the release's own kind."""
    module = module_of(worker)
    return module["MooncakeXferResponse"](status=getattr(module["MooncakeXferResponseStatus"], status), **fields)
