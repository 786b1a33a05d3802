"""A prefill engine answers each ask of a decode engine, and an ask that waits keeps no other from being served.

Source: _sender_worker awaits send_kv_to_decode, which waits for the prefill's end, in twice as many tasks as threads.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .listener import listening

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
WORKER = f"{MODULE}:MooncakeConnectorWorker"

STATE = "_livepatch_asks"
"""Attribute of a prefill engine's worker: its `_Asks`."""

REMEMBERED = 65536
"""How many transfers whose prefill was given up are remembered, for asks that come later."""

GIVEN_UP = "The prefill was given up, or its blocks have been let go."


class _Asks:
    """What is known of one worker's asks. All of it is used by the worker's event loop alone."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps none
        self.waiting: Counter[str] = Counter()  # asks under way, by transfer
        self.given_up: OrderedDict[str, None] = OrderedDict()  # transfers whose prefill was given up, oldest first

    def give_up(self, transfer: str) -> None:
        self.given_up[transfer] = None
        self.given_up.move_to_end(transfer)
        if len(self.given_up) > REMEMBERED:
            self.given_up.popitem(last=False)


class _Answers:
    """In the place of the socket while an ask is served: the release's answers, and what they leave out."""

    def __init__(self, worker: Any, identity: bytes, socket: Any, failed: Callable[[Exception], None]) -> None:
        self._worker, self._identity, self._socket, self._failed = worker, identity, socket, failed
        self.left: dict[str, str] = {}  # requests that are not answered yet, and their transfers
        self.empty: set[str] = set()  # those that ask for nothing, but to let go
        self.answered = self.mute = False

    async def send_multipart(self, parts: Any) -> None:
        self.answered = True
        if self.mute:
            return
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
        for name in (*(response.ok_reqs or ()), *(response.err_reqs or ())):
            self.left.pop(name, None)
        kept = self._worker.reqs_need_send
        unserved = [name for name, transfer in self.left.items() if transfer not in kept]
        for name in unserved:
            del self.left[name]
        errors = [name for name in unserved if name not in self.empty]
        if not errors:
            return data
        response.err_reqs = [*(response.err_reqs or ()), *errors]
        response.err_msg = response.err_msg or GIVEN_UP
        return self._encoded(response)

    async def say(self, status: str, errors: list[str] | None = None, why: str | None = None) -> None:
        """An answer of our own."""
        module = sys.modules[type(self._worker).__module__]
        kind = getattr(vars(module)["MooncakeXferResponseStatus"], status)
        response = vars(module)["MooncakeXferResponse"](status=kind, err_reqs=errors, err_msg=why)
        await self._socket.send_multipart((self._identity, self._encoded(response)))

    def _encoded(self, response: Any) -> bytes:
        data: bytes = self._worker._encoder.encode(response)
        return data


