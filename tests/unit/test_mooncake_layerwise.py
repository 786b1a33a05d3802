"""`mooncake-layerwise`: what is told with a step, what leaves early, and what waits for it.

The worker is a stand-in, whose answer to an ask follows the release's: what of a release is concerned is in
tests/releases/test_mooncake_layerwise.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.mooncake_layerwise import early
from vllm_livepatch.patches.mooncake_layerwise import wrappers as patch
from vllm_livepatch.patches.mooncake_layerwise.computed import PROGRESS, Prefills
from vllm_livepatch.patches.mooncake_layerwise.parts import Group, Part
from vllm_livepatch.sitecustomize.context import PatchContext

from tests.unit.support import awaited


class Entry:
    """What a release keeps of a transfer."""

    def __init__(
        self,
        name: str,
        transfer: str,
        local: list[list[int]],
        ready: Any,
        expire_time: float = float("inf"),
        need_send: int = 0,
    ) -> None:
        self.p_req_id, self.transfer_id, self.local_block_ids, self.ready = name, transfer, local, ready
        self.expire_time, self.need_send, self.sending = expire_time, need_send, 0


class Response(SimpleNamespace):
    def __init__(self, status: str, ok: Any = None, err: Any = None, message: str | None = None) -> None:
        super().__init__(status=SimpleNamespace(name=status), ok_reqs=ok, err_reqs=err, err_msg=message)


class MooncakeXferResponseStatus:
    """By the release's name: the patch finds it in the worker's module."""

    CONTINUE = SimpleNamespace(name="CONTINUE")


def MooncakeXferResponse(status: Any, err_reqs: list[str]) -> Response:
    return Response(status.name, err=err_reqs)


SendBlockMeta = Entry
"""By the release's name too."""
envs = SimpleNamespace(VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=480)
"""By the release's name too."""


class Metadata:
    """Of the connector's, as far as a prefill that was given up concerns it."""

    def __init__(self) -> None:
        self.reqs_not_processed: set[str] = set()
        self.reqs_to_send: dict[str, tuple[str, list[list[int]]]] = {}


class Connector:
    """A worker's, given its metadata at the beginning of each step."""

    def __init__(self, worker: Worker, bound: list[Any]) -> None:
        self.connector_worker, self.bound = worker, bound
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self.bound.append(metadata)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any) -> None:
        pass


def encoded(response: Any) -> bytes:
    return json.dumps([response.status.name, response.ok_reqs, response.err_reqs, response.err_msg]).encode()


class Worker:
    """Writes pairs of blocks, (prefill's, decode's), into `written`; a test can hold (`open`) or refuse (`answer`)."""

    def __init__(self, context: PatchContext) -> None:
        self.num_sender_workers, self._sender_executor = 4, None
        self.reqs_need_send: dict[str, Entry] = {}
        self.left: dict[str, str] = {}  # of `mooncake-lost-asks`, in whose place this is, too
        self._xfer_resp_decoder = SimpleNamespace(decode=lambda data: Response(*json.loads(data)))
        self._encoder = SimpleNamespace(encode=encoded)
        self.written: list[list[tuple[Any, ...]]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.answer = 0
        self.goes_on = False  # after an answer of a prefill that was given up
        self.answers: list[Any] = []
        self.device_kv_caches: Any = {}
        self.regions: Any = None  # of its caches, for what is to be sent of some layers
        self.finished: list[str] = []  # transfers whose blocks may be given away
        self.tp_size = 1
        own = SimpleNamespace(kv_cache_spec=SimpleNamespace(page_size_bytes=1), layer_names=["a"])
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[own])
        self.finished_sending_reqs: set[str] = set()
        self.given_up: list[set[str]] = []  # as the release was told
        self.livepatch_writes = early.Writes(context, self)
        setattr(self, patch.WRITES, self.livepatch_writes)
        made = patch.wrappers(context)
        self.build: Any = self._built
        self._send: Any = made[f"{patch.WORKER}.send_kv_to_decode"]
        self._build: Any = made[f"{patch.WORKER}._build_transfer_params"]
        self._start: Any = made[f"{patch.WORKER}.start_load_kv"]
        self._registered: Any = made[f"{patch.CONNECTOR}.register_kv_caches"]

    async def send_multipart(self, parts: Any) -> None:
        self.answers.append(json.loads(parts[1]))

    async def _built(self, ready: Any, meta: Any, local: Any, remote: Any) -> Any:
        pairs = []
        for name, entry in ready:
            for local, places in zip(entry.local_block_ids, meta.req_blocks[name][1], strict=True):
                pairs += list(zip(local[len(local) - len(places) :], places, strict=True))
        return pairs, [], [], [], None

    async def send(self, identity: bytes, socket: Any, meta: Any) -> None:
        entries = {
            name: self.reqs_need_send.setdefault(transfer, Entry("", transfer, [], asyncio.Event()))
            for name, (transfer, _) in meta.req_blocks.items()
        }
        for name, (transfer, _) in meta.req_blocks.items():
            entry = entries[name]
            await entry.ready.wait()
            if transfer not in self.reqs_need_send:  # as `mooncake-lost-asks` has it answered
                status = "CONTINUE" if self.goes_on and name != [*meta.req_blocks][-1] else "FINISH"
                await socket.send_multipart((identity, encoded(Response(status, err=[name], message="given up"))))
                continue
            args = ([(name, entry)], meta, self.regions, self.regions)
            pairs, _, _, errors, message = await self._build(self.build, self, *args)
            if pairs:
                self.written.append(pairs)
                await self.open.wait()
                if self.answer:
                    errors, message = [*errors, name], f"{early.UNCERTAIN} {self.answer}"
            if not errors and (entry.need_send or 1) == 1:
                self.finished.append(transfer)
            await socket.send_multipart(
                (identity, encoded(Response("FINISH", [] if errors else [name], errors, message)))
            )

    def ask(self, name: str, transfer: str, places: list[int], ranks: int = 1) -> Any:
        return self.asks({name: (transfer, [places])}, ranks)

    def asks(self, blocks: dict[str, Any], ranks: int = 1) -> Any:
        meta = SimpleNamespace(req_blocks=blocks, remote_tp_size=ranks)
        return asyncio.ensure_future(self._send(self.send, self, b"", self, meta))

    async def record_send_reqs(self, metadata: Metadata) -> None:
        self.given_up.append(metadata.reqs_not_processed)
        for transfer in metadata.reqs_not_processed:
            self.reqs_need_send.pop(transfer).ready.set()  # `mooncake-lost-asks` does the latter

    def held(
        self,
        name: str,
        transfer: str,
        wrapped: Callable[[Any], None] = lambda metadata: None,
        blocks: Sequence[int] = (1, 2),
    ) -> Metadata:
        """A step tells that a prefill was given up."""
        self.sender_loop = asyncio.get_running_loop()
        metadata = Metadata()
        setattr(metadata, PROGRESS, {"held": {name: (transfer, [*blocks])}})
        self._start(wrapped, self, metadata)
        return metadata

    def register(self, bound: list[Any]) -> None:
        """The connector is given its caches. `bound` gets the metadata of each step that begins."""
        self.is_kv_consumer, self.sender_loop = False, asyncio.get_running_loop()
        self.connector = Connector(self, bound)
        self._registered.look(None, self.connector, {})
        self.livepatch_writes = getattr(self, patch.WRITES)

    def step(self, **progress: list[str]) -> asyncio.Task[None]:
        """A step begins, in the worker's own thread: the connector is given its metadata."""
        metadata = SimpleNamespace(**{PROGRESS: {"whole": {}, "back": [], "over": [], "held": {}, **progress}})
        return asyncio.ensure_future(asyncio.to_thread(self.connector.bind_connector_metadata, metadata))

    def whole(self, transfer: str, blocks: list[int], total: int) -> None:
        self.livepatch_writes.computed({"whole": {transfer: (blocks, total)}, "back": [], "over": [], "held": {}}, None)

    def end(self, transfer: str, blocks: list[int]) -> None:
        self.livepatch_writes.over([transfer])
        entry = self.reqs_need_send[transfer]
        entry.local_block_ids = [blocks]
        entry.ready.set()


