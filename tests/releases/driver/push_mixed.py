"""Let one push worker with this process's bundle, or none, meet one of another process with another, or with none.

Run with NIXL, the release's sources, and the bundle or not, on the path. The arguments say which side this process is
(`prefill` or `decode`), and which bundle the other one has: a folder, or `none`. Print one JSON object: what decode has
heard and has of each request, whoever of the two says what.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import halves
import lease_guard
import nixl_agents
import push_failures
import real_scheduler as real
import vllm
from push_failures import Side
from result import leave, print_result, until

HELD_SECONDS = 2.5
"""How long decode is looked at where nothing is to come: it has asked, and prefill looks once a second."""


class Half(halves.Half):
    """One side, in its process, and what it is told to do. Prefill and decode step as engines do, all the time."""

    def __init__(self, directory: Path, name: str) -> None:
        model_config = real.make_model_config(directory)
        nixl_agents.begin_distributed(model_config, directory / f"rendezvous of {name}")
        self.side = Side(model_config)
        self.heard: list[tuple[set[str], set[str], set[int]]] = []

    def step(self) -> None:
        _, *found = self.side.ended()
        if any(found):
            self.heard.append((found[0], found[1], found[2]))

    def who(self) -> tuple[str, int]:
        return self.side.engine_id, self.side.port

    def compute(self, request_id: str) -> None:
        self.side.step(reqs_in_batch={request_id})

    def finish(self, request_id: str, blocks: list[int]) -> None:
        self.side.fill(blocks, lease_guard.READER)
        latest = time.perf_counter() + 600
        self.side.step(reqs_to_send={request_id: latest}, push_finished_blocks={request_id: (blocks,)})

    def abort(self, request_id: str) -> None:
        self.side.step(reqs_not_processed={request_id})
        self.step()

    def registered(self) -> None:
        """Prefill has a registration that waits."""
        until(lambda: bool(self.step() or self.side.worker._pending_d_registrations))

    def register(self, request_id: str, blocks: list[int], engine_id: str, port: int) -> None:
        push_failures.register(self.side, request_id, blocks, engine_id, port)

    def overdue(self) -> None:
        """Also of 0.1.9, which keeps what waits elsewhere."""
        self.side.overdue()
        desk = getattr(self.side.worker, "_livepatch_desk", None)
        if desk is not None:
            for waiting in desk.waiting.values():
                waiting.ask_at = 0.0

    def outcome(self, request_id: str, blocks: list[int], seconds: float) -> dict[str, Any]:
        return push_failures.outcome_of(self.side, self.heard, request_id, blocks, seconds)


def story(prefill: Any, decode: Any) -> dict[str, Any]:
    """Requests that go well, that prefill does not serve, and that it serves after decode has asked it to leave them."""
    engine_id, port = prefill.do("who")

    def register(request_id: str, blocks: list[int]) -> None:
        decode.do("register", request_id, blocks, engine_id, port)

    def well(request_id: str, blocks: list[int]) -> Any:
        prefill.do("compute", request_id)
        prefill.do("finish", request_id, blocks)
        register(request_id, blocks)
        return decode.do("outcome", request_id, blocks, 60.0)

    result = {"first": well("first", [1, 2])}
    prefill.do("compute", "aborted")
    prefill.do("abort", "aborted")
    register("aborted", [3, 4])
    result["aborted"] = decode.do("outcome", "aborted", [3, 4], HELD_SECONDS)
    decode.do("overdue")
    result["aborted, asked"] = decode.do("outcome", "aborted", [3, 4], HELD_SECONDS)
    register("slow", [5, 6])
    prefill.do("registered")
    decode.do("overdue")
    result["slow"] = decode.do("outcome", "slow", [5, 6], HELD_SECONDS)
    prefill.do("compute", "slow")
    prefill.do("finish", "slow", [5, 6])
    result["slow, computed"] = decode.do("outcome", "slow", [5, 6], HELD_SECONDS)
    result["last"] = well("last", [7, 8])
    return result


def main() -> None:
    real.quiet()
    role, given = sys.argv[1:]
    if role == "other":
        Half(Path(given), "other").serve()
        leave()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        other = halves.Other(__file__, ["other", directory], given)
        half = Half(place, "this")
        other.step = half.step
        result = story(half, other) if role == "prefill" else story(other, half)
        other.end()
    print_result({"pid": os.getpid(), "cases": result}, vllm)
    leave()


if __name__ == "__main__":
    main()
