# mypy: disable-error-code="import-not-found"
"""The connector double under the names of connectors that are looked at by name."""

from __future__ import annotations

from connector_double import ConnectorDouble


class MoRIIOConnector(ConnectorDouble):
    """Loses completions to 0.22.1."""


class NixlConnector(ConnectorDouble):
    """Loses completions from 0.22.1 to 0.30.0."""


class LMCacheMPConnector(ConnectorDouble):
    """Not known to lose any."""
