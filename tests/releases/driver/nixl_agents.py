"""Make a release's real NIXL connector workers on CPU memory, with the real NIXL; tell what their agents were given.

A worker is made the way the release's worker process makes it: by the connector factory, under the current
configuration, in a process group of one. Only `rixl` and `nixl_rocm`, which cannot be had without ROCm, are stood in
for, by the real `nixl` package's own files under those names; so their agents, too, are real.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
from nixl import _api as nixl_api
from nixl import _bindings as nixl_bindings
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

real_agent = nixl_bindings.nixlAgent


def resting(name: str, config: Any) -> Any:
    """An agent that rests between two polls, as in the lab (shared_cores): else a thread of each takes a core."""
    config.pthrDelay = 100  # microseconds
    return real_agent(name, config)


nixl_bindings.nixlAgent = resting
PARAMETER = "ucx_error_handling_mode"
BYTES = 1 << 20


def play(model_config: Any, directory: Path) -> dict[str, Any]:
    """Make workers and agents in every way that matters; return the mode that each one's UCX backend says it has."""
    begin_distributed(model_config, directory / "rendezvous")
    # Each agent goes as soon as it has answered: while it lives, a thread of it takes a core.
    in_multi_connector = mode_of(taken(make_multi_worker(model_config, {PARAMETER: "peer"})))
    agent = taken(make_worker(model_config))
    set_by_caller = mode_set_by_caller(type(agent))
    configured = taken(make_worker(model_config, {PARAMETER: "peer"}))
    result = {
        "nixl_default": agent.get_plugin_params("UCX")[PARAMETER],
        "plain": mode_of(agent),
        "threads": agent.get_backend_params("UCX")["num_threads"],
        "configured": mode_of(configured),
        "in_multi_connector": in_multi_connector,
        "set_by_caller": set_by_caller,
        "arrived_at_configured": transferred(agent, configured),
    }
    del configured
    rocm = rocm_agent(model_config)  # from here on the release takes its agents from ROCm's package
    return {
        **result,
        "rocm_package": type(rocm).__module__,
        "on_rocm": mode_of(rocm),
        "arrived": transferred(agent, rocm),  # both of one mode
    }


def begin_distributed(model_config: Any, rendezvous: Path) -> None:
    """Make the process group of one rank that workers ask for theirs."""
    with set_current_vllm_config(make_config(model_config, "NixlConnector", {})):
        init_distributed_environment(1, 0, rendezvous.as_uri(), 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def make_config(model_config: Any, connector: str, extra: dict[str, Any]) -> Any:
    """Return a configuration with a connector and its `kv_connector_extra_config`."""
    config = VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=256,
            max_model_len=256,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            disable_hybrid_kv_cache_manager=True,
        ),
        cache_config=CacheConfig(block_size=32),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector, kv_role="kv_both", kv_buffer_device="cpu", kv_connector_extra_config=extra
        ),
        device_config=DeviceConfig(device="cpu"),
    )
    if hasattr(config.cache_config, "kv_cache_layout"):
        config.cache_config.kv_cache_layout = "NHD"  # from 0.29 the engine core says it before workers begin
    return config


def make_connector(model_config: Any, connector: str, extra: dict[str, Any]) -> Any:
    """Return a connector's worker side."""
    config = make_config(model_config, connector, extra)
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    with set_current_vllm_config(config):
        return KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)


def make_worker(model_config: Any, extra: dict[str, Any] | None = None) -> Any:
    """Return the real worker of a NIXL connector."""
    return make_connector(model_config, "NixlConnector", extra or {}).connector_worker


def make_multi_worker(model_config: Any, extra: dict[str, Any]) -> Any:
    """Return the real worker of a NIXL connector inside a MultiConnector."""
    child = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    multi = make_connector(
        model_config, "MultiConnector", {"connectors": [{**child, "kv_connector_extra_config": extra}]}
    )
    return multi._connectors[0].connector_worker


def taken(worker: Any) -> Any:
    """Return a worker's agent, which from now on lives only as long as the caller keeps it."""
    agent, worker.nixl_wrapper = worker.nixl_wrapper, None
    return agent


def mode_of(agent: Any) -> str | None:
    """Return the mode that an agent's UCX backend was created with; None where NIXL's own default holds."""
    mode: str | None = agent.get_backend_params("UCX").get(PARAMETER)
    return mode


def mode_set_by_caller(agent_class: Any) -> str | None:
    """Return what becomes of a mode that a caller passes to an agent."""
    agent = agent_class("caller", nixl_api.nixl_agent_config(backends=[]))
    agent.create_backend("UCX", {PARAMETER: "peer"})
    return mode_of(agent)


def transferred(owner: Any, reader: Any) -> bool:
    """Let one agent read the memory of another; return whether the bytes arrived."""
    source = numpy.random.default_rng(0).integers(0, 256, BYTES, numpy.uint8)
    target = numpy.zeros_like(source)
    places = [(array.ctypes.data, array.nbytes, 0) for array in (source, target)]
    owner.register_memory([(*places[0], "")], "DRAM")
    reader.register_memory([(*places[1], "")], "DRAM")
    name = reader.add_remote_agent(owner.get_agent_metadata())
    handle = reader.initialize_xfer(
        "READ", reader.get_xfer_descs([places[1]], "DRAM"), reader.get_xfer_descs([places[0]], "DRAM"), name
    )
    state = reader.transfer(handle)
    while state == "PROC":
        state = reader.check_xfer_state(handle)
    return bool(state == "DONE" and (source == target).all())


def rocm_agent(model_config: Any) -> Any:
    """Let the release choose its NIXL package as on ROCm; return an agent of the class that it takes."""
    utils = sys.modules.get("vllm.distributed.nixl_utils")
    with rocm_packages(), mock.patch.object(type(current_platform), "is_rocm", return_value=True):
        if hasattr(utils, "_load_nixl_attr"):
            vars(utils).pop("NixlWrapper")  # looked up anew by the next who asks
            agent_class = utils.NixlWrapper  # type: ignore[union-attr]
        else:
            bound = utils or sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector"]
            agent_class = importlib.reload(bound).NixlWrapper
    make_connector(model_config, "ExampleConnector", {"shared_storage_path": "unused"})  # any, without a mode
    return agent_class("rocm", nixl_api.nixl_agent_config())


@contextlib.contextmanager
def rocm_packages() -> Iterator[None]:
    """Offer `rixl` and `nixl_rocm`: each with a class of agents of its own, from the files of the real package."""
    real = sys.modules[nixl_api.nixl_agent.__module__.rpartition(".")[0]]
    names = ("rixl", "nixl_rocm")
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = list(real.__path__)
        sys.modules[name] = package
        sys.modules[f"{name}._bindings"] = nixl_bindings  # its types can be made known to Python once only
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in names and not name.endswith("._api")]:
            del sys.modules[name]
