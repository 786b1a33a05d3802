"""Our copy of wrapt, with its compiled part where the bundle has one for this interpreter."""

from __future__ import annotations

import importlib
from typing import Any


def wrapt(vendor: str) -> Any:
    """The copy in the package `vendor`.

    Its compiled part is loaded first, by a module of its own: Python's lock of that module makes it happen once.
    """
    importlib.import_module(f"{__package__}.compiled")
    return importlib.import_module(f"{vendor}.wrapt")
