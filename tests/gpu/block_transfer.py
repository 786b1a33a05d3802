"""mp-block-transfer's operation on a device's memory: random layouts against the plain reference, and its speed there.

    python tests/gpu/block_transfer.py [--device cuda] [--cases N] [--json]

For an interpreter with torch for CUDA or ROCm; nothing else is needed. Not part of the tests that run everywhere: those
have no device. Without one it says so and ends; `--device cpu` shows that the script itself works.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def load(path: Path) -> Any:
    """A module by its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(driver: Any, seed: int) -> dict[str, Any]:
    """A random case, in the driver's form."""
    rng = random.Random(seed)
    kv_format = rng.choice(sorted(driver.BLOCK))
    blocks = rng.randint(1, 9)
    per = rng.randint(1, min(3, blocks))
    ids = rng.sample(range(blocks), per * rng.randint(1, blocks // per))
    roomy = kv_format in ("NB_NL_TWO_BS_NH_HS", "NB_NL_TWO_NH_BS_HS", "NL_X_NB_BS_HS", "NL_X_NB_TWO_BS_NH_HS")
    case = {"format": kv_format, "nl": rng.randint(1, 4), "nb": blocks, "bs": rng.randint(1, 4), "per": per, "ids": ids}
    case |= {"nh": rng.randint(1, 4) if "NH" in kv_format else 1, "hs": rng.choice([16, 32, rng.randint(1, 20)])}
    case |= {"element": rng.choice([1, 2, 4]), "padding": rng.choice([0, 1, 3]) if roomy else 0, "offset": 0}
    return case | {
        "skip": rng.randint(0, len(ids)),
        "gap": rng.choice([0, 16]),
        "shuffled": seed % 2 == 0,
        "seed": seed,
    }


def wrong(driver: Any, transfer: Any, given: dict[str, Any], device: str) -> list[str]:
    """The directions in which a byte differs from the reference."""
    found = []
    for direction in ("D2H", "H2D"):
        case = driver.Case(given)
        expected = case.expected(direction == "H2D")
        case.memory = case.memory.to(device)
        arguments = case.arguments(direction, device=torch.device(device))
        arguments[0], arguments[2] = arguments[0].to(device), arguments[2].to(device)
        transfer(*arguments)
        if case.memory.cpu().numpy().tobytes() != expected:
            found.append(direction)
    return found


def speed(bench: Any, transfer: Any, name: str, device: str, to_cache: bool) -> tuple[float, float, float]:
    """Median microseconds of memcpy, ours and a loop."""
    torch.set_default_device(device)
    shape = bench.Shape(*bench.SHAPES[name])
    arguments = shape.arguments("ours", to_cache)
    arguments[3] = torch.device(device)
    calls = (lambda: shape.memory.copy_(shape.source), lambda: transfer(*arguments), lambda: shape.loop(to_cache))
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    times: list[list[float]] = [[], [], []]
    for turn in range(24):
        for number, call in enumerate(calls):
            wait()
            started = time.perf_counter()
            call()
            wait()
            if turn > 3:
                times[number].append(time.perf_counter() - started)
    torch.set_default_device("cpu")
    memcpy, ours, loop = (statistics.median(one) * 1e6 for one in times)
    return memcpy, ours, loop


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="one object on stdout, times in microseconds")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("torch sees no device: nothing was tried", file=sys.stderr)
        return 0
    drivers = ROOT / "tests" / "releases" / "driver"
    sys.path.insert(0, str(drivers))  # they import one of their own
    transfer = load(ROOT / "patches" / "mp_block_transfer" / "transfer.py").transfer
    stdout = os.dup(1)
    driver, bench = load(drivers / "block_transfer.py"), load(drivers / "block_transfer_bench.py")
    os.dup2(stdout, 1)  # drivers take it for their results
    tell = sys.stderr if options.json else sys.stdout
    failed: list[dict[str, Any]] = []
    for seed in range(options.cases):
        given = drawn(driver, seed)
        if found := wrong(driver, transfer, given, options.device):
            failed.append(given)
            print(f"WRONG {found}: {given}", file=tell)
    right = options.cases - len(failed)
    print(f"{right} of {options.cases} layouts as the reference has them on {options.device}", file=tell)
    times = {}
    for name in bench.SHAPES:
        for to in ("to chunks", "to cache"):
            memcpy, ours, loop = speed(bench, transfer, name, options.device, to == "to cache")
            times[f"{name}, {to}"] = {"memcpy": round(memcpy, 1), "ours": round(ours, 1), "loop": round(loop, 1)}
            compared = f"{memcpy / ours:.2f} of memcpy, {loop / ours:.2f} times the loop"
            print(f"{name}, {to}: {ours:,.0f} us, {compared}", file=tell)
    if options.json:
        print(json.dumps({"device": options.device, "cases": options.cases, "wrong": failed, "microseconds": times}))
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
