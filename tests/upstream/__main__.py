"""Run a release's own tests on its code, stock and patched: `python -m tests.upstream --release 0.33.0`.

The tests are those of the release's source archive in the package registry: they are fetched for each run, and never
kept in this repository. The release's sources, of vLLM, and the engine's environment are those of the release tests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection
from pathlib import Path

from vllm_livepatch.tools.lab import environments
from vllm_livepatch.tools.lab.options import VLLM
from vllm_livepatch.tools.releases import archives, registry, sources
from vllm_livepatch.tools.releases.registry import Wheel
from vllm_livepatch.tools.toml import tomllib

HERE = Path(__file__).parent
TESTS = {
    "vllm": [
        "tests/v1/core/test_*scheduler.py",
        "tests/v1/core/test_deferred_block_free.py",
        "tests/v1/core/test_prefix_caching.py",
        "tests/v1/kv_connector/unit",
    ],
    "lmcache": [
        "tests/v1/lookup_client",
        "tests/v1/multiprocess",
        "tests/v1/storage_backend/test_local_*",
        "tests/v1/storage_backend/test_storage_manager*",
        "tests/v1/test_*",
    ],
}
"""What is run, of each package, by what the patches touch; a release need not have all."""

LEFT_OUT = [
    "e2e",
    "umbp",
    "hf3fs",
    "flexkv",
    "hisparse",
    "mooncake_store",
    "mapping",
    "geometry",
    "hetero",
    "cuda",
    "gpu",
]
"""What no patch touches, or what needs models or a GPU, by a part of the file's name."""

WITH_RAY = "tests/v1/kv_connector/unit/test_nixl_connector.py::test_abort_timeout_on_prefiller"
"""It starts Ray and a model, in a file whose other tests need neither."""

NEEDED = ["orjson", "pytest-asyncio", "pytest-timeout", "tblib"]
"""What upstream's tests import beside what an engine has, and what ends a test that hangs."""

MODELS = {
    "facebook/opt-125m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 768,
        "do_layer_norm_before": True,
        "torch_dtype": "float16",
    },
}
"""The configurations that the tests ask the Hugging Face hub for; no weights are read."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__.partition("\n")[0])
    parser.add_argument("--package", choices=TESTS, default="vllm", help="whose tests and code, vllm by default")
    parser.add_argument("--release", required=True, help="of the package")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one test")
    parser.add_argument("tests", nargs="*", help="what to run: files or folders of the source archive")
    given = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as work:
        given.work, bundle = Path(work), Path(work, "bundle")
        fetch(given)
        made = [sys.executable, "-m", "vllm_livepatch.tools.cli", "generate", "--out", str(bundle)]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        passed, others = played(given, given.tests or there(given), bundle)
        stock, _ = played(given, others, None)
        # A test that waits may fail on a machine that stops for a second: what fails twice has failed.
        lost = sorted(stock - played(given, stock, bundle)[0])
    accepted = {test["name"] for test in tomllib.loads((HERE / "accepted.toml").read_text("utf-8"))["test"]}
    unexplained = [name for name in lost if name.partition("[")[0] not in accepted]
    passes = len(passed | stock) - len(lost)
    print(f"{given.package} {given.release}: {passes} pass patched, {len(lost)} on stock alone")
    for name in lost:
        print(f"  {'not accepted' if name in unexplained else 'accepted'}: {name}")
    if not passes:
        print("no test passes: something that the tests import is missing, or the process ended before its tests did")
    return 1 if unexplained or not passes else 0


def there(given: argparse.Namespace) -> set[str]:
    """What the release has of its package's `TESTS`."""
    release = given.work / "release"
    return {str(path.relative_to(release)) for pattern in TESTS[given.package] for path in release.glob(pattern)}


def fetch(given: argparse.Namespace) -> None:
    """Put the release's tests into `release` of the work folder, out of its source archive."""

    def unpack(_: Wheel, file: Path) -> dict[str, bytes]:
        with tarfile.open(file) as archive:
            files = [(member.name.partition("/")[2], archive.extractfile(member)) for member in archive]
            wanted = ("tests/", "examples/", "pyproject.toml")
            return {name: opened.read() for name, opened in files if opened and name.startswith(wanted)}

    with registry.new_session() as session:
        offered = [file for file in registry.files(given.package, session) if file.filename.endswith(".tar.gz")]
        found = registry.find_file(given.package, given.release, offered)
        for name, content in archives.whole(found, session, print, unpack)[1].items():
            path = given.work / "release" / sources.safe(name, found)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def played(given: argparse.Namespace, tests: Collection[str], bundle: Path | None) -> tuple[set[str], set[str]]:
    """The names of the tests that pass, on stock or with the bundle, and of those that do not."""
    if not tests:
        return set(), set()
    report = given.work / "report.json"
    report.write_text('{"passed": [], "others": []}', encoding="utf-8")
    python = environments.engine()
    code = [sources.site_packages("vllm", given.release)] if given.package == "vllm" else []
    path = [HERE, site(given, python), *code, given.work / "release", environments.ray(python)]
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("LIVEPATCH", "PYTHON"))},
        **environments.vllm_cache(given.release if given.package == "vllm" else VLLM),
        "PYTHONPATH": os.pathsep.join(map(str, path if bundle is None else [bundle, *path])),
        "PYTHONHASHSEED": "0",
        "LIVEPATCH_STATE_DIR": str(given.work / "state"),
        "LMCACHE_TRACK_USAGE": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HOME": str(hub(given.work)),
        "HF_HUB_OFFLINE": "1",
        "UPSTREAM_REPORT": str(report),
    }
    command = [str(python), "-P", "-m", "pytest", "-q", "-p", "on_cpu", "-p", "no:cacheprovider", "--tb=line"]
    ignored = [f"--ignore-glob=*/test_*{part}*.py" for part in LEFT_OUT]
    options = ["--continue-on-collection-errors", f"--timeout={given.timeout}", *ignored, "--deselect", WITH_RAY]
    subprocess.run([*command, *options, *sorted(tests)], cwd=given.work / "release", env=environ, check=False)
    found = json.loads(report.read_text("utf-8"))
    return set(found["passed"]), set(found["others"])


def site(given: argparse.Namespace, python: Path) -> Path:
    """A folder with what the tests import and the engine's environment lacks: LMCache's whole release, too."""
    folder: Path = given.work / "site"
    if not folder.exists():
        wanted = [*NEEDED, *([f"lmcache=={given.release}"] if given.package == "lmcache" else [])]
        install = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *wanted]
        subprocess.run(install, check=True)
    return folder


def hub(work: Path) -> Path:
    """A cache of the Hugging Face hub with the configurations of `MODELS`."""
    for name, configuration in MODELS.items():
        folder = work / "hub" / f"models--{name.replace('/', '--')}"
        (folder / "snapshots" / "0").mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text("0", encoding="utf-8")
        (folder / "snapshots" / "0" / "config.json").write_text(json.dumps(configuration), encoding="utf-8")
    return work


if __name__ == "__main__":
    sys.exit(main())
