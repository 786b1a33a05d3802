# mypy: disable-error-code="import-not-found"
"""Send the OffloadingConnector of a release odd `kv_transfer_params`: of its P2P tier, and of a Mamba hybrid; print what comes.

Real are the scheduler, the connector's part in it, the tier, its sessions and their sockets. Another engine is a socket that
takes messages and never answers. The tier's NIXL agent has a stand-in, since nothing is transferred. No worker runs.
"""

from __future__ import annotations

from result import begin_driver, leave, print_result, raised

begin_driver()

import copy
import gc
import importlib
import importlib.util
import inspect
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import real_scheduler as real
import torch
import vllm
import zmq
from ports import free_port
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

CONNECTOR = (offloading_connector.__name__, "OffloadingConnector")
P2P = "vllm.v1.kv_offload.tiering.p2p"
ODD: tuple[Any, ...] = ("x", 1, True, [1], ["kv_request_id"], 1.5)
"""In the place of an object."""
ODD_IDS: tuple[Any, ...] = ([1], {"a": 1}, 7, True, "\ud800", "a\0b", "x" * 5000)
ODD_HOSTS: tuple[Any, ...] = ("a b", "a/b", "-", "\ud800", "a\0b", [1], {"a": 1}, 5)
ODD_PORTS: tuple[Any, ...] = ("x", 70000, -1, True, 1.5, [1], "1" * 9, {"a": 1})
BLOCK, HASHED = 64, 16
"""Tokens, of a hybrid's block and of what has one hash."""
LIMITS: tuple[Any, ...] = (None, 16, 1, 95, 96, 0, -1, True, "16", [16], 1000)
"""Of what is stored of a prompt whose state at token 96 is kept."""

KEPT: list[Any] = []
"""Engines, until this process ends."""


