"""JSON strings under a grammar: what they hold, with and without bounds on their length."""

from __future__ import annotations

import json
import random
from time import thread_time
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from winnow.config import Constraint
from winnow.engine.grammar import GrammarCompiler
from winnow.engine.text import Tokenizer


def schema(value: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


def pieces(vocab_size: int) -> GrammarCompiler:
    """A vocabulary of bytes and of made-up pieces, some of which end or escape a string."""
    draws = random.Random(0)
    texts = ['"', "\\", *(chr(c) for c in range(32, 127) if c not in (34, 92))]
    seen = set(texts)
    while len(texts) < vocab_size:
        text = "".join(draws.choice("etaoinshrdlu ") for _ in range(draws.randint(2, 8)))
        if draws.random() < 0.02:
            text += draws.choice(['"', '",', "\\n", '\\"', ": "])
        if text not in seen:
            seen.add(text)
            texts.append(text)
    vocab = {text: i for i, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], fuse_unk=False))
    backend.decoder = decoders.Fuse()
    return GrammarCompiler(Tokenizer(backend), vocab_size, [])


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return pieces(512)


def takes(compiler: GrammarCompiler, wanted: Any, text: str) -> bool:
    matcher = compiler.matcher(schema(wanted))._matcher
    return bool(matcher.accept_string(text) and matcher.is_completed())


def test_strings_with_a_greatest_length_hold_neither_escapes_nor_control_characters(
    compiler: GrammarCompiler,
) -> None:
    short = {"type": "string", "maxLength": 3}
    assert takes(compiler, short, '"aäあ"')
    assert takes(compiler, short, '""')
    assert not takes(compiler, short, '"abcd"')
    assert not takes(compiler, short, json.dumps("a\n"))
    assert not takes(compiler, short, '"a\tb"')
    assert not takes(compiler, {"type": "string", "minLength": 2}, '"a"')


@pytest.mark.parametrize("wanted", [{"type": "string"}, {"type": "string", "minLength": 1}])
def test_strings_without_a_greatest_length_hold_escapes(
    compiler: GrammarCompiler, wanted: Any
) -> None:
    assert takes(compiler, wanted, json.dumps('"a"\n'))
    assert takes(compiler, wanted, '"\\u0041bc"')
    assert takes(compiler, wanted, '""') == ("minLength" not in wanted)
    assert not takes(compiler, wanted, '"a\tb"')
    assert not takes(compiler, wanted, '"a" "b"')


@pytest.mark.parametrize("length", [{"maxLength": 200}, {"minLength": 1}])
def test_a_length_of_a_string_costs_no_time_a_token(length: dict[str, int]) -> None:
    built = pieces(16_384)
    fields = {name: {"type": "string", **length} for name in "abc"}
    wanted = {"type": "object", "properties": fields, "required": [*fields]}
    matcher = built.matcher(schema(wanted))
    draws = random.Random(1)
    took = []
    for _ in range(100):
        begin = thread_time()
        finished = matcher.accept(draws.choice(matcher.continuations().tolist()))
        took.append(thread_time() - begin)
        if finished:
            break
    assert sorted(took)[len(took) // 2] < 0.001
