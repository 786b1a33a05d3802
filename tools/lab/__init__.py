"""The lab: real engines with topologies, loads and faults, stock and patched, and the environments that they need."""
