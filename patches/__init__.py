"""What is patched: one folder a patch, its facts (`patch.toml`) and its code together."""
