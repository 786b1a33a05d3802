"""What is kept of a run: JSON, and what was completed over time as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

_COLOURS = {"stock": "#c0392b", "patched": "#1f6fb2"}
_FURTHER = ("#d68910", "#7d3c98", "#717d7e")


def colours(setups: Iterable[str]) -> dict[str, str]:
    """A colour for each setup."""
    further = cycle(_FURTHER)
    return {setup: _COLOURS.get(setup) or next(further) for setup in setups}


def completions(result: dict[str, Any], file: Path) -> None:
    """Completions, added up over the seconds of load, a line a setup, as a PNG."""
    setups: dict[str, dict[str, Any]] = result["setups"]
    from matplotlib.figure import Figure  # here: it takes a second to import

    figure = Figure(figsize=(9, 4.5), dpi=120)
    axes = figure.subplots()
    end = max(len(setup["per_second"]["completed"]) for setup in setups.values())
    shown = colours(setups)
    for name, setup in setups.items():
        counts = [0, *accumulate(setup["per_second"]["completed"])]
        axes.plot(range(len(counts)), counts, color=shown[name], label=name, linewidth=2, zorder=3)
        if not setup["survived"]:
            died = (setup["hang_ups_from"] or 0.0) + setup["died_after"]
            axes.plot([died, end], [counts[-1]] * 2, color=shown[name], linestyle="--", linewidth=1, zorder=2)
            axes.plot([died], [counts[-1]], "x", color=shown[name], markersize=11, markeredgewidth=3, zorder=4)
            axes.annotate(
                f"{name}: {setup['death'].split()[0]} dead, {counts[-1]} completions and no more",
                (end, counts[-1]),
                xytext=(-6, 5),
                textcoords="offset points",
                color=shown[name],
                ha="right",
            )
    if result["disconnects"]:
        since = min(setup["hang_ups_from"] or 0.0 for setup in setups.values())
        axes.axvline(since, color="#777777", linestyle=":", linewidth=1.2)
        top = axes.get_xaxis_transform()
        axes.text(since, 0.98, "  clients begin to hang up", transform=top, color="#777777", va="top")
    axes.set_xlabel("seconds of load")
    axes.set_ylabel("requests completed")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(loc="center right", bbox_to_anchor=(0.99, 0.4), frameon=False)
    axes.set_title(f"{result['topology']}, vLLM {result['vllm']} + LMCache {result['lmcache']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(file)


def write(result: dict[str, Any], file: Path) -> None:
    """The whole result, for scripts."""
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
