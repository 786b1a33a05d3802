# mypy: disable-error-code="import-not-found"
"""The real MoRI-IO worker of every release that needs `moriio-timeouts`, stock and patched, over a stand-in for mori.

Each test is one process. What is shown here is vLLM's own code; what mori's RDMA does is not shown.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from vllm_livepatch.sitecustomize import decision, installed
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.releases import registry, sources

PATCH = "moriio-timeouts"
RELEASES = [pin.version for pin in registry.pins("vllm")]
NEEDED = RELEASES[: RELEASES.index("0.22.1") + 1]
FIXED = RELEASES[len(NEEDED) :]
LATER = executed.chosen([FIXED[-1]], FIXED[1:])
"""Of those with another protocol between two engines."""

SECONDS = {"HANDSHAKE": "1.0", "TRANSFER": "0.8", "DEFER": "0.8"}
OPTIONS = {f"LIVEPATCH_MORIIO_TIMEOUTS_{name}_SECONDS": seconds for name, seconds in SECONDS.items()}
STOCK_SECONDS = "0.2"
"""How long to wait for what stock never does, spinning: where nothing is in the way it takes some 10 ms."""
PATCHED_SECONDS = "20"
LATER_SECONDS = "2"
"""How long to wait for what never comes, in driver/moriio_later.py; what it bounds takes a fifth of that."""

# What each case of driver/moriio_timeouts.py comes to on stock: the same in all these releases.
STOCK = {
    "healthy": "survives",
    "late_peer": "survives",
    # Each is handed over once only, and only one a layer: the second request's first layer is never written.
    "two_to_a_new_peer": "KV lost",
    "nothing_to_save": "never returns",
    "silent_peer": "never returns; request never done; next not served",
    "refused_handshake": "request never done; next not served",
    "transfer_never_ends": "next not served",
    "transfer_ends_late": "next not served",
    "layer_raises_while_pending": "next not served; request never done",
    "transfer_fails": "request never done; next not served",
    "transfer_of_another_fails": "request never done; healthy request charged",
    "write_raises": "request never done; next not served",
    "never_allocated": "request never done",
    "same_id_later": "request never done; next not served",
    "read": "KV lost",
    "read_from_silent_peer": "never returns; next not served",
    "port_is_taken": "never returns",
}
PATCHED = {**dict.fromkeys(STOCK, "survives"), "port_is_taken": "raises HandshakeError"}
COUNTERS = {
    "handshake_timeout": 2,
    "handshake_failed": 1,
    "transfer_timeout": 2,
    "transfer_failed": 3,
    "write_failed": 2,
    "held": 3,
    "deferred_expired": 1,
    "listener_failed": 1,
}
# What is said of each kind: the request, the peer and the time. What stands for the listener is the exception itself.
REQUEST = r"the write of request cmpl-\S+_[0-9a-f]{32} to 127\.0\.0\.1:\d+(_dp0)? is given up: "
LOGGED = {
    "handshake_timeout": r"no handshake in [1-9]\d*\.\d s",
    "handshake_failed": r"the handshake failed after \d+\.\d s",
    "transfer_timeout": r"TransferError: 1 of 2 transfers are pending after \d+\.\d s; queued \d+\.\d s ago",
    "transfer_failed": r"TransferError: a transfer failed: the stand-in was ordered to fail .* \d of \d transfers are pending",
    "write_failed": r"RuntimeError: the stand-in was ordered to refuse this transfer; queued \d+\.\d s ago",
    "deferred_expired": r"no blocks were allocated for it there in \d+\.\d s",
}
# vLLM 0.23.0 without the patch: every wait of a step ends. What is left is not the fault that the patch is for.
FIXED_STOCK = {
    **dict.fromkeys(STOCK, "survives"),
    "two_to_a_new_peer": "KV lost",
    "silent_peer": "request never done; next not served",
    "refused_handshake": "next not served",
    "completed_by_waiting": "not sent",
    "read": "KV lost",
    "read_from_silent_peer": "next not served",
    "port_is_taken": "never returns",
    "transfer_ends_late": "request never done",
    "layer_raises_while_pending": "next not served; request never done",
}

# From 0.24.0 on, of the cases of driver/moriio_later.py. A step that raises ends the engine.
LATER_STOCK = {
    **dict.fromkeys(
        ("healthy", "nothing_to_save", "refused_handshake", "transfer_fails", "never_allocated"), "survives"
    ),
    # A step saves each layer twice, and waits `transfer_timeout` for the handshake each time. One thread shakes hands with
    # all peers, and its wait for the silent one never ends.
    "silent_peer": "waits 4 times for 2 layers; next not served",
    "transfer_never_ends": "freed while it is read",
    # Where all transfers were begun before the step is over, it is the step that waits for them, not the writer's thread.
    "transfer_never_ends_in_step": "raises TransferError",
    "transfer_fails_in_step": "raises TransferError",
    "read": "survives",
    "read_refused": "raises KeyError",
    "read_from_silent_peer": "next not served",
}
# A step that reads begins with its handshakes, and waits for them without a limit.
WAITS_FIRST = {**LATER_STOCK, "read_refused": "raises HandshakeError", "read_from_silent_peer": "never returns"}
# The scheduler leaves it to the worker to give a write up, and that knows of none before the handshake.
LEFT_TO_WORKER = {**WAITS_FIRST, "silent_peer": "waits 4 times for 2 layers; next not served; never freed"}
LATER_FROM = {"0.24.0": LATER_STOCK, "0.27.1": WAITS_FIRST, "0.33.0": LEFT_TO_WORKER}


def drive(
    warm: interpreter.Interpreter,
    release: str,
    work: Path,
    bundle: Path | None,
    options: dict[str, str],
    arguments: list[str],
) -> dict[str, Any]:
    """What driver/moriio_timeouts.py printed of a release."""
    result: dict[str, Any] = warm.run(
        "moriio_timeouts",
        {"vllm": release},
        work,
        bundle=bundle,
        environ=options,
        arguments=arguments,
        path=[interpreter.STANDINS],
    )
    return result


def with_xgmi(cases: dict[str, str], release: str) -> dict[str, str]:
    """The cases of a release: from 0.22.1 on there is a backend whose transfers may complete only while waited for."""
    return {**cases, "completed_by_waiting": "survives"} if release == "0.22.1" else cases


@pytest.mark.parametrize("release", executed.first(NEEDED))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Each fault shows on the unpatched release."""
    arguments = [STOCK_SECONDS]
    result = drive(warm, release, tmp_path, None, OPTIONS, arguments)
    assert result["cases"] == with_xgmi(STOCK, release)


