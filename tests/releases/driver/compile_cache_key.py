# mypy: disable-error-code="import-not-found"
"""What a release's compile-cache keys are made of, in a process with a patch of traced code; printed as JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace

from vllm import envs
from vllm.compilation import caching
from vllm.config.utils import hash_factors
from vllm.model_executor.models.registry import _LazyRegisteredModel

patched, stock = envs.compile_factors(), envs.compile_factors.__wrapped__()
# The function that makes the key of an ahead-of-time artifact; the configuration is not the question here.
of_artifact = getattr(caching, "aot_compile_hash_factors", None) or caching.compilation_config_hash_factors
artifact = of_artifact(SimpleNamespace(compute_hash=lambda: "configuration"))
model = _LazyRegisteredModel("some.module", "SomeModel")
result = {
    "vllm": envs.__file__,
    "added": {name: value for name, value in patched.items() if name not in stock},
    "same": {name: value for name, value in patched.items() if name in stock} == stock,
    "artifact has patched": hash_factors(patched) in artifact,
    "artifact has stock": hash_factors(stock) in artifact,
    "model file": model._get_cache_filename(),
    "stock model file": _LazyRegisteredModel._get_cache_filename.__wrapped__(model),
}
print(json.dumps(result))
