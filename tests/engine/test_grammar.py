"""Grammars: what they let through parses, and what they cannot do is a sentence."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from support import driving
from tokenizers import decoders, models

from winnow.config import Constraint, SamplingParams
from winnow.engine.engine import Engine
from winnow.engine.grammar import GrammarCompiler, dump, try_out
from winnow.engine.text import Tokenizer
from winnow.errors import RequestError
from winnow.model.checkpoint import make_tiny

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["ä", "b c"]},
        "ok": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 3},
    },
    "required": ["name", "kind", "ok", "list"],
    "additionalProperties": False,
}


def schema(value: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smaller than tiny: what is asked here is asked of the grammar."""
    directory = tmp_path_factory.mktemp("grammar") / "model"
    geometry = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
    make_tiny(directory, seed=2, num_experts=4, expert_width=32, dense_width=64, **geometry)
    return directory


@pytest.fixture(scope="module")
def engine(small: Path) -> Engine:
    return driving.engine(small, dtype="float32", max_step_tokens=64)


@pytest.fixture(scope="module")
def compiler(engine: Engine) -> GrammarCompiler:
    return engine.grammars()


def answers(engine: Engine, constraint: Constraint, count: int = 8, **options: Any) -> list[str]:
    """Texts of a random model that ended by themselves, each request with its own seed."""
    texts = {str(i): "" for i in range(count)}
    for i in range(count):
        options = {"max_tokens": 300, **options}
        params = SamplingParams(seed=i, constraint=constraint, **options)
        engine.add(str(i), [i + 1, 2, 3], params)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            texts[output.request_id] += output.text or ""
            if output.finish_reason is not None:
                assert output.finish_reason == "stop"
    return list(texts.values())


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_a_random_model_under_a_schema_writes_only_what_the_schema_allows(
    engine: Engine, temperature: float
) -> None:
    for text in answers(engine, schema(SCHEMA), temperature=temperature):
        value = json.loads(text)
        assert list(value) == SCHEMA["required"]
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 6
        assert value["kind"] in ("ä", "b c")
        assert value["ok"] in (True, False)
        assert len(value["list"]) <= 3
        assert set(value["list"]) <= {True, False, None}


def test_a_random_model_under_a_pattern_writes_only_matches(engine: Engine) -> None:
    pattern = "(ab|é){1,3}-[0-9]{2}"
    for text in answers(engine, Constraint("regex", pattern)):
        assert re.fullmatch(pattern, text)


def test_json_object_gives_an_object(engine: Engine) -> None:
    assert engine.tokenizer is not None
    # Quotes and braces are made likely, or a random model would write for ever.
    (quote, brace, colon) = (engine.tokenizer.encode(c)[0] for c in '"}:')
    bias = {quote: 5.0, brace: 8.0, colon: 5.0}
    for text in answers(engine, Constraint("json_object"), count=6, logit_bias=bias):
        assert isinstance(json.loads(text), dict)


def test_the_answer_ends_where_the_grammar_does_without_an_end_token(engine: Engine) -> None:
    params = SamplingParams(constraint=Constraint("regex", "abc"), max_tokens=9, temperature=0.0)
    engine.add("r", [1, 2], params)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert "".join(o.text or "" for o in outputs) == "abc"
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].usage is not None
    assert outputs[-1].usage.completion_tokens == 3


def test_a_cut_answer_under_a_grammar_ends_for_its_length(engine: Engine) -> None:
    engine.add("r", [1, 2], SamplingParams(constraint=Constraint("regex", "a{50}"), max_tokens=7))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert outputs[-1].finish_reason == "length"
    assert "".join(o.text or "" for o in outputs) == "a" * 7


def test_a_grammar_keeps_its_place_through_preemptions_and_company(
    small: Path, engine: Engine
) -> None:
    constraint = Constraint("regex", "([a-f]{10} ){4}[a-f]{10}")
    prompts = [driving.prompt_of(120 + i, 256, seed=i) for i in range(5)]
    texts = []
    for number, built in enumerate(
        (engine, driving.engine(small, dtype="float32", num_pages=8, max_step_tokens=64))
    ):
        for i, prompt in enumerate(prompts):
            params = SamplingParams(seed=i, constraint=constraint, max_tokens=100)
            built.add(f"{number}-{i}", prompt, params)
        got: dict[str, str] = {}
        while built.has_work:
            for output in built.step():
                got[output.request_id[2:]] = got.get(output.request_id[2:], "") + output.text
        assert all(re.fullmatch(constraint.text, text) for text in got.values())
        texts.append(got)
    assert built.stats().preemptions > 0
    assert texts[0] == texts[1]


