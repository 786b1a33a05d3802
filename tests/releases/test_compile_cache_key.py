"""What patches make of traced code is a factor of every compile-cache key, in every pinned release."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import executed
import interpreter
import pytest
import tomli_w
from vllm_livepatch.sitecustomize import fingerprint
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.releases import registry, sources

PATCH = "compile-cache-key"
DRIVER = PATCH.replace("-", "_")
RELEASES = [pin.version for pin in registry.pins("vllm")]
TRACED = "vllm.v1.request:RequestStatus.is_finished"  # the same code in all releases; nothing here calls it


@pytest.fixture(scope="module")
def bundle_of_traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a patch that says of itself that it changes traced code."""
    work = tmp_path_factory.mktemp("traced")
    source = (sources.site_packages("vllm", RELEASES[0]) / "vllm" / "v1" / "request.py").read_text("utf-8")
    code = fingerprint.of_names(source, {TRACED: TRACED.partition(":")[2]})
    facts = {
        "title": "Says that it changes traced code",
        "package": "vllm",
        "targets": [TRACED],
        "traced": True,
        "variant": [{"releases": RELEASES, "code": code}],
    }
    folder = work / "mine" / "says_traced"
    folder.mkdir(parents=True)
    (folder / "patch.toml").write_text(tomli_w.dumps(facts), "utf-8")
    (folder / "wrappers.py").write_text(
        f"def wrappers(livepatch):\n    return {{{TRACED!r}: lambda w, i, a, k: w(*a, **k)}}\n"
    )
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli", "generate", "--out", str(work / "bundle")]
    command += ["--patch", "says-traced", "--patch-dir", str(work / "mine")]
    subprocess.run(command, check=True, capture_output=True)
    return work / "bundle"


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_the_patch_set_is_a_factor_of_the_keys(
    release: str, bundle_of_traced: Path, warm: interpreter.Interpreter, tmp_path: Path
) -> None:
    """Stock's key is made beside it, by the same function without the wrapper: it lacks the factor."""
    found = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle_of_traced, with_stock=True)
    assert list(found["added"]) == ["LIVEPATCH_PATCH_SET"]
    patch_set = found["added"]["LIVEPATCH_PATCH_SET"]
    assert len(patch_set) == 64
    assert found["same"]
    assert (found["artifact has patched"], found["artifact has stock"]) == (True, False)
    assert found["stock model file"] == "some-module-SomeModel.json"
    assert found["model file"] == f"some-module-SomeModel-{patch_set[:16]}.json"
    report = interpreter.reported(tmp_path, PATCH)
    assert (report["state"], report["reason"], report["verdict"]) == ("applied", None, "needed")
    assert report["counters"] == {"keys": 2}


@pytest.mark.parametrize("release", RELEASES)
def test_the_factors_make_both_directories(release: str) -> None:
    """In the source: the way from `compile_factors` to the two directories of compiled artifacts."""
    compilation = sources.site_packages("vllm", release) / "vllm" / "compilation"
    graph = _assignments(compilation / "backends.py", "VllmBackend.__call__")
    assert graph["env_factors"] == ["envs.compile_factors()"]
    assert graph["env_hash"] == ["hash_factors(env_factors)"]
    assert graph["factors"] == ["[env_hash, config_hash, code_hash, compiler_hash]"]
    assert graph["hash_key"] == ["hashlib.sha256(str(factors).encode()).hexdigest()[:10]"]
    assert "os.path.join(envs.VLLM_CACHE_ROOT, 'torch_compile_cache', hash_key)" in graph["cache_dir"]

    of_artifact = "compilation_config_hash_factors" if release == "0.14.1" else "aot_compile_hash_factors"
    assert _assignments(compilation / "caching.py", of_artifact)["env_hash"] == ["hash_factors(envs.compile_factors())"]
    artifact = _assignments(compilation / "decorators.py", None)
    assert artifact["factors"] == [f"{of_artifact}(self.vllm_config)"]
    assert "hashlib.sha256(str(factors).encode()).hexdigest()" in artifact["hash_key"]
    assert any("'torch_aot_compile', hash_key)" in value for value in artifact["cache_dir"])


def _assignments(file: Path, qualname: str | None) -> dict[str, list[str]]:
    """What is assigned to each name in a definition (None: anywhere in the file), as text."""
    tree: ast.AST | None = ast.parse(file.read_text("utf-8"))
    if qualname is not None:
        assert isinstance(tree, ast.Module)
        tree = fingerprint.find(tree, qualname)
    assert tree is not None
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found.setdefault(ast.unparse(target), []).append(ast.unparse(node.value))
    return found


def test_every_pinned_release_is_known() -> None:
    (entry,) = catalogue.choose(catalogue.load(), [PATCH]).values()
    assert [release for variant in entry.patch.variants for release in variant.releases] == RELEASES


def test_where_no_code_is_changed_the_keys_are_those_of_stock(
    warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """With every patch of ours, none of which changes traced code by default here."""
    found = warm.run(DRIVER, {"vllm": RELEASES[-1]}, tmp_path, bundle=bundle)
    assert (found["added"], found["same"], found["artifact has stock"]) == ({}, True, True)
    assert found["model file"] == found["stock model file"] == "some-module-SomeModel.json"
    report = interpreter.reported(tmp_path, PATCH)
    assert (report["state"], report["reason"]) == ("skipped", "optional")