def run(case: Callable[[Worker], Awaitable[None]]) -> PatchContext:
    aside: list[str] = []
    context = PatchContext("mooncake-layerwise", {"BY": "auto"}, {}, lambda: None, failed=aside.append)

    async def main() -> None:
        await asyncio.wait_for(case(Worker(context)), 20)

    asyncio.run(main())
    assert aside == []
    return context


async def turns(number: int = 20) -> None:
    """Let all that can go on go on."""
    for _ in range(number):
        await asyncio.sleep(0)


def beside_another(worker: Worker) -> None:
    """The group that leaves early is the second of two."""
    worker.kv_cache_config.kv_cache_groups *= 2
    worker.livepatch_writes = early.Writes(worker.livepatch_writes._livepatch, worker, None, Group(1, 2))
    setattr(worker, patch.WRITES, worker.livepatch_writes)


def test_of_several_groups_one_leaves_early_and_the_others_at_the_end() -> None:
    async def case(worker: Worker) -> None:
        beside_another(worker)
        asked = worker.asks({"d": ("t", [[20], [10, 11]])})
        worker.whole("t", [1, 2], 2)
        await turns()
        assert worker.written == [[(1, 10), (2, 11)]]
        entry = worker.reqs_need_send["t"]
        entry.local_block_ids = [[7, 8], [1, 2]]
        entry.ready.set()
        await asked
        assert worker.written[1:] == [[(8, 20)]]
        assert worker.answers == [["FINISH", ["d"], [], None]]

    assert run(case).counters == {"early": 2}


@pytest.mark.parametrize("asked_for", [[[10, 11]], [[], [10, 11], []]], ids=["one", "three"])
def test_nothing_leaves_early_for_who_has_another_number_of_groups(asked_for: list[list[int]]) -> None:
    async def case(worker: Worker) -> None:
        beside_another(worker)
        asked = worker.asks({"d": ("t", asked_for)})
        worker.whole("t", [1], 2)
        await turns()
        assert worker.written == []
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    run(case)


def test_what_the_release_is_to_send_of_another_number_of_groups_is_sent_whole() -> None:
    async def case(worker: Worker) -> None:
        beside_another(worker)
        part = Part(SimpleNamespace(), "d", "t", [10, 11], Group(1, 2), local=[1], blocks=2)  # type: ignore[arg-type]
        part.entry = Entry("", "t", [[7], [1, 2]], None)
        assert part.sent_of(part.entry) == (1, None)
        part.entry.local_block_ids = [[1, 2]]
        assert part.sent_of(part.entry) == (0, None)

    run(case)


def test_what_is_whole_leaves_and_the_rest_at_the_end() -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11, 12, 13])
        await turns()
        assert worker.written == []
        worker.whole("t", [1, 2], 4)
        await turns()
        worker.whole("t", [1, 2, 3], 4)
        await turns()
        assert worker.written == [[(1, 10), (2, 11)], [(3, 12)]]
        assert worker.answers == []
        worker.end("t", [1, 2, 3, 4])
        await asked
        assert worker.written[2:] == [[(4, 13)]]
        assert worker.answers == [["FINISH", ["d"], [], None]]
        assert list(worker.reqs_need_send) == worker.finished == ["t"]

    assert run(case).counters == {"early": 3}


def test_an_ask_that_comes_later_is_sent_what_is_whole_by_then() -> None:
    async def case(worker: Worker) -> None:
        worker.whole("t", [1, 2], 3)
        asked = worker.ask("d", "t", [11, 12])  # decode has the first
        await turns()
        assert worker.written == [[(2, 11)]]
        worker.end("t", [1, 2, 3])
        await asked
        assert worker.written[1:] == [[(3, 12)]]

    run(case)


@pytest.mark.parametrize("blocks", [[1, 9, 3], [1, 2, 3, 4]], ids=["others", "more"])
def test_what_the_release_is_to_send_otherwise_is_sent_whole(blocks: list[int]) -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11, 12])
        worker.whole("t", [1, 2], 3)
        await turns()
        worker.end("t", blocks)
        await asked
        assert worker.written[1:] == [list(zip(blocks[-3:], [10, 11, 12], strict=True))]

    run(case)


def test_no_answer_leaves_before_what_is_under_way() -> None:
    async def case(worker: Worker) -> None:
        worker.open.clear()
        asked = worker.ask("d", "t", [10, 11])
        worker.whole("t", [1], 2)
        await turns()
        assert worker.written == [[(1, 10)]]
        worker.end("t", [1, 2])
        await turns()
        assert worker.written == [[(1, 10)]]
        assert worker.answers == []
        worker.open.set()
        await asked
        assert worker.written == [[(1, 10)], [(2, 11)]]

    run(case)


@pytest.mark.parametrize("answer", [0, 1], ids=["ends well", "fails"])
def test_while_an_early_write_reads_blocks_no_time_out_of_the_release_gives_them_away(answer: int) -> None:
    """The release gives away what it does not count as being sent."""

    async def case(worker: Worker) -> None:
        worker.open.clear()
        worker.answer = answer
        worker.ask("d", "t", [10, 11])
        worker.whole("t", [1], 2)
        await turns()
        entry = worker.reqs_need_send["t"]
        assert (worker.written, entry.sending) == ([[(1, 10)]], 1)
        worker.open.set()
        await turns()
        assert entry.sending == 0

    run(case)


def test_blocks_are_given_back_when_nothing_reads_them_and_all_is_sent_at_the_end() -> None:
    async def case(worker: Worker) -> None:
        worker.open.clear()
        asked = worker.ask("d", "t", [10, 11])
        worker.whole("t", [1], 2)
        await turns()
        back = asyncio.ensure_future(worker.livepatch_writes.back(["t"]))
        await turns()
        assert not back.done()
        worker.open.set()
        await back
        worker.whole("t", [5], 2)  # not told by any scheduler of ours; nor is it begun
        await turns()
        assert worker.written == [[(1, 10)]]
        worker.end("t", [1, 6])  # the same block, with other contents
        await asked
        assert worker.written[1:] == [[(1, 10), (6, 11)]]

    run(case)


