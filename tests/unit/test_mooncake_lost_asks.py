"""`mooncake-lost-asks`: what is answered, by whom, and what is remembered.

The worker and its answers are stand-ins: what of a release is concerned is in tests/releases/test_mooncake_asks.py.
"""

from __future__ import annotations

import asyncio
import socket
import time
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.mooncake_lost_asks import listener
from vllm_livepatch.patches.mooncake_lost_asks import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext


class MooncakeXferResponseStatus(IntEnum):
    FINISH, CONTINUE, ERROR = range(3)


class MooncakeXferResponse(SimpleNamespace):
    """As the release's, of which the patch makes its own answers."""


FINISH, CONTINUE = MooncakeXferResponseStatus.FINISH, MooncakeXferResponseStatus.CONTINUE


class Prefill:
    """A prefill engine's worker, and what it answers."""

    def __init__(self) -> None:
        self.context = PatchContext("mooncake-lost-asks", {}, {}, lambda: None)
        self.wrap = patch.wrappers(self.context)
        self.reqs_need_send: dict[str, Any] = {}
        self._encoder = SimpleNamespace(encode=lambda response: response)
        self._xfer_resp_decoder = SimpleNamespace(decode=lambda response: response)
        self.answers: list[Any] = []

    async def send_multipart(self, parts: Any) -> None:
        identity, response = parts
        assert identity == b"d"
        self.answers.append(
            (response.status.name, response.ok_reqs if hasattr(response, "ok_reqs") else None, response.err_reqs)
        )

    async def ask(self, release: Any, **asked: Any) -> None:
        """Serve an ask to its end."""
        meta = SimpleNamespace(req_blocks=asked)
        await self.wrap[f"{patch.WORKER}.send_kv_to_decode"](release, self, (b"d", self, meta), {})
        await asyncio.gather(*getattr(self, patch.STATE).tasks)

    async def note(self, given_up: set[str], begun: tuple[str, ...] = ()) -> None:
        async def release(metadata: Any) -> None:
            for transfer in metadata.reqs_not_processed:
                self.reqs_need_send.pop(transfer)

        to_send: dict[str, tuple[str, list[int]]] = {f"p-{transfer}": (transfer, []) for transfer in begun}
        metadata = SimpleNamespace(reqs_to_send=to_send, reqs_not_processed=given_up)
        await self.wrap[f"{patch.WORKER}.record_send_reqs"](release, self, (metadata,), {})


def says(status: MooncakeXferResponseStatus, ok: list[str] | None = None, err: list[str] | None = None) -> Any:
    return MooncakeXferResponse(status=status, ok_reqs=ok, err_reqs=err, err_msg=None)


def entry() -> Any:
    return SimpleNamespace(p_req_id="", ready=asyncio.Event())


def test_an_error_of_the_release_is_answered() -> None:
    async def fails(identity: bytes, socket: Any, meta: Any) -> None:
        raise NotImplementedError("Heterogeneous TP is not supported yet.")

    async def play() -> None:
        prefill = Prefill()
        await prefill.ask(fails, a=("t", [1]))
        assert [status for status, _, _ in prefill.answers] == ["ERROR"]

    asyncio.run(play())


def test_what_an_answer_leaves_out_is_an_error_only_once_it_is_kept_no_more() -> None:
    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        prefill.reqs_need_send = {"tb": entry()}  # ta has been sent, tc was given up
        await socket.send_multipart((identity, says(CONTINUE, ok=["a"])))
        prefill.reqs_need_send = {}
        await socket.send_multipart((identity, says(FINISH)))

    prefill = Prefill()
    asyncio.run(prefill.ask(serves, a=("ta", [1]), b=("tb", [2]), c=("tc", [3])))
    assert prefill.answers == [("CONTINUE", ["a"], ["c"]), ("FINISH", None, ["b"])]


def test_who_asks_after_it_was_given_up_is_told_so_beside_others_that_are_served() -> None:
    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        assert set(meta.req_blocks) == {"a"}
        await socket.send_multipart((identity, says(FINISH, ok=["a"])))

    async def play() -> None:
        prefill = Prefill()
        await prefill.note({"tb"})
        await prefill.ask(serves, a=("ta", [1]), b=("tb", [2]))
        assert prefill.answers == [("CONTINUE", None, ["b"]), ("FINISH", ["a"], None)]
        await prefill.ask(None, b=("tb", [2]), c=("tb", []))
        assert prefill.answers[2:] == [("FINISH", None, ["b"])], "who asks for nothing is told of no error"

    asyncio.run(play())


