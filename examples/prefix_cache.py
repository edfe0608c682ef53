"""Ask two questions about one document: the second finds the document's pages in the cache.

Pages hold 128 tokens, so a shared beginning is found up to a multiple of 128.

python examples/prefix_cache.py MODEL_DIR
"""

import sys

from winnow import LLM, SamplingParams

DOCUMENT = "Winnow keeps 128 tokens of every layer in one row of bytes. " * 20
QUESTIONS = ["\nHow many tokens does a row hold?", "\nWhat is a row made of?"]


def main(model: str) -> None:
    llm = LLM(model)
    params = SamplingParams(max_tokens=16, temperature=0)
    for question in QUESTIONS:
        (completion,) = llm.generate([DOCUMENT + question], params)
        if completion.usage is None:
            raise RuntimeError("the prompt was refused") from completion.error
        usage = completion.usage
        print(f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} from the cache")


if __name__ == "__main__":
    main(sys.argv[1])