def test_memory_is_taken_away_when_nothing_reads_it_and_all_is_sent_at_the_end() -> None:
    """Also of a prefill that is over, of which an early write is still under way."""

    async def case(worker: Worker) -> None:
        worker.open.clear()
        asked = worker.ask("d", "t", [10, 11])
        over = worker.ask("e", "u", [20, 21])
        worker.whole("t", [1], 2)
        worker.whole("u", [5], 2)
        await turns()
        worker.livepatch_writes.over(["u"])
        assert sorted(worker.written) == [[(1, 10)], [(5, 20)]]
        sleeping = asyncio.ensure_future(worker.livepatch_writes.asleep())
        await turns()
        assert not sleeping.done()
        worker.open.set()
        await sleeping
        assert not any(part.under_way for part in worker.livepatch_writes._parts())
        worker.end("t", [1, 2])
        worker.end("u", [5, 6])
        await asyncio.gather(asked, over)
        assert sorted(worker.written[2:]) == [[(1, 10), (2, 11)], [(5, 20), (6, 21)]]

    run(case)


@pytest.mark.parametrize("taken", ["the memory", "the blocks"])
def test_who_asks_when_what_was_computed_was_taken_away_is_sent_nothing_of_it_early(taken: str) -> None:
    """All is sent at the end, of the blocks that the request has then."""
    blocks = [1, 2] if taken == "the memory" else [5, 6]

    async def case(worker: Worker) -> None:
        worker.whole("t", [1], 2)
        writes = worker.livepatch_writes
        await (writes.asleep() if taken == "the memory" else writes.back(["t"]))
        asked = worker.ask("d", "t", [10, 11])
        await turns()
        assert worker.written == []
        worker.end("t", blocks)
        await asked
        assert worker.written == [list(zip(blocks, [10, 11], strict=True))]

    run(case)


def test_what_was_given_up_is_answered_when_nothing_writes_for_it() -> None:
    async def case(worker: Worker) -> None:
        worker.open.clear()
        asked = worker.ask("d", "t", [10, 11])
        worker.whole("t", [1], 2)
        await turns()
        worker.reqs_need_send.pop("t").ready.set()
        await turns()
        assert worker.answers == []
        worker.open.set()
        await asked
        assert worker.answers == [["FINISH", None, ["d"], "given up"]]

    run(case)


def test_nothing_is_begun_when_the_release_is_about_to_send() -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11])
        await turns()
        worker.end("t", [1, 2])
        worker.whole("t", [1], 2)
        await asked
        assert worker.written == [[(1, 10), (2, 11)]]

    run(case)


def test_what_is_over_before_it_was_begun_is_left_to_the_release() -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11])
        await turns()
        worker.whole("t", [1], 2)
        worker.end("t", [1, 2])
        await asked
        assert worker.written == [[(1, 10), (2, 11)]]

    run(case)


def test_nothing_is_begun_when_the_prefill_has_ended_and_the_release_serves_another_of_the_ask_first() -> None:
    async def case(worker: Worker) -> None:
        asked = worker.asks({"e": ("u", [[20]]), "d": ("t", [[10, 11]])})
        await turns()
        worker.end("t", [1, 2])
        worker.whole("t", [1], 2)
        await turns()
        assert worker.written == []
        worker.end("u", [5])
        await asked
        assert worker.written == [[(5, 20)], [(1, 10), (2, 11)]]

    run(case)


def waits(monkeypatch: pytest.MonkeyPatch, of: Any, name: str) -> asyncio.Event:
    """Set when a thread other than the event loop's begins to wait by `of`'s function or method."""
    waiting, loop, wait = asyncio.Event(), asyncio.get_running_loop(), getattr(of, name)

    def begin(*args: Any) -> Any:
        loop.call_soon_threadsafe(waiting.set)
        return wait(*args)

    monkeypatch.setattr(of, name, begin)
    return waiting


async def first(waiting: asyncio.Event, done: asyncio.Task[None]) -> None:
    """Until a thread waits, or is done."""
    waiter = asyncio.ensure_future(waiting.wait())
    await asyncio.wait([waiter, done], return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()


def test_of_a_prefill_that_was_given_up_the_release_hears_before_another_begins_under_its_transfer() -> None:
    async def case(worker: Worker) -> None:
        heard: list[Any] = []
        asked = worker.ask("d", "t", [10, 11])
        await turns()
        metadata = worker.held("p", "t", lambda metadata: heard.append("begins"))
        assert heard == ["begins"], "no step waits"
        assert metadata.reqs_not_processed == set()

        async def begins() -> None:
            heard.append(list(worker.given_up))

        # As the release has the loop do what a step tells.
        asyncio.run_coroutine_threadsafe(begins(), worker.sender_loop)
        await turns()
        assert heard[1:] == [[{"t"}]]
        await asked

    run(case)


def test_a_step_begins_when_nothing_reads_what_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(worker: Worker) -> None:
        monkeypatch.setattr(patch, "leaves_early", lambda *args: Group())
        bound: list[Any] = []
        worker.register(bound)
        waiting = waits(monkeypatch, futures.Future, "result")
        worker.open.clear()
        asked = worker.ask("d", "t", [10, 11])
        worker.whole("t", [1], 2)
        await turns()
        assert worker.written == [[(1, 10)]]
        step = worker.step(back=["t"])
        await first(waiting, step)
        assert bound == []
        worker.open.set()
        await step
        assert len(bound) == 1
        worker.end("t", [1, 2])
        await asked
        assert worker.written[1:] == [[(1, 10), (2, 11)]]

    run(case)


def test_a_step_does_not_wait_for_ever_and_what_ends_later_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(worker: Worker) -> None:
        monkeypatch.setattr(patch, "leaves_early", lambda *args: Group())
        monkeypatch.setattr(early, "BACK_SECONDS", 0.01)
        bound: list[Any] = []
        worker.register(bound)
        worker.open.clear()
        asked = worker.ask("d", "t", [10, 11])
        worker.whole("t", [1], 2)
        await turns()
        await worker.step(back=["t"])
        assert len(bound) == 1
        worker.end("t", [1, 2])  # the same block, computed anew
        await turns()
        assert worker.answers == []
        worker.open.set()
        await asked
        assert worker.written == [[(1, 10)], [(1, 10), (2, 11)]]

    run(case)


def test_what_is_known_of_a_prefill_is_forgotten_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(worker: Worker) -> None:
        monkeypatch.setattr(patch, "leaves_early", lambda *args: Group())
        worker.register([])
        worker.whole("t", [1], 2)
        worker.whole("u", [2], 2)
        assert sorted(worker.livepatch_writes._whole) == ["t", "u"]
        await worker.step(over=["t"])
        await turns()
        assert sorted(worker.livepatch_writes._whole) == ["u"]

    run(case)


def test_what_leaves_early_leaves_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "PIECE_BYTES", 2)

    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11, 12, 13])
        worker.whole("t", [1, 2, 3], 4)
        await turns(60)
        assert worker.written == [[(1, 10), (2, 11)], [(3, 12)]]
        worker.end("t", [1, 2, 3, 4])
        await asked
        assert worker.written[2:] == [[(4, 13)]]

    run(case)


