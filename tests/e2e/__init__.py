"""Tests with the real engine and the real LMCache server. CI runs some; `E2E=all` runs what it has not the time for."""

from __future__ import annotations

import os

import pytest

BY_HAND = os.environ.get("E2E") == "all"
by_hand = pytest.mark.skipif(not BY_HAND, reason="by hand, E2E=all: CI has not the time for it")
