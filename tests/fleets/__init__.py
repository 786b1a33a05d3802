"""Fleets for real: Ray and Slurm on this machine. CI runs one of each form; `FLEETS=all` runs what takes minutes more."""

from __future__ import annotations

import os

import pytest

by_hand = pytest.mark.skipif(os.environ.get("FLEETS") != "all", reason="by hand, FLEETS=all: it takes minutes")
