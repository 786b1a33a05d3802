"""What runs inside the patched process: standard library only."""
