"""The same traffic on the same server by two clients, one after the other: do they agree?

AIPerf, as `winnow bench serving` drives it, and guidellm or `vllm bench serve` take turns, each
first in every other round, so that what the machine does beside them hits both. Both send
independent requests of one fixed shape in a closed loop. Appends the records of every run and
prints how far apart the two are, as the median over rounds of their ratio in a round; exit status
1 if time to first token or output throughput differ by more than 5%.

    python benchmarks/serving_two_clients.py --url http://127.0.0.1:8000 --model NAME \
        --tokenizer DIR --client guidellm=/path/to/guidellm [--out FILE]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from winnow import __version__
from winnow.bench import aiperf
from winnow.bench.aiperf import Load
from winnow.bench.exports import READERS
from winnow.bench.machine import commit, machine, software
from winnow.bench.record import Record, append
from winnow.bench.runs import ITL, OUTPUT_PER_DEVICE, TTFT, serving_records

WITHIN = 0.05
JUDGED = (TTFT, OUTPUT_PER_DEVICE)


def main() -> int:
    args = arguments()
    tool, _, program = args.client.partition("=")
    shape = {"input_tokens": args.input, "output_tokens": args.output, "requests": args.requests}
    workload = {"name": "two clients", "model": args.model, **shape}
    conditions = {
        "formats": dict(pair.split("=") for pair in args.formats.split(",")),
        "parallel": {"plan": "tp1", "devices": 1},
        "acceptance": {"kind": "none"},
        "cache_state": args.cache_state,
        "latency_objective": {},
    }
    # Of the moment at which the server runs already, not of what is committed meanwhile.
    source = commit()
    found: dict[str, list[dict[str, Record]]] = {"aiperf": [], tool: []}
    with tempfile.TemporaryDirectory() as directory:
        for turn, client in enumerate(("aiperf", tool, tool, "aiperf") * (args.rounds // 2)):
            export = Path(directory) / f"{turn}-{client}"
            export.mkdir()
            run = {"aiperf": by_aiperf, "guidellm": by_guidellm, "vllm": by_vllm}[client]
            (read,) = READERS[client](run(args, program, export))
            read = replace(read, load={"concurrency": args.concurrency})
            server = {**software(), "server": args.server}
            records = serving_records(read, workload, conditions, machine(), server, source)
            append(args.out, records)
            measured = {r.what: r for r in records if r.workload["phase"] == "measured"}
            found[client].append(measured)
            shown = (f"{what} {measured[what].median:.2f}" for what in (*JUDGED, ITL))
            print(f"{read.tool}: {', '.join(shown)}", flush=True)
    return judge(found["aiperf"], found[tool], tool)


def judge(ours: list[dict[str, Record]], theirs: list[dict[str, Record]], tool: str) -> int:
    """Compare round by round; how far apart the rounds are stands beside."""
    agree = True
    for what in JUDGED:
        pairs = zip(theirs, ours, strict=True)
        ratios = sorted(b[what].median / a[what].median - 1 for b, a in pairs)
        apart = median(ratios)
        agree &= abs(apart) <= WITHIN
        rounds = ", ".join(f"{ratio:+.1%}" for ratio in ratios)
        print(f"{what}: {tool} is {apart:+.1%} from AIPerf; rounds: {rounds}")
    print("they agree within 5%" if agree else "they do NOT agree within 5%")
    return 0 if agree else 1


def by_aiperf(args: argparse.Namespace, program: str, export: Path) -> Path:
    counts = {"request-count": args.requests, "warmup-request-count": args.warmup}
    words = aiperf.arguments(
        args.url,
        args.model,
        args.tokenizer,
        Load(args.concurrency),
        {"isl": args.input, "osl": args.output},
        counts,
        ["ignore_eos:true"],
        seed=1,
        artifacts=export,
    )
    aiperf.profile(words, export, 3600)
    return export


def by_guidellm(args: argparse.Namespace, program: str, export: Path) -> Path:
    report = export / "report.json"
    run(
        program, "run", "--disable-console",
        "--backend", f"kind=openai_http,target={args.url},model={args.model}",
        "--profile", f"kind=concurrent,streams={args.concurrency}",
        "--constraint", f"kind=max_requests,count={args.requests}",
        "--tokenizer", f"kind=hf_auto,model={args.tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens={args.input},output_tokens={args.output}",
        # By default it makes 4,096 prompts while it measures, on the server's processor.
        "--data-loader", f"kind=pytorch,samples={args.requests}",
        "--output", f"kind=json,path={report}",
    )  # fmt: skip
    return report


def by_vllm(args: argparse.Namespace, program: str, export: Path) -> Path:
    result = export / "result.json"
    run(
        program, "bench", "serve", "--backend", "openai-chat", "--base-url", args.url,
        "--endpoint", "/v1/chat/completions", "--model", args.model,
        "--tokenizer", args.tokenizer, "--dataset-name", "random",
        "--random-input-len", args.input, "--random-output-len", args.output,
        "--num-prompts", args.requests, "--num-warmups", args.warmup,
        "--max-concurrency", args.concurrency, "--ignore-eos",
        "--save-result", "--save-detailed", "--result-filename", result,
    )  # fmt: skip
    return result


def run(*words: Any) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{words[0]} ended with status {done.returncode}: {done.stderr[-1500:]}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--url", required=True)
    add("--model", required=True, help="as the server calls it")
    add("--tokenizer", required=True, help="directory of its tokenizer.json")
    add("--client", required=True, help="guidellm=PROGRAM or vllm=PROGRAM")
    add("--input", type=int, default=1024, help="tokens of a prompt")
    add("--output", type=int, default=64, help="tokens of an answer")
    add("--concurrency", type=int, default=1)
    add("--requests", type=int, default=12)
    add("--warmup", type=int, default=2)
    add("--rounds", type=int, default=6, help="turns of each client, an even number")
    add("--formats", default="kv=model,index=model", help="of the server")
    add("--cache-state", default="warm server, prefix caching off")
    add("--server", default=f"winnow {__version__}")
    add("--out", type=Path, default=Path(__file__).with_name("serving-two-clients.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
