"""The bundle: self-contained, the same bytes for the same input, whole or not written, and verified."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.tools.bundles import bundle, catalogue, placing
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle.verifying import verified

from tests.unit import interpreters
from tests.unit.support import PATCHED, PYTHON, USE_STEP, Cli, Sandbox, finish


@pytest.fixture(scope="module")
def own() -> dict[str, bytes]:
    """The files of the bundle of all of our own patches."""
    return bundle.contents(catalogue.load())


def test_everything_it_needs_is_in_it(patched: Sandbox) -> None:
    """In an environment without any package, and with nothing of this project's folders to fall back to."""
    place = patched.root / "venv"
    assert finish([PYTHON, "-m", "venv", "--without-pip", str(place)], {"PATH": os.environ["PATH"]}).code == 0
    moved = patched.root / "elsewhere" / "moved"
    moved.parent.mkdir()
    patched.bundle.rename(moved)
    code = (
        f"{USE_STEP}\nimport sys; print([path for path in sys.path if 'site-packages' in path and 'venv' not in path])"
    )
    done = finish(
        [place / "bin/python", "-s", "-c", code], patched.environ(path=[moved, patched.site]), cwd=patched.root
    )
    assert (done.code, done.out, len(done.lines)) == (0, f"{PATCHED}[]\n", 1)
    assert patched.report()["bundle"] == str(moved)


def generation(files: dict[str, bytes]) -> str:
    return str(json.loads(files["manifest.json"])["generation"])


def test_two_names_are_importable(own: dict[str, bytes]) -> None:
    assert {name.split("/")[0] for name in own} == {
        "sitecustomize.py",
        "manifest.json",
        "sbom.cdx.json",
        "__main__.py",  # which no import finds: every interpreter has one from its start
        generation(own),
    }
    assert not generation(own).isidentifier()
    inside = {name.split("/")[1] for name in own if name.startswith(f"{generation(own)}/")}
    assert inside == {"_vllm_livepatch", "manifest.json"}


def test_the_manifest_has_the_versions_and_every_file(own: dict[str, bytes]) -> None:
    manifest = json.loads(own["manifest.json"])
    keys = ["vllm-livepatch", "wrapt", "python", "patches", "extensions", "generation", "files"]
    assert list(manifest) == sorted(keys)
    assert manifest["vllm-livepatch"] == metadata.version("vllm-livepatch")
    assert manifest["wrapt"] is None
    assert not [name for name in own if "wrapt" in name], "none of our own patches asks for it"
    assert manifest["patches"] == sorted(catalogue.load())
    copy = f"{generation(own)}/manifest.json"
    assert own[copy] == own["manifest.json"]
    assert set(manifest["files"]) == set(own) - {"manifest.json", copy}
    for name, digest in manifest["files"].items():
        assert digest == hashlib.sha256(own[name]).hexdigest()


def test_the_digest_is_what_sha256sum_says_of_the_manifest(patched: Sandbox) -> None:
    output = finish(["sha256sum", str(patched.bundle / "manifest.json")], {"PATH": os.environ["PATH"]}).out
    assert f"sha256:{output.split()[0]}" == bundle.digest(bundle.contents(patched.entries()))
    patched.python(USE_STEP)
    assert patched.report()["digest"] == bundle.digest(bundle.contents(patched.entries()))


def test_the_entry_names_every_target_module_and_no_other(own: dict[str, bytes]) -> None:
    entries = catalogue.load().values()
    named = {module for entry in entries for module in (*entry.patch.modules, *entry.patch.added)}
    line = next(line for line in own["sitecustomize.py"].decode().splitlines() if line.startswith("TARGETS = "))
    targets = json.loads(line.partition(" = ")[2].partition("  #")[0])
    assert targets.pop("_vllm_livepatch") == "own"
    assert {targets.pop(module.partition(".")[0]) for module in named if module.partition(".")[0] in targets} == {
        "package"
    }
    assert sorted(targets) == sorted(named)


def test_no_bytecode_and_no_caches_are_in_it(own: dict[str, bytes]) -> None:
    assert not [name for name in own if "__pycache__" in name or name.endswith(".pyc")]


def test_the_licence_of_wrapt_comes_with_it(sandbox: Sandbox) -> None:
    sandbox.patch(code="from ...vendor import wrapt\ndef wrappers(livepatch): return {}\n")
    files = bundle.contents(sandbox.entries())
    assert b"Redistribution" in files[f"{generation(files)}/_vllm_livepatch/vendor/wrapt/LICENSE"]
    assert json.loads(files["manifest.json"])["wrapt"] == metadata.version("wrapt")


