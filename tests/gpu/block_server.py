"""A whole LMCache MP server, and a worker whose KV cache is on the GPU: what is stored is loaded into other blocks.

    python tests/gpu/block_server.py [--device cuda] [--log FILE] [CASE...]

For an interpreter with LMCache and torch for CUDA or ROCm; vLLM is not needed (the layout's name, for which LMCache asks
it, is stood in for). Server and adapters are the release's, started as by its command, with its compiled operations or,
where the installation lacks them, without: that is the case this is for. Prints what came of each case, what became of its
server, and which compiled operations the installation has.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "releases" / "driver"))

from result import print_result, take_stdout

take_stdout()

import argparse
import functools
import importlib
import importlib.util
import inspect
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import zmq
from ports import free_port

CHUNK, BLOCK, BLOCKS, LAYERS = 32, 16, 64, 3
STEP = 6_000_000_000
"""How many of the device's clock cycles a step takes: some seconds."""
PATIENCE, ANSWER = 15.0, 5.0
"""Longest time, in seconds, for what must come about, and for a server that serves to answer."""
FORMS: dict[str, tuple[tuple[int, ...], torch.dtype, str]] = {
    "MLA": ((BLOCKS, BLOCK, 576), torch.bfloat16, "NHD"),
    "K/V": ((2, BLOCKS, BLOCK, 8, 128), torch.bfloat16, "NHD"),
    "K/V, heads first": ((2, BLOCKS, 8, BLOCK, 128), torch.float16, "HND"),
}
"""Shape of a layer, dtype, and where the heads are."""