def test_nothing_leaves_early_where_decode_asks_for_more_than_the_prompt_takes() -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11, 12])
        worker.whole("t", [1], 2)
        await turns()
        assert worker.written == []
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    run(case)


def engine(**other: Any) -> Any:
    """A worker, of an engine whose whole blocks stay as they are, unless `other` says otherwise."""

    class FullAttentionSpec(SimpleNamespace):
        pass

    spec = other.pop("spec", FullAttentionSpec)(block_size=other.pop("block_size", 32))
    groups = [SimpleNamespace(kv_cache_spec=spec)] * other.pop("groups", 1)
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "pipeline_parallel_size": 1}
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=32),
        speculative_config=other.pop("speculative_config", None),
        parallel_config=SimpleNamespace(**{name: other.pop(name, number) for name, number in parallel.items()}),
    )
    return SimpleNamespace(vllm_config=config, kv_cache_config=SimpleNamespace(kv_cache_groups=groups), **other)


def caches(*devices: str) -> dict[str, Any]:
    return {str(n): SimpleNamespace(device=SimpleNamespace(type=device)) for n, device in enumerate(devices)}


@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["cuda"]])
def test_whole_blocks_of_one_group_of_full_attention_can_leave_early(devices: list[str]) -> None:
    assert patch.leaves_early(engine(), caches(*devices))


@pytest.mark.parametrize(
    "other",
    [
        {"groups": 2},
        {"spec": SimpleNamespace},
        {"block_size": 64},
        {"speculative_config": object()},
        {"decode_context_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
        {"pipeline_parallel_size": 2},
    ],
    ids=lambda other: next(iter(other)),
)
def test_others_are_sent_at_the_end(other: dict[str, Any]) -> None:
    assert not patch.leaves_early(engine(**other), caches("cpu"))


def mla(**more: int) -> Any:
    """A kind of cache, by the release's name."""
    return type("MLAAttentionSpec", (SimpleNamespace,), more)


@pytest.mark.parametrize("state", [{}, {"compress_ratio": 1}, {"tokens_per_state": 1}], ids=str)
def test_whole_blocks_of_latent_vectors_can_leave_early(state: dict[str, int]) -> None:
    assert patch.leaves_early(engine(spec=mla(**state)), caches("cpu"))


@pytest.mark.parametrize("state", [{"compress_ratio": 4}, {"tokens_per_state": 4}], ids=str)
def test_states_of_several_tokens_are_sent_at_the_end(state: dict[str, int]) -> None:
    assert not patch.leaves_early(engine(spec=mla(**state)), caches("cpu"))


def test_what_is_on_another_device_is_sent_at_the_end() -> None:
    assert not patch.leaves_early(engine(), caches("cuda", "xpu"))
    assert not patch.leaves_early(engine(), {"mamba": [*caches("cpu", "xpu").values()]})


def groups(*kinds: str, block_size: int = 32) -> Any:
    """Of a cache, by the names of the releases."""
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(
                kv_cache_spec=type(kind, (SimpleNamespace,), {})(block_size=block_size), layer_names=[str(n)]
            )
            for n, kind in enumerate(kinds)
        ]
    )


@pytest.mark.parametrize(
    ("kinds", "group"),
    [
        (["FullAttentionSpec", "SlidingWindowSpec"], Group(0, 2)),
        (["MambaSpec", "MambaSpec", "MLAAttentionSpec"], Group(2, 3)),
        (["FullAttentionSpec", "MLAAttentionSpec"], None),
        (["FullAttentionSpec", "ChunkedLocalAttentionSpec"], None),
        (["FullAttentionSpec", "UniformTypeKVCacheSpecs"], None),
        (["MambaSpec", "SlidingWindowSpec"], None),
        ([], None),
    ],
    ids=str,
)
def test_of_several_groups_the_only_one_of_full_attention_can_leave_early(
    kinds: list[str], group: Group | None
) -> None:
    worker = engine()
    worker.kv_cache_config = groups(*kinds)
    assert patch.leaves_early(worker, caches("cpu")) is None, "to 0.24.0 the release does not write by groups"
    worker.registered_group_indices = []
    assert patch.leaves_early(worker, caches("cpu")) == group
    assert patch.group_of(groups(*kinds, block_size=64), 32) is None


def test_the_scheduler_s_side_follows_the_blocks_of_the_group_that_leaves_early() -> None:
    context = PatchContext("mooncake-layerwise", {"BY": "auto"}, {}, lambda: None)
    made: Any = patch.wrappers(context)[f"{patch.SCHEDULER}.__init__"]
    connector = SimpleNamespace(block_size=32)
    made.look(None, connector, object(), "engine", groups("FullAttentionSpec", "MLAAttentionSpec"))
    assert not hasattr(connector, patch.PREFILLS)
    made.look(None, connector, object(), "engine", groups("MambaSpec", "FullAttentionSpec"))
    prefills = getattr(connector, patch.PREFILLS)
    prefills.progress(
        SimpleNamespace(_reqs_need_send={"p": (request(80), [])}),
        SimpleNamespace(
            num_scheduled_tokens={"p": 32},
            scheduled_new_reqs=[SimpleNamespace(req_id="p", block_ids=([9], [1, 2]))],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[]),
        ),
    )
    assert prefills._kept["p"].blocks == [1, 2]


def test_layers_of_other_groups_that_share_memory_are_passed_over() -> None:
    worker = SimpleNamespace(kv_cache_config=groups("FullAttentionSpec", "SlidingWindowSpec"))
    assert patch.own_caches(worker, {"0": 1, "1": 2, "none's": 3}, Group(0, 2)) == {"0": 1, "none's": 3}


async def failed_early(worker: Worker, **more: Any) -> Any:
    """An ask, of whose first write a rest may be under way for all time."""
    worker.answer = -1
    asked = worker.asks({"d": ("t", [[10, 11]]), **more})
    worker.whole("t", [1], 2)
    await turns()
    worker.answer = 0
    assert worker.written == [[(1, 10)]]
    return asked


def test_of_a_write_that_failed_nothing_is_reported_and_nothing_more_is_written() -> None:
    async def case(worker: Worker) -> None:
        asked = await failed_early(worker)
        worker.whole("t", [1, 2], 2)
        await turns()
        worker.end("t", [1, 2])
        await asked
        assert worker.written == [[(1, 10)]]
        assert worker.answers == []
        assert list(worker.reqs_need_send) == ["t"]
        assert worker.finished == []

    assert run(case).counters == {"failed": 1}


def test_prefill_s_blocks_of_a_write_that_failed_are_given_away_by_no_other_ask() -> None:
    async def case(worker: Worker) -> None:
        asked = await failed_early(worker)
        worker.end("t", [1, 2])
        await asked
        await worker.ask("e", "t", [20, 21])
        await worker.ask("hung up", "t", [])  # as `mooncake-lost-asks` has it counted
        assert worker.answers == [["FINISH", ["e"], [], None], ["FINISH", ["hung up"], [], None]]
        assert worker.finished == []
        assert list(worker.reqs_need_send) == ["t"]

    run(case)


