"""`winnow plan`: its options, and the questions they make for `winnow.spec.capacity`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from winnow.commands.parsing import JSON_HELP, at_least, command, number
from winnow.errors import UnsupportedError
from winnow.spec.capacity import WEIGHT_WORDS, Plan, Question, differences, plan
from winnow.spec.embedded import DEMO
from winnow.spec.formats import CACHE_FORMATS
from winnow.spec.hardware import GPUS
from winnow.spec.presets import PRESETS

JSON_VERSION = 1
"""Of the JSON that `--json` prints; a field that changes its meaning or goes raises it."""

_COUNT, _LAYERS = at_least(1), at_least(0)


def add_plan(commands: Any) -> None:
    """Register the command."""
    parser = command(commands, "plan", _run, "bytes, what fits and time floors, on paper")
    asked = Question("")
    share = number(float, lambda x: 0 < x <= 1, "a number above 0 and up to 1")
    reserve = number(float, lambda x: 0 <= x <= 1e9, "a number from 0 to 1e9")
    presets, gpus = ", ".join(PRESETS), ", ".join(GPUS)
    context = "tokens of one sequence; default: 131072, or the model's greatest"
    cache = "in the cache; `model` is the compute dtype"
    weights = "`checkpoint` is as stored, `plain` the unquantised dtype"
    draft = "draft layers whose K and V lie in the rows, in fp8"
    add = parser.add_argument
    add(
        "model",
        metavar="PRESET|DIR",
        nargs="?",
        default=DEMO,
        help=f"one of {presets}, or a checkpoint directory; default: {DEMO}",
    )
    add(
        "--gpu",
        action=_OneGpu,
        metavar="NAME",
        help=f"one of {gpus}, or NAME=GB; without it nothing is said about what fits",
    )
    add("--gpus", type=_COUNT, metavar="N", help="GPUs in all; default: those of --parallel")
    add(
        "--parallel",
        metavar="PLAN",
        help="tpN, epN, depN, dcpN written together, as tp4, tp8ep8, "
        "dep4 or tp4dcp4; default: tp over all GPUs",
    )
    add("--context", type=_COUNT, metavar="N", help=context)
    add("--kv", choices=CACHE_FORMATS, default=asked.kv, help=f"K and V {cache}")
    add("--index", choices=CACHE_FORMATS, default=asked.index, help=f"index keys {cache}")
    add("--experts", choices=WEIGHT_WORDS, default=asked.experts, help=f"routed experts; {weights}")
    add("--linear", choices=WEIGHT_WORDS, default=asked.linear, help=f"other matrices; {weights}")
    add("--draft", type=_LAYERS, default=asked.draft, metavar="LAYERS", help=draft)
    add(
        "--memory-fraction",
        type=share,
        default=asked.memory_fraction,
        metavar="F",
        help="share of each GPU's memory to use",
    )
    add(
        "--reserve-gb",
        type=reserve,
        default=0.0,
        metavar="GB",
        help="of that share, kept for activations, graphs and the allocator",
    )
    add(
        "--charge-index",
        choices=("yes", "no"),
        default="yes",
        help="whether index keys take memory; published capacities leave them out",
    )
    add(
        "--compare",
        nargs="+",
        default=[],
        metavar="PRESET",
        help="plans to put beside it, with "
        "the same options but for those behind the name, as minimax-m3:kv=fp8,index=fp8",
    )
    add("--json", action="store_true", help=JSON_HELP)


class _OneGpu(argparse.Action):
    """Takes the name once: of two, argparse would keep the last in silence."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        first = getattr(namespace, self.dest)
        if first is not None:
            raise argparse.ArgumentError(
                self,
                f"given twice, {first} and {values}, and a plan has one: put {values} beside it "
                f"with --compare MODEL:gpu={values}",
            )
        setattr(namespace, self.dest, values)


def _run(args: argparse.Namespace) -> int:
    from winnow.commands.plan_text import render, render_comparison

    question = Question(
        model=args.model,
        gpu=args.gpu,
        gpus=args.gpus,
        parallel=args.parallel,
        context=args.context,
        kv=args.kv,
        index=args.index,
        experts=args.experts,
        linear=args.linear,
        draft=args.draft,
        memory_fraction=args.memory_fraction,
        reserve_bytes=round(args.reserve_gb * 1e9),
        charge_index=args.charge_index == "yes",
    )
    plans = [plan(asked) for asked in (question, *(_beside(question, w) for w in args.compare))]
    if args.json:
        print(json.dumps(_as_json(plans), indent=1))
    else:
        print(render_comparison(plans) if len(plans) > 1 else render(plans[0]))
    return 0


def _as_json(plans: list[Plan]) -> dict[str, Any]:
    """One plan as it is; several as a list, what they differ in first."""
    if len(plans) == 1:
        return {"version": JSON_VERSION, **asdict(plans[0])}
    return {
        "version": JSON_VERSION,
        "differences": differences(plans),
        "plans": [asdict(each) for each in plans],
    }


def _beside(question: Question, word: str) -> Question:
    """The question with another preset, and with the options that are written behind it."""
    name, _, written = word.partition(":")
    changes: dict[str, Any] = {}
    for option in filter(None, written.split(",")):
        key, given, value = option.partition("=")
        if key not in _BESIDE or not given:
            raise UnsupportedError(
                f"--compare {word!r}: {option!r} is no option=value; use {', '.join(_BESIDE)}"
            )
        try:
            changes[key] = _BESIDE[key](value)
        except argparse.ArgumentTypeError as error:
            raise UnsupportedError(f"--compare {word!r}: {key} {error}") from None
    return replace(question, model=name, **changes)


def _one_of(words: tuple[str, ...]) -> Callable[[str], str]:
    def read(word: str) -> str:
        if word not in words:
            raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(words)}")
        return word

    return read


_BESIDE: dict[str, Callable[[str], Any]] = {
    "gpu": str,
    "gpus": _COUNT,
    "parallel": str,
    "context": _COUNT,
    "kv": _one_of(CACHE_FORMATS),
    "index": _one_of(CACHE_FORMATS),
    "experts": _one_of(WEIGHT_WORDS),
    "linear": _one_of(WEIGHT_WORDS),
    "draft": _LAYERS,
}
"""Options that a plan beside another may have of its own, and how their words are read."""
