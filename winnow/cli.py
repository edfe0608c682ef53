"""The command line: words in, one call, words out. Every command imports only what it needs."""

from __future__ import annotations

import argparse
import io
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from winnow import __version__
from winnow.config import EngineConfig, SamplingParams
from winnow.errors import RequestError, WinnowError
from winnow.spec.formats import CACHE_FORMATS
from winnow.spec.presets import PRESETS

_JSON = "print JSON"
_BACKEND = "one that `winnow backends` lists"
_KV_FORMAT = "K and V in the cache; `model` is the compute dtype"
_INDEX_FORMAT = "index keys in the cache; `model` is the compute dtype"
_PRESETS = f"one of {', '.join(PRESETS)}"
_SAMPLING: dict[str, tuple[type, str, str]] = {
    "max_tokens": (int, "N", "tokens to generate at most"),
    "min_tokens": (int, "N", "tokens before an end may come"),
    "temperature": (float, "T", "0 is greedy"),
    "top_k": (int, "N", "keep the N likeliest tokens; 0 is all"),
    "top_p": (float, "P", "keep the likeliest tokens that together reach probability P"),
    "min_p": (float, "P", "keep tokens at least P times as likely as the likeliest"),
    "repetition_penalty": (float, "X", "weaken tokens of prompt and answer by a factor; 1 is off"),
    "presence_penalty": (
        float,
        "X",
        "take X from logits of tokens that the answer holds; 0 is off",
    ),
    "frequency_penalty": (
        float,
        "X",
        "take X from logits for each time the answer holds the token",
    ),
    "seed": (int, "N", "the same seed gives the same tokens; without it one is drawn"),
    "logprobs": (int, "N", "with --json: log-probabilities of each token and the N likeliest"),
}
"""Fields of SamplingParams that are one number each: type, what stands for it, and its meaning."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it did what was asked, 1 with one sentence on stderr if not."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING,
        format="winnow: %(message)s",
        stream=sys.stderr,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal whose encoding lacks a character shows its number instead.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except WinnowError as error:
        print(f"winnow: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; there is nobody to tell.
        _drop_output()
        return 1
    except OSError as error:
        # The machine's fault, not the program's: a full disk, a path that cannot be written.
        print(f"winnow: {error}", file=sys.stderr)
        _drop_output()
        return 1
    return status


def _drop_output() -> None:
    """Let go of output that cannot be written: Python would complain of it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _generate(args: argparse.Namespace) -> int:
    from winnow.engine.llm import LLM

    prompt = _prompt(args)
    params = SamplingParams(
        stop=tuple(args.stop),
        stop_ids=tuple(args.stop_id),
        ignore_eos=args.ignore_eos,
        **{name: getattr(args, name) for name in _SAMPLING},
    )
    options = {
        name: getattr(args, name)
        for name in EngineConfig.__dataclass_fields__
        if getattr(args, name, None) is not None
    }
    llm = LLM(
        args.model,
        random_weights=args.random_weights,
        num_layers=args.layers,
        progress=not args.json,
        **options,
    )
    streamed = not args.json and llm.engine.tokenizer is not None
    token_ids: list[int] = []
    texts: list[str] = []
    logprobs: list[Any] = []
    for output in llm.stream(prompt, params):
        token_ids += output.token_ids
        logprobs += [asdict(entry) for entry in output.logprobs]
        if output.text is not None:
            texts.append(output.text)
            if streamed:
                print(output.text, end="", flush=True)
    if not args.json:
        print("" if streamed else ",".join(map(str, token_ids)))
        return 0
    assert output.usage is not None
    answer = {
        "token_ids": token_ids,
        "text": "".join(texts) if texts else None,
        "finish_reason": output.finish_reason,
        "usage": asdict(output.usage),
    }
    if args.logprobs is not None:
        answer["logprobs"] = logprobs
    print(json.dumps(answer))
    return 0


