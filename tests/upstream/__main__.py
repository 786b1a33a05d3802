"""Run upstream's tests on a release's code, stock and patched: `python -m tests.upstream DIRECTORY --release 0.26.0`.

DIRECTORY holds upstream's `tests` folder, of a commit that is close to the release. It is not fetched here, and never
kept in this repository: `git archive COMMIT tests | tar x -C DIRECTORY`. The release's sources and the engine's
environment are those of the release tests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

from vllm_livepatch.tools.lab import environments
from vllm_livepatch.tools.releases import sources
from vllm_livepatch.tools.toml import tomllib

HERE = Path(__file__).parent
FOLDERS = ["tests/v1/core", "tests/v1/kv_connector/unit"]
NEEDED = ["tblib"]
"""What upstream's conftest imports beside what an engine has."""

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
    }
}
"""The configurations that the tests ask the Hugging Face hub for; no weights are read."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="holds upstream's folder `tests`")
    parser.add_argument("--release", required=True, help="of vLLM, on whose code they run")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for each of the two runs")
    parser.add_argument("tests", nargs="*", default=FOLDERS, help="what to run: files or folders below the directory")
    given = parser.parse_intermixed_args()
    given.directory = given.directory.resolve()
    missing = [name for name in given.tests if not (given.directory / name.partition("::")[0]).exists()]
    if missing:
        print(f"{given.directory} has no {', '.join(missing)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as work:
        bundle = Path(work, "bundle")
        made = [sys.executable, "-m", "vllm_livepatch.tools.cli", "generate", "--out", str(bundle)]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        stock = passed(given, Path(work), None)
        patched = passed(given, Path(work), bundle)
    accepted = {test["name"] for test in tomllib.loads((HERE / "accepted.toml").read_text("utf-8"))["test"]}
    lost = sorted(stock - patched)
    unexplained = [name for name in lost if name.partition("[")[0] not in accepted]
    print(f"{given.release}: {len(stock)} pass on stock, {len(patched)} patched; {len(patched - stock)} only patched")
    for name in lost:
        print(f"  {'not accepted' if name in unexplained else 'accepted'}: {name}")
    if not stock:
        print("no test passes on stock: the tests are not of this release, or something that they import is missing")
    return 1 if unexplained or not stock else 0


def passed(given: argparse.Namespace, work: Path, bundle: Path | None) -> set[str]:
    """The names of the tests that pass, on stock or with the bundle."""
    report = work / "report.xml"
    report.unlink(missing_ok=True)
    python = environments.engine()
    path = [HERE, sources.site_packages("vllm", given.release), given.directory, site(python, work)]
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("LIVEPATCH", "PYTHON"))},
        "PYTHONPATH": os.pathsep.join(map(str, path if bundle is None else [bundle, *path])),
        "LIVEPATCH_STATE_DIR": str(work / "state"),
        "HF_HOME": str(hub(work)),
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, "-P", "-m", "pytest", "-q", "-p", "on_cpu", "-p", "no:cacheprovider"]
    options = ["--continue-on-collection-errors", "--ignore-glob=*e2e*", f"--junitxml={report}"]
    subprocess.run(
        [*map(str, command), *options, *given.tests],
        cwd=given.directory,
        env=environ,
        timeout=given.timeout,
        check=False,
    )
    cases = ET.parse(report).getroot().iter("testcase") if report.exists() else ()
    return {named(given.directory, case.attrib) for case in cases if not len(case)}


def named(directory: Path, case: Mapping[str, str]) -> str:
    """A test's name, as pytest takes it: `tests/v1/x.py::Class::name[parameters]`."""
    file, classes = Path(), []
    for part in case["classname"].split("."):
        if file.suffix:
            classes.append(part)
        else:
            file = file / part
            file = file.with_suffix(".py") if (directory / file).with_suffix(".py").is_file() else file
    return "::".join([str(file), *classes, case["name"]])


def site(python: Path, work: Path) -> Path:
    """A folder with what upstream's conftest imports and the engine's environment lacks."""
    folder = work / "site"
    if not folder.exists():
        install = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *NEEDED]
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
