"""Grammars: what an answer may go on with, token by token. Knows no request, schedule or logits.

The grammars themselves are xgrammar's. A grammar is about text, so a token counts as the bytes of
its text. Never allowed are ids beyond the tokenizer's, and special tokens but those that a
constraint names; the model's end tokens are where the text may end.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import thread_time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from winnow.config import Constraint
from winnow.engine.schemas import left_out_of_pattern, unserved
from winnow.engine.text import Tokenizer
from winnow.errors import RequestError

try:
    import xgrammar
except ModuleNotFoundError as error:
    raise RequestError(
        f"an answer under a grammar (response_format, tools or a constraint) needs {error.name}, "
        "which is not installed here: leave it out, or install winnow-llm[grammar]"
    ) from error

_ANY_OBJECT = '{"type": "object"}'
_LOOSE_CHARACTER = r"(([^\"\\\r\n]))"
"""What the library writes for a character of a JSON string whose length is bounded."""
_CHARACTER_CLASS = r"[^\0-\x1f\"\\\r\n]"
"""As JSON has it, and without escapes: of a repeated class the library knows beforehand how many
characters each token has, of any other unit it tries the whole vocabulary at every token."""
_JSON_CHARACTER = f"(({_CHARACTER_CLASS}))"
_LOOSE_STRING = re.compile(r'"\\"" \w+\{([01]), -1\} "\\""')
_STRING_REST = {"0": "winnow_rest", "1": "winnow_some"}
_STRING_RULES = rf"""
winnow_some ::= {_CHARACTER_CLASS} winnow_rest | "\\" winnow_escape winnow_rest
winnow_rest ::= ("\"" | {_CHARACTER_CLASS} winnow_rest | "\\" winnow_escape winnow_rest)
  (=([ \n\r\t]* [,}}\]:]))
winnow_escape ::= [\"\\/bfnrt] | "u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]
"""
"""A string that need only not be empty counts nothing, so that it may have escapes. What follows it
in JSON is said in (=...), or tokens that hold its end are tried one by one."""
_TOKEN_SECONDS = 0.005
_DEBT_SECONDS = 0.1
"""A token's place in a grammar takes microseconds, but some take ever longer, as nested repeats do.
An answer may exceed _TOKEN_SECONDS by this much in all, in time of its own thread."""
_TRIAL_TOKENS = 64
_CACHE_BYTES = 64 << 20
_MAX_DUMP_BYTES = 32 << 20
"""Loaded in about a quarter of a second. 128 tools over a vocabulary of 200,000 fit."""
_WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
"""What the library puts before its reason: a time, a line of its source, a condition."""
_REASON_CHARACTERS = 300


class GrammarCompiler:
    """Constraints to grammars over one vocabulary, of which the newest are kept.

    `vocab_size` is the model's, which may be larger than the tokenizer's; `stop_ids` end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Iterable[int]) -> None:
        self.vocab_size = vocab_size
        stops = frozenset(stop_ids)
        known = range(min(vocab_size, tokenizer.vocab_size))
        texts = [b"" if i in stops else tokenizer.token_bytes(i) for i in known]
        self._info = xgrammar.TokenizerInfo(
            texts,
            xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=list(stops),
        )
        special = [i for i in known if i in tokenizer.special_ids and i not in stops]
        self._special = {i: tokenizer.token(i) or "" for i in special}
        self._stops = _bits(stops, vocab_size)
        markers = _bits((i for i in known if i in tokenizer.marker_ids), vocab_size)
        ids = {text: i for i, text in enumerate(texts) if text in (b"\n", b"a")}
        self._strings = _Strings(markers, ids.get(b"a"), ids.get(b"\n"))
        self._plain = _bits(range(vocab_size), vocab_size) & ~_bits(special, vocab_size)
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._kept: OrderedDict[Constraint, xgrammar.CompiledGrammar] = OrderedDict()
        self._kept_bytes = 0

    def compile(self, constraint: Constraint) -> xgrammar.CompiledGrammar:
        """The grammar of a constraint; how long it takes is up to whoever wrote it.

        RequestError with the library's reason for a text that is no schema, pattern or tag, and
        for one of which the grammar would leave out a part.
        """
        _refuse_left_out(constraint)
        try:
            return self._compiler.compile_grammar(_grammar(constraint))
        # The library has classes for some kinds of fault and plain RuntimeError for most.
        except (RuntimeError, ValueError, TypeError) as error:
            raise RequestError(f"the {constraint.kind} cannot be used: {_reason(error)}") from error

    def load(self, dumped: bytes) -> xgrammar.CompiledGrammar:
        """A grammar that `dump` wrote in another process with the same vocabulary."""
        text = zlib.decompress(dumped).decode()
        return xgrammar.CompiledGrammar.deserialize_json(text, self._info)

    def matcher(self, constraint: Constraint, dumped: bytes | None = None) -> Matcher:
        """A fresh matcher for a constraint, compiled here unless it comes dumped.

        A grammar used lately is neither compiled nor loaded again. Errors as in `compile`.
        """
        grammar = self._kept.get(constraint)
        if grammar is None:
            grammar = self.compile(constraint) if dumped is None else self.load(dumped)
            self._kept[constraint] = grammar
            self._kept_bytes += grammar.memory_size_bytes
        self._kept.move_to_end(constraint)
        while self._kept_bytes > _CACHE_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.memory_size_bytes
        named = [i for i, text in self._special.items() if text in constraint.text]
        permitted = self._plain | _bits(named, self.vocab_size)
        return Matcher(grammar, permitted, self._stops, self._strings)


