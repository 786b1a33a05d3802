"""Each LMCacheMPConnector, and LMCache in the engine: whose KV a request is given that shares its ids, by contents.

vLLM's built-in connector works with LMCache 0.4.3 to 0.4.6, by release; what is LMCache's own is driven in vLLM 0.29.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "lmcache_identity"
PATCH = "lmcache-cache-identity"
VLLM = [pin.version for pin in registry.pins("vllm") if Version(pin.version) >= Version("0.17.0")]
LMCACHE = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) >= Version("0.4.5")]
INSTALLED = "0.5.6"
"""What the engine's environment has: the whole wheel."""

IN_PROCESS = "in-process"

OWN = [0, True]
"""A request that nothing was loaded for, and whose KV is right."""
LOADED = [96, True]
"""Three chunks were loaded, which are the request's."""
FOREIGN = [96, False]

PATCHED: dict[str, Any] = {
    "adapters": [[OWN, OWN, OWN], [LOADED, LOADED, LOADED]],
    "tensor_parallel": [[OWN, OWN], [LOADED, LOADED]],
    "within_multi": [OWN, OWN],
    "two_pods": [OWN, OWN, LOADED],
    "new_weights": [OWN, OWN],
    "behind_old_weights": [True],
    "changed_files": [OWN, OWN],
    # From the prefix cache come 48 tokens of the text before the image, and 64 of embeddings none.
    "images": [OWN, OWN, OWN, LOADED, [48, True], [48, True]],
    "embeddings": [OWN, OWN, LOADED, [64, True]],
    # The engine finds what it has stored since; another one, which has the old weights, its own.
    "new_base_weights": [OWN, OWN, LOADED, LOADED],
}
STOCK: dict[str, Any] = {
    "adapters": [[OWN, FOREIGN, FOREIGN], [LOADED, FOREIGN, FOREIGN]],
    "tensor_parallel": [[OWN, FOREIGN], [LOADED, FOREIGN]],
    "within_multi": [OWN, FOREIGN],
    "two_pods": [OWN, FOREIGN, LOADED],
    "new_weights": [OWN, FOREIGN],
    "behind_old_weights": [False],
    "changed_files": [OWN, FOREIGN],
    "embeddings": [OWN, [64, False], LOADED, [64, False]],
    "new_base_weights": [OWN, FOREIGN, FOREIGN, LOADED],
}
EMPTIED = [OWN, OWN, LOADED, FOREIGN]
"""Weights that are updated, with LMCache's own connector of 0.5.6: it empties the server, and the new ones' KV is the old ones'."""
IMAGES = {
    "none": [OWN, [48, False], [48, False], LOADED, [48, False], [48, False]],
    "16 bits": [OWN, OWN, [48, False], LOADED, [48, True], [48, False]],
    "whole": PATCHED["images"],
}
"""What stock's keys have of an image; the third has the second's last 16 bits."""


def own_images(lmcache: str) -> str:
    version = Version(lmcache)
    return "none" if version < Version("0.5.3") else "16 bits" if version < Version("0.5.5") else "whole"


def stock(vllm: str, images: str) -> dict[str, Any]:
    return {
        **STOCK,
        # A MultiConnector tells a child of no blocks that are not loaded by it before 0.26: such a child stores nothing.
        "within_multi": [OWN, FOREIGN if Version(vllm) >= Version("0.26") else OWN],
        "images": IMAGES[images],
        "salts": salts(vllm, 3),
        "unknown": [OWN, LOADED, LOADED, FOREIGN],
    }


def patched(vllm: str) -> dict[str, Any]:
    return {**PATCHED, "salts": salts(vllm, 6), "unknown": [OWN, OWN, OWN, OWN]}


def salts(vllm: str, first: int) -> dict[str, int]:
    """Chunks by tenant. vLLM's connector sends a salt from 0.20 on."""
    return {"tenant-1": first, "tenant-2": 3} if Version(vllm) >= Version("0.20") else {"": first}


def in_process(expected: dict[str, Any]) -> dict[str, Any]:
    """What there is of it in the engine's process. A user's tag stays, and a client's that says it were ours does nothing."""
    left = ("within_multi", "embeddings", "salts", "images")
    cases = {case: came for case, came in expected.items() if case not in left}
    by_layer = [*expected["adapters"], *((OWN, 0) if expected["adapters"] == PATCHED["adapters"] else (FOREIGN, 3))]
    more = {"images_in_process": expected["images"], "users_tags": [OWN, 3, OWN], "by_layer": by_layer}
    base = OWN if expected["adapters"] == PATCHED["adapters"] else LOADED  # a text engine's is not the base's of others
    return {**cases, **more, "by_mooncake": [OWN, base, LOADED]}


