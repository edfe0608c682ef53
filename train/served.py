"""`python -m train.served`: some recall questions of `train.evaluate`, answered by the engine.

Shows that the server gives what the evaluation of the trained module promises.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from train.mixture import Source
from train.questions import documents
from winnow.config import SamplingParams
from winnow.engine.llm import LLM
from winnow.spec.embedded import DEMO


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records/served.jsonl")
    args = parser.parse_args()
    asked = documents(Source(), args.length, args.documents, seed=1)
    with args.out.open("w") as out:
        for word in ("model", "nvfp4"):
            llm = LLM(DEMO, progress=False, kv_format=word, index_format=word,
                      num_pages=2 * args.length // 128)  # fmt: skip
            right = total = 0
            for questions in asked:
                # One after another: each finds the text before it in the prefix cache.
                for one in questions.asked:
                    wanted = questions.ids[one.start : one.stop].tolist()
                    params = SamplingParams(max_tokens=len(wanted), temperature=0.0)
                    (done,) = llm.generate([questions.ids[: one.start].tolist()], params)
                    right += list(done.token_ids) == wanted
                    total += 1
            record = {"kv": word, "index": word, "length": args.length, "questions": total,
                      "accuracy": round(right / total, 4)}  # fmt: skip
            out.write(json.dumps(record) + "\n")
            out.flush()
            print(json.dumps(record))


if __name__ == "__main__":
    main()
