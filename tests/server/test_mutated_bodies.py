"""Bodies that are almost requests: no endpoint fails on any of them, or hangs."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from support.http_server import Running, eventually, running

from winnow.server.settings import ServerConfig

COUNT = int(os.environ.get("WINNOW_MUTANTS", "600"))
"""600 reach every field often; WINNOW_MUTANTS=10000 is a thorough run of some minutes."""

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "model": "fake",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "1"},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": 2,
            "stop": ["x"],
            "max_tokens": 5,
            "temperature": 0.5,
            "logit_bias": {"5": 1.5},
            "chat_template_kwargs": {"thinking_mode": "enabled"},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            "logprobs": False,
            "seed": 1,
            "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": ["a", "b"],
            "max_tokens": 3,
            "min_p": 0.1,
            "top_k": 5,
            "stop_token_ids": [1],
            "repetition_penalty": 1.1,
            "cache_salt": "s",
        },
    ),
    ("/v1/completions", {"prompt": [1, 2, 3], "stream": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 10**30, -(2**63), 2**31, 0.5, -1e308, "", "x", "\x00",
    "\U0001f600", "a" * 5000, [], {}, [[]], [None], {"": None}, {"type": "object"}, [1] * 300,
    "]<]minimax[>[",
]  # fmt: skip


def changed(value: Any, dice: random.Random) -> Any:
    """The value with one of its parts replaced, removed, doubled or added."""
    if isinstance(value, dict) and value and dice.random() < 0.85:
        key = dice.choice(list(value))
        copy = dict(value)
        what = dice.random()
        if what < 0.1:
            del copy[key]
        elif what < 0.2:
            copy[dice.choice(["", "bogus", "n", "model", key + "s"])] = dice.choice(ODD)
        else:
            copy[key] = changed(value[key], dice)
        return copy
    if isinstance(value, list) and value and dice.random() < 0.85:
        place = dice.randrange(len(value))
        if dice.random() < 0.15:
            return [*value, value[place]]
        return [*value[:place], changed(value[place], dice), *value[place + 1 :]]
    return dice.choice(ODD)


def broken(body: bytes, dice: random.Random) -> bytes:
    """The body with a few bytes changed, cut out or repeated."""
    mutable = bytearray(body)
    for _ in range(dice.randint(1, 3)):
        place = dice.randrange(len(mutable) + 1)
        length = dice.randint(1, 12)
        what = dice.random()
        if what < 0.4:
            mutable[place : place + 1] = bytes([dice.randrange(256)])
        elif what < 0.7:
            del mutable[place : place + length]
        else:
            mutable[place:place] = mutable[place : place + length] * 2
    return bytes(mutable)


def post_mutants(server: Running, count: int, seed: int) -> dict[int, int]:
    """How many mutants got which status; fails at one that the server fails on."""
    dice = random.Random(seed)
    statuses: dict[int, int] = {}
    for _ in range(count):
        path, seed_body = dice.choice(SEEDS)
        value: Any = seed_body
        for _ in range(dice.randint(1, 3)):
            value = changed(value, dice)
        body = json.dumps(value).encode()
        if dice.random() < 0.3:
            body = broken(body, dice)
        headers = {"content-type": "application/json"}
        response = server.client.post(path, content=body, headers=headers)
        status = response.status_code
        statuses[status] = statuses.get(status, 0) + 1
        assert status in (200, 400, 404, 413), (path, body[:2000], response.text)
        if status != 200:
            error = response.json()["error"]
            assert error["message"], (path, body[:2000])
            assert len(error["message"]) < 2100
            assert "Traceback" not in response.text
    return statuses


@pytest.fixture
def server() -> Any:
    with running(ServerConfig(max_body_bytes=50_000)) as made:
        made.engine.most_tokens = 3
        yield made


def test_a_mutated_body_is_answered_or_refused_with_a_sentence(server: Running) -> None:
    statuses = post_mutants(server, COUNT, seed=11)
    assert statuses[200] > COUNT // 20, "the mutants were too wild to reach past the parser"
    assert statuses[400] > COUNT // 4
    eventually(lambda: server.serving.admission.in_flight == 0)
    assert not server.engine.live
