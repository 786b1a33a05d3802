"""A prefill engine answers each ask of a decode engine, and an ask that waits keeps no other from being served.

Source: _sender_worker awaits send_kv_to_decode, which waits for the prefill's end, in twice as many tasks as threads.
"""

from __future__ import annotations

import asyncio
import copy
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...sitecustomize.kit import Remembered, attached
from .bootstrap import known
from .listener import listening

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
WORKER = f"{MODULE}:MooncakeConnectorWorker"
SERVER = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils:MooncakeBootstrapServer"

STATE = "_livepatch_asks"
"""Attribute of a prefill engine's worker: its `_Asks`."""

REMEMBERED = 65536
"""How many transfers whose prefill was given up are remembered, for asks that come later."""
REMEMBERED_LET_GO = 4096
"""How many transfers that decode let go of are remembered. Each keeps an ask, of some kilobytes."""
LET_GO_SECONDS = 600.0
"""For how long; the release itself waits 480 s for the other leg of a request."""

LATE_SHARE = 8
"""Who asks for a transfer that was let go, and whose prefill has ended, waits for this part of vLLM's time (480 s).

A client that hung up may try again by the same transfer, and its prefill may begin after decode asks. Else the ask came
late, and no prefill follows."""

GIVEN_UP = "The prefill was given up, or its blocks have been let go."


@dataclass
class _LetGo:
    """A transfer that decode let go of: its client hung up, or it has all of the blocks itself."""

    asks: list[tuple[Call, Any]] = field(default_factory=list)  # not counted by the release yet
    since: float = field(default_factory=time.monotonic)


class _Asks:
    """What is known of one worker's asks. All of it is used by the worker's event loop alone."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps none
        self.waiting: Counter[str] = Counter()  # asks for blocks under way, by transfer
        # Hashes of transfers whose prefill was given up, oldest first: a client may choose a transfer of megabytes.
        # Whether decode had let go of it: its client may try again, and decode may ask before that prefill begins.
        self.given_up: Remembered[int, bool] = Remembered(REMEMBERED)
        self.let_go: Remembered[str, _LetGo] = Remembered(REMEMBERED_LET_GO)  # by transfer, oldest first
        self.counting: dict[str, asyncio.Task[None]] = {}  # the release counts who let go, by transfer

    def give_up(self, transfer: str) -> None:
        """Its prefill was given up: one that begins after it is another."""
        self.given_up.remember(hash(transfer), self.let_go.pop(transfer, None) is not None)

    def may_come_again(self, transfer: str) -> bool:
        """Whether decode has let go of a transfer: who asks for it after that may be a client that tries again."""
        return self.was_let_go(transfer) is not None or self.given_up.get(hash(transfer), False)

    def let(self, transfer: str, release: Call, meta: Any) -> None:
        let = self.let_go.get(transfer) or _LetGo()
        let.asks.append((release, meta))
        let.since = time.monotonic()
        self.let_go.remember(transfer, let)

    def was_let_go(self, transfer: str) -> _LetGo | None:
        while self.let_go and next(iter(self.let_go.values())).since < time.monotonic() - LET_GO_SECONDS:
            self.let_go.popitem(last=False)
        return self.let_go.get(transfer)


class _Answers:
    """In the place of the socket while an ask is served: the release's answers, and what they leave out."""

    def __init__(self, worker: Any, identity: bytes, socket: Any, failed: Callable[[Exception], None]) -> None:
        self._worker, self._identity, self._socket, self._failed = worker, identity, socket, failed
        self.left: dict[str, str] = {}  # requests that are not answered yet, and their transfers
        self.sent: set[str] = set()  # transfers of requests that have their blocks

    async def send_multipart(self, parts: Any) -> None:
        identity, data = parts
        try:
            data = self._completed(data)
        except Exception as error:
            self._failed(error)
        await self._socket.send_multipart((identity, data))

    def _completed(self, data: bytes) -> bytes:
        """The release's answer, with an error for each request that it leaves out and will never answer."""
        response = self._worker._xfer_resp_decoder.decode(data)
        if response.status.name not in ("CONTINUE", "FINISH"):
            return data
        self.sent.update(self.left[name] for name in response.ok_reqs or () if name in self.left)
        for name in (*(response.ok_reqs or ()), *(response.err_reqs or ())):
            self.left.pop(name, None)
        last, kept = response.status.name == "FINISH", self._worker.reqs_need_send
        unserved = [name for name, transfer in self.left.items() if not answer_comes(kept.get(transfer), last)]
        if not unserved:
            return data
        for name in unserved:
            del self.left[name]
        response.err_reqs = [*(response.err_reqs or ()), *unserved]
        response.err_msg = response.err_msg or GIVEN_UP
        return self._encoded(response)

    async def say(
        self, status: str, errors: list[str] | None = None, why: str | None = None, ok: list[str] | None = None
    ) -> None:
        """An answer of our own."""
        module = sys.modules[type(self._worker).__module__]
        kind = getattr(vars(module)["MooncakeXferResponseStatus"], status)
        response = vars(module)["MooncakeXferResponse"](status=kind, ok_reqs=ok, err_reqs=errors, err_msg=why)
        await self._socket.send_multipart((self._identity, self._encoded(response)))

    def _encoded(self, response: Any) -> bytes:
        data: bytes = self._worker._encoder.encode(response)
        return data


