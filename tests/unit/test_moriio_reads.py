"""What the release tests of MoRI-IO's reads leave out: whose side reads, and whose blocks come back by a send's end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.patches.moriio_timeouts import reads
from vllm_livepatch.sitecustomize.context import PatchContext


def side(mode: str = "READ", *, producer: bool = False) -> SimpleNamespace:
    return SimpleNamespace(is_producer=producer, mode=SimpleNamespace(name=mode))


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (side(), True),
        (side(producer=True), False),
        (side("WRITE"), False),
        (side("WRITE", producer=True), False),
        (None, False),  # a connector has a scheduler's side or a worker's
    ],
)
def test_only_a_decode_engine_in_read_mode_reads(of: Any, expected: bool) -> None:
    assert reads.reads_here(of) is expected


class Connector:
    """A connector whose worker has read for "one"; "two" is still under way."""

    def __init__(self, *, kept_as_sends: bool, worker: Any = None) -> None:
        facts = {"reads_kept_as_sends": True} if kept_as_sends else {}  # as in the patch's facts
        context = PatchContext("moriio-timeouts", {"TRANSFER_SECONDS": 1.0}, facts, lambda: None)
        self.wrapper = reads.wrappers(context, lambda worker, wanted: {})[f"{reads.CONNECTOR}.get_finished"]
        self.connector_worker = worker or side()
        self.reads = reads.reads_of(self.connector_worker)
        self.reads.finishing.update(("one", "two"))
        self.reads.under_way["two"] = reads.Read([3], "peer:1")
        self.reads.ended.add("one")

    def get_finished(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper(lambda *args, **kwargs: ({"sent"}, {"what the release says"}), self, *args, **kwargs)


@pytest.mark.parametrize("by_name", [False, True])
def test_to_0_15_a_finished_request_gives_its_blocks_back_once_its_read_has_ended(by_name: bool) -> None:
    connector = Connector(kept_as_sends=True)

    def finished(*names: str) -> Any:
        return connector.get_finished(finished_req_ids=set(names)) if by_name else connector.get_finished(set(names))

    assert finished() == ({"sent"}, {"one"}), "none has finished"
    assert finished("one", "two", "another") == ({"sent", "one"}, set())
    del connector.reads.under_way["two"]
    assert finished() == ({"sent", "two"}, set())
    assert finished("one") == ({"sent"}, set()), "each is given back once"


def test_since_0_16_blocks_are_given_back_by_the_scheduler_alone() -> None:
    connector = Connector(kept_as_sends=False)
    assert connector.get_finished({"one", "two"}) == ({"sent"}, {"one"})
    assert connector.get_finished({"one", "two"}) == ({"sent"}, set())


def test_a_side_that_does_not_read_answers_as_the_release() -> None:
    connector = Connector(kept_as_sends=True, worker=side("WRITE"))
    assert connector.get_finished({"one"}) == ({"sent"}, {"what the release says"})


# What is read, and into which blocks


def context(**facts: Any) -> PatchContext:
    return PatchContext("moriio-timeouts", {"TRANSFER_SECONDS": 1.0}, facts, lambda: None)


def made(
    livepatch: PatchContext, target: str, connect: reads.Connect = lambda worker, wanted: {}
) -> Callable[..., Any]:
    return reads.wrappers(livepatch, connect)[target]


WHOLE = {"do_remote_prefill": True, "remote_block_ids": [1], "remote_engine_id": "prefill"}


@pytest.mark.parametrize(
    ("tokens", "parameters", "expected"),
    [
        (1, WHOLE, (1, True)),
        (64, WHOLE, (64, True)),
        (0, WHOLE, (0, False)),
        (64, None, (0, False)),  # the prompt is computed here
        (64, {**WHOLE, "do_remote_prefill": False}, (0, False)),
        (64, {**WHOLE, "remote_block_ids": []}, (0, False)),
        (64, {"do_remote_prefill": True, "remote_block_ids": [1]}, (0, False)),
    ],
)
def test_the_scheduler_waits_for_what_will_be_read(tokens: int, parameters: Any, expected: tuple[int, bool]) -> None:
    livepatch = context()
    wrapper = made(livepatch, f"{reads.SCHEDULER}.get_num_new_matched_tokens")
    request = SimpleNamespace(kv_transfer_params=parameters)
    assert wrapper(lambda request, computed: (tokens, False), side(), request, 0) == expected
    assert not livepatch.aside


@pytest.mark.parametrize("size", [1, 16])
def test_what_is_here_is_not_read_again(size: int) -> None:
    """Of five blocks and a token two blocks are here: the others are read, from the peer's of the same places."""
    livepatch = context()
    decode = side()
    decode.block_size = size
    request = SimpleNamespace(
        request_id="one",
        prompt_token_ids=[0] * (5 * size + 1),
        kv_transfer_params={"remote_block_ids": [90, 91, 92, 93, 94]},
    )
    decode._reqs_need_recv = {"one": None}
    blocks = SimpleNamespace(get_block_ids=lambda: ([20, 21, 22, 23, 24],))
    wrapper = made(livepatch, f"{reads.SCHEDULER}.update_state_after_alloc")
    wrapper(lambda *args: None, decode, request, blocks, 3 * size)
    assert decode._reqs_need_recv == {"one": (request, [22, 23, 24])}
    assert request.kv_transfer_params["remote_block_ids"] == [92, 93, 94]
    assert not livepatch.aside


# On the worker's side


