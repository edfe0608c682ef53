"""`winnow generate`: one prompt from the command line, continued."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from winnow.commands.engine_options import add_engine_options, add_model, given_options
from winnow.commands.parsing import command
from winnow.config import CHECKPOINT_SAMPLING, Constraint, SamplingParams
from winnow.errors import RequestError
from winnow.spec.embedded import checkpoint_path

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


def add_generate(commands: Any) -> None:
    """Register the command."""
    parser = command(commands, "generate", _generate, "continue one prompt")
    add_model(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument(
        "--chat", metavar="TEXT", help="message to answer, in the model's chat format, no reasoning"
    )
    prompt.add_argument(
        "--prompt-file", metavar="F", help="text file in UTF-8 to continue; - is standard input"
    )
    prompt.add_argument("--token-ids", metavar="1,2,3", help="token ids to continue")
    _sampling_options(parser.add_argument_group("sampling"))
    add_engine_options(parser.add_argument_group("engine"))
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing streamed")


def _sampling_options(group: argparse._ArgumentGroup) -> None:
    for name, (kind, metavar, text) in _SAMPLING.items():
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            default=None if name in CHECKPOINT_SAMPLING else getattr(SamplingParams, name),
            metavar=metavar,
            help=f"{text}; default: the checkpoint's own, else {getattr(SamplingParams, name):g}"
            if name in CHECKPOINT_SAMPLING
            else text,
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
    group.add_argument(
        "--json-schema", metavar="F", help="file with a JSON schema that the answer must match"
    )


def _generate(args: argparse.Namespace) -> int:
    from winnow.engine.llm import LLM

    if args.logprobs is not None and not args.json:
        raise RequestError(f"--logprobs {args.logprobs} without --json shows nothing: add --json")
    prompt = _prompt(args)
    given = {name: getattr(args, name) for name in _SAMPLING}
    own = SamplingParams(
        stop=tuple(args.stop),
        stop_ids=tuple(args.stop_id),
        ignore_eos=args.ignore_eos,
        constraint=_constraint(args),
        **{name: value for name, value in given.items() if value is not None},
    )
    llm = LLM(
        args.model,
        random_weights=args.random_weights,
        num_layers=args.layers,
        progress=not args.json,
        **given_options(args),
    )
    unsaid = [name for name in CHECKPOINT_SAMPLING if given[name] is None]
    params = replace(own, **{name: getattr(llm.default_params, name) for name in unsaid})
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
    """Exactly one of the four ways to give a prompt."""
    if args.chat is not None:
        return _chat(args)
    if args.token_ids is not None:
        try:
            return [int(word) for word in args.token_ids.split(",")]
        except ValueError:
            raise RequestError(
                f"--token-ids is {args.token_ids!r}: give whole numbers with commas, like 1,2,3"
            ) from None
    if args.prompt is not None:
        return str(args.prompt)
    return _text(args.prompt_file, "prompt")


def _chat(args: argparse.Namespace) -> str:
    from winnow.server.template import load_template

    template = None if args.random_weights else load_template(checkpoint_path(args.model))
    if template is None:
        raise RequestError(f"{args.model} has no chat template: give the whole text with --prompt")
    message = {"role": "user", "content": args.chat}
    return template.render([message], thinking_mode="disabled")


def _constraint(args: argparse.Namespace) -> Constraint | None:
    if args.json_schema is None:
        return None
    return Constraint("json_schema", _text(args.json_schema, "schema"))


def _text(path: str, what: str) -> str:
    """What a file holds, or standard input for a dash."""
    try:
        if path == "-":
            return sys.stdin.read()
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"cannot read the {what} from {path}: {error}; "
            "give a text file in UTF-8, or - for standard input"
        ) from None
