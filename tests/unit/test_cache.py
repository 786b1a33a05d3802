"""The user's cache: nothing that anybody else may have written is taken from it, and none that hangs is waited for."""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.sitecustomize import cache, changed_module, fingerprint


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of the cache, as it is written there."""
    tmp_path.chmod(0o700)
    place = tmp_path / "place" / "file"
    assert cache.replace(str(place), b"data")
    return place


def test_what_is_written_is_its_owners_alone(file: Path) -> None:
    assert cache.read(str(file)) == b"data"
    assert [entry.stat().st_mode & 0o777 for entry in (file.parent, file)] == [0o700, 0o600]
    assert [entry.name for entry in file.parent.iterdir()] == ["file"]
    file.parent.chmod(0o755)
    assert cache.read(str(file)) == b"data"  # others may read it


def test_what_others_may_have_written_is_not_read(file: Path) -> None:
    for changed in (file, file.parent):
        before = changed.stat().st_mode
        for writable in (0o020, 0o002):
            changed.chmod(before | writable)
            assert cache.read(str(file)) is None
        changed.chmod(before)
    assert cache.read(str(file)) == b"data"
    (file.parent / "second name").hardlink_to(file)
    assert cache.read(str(file)) is None


def test_only_a_file_is_read(file: Path) -> None:
    link, pipe, folder = (file.with_name(name) for name in ("link", "pipe", "folder"))
    link.symlink_to(file)
    os.mkfifo(pipe, 0o600)  # one that is waited for would hang an import
    folder.mkdir(0o700)
    assert [cache.read(str(one)) for one in (link, pipe, folder, file.with_name("none"))] == [None] * 4


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(file: Path) -> None:
    (file.parent / "folder" / "in it").mkdir(parents=True)
    assert not cache.replace(str(file.parent / "folder"), b"data")
    assert sorted(entry.name for entry in file.parent.iterdir()) == ["file", "folder"]
    assert not cache.replace(str(file / "below a file"), b"data")


def test_the_directory_that_is_made_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the process's umask: what is read from there is executed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "home").mkdir(0o755)
    before = os.umask(0)
    try:
        environs = [{"XDG_CACHE_HOME": str(tmp_path / "home")}, {"XDG_CACHE_HOME": "/proc"}]
        places = [cache.directory(environ) for environ in environs]
        again = [cache.directory(environ) for environ in environs]
    finally:
        os.umask(before)
    assert places == [
        str(tmp_path / "home" / "vllm-livepatch"),
        str(tmp_path / f"vllm-livepatch-{os.getuid()}-cache"),
    ]
    assert again == places
    assert [Path(str(place)).stat().st_mode & 0o777 for place in places] == [0o700, 0o700]


@pytest.mark.parametrize(("mode", "safe"), [(0o755, True), (0o1777, True), (0o775, False), (0o757, False)])
def test_a_place_below_one_that_others_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, safe: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(mode)
    (above / "home").mkdir(0o700)
    environ = {"XDG_CACHE_HOME": str(above / "home")}
    ours = str(above / "home" / "vllm-livepatch")
    temporary = str(tmp_path / "temporary" / f"vllm-livepatch-{os.getuid()}-cache")
    assert cache.directory(environ) == (ours if safe else temporary)


@pytest.mark.parametrize(("mode", "used"), [(0o700, True), (0o755, True), (0o770, False), (0o702, False)])
def test_a_place_of_ours_that_others_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, used: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    place = tmp_path / "home" / "vllm-livepatch"
    place.mkdir(parents=True)
    tmp_path.chmod(0o700)
    place.parent.chmod(0o700)
    place.chmod(mode)
    temporary = tmp_path / "temporary" / f"vllm-livepatch-{os.getuid()}-cache"
    assert cache.directory({"XDG_CACHE_HOME": str(place.parent)}) == str(place if used else temporary)


@pytest.mark.parametrize(
    ("kept", "taken"),
    [
        (compile("value = 2", "FILE", "exec"), True),
        (compile("value = 2", "another.py", "exec"), False),
        ("value = 2", False),
    ],
    ids=["its own", "of another file", "no code"],
)
def test_compiled_code_is_taken_only_if_it_names_its_file(tmp_path: Path, kept: Any, taken: bool) -> None:
    """Else tracebacks and debuggers would show other lines than those that run."""
    tmp_path.chmod(0o700)
    module = changed_module.ChangedModule("engine.part", "value = 1\n", None, str(tmp_path))
    if getattr(kept, "co_filename", None) == "FILE":
        kept = kept.replace(co_filename=module.filename)
    data = marshal.dumps(kept)
    magic = importlib.util.MAGIC_NUMBER
    assert cache.replace(module._bytecode(), magic + hashlib.sha256(data).digest() + data)
    found: dict[str, int] = {}
    exec(module.code(), found)
    assert (found["value"], module.code().co_filename) == (2 if taken else 1, module.filename)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(cache, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(cache, "_silent", [])
    event = threading.Event()
    yield event
    event.set()


def test_a_cache_that_hangs_is_given_up_for_good(hanging: threading.Event) -> None:
    assert cache.in_time(lambda: 1) == 1
    assert cache.in_time(hanging.wait) is None
    assert cache.in_time(lambda: 1) is None


def test_a_cache_that_fails_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda error: None)
    assert cache.in_time(lambda: 1 // 0) is None

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert cache.in_time(lambda: 1) is None


SOURCE = "def f(): pass\ndef g(): return 1\n"


def test_fingerprints_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path)
    right = fingerprint.of_names(SOURCE, {"a": "f", "b": "g", "c": "none"})
    assert cache.Fingerprints(place).of_names(SOURCE, {"a": "f"}) == {"a": right["a"]}
    assert cache.Fingerprints(place).of_names(SOURCE, {"b": "g", "c": "none"}) == {"b": right["b"], "c": None}
    (file,) = (tmp_path / "fingerprints").iterdir()
    asked: list[str] = []

    def counted(source: str, names: dict[str, str]) -> dict[str, str | None]:
        asked.extend(names)
        return dict.fromkeys(names, "found")

    monkeypatch.setattr(fingerprint, "of_names", counted)
    assert cache.Fingerprints(place).of_names(SOURCE, {"a": "f", "b": "g", "c": "none"}) == right
    assert asked == []
    for damage in (b"[]", b"{", b"\xff"):
        file.write_bytes(damage)
        assert cache.Fingerprints(place).of_names(SOURCE, {"a": "f"}) == {"a": "found"}
    assert cache.Fingerprints(None).of_names(SOURCE, {"a": "f"}) == {"a": "found"}
    assert asked == ["f", "f", "f", "a"]


def test_who_waits_for_a_cache_that_hangs_does_not_hold_up_the_exit(hanging: threading.Event) -> None:
    cache.in_time(hanging.wait)
    assert [thread.daemon for thread in cache._silent] == [True]


def test_a_place_that_cannot_be_written_is_not_used(tmp_path: Path, mocker: MockerFixture) -> None:
    """Root may write anywhere, but for a file system that is mounted to be read."""
    tmp_path.chmod(0o700)
    places = [tmp_path / "read only", tmp_path / "no way in", tmp_path / "good"]
    denied = {str(places[0]): os.W_OK, str(places[1]): os.X_OK}
    mocker.patch.object(cache, "_candidates", return_value=[(str(place), os.stat) for place in places])
    mocker.patch.object(os, "access", side_effect=lambda place, mode: not mode & denied.get(place, 0))
    mocker.patch.object(cache, "_above_is_safe", return_value=True)
    assert cache.directory({}) == str(places[2])


def test_what_lies_below_directories_of_root_is_safe_for_everybody(mocker: MockerFixture) -> None:
    assert (os.stat("/").st_uid, os.stat("/usr").st_uid) == (0, 0)
    mocker.patch.object(os, "getuid", return_value=12345)
    assert cache._above_is_safe("/usr/lib")


def test_what_lies_in_the_way_of_a_write_is_neither_followed_nor_changed(file: Path, mocker: MockerFixture) -> None:
    mocker.patch.object(os, "urandom", return_value=b"known")
    place = file.with_name("other")
    in_the_way = place.with_name(f"other.{b'known'.hex()}.tmp")
    in_the_way.symlink_to(file)
    assert not cache.replace(str(place), b"more")
    in_the_way.unlink(missing_ok=True)
    in_the_way.symlink_to(file.with_name("nothing"))
    assert not cache.replace(str(place), b"more")
    assert file.read_bytes() == b"data"
    assert not file.with_name("nothing").exists()
