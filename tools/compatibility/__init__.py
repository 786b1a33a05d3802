"""Whether code fits: a patch and a release, modules and modules, a vLLM and an LMCache. Nothing is run."""