class _Nobody:
    """In the place of the socket where who asked has been answered."""

    async def send_multipart(self, parts: Any) -> None:
        pass


def wrappers(livepatch: PatchContext) -> Mapping[str, Call]:
    """At each target: a wrapper."""

    def asks_of(worker: Any) -> _Asks:
        return attached(worker, STATE, _Asks)

    # An ask

    def begin(worker: Any, serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Serve apart, so that the task that took an ask from the queue can take the next."""
        task = asyncio.ensure_future(serving)
        tasks = asks_of(worker).tasks
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def begun(release: Call, worker: Any, *ask: Any) -> None:
        begin(worker, served(release, worker, *ask))

    async def served(release: Call, worker: Any, identity: bytes, socket: Any, meta: Any) -> None:
        answers = _Answers(worker, identity, socket, lambda error: livepatch.stand_aside("answering an ask", error))
        transfers: list[str] = []
        try:
            if lacks_layout(worker, meta):
                await release(identity, socket, meta)  # which asks for it; then the ask comes again
                return
            await taken(release, worker, answers, meta)
            answers.left = {name: transfer for name, (transfer, _) in meta.req_blocks.items()}
            transfers = list(answers.left.values())
            asks_of(worker).waiting.update(transfers)
            for transfer in transfers if asks_us_alone(worker, meta) else ():
                if transfer not in worker.reqs_need_send and asks_of(worker).may_come_again(transfer):
                    seconds = vars(sys.modules[type(worker).__module__])["envs"].VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
                    asyncio.get_running_loop().call_later(seconds / LATE_SHARE, too_late, worker, transfer)
            if transfers:
                await release(identity, answers, meta)
        except Exception as error:  # the release's task would answer so
            livepatch.say("error", f"an ask could not be served: {type(error).__name__}: {error}")
            await answers.say("ERROR", why=str(error))
        finally:
            ended(worker, transfers, answers.sent)

    async def taken(release: Call, worker: Any, answers: _Answers, meta: Any) -> None:
        """Take from an ask, and answer, what lets go, and what will not come. The release serves the rest."""
        asks, kept = asks_of(worker), worker.reqs_need_send
        empty = {name: of for name, of in meta.req_blocks.items() if not any_blocks(of[1])}
        rest = {name: of for name, of in meta.req_blocks.items() if name not in empty}
        for name, (transfer, _) in empty.items():
            part = copy.copy(meta)
            part.req_blocks = {name: empty[name]}
            let_go(worker, transfer, release, part)
        if empty:
            livepatch.count("let_go", len(empty))

        def over(transfer: str) -> bool:
            return hash(transfer) in asks.given_up and transfer not in kept and not asks.may_come_again(transfer)

        # Earlier decode engines take the end of what was no load for the end of one, and die of it.
        done = list(empty) if livepatch.facts.get("empty_is_no_load") else []
        answered = False
        while True:  # until all answers are sent: meanwhile more may be let go
            counting = [asks.counting[transfer] for transfer, _ in rest.values() if transfer in asks.counting]
            if counting:
                await asyncio.wait(counting)
                continue
            refused = [name for name, (transfer, _) in rest.items() if over(transfer)]
            if not refused and not done and (rest or answered):
                break
            rest = {name: of for name, of in rest.items() if name not in refused}
            if refused:
                livepatch.count("refused", len(refused))
            why = GIVEN_UP if refused else None
            await answers.say("CONTINUE" if rest else "FINISH", refused or None, why, done or None)
            done, answered = [], True
        meta.req_blocks = rest

    def let_go(worker: Any, transfer: str, release: Call, part: Any) -> None:
        """Decode wants nothing of a transfer any more: who waits for a prefill that has not begun waits no more."""
        asks, kept = asks_of(worker), worker.reqs_need_send
        if hash(transfer) in asks.given_up and transfer not in kept:
            asks.given_up.remember(hash(transfer), True)
        else:
            asks.let(transfer, release, part)
        if asks_us_alone(worker, part):
            wait_no_more(kept, transfer)
        count(worker, transfer)

    def too_late(worker: Any, transfer: str) -> None:
        """No prefill has begun again for what was let go: who asked for it is told so."""
        if asks_of(worker).may_come_again(transfer) and wait_no_more(worker.reqs_need_send, transfer):
            livepatch.count("refused")

    def count(worker: Any, transfer: str) -> None:
        """Have the release count who let go, and free prefill's blocks: when it has ended, and nobody reads them."""
        asks, entry = asks_of(worker), worker.reqs_need_send.get(transfer)
        let = asks.let_go.get(transfer)
        if let is None or not let.asks or entry is None or not entry.ready.is_set():
            return
        if asks.waiting[transfer] or transfer in asks.counting:
            return  # whose end comes here again
        asks.counting[transfer] = begin(worker, counted(worker, transfer, let))

    async def counted(worker: Any, transfer: str, let: _LetGo) -> None:
        try:
            while let.asks:
                release, part = let.asks.pop(0)
                if transfer in worker.reqs_need_send:
                    await release(b"", _Nobody(), part)
        except Exception as error:
            livepatch.say("error", f"who let go could not be counted: {type(error).__name__}: {error}")
        finally:
            del asks_of(worker).counting[transfer]

    def ended(worker: Any, transfers: list[str], sent: set[str]) -> None:
        """Forget what nobody waits for, and no prefill has begun for."""
        asks, kept = asks_of(worker), worker.reqs_need_send
        waiting = asks.waiting
        for transfer in transfers:
            if transfer in sent and transfer not in kept and transfer in asks.let_go:
                asks.let_go[transfer].asks.clear()  # a client tried again and was served: the next prefill is another
            waiting[transfer] -= 1
            if waiting[transfer]:
                continue
            del waiting[transfer]
            entry = kept.get(transfer)
            if entry is not None and not entry.p_req_id and not entry.ready.is_set():
                del kept[transfer]
            count(worker, transfer)

    def send_kv_to_decode(
        original: Call, worker: Any, identity: bytes, sock: Any, meta: Any, *rest: Any, **named: Any
    ) -> Any:
        return begun(lambda *ask: original(*ask, *rest, **named), worker, identity, sock, meta)

    # A prefill

    async def recorded(original: Call, worker: Any, metadata: Any, *rest: Any, **named: Any) -> None:
        dropped: list[Any] = []
        begun_anew: Any = None
        try:
            dropped = before(worker, metadata)
            begun_anew = unknown(worker, metadata)
        except Exception as error:
            livepatch.stand_aside("noting prefills", error)
        if begun_anew is not None:
            await original(begun_anew, *rest, **named)
        await original(metadata, *rest, **named)
        for entry in dropped:
            entry.ready.set()  # whoever waits for it finds that it is kept no more
        for name, (transfer, _) in metadata.reqs_to_send.items():
            entry = worker.reqs_need_send.get(transfer)
            if entry is not None and not entry.p_req_id:
                entry.p_req_id = name  # asked for first: no placeholder any more
            count(worker, transfer)

    def before(worker: Any, metadata: Any) -> list[Any]:
        """What is dropped now, of all that is kept. The release stops at the first that it does not know."""
        asks, kept = asks_of(worker), worker.reqs_need_send
        metadata.reqs_to_send = {name: (named(of), blocks) for name, (of, blocks) in metadata.reqs_to_send.items()}
        second = give_back(worker, metadata)
        begun_now = {transfer for transfer, _ in metadata.reqs_to_send.values()}
        for transfer in begun_now:
            asks.given_up.pop(hash(transfer), None)
            if transfer in asks.let_go and not asks.let_go[transfer].asks and not begun_for(kept, transfer):
                del asks.let_go[transfer]  # what was let go has ended; this is another
        for transfer in second:
            asks.give_up(transfer)  # who asks when the first was sent is told that nothing comes
        going_on = gone_on(metadata, kept)
        for name, (transfer, _) in metadata.reqs_to_send.items():
            if transfer in metadata.reqs_not_processed & going_on and kept[transfer].p_req_id not in ("", name):
                asks.let_go.pop(transfer, None)  # likewise: given up in the step in which another began
        given_up = metadata.reqs_not_processed - going_on
        given_up = {transfer for transfer in given_up if transfer not in kept or not kept[transfer].ready.is_set()}
        for transfer in given_up:
            asks.give_up(transfer)
        metadata.reqs_not_processed = {transfer for transfer in given_up if transfer in kept or transfer in begun_now}
        if given_up:
            livepatch.count("given_up", len(given_up))
        return [kept[transfer] for transfer in metadata.reqs_not_processed if transfer in kept]

    def give_back(worker: Any, metadata: Any) -> set[str]:
        """Free the blocks of prefills that have ended, and that another one of their transfer has come before.

        That one is sent, to whoever asks first, and is kept for as long as the release would keep the second. Returns
        these transfers.
        """
        kept, ended, second = worker.reqs_need_send, set(), set()
        for name, (transfer, blocks) in list(metadata.reqs_to_send.items()):
            first = kept.get(transfer)
            there = first is not None and first.ready.is_set() and first.p_req_id != name
            if not blocks or not (there or transfer in ended):
                ended.update([transfer] if blocks else [])
                continue
            if there:
                seconds = vars(sys.modules[type(worker).__module__])["envs"].VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
                first.expire_time = time.perf_counter() + seconds
            del metadata.reqs_to_send[name]
            worker.finished_sending_reqs.add(name)
            second.add(transfer)
            livepatch.tell("second", f"{name} has the transfer_id of another prompt that has ended: that one is sent")
        return second

    def unknown(worker: Any, metadata: Any) -> Any:
        """What begins prefills that end, and of which nothing is kept: another of their transfer was sent, or given up.

        The release stops at such a one, and forgets what is behind it.
        """
        kept = worker.reqs_need_send
        begun: dict[str, Any] = {
            name: (of, []) for name, (of, blocks) in metadata.reqs_to_send.items() if blocks and of not in kept
        }
        if not begun:
            return None
        part = copy.copy(metadata)
        part.reqs_to_send, part.reqs_not_processed = begun, set()
        return part

    def record_send_reqs(original: Call, worker: Any, metadata: Any, *rest: Any, **named: Any) -> Any:
        return recorded(original, worker, metadata, *rest, **named)

    def listen(original: Call, worker: Any, *rest: Any, **named: Any) -> Any:
        return listening(livepatch, original, worker, *rest, **named)

    def query(original: Call, server: Any, *rest: Any, **named: Any) -> Any:
        return known(livepatch, lambda: original(*rest, **named))

    return {
        f"{SERVER}.query": query,
        f"{WORKER}.send_kv_to_decode": send_kv_to_decode,
        f"{WORKER}.record_send_reqs": record_send_reqs,
        f"{WORKER}._mooncake_sender_listener": listen,
    }


def answer_comes(entry: Any, last: bool) -> bool:
    """Whether the release answers for a transfer after this answer, by what it keeps of it.

    After the last answer none comes but for what is being written: another prefill may keep the transfer by then.
    """
    return entry is not None and (not last or entry.sending > 0)


def begun_for(kept: Mapping[str, Any], transfer: str) -> bool:
    """Whether a prefill of the transfer has begun, and is kept. Who asks first leaves an entry without its name."""
    return transfer in kept and bool(kept[transfer].p_req_id)


def wait_no_more(kept: dict[str, Any], transfer: str) -> bool:
    """Wake who waits for a prefill that has not begun: the release finds that it is kept no more."""
    entry = kept.get(transfer)
    if entry is None or entry.p_req_id or entry.ready.is_set():
        return False
    del kept[transfer]
    entry.ready.set()
    return True


def named(transfer: Any) -> Any:
    """A transfer's name. A client may send a list or an object.

    The release would stop there, and forget what is behind it.
    """
    return transfer if isinstance(transfer, Hashable) else str(transfer)


def gone_on(metadata: Any, kept: Mapping[str, Any]) -> set[str]:
    """Transfers of which a prefill was given up, and another one has begun since, or ended.

    The release would forget these, and then be asked to send what it does not know.
    """
    return {
        transfer
        for name, (transfer, blocks) in metadata.reqs_to_send.items()
        if transfer in kept and (blocks or kept[transfer].p_req_id not in ("", name))
    }


def any_blocks(blocks: Any) -> bool:
    """Whether an ask is for any block; to 0.23 they are not by groups."""
    return any(isinstance(entry, int) or bool(entry) for entry in blocks)


def asks_us_alone(worker: Any, meta: Any) -> bool:
    """Whether who asks has all that it loads from this worker.

    0.30.0 to 0.32.0 report a load as failed with the first worker that says so, while others may still write.
    """
    return bool(worker.tp_size <= meta.remote_tp_size and getattr(worker, "pp_size", 1) == 1)


def lacks_layout(worker: Any, meta: Any) -> bool:
    """Whether an ask names a layout (from 0.33.0) that this worker has not."""
    if not getattr(meta, "layout_id", 0) or meta.kv_caches_base_addr:
        return False
    return worker._lookup_peer_layout(meta) is None
