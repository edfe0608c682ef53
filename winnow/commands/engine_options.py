"""The options of an engine, for every command that builds one. Knows no command."""

from __future__ import annotations

import argparse
from typing import Any

from winnow.config import DTYPES, EngineConfig
from winnow.spec.embedded import DEMO
from winnow.spec.formats import CACHE_FORMATS
from winnow.spec.presets import PRESETS


def add_model(parser: argparse.ArgumentParser) -> None:
    """The argument MODEL, by default the checkpoint that ships with the package."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=DEMO,
        help=f"checkpoint directory, or {DEMO}, the small one that ships with Winnow and is the "
        f"default, or with --random-weights one of {', '.join(PRESETS)}",
    )


def add_engine_options(group: argparse._ArgumentGroup) -> None:
    """Options that `engine_config` and `build_options` read."""
    add = group.add_argument
    cache = "in the cache; `model` is the compute dtype"
    own = EngineConfig
    add("--kv-format", choices=CACHE_FORMATS, default=own.kv_format, help=f"K and V {cache}")
    add(
        "--index-format",
        choices=CACHE_FORMATS,
        default=own.index_format,
        help=f"index keys {cache}",
    )
    add(
        "--max-step-tokens",
        type=int,
        metavar="N",
        help="tokens of one step; prompts are cut; default: 512 on a CPU, 2048 on a GPU",
    )
    add(
        "--max-running",
        type=int,
        default=own.max_running,
        metavar="N",
        help="requests computed side by side",
    )
    add(
        "--max-model-len",
        type=int,
        metavar="N",
        help="tokens of prompt and answer together; default: the model's, or what the cache holds",
    )
    add("--num-pages", type=int, metavar="N", help="pages of 128 tokens; default: what fits")
    add(
        "--memory-fraction",
        type=float,
        metavar="F",
        help="share of a GPU's memory to use, default 0.9; on a CPU of what is free, default 0.25",
    )
    add(
        "--cuda-graphs",
        choices=("on", "off"),
        default="on",
        help="replay decode steps on a GPU from captures",
    )
    add("--no-prefix-caching", action="store_true", help="compute every prompt from its start")
    add(
        "--dtype", choices=DTYPES, help="compute dtype; default: float32 on a CPU, else the model's"
    )
    add("--device", metavar="cpu|cuda", default=own.device, help="where to compute")
    add(
        "--backend",
        metavar="NAME",
        help="one that `winnow backends` lists; default: the device's",
    )
    add("--random-weights", action="store_true", help="MODEL is a preset")
    add("--layers", type=int, metavar="N", help="cut a preset to its last N layers")


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that were asked for."""
    given = {
        name: getattr(args, name)
        for name in EngineConfig.__dataclass_fields__
        if getattr(args, name, None) is not None
    }
    switches = {
        "prefix_caching": not args.no_prefix_caching,
        "cuda_graphs": args.cuda_graphs == "on",
    }
    return {**given, **switches}


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """What was asked for; UnsupportedError names a wrong value."""
    return EngineConfig(**given_options(args))


def build_options(args: argparse.Namespace) -> dict[str, Any]:
    """The further options of `winnow.engine.build.build_engine`."""
    return {"random": args.random_weights, "num_layers": args.layers}