def _prompt(args: argparse.Namespace) -> str | list[int]:
    """Exactly one of the three ways to give a prompt."""
    if args.token_ids is not None:
        try:
            return [int(word) for word in args.token_ids.split(",") if word.strip()]
        except ValueError:
            raise RequestError(
                f"--token-ids is {args.token_ids!r}: give whole numbers with commas, like 1,2,3"
            ) from None
    if args.prompt is not None:
        return str(args.prompt)
    try:
        if args.prompt_file == "-":
            return sys.stdin.read()
        return Path(args.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"cannot read the prompt from {args.prompt_file}: {error}; "
            "give a text file in UTF-8, or - for standard input"
        ) from None


def _plan(args: argparse.Namespace) -> int:
    from winnow.spec.capacity import capacity, render

    plan = capacity(
        args.model,
        kv_format=args.kv_format,
        index_format=args.index_format,
        memory_bytes=None if args.memory_gb is None else int(args.memory_gb * 1e9),
        memory_fraction=args.memory_fraction,
        reserve_bytes=int(args.reserve_gb * 1e9),
        tp_size=args.tp,
        draft_layers=args.draft_layers,
    )
    print(json.dumps(asdict(plan), indent=1) if args.json else render(plan))
    return 0


def _bench_conformance(args: argparse.Namespace) -> int:
    from winnow.bench.conformance import as_json, conformance, render

    reports = conformance(args.backend)
    print(json.dumps(as_json(reports), indent=1) if args.json else render(reports))
    return 1 if any(report.failed for report in reports) else 0


def _backends(args: argparse.Namespace) -> int:
    from winnow.ops.table import BACKENDS, kernels, why_not

    answer: dict[str, Any] = {}
    for backend in BACKENDS:
        reason = why_not(backend)
        answer[backend] = {
            "serves": reason is None,
            "reason": reason,
            "ops": {} if reason else kernels(backend).served_by(),
        }
    if args.json:
        print(json.dumps(answer, indent=1))
        return 0
    for backend, what in answer.items():
        print(f"{backend}: {what['reason'] or 'serves every op'}")
        for op, module in what["ops"].items():
            print(f"  {op:18} {module}")
    return 0


def _convert(args: argparse.Namespace) -> int:
    from winnow.model.checkpoint import convert

    convert(Path(args.source), Path(args.destination), experts=args.experts, linear=args.linear)
    return 0


def _make_tiny(args: argparse.Namespace) -> int:
    from winnow.model.checkpoint import make_tiny

    make_tiny(Path(args.directory), seed=args.seed)
    print(args.directory)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="winnow",
        description="Serve block-sparse-attention mixture-of-experts models with 4-bit state.",
    )
    parser.add_argument(
        "--version", action="version", version=f"winnow {__version__}", help="print the version"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="say what was chosen")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _generate_parser(commands)
    _plan_parser(commands)
    bench = commands.add_parser("bench", help="measurements and checks")
    suites = bench.add_subparsers(title="suites", required=True, metavar="SUITE")
    conformance = _command(
        suites, "conformance", _bench_conformance, "compare a backend with the reference, op by op"
    )
    conformance.add_argument("--backend", default="cpu", metavar="NAME", help=_BACKEND)
    conformance.add_argument("--json", action="store_true", help=_JSON)
    backends = _command(commands, "backends", _backends, "which backend serves each op here")
    backends.add_argument("--json", action="store_true", help=_JSON)
    convert = _command(
        commands, "convert", _convert, "write a checkpoint in 4-bit and 8-bit formats"
    )
    convert.add_argument("source", metavar="SRC", help="checkpoint directory, not quantised")
    convert.add_argument("destination", metavar="DST", help="directory that is empty or not there")
    convert.add_argument(
        "--experts", choices=("nvfp4", "keep"), default="nvfp4", help="format of routed experts"
    )
    convert.add_argument(
        "--linear", choices=("mxfp8", "keep"), default="mxfp8", help="format of other matrices"
    )
    tiny = _command(commands, "make-tiny", _make_tiny, "write a small random checkpoint")
    tiny.add_argument("directory", metavar="DIR", help="directory without a checkpoint")
    seeds = _number(int, lambda n: 0 <= n < 2**63, f"a whole number from 0 to {2**63 - 1}")
    tiny.add_argument("--seed", type=seeds, default=0, metavar="N", help="of the weights")
    return parser


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def _number(
    kind: type[int] | type[float], holds: Callable[[Any], bool], what: str
) -> Callable[[str], Any]:
    """An argparse type: a `kind` of number for which `holds`; `what` says which those are."""

    def read(word: str) -> Any:
        try:
            value = kind(word)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{word!r} is not {what}")
        return value

    return read


