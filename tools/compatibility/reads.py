"""Which modules a check of vLLM and LMCache together reads.

`python -m vllm_livepatch.tools.compatibility.reads` writes the list.

It follows imports from module to module, and each step waits for the registry. With the list all are asked for at once.
A module that a release lacks is left out, one that the list lacks is asked for when it is met: only time depends on it.
"""

from __future__ import annotations

from pathlib import Path

from vllm_livepatch.tools.compatibility import pairs
from vllm_livepatch.tools.releases import published, registry, releases_file

FILE = Path(__file__).with_name("reads.txt")


def modules() -> list[str]:
    """Of both packages."""
    return FILE.read_text(encoding="utf-8").split()


def newest() -> list[str]:
    """What is read of the newest pinned releases. Raises SourcesError."""
    vllm, lmcache = (published.tree(package, registry.pins(package)[-1].version) for package in ("vllm", "lmcache"))
    return sorted(pairs.modules_read(vllm, lmcache))


def write() -> None:
    """Raises SourcesError, UserError."""
    releases_file.write(FILE, "".join(f"{module}\n" for module in newest()))


if __name__ == "__main__":
    write()
