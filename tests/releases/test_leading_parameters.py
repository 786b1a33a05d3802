"""The parameters that wrappers name are those of their targets, on every release that a patch is for."""

from __future__ import annotations

import pytest
from vllm_livepatch.sitecustomize import installed
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools.bundles import catalogue, leading, whole_texts
from vllm_livepatch.tools.releases import sources

ENTRIES = {name: entry for name, entry in catalogue.load().items() if not entry.patch.diff}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_wrapper_names_its_targets_leading_parameters(name: str) -> None:
    patch = ENTRIES[name].patch
    for variant in (one for one in patch.variants if one.applies and one.verdict != "not-present"):
        release = variant.releases[-1]
        tree = Tree([str(sources.site_packages(patch.package, release))])
        wrappers = leading.made(ENTRIES[name].folder, patch, variant)
        assert not list(leading.misread(wrappers, tree)), release


@pytest.mark.parametrize(("package", "release"), [("vllm", "0.16.0"), ("vllm", "0.33.0"), ("lmcache", "0.5.6")])
def test_whole_texts_say_what_parsing_says(package: str, release: str) -> None:
    """Of each patch, also where another patch's releases have the text too."""
    texts = whole_texts.read(entry.patch for entry in ENTRIES.values())
    tree = Tree([str(sources.site_packages(package, release))])
    for entry in ENTRIES.values():
        if package in entry.patch.packages:
            known = installed.look(entry.patch, tree, texts=texts).code
            assert known == installed.look(entry.patch, tree).code, entry.patch.name
