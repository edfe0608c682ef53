"""Winnow on a CPU beside transformers: the same checkpoint, threads and run.

Ratios, not verdicts: machines differ. Appends records to benchmarks/cpu.jsonl and prints a table.
Decode times are the intervals between tokens, so they hold no prefill. Peak memory is measured
in a process of its own for each length.

    python benchmarks/cpu_against_transformers.py [--out FILE] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import oracle

from winnow.bench.machine import commit, machine, software
from winnow.bench.record import Record, append
from winnow.config import EngineConfig, SamplingParams
from winnow.engine.build import build_engine
from winnow.engine.engine import Engine

LONG = {"max_position_embeddings": 65536}
MODELS: dict[str, dict[str, Any]] = {
    # The checkpoint of the tests, so small that every call's own cost shows.
    "small": LONG,
    # Four times as wide, with the 16 blocks a row that MiniMax-M3 selects.
    "medium": {
        **LONG,
        "hidden_size": 512,
        "intermediate_size": 256,
        "dense_intermediate_size": 1024,
        "shared_intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_local_experts": 16,
        "index_topk_blocks": 16,
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 5,
        "mlp_layer_types": ["dense"] + ["sparse"] * 5,
    },
}
HEAD_DIM = 128
STEPS = 24
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
MEMORY_CONTEXTS = (2048, 4096, 8192, 16384, 32768)


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(oracle.VOCAB, (count, length), generator=generator).tolist()


def build_ours(directory: str, context: int, batch: int, **formats: str) -> Engine:
    pages = batch * (context // 128 + 2) + 1
    config = EngineConfig(num_pages=pages, max_step_tokens=2048, prefix_caching=False, **formats)
    return build_engine(directory, config, progress=False)


def our_times(engine: Engine, batch: int, context: int) -> tuple[float, list[float], list[Any]]:
    """Seconds of prefill, of each decode step of the whole batch, and the tokens."""
    params = SamplingParams(max_tokens=STEPS + 1, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts(batch, context)):
        engine.add(f"r{i}", prompt, params)
    tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(batch)}
    decode: list[float] = []
    start = time.perf_counter()
    while any(not own for own in tokens.values()):
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    prefill = time.perf_counter() - start
    while engine.has_work:
        start = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == batch:
            decode.append(time.perf_counter() - start)
        for output in outputs:
            tokens[output.request_id] += output.token_ids
    return prefill, decode, list(tokens.values())


def their_times(model: Any, batch: int, context: int) -> tuple[float, list[float], list[Any]]:
    """The same of transformers' generate, from the moments at which it asks whether to stop."""
    from transformers import StoppingCriteriaList

    moments: list[float] = []

    def note(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        moments.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    ids = torch.tensor(prompts(batch, context))
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=STEPS + 1,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([note]),
        )
    intervals = [b - a for a, b in pairwise(moments)]
    return moments[0] - start, intervals, out[:, context:].tolist()


def peak_bytes(who: str, directory: str, context: int, threads: int) -> int:
    """Peak resident memory that one prefill adds to a process that has loaded the model."""
    command = [sys.executable, __file__, "--threads", str(threads)]
    command += ["--memory-of", who, "--checkpoint", directory, "--context", str(context)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1])["bytes"])


def measure_memory(who: str, directory: str, context: int) -> None:
    """The child process of `peak_bytes`."""
    if who == "winnow":
        engine = build_ours(directory, context, 1)
        engine.add("one", prompts(1, context)[0], SamplingParams(max_tokens=1))
        before = reset_peak()
        while engine.has_work:
            engine.step()
    else:
        model = load_theirs(directory)
        ids = torch.tensor(prompts(1, context))
        before = reset_peak()
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1)
    print(json.dumps({"bytes": status_bytes("VmHWM") - before}))


