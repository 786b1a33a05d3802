"""The whole texts of the modules that our patches name, by digest: what a release has is not parsed in each process.

`python -m vllm_livepatch.tools.bundles.whole_texts` writes the list. A text that it lacks is parsed: only time depends
on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache as once
from pathlib import Path

from vllm_livepatch.sitecustomize import cache
from vllm_livepatch.sitecustomize.decision import Patch, module_of
from vllm_livepatch.sitecustomize.installed import Texts
from vllm_livepatch.tools import threads
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.releases import published, registry, releases_file
from vllm_livepatch.tools.releases.registry import Pin
from vllm_livepatch.tools.toml import tomllib

FILE = Path(__file__).with_name("whole_texts.toml")


def read(patches: Iterable[Patch]) -> Texts:
    """By module that one of the patches names, and by the digest of its text: the releases that have it."""
    named = {module_of(name) for patch in patches for name in patch.names}
    return {module: digests for module, digests in _of_file(FILE.stat().st_mtime_ns).items() if module in named}


@once
def _of_file(written: int) -> Texts:
    """The list as it was written at this time."""
    texts: Texts = tomllib.loads(FILE.read_text("utf-8"))
    return texts


def of_pins(patches: Iterable[Patch]) -> Texts:
    """The same, looked up in every pinned release. Raises SourcesError."""
    modules = sorted({module_of(name) for patch in patches for name in patch.names})
    pins = [pin for package in ("vllm", "lmcache") for pin in registry.all_pins(package)]

    def digests(pin: Pin) -> dict[str, str]:
        tree = published.tree(pin.package, pin.version)
        own = [module for module in modules if module.partition(".")[0] == pin.package]
        tree.prefetch(own)
        return {module: cache.text_digest(text) for module in own if (text := tree.source(module)) is not None}

    found: dict[str, dict[str, list[str]]] = {}
    for pin, of in zip(pins, threads.each(digests, pins), strict=True):
        for module, digest in of.items():
            found.setdefault(module, {}).setdefault(digest, []).append(pin.version)
    return dict(sorted(found.items()))


def write() -> None:
    """Raises SourcesError, UserError."""
    texts = of_pins(entry.patch for entry in catalogue.load().values() if not entry.patch.diff)
    tables = []
    for module, digests in texts.items():
        listed = (f'"{digest}" = [{", ".join(map(_quoted, of))}]' for digest, of in digests.items())
        tables.append("\n".join([f'["{module}"]', *listed, ""]))
    releases_file.write(FILE, "\n".join(tables))


def _quoted(release: str) -> str:
    return f'"{release}"'


if __name__ == "__main__":
    write()
