"""Let one real NIXL push worker of a release write into another's blocks, or fail to: what does the other hear of it?

Run with NIXL, the release's sources, and the bundle or not, on the path. The workers are the release's own, with agents
of the real NIXL on CPU memory, and shake hands over their side channels; in one process, but for a prefill that is
killed or ends ("killed" as an argument). What their schedulers would tell them is told by this script. Faults are put where NIXL's own library is called
(`Faults`), below the release and the bundle. Print one JSON object: of each case, what decode heard and has.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHILD: int | None = None
"""The prefill to be killed, where one is asked for. It leaves this process before there are threads."""
if __name__ == "__main__" and "killed" in sys.argv[2:]:
    OURS, THEIRS = multiprocessing.Pipe()
    CHILD = os.fork()

import lease_guard
import nixl_agents
import real_scheduler as real
import vllm
from lease_guard import OTHER, READER
from nixl import _bindings as nixl_bindings
from ports import free_port
from result import leave, print_result, until, wait

HELD_SECONDS = 1.5
"""How long decode is looked at where it has asked, and is to hear nothing: prefill answers within a second."""

QUIET_SECONDS = 0.3
"""How long decode is looked at where it is to hear nothing yet."""

SURE_SECONDS = 5.0
"""How long prefill is asked for what all releases but one report: on that one it is the time that the case takes."""


class Side(lease_guard.Side):
    """One engine's half of the push connector, which listens on a side channel of its own."""

    CONNECTOR = "NixlPushConnector"

    def __init__(self, model_config: Any) -> None:
        self.port = free_port()
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.port)
        super().__init__(model_config)
        lease_guard.BY_REQUEST = hasattr(type(self.worker), "get_transfer_results")
        self.listen()
        self.faults = Faults(self.worker.nixl_wrapper.agent)
        self.worker.nixl_wrapper.agent = self.faults
        self.sent: set[str] = set()

    def ended(self) -> tuple[set[str], set[str], set[str], set[int]]:
        result = super().ended()
        self.sent |= result[0]
        return result

    def shut_down(self) -> None:
        with contextlib.suppress(KeyError):  # to 0.26.0, of a worker that has written
            self.connector.shutdown()

    def expire(self, request_id: str) -> None:
        self.worker._reqs_to_send[request_id] = time.perf_counter() - 1

    def expire_all(self) -> None:
        """Let all leases end, so that the next case begins without any."""
        for request_id in self.worker._reqs_to_send:
            self.expire(request_id)
        until(lambda: not (self.ended() and self.worker._reqs_to_send))

    def overdue(self) -> None:
        """Decode has waited for as long as it waits: where the bundle is, which alone asks then."""
        sides = getattr(self.worker, "_livepatch_push", None)
        if sides is not None:
            for waiting in sides.desk._of_request.values():
                waiting.ask_at = 0.0
            sides.desk._look = 0.0


class Faults:
    """NIXL's library, but for what is to fail."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.unprepared = False  # a write cannot be prepared: NIXL is given none
        self.raises = False  # a write cannot be begun, or not all of it
        self.lost: Any = None  # writes are begun, never arrive, and are in this state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def makeXferReq(self, *arguments: Any) -> Any:
        if self.unprepared:
            raise RuntimeError("the peer is not known")
        return self._library.makeXferReq(*arguments)

    def postXferReq(self, handle: Any, *more: Any) -> Any:
        if self.raises:
            raise RuntimeError("the device is gone")
        return self._library.postXferReq(handle, *more) if self.lost is None else self.lost

    def getXferStatus(self, handle: Any) -> Any:
        return self._library.getXferStatus(handle) if self.lost is None else self.lost


class Story:
    """One prefill and one decode, and the requests between them."""

    def __init__(self, prefill: Side, decode: Side) -> None:
        self.prefill, self.decode = prefill, decode
        self.heard: list[tuple[set[str], set[str], set[int]]] = []

    def step(self) -> None:
        self.prefill.ended()
        _, *heard = self.decode.ended()
        if any(heard):
            self.heard.append((heard[0], heard[1], heard[2]))

    def compute(self, request_id: str) -> None:
        self.prefill.step(reqs_in_batch={request_id})

    def finish(self, request_id: str, blocks: list[int], lease: float = 600.0) -> None:
        """The request's blocks are computed, and prefill is to write them to whoever registers."""
        self.prefill.fill(blocks, READER)
        latest = time.perf_counter() + lease
        self.prefill.step(reqs_to_send={request_id: latest}, push_finished_blocks={request_id: (blocks,)})

    def register(self, request_id: str, blocks: list[int]) -> None:
        """Decode wants the request's KV in its own blocks of the same numbers."""
        register(self.decode, request_id, blocks, self.prefill.engine_id, self.prefill.port)

    def outcome(self, request_id: str, blocks: list[int], seconds: float = 30.0) -> dict[str, Any]:
        """What decode hears of a request, in so many seconds, and what its blocks hold."""

        def is_heard() -> bool:
            if any(request_id in received for received, _, _ in self.heard):
                return True
            self.step()
            return False

        wait(is_heard, seconds)
        return result_of(self.decode, self.heard, request_id, blocks)


