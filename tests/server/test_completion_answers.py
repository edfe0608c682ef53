"""Plain completions on the wire, and logprobs in both of OpenAI's forms."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from openai.types import Completion
from openai.types.chat.chat_completion import ChoiceLogprobs

from winnow.engine.output import Output, Usage
from winnow.engine.text import Tokenizer, load_tokenizer
from winnow.errors import RequestError
from winnow.ops.sample import Logprobs
from winnow.server.answers import usage_of
from winnow.server.completion_answers import (
    CompletionChoice,
    CompletionChunks,
    completion_response,
)
from winnow.server.token_logprobs import ChatLogprobs, CompletionLogprobs

USAGE = Usage(prompt_tokens=2, completion_tokens=2, cached_tokens=0)


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    found = load_tokenizer(tiny)
    assert found is not None
    return found


def pieces_of(tokenizer: Tokenizer, text: str) -> list[Output]:
    """An output for each token; the likeliest token is always the first of the vocabulary."""
    ids = tokenizer.encode(text, add_special=False)
    return [
        Output("r", (i,), tokenizer.decode([i]), (Logprobs(-0.5, ((0, -0.1), (i, -0.5))),))
        for i in ids
    ]


LAST = Output("r", text="", finish_reason="length", usage=USAGE)


def test_streamed_and_whole_completions_say_the_same(tokenizer: Tokenizer) -> None:
    one, chunks = CompletionChoice(1, CompletionLogprobs(tokenizer)), CompletionChunks("c", "m", 5)
    outputs = [*pieces_of(tokenizer, "héllo"), LAST]
    sent = [json.loads(chunk) for o in outputs for chunk in chunks.of(one, one.push(o))]
    body = completion_response("c", "m", 5, [one], usage_of([USAGE]))
    assert Completion.model_validate(body, strict=True).model_dump(exclude_unset=True) == body
    (whole,) = body["choices"]
    told = [chunk["choices"][0] for chunk in sent]
    assert "".join(choice["text"] for choice in told) == whole["text"]
    assert told[-1]["finish_reason"] == whole["finish_reason"] == "length"
    assert {choice["index"] for choice in told} == {whole["index"]} == {1}
    for key, values in whole["logprobs"].items():
        given = [choice["logprobs"][key] for choice in told if choice["logprobs"]]
        assert [value for part in given for value in part] == values


def test_offsets_are_those_of_the_characters_that_tokens_begin(tokenizer: Tokenizer) -> None:
    logprobs = CompletionLogprobs(tokenizer)
    outputs = pieces_of(tokenizer, "aé\U0001f600b")
    told = logprobs.piece(outputs)
    spelt = b"".join(tokenizer.token_bytes(o.token_ids[0]) for o in outputs)
    assert spelt.decode() == "aé\U0001f600b"
    assert told["text_offset"] == sorted(told["text_offset"])
    assert told["text_offset"][0] == 0
    assert logprobs.piece(pieces_of(tokenizer, "c"))["text_offset"] == [4]


def test_a_token_that_is_part_of_a_character_is_called_by_its_bytes(tokenizer: Tokenizer) -> None:
    told = CompletionLogprobs(tokenizer).piece(pieces_of(tokenizer, "\U0001f600"))
    assert told["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]
    assert told["top_logprobs"][0]["bytes:\\xf0"] == -0.5


def test_without_a_tokenizer_tokens_are_called_by_their_ids() -> None:
    output = Output("r", (7,), None, (Logprobs(-0.5, ((7, -0.5), (9, -2.0))),))
    assert CompletionLogprobs(None).piece([output]) == {
        "tokens": ["token_id:7"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:7": -0.5, "token_id:9": -2.0}],
        "text_offset": [0],
    }


def test_the_chosen_token_is_among_the_likely_ones_of_a_completion_once() -> None:
    def top(token: int, likely: tuple[tuple[int, float], ...]) -> dict[str, float]:
        output = Output("r", (token,), None, (Logprobs(-2.5, likely),))
        (told,) = CompletionLogprobs(None).piece([output])["top_logprobs"]
        return told

    assert top(7, ((9, -0.5),)) == {"token_id:9": -0.5, "token_id:7": -2.5}
    assert top(7, ((9, -0.5), (7, -2.5))) == {"token_id:9": -0.5, "token_id:7": -2.5}
    assert top(7, ()) == {"token_id:7": -2.5}


def test_chats_logprobs_have_text_and_bytes_of_each_token(tokenizer: Tokenizer) -> None:
    entries = [e for o in pieces_of(tokenizer, "hé") for e in ChatLogprobs(tokenizer).entries(o)]
    told = {"content": entries, "refusal": None}
    assert ChoiceLogprobs.model_validate(told, strict=True).model_dump() == told
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == "hé"
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)


def test_a_token_of_no_probability_has_a_number_that_json_holds(tokenizer: Tokenizer) -> None:
    output = Output("r", (5,), "x", (Logprobs(-math.inf, ((5, -math.inf),)),))
    (entry,) = ChatLogprobs(tokenizer).entries(output)
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0
    assert CompletionLogprobs(tokenizer).piece([output])["token_logprobs"] == [-9999.0]


@pytest.mark.parametrize(
    ("decoder", "token", "spelt"),
    [
        (tokenizers.decoders.Metaspace(), "▁the", b" the"),
        (tokenizers.decoders.Metaspace(), "the", b"the"),
        (tokenizers.decoders.ByteFallback(), "<0xE2>", b"\xe2"),
        (tokenizers.decoders.ByteLevel(), "Ġthe", b" the"),
        (None, "the", b" the"),
    ],
)
def test_a_token_is_spelt_as_in_the_middle_of_a_text(
    decoder: Any, token: str, spelt: bytes
) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({token: 0}, unk_token=token))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_bytes(0) == spelt
    assert tokenizer.token_bytes(99) == b""


def test_a_held_back_token_sends_no_chunk_and_an_error_is_raised() -> None:
    one, chunks = CompletionChoice(0), CompletionChunks("c", "m", 5)
    assert chunks.of(one, one.push(Output("r", (1,), ""))) == []
    with pytest.raises(RequestError):
        one.push(Output("r", error=RequestError("no")))
