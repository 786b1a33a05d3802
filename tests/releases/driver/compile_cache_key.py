# mypy: disable-error-code="import-not-found"
"""What a release's compile-cache keys are made of, in a process with a patch of traced code; printed as JSON."""

from __future__ import annotations

from result import print_result, take_stdout

take_stdout()

from types import SimpleNamespace
from typing import Any

from vllm import envs
from vllm.compilation import caching
from vllm.config.utils import hash_factors
from vllm.model_executor.models.registry import _LazyRegisteredModel


def stock_of(function: Any) -> Any:
    """The function without the wrapper that the patch put around it, if it did."""
    return getattr(function, "__wrapped__", function)


def found() -> dict[str, Any]:
    """What the keys hold, beside what stock's do."""
    patched, stock = envs.compile_factors(), stock_of(envs.compile_factors)()
    # The function that makes the key of an ahead-of-time artifact; the configuration is not the question here.
    of_artifact = getattr(caching, "aot_compile_hash_factors", None) or caching.compilation_config_hash_factors
    artifact = of_artifact(SimpleNamespace(compute_hash=lambda: "configuration"))
    model = _LazyRegisteredModel("some.module", "SomeModel")
    return {
        "added": {name: value for name, value in patched.items() if name not in stock},
        "same": {name: value for name, value in patched.items() if name in stock} == stock,
        "artifact has patched": hash_factors(patched) in artifact,
        "artifact has stock": hash_factors(stock) in artifact,
        "model file": model._get_cache_filename(),
        "stock model file": stock_of(_LazyRegisteredModel._get_cache_filename)(model),
    }


if __name__ == "__main__":
    print_result({"vllm": envs.__file__, **found()})
