"""mooncake-layerwise on a GPU: the KV of a step that is still queued there leaves when it has been computed, not before.

    python tests/gpu/mooncake_layerwise.py PATIENCE DEVICE chunk|layer [--unawaited] [CASE...]

The cases are those of the release tests (tests/releases/driver/mooncake_layerwise.py and mooncake_layers.py), on the
release that the interpreter has, with Mooncake's real engine over tcp. On `cuda` both caches lie on the GPU, and each
step is queued on a stream of its own, behind a wait, so that the connector is called long before anything is computed:
as in an engine. The driver prints what came as JSON; on `cuda` it must be what it is on `cpu`. With `--unawaited` the
event behind a step is left out, to see that the cases notice. `run.py` makes the bundle and compares.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "releases" / "driver"))
_, PATIENCE, DEVICE, BY, *_words = sys.argv
UNAWAITED = "--unawaited" in _words
CASES = [word for word in _words if word != "--unawaited"]
sys.argv[1:] = [PATIENCE, *CASES]

import torch

_own_index = torch.accelerator.current_device_index

import mooncake_engines as engines
import mooncake_layerwise as chunk
import mooncake_sides as sides

if BY == "layer":
    import mooncake_layers as layers

CYCLES = 100_000_000
"""For which each step, or layer, waits on the GPU: 50 ms or more."""


def on_device() -> None:
    """Make caches on the GPU, and let the connector ask which one it is."""
    torch.accelerator.current_device_index = _own_index
    sides.MODEL.cache = lambda layer, heads: torch.zeros(sides.cache_shape(heads), device=DEVICE)


def queued(own: type[Any]) -> type[Any]:
    """A prefill engine whose steps are queued on a stream of the GPU, behind a wait."""

    class Queued(own):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.stream = torch.cuda.Stream()
            self.early = 0  # steps that were not computed when the connector had been called for them

        def work(self, scheduled: Any) -> Any:
            torch.cuda.synchronize()
            with torch.cuda.stream(self.stream):
                output = super().work(scheduled)
                self.early += not self.stream.query()
            torch.cuda.synchronize()  # an engine waits for the tokens that a step has sampled
            return output

        def forward(self, scheduled: Any) -> None:
            torch.cuda._sleep(CYCLES)
            super().forward(scheduled)

        # By layer

        def layer(self, scheduled: Any, layer_name: str) -> None:
            torch.cuda._sleep(CYCLES)
            super().layer(scheduled, layer_name)

        def attention(self, scheduled: Any, layer_name: str) -> None:
            """A case looks at what has come when it is over."""
            super().attention(scheduled, layer_name)
            self.early += not self.stream.query()
            torch.cuda.synchronize()

    return Queued


def play(model_config: Any) -> dict[str, Any]:
    own = layers.Prefill if BY == "layer" else engines.Prefill
    pair_type, cases = (layers.Pair, layers.CASES) if BY == "layer" else (engines.Pair, chunk.CASES)
    if DEVICE == "cpu":
        kind = own
    else:
        on_device()
        kind = queued(own)
    if BY == "layer":
        layers.Prefill = kind  # its pair makes one
        pair = pair_type(model_config)
        engines.any_size_by_layer()
    else:
        pair = pair_type(model_config, kind)
    if UNAWAITED:
        wrappers: Any
        (wrappers,) = [module for name, module in sys.modules.items() if name.endswith("mooncake_layerwise.wrappers")]
        wrappers.behind = lambda worker: None
    found = engines.played(cases, pair, CASES)
    return {"found": found, "early": getattr(pair.prefill, "early", None), "bytes": pair.prefill.link.bytes}


engines.drive(play)
