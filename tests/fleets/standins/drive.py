"""An engine on Ray's executor: a few tokens, and then it waits for the end of its stdin. The model is its argument."""

import sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams  # not again in each process that is spawned

    engine = LLM(
        sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        block_size=128,
        max_model_len=512,
        tensor_parallel_size=int(sys.argv[2]),
        distributed_executor_backend="ray",
    )
    (answer,) = engine.generate(["w1 w2 w3 w4"], SamplingParams(max_tokens=5, temperature=0))
    print("answered:", answer.outputs[0].text, flush=True)
    sys.stdin.read()
