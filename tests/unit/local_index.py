"""A package index on this machine, with wheels made up for a test, that serves byte ranges and can misbehave."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BINARY = bytes(range(256)) * 4096
"""Stands for compiled kernels: 1 MiB that nobody needs to download."""


def make_wheel(package: str, version: str, files: Mapping[str, bytes]) -> bytes:
    """Return a wheel holding `files`, with a large binary before, between and after them, as real ones have."""
    buffer = io.BytesIO()
    metadata = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"{package}/_first.so", BINARY)
        for name, content in files.items():
            archive.writestr(name, content, compress_type=zipfile.ZIP_DEFLATED)
        archive.writestr(f"{package}/_last.so", BINARY)
        archive.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(f"{metadata}/LICENSE", "none")
    return buffer.getvalue()


def make_source_archive(package: str, version: str, files: Mapping[str, bytes], below: str = "") -> bytes:
    """Return a source archive holding `files` below its one folder, and below `below` in that."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in {"setup.py": b"raise SystemExit('executed')\n", **files}.items():
            member = tarfile.TarInfo(f"{package}-{version}/{below if name != 'setup.py' else ''}{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


class LocalIndex:
    """What the index offers (change it at any time), how it misbehaves, and what it was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.yanked: set[str] = set()
        self.digests: dict[str, str] = {}
        """Digests to claim in place of the true ones, by file name."""
        self.ignore_ranges = False
        self.cut_short = False
        """Send half of each part of a file, then hang up."""
        self.cut_whole = False
        """The same for a file that is sent whole."""
        self.status: int | None = None
        """Answer everything with this status, where not None."""
        self.content_type = "text/html"
        self.requests = 0
        self.sent = 0
        """Bytes of files sent."""
        self.port = 0

    @property
    def url(self) -> str:
        """The index's address, with credentials, as a private index's has."""
        return f"http://user:secret@127.0.0.1:{self.port}/simple/"

    def add(self, package: str, name: str, content: bytes) -> str:
        """Offer a file and return its SHA-256."""
        self.files.setdefault(package, {})[name] = content
        return hashlib.sha256(content).hexdigest()

    def page(self, package: str) -> bytes:
        """Return the index's page of a package."""
        links = []
        for name, content in self.files[package].items():
            digest = self.digests.get(name) or hashlib.sha256(content).hexdigest()
            yanked = ' data-yanked="broken"' if name in self.yanked else ""
            links.append(f'<a href="/files/{package}/{name}#sha256={digest}"{yanked}>{name}</a>')
        return f"<!DOCTYPE html><html><body>{'<br>'.join(links)}</body></html>".encode()


@contextmanager
def serving(index: LocalIndex) -> Iterator[LocalIndex]:
    """Serve an index on a free port of this machine for as long as the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            index.requests += 1
            kind, _, rest = self.path.strip("/").partition("/")
            package, _, name = rest.partition("/")
            if index.status is not None:
                self.answer(index.status, b"")
            elif package not in index.files:
                self.answer(404, b"")
            elif kind == "simple":
                self.answer(200, index.page(package), {"Content-Type": index.content_type})
            else:
                self.send_part(index.files[package][name])

        def send_part(self, content: bytes) -> None:
            match = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
            if match is None or index.ignore_ranges:
                self.answer(200, content)
                return
            first, last = match.groups()
            start = int(first) if first else max(0, len(content) - int(last))
            end = min(int(last), len(content) - 1) if first and last else len(content) - 1
            self.answer(206, content[start : end + 1], {"Content-Range": f"bytes {start}-{end}/{len(content)}"})

        def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if (status == 206 and index.cut_short) or (index.cut_whole and len(body) > len(BINARY)):
                body = body[: len(body) // 2]
                self.close_connection = True
            self.wfile.write(body)
            index.sent += len(body) if headers is None or "Content-Range" in headers else 0

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Say nothing: a client that hangs up on a damaged answer is what some tests are about."""

    with Server(("127.0.0.1", 0), Handler) as server:
        index.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield index
        finally:
            server.shutdown()
            thread.join()