def test_when_the_transfer_of_a_write_that_failed_is_kept_no_more_others_are_answered_alone() -> None:
    async def case(worker: Worker) -> None:
        worker.left = {"d": "t", "e": "u"}
        asked = await failed_early(worker, e=("u", [[20]]))
        worker.reqs_need_send.pop("t").ready.set()
        await turns()
        worker.end("u", [5])
        await asked
        assert worker.written[1:] == [[(5, 20)]]
        assert worker.answers == [["CONTINUE", ["e"], None, None]]
        assert worker.left == {"e": "u"}, "`mooncake-lost-asks` would add an error for the other"

    run(case)


def test_others_of_the_same_ask_are_answered_and_it_does_not_end() -> None:
    """Also without `mooncake-lost-asks`."""

    async def case(worker: Worker) -> None:
        del worker.left
        asked = await failed_early(worker, e=("u", [[20]]))
        worker.end("t", [1, 2])
        await turns()
        worker.end("u", [5])
        await asked
        assert worker.written[1:] == [[(5, 20)]]
        assert worker.answers == [["CONTINUE", ["e"], None, None]]

    run(case)


def test_an_error_after_a_write_that_failed_speaks_of_the_others_alone() -> None:
    async def case(worker: Worker) -> None:
        asked = await failed_early(worker, e=("u", [[20]]))

        async def raises(*args: Any) -> Any:
            raise ValueError("other")

        worker.build = raises
        worker.end("t", [1, 2])
        await asked
        assert worker.answers == [["CONTINUE", None, ["e"], None]]

    run(case)


def test_an_error_while_a_write_is_under_way_awaits_it() -> None:
    async def case(worker: Worker) -> None:
        worker.open.clear()
        worker.answer = -1
        asked = worker.asks({"e": ("u", [[20]]), "d": ("t", [[10, 11]])})
        worker.whole("t", [1], 2)
        await turns()

        async def raises(*args: Any) -> Any:
            raise ValueError("other")

        worker.build = raises
        worker.end("u", [5])
        await turns()
        assert not asked.done()
        worker.open.set()
        await asked
        assert worker.answers == [["CONTINUE", None, ["e"], None]]

    run(case)


@pytest.mark.parametrize("failed", [False, True])
def test_blocks_of_a_prefill_that_was_given_up_come_back_when_nothing_reads_them_and_another_begins_at_once(
    failed: bool,
) -> None:
    """Who fetches the other waits for its own writes alone; so does one more that is given up."""

    async def case(worker: Worker) -> None:
        worker.open.clear()
        asked = worker.ask("d", "t", [10, 11])
        worker.whole("t", [1], 2)
        await turns()
        worker.held("p", "t")
        await turns()
        assert worker.given_up == [{"t"}]
        assert worker.finished_sending_reqs == set()

        shut, worker.open = worker.open, asyncio.Event()
        worker.open.set()
        worker.ask("e", "t", [20, 21]).cancel()
        worker.reqs_need_send["t"] = Entry("", "t", [], asyncio.Event())
        worker.held("q", "t", blocks=[5, 6])
        await turns()
        assert worker.finished_sending_reqs == {"q"}

        other = worker.ask("f", "t", [30, 31])
        await turns()
        second = worker.reqs_need_send["t"]
        worker.end("t", [5, 6])
        await other
        assert worker.written == [[(1, 10)], [(5, 30), (6, 31)]]

        worker.answer = -1 if failed else 0
        shut.set()
        await turns()
        assert worker.reqs_need_send["t"] is second
        kept = {name: entry for name, entry in worker.reqs_need_send.items() if name != "t"}
        if failed:
            ((name, entry),) = kept.items()
            assert (entry.p_req_id, name.startswith("livepatch-held-")) == ("p", True)
            assert 0 < entry.expire_time - time.perf_counter() <= 480
        else:
            assert kept == {}
        assert worker.finished_sending_reqs == ({"q"} if failed else {"p", "q"})
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked

    run(case)


def test_an_ask_for_a_prefill_that_was_given_up_is_sent_nothing_of_the_one_that_comes_again() -> None:
    """Nothing was written for it yet."""

    async def case(worker: Worker) -> None:
        async def stock(metadata: Metadata) -> None:  # without `mooncake-lost-asks` who waits is not woken
            worker.reqs_need_send.pop("t")

        worker.record_send_reqs = stock  # type: ignore[method-assign]
        asked = worker.ask("d", "t", [10, 11])
        await turns()
        worker.held("p", "t")
        await turns()
        worker.reqs_need_send["t"] = Entry("", "t", [], asyncio.Event())
        worker.whole("t", [5], 2)
        await turns()
        assert worker.written == []
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked

    run(case)


def test_where_another_waits_to_be_fetched_the_release_hears_of_none_that_was_given_up() -> None:
    async def case(worker: Worker) -> None:
        ready = worker.reqs_need_send["t"] = Entry("first", "t", [[1]], asyncio.Event())
        ready.ready.set()
        worker.held("p", "t")
        await turns()
        assert worker.given_up == []
        assert worker.reqs_need_send == {"t": ready}
        assert worker.finished_sending_reqs == {"p"}

    run(case)


def test_two_that_were_given_up_after_failed_writes_are_both_held() -> None:
    async def case(worker: Worker) -> None:
        for name in ("p", "q"):
            asked = await failed_early(worker)
            worker.held(name, "t")
            await asked
            worker.written.clear()
        assert sorted(entry.p_req_id for entry in worker.reqs_need_send.values()) == ["p", "q"]
        assert worker.finished_sending_reqs == set()

    run(case)


def test_who_ends_awaits_what_reads_its_own_blocks_for_another_ask() -> None:
    async def case(worker: Worker) -> None:
        shut = worker.open
        shut.clear()
        asked = [worker.ask("d", "t", [10, 11])]
        worker.whole("t", [1], 2)
        await turns()
        worker.open = asyncio.Event()
        worker.open.set()
        asked.append(worker.ask("e", "t", [20, 21]))
        await turns()
        worker.end("t", [1, 2])
        await turns()
        assert worker.finished == []
        shut.set()
        await asyncio.gather(*asked)
        assert worker.finished == ["t", "t"]

    run(case)


def test_blocks_of_a_prefill_that_was_given_up_come_back_and_who_asked_is_answered_when_nothing_reads_them() -> None:
    async def case(worker: Worker) -> None:
        worker.open.clear()
        asked = worker.ask("d", "t", [10, 11, 12])
        worker.whole("t", [1], 3)
        await turns()
        worker.whole("t", [1, 2], 3)
        worker.held("p", "t")
        await turns()
        assert worker.given_up == [{"t"}]
        assert worker.answers == []
        assert worker.finished_sending_reqs == set()
        worker.open.set()
        await asked
        await turns()
        assert worker.written == [[(1, 10)]]
        assert worker.finished_sending_reqs == {"p"}
        assert worker.answers == [["FINISH", None, ["d"], "given up"]]

    run(case)


