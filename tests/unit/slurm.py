"""A Slurm of this machine's own, of Debian's programs: a controller and two nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path

from tests.unit import debian
from tests.unit.support import Done, finish, until

NODES = ("n1", "n2")
CONFIGURED = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthInfo=socket={place}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/%n
SlurmctldPidFile={place}/controller.pid
SlurmdPidFile={place}/%n.pid
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
PartitionName=all Nodes=ALL Default=YES
"""
A_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2\n"


class Cluster:
    """`start` what has to run for it; `hidden` is a directory that the second node sees as empty."""

    def __init__(self, place: Path, hidden: Path) -> None:
        controller = debian.needed("slurmctld-wlm")
        self._root = controller.parents[2]
        if os.getuid() or self._root == Path("/"):
            debian.lack("root's rights, for Slurm's nodes")
        self._place = place
        self._hidden = hidden
        (plugins,) = self._root.glob("usr/lib/*/slurm-wlm")
        self.environ = {
            "LD_LIBRARY_PATH": f"{plugins.parent}:{plugins}",
            "SLURM_CONF": str(place / "slurm.conf"),
            "PATH": f"{self._root}/usr/bin:{os.environ['PATH']}",
            "HOME": str(place / "home"),
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        for folder in ("state", "home", *NODES):
            (place / folder).mkdir(parents=True)
        values = {"place": place, "plugins": plugins, "user": "root", "host": socket.gethostname()}
        ports = [free_port() for _ in ("controller", *NODES)]
        nodes = [
            A_NODE.format(name=name, host=values["host"], port=port)
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        (place / "slurm.conf").write_text(CONFIGURED.format(controller=ports[0], **values) + "".join(nodes))
        (place / "munge.key").write_bytes(os.urandom(1024))
        (place / "munge.key").chmod(0o600)

    def start(self) -> None:
        programs = self._root / "usr/sbin"
        files = [f"--{name}={self._place}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file")]
        files += [f"--key-file={self._place}/munge.key", f"--seed-file={self._place}/munge.seed"]
        self._run("munge", programs / "munged", "--foreground", "--force", "--num-threads=1", *files)
        until((self._place / "munge.socket").exists)
        self._run("controller", programs / "slurmctld-wlm", "-D")
        # Debian's slurmd wants its slurmstepd at this one place.
        own: list[str | Path] = [
            debian.needed("bwrap"),
            "--dev-bind",
            "/",
            "/",
            "--tmpfs",
            "/usr/sbin",
            "--die-with-parent",
        ]
        own += ["--ro-bind", programs / "slurmstepd-wlm", "/usr/sbin/slurmstepd"]
        for name in NODES:
            hiding: list[str | Path] = ["--tmpfs", self._hidden] if name == NODES[-1] else []
            self._run(name, *own, *hiding, programs / "slurmd-wlm", "-D", "-N", name)
        until(lambda: self("sinfo", "--noheader", "--format=%D %t").out == f"{len(NODES)} idle\n", 40)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            process.wait(30)
        self._end_steps()

    def steps(self) -> list[int]:
        """The processes of this cluster that run on: those in whose environment its configuration is."""
        own = f"SLURM_CONF={self._place}/slurm.conf".encode()
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is a zombie
                if own in environ.read_bytes().split(b"\0"):
                    found.append(int(environ.parent.name))
        return found

    def _end_steps(self) -> None:
        """A step's slurmstepd outlives the node: it waits for a controller that is gone."""
        for pid in self.steps():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self.steps(), 20)

    def __call__(self, *command: str | Path, **variables: str) -> Done:
        return finish(command, {**self.environ, **variables}, cwd=self._place)

    def _run(self, name: str, *command: str | Path) -> None:
        with open(self._place / f"{name}.out", "wb") as out:
            self._processes.append(
                subprocess.Popen([*command], env=self.environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