def wrappers(livepatch: PatchContext) -> Mapping[str, Call]:
    """At each target: a wrapper in wrapt's form (wrapped, instance, args, kwargs)."""

    def asks_of(worker: Any) -> _Asks:
        asks: _Asks | None = getattr(worker, STATE, None)
        if asks is None:
            asks = _Asks()
            setattr(worker, STATE, asks)
        return asks

    # An ask

    async def begun(release: Call, worker: Any, identity: bytes, socket: Any, meta: Any) -> None:
        """Serve an ask apart, so that the task that took it from the queue can take the next."""
        task = asyncio.ensure_future(served(release, worker, identity, socket, meta))
        tasks = asks_of(worker).tasks
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def served(release: Call, worker: Any, identity: bytes, socket: Any, meta: Any) -> None:
        answers = _Answers(worker, identity, socket, lambda error: livepatch.stand_aside("answering an ask", error))
        transfers: list[str] = []
        try:
            if not await refused(worker, answers, meta):
                transfers = [transfer for transfer, _ in meta.req_blocks.values()]
                asks_of(worker).waiting.update(transfers)
                await waited(release, worker, answers, identity, meta)
        except Exception as error:  # the release's task would answer so
            livepatch.say("error", f"an ask could not be served: {type(error).__name__}: {error}")
            await answers.say("ERROR", why=str(error))
        finally:
            ended(worker, transfers)

    async def refused(worker: Any, answers: _Answers, meta: Any) -> bool:
        """Answer at once for what will not come; whether that is all that was asked for."""
        given_up, kept = asks_of(worker).given_up, worker.reqs_need_send
        gone, rest = [], {}
        for name, (transfer, blocks) in meta.req_blocks.items():
            if transfer in given_up and transfer not in kept:
                gone.append((name, blocks))
                continue
            rest[name] = (transfer, blocks)
            answers.left[name] = transfer
            if not any_blocks(blocks):
                answers.empty.add(name)
        if not gone:
            return False
        livepatch.count("refused", len(gone))
        errors = [name for name, blocks in gone if any_blocks(blocks)]
        if errors or not rest:
            await answers.say("CONTINUE" if rest else "FINISH", errors or None, GIVEN_UP if errors else None)
        meta.req_blocks = rest
        return not rest

    async def waited(release: Call, worker: Any, answers: _Answers, identity: bytes, meta: Any) -> None:
        """Serve an ask as the release does. One that only lets go is answered before what it waits for is there."""
        serving = asyncio.ensure_future(release(identity, answers, meta))
        await asyncio.sleep(0)  # up to where it waits, or refuses
        kept = worker.reqs_need_send
        if len(answers.empty) == len(meta.req_blocks) and not answers.answered:
            entries = [kept.get(transfer) for transfer, _ in meta.req_blocks.values()]
            if any(entry is not None and not entry.ready.is_set() for entry in entries):
                answers.mute = True
                livepatch.count("let_go")
                await answers.say("FINISH")
        await serving

    def ended(worker: Any, transfers: list[str]) -> None:
        """Forget what nobody waits for, and no prefill has begun for."""
        waiting, kept = asks_of(worker).waiting, worker.reqs_need_send
        for transfer in transfers:
            waiting[transfer] -= 1
            if waiting[transfer]:
                continue
            del waiting[transfer]
            entry = kept.get(transfer)
            if entry is not None and not entry.p_req_id and not entry.ready.is_set():
                del kept[transfer]

    def send_kv_to_decode(wrapped: Call, worker: Any, args: Any, kwargs: Any) -> Any:
        return begun(wrapped, worker, *args, **kwargs)

    # A prefill

    async def recorded(release: Call, worker: Any, metadata: Any) -> None:
        dropped: list[Any] = []
        try:
            dropped = before(worker, metadata)
        except Exception as error:
            livepatch.stand_aside("noting prefills", error)
        await release(metadata)
        for entry in dropped:
            entry.ready.set()  # whoever waits for it finds that it is kept no more
        for name, (transfer, _) in metadata.reqs_to_send.items():
            entry = worker.reqs_need_send.get(transfer)
            if entry is not None and not entry.p_req_id:
                entry.p_req_id = name  # asked for first: no placeholder any more

    def before(worker: Any, metadata: Any) -> list[Any]:
        """What is dropped now, of all that is kept. The release stops at the first that it does not know."""
        asks, kept = asks_of(worker), worker.reqs_need_send
        begun_now = {transfer for transfer, _ in metadata.reqs_to_send.values()}
        for transfer in begun_now:
            asks.given_up.pop(transfer, None)
        given_up = metadata.reqs_not_processed
        for transfer in given_up:
            asks.give_up(transfer)
        metadata.reqs_not_processed = {transfer for transfer in given_up if transfer in kept or transfer in begun_now}
        if given_up:
            livepatch.count("given_up", len(given_up))
        return [kept[transfer] for transfer in metadata.reqs_not_processed if transfer in kept]

    def record_send_reqs(wrapped: Call, worker: Any, args: Any, kwargs: Any) -> Any:
        return recorded(wrapped, worker, args[0] if args else kwargs["metadata"])

    def listen(wrapped: Call, worker: Any, args: Any, kwargs: Any) -> Any:
        return listening(livepatch, wrapped, worker, *args, **kwargs)

    return {
        f"{WORKER}.send_kv_to_decode": send_kv_to_decode,
        f"{WORKER}.record_send_reqs": record_send_reqs,
        f"{WORKER}._mooncake_sender_listener": listen,
    }


def any_blocks(blocks: Any) -> bool:
    """Whether an ask is for any block; to 0.23 they are not by groups."""
    return any(isinstance(entry, int) or bool(entry) for entry in blocks)
