"""The figures in the pages' sentences and hand-made tables: each is made of a result that is kept.

A page's function in sentences.py makes its sentences from what is kept; where one is not in the page, the failure says
what to write there. The tables between markers are held by test_bench_figures.py and test_lab_figures.py; those of the
patches' folders by test_documentation.py, and what they have is no measurement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from .kept_results import ROOT
from .sentences import HELD

MADE = {"compatibility.md", "mutation.md"}
"""Pages of which every figure is written by a command."""
PAGES = [
    ROOT / "README.md",
    *sorted(file for file in (ROOT / "docs").glob("*.md") if file.name not in MADE),
]


def prose(page: str) -> str:
    """A page in one line, without its code blocks and what stands between markers."""
    text = (ROOT / page).read_text("utf-8").partition("\n## What the worlds came to")[0]
    text = re.sub(r"<!-- ([\w-]+)[^>]*-->.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```|^ {4}\S[^\n]*", "", text, flags=re.DOTALL | re.MULTILINE)
    return " ".join(text.split())


@pytest.mark.parametrize("page", HELD)
def test_a_pages_sentences_say_what_is_kept(page: str) -> None:
    text = prose(page)
    missing = [made for made in HELD[page]() if made.strip() not in text]
    assert not missing, "\n".join([f"{page} should say:", *missing])


FIGURE = re.compile(
    r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?:%|x|"
    r"\s(?:us|ms|s|seconds|minutes|hours|%|[KMG]i?B(?:/s)?|times|cores|steps|answers|requests|blocks|hang-ups|worlds|runs"
    r"|of \d+))(?!\w)"
)
ALLOWED: dict[str, dict[str, set[str]]] = {
    "upstream's defaults and time-outs": {
        "docs/connector-completions.md": {"30 s", "60 s", "480 s", "600 s", "30 minutes"},
        "docs/field-reports.md": {"30 s", "300 s", "600 s"},
        "docs/idle-stepping.md": {"30 s"},
        "docs/kv-block-reaper.md": {"30 s", "60 s", "480 s"},
        "docs/lab.md": {"300 s"},
        "docs/lab-lease.md": {"30 s"},
        "docs/lab-lmcache-lost.md": {"2 s", "10 s", "30 s", "300 s"},
        "docs/lab-mooncake.md": {"480 s"},
        "docs/lab-prefill-decode.md": {"30 s", "300 s"},
        "docs/mooncake.md": {"60 s", "480 s", "540 s"},
        "docs/never-wrong.md": {"30 s", "60 s", "480 s", "540 s", "600 s"},
        "docs/nixl-push-failures.md": {"5 s", "30 s", "480 s"},
        "docs/troubleshooting.md": {"480 s"},
    },
    "constants and options of ours, and sums of those": {
        "docs/block-transfer.md": {"5 ms"},
        "docs/idle-stepping.md": {"5 ms", "20 ms"},
        "docs/kv-block-reaper.md": {"85 s", "600 s", "610 s", "3600 s"},
        "docs/lab.md": {"60 s"},
        "docs/lab-lmcache-lost.md": {"3 s"},
        "docs/never-wrong.md": {"16 MiB"},
        "docs/architecture.md": {"2 s"},
        "docs/nixl-lease-guard.md": {"512 KiB"},
        "docs/status.md": {"30 seconds"},
    },
    "what a run, a test or a benchmark is told": {
        "docs/benchmarks.md": {"50 ms"},
        "docs/block-transfer.md": {"9 MB"},
        "docs/chunked-load.md": {"100 blocks"},
        "docs/idle-stepping.md": {"1 ms", "2 ms"},
        "docs/lab.md": {"10 minutes"},
        "docs/lab-alive-and-right.md": {"160 of 32"},
        "docs/layerwise.md": {"100 MB/s", "400 MB/s", "16 of 256", "100 %"},
        "docs/load-deadlocks.md": {"85 blocks", "100 blocks"},
        "docs/mori.md": {"6 %", "1 MiB"},
        "docs/never-wrong.md": {"256 MiB"},
        "docs/rocm-pinned-allocator.md": {"64 MiB", "1 GiB", "16 GB"},
    },
    "what its authors, or users of it, report": {
        "docs/layerwise.md": {"18 %"},
    },
}
"""Figures that are not measured, by the reason: a page may say them anywhere."""


def loose(text: str, made: Iterable[str]) -> dict[str, str]:
    """Figures with a unit in a text, outside of code and of what is made of kept results; with what stands around."""
    spans = [found.span() for one in made for found in re.finditer(re.escape(one.strip()), text)]
    plain = re.sub(r"`[^`]*`", lambda code: "`" * len(code[0]), text)
    return {
        found[0]: plain[max(0, found.start() - 60) : found.end() + 30]
        for found in FIGURE.finditer(plain)
        if not any(begin <= found.start() and found.end() <= end for begin, end in spans)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_figure_in_the_prose_is_made_of_what_is_kept_or_no_measurement(page: Path) -> None:
    """By digits and units: a figure in words, or a bare number, is not seen. One that is measured goes into HELD."""
    name = page.relative_to(ROOT).as_posix()
    found = loose(prose(name), HELD.get(name, lambda: iter(()))())
    allowed = set().union(*(pages.get(name, set()) for pages in ALLOWED.values()))
    assert {figure: around for figure, around in found.items() if figure not in allowed} == {}
    assert allowed - found.keys() == set(), "allowed, and not there any more"


def test_what_counts_as_a_figure() -> None:
    text = "It takes 1.5 ms and 3 times 12%, of vLLM 0.32.0 (PR#4), `9 s` or -4 %. Held: 8 of 32 got 20 MB/s."
    assert list(loose(text, ())) == ["1.5 ms", "3 times", "12%", "8 of 32", "20 MB/s"]
    assert list(loose(text, ["Held: 8 of 32 got 20 MB/s."])) == ["1.5 ms", "3 times", "12%"]
