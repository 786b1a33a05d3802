"""Upstream's example proxy, from an archive of a few files."""

from __future__ import annotations

import hashlib
import io
import tarfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.tools.lab import environments, proxy
from vllm_livepatch.tools.releases import registry

CONTENT = b"print('a proxy')\n"


class Answer:
    def __init__(self, names: list[str]) -> None:
        self.raw = io.BytesIO()
        with tarfile.open(fileobj=self.raw, mode="w:gz") as archive:
            for name in names:
                entry = tarfile.TarInfo(name)
                entry.size = len(CONTENT)
                archive.addfile(entry, io.BytesIO(CONTENT))
        self.raw.seek(0)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *error: object) -> None:
        self.raw.close()

    def raise_for_status(self) -> None:
        pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was asked for of a registry that has the archive with these members, all of them the same."""
    urls: list[str] = []
    members = ["vllm-0.32.0/README.md", proxy.MEMBER]

    def get(url: str, **options: Any) -> Answer:
        urls.append(url)
        return Answer(members)

    files = [SimpleNamespace(filename=proxy.ARCHIVE, url="archive"), SimpleNamespace(filename="x.whl", url="wheel")]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(registry, "files", lambda package: files)
    monkeypatch.setattr(registry, "new_session", lambda: nullcontext(SimpleNamespace(get=get)))
    monkeypatch.setattr(proxy, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return urls


def test_it_is_fetched_once(asked: list[str]) -> None:
    proxy.fetch()
    assert proxy.place().read_bytes() == CONTENT
    proxy.fetch()
    assert asked == ["archive"]


def test_another_file_under_its_name_is_refused(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "SHA256", "0" * 64)
    with pytest.raises(environments.InstallationError, match="is not the pinned file"):
        proxy.fetch()
    assert not proxy.place().exists()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MEMBER", "vllm-0.32.0/none.py", "it has no vllm-0.32.0/none.py"),
        ("ARCHIVE", "vllm-9.tar.gz", "cannot be fetched from vllm-9.tar.gz"),
    ],
)
def test_what_is_not_there_is_reported_in_one_line(
    asked: list[str], name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, name, value)
    with pytest.raises(environments.InstallationError, match=message):
        proxy.fetch()
