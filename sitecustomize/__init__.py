"""What runs inside the patched process: standard library only, and wrapt once a target is imported."""