def register(decode: Side, request_id: str, blocks: list[int], engine_id: str, port: int) -> None:
    metadata = decode.metadata()
    for number in blocks:
        decode.block(number).zero_()
    params = {
        "remote_block_ids": (),
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "tp_size": 1,
    }
    metadata.add_new_req_to_recv(request_id, (blocks,), params)
    metadata.push_registrations = {
        request_id: {
            "request_id": request_id,
            "decode_engine_id": decode.engine_id,
            "decode_host": "127.0.0.1",
            "decode_port": decode.port,
            "decode_tp_size": 1,
            "local_block_ids": (blocks,),
            "remote_engine_id": engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": port,
            "remote_tp_size": 1,
            "remote_pp_size": 1,
            "unknown": "what prefill's release does not know",
        }
    }
    decode.worker.start_load_kv(metadata)


def result_of(decode: Side, heard: list[Any], request_id: str, blocks: list[int]) -> dict[str, Any]:
    found = [(failed, invalid) for received, failed, invalid in heard if request_id in received]
    contents = sorted({contents_of(decode, number) for number in blocks})
    if not found:
        return {"heard": "nothing", "contents": contents}
    assert len(found) == 1, f"{request_id} was reported {len(found)} times"
    ((failed, invalid),) = found  # of all requests of that step
    if request_id in failed if lease_guard.BY_REQUEST else invalid:
        return {"heard": "failed", "contents": contents, "invalid": invalid >= set(blocks)}
    return {"heard": "received", "contents": contents, "invalid": bool(invalid)}


def contents_of(side: Side, number: int) -> str:
    value = float(side.block(number)[..., :].unique().item())
    return {READER: "its own", OTHER: "another's", -float(number): "none"}.get(value - number, "mixed")


# Cases


def pushed(story: Story) -> dict[str, Any]:
    """All is well, whichever side is first."""
    story.compute("first")
    story.finish("first", [1, 2])
    story.register("first", [1, 2])
    first = story.outcome("first", [1, 2])
    story.register("second", [3, 4])
    story.compute("second")
    story.step()
    story.finish("second", [3, 4])
    second = story.outcome("second", [3, 4])
    latest = time.monotonic() + SURE_SECONDS
    while not {"first", "second"} <= story.prefill.sent and time.monotonic() < latest:
        story.step()
    return {"first": first, "second": second, "sent": sorted(story.prefill.sent)}


def prepare_fails(story: Story) -> dict[str, Any]:
    """NIXL takes no write: its library raises before it is given one."""
    story.prefill.faults.unprepared = True
    story.compute("prepare")
    story.finish("prepare", [5, 6])
    story.register("prepare", [5, 6])
    result = story.outcome("prepare", [5, 6], SECONDS)
    story.prefill.faults.unprepared = False
    return result


def post_fails(story: Story) -> dict[str, Any]:
    """NIXL's library raises when it is given a write: a part of it may be under way."""
    story.prefill.faults.raises = True
    story.compute("post")
    story.finish("post", [5, 6])
    story.register("post", [5, 6])
    until(lambda: bool(story.step() or not story.prefill.worker._finished_blocks_inbox.qsize()))
    story.decode.overdue()
    result = story.outcome("post", [5, 6], HELD_SECONDS)
    story.prefill.faults.raises = False
    return result


def write_fails(story: Story) -> dict[str, Any]:
    """A write is under way when its lease ends, when decode has waited for too long, and when it fails."""
    story.prefill.faults.lost = nixl_bindings.NIXL_IN_PROG
    story.compute("write")
    story.finish("write", [7, 8])
    story.register("write", [7, 8])
    until(lambda: bool(story.step() or story.prefill.worker._sending_transfers))
    story.prefill.expire("write")
    story.decode.overdue()
    meanwhile = story.outcome("write", [7, 8], QUIET_SECONDS)["heard"]
    kept = "write" not in story.prefill.sent
    story.prefill.faults.lost = nixl_bindings.NIXL_ERR_BACKEND
    story.decode.overdue()
    try:
        result = story.outcome("write", [7, 8], HELD_SECONDS)
    except AssertionError as error:
        result = {"prefill": f"AssertionError: {error}"}
    story.prefill.faults.lost = None
    return {"meanwhile": meanwhile, "blocks kept": kept, **result}