def driven(
    whose: str,
    vllm: str,
    lmcache: str,
    warm: interpreter.Interpreter,
    work: Path,
    *cases: str,
    bundle: Path | None = None,
) -> dict[str, Any]:
    releases = {"vllm": vllm} if lmcache == INSTALLED else {"vllm": vllm, "lmcache": lmcache}
    driver = DRIVER if whose != IN_PROCESS else f"{DRIVER}_in_process"
    environ = {"LIVEPATCH_LMCACHE_CACHE_IDENTITY": "on", "LIVEPATCH_LMCACHE_CACHE_IDENTITY_ON_RESET": "apart"}
    found = warm.run(driver, releases, work, bundle=bundle, environ=environ, arguments=(whose, *cases))
    came: dict[str, Any] = found["cases"]
    return came


def compared(
    whose: str, vllm: str, lmcache: str, images: str, warm: interpreter.Interpreter, bundle: Path, work: Path
) -> None:
    """Stock gives foreign KV and the patch does not, in one run each; the keys of plain text are the same in both."""
    expected, right = stock(vllm, images), patched(vllm)
    if (whose, lmcache) == ("lmcache", INSTALLED):
        expected["new_base_weights"] = EMPTIED
    if whose == IN_PROCESS:
        expected, right = in_process(expected), in_process(right)
    for folder in ("stock", "patched"):
        (work / folder).mkdir()
    unpatched = driven(whose, vllm, lmcache, warm, work / "stock", *expected, "plain")
    plain = unpatched.pop("plain")
    assert unpatched == expected
    came = driven(whose, vllm, lmcache, warm, work / "patched", *right, "plain", bundle=bundle)
    assert came.pop("plain") == plain
    assert came == right
    assert plain[0] == OWN
    reports = [interpreter.read(file, PATCH) for file in (work / "patched" / "state").glob("*.json")]
    (report,) = [one for one in reports if one["state"] == "applied" and one["counters"]]
    assert report["verdict"] == "needed", report
    assert set(report["counters"]) == {"marked", "resets", "unidentified"}


@pytest.mark.parametrize("release", executed.first(VLLM))
def test_built_in(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    lmcache = "0.4.6" if Version(release) >= Version("0.20") else "0.4.3"
    compared("vllm", release, lmcache, "none", warm, bundle, tmp_path)


@pytest.mark.parametrize("release", executed.first(LMCACHE))
def test_own(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    compared("lmcache", "0.29.0", release, own_images(release), warm, bundle, tmp_path)


@pytest.mark.parametrize("release", executed.first(LMCACHE))
def test_in_process(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    images = "whole" if Version(release) >= Version("0.5.5") else "16 bits"
    compared(IN_PROCESS, "0.29.0", release, images, warm, bundle, tmp_path)


@pytest.mark.parametrize("release", executed.first(LMCACHE))
def test_not_looked_up(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """LMCache in the engine's process asserts that what was preempted has been looked up.

    `lmcache-in-process` cleans what clients give, also where there is no lookup. On stock the first ends the engine.
    """
    came = driven(IN_PROCESS, "0.29.0", release, warm, tmp_path, "preempted", "unreadable", bundle=bundle)
    assert came == {"preempted": [OWN, 0], "unreadable": [OWN, OWN]}


def test_locks(warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """The server holds nothing for a request that was looked up and lost its identity before it had blocks."""
    came = driven("lmcache", "0.29.0", INSTALLED, warm, tmp_path, "replaced_while_it_waits", bundle=bundle)
    assert came == {"replaced_while_it_waits": OWN}


@pytest.mark.parametrize(
    ("whose", "came"),
    [
        ("lmcache", {"updated_while_it_runs": [OWN, FOREIGN], "updated_while_it_waits": [OWN, FOREIGN]}),
        (IN_PROCESS, {"updated_while_it_runs": [OWN, FOREIGN]}),
    ],
)
def test_weights_are_updated_amid_requests(
    whose: str, came: dict[str, Any], warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """What goes on with new weights is stored for nobody; what waits loads nothing that was stored before."""
    for folder, given in ("stock", None), ("patched", bundle):
        work = tmp_path / folder
        work.mkdir()
        expected = came if given is None else {case: [OWN, OWN] for case in came}
        assert driven(whose, "0.29.0", INSTALLED, warm, work, *came, bundle=given) == expected


def test_an_engine_that_is_dropped_goes(warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """With the patches that are on beside it, as on stock."""
    for folder, given in ("stock", None), ("patched", bundle):
        work = tmp_path / folder
        work.mkdir()
        assert driven("lmcache", "0.29.0", INSTALLED, warm, work, "dropped", bundle=given) == {"dropped": True}


@pytest.mark.parametrize(("whose", "vllm", "lmcache"), [("vllm", "0.33.0", "0.4.6"), ("lmcache", "0.29.0", INSTALLED)])
def test_ten_thousand_images(
    whose: str, vllm: str, lmcache: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """Each has a key of its own, of each hash, where one of its tokens lies in a chunk; and no id more than the prompt."""
    came = driven(whose, vllm, lmcache, warm, tmp_path, "many_images", bundle=bundle)
    assert came == {"many_images": [True, 10_000, 10_000, 10_000]}
