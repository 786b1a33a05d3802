"""Real expert parallelism over MoRI with FP8 on a CPU: what AITER computes on, and how right the result is.

`mori` and `aiter` are the device's libraries: stand-ins have their places, which quantise
for real and keep a record of it. Their kernels are not shown.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import result

result.stand_in()

import mori_ep_fp8 as driver  # noqa: E402

SCHEMES = {
    "none": "unquantised weights",
    "tensor": "FP8 weights of one scale an expert",
    "token": "FP8 weights of one scale a row",
    "block": "FP8 weights of one scale a block",
}
DISTANCE = 0.06
"""Of a right result, relative to that with unquantised activations: FP8 has 3 bits of mantissa."""
ONE_ROUNDING = 1
"""How far a value that was rounded to FP8 once may be from the token's (see the driver's `away_by`)."""


def cases() -> dict[str, str | None]:
    """Each scheme of weights over MoRI, and what is to stay as it is elsewhere."""
    if not driver.BACKENDS:
        raise result.NotBuilt("this code has no expert parallelism over MoRI")
    played = driver.driven()
    for name, run in played["spoilt"].items():
        if run["outcome"] == "runs" and run["away"] <= ONE_ROUNDING:
            raise result.NotBuilt(f"it is not seen that values were quantised twice, {name.replace('_', ' ')}")
    found = {f"experts with {SCHEMES[name]} run": wrong(run) for name, run in played["schemes"].items()}
    for name, run in played["other_backends"].items():
        found[f"experts with {SCHEMES['block']} run over {name}"] = wrong(run)
    found["over another backend AITER's experts ask for unquantised inputs"] = (
        None if played["elsewhere"] else "they do not ask"
    )
    built = played["layer"]
    found["no layer is built over MoRI without AITER"] = None if built.startswith("AssertionError") else built
    return found


def wrong(run: dict[str, Any]) -> str | None:
    """What is wrong with one layer's run: it is to quantise each value once at most, and to be right."""
    if run["outcome"] != "runs":
        return str(run["outcome"])
    quantised = run["quantised"]
    if len(quantised) > 1 or str(driver.FP8) in quantised:
        return f"values are quantised {len(quantised)} times: of {', '.join(quantised)}"
    if run["away"] > (ONE_ROUNDING if quantised else 0):
        return f"what AITER computes on is {run['away']:.1f} roundings away from the tokens"
    return None if run["distance"] < DISTANCE else f"the result is {run['distance']:.0%} away from the right one"
