"""Hold a prefill's blocks for ten minutes, and let MoRI-IO read or write them after that; print what arrives, as JSON.

The scheduler, its connector and the workers are the release's own; mori is a stand-in. Time is a number, for the
scheduler's side; meanwhile others take what blocks they find.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import begin_driver, leave, print_result, until

begin_driver()

import os
import tempfile
from pathlib import Path
from typing import Any

import kv_block_reaper as driver
import lost_sends
import moriio_worker as workers
import real_scheduler as real
import vllm
from mori import orders

LONG = 601.0
OWN, OTHERS = 1.0, 2.0
"""Contents of the prefill's blocks, and of those that others have taken."""


class Held:
    """A prefill whose blocks are held, and then the memory that they lie in."""

    def __init__(self, model_config: Any) -> None:
        self._prefill = lost_sends.MoRIIOPrefill("Scheduler", model_config)
        self._prefill.hold()
        self._memory: dict[str, Any] = {}
        self.blocks = self._blocks_of(lost_sends.DEAD)

    def _blocks_of(self, name: str) -> list[int]:
        return list(self._prefill.scheduler.kv_cache_manager.get_block_ids(name)[0])

    def _fill(self, blocks: list[int], contents: float) -> None:
        for cache in self._memory.values():
            cache[:, blocks] = contents

    def lie_in(self, memory: dict[str, Any]) -> None:
        self._memory = memory
        self._fill(list(range(real.NUM_BLOCKS)), 0.0)
        self._fill(self.blocks, OWN)

    def wait(self) -> None:
        """Ten minutes later, others have come."""
        self._prefill.now += LONG
        driver.later(LONG)
        self._prefill.steps(3)
        for number in range(real.NUM_BLOCKS):
            other = real.make_request(f"other-{number}", tokens=40)
            other.kv_transfer_params = None
            self._prefill.scheduler.add_request(other)
            self._prefill.step()
            if real.status_name(other) != "RUNNING":
                return
            self._fill(self._blocks_of(other.request_id), OTHERS)


def arrived(memory: Any, blocks: list[int]) -> list[float]:
    """The values in these blocks."""
    return sorted({value for cache in memory.values() for value in cache[:, blocks].unique().tolist()})


def read(model_config: Any) -> list[float]:
    """A decode engine gets to the request late, and reads."""
    held, peer = Held(model_config), workers.Peer()
    held.lie_in(peer.caches)
    decode = workers.Worker(producer=False, read=True)
    decode.register()
    request = workers.Sent(peer, [number + 20 for number in held.blocks], held.blocks)
    held.wait()
    decode.real.start_load_kv(workers.step(request, write=False))
    until(lambda: all(status.Succeeded() for status in decode.real._recving_transfers[request.request_id]))
    return arrived(decode.caches, request.blocks)


def write(model_config: Any) -> list[float]:
    """A decode engine gets to the request late, and says where to write."""
    held, peer, prefill = Held(model_config), workers.Peer(), workers.Worker()
    prefill.register()
    held.lie_in(prefill.caches)
    request = workers.Sent(peer, held.blocks, [number + 20 for number in held.blocks])
    workers.save(prefill, workers.step(request))
    until(lambda: len(prefill.real._writer._deferred_tasks) == len(workers.LAYERS))
    held.wait()
    orders.let(orders.LATE)  # else the worker may have written, and forgotten what it heard, before that is looked for
    request.allocate(prefill)
    until(lambda: orders.begun() == len(workers.LAYERS))
    orders.release()
    until(lambda: request.key in peer.notified)
    return arrived(peer.caches, request.remote_blocks)


def main() -> None:
    real.quiet()
    workers.set_up()
    workers.BLOCKS = real.NUM_BLOCKS
    driver.take_clock()
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        cases = {case.__name__: case(model_config) for case in (read, write)}
    print_result({"pid": os.getpid(), "cases": cases}, vllm)
    leave()


if __name__ == "__main__":
    main()
