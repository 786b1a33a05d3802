"""Loads without a fault, stock and patched side by side: never worse than stock, at any size (docs/contributing.md).

`life`, `loads` and `push` are what comes to a release's real parts, in a driver's process (`driver`); `engine` and
`front` are those parts, without processes; `lmcache_double` and `quiet` stand in for what no machine here has;
`hardship` is what an engine may meet besides. `ours` counts what the bundle does and keeps; `plans` says which loads of
which size; `command` plays them, and `judge` says what is worse; `fleets` pairs engines, servers and workers with older bundles.
"""