class Server:
    """A server in a process of its own, with what it writes."""

    def __init__(self, log: Path, *more: str) -> None:
        self.port, self.log = free_port(), log
        words = ["--host", "127.0.0.1", "--port", str(self.port), "--chunk-size", str(CHUNK), "--l1-size-gb", "1"]
        words += ["--l1-init-size-gb", "1", "--eviction-policy", "LRU", "--disable-observability", *more]
        module = "lmcache.v1.multiprocess.server"
        if not torch.cuda.is_available():  # workers move their blocks themselves
            words += ["--supported-transfer-mode", "auto"]
        with log.open("wb") as out:
            self.process = subprocess.Popen([sys.executable, "-m", module, *words], stdout=out, stderr=out)
        until(self.serves, self, 4 * PATIENCE)

    def serves(self) -> bool:
        with socket.socket() as asked:
            return asked.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self) -> int | None:
        """What its exit code was, where it had ended by itself."""
        code = self.process.poll()
        self.process.kill()
        self.process.wait()
        return code

    def complaints(self) -> list[str]:
        """What it wrote of errors, each line once, without what is different each time."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        signs = ("ERROR", "Error: ", "Fatal Python error")
        found = [line.strip()[:300] for line in lines if any(sign in line for sign in signs)]
        return list(dict.fromkeys(re.sub(r"^\S*\[[-0-9: ,]+\] |\x1b\[[0-9;]*m", "", line) for line in found))[:12]


def until(holds: Callable[[], bool], server: Server, patience: float = PATIENCE) -> bool:
    """Whether it came about, while the server lives and in time."""
    deadline = time.monotonic() + patience
    while not (held := holds()) and time.monotonic() < deadline and server.process.poll() is None:
        time.sleep(0.02)
    return held


class Worker:
    """The release's adapters of a worker and of a scheduler."""

    made = 0

    def __init__(self, server: Server, form: str, device: str) -> None:
        shape, dtype, layout = FORMS[form]
        self.server, self.axis = server, shape.index(BLOCKS)
        self.module = importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")
        hints = {"kv_layout": layout}
        for place in (self.module, importlib.import_module("lmcache.integration.vllm.utils")):
            place.vllm_layout_hints = lambda *args: hints  # type: ignore[attr-defined]
        url, self.contexts = f"tcp://127.0.0.1:{server.port}", [zmq.Context(), zmq.Context()]
        given: dict[str, Any] = {"mq_timeout": ANSWER, "heartbeat_interval": 3600.0}
        given["vllm_block_size"] = BLOCK
        if hasattr(self.module, "ParallelStrategy"):
            fields = inspect.signature(self.module.ParallelStrategy).parameters
            alone = {name: 0 if name.endswith(("_id", "_mla", "mla_only")) else 1 for name in fields}
            given["parallel_strategy"] = self.module.ParallelStrategy(**alone)
        else:  # 0.4.3
            given |= {"world_size": 1, "kv_rank": 0}
        self.adapter = self.module.LMCacheMPWorkerAdapter(url, self.contexts[0], f"model {form}", **given)
        if self.adapter.instance_id == os.getpid():  # to 0.4.7, where two workers are two processes
            Worker.made += 1
            self.adapter.instance_id = os.getpid() * 100 + Worker.made
        scheduler = self.module.LMCacheMPSchedulerAdapter
        several = "server_urls" in inspect.signature(scheduler).parameters  # from 0.5.0
        self.scheduler = scheduler([url] if several else url, self.contexts[1], f"model {form}", **given)
        wide = (*shape[:-1], shape[-1] * dtype.itemsize)
        self.bytes = [torch.randint(0, 256, wide, dtype=torch.uint8, device=device) for _ in range(LAYERS)]
        self.device = device
        self.adapter.register_kv_caches({f"layer{n}": one.view(dtype) for n, one in enumerate(self.bytes)})

    def operation(self, blocks: list[int]) -> Any:
        tokens = list(range(len(blocks) * BLOCK))
        kind = self.module.LoadStoreOp
        flat = not hasattr(kind, "flat_block_ids")  # to 0.4.6
        return kind(token_ids=tokens, block_ids=blocks if flat else [blocks], start=0, end=len(tokens))

    def event(self) -> Any:
        """That of the step which computed, or will use, the blocks: as vLLM's connector records it."""
        create = getattr(self.adapter, "create_recorded_event", None)
        if create:
            return create()
        if self.device == "cpu":
            return SimpleNamespace(wait=lambda *args: None)
        event = torch.cuda.Event(interprocess=True)
        event.record()
        return event

    def ended(self, name: str, *, stored: bool) -> bool:
        """Whether a store or load is reported as ended, within `PATIENCE`."""
        seen: set[str] = set()

        def holds() -> bool:
            found = self.adapter.get_finished({name})[0 if stored else 1]
            seen.update(found or ())
            return name in seen

        return until(holds, self.server)

    def hit(self, name: str, tokens: int) -> int | None:
        self.scheduler.maybe_submit_lookup_request(name, list(range(tokens)))
        found: list[int] = []

        def answered() -> bool:
            result = self.scheduler.check_lookup_result(name)
            found.extend([] if result is None else [result])
            return bool(found)

        return found[0] if until(answered, self.server) else None

    def blocks(self, ids: list[int]) -> list[torch.Tensor]:
        return [layer.index_select(self.axis, torch.tensor(ids, device=self.device)) for layer in self.bytes]


def there_and_back(form: str, device: str, log: Path, *more: str, skip: int = 0) -> dict[str, Any]:
    """Six chunks of two blocks each are stored, and loaded into other blocks, but for the first `skip` of these."""
    server = Server(log, *more)
    came: dict[str, Any] = {}
    try:
        worker = Worker(server, form, device)
        old, new = list(range(5, 17)), list(reversed(range(40, 52)))
        rest = [block for block in range(BLOCKS) if block not in new[skip:]]
        others = worker.blocks(rest)
        worker.adapter.submit_store_request("writer", worker.operation(old), worker.event())
        came["stored"] = worker.ended("writer", stored=True)
        came["hit"] = worker.hit("reader", len(old) * BLOCK)
        if came["hit"]:
            load = worker.operation(new)
            load.skip_first_n_tokens = skip * BLOCK
            worker.adapter.submit_retrieve_request("reader", load, worker.event())
            came["loaded"] = worker.ended("reader", stored=False)
            came["errors"] = sorted(worker.adapter.get_block_ids_with_load_errors())
            came["same"] = all(map(torch.equal, worker.blocks(old[skip:]), worker.blocks(new[skip:])))
            came["untouched"] = all(map(torch.equal, others, worker.blocks(rest)))
    except Exception as error:
        came["error"] = f"{type(error).__name__}: {error}"[:300]
    finally:
        came |= {"server_ended": server.end(), "server_wrote": server.complaints()}
    return came


