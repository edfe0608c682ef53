"""Write docs/cli.md and docs/ops.md from the code. With --check, only say whether they are stale.

The command line is read from its parser and the contracts from their source, not from help output,
whose layout differs between versions of Python and widths of terminals.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from winnow import cli
from winnow.bench.conformance import KERNEL_OPS
from winnow.commands.parsing import default_words
from winnow.ops import batch, codec, paged, sample, weights
from winnow.ops.table import kernels

DOCS = Path(__file__).parents[1] / "docs"

CLI_HEAD = """\
# Command line

Written by `tools/generate_docs.py` from the parser in `winnow/cli.py`.

`python -m winnow` is the same as `winnow`. What was asked for goes to standard output, everything \
else to standard error. The exit status is 0 when it was done, 1 with one sentence that says why \
when it was not, 2 for words that are no command, and 130 after an interrupt.
"""

GENERATE_TAIL = """\
With `--json` the output is one object: `token_ids`; `text`, null without a tokenizer; \
`finish_reason`, which is `stop` or `length`; `usage` with `prompt_tokens`, `completion_tokens` \
and `cached_tokens`; and with `--logprobs` one entry a token in `logprobs`, of `chosen` and of \
`top`, a list of pairs of id and log-probability. Otherwise the text is printed as it comes, or \
the token ids at the end where the checkpoint has no tokenizer.
"""

OPS_HEAD = """\
# Operations

Written by `tools/generate_docs.py` from the contracts in `winnow/ops`.

An operation is a folder: its contract in `__init__.py`, the plain version that defines it in \
`reference.py`, a faster one for CPUs in `cpu.py`, whose inner loops are in \
C++ (`winnow/ops/csrc`), and its inputs for tests and measurements in `cases.py`. `winnow bench \
conformance` compares a backend with the reference on every case. Axes in brackets are tensor \
shapes.
"""

SHARED_TYPES = (
    batch.Batch,
    paged.LayerPages,
    paged.Paged,
    weights.PlainWeight,
    weights.Mxfp8Weight,
    weights.Nvfp4Weight,
    weights.AttentionWeights,
    weights.MlpWeights,
    weights.MoeWeights,
    sample.SampleRow,
    sample.Sampled,
    sample.Logprobs,
)


def main() -> int:
    """Write the pages that differ; with --check, name them and return 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [DOCS / name for name, text in pages().items() if _read(DOCS / name) != text]
    for path in stale:
        print(f"{path}: {'out of date' if check else 'written'}")
        if not check:
            path.write_text(pages()[path.name], encoding="utf-8")
    return 1 if check and stale else 0


def pages() -> dict[str, str]:
    """Text of each generated page by its file name."""
    return {
        "cli.md": "\n".join(_cli_page()),
        "ops.md": "\n".join(_ops_page()),
    }


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers that run something, in the order of the help."""
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not nested:
        yield parser
    for action in nested:
        for child in action.choices.values():
            yield from commands(child)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _cli_page() -> Iterator[str]:
    parser = cli._parser()
    yield CLI_HEAD
    yield from _arguments(parser)
    for command in commands(parser):
        yield f"## {command.prog}\n"
        yield f"{_sentence(command.description)}\n"
        yield from _arguments(command)
        if command.prog.endswith(" generate"):
            yield GENERATE_TAIL


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """One table of a parser's own arguments, then what excludes what."""
    yield "| argument | default | meaning |"
    yield "| --- | --- | --- |"
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            yield f"| {_spelling(action)} | {_default(action)} | {_sentence(action.help)} |"
    yield ""
    for group in parser._mutually_exclusive_groups:
        names = ", ".join(f"`{action.option_strings[-1]}`" for action in group._group_actions)
        yield f"{'Exactly' if group.required else 'At most'} one of {names} is given.\n"


def _spelling(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    value = ""
    if action.nargs != 0:
        value = str(action.metavar) if action.metavar else "|".join(map(str, action.choices or ()))
    return f"`{' '.join(filter(None, (names, value)))}`".replace("|", r"\|")


def _default(action: argparse.Action) -> str:
    if action.required:
        return "required"
    words = default_words(action)
    return f"`{words}`" if words else ""


def _sentence(text: str | None) -> str:
    assert text, "an argument without help"
    return f"{text[0].upper()}{text[1:]}".rstrip(".") + "."


def _ops_page() -> Iterator[str]:
    yield OPS_HEAD
    served = {name: kernels(name).served_by() for name in ("reference", "cpu")}
    yield f"| operation | {' | '.join(f'`{name}`' for name in served)} |"
    yield "| --- |" + " --- |" * len(served)
    for op in KERNEL_OPS:
        files = (f"`{modules[op].replace('.', '/')}.py`" for modules in served.values())
        yield f"| [`{op}`](#{op}) | {' | '.join(files)} |"
    yield ""
    for op in KERNEL_OPS:
        module = import_module(f"winnow.ops.{op}")
        protocol = getattr(module, "".join(word.capitalize() for word in op.split("_")))
        signature = re.sub(
            r"__call__\((\n *)?self, *(?:\n *)?", rf"{op}(\1", _head(protocol.__call__)
        )
        yield f"## {op}\n\n{inspect.getdoc(module)}\n\n```python\n{signature}\n```\n"
    yield f"## codec\n\n{inspect.getdoc(codec)}\n"
    exported = (getattr(codec, name) for name in codec.__all__)
    functions = [thing for thing in exported if inspect.isfunction(thing)]
    functions.sort(key=lambda f: (f.__module__, f.__code__.co_firstlineno))
    yield from _by_file(functions)
    yield "## Types they share\n"
    yield from _by_file(SHARED_TYPES)


def _by_file(things: Iterable[Any]) -> Iterator[str]:
    for file, members in groupby(things, key=inspect.getfile):
        yield f"From `{Path(file).relative_to(DOCS.parent).as_posix()}`:\n"
        for member in members:
            yield f"```python\n{_head(member)}\n```\n"


def _head(thing: Any) -> str:
    """A function's signature and docstring, or a class down to its first method, as written."""
    source = textwrap.dedent(inspect.getsource(thing))
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    kept = node.body[:1]
    if isinstance(node, ast.ClassDef):
        kept = [part for part in node.body if not isinstance(part, ast.FunctionDef)]
    end = kept[-1].end_lineno
    return "\n".join(source.splitlines()[:end])


if __name__ == "__main__":
    sys.exit(main())
