"""What a person reads: every counter and every reason that asks for something is explained where it is shown."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from vllm_livepatch.sitecustomize.decision import variable
from vllm_livepatch.tools.bundles import catalogue, patch_files
from vllm_livepatch.tools.commands import rendering
from vllm_livepatch.tools.in_bundle.status import Reports

PATCHES = Path(__file__).resolve().parents[2] / "patches"


def printed(*patches: dict[str, Any], width: int = 200) -> str:
    argv = ["vllm", "-c", "import one\nimport two"]
    process = {"pid": 1, "host": "here", "argv": argv, "started": "now", "packages": {}, "heartbeat": None}
    process |= {"version": "0.2.0", "digest": None}
    console = Console(file=io.StringIO(), width=width)
    console.print(
        rendering.status_view(Reports([{**process, "patches": list(patches)}], [True], []), Path("somewhere"))
    )
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def entry(reason: str | None = None, **counters: int) -> dict[str, Any]:
    detail = reason and "said of it"
    return {
        "name": "one",
        "state": "applied",
        "verdict": "needed",
        "reason": reason,
        "detail": detail,
        "counters": counters,
    }


@pytest.mark.parametrize("name", list(catalogue.load()))
def test_each_counter_of_a_patch_is_explained(name: str) -> None:
    code = "\n".join(file.read_text() for file in patch_files.files(PATCHES / name.replace("-", "_")))
    explained = catalogue.load()[name].patch.about.get("counters", {})
    assert set(re.findall(r"\bcount\(\s*\"(\w+)\"", code)) <= explained.keys()
    literals = set(re.findall(r"\"(\w+)\"", code))
    for kind in explained:
        assert kind in literals or (kind.startswith("mode_") and 'f"mode_' in code), kind


def test_show_says_what_is_counted() -> None:
    console = Console(file=io.StringIO(), width=400)
    patch = catalogue.load()["stale-finished-recving"].patch
    rendering.print_page(console, patch)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for kind, meaning in patch.about["counters"].items():
        assert re.search(rf"^{kind} +{re.escape(meaning)}", shown, re.MULTILINE)


@pytest.mark.parametrize("reason", rendering.MEANINGS)
def test_status_explains_a_reason_that_is_there(reason: str) -> None:
    line = f"  {reason}: {rendering.MEANINGS[reason]}\n"
    assert printed(entry(reason), entry(reason)).count(line) == 1
    assert rendering.MEANINGS[reason] not in printed(entry())


def test_the_line_that_is_shown_names_patches_and_a_version_of_each() -> None:
    """The line is an example: a new version of a patch asks for no edit of the page."""
    page = (PATCHES.parent / "docs/status.md").read_text("utf-8")
    (applied,) = re.findall(r"^`vllm-livepatch: .* applied=(\S+) ", page, re.MULTILINE)
    for one in applied.split(","):
        name, _, version = one.partition("@")
        assert 0 < int(version) <= int(catalogue.load()[name].patch.version or 0)


def test_status_says_where_counters_are_explained() -> None:
    assert "vllm-livepatch show PATCH" in printed(entry(parked=1))
    assert "of a patch of your own, with --patch-dir DIR" in printed(entry(parked=1))
    assert "vllm-livepatch show PATCH" not in printed(entry())


def test_names_and_commands_stay_on_a_line() -> None:
    shown = printed({**entry("partly", held_for_receive=1), "name": "nixl-ucx-error-handling"}, width=80)
    assert "nixl-ucx-error-handling" in shown
    assert "  vllm -c import one import two\n" in shown
    for name, one in catalogue.load().items():
        console = Console(file=io.StringIO(), width=80)
        rendering.print_page(console, one.patch)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        for option in one.patch.options:
            for known in (variable(name, option.name), *option.aliases):
                assert re.search(rf"^{known} ", shown, re.MULTILINE), known
        assert all(re.search(rf"^{kind} ", shown, re.MULTILINE) for kind in one.patch.about.get("counters", ()))


def test_list_says_beside_what_is_needed_whether_it_is_on_by_default() -> None:
    """`needed` alone reads as if the patch applied."""
    console = Console(file=io.StringIO(), width=400)
    patches = [entry.patch for entry in catalogue.load().values()]
    console.print(rendering.catalogue_table(patches))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    words = {"needed": "on", "rocm": "rocm", "off": "off", "traced": "off"}
    assert {patch.auto for patch in patches} == words.keys()
    for patch in patches:
        row = rf"^{patch.name} +{re.escape(patch.about['fault'])} .* {words[patch.auto]} *$"
        assert re.search(row, shown, re.M), patch.name
