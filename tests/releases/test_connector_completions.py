"""What each release's connectors report for a load whose request was aborted: docs/connector-completions.md, executed.

The expectations were written from reading each release's sources, before anything ran.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "connector_completions"
RELEASES = executed.chosen(
    ["0.14.1", "0.22.1", "0.33.0"],
    [pin.version for pin in registry.pins("vllm")],
)

BESIDE = "0.4.3"
"""The LMCache that vLLM's copy of its connector can be imported with, whichever the release of vLLM is."""

INSTALLED = "0.5.6"
"""What the engine's environment has: the whole wheel. This release cannot be imported without its compiled modules."""

OWN = {
    "0.4.5": "0.20.2",
    "0.4.6": "0.20.2",
    "0.4.7": "0.23.0",
    "0.5.0": "0.23.0",
    "0.5.1": "0.29.0",
    "0.5.2": "0.29.0",
    "0.5.3": "0.29.0",
    "0.5.4": "0.29.0",
    "0.5.5": "0.29.0",
    "0.5.6": "0.29.0",
}
"""Each LMCache that ships a connector of its own, and a vLLM that it can be imported with."""


def passed(under_way: list[str], ended: list[str], *, announced: bool) -> dict[str, Any]:
    return {"announced": announced, "under_way": under_way, "ended": ended}


RECEIVE = passed(["", "", "R", ""], ["", "R", "", ""], announced=False)
"""No send is announced; the receive is reported once, when it has ended."""

BOTH = passed(["", "S", "R", ""], ["", "SR", "", ""], announced=True)
"""A send is announced and reported at once, whatever the load does; the receive when it has ended."""

BOTH_AT_THEIR_ENDS = passed(["", "", "SR", ""], ["", "SR", "", ""], announced=True)
"""A send is announced; each is reported when it has ended (here: both at the same time)."""

NOTHING = passed(["", "", "", ""], ["", "", "", ""], announced=False)
"""No send is announced, and the receive is never reported."""

MULTI = {
    # The last of the two sends that were announced is the one that is passed on...
    "both_announce": {"announced": True, "reports": ["", "", "S", ""]},
    # ... unless a child is done before the worker is told how many there are: then each.
    "not_announced_yet": {"announced": True, "reports": ["S", "", "S", ""]},
    # A send and a receive do not wait for one another, whichever child they are of.
    "one_announces_other_loads": {"announced": True, "reports": ["S", "", "R", ""]},
    "one_announces_and_loads": {"announced": True, "reports": ["S", "", "R", ""]},
}


def moriio_changes(version: Version) -> dict[str, list[str]] | None:
    """What a MoRI-IO producer leaves of finished_sending: what it did not announce, and what it gave up itself."""
    if version < Version("0.23.0"):
        return None
    kept = ["aborted"] if version < Version("0.28.0") else []
    given_up_writing = ["aborted"] if version < Version("0.33.0") else []
    return {
        "foreign_read": kept,
        "foreign_write": kept,
        "overdue_read": ["aborted"],
        "overdue_write": given_up_writing,
    }


def nixl_sends(version: Version) -> dict[str, list[str]]:
    """An announced send is reported once; to 0.30 not before the leases that were begun earlier have run out."""
    waits = version < Version("0.31.0")
    return {"notified": ["S", ""], "lease": ["S", ""], "lease_behind_another": ["", ""] if waits else ["S", ""]}


def nixl_push_lease(version: Version) -> list[str] | None:
    """A lease that runs out under a write is reported at once; to 0.29 the write's end is reported again."""
    if version < Version("0.24.0"):
        return None
    return ["S", "S", ""] if version < Version("0.30.0") else ["S", "", ""]


def expected(release: str) -> dict[str, Any]:
    """What the connectors of a vLLM release say; None where the release does not have the connector."""
    version = Version(release)
    return {
        "lmcache_mp": BOTH,
        "nixl_pull": RECEIVE,
        "nixl_sends": nixl_sends(version),
        "nixl_push_lease": nixl_push_lease(version),
        "mooncake": RECEIVE,
        "mooncake_fails": RECEIVE if version >= Version("0.30.0") else NOTHING,
        "moriio_write": NOTHING if version >= Version("0.18.1") else RECEIVE,
        "moriio_changes": moriio_changes(version),
        "offloading": RECEIVE,
        "offloading_stored": RECEIVE if version >= Version("0.21.0") else BOTH_AT_THEIR_ENDS,
        "simple_cpu_offload": RECEIVE if version >= Version("0.19.1") else None,
        "hf3fs": BOTH if version >= Version("0.20.2") else None,
        "multi": MULTI,
    }


def expected_own(release: str) -> dict[str, Any]:
    """What LMCache's own connector says: well, and with its server gone."""
    keeps_refused = Version(release) >= Version("0.5.0")
    return {
        "well": BOTH,
        # Told of the abort by the very call that gives up the retrieve: the send is never reported.
        "drained_with_abort": ["R", "", ""],
        "drained_after_abort": ["S", "R", ""],
        # A retrieve that was not even sent: to 0.4.7 its end is never reported.
        "refused": ["R", "S", ""] if keeps_refused else ["", "S", ""],
        # The second request of the same id is never reported.
        "used_again": ["S", "", "", ""],
        # Two stores of a request: the second takes the first one's place.
        "two_stores": ["", "", "S", ""],
        # One that has ended before is taken for all of them: reported while the second reads.
        "store_after_another": ["", "S"],
    }


@pytest.mark.parametrize("release", RELEASES)
def test_vllm(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Each connector of the release reports what reading it told."""
    releases = {"vllm": release, "lmcache": BESIDE}
    result = warm.run(DRIVER, releases, tmp_path, path=[interpreter.STANDINS])
    assert result["cases"] == expected(release)


@pytest.mark.parametrize("release", executed.ends([*OWN]))
def test_lmcache(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """LMCache's own connector reports what reading it told."""
    releases = {"vllm": OWN[release]} if release == INSTALLED else {"vllm": OWN[release], "lmcache": release}
    result = warm.run(DRIVER, releases, tmp_path, arguments=["own"])
    assert result["cases"] == expected_own(release)


def test_every_lmcache_with_a_connector_of_its_own_is_here() -> None:
    pinned = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) >= Version("0.4.5")]
    assert sorted(OWN, key=Version) == sorted(pinned, key=Version)
