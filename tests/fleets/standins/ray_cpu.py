"""A stand-in, for vLLM on a machine without an accelerator: its CPU platform, which Ray's executor takes for a GPU's.

vLLM's own has no name for Ray to schedule by, and the executor refuses it. `ray start --num-gpus` gives each node one
of a resource that is called so and is nothing; all else is vLLM's and Ray's own.
"""

from vllm.platforms.cpu import CpuPlatform


class RayCpu(CpuPlatform):
    ray_device_key = "GPU"


def register() -> str:
    """vLLM's entry point for platforms."""
    return f"{__name__}.RayCpu"
