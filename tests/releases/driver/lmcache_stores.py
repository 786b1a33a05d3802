# mypy: disable-error-code="import-not-found"
"""What LMCache's multi-process connector stores of several KV groups, and of streaming sessions; one JSON object.

Engines with the release's scheduler and both sides of its connector share a real LMCache server that copies KV itself, from
CPU memory. A model is stood in for: what a token leaves in each group's cache is a digest of all tokens up to it. A token
is answered wrong where the step that sampled it had, within a group's window, other KV than its tokens'.

The arguments are the cases.
"""

from __future__ import annotations

from result import attempted, begin_driver, leave, print_result, until

begin_driver()

import importlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import lmcache_failed_copies as copies
import lmcache_identity as identity
import real_scheduler as real
import torch
from lmcache_identity import BLOCK, MODEL, V1, Asked, connector_class, left_by
from vllm import SamplingParams
from vllm.config import set_current_vllm_config

CHUNK = copies.CHUNK
PATIENCE = 60.0
"""Longest time, in seconds, for a request's answer."""
BASE = {0: "base"}


class Engine:
    """Groups of full attention and of `windows`, in tokens; `budget`: the most tokens of a step; `drafts`: of a decoding
    step, all of which are rejected."""

    def __init__(self, server: Any, windows: Sequence[int], *, budget: int = 256, drafts: int = 0) -> None:
        module, name = connector_class("lmcache")
        extra = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": server.port,
            "lmcache.mp.save_decode_cache": True,
        }
        config = real.make_config(
            "Scheduler", MODEL, (module, name), extra=extra, options={"max_num_batched_tokens": budget}
        )
        if hasattr(config.cache_config, "kv_cache_layout"):
            config.cache_config.kv_cache_layout = "LBHNC"  # resolved by the engine core otherwise
        self.scheduler = self.make_scheduler(config, windows)
        self.drafts = self.scheduler.num_spec_tokens = drafts
        connector = self.scheduler.connector
        bind = getattr(connector, "bind_gpu_block_pool", None)
        if bind is not None and getattr(connector, "_gpu_block_pool", 0) is None:
            bind(self.scheduler.kv_cache_manager.block_pool)
        self.loaded = 0
        allocated = connector.update_state_after_alloc

        def noted(request: Any, blocks: Any, tokens: int, *others: Any) -> None:
            self.loaded += tokens
            allocated(request, blocks, tokens, *others)

        connector.update_state_after_alloc = noted
        factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
        role = importlib.import_module(f"{V1}.base").KVConnectorRole.WORKER
        groups = self.scheduler.kv_cache_config
        with set_current_vllm_config(config):
            self.worker = factory.create_connector(config=config, role=role, kv_cache_config=groups)
            if self.worker.worker_adapter.instance_id == os.getpid():  # to LMCache 0.4.7: two engines are two processes
                self.worker.worker_adapter.instance_id = next(NUMBERS)
            self.windows = [1 << 30, *windows]
            self.caches = self.make_caches()
            self.worker.register_kv_caches({f"layer{number}": cache for number, cache in enumerate(self.caches)})
        self.tables: dict[str, list[list[int]]] = {}
        self.requests: dict[str, Any] = {}

    def make_scheduler(self, config: Any, windows: Sequence[int]) -> Any:
        return real.scheduler_of("Scheduler", config, windows)

    def make_caches(self) -> list[Any]:
        return [torch.zeros(2, real.NUM_BLOCKS, 2, BLOCK, 8) for _ in self.windows]

    def run(self, *asked: Any) -> list[Any]:
        """Requests, or one session's inputs, until they are answered: how many tokens came from LMCache, and whether each
        token was answered right."""
        self.loaded, right = 0, True
        for request in asked:
            self.requests.setdefault(request.request_id, request)
            self.scheduler.add_request(request)
        deadline = time.monotonic() + PATIENCE
        while self.scheduler.has_requests():
            assert time.monotonic() < deadline, "a request was never answered"
            right = self.step() and right
        return [self.loaded, right]

    def step(self) -> bool:
        scheduled = self.scheduler.schedule()
        worker = self.worker
        worker.bind_connector_metadata(pickle.loads(pickle.dumps(scheduled.kv_connector_metadata)))
        worker.start_load_kv(SimpleNamespace(attn_metadata=object()))
        for new in scheduled.scheduled_new_reqs:
            self.tables[new.req_id] = [list(blocks) for blocks in new.block_ids]
        cached = scheduled.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for table, more in zip(self.tables[name], blocks or (), strict=False):
                table.extend(more)
        before = real.computed_before(scheduled)
        right, sampled = True, []
        for name, number in scheduled.num_scheduled_tokens.items():
            request = self.requests[name]
            right = self.compute(request, before[name], before[name] + number) and right
            sampled.append([7] if before[name] + number >= request.num_tokens else [])
        if scheduled.total_num_scheduled_tokens:
            worker.wait_for_save()
            # A copy that comes a step later may find what this step had not computed.
            stores = worker.worker_adapter.store_futures
            until(lambda: all(future.query() for future in stores.values()))
        sent, received = worker.get_finished(scheduled.finished_req_ids)
        worker.clear_connector_metadata()
        output = real.run_model(scheduled)
        output.sampled_token_ids = sampled
        output.kv_connector_output = real.transfers(set(received or ()), set(sent or ()))
        self.scheduler.update_from_output(scheduled, output)
        self.draft()
        if not scheduled.total_num_scheduled_tokens:
            time.sleep(0.005)
        return right

    def draft(self) -> None:
        """A session's first answer is drafted, and no draft is taken."""
        for request in self.scheduler.running if self.drafts else ():
            if request.num_output_tokens and len(request.streaming_queue or ()) > 1:
                request.spec_token_ids = [9] * self.drafts

    def compute(self, request: Any, start: int, end: int) -> bool:
        """What a step does: writes its tokens' KV, and reads what lies in each group's window."""
        values = left_by(SimpleNamespace(**as_read(request, end)), BASE, end)
        right = True
        for window, table, cache in zip(self.windows, self.tables[request.request_id], self.caches, strict=True):
            for place in range(start, end):
                cache[:, table[place // BLOCK], :, place % BLOCK] = values[place]
            read = range(max(0, start - window + 1), end)
            right = right and all(
                bool((cache[:, table[place // BLOCK], :, place % BLOCK] == values[place]).all()) for place in read
            )
        return right


def as_read(request: Any, end: int) -> dict[str, Any]:
    """A request's tokens to `end`, with drafts in the place of those that it has not."""
    ids = list(request.all_token_ids[:end])
    return {
        "lora_request": None,
        "mm_features": (),
        "prompt_embeds": None,
        "all_token_ids": ids + [9] * (end - len(ids)),
    }


NUMBERS = iter(range(100_000))


def asked(ids: Sequence[int], answer: int = 2, name: str | None = None, *, resumable: bool | None = None) -> Any:
    return Asked(
        request_id=name or f"r{next(NUMBERS)}",
        prompt_token_ids=list(ids),
        sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True),
        pooling_params=None,
        mm_features=[],
        block_hasher=real.get_request_block_hasher(BLOCK, real.sha256),
        **({} if resumable is None else {"resumable": resumable}),
        **real.end_token_named_per_request(),
    )


def prompt(number: int, tokens: int) -> list[int]:
    return [3 + (number + place * 7) % 200 for place in range(tokens)]


def lost(server: Any, windows: Sequence[int], common: int, behind: int, *asks: int) -> list[Any]:
    """LMCache has lost a prompt that vLLM's own cache has; an engine asks for it with `behind` tokens more, and then
    others with the first tokens of it."""
    one, other = Engine(server, windows), Engine(server, windows)
    ids = prompt(1, common)
    came = [one.run(asked([*ids, 210]))]
    server.ask("evict")
    came.append(one.run(asked([*ids, *[211] * behind])))
    server.ask("settle")
    return came + [other.run(asked([*ids[:tokens], *[212] * 20])) for tokens in asks]


def wide(server: Any) -> list[Any]:
    """A window of two chunks."""
    return lost(server, [2 * CHUNK], 5 * CHUNK, 70, 2 * CHUNK)


def narrow(server: Any) -> list[Any]:
    """A window of a chunk; where the null blocks end, half of a chunk is them."""
    return lost(server, [CHUNK], 2 * CHUNK + BLOCK, 100, 2 * CHUNK)


def several(server: Any) -> list[Any]:
    """Two windows, one less than a chunk."""
    return lost(server, [BLOCK, 2 * CHUNK], 5 * CHUNK, 70, 2 * CHUNK)


def behind(server: Any) -> list[Any]:
    """Of two chunks the window group has the second: who asks for both needs no more."""
    return lost(server, [CHUNK], 2 * CHUNK, 100, 2 * CHUNK)


def kept(server: Any) -> list[Any]:
    """LMCache loses nothing: what was stored as it was computed is everybody's."""
    one, *others = (Engine(server, [2 * CHUNK]) for _ in range(3))
    ids = prompt(2, 5 * CHUNK)
    came = [one.run(asked([*ids, 210])), one.run(asked([*ids, *[211] * 40]))]
    server.ask("settle")
    asks = zip(others, (2 * CHUNK, 5 * CHUNK), strict=True)
    return came + [other.run(asked([*ids[:tokens], *[212] * 20])) for other, tokens in asks]


def whole(server: Any) -> list[Any]:
    """Full attention alone: a prompt that LMCache lost is stored again from vLLM's own cache."""
    return lost(server, [], 4 * CHUNK, 100, 2 * CHUNK)


def session(server: Any, drafts: int) -> list[Any]:
    """A streaming session of 20 ids and 8 answered, then of 100 more, in parts of 33; then another with its ids."""
    one, other = Engine(server, [], budget=33, drafts=drafts), Engine(server, [])
    first = asked([3 + place % 200 for place in range(20)], 8, resumable=True)
    name = first.request_id
    more = asked([5 + place * 3 % 200 for place in range(100)], 2, name, resumable=True)
    ids: list[int] = []
    took = one.scheduler.update_from_output

    def noting(*given: Any) -> Any:
        ids[:] = first.all_token_ids if first.num_tokens > len(ids) else ids
        return took(*given)

    one.scheduler.update_from_output = noting
    came = [one.run(first, more, asked([4], 2, name, resumable=False))]
    server.ask("settle")
    return [*came, other.run(asked(ids[:120]))]


def drafted(server: Any) -> list[Any]:
    return session(server, 5)


def undrafted(server: Any) -> list[Any]:
    return session(server, 0)


APART = "--separate-object-groups"
CASES: dict[str, tuple[Callable[[Any], list[Any]], tuple[str, ...]]] = {
    "wide": (wide, ()),
    "narrow": (narrow, ()),
    "several": (several, ()),
    "narrow_apart": (narrow, (APART,)),
    "behind_apart": (behind, (APART,)),
    "kept": (kept, ()),
    "whole": (whole, ()),
    "drafted": (drafted, ()),
    "undrafted": (undrafted, ()),
}


def played(*names: str) -> dict[str, Any]:
    """What each case came to, with a server of its own."""
    os.environ["LMCACHE_MP_TRANSFER_MODE"] = copies.MODES[0]
    identity.PLAYED[0] = "lmcache"
    importlib.import_module("lmcache.v1.multiprocess.server")
    importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")
    importlib.import_module("lmcache.v1.multiprocess.token_hasher").TokenHasher(CHUNK)
    # All servers first: a process that has used ZMQ cannot be forked.
    servers = {name: copies.Server(*CASES[name][1]) for name in names}
    came: dict[str, Any] = {}
    for name, server in servers.items():
        server.start()
        came[name] = attempted(lambda case=CASES[name][0], server=server: case(server))
        server.kill()
    return came


def main() -> None:
    found = played(*(sys.argv[1:] or CASES))
    print_result({"cases": found}, sys.modules["lmcache"], identity.vllm)
    leave()


if __name__ == "__main__":
    main()
