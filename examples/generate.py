"""Continue several prompts together, with KV and index cache in NVFP4.

python examples/generate.py MODEL_DIR
"""

import sys

from winnow import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "A page holds 128 tokens of every layer, so",
    "def quantise(values):\n",
]


def main(model: str) -> None:
    llm = LLM(model, kv_format="nvfp4", index_format="nvfp4")
    params = SamplingParams(max_tokens=32, temperature=0.7, top_p=0.95, seed=7)
    for prompt, completion in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        if completion.error is not None:
            raise completion.error
        print(f"{prompt!r} -> {completion.text!r} ({completion.finish_reason})")


if __name__ == "__main__":
    main(sys.argv[1])