def test_an_answer_awaits_what_reads_a_prefill_that_is_given_up_while_another_is_awaited() -> None:
    """`mooncake-lost-asks` answers for both with the first answer."""

    async def case(worker: Worker) -> None:
        worker.open = first = asyncio.Event()
        worker.goes_on = True
        asked = worker.asks({"d": ("t", [[10, 11]]), "e": ("u", [[20, 21]])})
        worker.whole("t", [1], 2)
        await turns()
        worker.open = second = asyncio.Event()
        worker.whole("u", [5], 2)
        await turns()
        assert worker.written == [[(1, 10)], [(5, 20)]]
        worker.held("p", "t")
        await turns()
        worker.held("q", "u")
        await turns()
        first.set()
        await turns()
        assert worker.answers == []
        second.set()
        await asked
        assert worker.answers[0] == ["CONTINUE", None, ["d"], "given up"]

    run(case)


def test_nothing_is_begun_for_a_prefill_that_was_given_up() -> None:
    async def case(worker: Worker) -> None:
        worker.open.clear()
        asked = [worker.ask("d", "t", [10, 11])]
        worker.whole("t", [1], 2)
        await turns()
        worker.held("p", "t")
        await turns()
        asked.append(worker.ask("e", "t", [20, 21]))
        await turns()
        worker.open.set()
        await turns()
        assert worker.written == [[(1, 10)]]
        assert asked[0].done()
        asked[1].cancel()

    run(case)


def test_for_another_prefill_of_the_same_transfer_nothing_counts_as_sent_and_nothing_is_begun() -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11, 12])
        worker.whole("t", [1], 3)
        await turns()
        (part,) = worker.livepatch_writes._parts()
        first = worker.reqs_need_send["t"]
        other = worker.reqs_need_send["t"] = Entry("", "t", [[1, 2, 3]], asyncio.Event())
        worker.whole("t", [1, 2], 3)
        await turns()
        assert worker.written == [[(1, 10)]]
        first.local_block_ids = other.local_block_ids
        assert (part.sent_of(first), part.sent_of(other)) == ((1, None), (0, None))
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    run(case)


def test_an_ask_that_is_cancelled_ends_when_nothing_is_under_way() -> None:
    async def case(worker: Worker) -> None:
        worker.open.clear()
        asked = worker.ask("d", "t", [10, 11, 12])
        worker.whole("t", [1], 3)
        await turns()
        worker.whole("t", [1, 2], 3)
        asked.cancel()
        await turns()
        assert not asked.done()
        worker.open.set()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert worker.written == [[(1, 10)]]

    run(case)


def test_a_worker_that_sends_nothing_early_and_a_transfer_that_is_unknown_hold_no_blocks() -> None:
    async def case(worker: Worker) -> None:
        worker.held("p", "t")
        await turns()
        delattr(worker, patch.WRITES)
        worker.held("q", "u")
        await turns()
        assert worker.finished_sending_reqs == {"p", "q"}

    run(case)


def test_blocks_of_a_prefill_that_was_given_up_after_a_failed_write_are_held_as_the_release_holds_its_own() -> None:
    async def case(worker: Worker) -> None:
        asked = await failed_early(worker)
        worker.held("p", "t")
        await asked
        ((name, entry),) = worker.reqs_need_send.items()
        assert (entry.p_req_id, name.startswith("livepatch-held-")) == ("p", True)
        assert 0 < entry.expire_time - time.perf_counter() <= 480
        assert worker.given_up == [{"t"}]
        assert worker.finished_sending_reqs == set()
        assert worker.answers == []

    run(case)


def test_who_waits_for_a_place_already_is_found_without_a_look_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of each step looks at all parts: with hundreds that wait, the square of these."""
    compared = []

    class Counted(Part):
        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return self is other

    cache = SimpleNamespace(layer_names=["l"], kv_cache_spec=SimpleNamespace(page_size_bytes=1))
    worker = SimpleNamespace(num_sender_workers=2, kv_cache_config=SimpleNamespace(kv_cache_groups=[cache]))
    writes = early.Writes(PatchContext("mooncake-layerwise", {}, {}, lambda: None), worker)
    writes._places = 0
    monkeypatch.setattr(early.Writes, "_next", lambda self, part: ([1], None))
    parts = [Counted(SimpleNamespace(), "d", f"t{n}", [10]) for n in range(50)]  # type: ignore[arg-type]
    for part in parts * 2:
        writes._begin(part)
    assert list(writes._waiting) == parts
    assert compared == []


def test_of_what_is_given_back_nothing_begins_while_what_is_under_way_is_awaited() -> None:
    """There are two places to write: the third of those that ask waits for one."""

    async def case(worker: Worker) -> None:
        worker.open.clear()
        asked = [worker.ask(name, "t", [10, 11]) for name in "def"]
        worker.whole("t", [1], 2)
        await turns()
        assert worker.written == [[(1, 10)], [(1, 10)]]
        back = asyncio.ensure_future(worker.livepatch_writes.back(["t"]))
        await turns()
        worker.whole("t", [5], 2)
        worker.open.set()
        await back
        await turns()
        assert worker.written == [[(1, 10)], [(1, 10)]]
        worker.end("t", [5, 6])
        await asyncio.gather(*asked)
        assert worker.written[2:] == [[(5, 10), (6, 11)]] * 3

    run(case)


def test_blocks_are_held_after_a_failed_write_though_the_release_has_let_go_of_the_transfer() -> None:
    """Another prefill of the transfer was given up before. A third one's blocks are held by their own writes alone."""

    async def case(worker: Worker) -> None:
        asked = await failed_early(worker)
        worker.reqs_need_send.pop("t").ready.set()
        worker.held("p", "t")
        await asked
        await turns()
        assert [entry.p_req_id for entry in worker.reqs_need_send.values()] == ["p"]
        worker.reqs_need_send["t"] = Entry("q", "t", [], asyncio.Event())
        worker.held("q", "t", blocks=[5, 6])
        await turns()
        worker.held("r", "u", blocks=[1])
        await turns()
        assert worker.finished_sending_reqs == {"q", "r"}

    run(case)


@pytest.mark.parametrize("answer", [0, -1], ids=["ends well", "fails"])
@pytest.mark.parametrize("under_way", [True, False])
def test_what_began_to_read_blocks_before_the_release_let_go_of_the_transfer_keeps_them(
    under_way: bool, answer: int
) -> None:
    """Another prefill of the transfer was given up, and a third has begun: that one's is what the release keeps now."""

    async def case(worker: Worker) -> None:
        worker.answer = answer
        shut = worker.open
        shut.clear()
        asked = worker.ask("d", "t", [10, 11])
        worker.whole("t", [1], 2)
        await turns()
        worker.reqs_need_send.pop("t")
        third = worker.reqs_need_send["t"] = Entry("third", "t", [], asyncio.Event())
        if not under_way:
            shut.set()
            await turns()
        worker.held("p", "t", blocks=[2, 1])
        await turns()
        assert worker.finished_sending_reqs == ({"p"} if not under_way and not answer else set())
        shut.set()
        await turns()
        held = [entry.p_req_id for entry in worker.reqs_need_send.values() if entry is not third]
        assert held == (["p"] if answer else [])
        assert worker.finished_sending_reqs == (set() if answer else {"p"})
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked

    run(case)


