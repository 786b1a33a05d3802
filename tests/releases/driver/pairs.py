# mypy: disable-error-code="import-not-found"
"""What comes of each way to ask for an LMCache connector, with the vLLM and the LMCache that are importable.

    pairs.py CONNECTOR[=MODULE_PATH]...

The release's own factory finds the class and makes it, with a configuration of the release's own. What it would build to
reach LMCache's server or engine stands aside, once its real signature was bound: that is as far as a machine without a
server gets.
"""

from __future__ import annotations

from result import print_result, take_stdout

take_stdout()

import contextlib
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any, NoReturn

import lmcache
import real_scheduler as real
import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

FAR = ("LMCacheMPSchedulerAdapter", "LMCacheMPWorkerAdapter", "LMCacheConnectorV1Impl", "LMCacheConnectorLatestImpl")
V1 = "lmcache.integration.vllm.vllm_v1_adapter"


class Reached(Exception):
    """Everything on the way to LMCache's server or engine was there and fitted."""


def stand_aside(module: Any, name: str) -> None:
    """Put in place of a class what binds its signature and goes no further."""
    original = getattr(module, name, None)
    if not inspect.isclass(original):
        return
    signature = inspect.signature(original)

    def reached(*args: Any, **kwargs: Any) -> NoReturn:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from error
        raise Reached

    setattr(module, name, reached)


def make_config(model_config: Any, connector: str, module_path: str | None) -> Any:
    """A configuration that asks for a connector."""
    return VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=real.MAX_MODEL_LEN,
            max_model_len=real.MAX_MODEL_LEN,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            disable_hybrid_kv_cache_manager=True,
        ),
        cache_config=CacheConfig(block_size=real.BLOCK_SIZE, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector, kv_connector_module_path=module_path, kv_role="kv_both"
        ),
        device_config=DeviceConfig(device="cpu"),
    )


def outcome(model_config: Any, connector: str, module_path: str | None) -> dict[str, str | None]:
    """The class, and `works` or what was raised."""
    cls: str | None = None
    try:
        config = make_config(model_config, connector, module_path)
        found = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        cls = f"{found.__module__}:{found.__name__}"
        home = sys.modules[found.__module__]
        with contextlib.suppress(ImportError):
            stand_aside(importlib.import_module(V1), FAR[2])
        for name in FAR:
            stand_aside(home, name)
        spec = FullAttentionSpec(block_size=real.BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        kv_cache_config = KVCacheConfig(num_blocks=real.NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_cache_config)
    except Reached:
        return {"class": cls, "outcome": "works"}
    except Exception as error:
        return {"class": cls, "outcome": f"{type(error).__name__}: {error}"}
    return {"class": cls, "outcome": "works"}


def main() -> None:
    """Print the outcome of each."""
    real.quiet()
    model_config = real.make_model_config(Path.cwd())
    ways = [(name, path or None) for name, _, path in (word.partition("=") for word in sys.argv[1:])]
    outcomes = [outcome(model_config, name, path) for name, path in ways]
    print_result({"outcomes": outcomes}, vllm, lmcache)


if __name__ == "__main__":
    main()
