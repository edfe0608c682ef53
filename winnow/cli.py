"""The command line: words in, one call, words out. Every command imports only what it needs."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from winnow import __version__
from winnow.errors import RequestError, WinnowError
from winnow.spec.formats import CACHE_FORMATS
from winnow.spec.presets import PRESETS

_MODEL = f"checkpoint directory, or with --random-weights one of {', '.join(PRESETS)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it did what was asked, 1 with one sentence on stderr if not."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING,
        format="winnow: %(message)s",
        stream=sys.stderr,
    )
    try:
        status: int = args.run(args)
    except WinnowError as error:
        print(f"winnow: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; there is nobody to tell.
        sys.stderr.close()
        return 1
    return status


def _generate(args: argparse.Namespace) -> int:
    from winnow.config import EngineConfig, SamplingParams
    from winnow.engine.llm import LLM

    prompt = _prompt(args)
    params = SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
        stop_ids=tuple(args.stop_id),
        logprobs=args.logprobs,
        ignore_eos=args.ignore_eos,
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
        raise RequestError(f"cannot read the prompt from {args.prompt_file}: {error}") from None


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
    parser.add_argument("--version", action="version", version=f"winnow {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what was chosen")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _generate_parser(commands)
    _plan_parser(commands)
    bench = commands.add_parser("bench", help="measurements and checks")
    suites = bench.add_subparsers(title="suites", required=True, metavar="SUITE")
    conformance = _command(
        suites, "conformance", _bench_conformance, "compare a backend with the reference, op by op"
    )
    conformance.add_argument("--backend", default="cpu", help="default: cpu")
    conformance.add_argument("--json", action="store_true")
    backends = _command(commands, "backends", _backends, "which backend serves each op here")
    backends.add_argument("--json", action="store_true")
    convert = _command(
        commands, "convert", _convert, "write a checkpoint in 4-bit and 8-bit formats"
    )
    convert.add_argument("source", metavar="SRC")
    convert.add_argument("destination", metavar="DST")
    convert.add_argument("--experts", choices=("nvfp4", "keep"), default="nvfp4")
    convert.add_argument("--linear", choices=("mxfp8", "keep"), default="mxfp8")
    tiny = _command(commands, "make-tiny", _make_tiny, "write a small random checkpoint")
    tiny.add_argument("directory", metavar="DIR")
    tiny.add_argument("--seed", type=int, default=0)
    return parser


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def _generate_parser(commands: Any) -> None:
    parser = _command(commands, "generate", _generate, "continue one prompt")
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="F", help="- reads standard input")
    prompt.add_argument("--token-ids", metavar="1,2,3")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=128, metavar="N")
    sampling.add_argument("--min-tokens", type=int, default=0, metavar="N")
    sampling.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy")
    sampling.add_argument("--top-k", type=int, default=0, metavar="N")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    sampling.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    sampling.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    sampling.add_argument("--seed", type=int, metavar="N")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT")
    sampling.add_argument("--stop-id", action="append", type=int, default=[], metavar="ID")
    sampling.add_argument("--logprobs", type=int, metavar="N")
    sampling.add_argument("--ignore-eos", action="store_true")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--kv-format", choices=CACHE_FORMATS)
    engine.add_argument("--index-format", choices=CACHE_FORMATS)
    engine.add_argument("--max-step-tokens", type=int, metavar="N")
    engine.add_argument("--max-model-len", type=int, metavar="N")
    engine.add_argument("--num-pages", type=int, metavar="N", help="pages of 128 tokens")
    engine.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute dtype")
    engine.add_argument("--device", metavar="cpu|cuda", help="default: cpu")
    engine.add_argument("--backend", help="see `winnow backends`")
    engine.add_argument("--random-weights", action="store_true", help="MODEL is a preset")
    engine.add_argument("--layers", type=int, metavar="N", help="cut a preset to N layers")
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing streamed")


def _plan_parser(commands: Any) -> None:
    parser = _command(commands, "plan", _plan, "bytes of weights and cache, and what fits")
    parser.add_argument("model", metavar="PRESET|DIR")
    parser.add_argument("--kv-format", choices=CACHE_FORMATS, default="model")
    parser.add_argument("--index-format", choices=CACHE_FORMATS, default="model")
    parser.add_argument("--memory-gb", type=float, metavar="GB", help="memory of one device")
    parser.add_argument("--memory-fraction", type=float, default=0.9, metavar="F")
    parser.add_argument("--reserve-gb", type=float, default=0.0, metavar="GB")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    parser.add_argument("--draft-layers", type=int, default=0, metavar="N", help="fp8 draft layers")
    parser.add_argument("--json", action="store_true")
