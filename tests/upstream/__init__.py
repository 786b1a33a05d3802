"""Upstream's own tests of schedulers and connectors, on a release's code, stock beside patched."""
