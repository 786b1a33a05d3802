"""The tables of what ran on a GPU in docs/lab-results.md are made of tests/results/gpu.json and gpu-servers.json."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_livepatch.tools.commands import matrix

ROOT = Path(__file__).parents[2]
COLUMNS = (
    ("--l1-use-lazy", "there and back", ("MLA", "K/V", "K/V, heads first")),
    ("--l1-use-lazy", "behind a step", ("behind a step",)),
    ("--no-l1-use-lazy", "there and back", ("MLA", "K/V", "K/V, heads first")),
    ("--no-l1-use-lazy", "behind a step", ("behind a step",)),
)


def table(kept: Mapping[str, Any]) -> Iterator[str]:
    yield "| LMCache | | " + " | ".join(f"`{l1}`, {what}" for l1, what, _ in COLUMNS) + " |"
    yield "|---|---|---|---|---|---|"
    rows: dict[tuple[Any, ...], dict[tuple[str, str], str]] = defaultdict(dict)
    for run in kept["runs"]:
        label = "with its compiled operations" if run["compiled"] else run["setup"]
        for name, case in run["cases"].items():
            rows[bool(run["compiled"]), run["lmcache"], label][run["l1"], name] = case.replace("wrong", "**wrong**")
    for (_, release, label), cells in sorted(
        rows.items(), key=lambda row: (row[0][0], row[0][1], row[0][2] != "stock")
    ):
        found = [{cells[l1, name] for name in names if (l1, name) in cells} for l1, _, names in COLUMNS]
        assert all(len(outcomes) <= 1 for outcomes in found), (
            "forms that came to different things need rows of their own"
        )
        yield f"| {release} | {label} | " + " | ".join("".join(outcomes) for outcomes in found) + " |"


def test_the_page_has_what_was_kept() -> None:
    kept = json.loads((ROOT / "tests/results/gpu-servers.json").read_text("utf-8"))
    page = (ROOT / "docs/lab-results.md").read_text("utf-8")
    begin, end = "<!-- servers -->\n", "<!-- /servers -->"
    made = "\n".join(table(kept)) + "\n"
    assert page.partition(begin)[2].partition(end)[0] == made, made
    assert f"(`gpu-servers.json: {kept['date']}, revision {kept['revision']}, {kept['machine']}`" in page
    assert f"`{kept['command']}`" in page


def checks(kept: Mapping[str, Any]) -> Iterator[str]:
    """A row a measured figure. Raises AssertionError where a check was wrong, or a device answered other than a CPU."""
    found = {name: check["found"] for name, check in kept["checks"].items()}
    assert not any(check["wrong"] for check in kept["checks"].values())
    moved, pinned, sent = (found[name] for name in ("mp-block-transfer", "rocm-pinned-allocator", "mooncake-layerwise"))
    times = moved["microseconds"].values()
    yield "| patch | figure | found |"
    yield "|---|---|---|"
    yield f"| `mp-block-transfer` | random layouts, all right | {moved['cases']} |"
    yield f"| | a transfer | {spread([time['ours'] for time in times], 0)} us |"
    yield f"| | over one copy of as many bytes | {spread([time['ours'] / time['memcpy'] for time in times])} |"
    yield f"| | over a loop's time | {spread([time['ours'] / time['loop'] for time in times])} |"
    for setup in ("stock", "patched"):
        steps = sorted({state["pinned"] for state in pinned[setup]["grows"]["states"]})
        yield f"| `rocm-pinned-allocator` | {setup}: pinned as it grows | {', '.join(map(str, steps))} MiB |"
    for by, unit in (("chunk", "steps"), ("layer", "layers")):
        yield f"| `mooncake-layerwise` | {unit} still queued when the connector was called | {sent[by]['early']} |"


def spread(values: list[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def test_the_page_has_what_the_checks_found() -> None:
    kept = json.loads((ROOT / "tests/results/gpu.json").read_text("utf-8"))
    made = "\n".join(checks(kept)) + "\n"
    assert matrix.block((ROOT / "docs/lab-results.md").read_text("utf-8"), "checks") == made, made
