"""Patches that installed distributions bring, and bundles that are merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.support import PYTHON, STEP, USE_STEP, Cli, Sandbox, finish

FACTS = 'title = "Theirs"\npackage = "fakeengine"\nversion = {version}\ntargets = ["{target}"]\n'
CODE = (
    "def wrappers(livepatch):\n"
    "    return {{'{target}': lambda original, scheduler, number, *rest, **named: [*original(number), '{mark}']}}\n"
)


@pytest.fixture
def theirs(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution whose package says that it was imported, and holds a patch folder."""
    place = sandbox.root / "distribution"
    folder = place / "acme" / "patches" / "acme_fix"
    folder.mkdir(parents=True)
    for init in (place / "acme/__init__.py", place / "acme/patches/__init__.py"):
        init.write_text("raise SystemExit('imported')\n")
    written(folder, sandbox, "acme")
    info = place / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm_livepatch.patches]\nacme = acme.patches\n")
    monkeypatch.syspath_prepend(str(place))
    return place


def written(folder: Path, sandbox: Sandbox, mark: str, version: int = 1) -> None:
    variant = f'[[variant]]\nreleases = ["1.0"]\ncode = {{ "{STEP}" = "{sandbox.fingerprints(STEP)[STEP]}" }}\n'
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "patch.toml").write_text(FACTS.format(version=version, target=STEP) + variant)
    (folder / "wrappers.py").write_text(CODE.format(target=STEP, mark=mark))


def test_installed_distributions_bring_patches(theirs: Path, sandbox: Sandbox, cli: Cli) -> None:
    assert cli("generate", "--out", str(sandbox.bundle), "--installed", "--patch", "acme-fix").code == 0
    assert sandbox.python(USE_STEP).out == "[7, 'acme']\n"
    assert sandbox.reported("acme-fix")["state"] == "applied"
    assert "acme-fix" in cli("list", "--installed").out
    assert "acme-fix" not in cli("list").out
    assert "Theirs" in cli("show", "acme-fix", "--installed").out
    done = cli("check", "--installed", "--only", "--site-packages", str(sandbox.site), "--json")
    assert [patch["name"] for patch in json.loads(done.out)["patches"]] == ["acme-fix"]


@pytest.mark.parametrize("value", ["acme.nowhere", "nowhere", "acme.patches.acme_fix.wrappers"])
def test_an_entry_point_that_names_no_package(theirs: Path, sandbox: Sandbox, cli: Cli, value: str) -> None:
    (theirs / "acme-1.0.dist-info/entry_points.txt").write_text(f"[vllm_livepatch.patches]\nacme = {value}\n")
    done = cli("generate", "--out", str(sandbox.bundle), "--installed")
    message = f"vllm-livepatch: acme names its patches {value} (vllm_livepatch.patches), which is no package"
    assert (done.code, done.lines) == (2, [message])
    assert not sandbox.bundle.exists()