def behind_a_step(device: str, log: Path, *more: str) -> dict[str, Any]:
    """A store waits for a step that takes seconds; meanwhile another worker of the server looks for what it stores.

    What it finds it loads, and that must be what was stored. `early`: it was found while the step was still under way.
    """
    form = "K/V"
    server = Server(log, *more)
    came: dict[str, Any] = {}
    try:
        storing, other = Worker(server, form, device), Worker(server, form, device)
        old, new = list(range(5, 17)), list(reversed(range(40, 52)))
        written = storing.blocks(old)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(STEP)
            step = torch.cuda.Event()
            step.record()
            storing.adapter.submit_store_request("writer", storing.operation(old), storing.event())
        tried = 0
        found: list[int | None] = []

        def is_found() -> bool:
            nonlocal tried
            tried += 1
            found[:] = [other.hit(f"reader {tried}", len(old) * BLOCK)]
            return bool(found[0])

        came["hit"] = until(is_found, server) and found[0]
        came["early"] = not step.query()
        came["looked"] = tried
        if came["hit"]:
            name = f"reader {tried}"
            with torch.cuda.stream(torch.cuda.Stream()):
                other.adapter.submit_retrieve_request(name, other.operation(new), other.event())
            came["loaded"] = other.ended(name, stored=False)
            came["before_the_step"] = not step.query()
            came["errors"] = sorted(other.adapter.get_block_ids_with_load_errors())
            came["same"] = all(map(torch.equal, written, other.blocks(new)))
        came["stored"] = storing.ended("writer", stored=True)
    except Exception as error:
        came["error"] = f"{type(error).__name__}: {error}"[:300]
    finally:
        came |= {"server_ended": server.end(), "server_wrote": server.complaints()}
    return came


def came_to(case: Mapping[str, Any]) -> str:
    """What tests/results/gpu-servers.json keeps of a case."""
    if "error" in case:
        return "no cache can be registered"
    if not case["hit"]:
        return "nothing is stored"
    return "right" if case["same"] and case.get("untouched", True) and not case["errors"] else "wrong"


EAGER = ("--no-l1-use-lazy",)
"""All of the server's memory is pinned at once; by default it is pinned by and by, and copied to and from in another way."""
CASES: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    **{form: functools.partial(there_and_back, form) for form in FORMS},
    "K/V, part of a chunk skipped": functools.partial(there_and_back, "K/V", skip=1),
    "behind a step": behind_a_step,
    "K/V, eager": lambda device, log: there_and_back("K/V", device, log, *EAGER),
    "behind a step, eager": lambda device, log: behind_a_step(device, log, *EAGER),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all of them otherwise")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--log", type=Path, help="where the last server's log is kept")
    options = parser.parse_args()
    import lmcache

    compiled = [name for name in ("c_ops", "cuda_ops") if list(Path(lmcache.__file__).parent.glob(f"{name}.*.so"))]
    with tempfile.TemporaryDirectory() as place:
        log = options.log or Path(place, "server")
        came = {name: CASES[name](options.device, log) for name in options.names or CASES}
    for case in came.values():
        case["came_to"] = came_to(case)
    print_result({"compiled": compiled, "device": options.device, "cases": came}, lmcache)
    sys.stdout.flush()
    os._exit(0)  # adapters whose server ended have threads that wait for it


if __name__ == "__main__":
    main()