def late(story: Story) -> dict[str, Any]:
    """The router brings the request when its lease has ended."""
    story.compute("late")
    story.finish("late", [9, 10])
    story.prefill.expire("late")
    until(lambda: bool(story.step() or "late" in story.prefill.sent))
    story.prefill.fill([9, 10], OTHER)
    story.register("late", [9, 10])
    return story.outcome("late", [9, 10], SECONDS)


def aborted(story: Story) -> dict[str, Any]:
    """Prefill's request is aborted when decode has registered, and when it has not."""
    story.register("before", [11, 12])
    story.compute("before")
    story.compute("after")
    until(lambda: bool(story.step() or story.prefill.worker._pending_d_registrations))
    story.prefill.step(reqs_not_processed={"before", "after"})
    story.register("after", [13, 14])
    return {"before": story.outcome("before", [11, 12], SECONDS), "after": story.outcome("after", [13, 14], SECONDS)}


def same_id(story: Story) -> dict[str, Any]:
    """After a lease has ended, another request comes with its id, and is pushed."""
    story.compute("late")
    story.register("late", [15, 16])
    story.finish("late", [15, 16])
    return story.outcome("late", [15, 16])


def never(story: Story) -> dict[str, Any]:
    """Prefill does not get to the request in time; decode gives its blocks to another. Then prefill gets to it."""
    story.register("never", [17, 18])
    until(lambda: bool(story.step() or story.prefill.worker._pending_d_registrations))
    story.decode.overdue()
    result = story.outcome("never", [17, 18], SECONDS)
    given = result["heard"] == "failed"
    if given:
        story.decode.fill([17, 18], OTHER)
    story.compute("never")
    story.finish("never", [17, 18])
    until(lambda: bool(story.step() or story.prefill.worker._finished_blocks_inbox.empty()))
    if not given:  # nothing stops the write: it is awaited, since it may take its time on a busy machine
        until(lambda: bool(story.step() or contents_of(story.decode, 18) != "none"))
    afterwards = story.outcome("nobody", [17, 18], QUIET_SECONDS)["contents"]
    return {**result, "given": given, "afterwards": afterwards}


def without(story: Story) -> dict[str, Any]:
    """Decode has no bundle: it is written as on stock, and of a failure it hears nothing."""
    worker = story.decode.worker
    worker._do_send_reg_notif = functools.partial(inspect.unwrap(type(worker)._do_send_reg_notif), worker)
    story.compute("plain")
    story.register("plain", [19, 20])
    story.finish("plain", [19, 20])
    well = story.outcome("plain", [19, 20])
    story.prefill.faults.raises = True
    story.compute("plain-post")
    story.finish("plain-post", [21, 22])
    story.register("plain-post", [21, 22])
    failed = story.outcome("plain-post", [21, 22], QUIET_SECONDS)
    story.prefill.faults.raises = False
    del worker._do_send_reg_notif
    return {"well": well, "post_fails": failed}


def hybrid(story: Story) -> dict[str, Any]:
    """A write cannot be prepared, and decode takes its model for one of several kinds of layers."""
    worker = story.decode.worker
    before, worker._is_hma_required = worker._is_hma_required, True
    story.prefill.faults.unprepared = True
    story.compute("hybrid")
    story.finish("hybrid", [1, 2])
    story.register("hybrid", [1, 2])
    result = story.outcome("hybrid", [1, 2], SECONDS)
    story.prefill.faults.unprepared = False
    worker._is_hma_required = before
    return result