def test_each_place_of_a_namespace_package(
    theirs: Path, sandbox: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (theirs / "acme-1.0.dist-info/entry_points.txt").write_text("[vllm_livepatch.patches]\nacme = spread.patches [x]\n")
    for number, name in enumerate(("acme_one", "acme_two", "")):
        place = sandbox.root / f"portion {number}"
        (place / "spread" / "patches").mkdir(parents=True)
        if name:
            written(place / "spread" / "patches" / name, sandbox, name)
        monkeypatch.syspath_prepend(str(place))
    listed = cli("list", "--installed").out
    assert "acme-one" in listed
    assert "acme-two" in listed


def test_where_no_distribution_brings_any(sandbox: Sandbox, cli: Cli) -> None:
    """An entry point that was lost in packaging would ship an unpatched image."""
    for arguments in (["generate", "--out", str(sandbox.bundle)], ["check", "--only"], ["list"]):
        done = cli(*arguments, "--installed")
        assert (done.code, len(done.lines)) == (2, 1)
        assert "no installed distribution brings patches" in done.err
    assert not sandbox.bundle.exists()


def made(sandbox: Sandbox, cli: Cli, name: str, mark: str, version: int = 1) -> Path:
    """A bundle of one patch."""
    place = sandbox.root / f"{name}-{mark}-{version}"
    written(place / "patches" / name, sandbox, mark, version)
    arguments = ["--patch-dir", str(place / "patches"), "--patch", name]
    assert cli("generate", "--out", str(place / "bundle"), *arguments).code == 0
    return place / "bundle"


def test_bundles_are_merged(sandbox: Sandbox, cli: Cli) -> None:
    first, second = made(sandbox, cli, "first", "one"), made(sandbox, cli, "second", "two")
    arguments = ["--bundle", str(first), "--bundle", str(second), "--patch", "first", "--patch", "second"]
    done = cli("generate", "--out", str(sandbox.bundle), *arguments)
    assert (done.code, len(done.lines)) == (0, 1)
    assert "first and second have one target" in done.err
    assert sorted(json.loads(sandbox.python(USE_STEP).out.replace("'", '"'))[1:]) == ["one", "two"]
    assert sandbox.reported("first")["state"] == sandbox.reported("second")["state"] == "applied"
    assert cli("generate", "--out", str(first), "--bundle", str(first), "--patch", "first").code == 0, "over itself"


def test_of_two_by_one_name_the_newer_is_taken_and_the_other_said(sandbox: Sandbox, cli: Cli) -> None:
    old, new = made(sandbox, cli, "first", "old"), made(sandbox, cli, "first", "new", 2)
    for order in ((old, new), (new, old)):
        given = [word for place in order for word in ("--bundle", str(place))]
        done = cli("generate", "--out", str(sandbox.bundle), *given, "--patch", "first")
        assert (done.code, len(done.lines)) == (0, 1)
        assert "first: version 2" in done.err
        assert "instead of version 1" in done.err
        assert sandbox.python(USE_STEP).out == "[7, 'new']\n"


def test_what_cannot_be_merged(sandbox: Sandbox, cli: Cli) -> None:
    one, other = made(sandbox, cli, "first", "one"), made(sandbox, cli, "first", "other")
    (sandbox.root / "file").write_text("")
    damaged = made(sandbox, cli, "second", "two")
    (damaged / "__main__.py").write_text("")
    cases = {
        "give one a higher version": [one, other],
        "is a file: unpack it": [sandbox.root / "file"],
        "is not what generate wrote": [damaged],
        "does not exist": [sandbox.root / "nowhere"],
        "is not a bundle": [sandbox.site],
    }
    for message, places in cases.items():
        given = [word for place in places for word in ("--bundle", str(place))]
        done = cli("generate", "--out", str(sandbox.bundle), *given)
        assert (done.code, len(done.lines)) == (2, 1), message
        assert message in done.err
        assert not sandbox.bundle.exists()


def test_a_bundle_behind_another_is_named(sandbox: Sandbox, cli: Cli) -> None:
    """It serves nothing. Once it was silent, also under strict."""
    first, second = made(sandbox, cli, "first", "one"), made(sandbox, cli, "second", "two")
    path = [first, second, sandbox.site]
    said = f"the bundle {second} is on the path, and none of its patches is in use, since another bundle serves"
    done = sandbox.python(USE_STEP, path=path)
    assert (done.code, done.out) == (0, "[7, 'one']\n")
    assert [line for line in done.lines if said in line]
    done = sandbox.python(USE_STEP, path=path, LIVEPATCH="strict")
    assert (done.code, done.out) == (78, "")
    assert [line for line in done.lines if line.startswith("vllm-livepatch: LIVEPATCH=strict: ") and said in line]
    for places in (path, [second, first, sandbox.site]):
        done = sandbox.python("pass", path=places)
        assert (done.code, done.out, done.err) == (0, "", ""), "no target was imported"
    answer = finish([PYTHON, first, "doctor"], sandbox.environ(path=path), cwd=sandbox.root)
    assert (answer.code, said in answer.out) == (1, True)


def test_a_bundle_of_an_older_version_behind_is_named(sandbox: Sandbox, cli: Cli) -> None:
    """Its manifest names no generation, and its entry knows nothing of others."""
    first = made(sandbox, cli, "first", "one")
    old = sandbox.root / "old"
    sandbox.write({"sitecustomize.py": "", "manifest.json": '{"files": {}}'}, old)
    done = sandbox.python(USE_STEP, path=[first, old, sandbox.site], LIVEPATCH="strict")
    assert (done.code, f"the bundle {old} is on the path" in done.err) == (78, True)


def test_two_of_one_version_that_differ_in_their_package_alone(sandbox: Sandbox, cli: Cli) -> None:
    one, other = made(sandbox, cli, "first", "one"), sandbox.root / "other"
    written(other / "patches" / "first", sandbox, "one")
    (other / "patches" / "first" / "__init__.py").write_text("FLAG = 2\n")
    arguments = ["--patch-dir", str(other / "patches"), "--patch", "first"]
    assert cli("generate", "--out", str(other / "bundle"), *arguments).code == 0
    done = cli("generate", "--out", str(sandbox.bundle), "--bundle", str(one), "--bundle", str(other / "bundle"))
    assert (done.code, "give one a higher version" in done.err) == (2, True)


def test_the_same_bundle_twice_is_one(sandbox: Sandbox, cli: Cli) -> None:
    first = made(sandbox, cli, "first", "one")
    copy = sandbox.root / "copy"
    shutil.copytree(first, copy)
    for path in ([first, copy, sandbox.site], [first, first, sandbox.site]):
        done = sandbox.python(USE_STEP, path=path, LIVEPATCH="strict")
        assert (done.code, done.out, len(done.lines)) == (0, "[7, 'one']\n", 1)