def test_a_grammar_from_another_process_answers_as_one_compiled_here(engine: Engine) -> None:
    assert engine.tokenizer is not None
    constraint = schema({**SCHEMA, "title": "elsewhere"})
    elsewhere = GrammarCompiler(engine.tokenizer, engine.spec.vocab_size, engine.spec.eos_ids)
    dumped = dump(elsewhere.compile(constraint))
    texts = []
    for grammar in (dumped, None):
        engine.grammars()._kept.clear()
        engine.add("r", [5], SamplingParams(seed=3, max_tokens=300, constraint=constraint),
                   grammar=grammar)  # fmt: skip
        text = ""
        while engine.has_work:
            text += "".join(output.text or "" for output in engine.step())
        texts.append(text)
    assert texts[0] == texts[1]
    assert json.loads(texts[0])


def test_a_grammar_used_again_is_neither_compiled_nor_loaded_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = Constraint("regex", "again+")
    compiler.matcher(constraint)
    monkeypatch.setattr(compiler, "compile", lambda _: pytest.fail("compiled twice"))
    compiler.matcher(constraint)
    assert compiler.matcher(constraint, dumped=b"not looked at").allowed.any()


def test_grammars_that_were_not_used_for_long_are_let_go(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnow.engine.grammar._CACHE_BYTES", 100_000)
    assert engine.tokenizer is not None
    compiler = GrammarCompiler(engine.tokenizer, 300, [])
    for i in range(40):
        compiler.matcher(schema({"enum": [f"{i}-{j}" for j in range(20)]}))
    kept = compiler._kept
    assert 0 < len(kept) < 40
    assert compiler._kept_bytes == sum(g.memory_size_bytes for g in kept.values()) <= 100_000


def allowed(matcher: Any) -> set[int]:
    words = matcher.allowed.tolist()
    return {32 * w + b for w, word in enumerate(words) for b in range(32) if word >> b & 1}


@pytest.mark.parametrize("vocab_size", [272, 280, 288, 300])
def test_ids_beyond_the_tokenizers_and_special_tokens_are_never_allowed(
    engine: Engine, vocab_size: int
) -> None:
    assert engine.tokenizer is not None
    built = GrammarCompiler(engine.tokenizer, vocab_size, engine.spec.eos_ids)
    any_text = Constraint("structural_tag", json.dumps({"format": {"type": "any_text"}}))
    ids = allowed(built.matcher(any_text))
    assert max(ids) < engine.tokenizer.vocab_size
    assert ids & engine.tokenizer.special_ids == set(engine.spec.eos_ids)
    tag = engine.tokenizer.token_id("<mm:think>")
    assert tag in ids


def test_a_special_token_that_the_constraint_names_is_allowed_where_it_is_named(
    engine: Engine,
) -> None:
    assert engine.tokenizer is not None
    role = engine.tokenizer.token_id("]~b]")
    named = {"format": {"type": "const_string", "value": "]~b]"}}
    ids = allowed(engine.grammars().matcher(Constraint("structural_tag", json.dumps(named))))
    assert role in ids


@pytest.mark.parametrize("length", [{}, {"maxLength": 300}, {"minLength": 1}])
@pytest.mark.parametrize("before", ["", "reasoning</mm:think>"])
def test_a_marker_is_no_token_of_a_json_string(
    engine: Engine, length: dict[str, int], before: str
) -> None:
    assert engine.tokenizer is not None
    marker = engine.tokenizer.token_id("</mm:think>")
    assert marker is not None
    wanted = {"properties": {"a": {"type": "string", **length}}, "required": ["a"]}
    answer: dict[str, Any] = {"type": "json_schema", "json_schema": wanted}
    if before:
        text = {"type": "any_text", "excludes": ["<mm:think>"]}
        tag = {"type": "tag", "begin": "", "content": text, "end": "</mm:think>"}
        answer = {"type": "sequence", "elements": [tag, answer]}
    constraint = Constraint("structural_tag", json.dumps({"format": answer}))
    matcher = engine.grammars().matcher(constraint)
    ids = engine.tokenizer.encode(f'{before}{{"a": "</x', add_special=False)
    assert (marker in ids) == bool(before)
    for place, token in enumerate(ids):
        assert token in allowed(matcher), place
        matcher.accept(token)
        assert marker not in allowed(matcher) or "{" not in engine.tokenizer.decode(
            ids[: place + 1]
        )
    with pytest.raises(RequestError, match="does not continue"):
        matcher.accept(engine.tokenizer.encode("\n", add_special=False)[0])


def sentencepiece() -> Tokenizer:
    pieces = ["<unk>", "▁", "▁a", "a", "b", "▁b", '{"', '":', "}", "1", "é"]
    pieces += [f"<0x{b:02X}>" for b in (0x0A, 0xC3, 0xA9, 0xA8)]
    backend = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


def test_a_vocabulary_of_pieces_and_bytes_follows_a_grammar_by_its_text() -> None:
    tokenizer = sentencepiece()
    end = tokenizer.token_id("</s>")
    assert end is not None
    built = GrammarCompiler(tokenizer, tokenizer.vocab_size + 5, [end])
    constraint = Constraint("regex", "a (a|é|è) b")
    for seed in range(20):
        draws, matcher, ids = random.Random(seed), built.matcher(constraint), []
        finished = False
        while not finished:
            ids.append(draws.choice(matcher.continuations().tolist()))
            finished = matcher.accept(ids[-1])
        assert re.fullmatch(constraint.text, tokenizer.decode(ids))


def test_a_grammar_that_the_vocabulary_cannot_write_says_so() -> None:
    matcher = GrammarCompiler(sentencepiece(), 20, []).matcher(Constraint("regex", "[x-z]"))
    assert matcher.is_stuck
    try_out(matcher)


def test_a_request_whose_grammar_has_no_way_on_ends_alone(engine: Engine) -> None:
    stuck = SamplingParams(constraint=Constraint("regex", "[a-c]{9}"), max_tokens=20)
    engine.add("stuck", [1], stuck)
    engine.add("other", [2], SamplingParams(max_tokens=5, ignore_eos=True))
    matcher = engine._live["stuck"].grammar
    assert matcher is not None
    matcher.allowed.zero_()
    last = {}
    while engine.has_work:
        last |= {output.request_id: output for output in engine.step()}
    assert last["stuck"].finish_reason == "error"
    assert "continues the grammar after 1 tokens" in str(last["stuck"].error)
    assert last["other"].finish_reason == "length"
    assert engine.stats().pages_used == 0


NESTED = Constraint("regex", "(([a-z]{0,300}){0,300}){0,300}")


def test_a_grammar_that_takes_ever_longer_is_refused_by_its_trial(
    compiler: GrammarCompiler,
) -> None:
    with pytest.raises(RequestError, match="ms a token, it may take 5"):
        try_out(compiler.matcher(NESTED))


def test_a_grammar_that_takes_ever_longer_ends_its_own_request_only(engine: Engine) -> None:
    unended = dict.fromkeys(engine.spec.eos_ids, -100.0)
    slow = SamplingParams(constraint=NESTED, max_tokens=100, logit_bias=unended, seed=0)
    engine.add("slow", [1], slow)
    engine.add("other", [2], SamplingParams(max_tokens=60, ignore_eos=True))
    last = {}
    while engine.has_work:
        last |= {output.request_id: output for output in engine.step()}
    assert "ms a token" in str(last["slow"].error)
    assert last["other"].finish_reason == "length"
    assert engine.stats().pages_used == 0


@pytest.mark.parametrize(
    ("constraint", "says"),
    [
        (Constraint("regex", "(a"), "the regex cannot be used: .*parenthesis is not closed"),
        (Constraint("json_schema", "{"), "Failed to parse JSON"),
        (schema({"type": "strin"}), 'Unsupported type "strin"'),
        (
            schema({"$ref": "#/nowhere"}),
            r"schema\.\$ref is '#/nowhere', which is not in",
        ),
        (schema({"items": {"not": {}}}), r"schema\.items\.not is not enforced while decoding"),
        (schema({"allOf": 5}), "allOf must be an array"),
        (Constraint("regex", "(?=a)b"), "the regex looks around itself"),
        (
            Constraint(
                "structural_tag",
                json.dumps(
                    {"format": {"type": "json_schema", "json_schema": {"not": {"type": "null"}}}}
                ),
            ),
            r"schema\.not is not enforced",
        ),
        (Constraint("structural_tag", "{}"), "must have a format"),
    ],
)
def test_a_wrong_constraint_is_refused_with_the_reason_in_one_sentence(
    engine: Engine, constraint: Constraint, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as error:
        engine.add("wrong", [1], SamplingParams(constraint=constraint))
    assert "\n" not in str(error.value)
    assert ".cc:" not in str(error.value)
    assert not engine.has_work


def test_a_refused_schema_says_nothing_on_the_terminal(
    compiler: GrammarCompiler, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError):
        compiler.compile(schema({"allOf": [{"type": "object"}, {"type": "object"}]}))
    assert capfd.readouterr() == ("", "")


def test_a_constraint_without_a_tokenizer_is_refused(engine: Engine) -> None:
    built = Engine(engine.spec, engine.runner, engine.scheduler, None, 1000)
    with pytest.raises(RequestError, match=r"needs a tokenizer\.json"):
        built.add("r", [1], SamplingParams(constraint=Constraint("json_object")))