def handshake_fails(story: Story) -> dict[str, Any]:
    """Prefill cannot shake hands with a decode engine that it meets."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("not compatible")

    story.prefill.worker._nixl_handshake = refuse
    story.compute("hands")
    story.finish("hands", [1, 2])
    story.register("hands", [1, 2])
    result = story.outcome("hands", [1, 2], SECONDS)
    del story.prefill.worker._nixl_handshake
    return result


def handshake_late(story: Story) -> dict[str, Any]:
    """Prefill shakes hands for longer than the lease; blocks that are not kept then go to another request."""
    worker, begun, go_on = story.prefill.worker, threading.Event(), threading.Event()

    def wait(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        go_on.wait(lease_guard.SECONDS)
        return type(worker)._nixl_handshake(worker, *args, **kwargs)

    worker._nixl_handshake = wait
    story.compute("slow")
    story.finish("slow", [3, 4])
    story.register("slow", [3, 4])
    until(lambda: bool(story.step() or begun.is_set()))
    # To 0.26.0 the writer itself shakes hands; later it goes on with other writes meanwhile.
    latest = time.monotonic() + (lease_guard.SECONDS if hasattr(worker, "_deferred_push_inbox") else QUIET_SECONDS)
    while "slow" not in story.prefill.sent and time.monotonic() < latest:
        story.prefill.expire("slow")
        story.step()
    if "slow" in story.prefill.sent:
        story.prefill.fill([3, 4], OTHER)
    go_on.set()
    result = story.outcome("slow", [3, 4])
    del worker._nixl_handshake
    return result


def ended(story: Story) -> dict[str, Any]:
    """Prefill ends in order. A write of its had begun, and another request was registered, whose KV it has not."""
    story.prefill.faults.lost = nixl_bindings.NIXL_IN_PROG
    story.compute("begun")
    story.finish("begun", [1, 2])
    story.register("begun", [1, 2])
    until(lambda: bool(story.step() or story.prefill.worker._sending_transfers))
    story.register("waits", [3, 4])
    until(lambda: bool(story.step() or story.prefill.worker._pending_d_registrations))
    story.prefill.shut_down()
    heard = story.heard

    def outcome(request_id: str, blocks: list[int], seconds: float) -> dict[str, Any]:
        return outcome_of(story.decode, heard, request_id, blocks, seconds)

    waits = outcome("waits", [3, 4], SECONDS)
    story.decode.overdue()
    return {"waits": waits, "begun": outcome("begun", [1, 2], HELD_SECONDS)}


def outcome_of(decode: Side, heard: list[Any], request_id: str, blocks: list[int], seconds: float) -> dict[str, Any]:
    """What decode alone hears of a request, in so many seconds."""

    def is_heard() -> bool:
        if any(request_id in received for received, _, _ in heard):
            return True
        _, *found = decode.ended()
        if any(found):
            heard.append((found[0], found[1], found[2]))
        return False

    wait(is_heard, seconds)
    return result_of(decode, heard, request_id, blocks)


def killed(decode: Side, pipe: Any, prefill: int) -> dict[str, Any]:
    """Prefill is stopped, and then killed, before it has written; afterwards the router sends one more to it."""
    engine_id, port = pipe.recv()
    heard: list[tuple[set[str], set[str], set[int]]] = []
    register(decode, "lost", [1, 2], engine_id, port)
    until(lambda: bool(decode.ended() and pipe.poll()))
    os.kill(prefill, signal.SIGSTOP)
    os.waitpid(prefill, os.WUNTRACED)  # on a busy machine it still answers for a while
    decode.overdue()
    stopped = outcome_of(decode, heard, "lost", [1, 2], QUIET_SECONDS)["heard"]
    os.kill(prefill, signal.SIGKILL)
    os.waitpid(prefill, 0)
    decode.overdue()
    lost = outcome_of(decode, heard, "lost", [1, 2], HELD_SECONDS)
    register(decode, "later", [3, 4], engine_id, port)
    decode.overdue()
    return {"stopped": stopped, "lost": lost, "later": outcome_of(decode, heard, "later", [3, 4], HELD_SECONDS)}


def prefill_to_kill(pipe: Any) -> None:
    """A prefill engine in a process of its own, which says who it is, and that it has a registration."""
    directory = Path(pipe.recv())  # where the model is that both serve
    model_config = real.make_model_config(directory)
    nixl_agents.begin_distributed(model_config, directory / "other rendezvous")
    side = Side(model_config)
    pipe.send((side.engine_id, side.port))
    until(lambda: bool(side.ended() and side.worker._pending_d_registrations))
    pipe.send("registered")
    while True:  # until it is killed
        signal.pause()


CASES = (pushed, prepare_fails, post_fails, write_fails, late, aborted, same_id, never, without, hybrid)


def played(model_config: Any, directory: Path, seconds: float) -> dict[str, Callable[[], dict[str, Any]]]:
    """The cases by their names, to be called in this order; decode waits `seconds` for what it is to hear."""
    global SECONDS
    SECONDS = seconds
    nixl_agents.begin_distributed(model_config, directory / "rendezvous")
    prefill, decode = Side(model_config), Side(model_config)

    def settled(case: Callable[[Story], dict[str, Any]], make: Callable[[], Side]) -> dict[str, Any]:
        result = case(Story(prefill, make()))
        prefill.expire_all()
        return result

    side = functools.partial(Side, model_config)
    return {
        **{case.__name__: functools.partial(settled, case, lambda: decode) for case in CASES},
        **{case.__name__: functools.partial(settled, case, side) for case in (handshake_fails, handshake_late)},
        "ended": lambda: ended(Story(side(), side())),
    }


def main() -> None:
    real.quiet()
    if CHILD == 0:
        prefill_to_kill(THEIRS)
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        cases = played(model_config, Path(directory), float(sys.argv[1]))
        result = {name: case() for name, case in cases.items()}
        if CHILD is not None:
            OURS.send(directory)
            result["killed"] = killed(Side(model_config), OURS, CHILD)
    print_result({"pid": os.getpid(), "cases": result}, vllm)
    leave()


if __name__ == "__main__":
    main()