@pytest.mark.parametrize("release", executed.first(NEEDED))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Every wait ends, every request that failed is done once, the next is served, and each timeout is counted."""
    arguments = [PATCHED_SECONDS]
    result = drive(warm, release, tmp_path, bundle, OPTIONS, arguments)
    assert result["cases"] == with_xgmi(PATCHED, release)
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch
    assert patch["counters"] == COUNTERS
    stderr = (tmp_path / "stderr").read_text(encoding="utf-8")
    assert [kind for kind, words in LOGGED.items() if not re.search(REQUEST + words, stderr)] == []


@pytest.mark.parametrize("case", ["own_error_in_wait", "own_error_in_handshake"])
@pytest.mark.parametrize("release", ["0.14.1", "0.22.1"])
def test_own_error(release: str, case: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Where the patch itself errs, the release's own code answers, and finds what it would have had."""
    result = drive(warm, release, tmp_path, bundle, OPTIONS, [PATCHED_SECONDS, case])
    assert result["cases"] == {case: "survives"}
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["reason"]) == ("failed", "raised"), patch


def test_fixed_release(warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """The first release with the fix: its own options, in `kv_connector_extra_config`, end the waits."""
    # There, handshakes are waited for as long as transfers are, but in every layer.
    given = {"HANDSHAKE": "1.2", "TRANSFER": "0.5", "DEFER": "0.5"}
    options = {f"LIVEPATCH_MORIIO_TIMEOUTS_{name}_SECONDS": seconds for name, seconds in given.items()}
    result = drive(warm, FIXED[0], tmp_path, None, options, ["2"])
    assert result["cases"] == FIXED_STOCK


@pytest.mark.parametrize("release", LATER)
def test_later_release(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """What a prefill engine waits for ends, but for the handshakes' thread; a decode engine's step waits from 0.27.1 on."""
    arguments = [LATER_SECONDS]
    result = warm.run("moriio_later", {"vllm": release}, tmp_path, arguments=arguments, path=[interpreter.STANDINS])
    since = max((first for first in LATER_FROM if RELEASES.index(first) <= RELEASES.index(release)), key=RELEASES.index)
    assert result["cases"] == LATER_FROM[since]


@pytest.mark.parametrize("release", FIXED)
def test_verdict_where_fixed(release: str) -> None:
    """Later releases are left alone, asked for or not."""
    patch = catalogue.load()[PATCH].patch
    found = installed.look(patch, installed.Tree([str(sources.site_packages("vllm", release))]))
    for toggle in ("auto", "on"):
        decided = decision.decide(patch, found, decision.Environment(toggles={PATCH: toggle}))
        assert (decided.verdict, decided.apply) == ("fixed-upstream", False)