def try_out(matcher: Matcher) -> None:
    """Walk a fresh matcher through a short answer, always the same.

    RequestError for a grammar that already takes too long there.
    """
    draws = np.random.default_rng(0)
    for _ in range(_TRIAL_TOKENS):
        tokens = matcher.continuations()
        if not len(tokens) or matcher.accept(int(draws.choice(tokens))):
            return


def dump(grammar: xgrammar.CompiledGrammar) -> bytes:
    """A grammar for `GrammarCompiler.load`. Compressed lightly: such text shrinks to a fifth.

    RequestError for one so large that loading it would hold up everyone's next token.
    """
    text = grammar.serialize_json().encode()
    if len(text) > _MAX_DUMP_BYTES:
        raise RequestError(
            f"the grammar compiles to {len(text)} bytes, it may have {_MAX_DUMP_BYTES}: give fewer "
            "tools, a smaller schema or a shorter pattern"
        )
    return zlib.compress(text, level=1)


@dataclass(frozen=True)
class _Strings:
    """How the inside of a JSON string is told: a letter may come there, a line break may not.

    A token that marks a place in a format, as the end of reasoning, is none there. Its text may be
    written by other tokens, and is text then.
    """

    markers: npt.NDArray[np.int32]
    letter: int | None
    line_break: int | None

    def forbid_markers(self, bits: npt.NDArray[np.int32]) -> None:
        """Take the markers out of the tokens that may come next, where these are of a string."""
        if self.letter is None or self.line_break is None:
            return
        if _has(bits, self.letter) and not _has(bits, self.line_break):
            bits &= ~self.markers


