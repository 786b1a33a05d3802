"""What a run showed: a table, a picture and JSON."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
from rich import box
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot  # (the backend is chosen first: there may be no display)

_KINDS = ("recv_unknown", "recv_not_waiting", "send_unknown", "send_not_finished", "send_already_freed")
_COLOURS = {"stock": "#c0392b", "patched": "#1f6fb2"}


def table(result: dict[str, Any]) -> Table:
    """Stock beside patched, a row a figure."""
    sides = [result["stock"], result["patched"]]
    load = result["load"]
    built = Table(
        title=f"vLLM {result['vllm']} + LMCache {result['lmcache']}: {load['clients']} clients, "
        f"{load['disconnect_share']:.0%} hang up within {load['disconnect_within']} s",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    built.add_column("")
    for title in ("stock", "patched"):
        built.add_column(title, justify="right")

    def row(title: str, *values: Any) -> None:
        built.add_row(title, *("-" if value is None else str(value) for value in values))

    row("survived", *(_survived(side) for side in sides))
    for kind in ("completed", "disconnected", "failed"):
        row(kind, *(side[kind] for side in sides))
    row("outputs that differ from the warm run's", *(side["mismatches"] for side in sides))
    row("tokens loaded from LMCache", *(side.get("loaded_tokens") for side in sides))
    dropped = result["patched"].get("stale_ids", {})
    for kind in [*_KINDS, *sorted(set(dropped) - set(_KINDS))]:
        row(f"stale ids: {kind}", None, dropped.get(kind, 0))
    row("KV usage at the end", *(_percent(side.get("kv_usage_at_end")) for side in sides))
    return built


def show(result: dict[str, Any], console: Console) -> None:
    """The table and the conditions, on ``console`` (plain where it is no terminal)."""
    console.print(table(result))
    for check in result["checks"]:
        console.print(f"{'ok    ' if check['passed'] else 'FAILED'}  {check['check']}", highlight=False)


def picture(result: dict[str, Any], file: Path) -> None:
    """Completions, added up over time, stock and patched, as a PNG."""
    figure, axes = pyplot.subplots(figsize=(9, 4.5), dpi=120)
    storm_from = result["patched"]["hang_ups_from"] or 0.0
    end = max(len(result[side]["per_second"]["completed"]) for side in _COLOURS)
    for side, colour in _COLOURS.items():
        counts = [0, *accumulate(result[side]["per_second"]["completed"])]
        axes.plot(range(len(counts)), counts, color=colour, label=side, linewidth=2, zorder=3)
        if not result[side]["survived"]:
            died = (result[side]["hang_ups_from"] or 0.0) + (result[side]["died_after"] or 0.0)
            axes.plot([died, end], [counts[-1]] * 2, color=colour, linestyle="--", linewidth=1, zorder=2)
            axes.plot([died], [counts[-1]], "x", color=colour, markersize=11, markeredgewidth=3, zorder=4)
            axes.annotate(
                f"{side}: engine core dead, {counts[-1]} completions and no more",
                (end, counts[-1]),
                xytext=(-6, 5),
                textcoords="offset points",
                color=colour,
                ha="right",
            )
    axes.axvline(storm_from, color="#777777", linestyle=":", linewidth=1.2)
    axes.text(
        storm_from, 0.98, "  clients begin to hang up", transform=axes.get_xaxis_transform(), color="#777777", va="top"
    )
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests completed")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(loc="center right", bbox_to_anchor=(0.99, 0.4), frameon=False)
    axes.set_title(
        f"vLLM {result['vllm']} + LMCache {result['lmcache']}: {result['load']['clients']} clients, "
        f"{result['load']['disconnect_share']:.0%} hang up within {result['load']['disconnect_within']} s",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def write(result: dict[str, Any], file: Path) -> None:
    """The whole result, for scripts."""
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _survived(side: dict[str, Any]) -> str:
    if side["survived"]:
        return "yes"
    after = side.get("died_after")
    return "no" if after is None else f"no: dead after {after:.1f} s"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"