def test_the_same_bytes_for_the_same_input(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "three"):
        sandbox.patch(name)
    first = bundle.contents(sandbox.entries())
    placing.write_directory(first, sandbox.bundle)
    placing.write_zip(first, sandbox.root / "first.zip")
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    for file in sandbox.patches.rglob("*"):
        os.utime(file, (1, 1))
    entries = dict(reversed(sandbox.entries().items()))
    second = bundle.contents(entries)
    assert second == first
    placing.write_zip(dict(reversed(second.items())), sandbox.root / "second.zip")
    assert (sandbox.root / "first.zip").read_bytes() == (sandbox.root / "second.zip").read_bytes()


def test_a_change_of_a_patch_changes_the_manifest(patched: Sandbox) -> None:
    before = bundle.contents(patched.entries())["manifest.json"]
    file = patched.patches / "around/wrappers.py"
    file.write_text(file.read_text("utf-8") + "# changed\n", "utf-8")
    assert bundle.contents(patched.entries())["manifest.json"] != before


def test_whatever_changes_the_folder_of_all_the_rest_is_another(
    patched: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry's own text, too: a process that runs the old one has the folder that it names to itself."""
    found = {generation(bundle.contents(patched.entries()))}
    found.add(generation(bundle.contents(patched.entries(), {"_wrappers.one.so": b"1"})))
    monkeypatch.setattr(bundle, "_entry", lambda entries: b'# another\nGENERATION = ""  # generate\n')
    found.add(generation(bundle.contents(patched.entries())))
    assert len(found) == 3


# As one file


@pytest.fixture
def zipped(patched: Sandbox) -> Path:
    place = patched.root / "livepatch.zip"
    placing.write_zip(bundle.contents(patched.entries()), place)
    return place


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_the_zip_works_as_it_is(patched: Sandbox, zipped: Path, version: str) -> None:
    shutil.rmtree(patched.bundle)
    done = patched.python(USE_STEP, path=[zipped, patched.site], python=str(interpreters.find(version)))
    assert (done.code, done.out, len(done.lines)) == (0, PATCHED, 1), done.err
    assert patched.report()["bundle"] == str(zipped)
    assert patched.reported()["state"] == "applied"


def test_the_zip_lets_the_next_sitecustomize_run(patched: Sandbox, zipped: Path) -> None:
    patched.write({"sitecustomize.py": "print('theirs')\n"})
    code = f"import sys; print(sys.modules['sitecustomize'].__file__)\n{USE_STEP}"
    done = patched.python(code, path=[zipped, patched.site])
    assert done.out == f"theirs\n{patched.site}/sitecustomize.py\n{PATCHED}"
    code = "import sys; print(getattr(sys.modules.get('sitecustomize'), '__file__', None))"
    off, without = patched.python(code, path=[zipped], LIVEPATCH="off"), patched.python(code, path=[])
    assert (off.out, off.err) == (without.out, "")
    assert str(zipped) not in off.out


def test_the_zip_has_the_directorys_files(patched: Sandbox, zipped: Path) -> None:
    with zipfile.ZipFile(zipped) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    assert found == bundle.contents(patched.entries())
    same = verified(zipped, verified(patched.bundle).digest)
    assert (same.differences, same.compared) == ([], len(found) - 2)


# verify


def test_a_bundle_as_it_was_written_has_no_differences(patched: Sandbox) -> None:
    patched.python(USE_STEP)  # leaves bytecode beside the sources
    assert list(patched.bundle.rglob("*.pyc"))
    found = verified(patched.bundle)
    assert (found.differences, found.earlier) == ([], [])
    assert found.compared == len(bundle.contents(patched.entries())) - 2
    assert found.digest == bundle.digest(bundle.contents(patched.entries()))


def test_a_folder_named_as_a_replaced_bundle_s_is_none_without_its_manifest(patched: Sandbox) -> None:
    name = f"livepatch-0.1.2-{'0' * 16}/more.py"
    patched.write({name: ""}, patched.bundle)
    assert verified(patched.bundle).differences == [f"{name} was added"]


def test_another_digest_is_a_difference(patched: Sandbox) -> None:
    digest = verified(patched.bundle).digest
    assert verified(patched.bundle, digest).differences == []
    other = f"sha256:{'0' * 64}"
    assert verified(patched.bundle, other).differences == [f"the bundle's digest is {digest}, not {other}"]


def test_a_directory_that_is_no_bundle_is_not_read(tmp_path: Path, mocker: MockerFixture) -> None:
    """`verify /` took two minutes to say that there is no manifest."""
    rglob = mocker.patch.object(Path, "rglob", autospec=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"is not a bundle: it has no manifest\.json"):
        verified(tmp_path)
    (tmp_path / "manifest.json").write_text('{"name": "somebody else\'s"}')
    with pytest.raises(UserError, match=r"is not a bundle: its manifest\.json is none of one's"):
        verified(tmp_path)
    rglob.assert_not_called()


def test_the_page_shows_what_is_at_the_top(patched: Sandbox) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/bundle.md").read_text("utf-8")
    shown = re.findall(r"^  ([^ ]+) ", page.partition("DIR/\n")[2].partition("```")[0], re.MULTILINE)
    there = [f"{file.name}/" if file.is_dir() else file.name for file in patched.bundle.iterdir()]
    assert sorted(shown) == sorted(re.sub(r"^livepatch-.*/", "livepatch-VERSION-HEX/", name) for name in there)


def test_without_its_manifest_a_bundle_patches_and_its_digest_is_unknown(patched: Sandbox) -> None:
    (patched.package.parent / "manifest.json").unlink()
    assert patched.python(USE_STEP).out == PATCHED
    assert patched.report()["digest"] is None


def test_every_kind_of_difference_is_found(patched: Sandbox) -> None:
    (patched.bundle / "sitecustomize.py").write_bytes(b"\n" + (patched.bundle / "sitecustomize.py").read_bytes())
    (patched.package / "catalogue.json").unlink()
    (patched.package / "more.py").write_text("")
    (patched.package.parent / "manifest.json").write_text("{}")
    (patched.bundle / "top.txt").write_text("")
    folder = patched.package.relative_to(patched.bundle)
    assert verified(patched.bundle).differences == [
        f"{folder}/catalogue.json is missing",
        f"{folder.parent}/manifest.json was changed",
        "sitecustomize.py was changed",
        f"{folder}/more.py was added",
        "top.txt was added",
    ]


def test_bytecode_that_would_run_instead_of_a_source_is_a_difference(patched: Sandbox) -> None:
    """Beside a source nobody takes it; in its place, or under a new name, an interpreter would run it."""
    (patched.package / "other.pyc").write_bytes(b"")
    (patched.package / "sitecustomize/hook.py").unlink()
    (patched.package / "sitecustomize/hook.pyc").write_bytes(b"")
    folder = patched.package.relative_to(patched.bundle)
    assert verified(patched.bundle).differences == [
        f"{folder}/sitecustomize/hook.py is missing",
        f"{folder}/other.pyc was added",
        f"{folder}/sitecustomize/hook.pyc was added",
    ]


def test_bytecode_that_another_process_is_writing_is_no_difference(patched: Sandbox) -> None:
    """Several engines start from one directory: while one writes a module's bytecode, another asks `doctor`."""
    written = patched.python("import importlib.util as u; print(u.cache_from_source('hook.py'))").out.strip()
    file = patched.package / "sitecustomize" / written
    file.parent.mkdir(exist_ok=True)
    file.with_name(f"{file.name}.140447611103440").write_bytes(b"half")
    assert verified(patched.bundle).differences == []
    other = patched.package / "other.pyc.7"
    other.write_bytes(b"")
    assert verified(patched.bundle).differences == [f"{other.relative_to(patched.bundle)} was added"]


def test_a_changed_zip_is_found(patched: Sandbox, zipped: Path) -> None:
    with zipfile.ZipFile(zipped, "a") as archive:
        archive.writestr("more.py", "")
    assert verified(zipped).differences == ["more.py was added"]


MANIFESTS = ["", "{", "[]", "{}", '{"files": 1}', '{"files": ["a"]}', "\xff", "null"]


@pytest.mark.parametrize("text", MANIFESTS)
def test_a_corrupt_manifest_is_named_as_one(patched: Sandbox, text: str) -> None:
    (patched.bundle / "manifest.json").write_text(text, "latin-1")
    (difference,) = verified(patched.bundle).differences
    assert difference.startswith("manifest.json is damaged: ")


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda content: content[: len(content) // 2],
    "only its first bytes": lambda content: content[:4],
    "a changed byte": lambda content: content[:90] + bytes([content[90] ^ 1]) + content[91:],
    "no end": lambda content: content[:-1],
    "another end": lambda content: content[:-40] + bytes(18) + content[-22:],
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_zip_is_a_bundle_that_differs(zipped: Path, cli: Cli, damage: str) -> None:
    zipped.write_bytes(DAMAGES[damage](zipped.read_bytes()))
    (difference,) = verified(zipped).differences
    assert difference.startswith(f"{zipped} is damaged: ")
    done = cli("verify", str(zipped))
    assert (done.code, done.out, done.err) == (1, f"{difference}\n", "")


def test_what_is_no_bundle(patched: Sandbox, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no zip file")
    for place, message in (
        (patched.site, "has no manifest"),
        (text, "is not a"),
        (tmp_path / "none", "does not exist"),
    ):
        with pytest.raises(UserError, match=message):
            verified(place)


# Writing: whole or not at all. How it is done under processes that are starting: test_upgrade.py.


def test_an_empty_directory_may_be_given(patched: Sandbox) -> None:
    shutil.rmtree(patched.bundle)
    patched.bundle.mkdir()
    patched.generate()
    assert verified(patched.bundle).differences == []


def everything(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() if path.is_file() else b"" for path in place.rglob("*")}


def test_somebody_elses_directory_or_file_is_left_alone(patched: Sandbox) -> None:
    files = bundle.contents(patched.entries())
    (patched.root / "theirs").mkdir()
    (patched.root / "theirs" / "manifest.json").write_text('{"name": "an extension of a browser"}')
    before = everything(patched.root)
    for place in (patched.root / "theirs", patched.site, patched.site / "fakeengine/worker.py", patched.home.parent):
        with pytest.raises(UserError, match="exists and is not a bundle: name a new directory"):
            placing.write_directory(files, place)
    for place in (patched.site, patched.site / "fakeengine/worker.py"):
        with pytest.raises(UserError, match="exists and is not a zip file: name a new one"):
            placing.write_zip(files, place)
    assert everything(patched.root) == before


@pytest.mark.parametrize("existing", [False, True], ids=["new", "older one"])
@pytest.mark.parametrize("kind", ["directory", "zip"])
def test_a_full_disk_leaves_nothing_half_written(patched: Sandbox, kind: str, existing: bool) -> None:
    """As much as fits is 5,000 bytes a file: the first files can be written, a later one cannot."""
    out = patched.root / "out"
    files = bundle.contents(patched.entries())
    write = placing.write_directory if kind == "directory" else placing.write_zip
    if existing:
        write(files, out)
        patched.patch("other")
        files = bundle.contents(patched.entries())
    before = everything(patched.root)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(UserError, match=f"the bundle cannot be written to {out}: File too large"):
            write(files, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert everything(patched.root) == before


@pytest.mark.parametrize("kind", ["--out", "--zip"])
def test_a_read_only_place_leaves_nothing_half_written(patched: Sandbox, kind: str) -> None:
    """Below a file, and below a directory of the kernel's, nobody can make anything: not even root."""
    for place in (patched.site / "fakeengine/worker.py/bundle", Path("/proc/livepatch/bundle")):
        write = placing.write_directory if kind == "--out" else placing.write_zip
        with pytest.raises(UserError, match="the bundle cannot be written to"):
            write(bundle.contents(patched.entries()), place)


def test_a_place_that_pythonpath_cannot_name(patched: Sandbox) -> None:
    for write in (placing.write_directory, placing.write_zip):
        with pytest.raises(UserError, match="PYTHONPATH cannot name it"):
            write(bundle.contents(patched.entries()), patched.root / "with:colon")


def test_the_cached_bundle_is_made_once_and_made_good(
    patched: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = bundle.contents(patched.entries())
    first = bundle.cached(files)
    assert first.is_relative_to(tmp_path / "cache" / "vllm-livepatch")
    stamp = first.stat().st_ino
    assert bundle.cached(files) == first
    assert first.stat().st_ino == stamp
    (first / "sitecustomize.py").write_text("")
    assert bundle.cached(files) == first
    assert verified(first).differences == []
    (first / "manifest.json").write_text("{")
    assert verified(bundle.cached(files)).differences == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert bundle.cached(files).parent.parent.parent == tmp_path
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(UserError, match="there is no place for the bundle: neither the user's cache nor a temporary"):
        bundle.cached(files)
