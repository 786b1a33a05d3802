"""What docs/recipes.md has of each patch: what it replaces in a recipe that edits site-packages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from vllm_livepatch.sitecustomize.decision import Patch
from vllm_livepatch.tools.commands import matrix, rendering
from vllm_livepatch.tools.in_bundle.grouping import sections

_THREAD = re.compile(r"\b(?:vllm|LMCache) PR#\d+")


def table(patches: Sequence[Patch], spans: Callable[[Patch], str], link: Callable[[str], str]) -> str:
    """The block of the page. `spans` gives the releases that need a patch, `link` a thread's link."""
    lines = ["| a recipe has | patch | needed on | by default | delete |", "|---|---|---|---|---|"]
    for _, some in sections(patches, lambda patch: patch):
        for patch in some:
            for one in patch.about.get("replaces", ()):
                what = _THREAD.sub(lambda thread: link(thread[0]), one["what"])
                needed = f"{matrix.NAMES.get(patch.package, patch.package)} {spans(patch)}"
                default = rendering.DEFAULTS.get(patch.auto, "on")
                name = f"[`{patch.name}`](patches/{patch.name}.md)"
                lines.append(f"| {what} | {name} | {needed} | {default} | {one['delete']} |")
    return "\n".join(lines)