def test_a_bounded_number_is_remembered_and_what_begins_again_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "REMEMBERED", 2)

    async def play() -> None:
        prefill = Prefill()
        for transfer in ("t1", "t2", "t1", "t3"):
            await prefill.note({transfer})
        assert list(getattr(prefill, patch.STATE).given_up) == ["t1", "t3"]
        await prefill.note(set(), begun=("t1",))
        assert list(getattr(prefill, patch.STATE).given_up) == ["t3"]

    asyncio.run(play())


def test_an_ask_that_lets_go_is_answered_once_and_what_it_made_is_kept_for_a_prefill_that_has_begun() -> None:
    async def waits(identity: bytes, socket: Any, meta: Any) -> None:
        made = prefill.reqs_need_send.setdefault("t", entry())
        await made.ready.wait()
        await socket.send_multipart((identity, says(FINISH, ok=["a"])))

    async def play(begins: bool) -> Any:
        asks = asyncio.ensure_future(prefill.ask(waits, a=("t", [])))
        while not prefill.answers:
            await asyncio.sleep(0)
        if begins:
            await prefill.note(set(), begun=("t",))
            assert prefill.reqs_need_send["t"].p_req_id == "p-t"
        for task in getattr(prefill, patch.STATE).tasks:
            task.cancel()
        await asyncio.gather(asks, return_exceptions=True)
        assert prefill.answers == [("FINISH", None, None)]
        return "t" in prefill.reqs_need_send

    for begins in (False, True):
        prefill = Prefill()
        assert asyncio.run(play(begins)) is begins


def test_an_ask_that_let_go_is_not_answered_again_when_its_prefill_ends() -> None:
    async def waits(identity: bytes, socket: Any, meta: Any) -> None:
        made = prefill.reqs_need_send.setdefault("t", entry())
        await made.ready.wait()
        await socket.send_multipart((identity, says(FINISH, ok=["a"])))

    async def play() -> None:
        asks = asyncio.ensure_future(prefill.ask(waits, a=("t", [])))
        while not prefill.answers:
            await asyncio.sleep(0)
        prefill.reqs_need_send["t"].ready.set()
        await asks
        assert prefill.answers == [("FINISH", None, None)]

    prefill = Prefill()
    asyncio.run(play())


def test_what_one_ask_waits_for_is_kept_when_another_for_it_has_ended() -> None:
    """As after the time-out of the first; prefill's leg comes later."""

    async def waits(identity: bytes, socket: Any, meta: Any) -> None:
        made = prefill.reqs_need_send.setdefault("t", entry())
        if "first" not in meta.req_blocks:
            await made.ready.wait()

    async def play() -> None:
        second = asyncio.ensure_future(prefill.ask(waits, second=("t", [1])))
        while "t" not in prefill.reqs_need_send:
            await asyncio.sleep(0)
        made = prefill.reqs_need_send["t"]
        served = prefill.wrap[f"{patch.WORKER}.send_kv_to_decode"]
        before = set(getattr(prefill, patch.STATE).tasks)
        meta = SimpleNamespace(req_blocks={"first": ("t", [2])})
        await served(waits, prefill, (b"d", prefill, meta), {})
        await asyncio.gather(*getattr(prefill, patch.STATE).tasks - before)
        assert prefill.reqs_need_send == {"t": made}
        made.ready.set()
        await second

    prefill = Prefill()
    asyncio.run(play())


async def turns() -> None:
    """What can go on goes on."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_who_asks_for_what_is_kept_again_is_served() -> None:
    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        await socket.send_multipart((identity, says(FINISH, ok=["a"])))

    async def play() -> None:
        prefill = Prefill()
        await prefill.note({"t"})
        prefill.reqs_need_send["t"] = entry()
        await prefill.ask(serves, a=("t", [1]))
        assert prefill.answers == [("FINISH", ["a"], None)]

    asyncio.run(play())


def test_what_is_ready_is_kept_though_nobody_waits_for_it() -> None:
    """It holds a prefill's blocks, which the release frees when they have been fetched or their time is over."""

    async def fails(identity: bytes, socket: Any, meta: Any) -> None:
        raise ConnectionError

    async def play() -> None:
        prefill = Prefill()
        made = prefill.reqs_need_send["t"] = entry()
        made.ready.set()
        await prefill.ask(fails, a=("t", [1]))
        assert prefill.reqs_need_send == {"t": made}

    asyncio.run(play())


