"""Serve interpreters that have already imported what vLLM and LMCache need, but nothing of either.

Of the 9 s that importing a release's scheduler costs, 8 go to torch, transformers and the like, which all releases share.
So one process imports those, and forks for each driver: the child takes over the job's environment, working directory
and search path, imports `sitecustomize` if that path has one (as the interpreter's start would), and runs the driver as
`__main__`.

    warm.py PATHS MODULE... <jobs >answers

The modules' third-party imports are what is imported beforehand. They are found in a child for each of PATHS (JSON: a list
of lists), since releases differ in them. A job is a line of JSON: `argv`, `environ`, `cwd`, `path` (to be searched first),
`stdout` and `stderr` (files). It is answered by two lines: the child's pid, which leads a process group of its own, and its
exit status. Where stdin is a socket that listens, who connects has a fork of this process, which takes its jobs.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import hashlib
import importlib
import inspect
import json
import os
import runpy
import socket
import stat
import sys
import threading
from typing import Any, NoReturn, TextIO

OURS = ("vllm", "lmcache", "nixl", "mori", "aiter", "mooncake")
"""Packages of which every job brings its own: a release, or a stand-in."""

INSTALLED = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]
"""Where the standard library and the engine's environment are."""


def third_party(modules: list[str], path: list[str]) -> int:
    """Have a child import `modules` from `path`; where to read the names of what that imports, as JSON.

    The packages that jobs bring themselves are not among them.
    """
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(2, 1)
        sys.path[:0] = path
        for name in modules:
            try:
                importlib.import_module(name)
            except ImportError as error:
                print(f"not warmed up by {name}: {error}", file=sys.stderr)
        found = [name for name in sys.modules if not name.startswith("__") and name.partition(".")[0] not in OURS]
        with os.fdopen(writer, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(writer)
    return reader


def found_once(paths: list[list[str]], modules: list[str]) -> list[str]:
    """What `third_party` finds of all paths. It is kept in this environment: of several servers one looks.

    A list that is older than a module misses what that imports since: its jobs start less warm, and are right.
    """
    key = hashlib.sha256(json.dumps([paths, modules]).encode()).hexdigest()[:16]
    place = os.path.join(sys.prefix, f"warm-{key}.json")
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError), open(place) as file:
            kept: list[str] = json.load(file)
            return kept
        found: list[str] = []
        for reader in [third_party(modules, path) for path in paths]:
            with os.fdopen(reader) as pipe:
                found += json.load(pipe)
            os.wait()
        found = list(dict.fromkeys(found))
        with open(f"{place}.new", "w") as file:
            json.dump(found, file)
        os.replace(f"{place}.new", place)
    return found


def warm_up(paths: list[list[str]], modules: list[str]) -> None:
    """Import what `modules` import of others, from whichever path."""
    for name in (name for name in found_once(paths, modules) if name not in sys.modules):
        try:
            importlib.import_module(name)
        except Exception:  # made by its package in ways of its own, or asks for what this machine lacks
            print(f"not imported beforehand: {name}", file=sys.stderr)
    # Looks each module's file up, once; torch has it asked by each release. Of a file that it knows, it looks up no other.
    inspect.getmodule(sys._getframe(), os.devnull)


def become(job: dict[str, Any]) -> None:
    """Run the job in this process, as far as can be told from within as a fresh interpreter would."""
    for stream, mode, number in (("stdin", os.O_RDONLY, 0), ("stdout", os.O_WRONLY, 1), ("stderr", os.O_WRONLY, 2)):
        opened = os.open(job.get(stream, os.devnull), mode | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(job["environ"])
    os.chdir(job["cwd"])
    sys.argv = job["argv"]
    sys.path[:] = [*job["path"], *INSTALLED]
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    sys.path.insert(0, os.path.dirname(job["argv"][0]))
    runpy.run_path(job["argv"][0], run_name="__main__")


def leave(job: dict[str, Any]) -> NoReturn:
    """Become the job, and end as an interpreter does that runs it, but for taking itself apart.

    That touches, and so copies, what the server and its children share: a third of a second of each job.
    """
    code = 0
    try:
        become(job)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else ended.code is not None
        if code and ended.code is not code:
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # the bundle's last report among them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def connected() -> TextIO:
    """Fork for each that connects. Return in the child: its stdin has the jobs, and this is where their answers go."""
    with socket.socket(fileno=os.dup(0)) as listening:
        while True:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(ChildProcessError):
                if os.fork() == 0:
                    os.dup2(connection.fileno(), 0)
                    return os.fdopen(os.dup(0), "w", buffering=1)
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def main() -> None:
    """Answer jobs until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM and others print as they are imported
    warm_up(json.loads(sys.argv[1]), sys.argv[2:])
    gc.collect()
    gc.freeze()
    if stat.S_ISSOCK(os.fstat(0).st_mode):
        answers = connected()
    print("ready", file=answers)
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            os.setsid()
            answers.close()
            leave(json.loads(line))
        print(child, file=answers)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers)


if __name__ == "__main__":
    main()