def test_who_ends_awaits_what_reads_its_own_blocks_though_the_release_let_go_of_the_transfer_meanwhile() -> None:
    async def case(worker: Worker) -> None:
        shut = worker.open
        shut.clear()
        asked = [worker.ask("d", "t", [10, 11])]
        worker.whole("t", [1], 2)
        await turns()
        worker.reqs_need_send.pop("t")
        worker.open = asyncio.Event()
        worker.open.set()
        asked.append(worker.ask("e", "t", [20, 21]))
        await turns()
        worker.end("t", [2, 1])
        await turns()
        assert worker.finished == []
        shut.set()
        await asked[1]
        assert worker.finished == ["t"]
        asked[0].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked[0]

    run(case)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "dropped by the next"])
def test_blocks_are_held_for_the_release_s_time_after_the_failed_write(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(worker: Worker) -> None:
        monkeypatch.setattr(envs, "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 0)
        asked = await failed_early(worker)
        monkeypatch.setattr(envs, "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 480)
        before = time.perf_counter()
        if again:
            worker.reqs_need_send.pop("t").ready.set()
            await asked
            worker.written.clear()
            asked = await failed_early(worker)
            assert len(worker.livepatch_writes._failed) == 1
        worker.held("p", "t")
        await asked
        await turns()
        (entry,) = worker.reqs_need_send.values()
        now = time.perf_counter()
        if again:
            assert before + 480 <= entry.expire_time <= now + 480
        else:
            assert entry.expire_time <= now  # what is over the release gives back with the next step

    run(case)


def test_of_several_failed_writes_that_read_a_block_the_rest_of_any_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def case(worker: Worker) -> None:
        worker.answer = -1
        worker.whole("t", [1], 2)
        before = time.perf_counter()
        asked = [worker.ask("d", "t", [10, 11])]
        await turns()
        between = time.perf_counter()
        monkeypatch.setattr(envs, "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 60)
        asked.append(worker.ask("e", "t", [20, 21]))
        await turns()
        assert worker.written == [[(1, 10)], [(1, 20)]]
        worker.held("p", "t")
        await asyncio.gather(*asked)
        (entry,) = worker.reqs_need_send.values()
        assert before + 480 <= entry.expire_time <= between + 480

    run(case)


def test_what_gives_blocks_back_or_awaits_writes_goes_on_after_an_error_of_its_own() -> None:
    context = PatchContext("mooncake-layerwise", {"BY": "auto"}, {}, lambda: None)
    lasting = {target for target, wrapper in patch.wrappers(context).items() if context.lasts(wrapper)}
    assert lasting == {
        f"{patch.SCHEDULER}.build_connector_meta",
        f"{patch.SCHEDULER}.request_finished",
        f"{patch.WORKER}.start_load_kv",
        f"{patch.WORKER}._build_transfer_params",
    }


def test_a_step_waits_for_what_reads_blocks_that_were_given_back_also_after_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def case(worker: Worker) -> None:
        monkeypatch.setattr(patch, "leaves_early", lambda *args: Group())
        bound: list[Any] = []
        worker.register(bound)
        worker.open.clear()
        asked = worker.ask("d", "t", [10, 11])
        worker.whole("t", [1], 2)
        await turns()
        assert worker.written == [[(1, 10)]]
        worker.livepatch_writes._livepatch.withdraw()
        step = worker.step(back=["t"])
        await awaited(lambda: all(part.void for part in worker.livepatch_writes._parts()))
        assert bound == []
        worker.open.set()
        await step
        assert len(bound) == 1
        worker.end("t", [1, 2])
        await asked

    run(case)


def test_nothing_is_begun_after_an_error_of_its_own() -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11])
        worker.livepatch_writes._livepatch.withdraw()
        worker.whole("t", [1], 2)
        await turns()
        assert worker.written == []
        worker.end("t", [1, 2])
        await asked
        assert worker.written == [[(1, 10), (2, 11)]]

    run(case)


def test_nothing_leaves_early_where_several_workers_of_prefills_write_for_one_of_decodes() -> None:
    async def case(worker: Worker) -> None:
        worker.tp_size = 2
        asked = worker.ask("d", "t", [10, 11]), worker.ask("e", "t", [20, 21], ranks=2)
        worker.whole("t", [1], 2)
        await turns()
        assert worker.written == [[(1, 20)]]
        worker.end("t", [1, 2])
        await asyncio.gather(*asked)

    run(case)


def test_no_ask_for_a_transfer_ends_before_the_writes_for_another_of_it() -> None:
    async def case(worker: Worker) -> None:
        worker.open.clear()
        asked = [worker.ask("d", "t", [10, 11])]
        worker.whole("t", [1], 2)
        await turns()
        worker.livepatch_writes.over(["t"])
        asked.append(worker.ask("f", "t", [30, 31]))
        await turns()
        worker.end("t", [1, 2])
        await turns()
        assert worker.written == [[(1, 10)]]
        assert worker.finished == worker.answers == []
        worker.open.set()
        await asyncio.gather(*asked)
        assert sorted(worker.written[1:]) == [[(1, 30), (2, 31)], [(2, 11)]]

    run(case)


def test_an_error_where_no_write_has_failed_reaches_the_release() -> None:
    async def case(worker: Worker) -> None:
        asked = worker.ask("d", "t", [10, 11])
        worker.whole("t", [1], 2)
        await turns()

        async def raises(*args: Any) -> Any:
            raise ValueError("other")

        worker.build = raises
        worker.end("t", [1, 2])
        with pytest.raises(ValueError, match="other"):
            await asked

    run(case)


def test_half_of_the_threads_write_early_and_the_others_wait() -> None:
    async def case(worker: Worker) -> None:
        worker.open.clear()
        asked = [worker.ask(f"d{number}", f"t{number}", [10 + number, 30]) for number in range(3)]
        for number in range(3):
            worker.whole(f"t{number}", [number], 2)
        await turns()
        assert worker.written == [[(0, 10)], [(1, 11)]]
        worker.open.set()
        await turns()
        assert worker.written[2:] == [[(2, 12)]]
        for number in range(3):
            worker.end(f"t{number}", [number, 9])
        await asyncio.gather(*asked)
        assert worker.written[3:] == [[(9, 30)]] * 3

    run(case)


# What the scheduler's side tells


def request(prompt: int) -> Any:
    return SimpleNamespace(
        request_id="p",
        kv_transfer_params={"transfer_id": "t"},
        num_preemptions=0,
        num_computed_tokens=0,
        num_prompt_tokens=prompt,
        is_finished=lambda: False,
    )


Ids = dict[str, list[int]]


def step(tokens: dict[str, int], new: Ids | None = None, more: Ids | None = None) -> Any:
    more = more or {}
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=(ids,)) for name, ids in (new or {}).items()],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(more), new_block_ids=[(ids,) for ids in more.values()]),
    )


