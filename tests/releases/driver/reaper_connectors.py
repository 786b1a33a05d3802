# mypy: disable-error-code="import-not-found"
"""The connector double under names that tell its family. (To 0.19 a name of the release's own would get its own.)"""

from __future__ import annotations

from connector_double import ConnectorDouble


class MoRIIODouble(ConnectorDouble):
    """Loses completions to 0.22.1."""


class NixlDouble(ConnectorDouble):
    """Loses completions from 0.22.1 to 0.30.0."""


class LMCacheDouble(ConnectorDouble):
    """Not known to lose any."""