def _generate_parser(commands: Any) -> None:
    parser = _command(commands, "generate", _generate, "continue one prompt")
    parser.add_argument(
        "model", metavar="MODEL", help=f"checkpoint directory, or with --random-weights {_PRESETS}"
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument(
        "--prompt-file", metavar="F", help="text file in UTF-8 to continue; - is standard input"
    )
    prompt.add_argument("--token-ids", metavar="1,2,3", help="token ids to continue")
    _sampling_options(parser.add_argument_group("sampling"))
    _engine_options(parser.add_argument_group("engine"))
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing streamed")


def _sampling_options(group: argparse._ArgumentGroup) -> None:
    for name, (kind, metavar, text) in _SAMPLING.items():
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            default=getattr(SamplingParams, name),
            metavar=metavar,
            help=text,
        )
    again = "ends the answer; may be given again"
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help=f"text that {again}"
    )
    group.add_argument(
        "--stop-id", action="append", type=int, default=[], metavar="ID", help=f"token that {again}"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on past the model's end tokens"
    )


def _engine_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--kv-format", choices=CACHE_FORMATS, help=_KV_FORMAT)
    add("--index-format", choices=CACHE_FORMATS, help=_INDEX_FORMAT)
    add("--max-step-tokens", type=int, metavar="N", help="tokens of one step; prompts are cut")
    add("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer together")
    add("--num-pages", type=int, metavar="N", help="pages of 128 tokens; default: what fits")
    add("--dtype", choices=("float32", "bfloat16"), help="compute dtype; default: the model's")
    add("--device", metavar="cpu|cuda", help="where to compute; default: cpu")
    add("--backend", metavar="NAME", help=_BACKEND + "; default: the device's")
    add("--random-weights", action="store_true", help="MODEL is a preset")
    add("--layers", type=int, metavar="N", help="cut a preset to its last N layers")


def _plan_parser(commands: Any) -> None:
    parser = _command(commands, "plan", _plan, "bytes of weights and cache, and what fits")
    parser.add_argument(
        "model", metavar="PRESET|DIR", help=f"{_PRESETS}, or a checkpoint directory"
    )
    memory = _number(float, lambda x: 0 < x <= 1e9, "a number above 0 and up to 1e9")
    share = _number(float, lambda x: 0 < x <= 1, "a number above 0 and up to 1")
    reserve = _number(float, lambda x: 0 <= x <= 1e9, "a number from 0 to 1e9")
    ranks = _number(int, lambda n: n >= 1, "a whole number of at least 1")
    layers = _number(int, lambda n: n >= 0, "a whole number of at least 0")
    add = parser.add_argument
    add("--kv-format", choices=CACHE_FORMATS, default="model", help=_KV_FORMAT)
    add("--index-format", choices=CACHE_FORMATS, default="model", help=_INDEX_FORMAT)
    add("--memory-gb", type=memory, metavar="GB", help="memory of one device")
    add("--memory-fraction", type=share, default=0.9, metavar="F", help="share of it to use")
    add("--reserve-gb", type=reserve, default=0.0, metavar="GB", help="kept for activations")
    add("--tp", type=ranks, default=1, metavar="N", help="tensor-parallel ranks")
    add("--draft-layers", type=layers, default=0, metavar="N", help="draft layers, in fp8")
    add("--json", action="store_true", help=_JSON)
