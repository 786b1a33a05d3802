"""What runs on a machine with a GPU, one after the other, with and without a bundle; the results as one JSON file.

    python tests/gpu/run.py --bundle DIR --write FILE [--python PATH] [--lmcache DIR]... [NAME...]

For an interpreter with torch for CUDA, LMCache and (for `mooncake-layerwise`) vLLM and Mooncake; `--python` names it
where this one is another. The bundle is one that `vllm-livepatch generate` made. `mp-block-server` runs the releases of
LMCache that are unpacked in the folders that `--lmcache` names, without their compiled operations (c_ops or cuda_ops),
and, to compare, also one that has them.
None of it is among the tests that run everywhere: those have no GPU. The exit code is 1 where something is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from packaging.version import Version
from vllm_livepatch.tools.measured import measured_on

HERE = Path(__file__).resolve().parent
SECONDS = 240.0
PINNED = {"LIVEPATCH_ROCM_PINNED_ALLOCATOR": "on", "LIVEPATCH_ROCM_PINNED_ALLOCATOR_STEP_GB": "0.1875"}
LAYERWISE = {"LIVEPATCH_MOONCAKE_LAYERWISE": "on", "LIVEPATCH_MOONCAKE_FAILED_LOADS_LOOK_SECONDS": "0.2"}
PATIENCE = "0.5"
COMPILED = " with its operations"
HAS_AN_OPERATION = Version("0.4.7")
"""From this release on LMCache moves blocks where it has no compiled operations."""
WORKERS = 10
"""How many servers run at once, each with its worker."""


class Failed(Exception):
    """A driver did not end well; the message is the end of what it wrote."""


class Runs:
    """Runs drivers by an interpreter, each in a process of its own, with the bundle where one is asked for."""

    def __init__(self, python: Path, bundle: Path, lmcache: list[Path]) -> None:
        self._python, self._bundle = python, bundle
        self.lmcache = {release_in(folder): folder for folder in lmcache}

    def driver(
        self, name: str, *words: str, patched: Mapping[str, str] | None, lmcache: Path | None = None
    ) -> dict[str, Any]:
        """A driver's result, on an LMCache of its own where one is given. Raises Failed."""
        with tempfile.TemporaryDirectory() as place:
            parts = [patched is not None and str(self._bundle), lmcache and str(lmcache), os.environ.get("PYTHONPATH")]
            path = os.pathsep.join(part for part in parts if part)
            variables = {**os.environ, "LIVEPATCH_STATE_DIR": place, "PYTHONPATH": path}
            if patched is not None:
                variables |= {"LIVEPATCH": "strict", **patched}
            command = [str(self._python), str(HERE / name), *words]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, env=variables, cwd=place, timeout=SECONDS, check=False
                )
            except subprocess.TimeoutExpired as error:
                written = error.stderr or b""
                raise Failed(
                    f"{name}: not over after {SECONDS:g} s\n{written.decode(errors='replace')[-2000:]}"
                ) from error
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            raise Failed(f"{name}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        result: dict[str, Any] = json.loads(lines[-1])
        return result


def release_in(folder: Path) -> str:
    """Which release of LMCache is unpacked there, and whether with its operations. Raises SystemExit where none is."""
    found = [info.stem.partition("-")[2] for info in folder.glob("lmcache-*.dist-info")]
    if len(found) != 1:
        raise SystemExit(f"{folder}: no release of LMCache is unpacked there (lmcache-RELEASE.dist-info)")
    return found[0] + (COMPILED if [*folder.glob("lmcache/c_ops.*.so"), *folder.glob("lmcache/cuda_ops.*.so")] else "")


def block_transfer(runs: Runs) -> tuple[dict[str, Any], list[str]]:
    """mp-block-transfer's operation: random layouts on the GPU, byte for byte, and how fast it is."""
    found = runs.driver("block_transfer.py", "--json", patched=None)
    wrong = [] if found["wrong"] == [] and found["cases"] else [f"{len(found['wrong'])} layouts differ"]
    return found, wrong


def block_server(runs: Runs) -> tuple[dict[str, Any], list[str]]:
    """Whole servers without compiled operations: patched they are right; stock is not, by itself or behind a step."""

    def of(label: str, patched: Mapping[str, str] | None) -> dict[str, Any]:
        # To 0.4.6 no block is moved on stock: one case shows it.
        words = (
            ["K/V"] if patched is None and not label.endswith(COMPILED) and Version(label) < HAS_AN_OPERATION else []
        )
        found = runs.driver("block_server.py", *words, patched=patched, lmcache=runs.lmcache[label])["cases"]
        return {"cases": found, "right": sorted(name for name, case in found.items() if is_right(case))}

    def is_right(case: Mapping[str, Any]) -> bool:
        return bool(case.get("same") and case.get("untouched", True) and not case.get("errors"))

    with ThreadPoolExecutor(WORKERS) as pool:
        begun = {
            (label, setup): pool.submit(of, label, patched)
            for setup, patched in (("patched", {}), ("stock", None))
            for label in runs.lmcache
            if setup == "stock" or not label.endswith(COMPILED)
        }
    came: dict[str, Any] = {label: {} for label in runs.lmcache}
    wrong = [] if came else ["no release was given (--lmcache)"]
    for (label, setup), one in begun.items():
        try:
            came[label][setup] = found = one.result()
        except Failed as error:
            wrong.append(f"{label}, {setup}: {error}")
            continue
        must_be_right = setup == "patched" or label.endswith(COMPILED)
        is_all_right = bool(found["cases"]) and len(found["right"]) == len(found["cases"])
        if is_all_right is not must_be_right:
            wrong.append(f"{label}, {setup}: right in {', '.join(found['right']) or 'no case'}")
    return came, wrong


def pinned_allocator(runs: Runs) -> tuple[dict[str, Any], list[str]]:
    """rocm-pinned-allocator: the device is asked what is pinned."""
    stock = runs.driver("pinned_allocator.py", patched=None)
    patched = runs.driver("pinned_allocator.py", patched=PINNED)
    wrong = []
    if stock["grows"]["states"][0]["pinned"] != 320:
        wrong.append("stock did not pin the whole pool from the beginning")
    states = patched["grows"]["states"]
    if [state["pinned"] for state in states][:3] != [64, 64, 64] or any(s["pinned"] != s["heap"] for s in states):
        wrong.append("the patched pool is not pinned as it is needed")
    if patched["grows"]["objects"] != 10 or patched["grows"]["left"]:
        wrong.append("the patched pool does not come to its final size, or leaves memory pinned")
    if patched["often"] != {"served": 8, "pinned": 256, "heap": 256, "usage": [128, 320]}:
        wrong.append("eight at once are not served by one expansion each")
    for name, found in (("stock", stock), ("patched", patched)):
        if found["copies"].get("wrong") or found["copies"].get("unpinned"):
            wrong.append(f"{name}: what was handed out is not pinned, or does not hold what was copied")
    refused = patched["refused"]
    if refused["already"] or "128 MiB of 320 MiB are pinned" not in refused["answers"][1]:
        wrong.append("a pin that the device refuses is no error")
    elif [refused["answers"][at] for at in (0, 2, 3)] != ["served"] * 3 or refused["left"]:
        wrong.append("the pool does not go on after a pin that was refused")
    return {"stock": stock, "patched": patched}, wrong


def mooncake_layerwise(runs: Runs) -> tuple[dict[str, Any], list[str]]:
    """mooncake-layerwise: on the GPU what comes is what comes on CPU, and without the event it is not."""
    found: dict[str, Any] = {}
    wrong = []
    for by in ("chunk", "layer"):
        patched = {**LAYERWISE, "LIVEPATCH_MOONCAKE_LAYERWISE_BY": by}
        seen = {}
        for device in ("cpu", "cuda"):
            seen[device] = runs.driver("mooncake_layerwise.py", PATIENCE, device, by, patched=patched)["cases"]
        found[by] = {name: seen["cuda"][name] for name in ("early", "bytes")}
        differ = [name for name, came in seen["cpu"]["found"].items() if came != seen["cuda"]["found"].get(name)]
        wrong += [
            f"by {by}, {name}: {seen['cuda']['found'].get(name)}, on CPU {seen['cpu']['found'][name]}"
            for name in differ
        ]
        if not seen["cuda"]["early"]:
            wrong.append(f"by {by}: no step was still queued when the connector was called: nothing was tried")
        words = (PATIENCE, "cuda", by, "--unawaited", "chunks" if by == "chunk" else "by_layer")
        unawaited = runs.driver("mooncake_layerwise.py", *words, patched=patched)["cases"]
        if all(came == seen["cpu"]["found"][name] for name, came in unawaited["found"].items()):
            wrong.append(f"by {by}: without the event the same came: the case notices nothing")
    return found, wrong


CHECKS: dict[str, Callable[[Runs], tuple[dict[str, Any], list[str]]]] = {
    "mp-block-transfer": block_transfer,
    "mp-block-server": block_server,
    "rocm-pinned-allocator": pinned_allocator,
    "mooncake-layerwise": mooncake_layerwise,
}


def gpu(python: Path) -> str:
    """The GPU's name, as torch has it. Raises SystemExit where there is none."""
    code = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '', torch.__version__, sep='\\n')"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    name, version = done.stdout.splitlines()[-2:]
    if not name:
        print(f"torch {version} sees no GPU: nothing was tried", file=sys.stderr)
        raise SystemExit(2)
    return f"{name}, torch {version}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CHECKS)}; all of them otherwise")
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--lmcache", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument("--write", type=Path, help="where to put the results")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CHECKS):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    if not (options.bundle / "manifest.json").is_file():
        parser.error(f"{options.bundle} holds no bundle: vllm-livepatch generate --out {options.bundle}")
    result = measured_on(HERE, gpu(options.python)) | {"checks": {}}
    runs = Runs(options.python, options.bundle.resolve(), [folder.resolve() for folder in options.lmcache])
    failed = False
    for name in options.names or [name for name in CHECKS if name != "mp-block-server" or options.lmcache]:
        try:
            found, wrong = CHECKS[name](runs)
        except Failed as error:
            found, wrong = {}, [str(error)]
        result["checks"][name] = {"wrong": wrong, "found": found}
        failed = failed or bool(wrong)
        print(f"{'FAILED' if wrong else 'ok    '}  {name}", *wrong, sep="\n        ", flush=True)
        if options.write:
            options.write.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
