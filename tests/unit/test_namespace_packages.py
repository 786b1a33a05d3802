"""Modules below packages without an `__init__`, whose parents nobody has imported."""

from __future__ import annotations

from pathlib import Path

from vllm_livepatch.sitecustomize.installed import Tree


def test_a_module_below_a_namespace_package_inside_a_package(tmp_path: Path) -> None:
    """As `lmcache.v1.distributed.memory_manager.l1_memory_manager`."""
    inner = tmp_path / "outermost" / "v1" / "distributed" / "deeper"
    inner.mkdir(parents=True)
    for package in (tmp_path / "outermost", tmp_path / "outermost" / "v1"):
        (package / "__init__.py").write_text("")
    (inner / "module.py").write_text("found = True\n")
    tree = Tree([str(tmp_path)])
    assert tree.source("outermost.v1.distributed.deeper.module") == "found = True\n"
    assert tree.source("outermost.v1.distributed.deeper.other") is None
    assert tree.source("outermost.v1.distributed.deeper") is None