def reset_peak() -> int:
    """Forget the peak of resident memory so far; bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def load_theirs(directory: str) -> Any:
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    return MiniMaxM3VLForCausalLM.from_pretrained(directory).eval()


class Sheet:
    """Collects records of one run."""

    def __init__(self, threads: int, workload: dict[str, Any]) -> None:
        self.records: list[Record] = []
        self.workload = workload
        self.fixed = {
            "machine": machine(threads),
            "software": software(),
            "commit": commit(),
        }

    def add(
        self,
        what: str,
        unit: str,
        samples: list[float],
        kv: str = "fp32",
        index: str = "fp32",
        **conditions: Any,
    ) -> None:
        self.records.append(
            Record(
                level="step",
                what=what,
                unit=unit,
                samples=tuple(samples),
                workload=self.workload,
                conditions={
                    "formats": {"compute": "float32", "kv": kv, "index": index},
                    "parallel": {"plan": "tp1", "devices": 1},
                    "acceptance": {"kind": "none"},
                    "cache_state": "cold, prefix caching off",
                    "latency_objective": None,
                    **conditions,
                },
                **self.fixed,
            )
        )


def compare(sheet: Sheet, directory: str, name: str) -> None:
    """Decode at 4,096 tokens and prefill of 8,192, side by side."""
    model = load_theirs(directory)
    their_times(model, 1, 300)
    our_times(build_ours(directory, 300, 1), 1, 300)
    for batch, context in ((1, 4096), (8, 4096), (1, 8192)):
        first, ours, own = our_times(build_ours(directory, context, batch), batch, context)
        own_prefill = [first]
        if batch == 1:
            own_prefill.append(our_times(build_ours(directory, context, 1), 1, context)[0])
        their_prefill, theirs, other = their_times(model, batch, context)
        same = own == other
        for who, prefill, decode in (
            ("winnow", own_prefill, ours),
            ("transformers", [their_prefill], theirs),
        ):
            conditions = {"context": context, "concurrency": batch, "server": who}
            sheet.add("prefill", "s", prefill, **conditions)
            sheet.add("decode step", "s", decode, **conditions)
        ratio = statistics.median(theirs) / statistics.median(ours)
        print(
            f"{name}, batch {batch}, context {context}: decode "
            f"{statistics.median(ours) * 1e3:.1f} ms against "
            f"{statistics.median(theirs) * 1e3:.1f} ms ({ratio:.1f}x), prefill "
            f"{min(own_prefill):.2f} s against {their_prefill:.2f} s "
            f"({their_prefill / min(own_prefill):.1f}x), tokens {'equal' if same else 'DIFFER'}",
            flush=True,
        )


def growth(sheet: Sheet, directory: str, name: str) -> None:
    """How our step and prefill grow with context, and what 4-bit state costs here."""
    for kv, index in (("model", "model"), ("nvfp4", "nvfp4")):
        for context in CONTEXTS:
            engine = build_ours(directory, context, 1, kv_format=kv, index_format=index)
            prefill, decode, _ = our_times(engine, 1, context)
            conditions = {"context": context, "concurrency": 1, "server": "winnow"}
            conditions |= {"kv": "fp32" if kv == "model" else kv}
            conditions |= {"index": "fp32" if index == "model" else index}
            sheet.add("prefill", "s", [prefill], **conditions)
            sheet.add("decode step", "s", decode, **conditions)
            print(
                f"{name}, KV {kv}, index {index}, context {context}: decode "
                f"{statistics.median(decode) * 1e3:.1f} ms, prefill {prefill:.2f} s "
                f"({context / prefill:.0f} tokens/s)",
                flush=True,
            )


def memory(sheet: Sheet, directory: str, name: str, threads: int) -> None:
    """Peak memory of one prefill, each length in its own process."""
    for who, contexts in (("winnow", MEMORY_CONTEXTS), ("transformers", (2048, 4096, 8192))):
        for context in contexts:
            peak = peak_bytes(who, directory, context, threads)
            conditions = {"context": context, "concurrency": 1, "server": who}
            sheet.add("peak memory of prefill", "bytes", [float(peak)], **conditions)
            print(f"{name}, prefill of {context} in {who}: {peak / 1e6:.0f} MB more", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=str(Path(__file__).with_name("cpu.jsonl")))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=tuple(MODELS))
    parser.add_argument("--memory-of", choices=("winnow", "transformers"))
    parser.add_argument("--checkpoint")
    parser.add_argument("--context", type=int)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        measure_memory(args.memory_of, args.checkpoint, args.context)
        return
    for name, geometry in MODELS.items():
        if args.only and name != args.only:
            continue
        with tempfile.TemporaryDirectory() as directory:
            oracle.save(oracle.build(HEAD_DIM, **geometry), Path(directory))
            sheet = Sheet(args.threads, {"model": name, "head_dim": HEAD_DIM, "steps": STEPS})
            compare(sheet, directory, name)
            if name == "small":
                memory(sheet, directory, name, args.threads)
                growth(sheet, directory, name)
            append(Path(args.out), sheet.records)


if __name__ == "__main__":
    main()
