"""The table of LMCache servers without compiled operations in docs/lab-gpu.md is made of tests/results/gpu-servers.json."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COLUMNS = (
    ("--l1-use-lazy", "there and back", ("MLA", "K/V", "K/V, heads first")),
    ("--l1-use-lazy", "behind a step", ("behind a step",)),
    ("--no-l1-use-lazy", "there and back", ("MLA", "K/V", "K/V, heads first")),
    ("--no-l1-use-lazy", "behind a step", ("behind a step",)),
)


def came_to(case: Mapping[str, Any]) -> str:
    if "error" in case:
        return "no cache can be registered"
    if not case["hit"]:
        return "nothing is stored"
    return "right" if case["same"] and case.get("untouched", True) and not case["errors"] else "**wrong**"


def table(kept: Mapping[str, Any]) -> Iterator[str]:
    yield "| LMCache | | " + " | ".join(f"`{l1}`, {what}" for l1, what, _ in COLUMNS) + " |"
    yield "|---|---|---|---|---|---|"
    rows: dict[tuple[Any, ...], dict[tuple[str, str], str]] = defaultdict(dict)
    for run in kept["runs"]:
        label = "with its compiled operations" if run["compiled"] else run["setup"]
        for name, case in run["cases"].items():
            rows[bool(run["compiled"]), run["lmcache"], label][run["l1"], name] = came_to(case)
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
    page = (ROOT / "docs/lab-gpu.md").read_text("utf-8")
    begin, end = "<!-- servers -->\n", "<!-- /servers -->"
    made = "\n".join(table(kept)) + "\n"
    assert page.partition(begin)[2].partition(end)[0] == made, made
    assert f"(`gpu-servers.json: {kept['date']}, revision {kept['revision']}, {kept['machine']}`" in page
    assert f"`{kept['command']}`" in page
