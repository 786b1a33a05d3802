"""vllm-livepatch: patches for vLLM and LMCache, applied as their modules are imported."""
