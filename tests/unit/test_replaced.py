"""What `generate` says of a bundle that it replaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_livepatch.tools.bundles import replaced

from tests.unit import fleet
from tests.unit.support import Cli, Sandbox


@pytest.fixture
def state(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "state"
    monkeypatch.setenv("LIVEPATCH_STATE_DIR", str(place))
    return place


def digest_in(out: str) -> str:
    return next(line.strip() for line in out.splitlines() if line.startswith("  sha256:"))


@pytest.mark.parametrize("form", ["--out", "--zip"])
def test_the_older_bundle_and_what_runs_it_are_named(cli: Cli, tmp_path: Path, state: Path, form: str) -> None:
    words = ["generate", form, str(tmp_path / "bundle"), "--patch"]
    first = cli(*words, "kv-block-reaper", "--patch", "idle-stepping")
    assert "replaced" not in first.out
    assert "restart" not in first.out
    older = digest_in(first.out)
    again = cli(*words, "kv-block-reaper", "--patch", "idle-stepping").out.splitlines()
    assert again[-1] == "  the same bundle lay there before: nothing is replaced"
    assert len(again) == len(first.out.splitlines()) + 1

    fleet.leave(state, host="elsewhere", pid=1)  # of another bundle
    done = cli(*words, "kv-block-reaper", "--patch", "failed-loads")
    newer = digest_in(done.out)
    assert done.out.splitlines()[-3:] == [
        f"  replaced {replaced.lying_at(tmp_path / 'bundle').version}, {older}; "  # type: ignore[union-attr]
        "new: failed-loads; gone: idle-stepping",
        f"  restart the engines and LMCache servers that run the one before ({state} names none)",
        f"  until then each keeps it: `vllm-livepatch status --digest {newer}` exits with 1",
    ]

    for pid in range(7, 13):
        fleet.leave(state, host="node1", pid=pid, digest=newer)
    fleet.leave(state, host="node2", digest=newer, silent=1000.0)
    done = cli(*words, "kv-block-reaper")
    command = "(python -m vllm.entrypoints.openai.api_server)"
    named = ", ".join(f"pid {pid} on node1 {command}" for pid in range(7, 12))
    assert f"\n  restart what runs the one before: {named} and 1 more\n" in done.out
    assert "; gone: failed-loads\n" in done.out
    assert cli("status", "--digest", digest_in(done.out)).code == 1


def test_a_patch_that_changed_is_named_with_both_versions() -> None:
    before = replaced.Identity("1", "sha256:a", {"a": 3, "b": None, "c": 1}, {"a": "x", "b": "y", "c": "z"})
    now = replaced.Identity("2", "sha256:b", {"a": 4, "b": 1, "c": 1}, {"a": "X", "b": "Y", "c": "z"})
    assert replaced._differences(before, now) == "; changed: a (3 to 4), b (no version to 1)"
    assert replaced._differences(now, now) == "; its patches are the same"
    assert replaced._differences(replaced.Identity("0.1.0", "sha256:c"), now) == ""


def test_a_patch_that_changed_and_kept_its_version_is_to_raise_it(
    cli: Cli, tmp_path: Path, state: Path, sandbox: Sandbox
) -> None:
    sandbox.patch("one", version=2)
    sandbox.patch("two")
    words = ["generate", "--out", str(tmp_path / "bundle"), "--patch-dir", str(sandbox.patches)]
    words += ["--patch", "one", "--patch", "two", "--patch", "idle-stepping"]
    cli(*words)
    for name in ("one", "two"):
        with (sandbox.patches / name / "wrappers.py").open("a") as file:
            file.write("# changed\n")
    said = cli(*words).out
    assert "; changed: one (still 2), two (with no version)\n" in said
    assert (
        "\n  raise `version` in the patch.toml of one, two: it is that of before, so that `status --require NAME@N` "
        in said
    )
    sandbox.patch("one", version=3)
    said = cli(*words).out
    assert "; changed: one (2 to 3)\n" in said
    assert "raise" not in said


def test_of_ours_with_the_same_version_only_the_text_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = replaced.Identity("1", "sha256:a", {"idle-stepping": 3, "mine": 3}, {"idle-stepping": "x", "mine": "x"})
    now = replaced.Identity("2", "sha256:b", before.versions, {"idle-stepping": "y", "mine": "y"})
    monkeypatch.setattr(replaced, "identity", lambda _: now)
    said = replaced.sentences(before, {}, tmp_path)
    assert said[0].endswith("; changed: idle-stepping (still 3), mine (still 3)")
    assert said[1].startswith("raise `version` in the patch.toml of mine: ")


def test_what_cannot_be_read_is_no_bundle_and_an_old_one_has_no_versions(tmp_path: Path) -> None:
    assert replaced.lying_at(tmp_path / "none") is None
    (tmp_path / "cut.zip").write_bytes(b"PK\x03\x04cut")
    assert replaced.lying_at(tmp_path / "cut.zip") is None
    for manifest in ("", "[]", "{}", '"text"'):
        (tmp_path / "manifest.json").write_text(manifest)
        assert replaced.lying_at(tmp_path) is None
    (tmp_path / "manifest.json").write_text(json.dumps({"vllm-livepatch": "0.1.0", "files": {}}))
    found = replaced.lying_at(tmp_path)
    assert found is not None
    assert (found.version, found.versions) == ("0.1.0", {})
