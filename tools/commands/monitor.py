"""What `status` does for a person at a terminal, for a script, and for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from vllm_livepatch.sitecustomize.decision import Patch
from vllm_livepatch.tools.bundled import command, status
from vllm_livepatch.tools.bundled.verifying import check_digest
from vllm_livepatch.tools.commands import rendering
from vllm_livepatch.tools.errors import UserError


def run(
    directory: Path,
    *,
    as_json: bool,
    watch: bool,
    summary: bool,
    require: Sequence[str],
    digest: str | None,
    prune: bool,
    prometheus: Path | None,
    serve: int | None,
    address: str,
    patches: Sequence[Patch],
) -> int:
    """The exit code. `patches` are those that are known here. Raises UserError."""
    check_digest(digest)
    reports = status.read(directory)
    required = status.requirements(reports, require, patches)
    if prometheus is not None or serve is not None:
        if watch or as_json or summary:
            raise UserError("--prometheus and --serve go without --watch, --json and --summary")
        from vllm_livepatch.tools.commands import metrics  # a tenth of a second

        if prometheus is not None:
            metrics.write(directory, prometheus)
        if serve is not None:
            metrics.serve(directory, serve, address)
        return command.settled(status.read(directory), required, digest, prune, patches)
    if as_json or summary:
        return command.show_status(
            directory,
            as_json=as_json,
            watch=watch,
            as_summary=summary,
            require=require,
            digest=digest,
            prune=prune,
            patches=patches,
        )
    if watch:
        with Live(console=Console(), refresh_per_second=2) as live:
            while True:
                live.update(rendering.status_view(status.processes(directory), directory))
                time.sleep(1)
    Console().print(rendering.status_view(reports.live, directory))
    return command.settled(reports, required, digest, prune, patches)
