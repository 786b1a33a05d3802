"""Names of patches, as somebody typed them."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from ..errors import UserError


def known(names: Collection[str], name: str) -> str:
    """A patch's name as somebody typed it, with `_` or `-`, as `names` have it. Raises UserError."""
    asked = name.replace("_", "-")
    if asked in names:
        return asked
    near = difflib.get_close_matches(asked.lower(), names, 1)
    rest = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(names))}"
    raise UserError(f"no patch is called {name}; {rest}")