def test_who_waits_for_a_prefill_that_is_given_up_waits_no_more() -> None:
    async def waits(identity: bytes, socket: Any, meta: Any) -> None:
        await prefill.reqs_need_send["t"].ready.wait()
        await socket.send_multipart((identity, says(FINISH)))

    async def play() -> None:
        prefill.reqs_need_send["t"] = entry()
        asks = asyncio.ensure_future(prefill.ask(waits, a=("t", [1])))
        await turns()
        assert not prefill.answers
        await prefill.note({"t"})
        await turns()
        assert prefill.answers == [("FINISH", None, ["a"])]
        await asks

    prefill = Prefill()
    asyncio.run(play())


def test_whose_blocks_a_transfer_has_is_not_said_anew() -> None:
    async def play() -> None:
        prefill = Prefill()
        prefill.reqs_need_send["t"] = SimpleNamespace(p_req_id="first", ready=asyncio.Event())
        await prefill.note(set(), begun=("t",))
        assert prefill.reqs_need_send["t"].p_req_id == "first"

    asyncio.run(play())


def test_the_release_is_told_of_what_it_knows_alone() -> None:
    """It stops at the first that it does not know, and forgets those behind it."""
    told: list[set[str]] = []

    async def release(metadata: Any) -> None:
        told.append(metadata.reqs_not_processed)

    async def play() -> None:
        prefill = Prefill()
        prefill.reqs_need_send["kept"] = entry()
        to_send: dict[str, tuple[str, list[int]]] = {"p": ("begun", [])}
        metadata = SimpleNamespace(reqs_to_send=to_send, reqs_not_processed={"kept", "begun", "unknown"})
        await prefill.wrap[f"{patch.WORKER}.record_send_reqs"](release, prefill, (metadata,), {})
        assert told == [{"kept", "begun"}]

    asyncio.run(play())


def test_an_ask_for_blocks_too_is_answered_by_the_release_alone() -> None:
    async def waits(identity: bytes, socket: Any, meta: Any) -> None:
        await prefill.reqs_need_send["t"].ready.wait()
        await socket.send_multipart((identity, says(FINISH, ok=["a", "b"])))

    async def play() -> None:
        prefill.reqs_need_send["t"] = entry()
        asks = asyncio.ensure_future(prefill.ask(waits, a=("t", [1]), b=("t", [])))
        await turns()
        assert not prefill.answers
        prefill.reqs_need_send["t"].ready.set()
        await asks
        assert prefill.answers == [("FINISH", ["a", "b"], None)]

    prefill = Prefill()
    asyncio.run(play())


@pytest.mark.parametrize("waits", [False, True])
def test_what_the_release_answers_in_time_is_not_answered_before(waits: bool) -> None:
    """Where it has answered at once, or waits for nothing: only it counts who has fetched."""

    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        if waits:
            await turns()
        await socket.send_multipart((identity, says(FINISH, ok=["a"])))
        await turns()

    async def play() -> None:
        prefill = Prefill()
        made = prefill.reqs_need_send["t"] = entry()
        if waits:
            made.ready.set()
        await prefill.ask(serves, a=("t", []))
        assert prefill.answers == [("FINISH", ["a"], None)]

    asyncio.run(play())


def test_who_asks_for_nothing_is_told_of_no_error() -> None:
    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        await socket.send_multipart((identity, says(FINISH, ok=["a"])))

    async def play() -> None:
        prefill = Prefill()
        await prefill.ask(serves, a=("ta", [1]), b=("tb", []))
        await prefill.note({"tc"})
        await prefill.ask(None, c=("tc", []))
        assert prefill.answers == [("FINISH", ["a"], None), ("FINISH", None, None)]

    asyncio.run(play())


def test_an_error_that_the_release_answers_with_is_its_own() -> None:
    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        await socket.send_multipart((identity, says(MooncakeXferResponseStatus.ERROR)))

    async def play() -> None:
        prefill = Prefill()
        await prefill.ask(serves, a=("t", [1]))
        assert prefill.answers == [("ERROR", None, None)]

    asyncio.run(play())


def test_what_the_release_says_of_an_error_stays_beside_what_it_leaves_out() -> None:
    answer = says(FINISH, ok=["a"], err=["b"])
    answer.err_msg = "of b, the release's own"

    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        await socket.send_multipart((identity, answer))

    prefill = Prefill()
    asyncio.run(prefill.ask(serves, a=("ta", [1]), b=("tb", [2]), c=("tc", [3])))
    assert prefill.answers == [("FINISH", ["a"], ["b", "c"])]
    assert answer.err_msg == "of b, the release's own"


