"""Tests with the real engine and the real LMCache server."""
