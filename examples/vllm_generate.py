"""Generate with vLLM on tsmla's kernels: vLLM finds the plug-in when tsmla is installed beside it.

python examples/vllm_generate.py deepseek-ai/DeepSeek-V2-Lite
"""

from __future__ import annotations

import sys

BACKENDS = {"backend": "TSMLA", "mla_prefill_backend": "TSMLA"}  # vLLM 0.26: "CUSTOM"


def main(model: str) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(model=model, trust_remote_code=True, attention_config=BACKENDS)
    for answer in engine.generate(["The capital of France is"], SamplingParams(max_tokens=32, temperature=0)):
        print(answer.outputs[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:])