def test_an_answer_that_cannot_be_completed_is_the_releases_own() -> None:
    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        await socket.send_multipart((identity, says(FINISH)))

    prefill = Prefill()
    prefill._xfer_resp_decoder.decode = lambda response: 1 / 0
    asyncio.run(prefill.ask(serves, a=("t", [1])))
    assert prefill.answers == [("FINISH", None, None)]
    assert prefill.context.aside


def test_prefills_that_cannot_be_noted_are_the_releases_to_record() -> None:
    told: list[Any] = []

    async def release(metadata: Any) -> None:
        told.append(metadata)

    prefill = Prefill()
    metadata = SimpleNamespace(reqs_to_send={}, reqs_not_processed=None)
    asyncio.run(prefill.wrap[f"{patch.WORKER}.record_send_reqs"](release, prefill, (metadata,), {}))
    assert told == [metadata]
    assert prefill.context.aside


def test_of_an_ask_that_has_ended_nothing_is_kept() -> None:
    async def serves(identity: bytes, socket: Any, meta: Any) -> None:
        await socket.send_multipart((identity, says(FINISH, ok=["a"])))

    async def play() -> None:
        await prefill.ask(serves, a=("t", [1]))
        await turns()

    prefill = Prefill()
    asyncio.run(play())
    asks = getattr(prefill, patch.STATE)
    assert (asks.tasks, dict(asks.waiting)) == (set(), {})


# The listener


class Socket:
    def __init__(self, *messages: list[bytes]) -> None:
        self.messages = list(messages)

    async def recv_multipart(self) -> list[bytes]:
        return self.messages.pop(0)


class Listening:
    """A worker whose listener takes what comes, as a release's, to the end."""

    def __init__(self) -> None:
        self.socket = Socket([b"a", b"", b"stray"], [b"only one"], [b"b", b"an ask"])
        self.async_zmq_ctx: Any = SimpleNamespace(socket=lambda kind: self.socket, term="its own")
        self.own = self.async_zmq_ctx
        self.hostname, self.side_channel_port = "127.0.0.1", 0
        self.taken: list[list[bytes]] = []

    async def listen(self, ready: str) -> None:
        assert ready == "ready"
        assert self.async_zmq_ctx.term == "its own"
        made = self.async_zmq_ctx.socket("ROUTER")
        assert self.async_zmq_ctx is self.own
        with socket.create_server((self.hostname, 0)) as server:
            self.side_channel_port = server.getsockname()[1]
            self.taken.append(await made.recv_multipart())
        raise ConnectionError("the listener's own")

    def run(self, context: PatchContext) -> None:
        listen = patch.wrappers(context)[f"{patch.WORKER}._mooncake_sender_listener"]
        with pytest.raises(ConnectionError):
            asyncio.run(listen(self.listen, self, ("ready",), {}))


def test_a_message_that_is_no_ask_is_left() -> None:
    context = PatchContext("mooncake-lost-asks", {}, {}, lambda: None)
    worker = Listening()
    worker.run(context)
    assert worker.taken == [[b"b", b"an ask"]]
    assert context.counters == {"no_ask": 2}


def test_while_the_process_lives_its_port_refuses_nobody() -> None:
    """Decode takes one that refuses for gone, and what it was to write for lost."""
    worker = Listening()
    worker.run(PatchContext("mooncake-lost-asks", {}, {}, lambda: None))
    with socket.create_connection((worker.hostname, worker.side_channel_port), 60):
        pass
    assert worker.async_zmq_ctx is worker.own


def test_a_listener_that_fails_before_it_has_a_socket_leaves_the_context_as_it_was() -> None:
    class Failing(Listening):
        async def listen(self, ready: str) -> None:
            raise ConnectionError("no socket")

    kept = len(listener._kept)
    worker = Failing()
    worker.run(PatchContext("mooncake-lost-asks", {}, {}, lambda: None))
    assert worker.async_zmq_ctx is worker.own
    assert len(listener._kept) == kept, "it had no port"


def test_a_port_that_zmq_closes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    context = PatchContext("mooncake-lost-asks", {}, {}, lambda: None)
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > 1:
            server.close()

    monkeypatch.setattr(time, "sleep", sleep)
    listener.keep(context, "127.0.0.1", port)
    assert len(slept) == 2
    assert not context._said, "it is kept"
    with socket.create_connection(("127.0.0.1", port), 60):
        pass