class Matcher:
    """Where one answer stands in its grammar.

    `allowed`, int32 [ceil(vocab_size / 32)], has the bits of the tokens that may come next, as
    `winnow.ops.sample.SampleRow` wants them; `accept` fills it anew.
    """

    def __init__(
        self,
        grammar: xgrammar.CompiledGrammar,
        permitted: npt.NDArray[np.int32],
        stops: npt.NDArray[np.int32],
        strings: _Strings,
    ) -> None:
        """`permitted` are the tokens that any grammar may use, `stops` the end tokens, as bits."""
        self.grammar = grammar
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._permitted = permitted
        self._stops = stops
        self._strings = strings
        self._bits = np.zeros_like(permitted)
        self._debt_s = 0.0
        self.allowed = torch.from_numpy(self._bits)
        self._fill()

    @property
    def is_stuck(self) -> bool:
        """Whether no token at all may come next."""
        return not self._bits.any()

    def continuations(self) -> npt.NDArray[np.int64]:
        """Ids that may come next and are no end tokens."""
        bits = (self._bits & ~self._stops).astype("<i4").view(np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little"))

    def accept(self, token: int) -> bool:
        """Go on by a token of `allowed` that is no end token: whether nothing may follow it.

        RequestError if the grammar does not have the token, or takes too long over its tokens.
        """
        begin = thread_time()
        try:
            accepted = self._matcher.accept_token(token)
        except RuntimeError as error:
            raise RequestError(f"the grammar cannot go on: {_reason(error)}") from error
        if accepted:
            self._fill()
        self._debt_s = max(0.0, self._debt_s + thread_time() - begin - _TOKEN_SECONDS)
        if self._debt_s > _DEBT_SECONDS:
            raise RequestError(
                f"the grammar takes {1e3 * (thread_time() - begin):.0f} ms a token, it may take "
                f"{1e3 * _TOKEN_SECONDS:.0f}: nest fewer repeats and alternatives"
            )
        if not accepted:
            raise RequestError(
                f"token {token} does not continue the answer's grammar: simplify the schema or "
                "pattern"
            )
        return bool(self._matcher.is_completed() and not (self._bits & ~self._stops).any())

    def _fill(self) -> None:
        try:
            self._matcher.fill_next_token_bitmask(self._bits)
        except RuntimeError as error:
            raise RequestError(f"the grammar cannot go on: {_reason(error)}") from error
        self._bits &= self._permitted
        self._strings.forbid_markers(self._bits)


def _has(bits: npt.NDArray[np.int32], token: int) -> bool:
    return bool(int(bits[token // 32]) >> token % 32 & 1)


def _refuse_left_out(constraint: Constraint) -> None:
    """RequestError for words that the library would read over, with a warning or without."""
    if constraint.kind == "json_object":
        return
    if constraint.kind == "regex":
        if says := left_out_of_pattern(constraint.text):
            raise RequestError(f"the regex {says}")
        return
    try:
        parsed = json.loads(constraint.text)
    except (ValueError, RecursionError):
        return  # the library says where it is no JSON
    is_schema = constraint.kind == "json_schema"
    for schema in [parsed] if is_schema else [f.get("json_schema") for f in _formats_of(parsed)]:
        if fault := unserved(schema):
            raise RequestError(f"the json_schema cannot be used: schema{fault.place} {fault.says}")


def _formats_of(tag: Any) -> Iterator[dict[str, Any]]:
    """The formats in a structural tag; each may be changed once it has come."""
    waiting = [tag]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += [part.get(word) for word in ("format", "content", "elements", "tags")]
            yield part


def _with_json_written_out(text: str) -> str:
    """A structural tag whose JSON is written as that of a schema alone is."""
    tag = json.loads(text)
    for part in _formats_of(tag):
        if part.get("type") == "json_schema" and part.get("style", "json") == "json":
            schema = json.dumps(part.get("json_schema"), ensure_ascii=False)
            part.clear()
            part |= {"type": "grammar", "grammar": str(_json_grammar(schema))}
    return json.dumps(tag, ensure_ascii=False)


def _json_grammar(schema: str, *, strict: bool = True) -> xgrammar.Grammar:
    """JSON of a schema, on one line and with one way to write it.

    Between parts, a model at a loss could write white space for ever. Unless `strict`, objects
    have more than what they list.
    """
    return xgrammar.Grammar.from_json_schema(schema, any_whitespace=False, strict_mode=strict)


def _grammar(constraint: Constraint) -> xgrammar.Grammar:
    """A constraint in the library's own notation."""
    text = constraint.text
    match constraint.kind:
        case "regex":
            return xgrammar.Grammar.from_regex(text)
        case "structural_tag":
            grammar = xgrammar.Grammar.from_structural_tag(_with_json_written_out(text))
        case "json_schema":
            grammar = _json_grammar(text)
        case _:
            grammar = _json_grammar(_ANY_OBJECT, strict=False)
    notation = str(grammar)
    if _LOOSE_CHARACTER not in notation:
        return grammar
    notation = notation.replace(_LOOSE_CHARACTER, _JSON_CHARACTER)
    notation = _LOOSE_STRING.sub(lambda m: f'"\\"" {_STRING_REST[m[1]]}', notation)
    return xgrammar.Grammar.from_ebnf(notation + _STRING_RULES)


def _bits(ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """int32 [ceil(vocab_size / 32)] with the bits of these ids set."""
    flags: npt.NDArray[Any] = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


def _reason(error: Exception) -> str:
    """The library's message as one sentence of bounded length."""
    text = _WHERE.sub("", str(error)).partition("The JSON string is:")[0]
    return " ".join(text.split()).rstrip(".")[:_REASON_CHARACTERS]
