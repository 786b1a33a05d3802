"""How a release's own Python operation reads addresses when the cache is on a device: which device it takes each to be on.

There is no device: what would make a tensor of memory on one is stood in for by one that notes what it is asked for.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import print_result, take_stdout

take_stdout()

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

import native_doubles
import torch

native_doubles.install()

PLACES = (
    "lmcache.v1.platform.torch_ops.mp_mem_kernels",
    "lmcache.v1.platform.torch_ops",
    "lmcache.python_ops_fallback",
)


def operation() -> Any:
    """The module that has the release's operation."""
    for name in PLACES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(module, "multi_layer_block_kv_transfer"):
            return module
    raise SystemExit("this release has no Python operation")


def main() -> None:
    """One chunk of two blocks to the cache, and from it."""
    import lmcache

    module = operation()
    importlib.import_module("lmcache.v1.multiprocess.native_completion")  # the patch decides when this is imported
    asked: list[tuple[str, str]] = []

    def noted(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: Any = None) -> torch.Tensor:
        asked.append((names.get(address, "?"), str(device)))
        return torch.zeros(shape, dtype=dtype)

    module._tensor_from_ptr = noted
    names = {4096: "cache", 8192: "chunk"}
    formats = getattr(module, "EngineKVFormat", None) or module.GPUKVFormat
    desc = SimpleNamespace(kv_size=1, nl=1, nb=4, bs=2, nh=1, hs=8, element_size=2, block_stride_elems=0)
    for direction in (module.TransferDirection.D2H, module.TransferDirection.H2D):
        # Where the compiled module's enumerations are stood in for, the format may be taken for another one.
        with contextlib.suppress(RuntimeError):
            module.multi_layer_block_kv_transfer(
                torch.tensor([4096]),
                [8192],
                torch.tensor([2, 1]),
                torch.device("cuda:0"),
                direction,
                desc,
                4,
                formats.NL_X_NB_BS_HS,
                0,
            )
    print_result({"asked": asked}, lmcache)


if __name__ == "__main__":
    main()
