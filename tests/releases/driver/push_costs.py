"""What the push connector's workers keep, and what a registration costs them: threads, files, ports, operations.

Run with NIXL, the release's sources, and the bundle or not, on the path. The workers are those of `push_failures`. Print
one JSON object. A stock run says what is to be expected of a patched one.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import begin_driver, leave, print_result, until

begin_driver()

import contextlib
import gc
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import nixl_agents
import push_failures
import real_scheduler as real
import vllm
from nixl._api import nixl_agent, nixl_agent_config
from push_failures import Side, Story

HOSTS = 400
PENDING = (1000, 2000)
PAIRS = 3
IDLE = 100

HOSTILE = [
    b"",
    b"refused",
    b"refused/",
    b"refused/" + b"0" * 32,
    b"withdraw/" + b"0" * 32,
    b"refused/" + b"[" * 5000,
    b"[" * 5000,
    b"x" * (1 << 20),
    b",,,,",
    b"taken/1/2/3",
]
"""What follows the sign by which the patch tells its own notifications from the release's."""
SIGN = b"HB:livepatch-push/"


def files() -> list[str]:
    """What this process has open."""
    names = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed by now
            names.append(os.readlink(f"/proc/self/fd/{entry}"))
    return names


def listening() -> set[int]:
    """The ports at which this process listens."""
    open_files = set(files())
    ports = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in open_files:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def counts() -> dict[str, int]:
    """What this process has; each side's own threads are gone a moment after its end."""
    gc.collect()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "sockets": sum(name.startswith("socket:") for name in files()),
        "ours": sum("livepatch" in thread.name for thread in threading.enumerate()),
    }


def push_one(story: Story, request_id: str) -> str:
    story.compute(request_id)
    story.finish(request_id, [1, 2])
    story.register(request_id, [1, 2])
    return str(story.outcome(request_id, [1, 2])["heard"])


def hosts(story: Story) -> dict[str, int]:
    """Registrations with one prefill engine by many names: what the second to the last of them add."""
    registered(story, "host-0", "127.0.0.1")
    before = counts()
    for number in range(1, HOSTS):
        registered(story, f"host-{number}", f"127.0.{1 + number // 250}.{1 + number % 250}")
    after = counts()
    return {name: after[name] - before[name] for name in before}


def registered(story: Story, request_id: str, host: str) -> None:
    """Decode registers, and prefill has it."""
    worker = story.decode.worker
    worker._do_send_reg_notif(request_id, registration(story, request_id, host))
    pending = story.prefill.worker._pending_d_registrations
    until(lambda: bool(story.step() or request_id in pending))
    del pending[request_id]


def registration(story: Story, request_id: str, host: str = "127.0.0.1") -> dict[str, Any]:
    return {
        "request_id": request_id,
        "decode_engine_id": story.decode.engine_id,
        "decode_host": "127.0.0.1",
        "decode_port": story.decode.port,
        "decode_tp_size": 1,
        "local_block_ids": ([1, 2],),
        "remote_engine_id": story.prefill.engine_id,
        "remote_host": host,
        "remote_port": story.prefill.port,
        "remote_tp_size": 1,
        "remote_pp_size": 1,
    }


def operations(story: Story) -> list[int]:
    """Calls that prefill makes for one registration while so many others wait."""
    worker = story.prefill.worker
    sent: list[bytes] = []
    agent = story.decode.worker.nixl_wrapper
    before = agent.send_notif
    agent.send_notif = lambda name, notif_msg: sent.append(notif_msg)
    found = []
    made = 0
    for waiting in PENDING:
        while made < waiting:
            story.decode.worker._do_send_reg_notif(f"waits-{made}", registration(story, f"waits-{made}"))
            made += 1
            worker._handle_push_reg_notif(sent.pop())
        story.decode.worker._do_send_reg_notif(f"one-{made}", registration(story, f"one-{made}"))
        (notification,) = sent
        found.append(called(worker._handle_push_reg_notif, notification))
        sent.clear()
    agent.send_notif = before
    worker._pending_d_registrations.clear()
    return found


def called(function: Any, argument: Any) -> int:
    """How many functions are called meanwhile, in this thread."""
    number = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function(argument)
    finally:
        sys.setprofile(None)
    return number


def strangers(ports: set[int]) -> int:
    """Strangers connect to each port that was opened, and say nothing, or rubbish; how many threads that takes."""
    before = counts()["threads"]
    with contextlib.ExitStack() as stack:
        for port in ports:
            idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 5)) for _ in range(IDLE)]
            until(lambda: counts()["threads"] >= before + IDLE or not listening() & ports)
            idle[0].sendall(b"[" * 5000 + b"\n")
            idle[0].settimeout(5)
            with contextlib.suppress(OSError):
                idle[0].recv(1)
        return counts()["threads"] - before


def peers(story: Story) -> None:
    """Whoever has the agents' metadata sends notifications that nobody sends."""
    stranger = nixl_agent("stranger", nixl_agent_config(backends=["UCX"]))
    for side in (story.prefill, story.decode):
        name = stranger.add_remote_agent(side.worker.nixl_wrapper.get_agent_metadata())
        for rest in HOSTILE:
            stranger.send_notif(name, SIGN + rest)
        stranger.send_notif(name, b"HB:last")
    seen: set[str] = set()
    for role, side in (("prefill", story.prefill), ("decode", story.decode)):
        handle = side.worker._handle_heartbeat

        def heartbeat(payload: str, role: str = role, handle: Any = handle) -> None:
            if payload == "last":
                seen.add(role)
            handle(payload)

        side.worker._handle_heartbeat = heartbeat
    until(lambda: bool(story.step() or seen == {"prefill", "decode"}))
    for side in (story.prefill, story.decode):
        del side.worker._handle_heartbeat


def ends(model_config: Any) -> dict[str, list[int]]:
    """What pairs leave behind that have pushed, and have ended."""
    found: dict[str, list[int]] = {"threads": [], "sockets": [], "ours": []}
    first = pair_ended(model_config)
    for _ in range(PAIRS):
        now = pair_ended(model_config)
        for name, numbers in found.items():
            numbers.append(now[name] - first[name])
    return found


def pair_ended(model_config: Any) -> dict[str, int]:
    story = Story(Side(model_config), Side(model_config))
    assert push_one(story, "ends") == "received"
    push_failures.late(story)
    for side in (story.prefill, story.decode):
        side.deaf()
        side.shut_down()
    del story, side
    return counts()


def main() -> None:
    push_failures.SECONDS = float(sys.argv[1])
    real.quiet()
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        nixl_agents.begin_distributed(model_config, Path(directory) / "rendezvous")
        story = Story(Side(model_config), Side(model_config))
        ports = listening()
        result: dict[str, Any] = {"pushed": push_one(story, "first")}
        story.prefill.expire_all()
        opened = listening() - ports
        result["ports"] = len(opened)
        result["hosts"] = hosts(story)
        result["operations"] = operations(story)
        result["ends"] = ends(model_config)
        result["strangers"] = strangers(opened)
        peers(story)
        result["after strangers"] = push_failures.late(story)["heard"]
        result["again"] = push_one(story, "again")
    print_result({"pid": os.getpid(), **result}, vllm)
    leave()


if __name__ == "__main__":
    main()
