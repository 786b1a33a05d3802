"""The modules of a pair of releases are asked for at once."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from vllm_livepatch.tools.compatibility import check, reads
from vllm_livepatch.tools.releases import published


class Tree:
    """A release that notes what is asked for ahead."""

    asked: dict[str, set[str]]

    def __init__(self, package: str) -> None:
        self.package, self.version, self.tops = package, "1.0", frozenset([package])

    def prefetch(self, modules: Iterable[str]) -> None:
        self.asked[self.package] = set(modules)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    monkeypatch.setattr(Tree, "asked", {}, raising=False)
    monkeypatch.setattr(published.PublishedReleases, "tree", lambda self, package, version: Tree(package))
    return Tree.asked


def test_what_a_check_of_a_pair_reads_is_asked_for_ahead(asked: dict[str, set[str]]) -> None:
    check.released(["vllm==1.0", "lmcache==1.0"], [], [])
    assert asked == {package: set(reads.modules()) for package in ("vllm", "lmcache")}
    assert {"lmcache.integration.vllm.lmcache_mp_connector"} < set(reads.modules())


def test_a_release_alone_is_no_pair(asked: dict[str, set[str]]) -> None:
    check.released(["vllm==1.0"], [], [])
    assert asked == {"vllm": set()}
