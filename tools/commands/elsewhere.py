"""`lab`, which comes with a distribution of its own: vllm-livepatch-lab."""

from __future__ import annotations

from typing import Annotated

import typer
from vllm_livepatch.tools.bundles import bundle
from vllm_livepatch.tools.errors import UserError


def add_lab(app: typer.Typer) -> None:
    """Add the command, or one that says where to get it."""
    try:
        from vllm_livepatch.tools.lab.options import lab
    except ImportError:
        app.command("lab", context_settings={"ignore_unknown_options": True})(_absent)
    else:
        app.command("lab")(lab)


def _absent(words: Annotated[list[str] | None, typer.Argument(metavar="TOPOLOGY", hidden=True)] = None) -> None:
    """A real topology on this machine. It comes with vllm-livepatch-lab, which is not installed."""
    raise UserError(
        f"the lab is a distribution of its own: pip install vllm-livepatch-lab=={bundle.version()} "
        "(in a checkout: pip install ./tools/lab)"
    )
