"""A stand-in for the `mori` package's interface, since tests lack ROCm hardware and RDMA. Nothing of vLLM is in here.

`mori.io` is what vLLM's MoRI-IO connector imports, `mori.ops` what its MoRI expert parallelism imports. Everything is
in one process and in host memory. `mori.orders` is the tests' own: it says when a transfer completes, and how.
"""

from __future__ import annotations

from . import io, ops, orders

__all__ = ["io", "ops", "orders"]