class Transfer:
    """A transfer's status, as mori's."""

    def __init__(self, state: str) -> None:
        self.state = state

    looks = 0  # at all of them

    def Succeeded(self) -> bool:
        Transfer.looks += 1
        return self.state == "succeeded"

    def Failed(self) -> bool:
        Transfer.looks += 1
        return self.state == "failed"

    def Message(self) -> str:
        return "the peer is gone"

    def Code(self) -> int:
        return 7


class Worker:
    """A decode worker that reads; what the release's own method sees of the transfers is kept in `seen`."""

    is_producer = False
    mode = SimpleNamespace(name="READ")

    def __init__(self, *states: str) -> None:
        self.livepatch = context()
        self.notified: list[tuple[str, str, int]] = []
        self.moriio_wrapper = SimpleNamespace(send_notify=lambda *sent: self.notified.append(sent))
        self._recving_transfers = {"one": [Transfer(state) for state in states]} if states else {}
        self._recving_transfers_callback_addr = {"one": ("prefill", 5)}
        self.seen: list[list[str]] = []
        self.reads = reads.reads_of(self)
        self.pop = made(self.livepatch, f"{reads.WORKER}._pop_done_transfers")

    def pop_done(self) -> Any:
        def pop() -> set[str]:
            self.seen.append(list(self._recving_transfers))
            done = set(self._recving_transfers)
            self._recving_transfers.clear()
            return done

        return self.pop(pop, self)


def test_a_read_whose_first_layer_is_pending_has_not_ended() -> None:
    worker = Worker("pending", "succeeded")
    worker.reads.under_way["one"] = reads.Read([3, 4], "prefill:1")
    assert worker.pop_done() == set()
    assert worker.seen == [[]], "the release looks at the last layer alone"
    assert (worker.reads.take_ended(), list(worker._recving_transfers)) == (set(), ["one"])
    worker._recving_transfers["one"][0].state = "succeeded"
    assert worker.pop_done() == {"one"}
    assert (worker.reads.take_ended(), worker.reads.take_failed()) == ({"one"}, set())


@pytest.mark.parametrize("come", [0, 30, 60])
def test_a_step_looks_at_a_few_of_many_layers(come: int, mocker: MockerFixture) -> None:
    worker = Worker(*["succeeded"] * come, *["pending"] * (61 - come))
    worker.reads.under_way["one"] = reads.Read([3, 4], "prefill:1")
    worker.pop_done()
    mocker.patch.object(Transfer, "looks", 0)
    for _ in range(10):
        assert worker.pop_done() == set()
    assert Transfer.looks <= 10 * 5
    for transfer in worker._recving_transfers["one"]:
        transfer.state = "succeeded"
    assert worker.pop_done() == {"one"}


@pytest.mark.parametrize("known", [True, False])
def test_the_peer_hears_of_a_read_that_failed_and_its_blocks_are_reported(
    known: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = Worker("succeeded", "failed")
    worker.reads.under_way["one"] = reads.Read([3, 4], "prefill:1")
    if not known:  # where to say so
        worker._recving_transfers_callback_addr.clear()
    worker.pop_done()
    assert (worker.reads.take_ended(), worker.reads.take_failed()) == ({"one"}, {3, 4})
    assert worker.notified == ([("one", "prefill", 5)] if known else [])
    assert worker._recving_transfers == {}
    assert "is not read from prefill:1: a transfer failed: the peer is gone (code 7)" in capsys.readouterr().err


def test_a_read_that_takes_too_long_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worker, now = Worker("pending", "pending", "succeeded"), [100.0]
    monkeypatch.setattr(reads, "time", SimpleNamespace(monotonic=lambda: now[0]))
    worker.reads.under_way["one"] = reads.Read([3, 4], "prefill:1")
    now[0] = 101.0
    worker.pop_done()
    assert worker.livepatch.counters == {}, "it may take TRANSFER_SECONDS"
    now[0] = 101.5
    worker.pop_done()
    worker.pop_done()
    assert worker.livepatch.counters == {"read_overdue": 1}
    assert "from prefill:1: 2 of 3 transfers are pending after 1.5 s" in capsys.readouterr().err
    assert worker.reads.take_failed() == set(), "its blocks may still be written"


@pytest.mark.parametrize("aside", [False, True])
def test_a_read_whose_peer_does_not_shake_hands_is_a_failed_one(aside: bool) -> None:
    """Where the patch stands aside nobody is waited for."""
    worker = Worker()
    asked: list[list[str]] = []

    def connect(worker: Any, wanted: Mapping[str, Any]) -> dict[str, tuple[str, str, str]]:
        asked.append(list(wanted))
        return {"silent": ("handshake_timeout", "silent:1", "no handshake in 10.0 s")}

    every = {
        name: SimpleNamespace(local_block_ids=[block], remote_host=name, remote_handshake_port=1)
        for name, block in (("answers", 3), ("silent", 4))
    }
    metadata = SimpleNamespace(reqs_to_recv=every)
    seen: list[list[str]] = []
    wrapper = made(worker.livepatch, f"{reads.WORKER}.start_load_kv", connect)
    if aside:
        worker.livepatch.withdraw()
    wrapper(lambda metadata: seen.append(list(metadata.reqs_to_recv)), worker, metadata)
    assert asked == ([] if aside else [["answers", "silent"]])
    assert seen == ([["answers", "silent"]] if aside else [["answers"]])
    assert worker.reads.take_failed() == (set() if aside else {4})
    assert worker.livepatch.counters == ({} if aside else {"handshake_timeout": 1})
    assert metadata.reqs_to_recv is every
