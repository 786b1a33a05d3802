"""Benchmarks: ratios measured in one run, medians; `python -m vllm_livepatch.tools.bench.NAME`."""