class Peer:
    """Another engine's address, where messages are taken."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")


def peers_before() -> bool:
    """Whether an engine to load from is `prefill`, and one that loads is `decode`."""
    manager = importlib.import_module(f"{P2P}.manager")
    return not hasattr(manager, "P2PSourceInfo")


def tensor(blocks: int, group: Any) -> Any:
    page = blocks * group.kv_cache_spec.page_size_bytes
    if "shared_by" in inspect.signature(KVCacheTensor).parameters:
        return KVCacheTensor(size=page, shared_by=group.layer_names)
    one = {"layer_stride": page, "block_stride": group.kv_cache_spec.page_size_bytes}
    return KVCacheTensor(size=page, layers=group.layer_names, **one)


class Engine:
    """A scheduler with an OffloadingConnector; it is made anew where a request has ended it."""

    def __init__(self, model_config: Any) -> None:
        self.model_config = model_config
        self.number = 0
        self.made: list[Any] = []  # kept: a context of ZeroMQ that nobody has any more waits for its sockets
        self.make()

    def make(self) -> None:
        """Make the scheduler, with a P2P tier."""
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 24,
            "secondary_tiers": [{"type": "p2p", "host": "127.0.0.1", "port": free_port()}],
            "tier_poll_interval_s": 0,
        }

        def with_memory(num_blocks: int, kv_cache_tensors: list[Any], kv_cache_groups: list[Any]) -> Any:
            tensors = [tensor(num_blocks, group) for group in kv_cache_groups]
            return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=kv_cache_groups)

        with mock.patch.object(real, "KVCacheConfig", with_memory):
            self.scheduler = real.make_scheduler("Scheduler", self.model_config, CONNECTOR, extra=extra)
        self.made.append(self.scheduler)

    def come(self, params: Any) -> Any:
        self.number += 1
        request = real.make_request(f"request-{self.number}", prompt=40)
        request.kv_transfer_params = copy.deepcopy(params)
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        scheduled = self.scheduler.schedule()
        self.scheduler.update_from_output(scheduled, real.run_model(scheduled))
        return scheduled

    def outcome(self, *given: Any) -> str:
        """What comes of requests that come one after another: `computed`, `waits`, or what is raised."""
        try:
            requests = []
            for params in given:
                requests.append(self.come(params))
                self.step()
            for _ in range(4):
                self.step()
            if not all(request.is_finished() for request in requests):
                return "waits"  # a client that hangs up then ends 0.26.0, whatever it sent
            held = real.held_blocks(self.scheduler)
        except Exception as error:
            self.make()
            return raised(error)
        return f"blocks {held} are held" if held and not self.waiting() else "computed"

    def waiting(self) -> bool:
        """Whether an earlier request is still there."""
        return bool(self.scheduler.requests)

    def sessions(self) -> int:
        """With how many engines the tier has begun to talk."""
        (tier,) = self.scheduler.connector.connector_scheduler.manager.secondary_tiers
        return len(tier._sessions)


def well(peer: Peer, name: str) -> dict[str, Any]:
    return {"kv_request_id": name, "remote_host": "127.0.0.1", "remote_port": peer.port}


def odd_peers(peer: Peer) -> dict[str, Any]:
    """Parameters by what is odd about them."""
    load, serve = (
        (("prefill",), "decode") if peers_before() else (("remote_prefiller", "remote_kv_source"), "remote_decoder")
    )
    cases: dict[str, Any] = {
        f"{name} is odd, {number}": {name: odd} for name in (*load, serve) for number, odd in enumerate(ODD)
    }
    for name in load:
        for field, values in {"kv_request_id": ODD_IDS, "remote_host": ODD_HOSTS, "remote_port": ODD_PORTS}.items():
            whole = well(peer, "odd")
            cases |= {f"{name}'s {field}, {number}": {name: {**whole, field: odd}} for number, odd in enumerate(values)}
            cases[f"{name} without {field}"] = {name: {one: whole[one] for one in whole if one != field}}
    cases |= {f"{serve}'s id, {number}": {serve: {"kv_request_id": odd}} for number, odd in enumerate(ODD_IDS)}
    return cases


def of_peers(model_config: Any) -> dict[str, Any]:
    """What comes of requests that name other engines."""
    peer = Peer()
    with mock.patch(f"{P2P}.data.nixl._NixlAgent") as agent, mock.patch(f"{P2P}.data.nixl._NixlAgentConfig"):
        agent.return_value.get_agent_metadata.return_value = b"nobody"
        KEPT.append(engine := Engine(model_config))
        outcomes = {name: engine.outcome(params) for name, params in odd_peers(peer).items()}
        found: dict[str, Any] = {"odd": [f"{name}: {came}" for name, came in outcomes.items() if came != "computed"]}
        load, serve = ("prefill", "decode") if peers_before() else ("remote_prefiller", "remote_decoder")
        engine.make()
        before = engine.sessions()
        found["well"] = engine.outcome({load: well(peer, "well")})
        found["sessions"] = engine.sessions() - before
        found["served"] = engine.outcome({serve: {"kv_request_id": "served"}, "lmcache.skip_save": True})
        found["neither"] = engine.outcome({load: None, serve: None})
        if not peers_before():
            engine.make()
            found["asks"] = engine.outcome({"remote_kv_source": well(peer, "asks")})
            engine.make()
            shared = well(peer, "shared")
            found["shared"] = engine.outcome({"remote_kv_source": shared}, {"remote_prefiller": shared})
    return found


def hybrid(model_config: Any) -> Any:
    """A scheduler of a Mamba hybrid, whose state amid a block is kept, with an OffloadingConnector."""
    import offloading_failures as failures

    vllm_config = real.make_config("Scheduler", model_config, CONNECTOR, extra=failures.EXTRA)
    vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = False
    cache = vllm_config.cache_config
    cache.block_size, cache.mamba_cache_mode, cache.mamba_block_size, cache.prefix_match_unit = (
        BLOCK,
        "align",
        BLOCK,
        HASHED,
    )
    if hasattr(cache, "hash_block_size"):
        cache.hash_block_size = HASHED
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    shape = {"shapes": ((4, 64),), "dtypes": (torch.float32,), "page_size_padded": full.page_size_bytes}
    state = MambaSpec(block_size=BLOCK, mamba_cache_mode="align", **shape)
    groups = [KVCacheGroupSpec(["attention"], full), KVCacheGroupSpec(["state"], state)]
    init_none_hash(sha256)
    return real.SCHEDULERS["Scheduler"](
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(num_blocks=real.NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK,
        hash_block_size=HASHED,
        log_stats=True,
    )


def of_limit(model_config: Any, limit: Any) -> Any:
    """How many tokens of a prompt are stored with this limit in its parameters, or what is raised."""
    scheduler = hybrid(model_config)
    params = {} if limit is None else {"kv_transfer_params": {"max_offload_tokens": limit}}
    request = Request(
        request_id="request",
        prompt_token_ids=[1 + number for number in range(110)],
        sampling_params=SamplingParams(max_tokens=40, ignore_eos=True, extra_args=params),
        pooling_params=None,
        block_hasher=get_request_block_hasher(HASHED, sha256),
        **real.end_token_named_per_request(),
    )
    stored = 0
    try:
        scheduler.add_request(request)
        for _ in range(6):
            scheduled = scheduler.schedule()
            stored += sum(len(job.keys) for job in scheduler.connector.connector_scheduler._jobs.values())
            scheduler.update_from_output(scheduled, real.run_model(scheduled))
    except Exception as error:
        return raised(error)
    return stored


def there(module: str) -> bool:
    """Whether the release has a module, and what it is in."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def has_limits() -> bool:
    """Whether the state amid a block is stored."""
    module = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
    scheduler = importlib.import_module(module) if there(module) else None
    kind = getattr(scheduler, "OffloadingConnectorScheduler", None)
    return hasattr(kind, "_build_partial_tail_store_jobs")


def play(model_config: Any) -> dict[str, Any]:
    """What this release has of these."""
    os.environ["PYTHONHASHSEED"] = "0"  # the tier asks for it
    found: dict[str, Any] = {}
    if there(P2P):
        found["peers"] = of_peers(model_config)
    if has_limits():
        found["limits"] = {repr(limit): of_limit(model_config, limit) for limit in LIMITS}
    return found


def main() -> None:
    real.quiet()
    gc.enable()
    with tempfile.TemporaryDirectory() as directory:
        found = play(real.make_model_config(Path(directory)))
    print_result(found, vllm)
    leave()


if __name__ == "__main__":
    main()
