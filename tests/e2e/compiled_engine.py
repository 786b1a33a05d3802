# mypy: disable-error-code="import-not-found"
"""One prompt through the real engine with compilation by vLLM's own backend; prints what came out, as JSON.

`python compiled_engine.py MODEL PROMPT`. On CPU vLLM takes another mode, which loads no compiled artifact again; so the
mode that GPUs get is put back.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams, _custom_ops
from vllm.config import CompilationMode
from vllm.platforms.cpu import CpuPlatform

as_released = CpuPlatform.check_and_update_config.__func__


def check_and_update_config(cls: Any, vllm_config: Any) -> None:
    as_released(cls, vllm_config)
    compilation = vllm_config.compilation_config
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.backend = "inductor"
    compilation.compile_sizes = []


if __name__ == "__main__":
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    # CPUs with AMX or AVX-512 get linear layers of their own, which that backend does not know.
    _custom_ops._supports_onednn = False
    engine = LLM(model=sys.argv[1], dtype="float32", max_model_len=256, max_num_seqs=4, block_size=32, seed=1)
    (request,) = engine.generate([sys.argv[2]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    print(json.dumps(request.outputs[0].text))
