"""Print the text of one prompt as its tokens come, then how long they took to come.

python examples/stream.py MODEL_DIR
"""

import sys
import time

from winnow import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model)
    params = SamplingParams(max_tokens=48, temperature=0.7, seed=7)
    start = time.perf_counter()
    arrivals = []
    for output in llm.stream("Once upon a time", params):
        arrivals.append(time.perf_counter() - start)
        print(output.text, end="", flush=True)
    print(
        f"\nfirst token after {arrivals[0] * 1e3:.0f} ms, {len(arrivals)} in {arrivals[-1]:.2f} s"
    )


if __name__ == "__main__":
    main(sys.argv[1])