def begun(tokens: int) -> tuple[Prefills, Any, Any]:
    """A prefill of 23 tokens in blocks of 4, of which a step computes the first."""
    prefills, one = Prefills(4), request(23)
    connector = SimpleNamespace(_reqs_need_send={"p": (one, [])})
    progress = prefills.progress(connector, step({"p": tokens}, new={"p": [1, 2, 3]}))
    assert progress == {"whole": {"t": ([1, 2, 3][: tokens // 4], 6)}, "back": [], "over": [], "held": {}}
    connector._reqs_need_send.clear()
    one.num_computed_tokens = tokens
    return prefills, connector, one


def test_whole_blocks_after_each_step_are_sent_along() -> None:
    prefills, connector, one = begun(10)
    progress = prefills.progress(connector, step({"p": 13}, more={"p": [4, 5, 6]}))
    assert progress is not None
    assert progress["whole"] == {"t": ([1, 2, 3, 4, 5], 6)}
    one.is_finished = lambda: True
    connector._reqs_need_send["p"] = (one, [[1, 2, 3, 4, 5, 6]])
    assert prefills.progress(connector, step({})) == {"whole": {}, "back": [], "over": ["t"], "held": {}}
    assert prefills.progress(SimpleNamespace(_reqs_need_send={}), step({})) is None


def test_no_block_beyond_the_prompt_s_whole_ones_is_named() -> None:
    prefills, connector, _ = begun(10)
    progress = prefills.progress(
        connector, step({"p": 20}, more={"p": [4, 5, 6, 7, 8]})
    )  # 7 tokens of the answer among them
    assert progress is not None
    assert progress["whole"] == {"t": ([1, 2, 3, 4, 5], 6)}


def test_a_prefill_that_ends_without_being_sent_gives_its_blocks_back() -> None:
    prefills, connector, one = begun(10)
    one.is_finished = lambda: True
    assert prefills.progress(connector, step({})) == {"whole": {}, "back": ["t"], "over": [], "held": {}}


@pytest.mark.parametrize("what", [{"num_preemptions": 1}, {"num_computed_tokens": 9}], ids=["preempted", "goes back"])
def test_what_is_computed_anew_is_reported_once_and_not_followed(what: dict[str, int]) -> None:
    prefills, connector, one = begun(10)
    vars(one).update(what)
    assert prefills.progress(connector, step({"p": 4}, more={"p": [7]})) == {
        "whole": {},
        "back": ["t"],
        "over": [],
        "held": {},
    }
    assert prefills.progress(connector, step({"p": 4}, more={"p": [8]})) is None


def finished(prefills: Prefills, answer: tuple[bool, Any], one: Any) -> tuple[Any, set[str]]:
    """What the scheduler is told when a request ends; what the release would tell its workers at once."""
    connector = SimpleNamespace(_reqs_not_processed={"t", "u"}, **{patch.PREFILLS: prefills})
    context = PatchContext("mooncake-layerwise", {"BY": "auto"}, {}, lambda: None)
    wrapper: Any = patch.wrappers(context)[f"{patch.SCHEDULER}.request_finished"]
    return wrapper(lambda *args: answer, connector, one, ([1, 2, 3],)), connector._reqs_not_processed


def test_the_blocks_of_a_prefill_that_is_given_up_are_held_until_its_workers_say_so() -> None:
    prefills, connector, one = begun(10)
    assert finished(prefills, (False, None), one) == ((True, None), {"u"})
    one.is_finished = lambda: True
    assert prefills.progress(connector, step({})) == {
        "whole": {},
        "back": [],
        "over": [],
        "held": {"p": ("t", [1, 2, 3])},
    }
    assert prefills.progress(connector, step({})) is None


@pytest.mark.parametrize("what", ["sent", "another", "preempted", "told to go back", "not begun"])
def test_other_blocks_are_not_held(what: str) -> None:
    prefills, connector, one = begun(10)
    answer: tuple[bool, Any] = (what == "sent", {"of": "the release's"})
    if what == "another":
        one = request(23)
    if what in ("preempted", "told to go back"):
        one.num_preemptions = 1
    if what == "told to go back":
        assert prefills.progress(connector, step({})) is not None
        one.num_preemptions = 0
    if what == "not begun":
        prefills, one = Prefills(4), request(23)
        prefills.progress(SimpleNamespace(_reqs_need_send={"p": (one, [])}), step({}))
    assert finished(prefills, answer, one) == (answer, {"t", "u"})


def test_when_nothing_is_followed_any_more_all_is_given_back_or_held() -> None:
    prefills, _, one = begun(10)
    finished(prefills, (False, None), one)
    one.is_finished = lambda: True
    other = request(9)
    other.request_id, other.kv_transfer_params = "q", {"transfer_id": "v"}
    prefills.progress(SimpleNamespace(_reqs_need_send={"q": (other, [])}), step({"q": 9}, new={"q": [4, 5, 6]}))
    assert prefills.leave() == {"whole": {}, "back": ["v"], "over": [], "held": {}}
    prefills, _, one = begun(10)
    finished(prefills, (False, None), one)
    assert prefills.leave() == {"whole": {}, "back": [], "over": [], "held": {"p": ("t", [1, 2, 3])}}
    assert prefills.leave() is None


def test_when_nothing_is_followed_any_more_what_is_read_is_still_held_when_it_is_given_up() -> None:
    prefills, _, one = begun(10)
    back = {"whole": {}, "back": ["t"], "over": [], "held": {}}
    assert prefills.leave() == back
    assert prefills.leave() is None
    assert finished(prefills, (False, None), one) == ((True, None), {"u"})
    one.is_finished = lambda: True
    assert prefills.leave() == {"whole": {}, "back": [], "over": [], "held": {"p": ("t", [1, 2, 3])}}
    assert prefills.leave() is None


@pytest.mark.parametrize("what", ["preempted", "ended"])
def test_when_nothing_is_followed_any_more_blocks_that_were_given_back_are_not_held(what: str) -> None:
    """Of one that is preempted the step that computes on its blocks waits, as before."""
    prefills, _, one = begun(10)
    back = {"whole": {}, "back": ["t"], "over": [], "held": {}}
    assert prefills.leave() == back
    if what == "preempted":
        one.num_preemptions = 1
    else:
        one.is_finished = lambda: True
    assert prefills.leave() == (back if what == "preempted" else None)
    one.num_preemptions = 0
    assert finished(prefills, (False, None), one) == ((False, None), {"t", "u"})
    assert prefills.leave() is None


def test_after_an_error_of_its_own_the_scheduler_s_side_tells_workers_to_stop() -> None:
    prefills, connector, _ = begun(10)
    message: list[str] = []
    context = PatchContext("mooncake-layerwise", {"BY": "auto"}, {}, lambda: None, failed=message.append)
    build: Any = patch.wrappers(context)[f"{patch.SCHEDULER}.build_connector_meta"]
    setattr(connector, patch.PREFILLS, prefills)

    def progress(scheduler_output: Any) -> Any:
        return getattr(build(lambda step: SimpleNamespace(), connector, scheduler_output), PROGRESS, None)

    assert progress(None) == {"whole": {}, "back": ["t"], "over": [], "held": {}}
    assert len(message) == 1
    connector._reqs_need_send["q"] = (request(23), [])
    assert progress(step({"q": 10}, new={"q": [1, 2, 3]})) is None
