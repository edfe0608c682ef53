"""Endpoints over an engine that counts words: what is answered, and in which form."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.fake_engine import DEATH, INFO
from support.http_server import Running, chat_body, eventually, running

from winnow.config import SamplingParams
from winnow.errors import CapacityError, RequestError
from winnow.server.settings import ServerConfig

ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running(ServerConfig(max_n=3, max_body_bytes=100_000)) as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    yield shared
    shared.engine.refusal = None
    shared.engine.is_dead = False
    # The last byte is sent before the last line of the server's code has run.
    eventually(lambda: shared.serving.admission.in_flight == 0)
    assert not shared.engine.live, "the engine was left with work that nobody wants"


def events(response: httpx.Response) -> list[Any]:
    """Data of a stream's events; the last one must be [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, end, rest = response.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in data]


def error(response: httpx.Response) -> dict[str, Any]:
    """The error object, which has all its four fields and no traceback."""
    assert response.headers["content-type"] == "application/json"
    body: dict[str, Any] = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert "Traceback" not in body["message"]
    assert "\n" not in body["message"]
    return body


def test_a_chat_answer_has_openais_fields(server: Running) -> None:
    answer = server.post("/v1/chat/completions", chat_body(max_tokens=3)).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    (choice,) = answer["choices"]
    assert choice["message"]["content"].split() == ["word"] * 3
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_a_stream_says_what_the_whole_answer_says(server: Running) -> None:
    body = chat_body(max_tokens=5, n=3)
    whole = server.post("/v1/chat/completions", body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(server.post("/v1/chat/completions", {**body, **options}))
    *deltas, last = chunks
    assert last["usage"] == whole["usage"]
    for index in range(3):
        choices = [c for chunk in deltas for c in chunk["choices"] if c["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        assert text == whole["choices"][index]["message"]["content"]
        assert [c["finish_reason"] for c in choices[-2:]] == [None, "length"]


def test_completions_answer_each_prompt_n_times_in_order(server: Running) -> None:
    body = {"prompt": ["hi", "hello"], "max_tokens": 2, "n": 2, "seed": 5}
    before = len(server.engine.submitted)
    answer = server.post("/v1/completions", body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 8
    jobs = server.engine.submitted[before:]
    assert [len(ids) for ids, _ in jobs] == [2, 2, 5, 5]
    assert jobs[0][1].seed != jobs[1][1].seed


def test_token_ids_are_a_prompt(server: Running) -> None:
    server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 1})
    assert server.engine.submitted[-1][0] == (5, 6, 7)


FORMAT = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": FORMAT}, "response_format"),
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "response_format": FORMAT}, "tools"),
        ({"tools": TOOLS, "tool_choice": "none", "response_format": FORMAT}, "response_format"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_said_of_the_field_it_came_from(
    server: Running, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], field: str
) -> None:
    for said in ("the structural_tag takes over 2 s to compile", "the grammar takes 9 ms a token"):
        monkeypatch.setattr(server.serving.grammars, "refusal", RequestError(said))
        response = server.post("/v1/chat/completions", chat_body(**fields))
        assert response.status_code == 400
        body = error(response)
        assert body["param"] == field
        assert body["message"].startswith(f"the grammar of {field} takes ")


@pytest.mark.parametrize(("name", "value"), [("min_tokens", 5), ("ignore_eos", True)])
def test_what_contradicts_a_grammar_is_said_of_the_fields(
    server: Running, name: str, value: Any
) -> None:
    wanted = chat_body(response_format=FORMAT, **{name: value})
    response = server.post("/v1/chat/completions", wanted)
    body = error(response)
    assert (response.status_code, body["param"]) == (400, name)
    assert body["message"].startswith(f"{name} is {str(value).lower()} beside response_format,")


def test_parameters_reach_the_engine(server: Running) -> None:
    fields = {"temperature": 0.5, "top_k": 7, "stop": ["x"], "max_completion_tokens": 2}
    server.post("/v1/chat/completions", chat_body(**fields))
    params = server.engine.submitted[-1][1]
    assert isinstance(params, SamplingParams)
    assert (params.temperature, params.top_k, params.stop, params.max_tokens) == (0.5, 7, ("x",), 2)


def test_what_a_request_does_not_say_of_sampling_the_model_says(server: Running) -> None:
    server.post("/v1/chat/completions", chat_body(top_p=0.5))
    params = server.engine.submitted[-1][1]
    assert isinstance(params, SamplingParams)
    assert (params.temperature, params.top_p, params.top_k) == (0.25, 0.5, 0)


def test_without_a_limit_an_answer_gets_what_the_model_leaves_up_to_the_servers(
    server: Running,
) -> None:
    server.post("/v1/completions", {"prompt": "hi"})
    assert server.engine.submitted[-1][1].max_tokens == INFO.max_model_len - 2


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/chat/completions", chat_body(bogus=1), 400, "bogus"),
        ("/v1/chat/completions", chat_body(n=4), 400, "up to 3"),
        ("/v1/chat/completions", chat_body(temperature=-1), 400, "temperature"),
        ("/v1/chat/completions", chat_body(model="other"), 404, "other"),
        ("/v1/chat/completions", chat_body("x" * 5000), 400, "shorten"),
        ("/v1/chat/completions", chat_body("x" * 100_000), 413, "100000 bytes"),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "other"),
        ("/v1/completions", {"prompt": ["a"] * 300}, 400, "260"),
        ("/v1/completions", [], 400, "object"),
        ("/v1/completions", {"prompt": "\ud800"}, 400, "JSON"),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "only one"),
        ("/detokenize", {"tokens": [300]}, 400, "299"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/nowhere", {}, 404, "/nowhere"),
        ("/v1/models", {}, 405, "POST"),
    ],
)
def test_a_wrong_request_gets_a_sentence_that_names_the_fault(
    server: Running, path: str, body: Any, status: int, words: str
) -> None:
    data = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    for stream in (False, True):
        if stream and isinstance(body, dict) and path.startswith("/v1/c"):
            data = json.dumps({**body, "stream": True}).encode()
        response = server.client.post(path, content=data, headers=headers)
        assert response.status_code == status
        assert words in error(response)["message"]


def test_what_the_engine_refuses_is_refused_with_a_status_even_in_a_stream(
    server: Running,
) -> None:
    for refusal, code in (
        (RequestError("the prompt is wrong"), None),
        (CapacityError("96 pages are needed"), "context_length_exceeded"),
    ):
        server.engine.refusal = refusal
        for stream in (False, True):
            body = chat_body(stream=stream, n=2)
            response = server.post("/v1/chat/completions", body)
            assert response.status_code == 400
            assert error(response)["message"] == str(refusal)
            assert error(response)["code"] == code


def test_a_dead_engine_is_503(server: Running) -> None:
    server.engine.is_dead = True
    response = server.post("/v1/chat/completions", chat_body())
    assert response.status_code == 503
    assert error(response) == {
        "message": DEATH,
        "type": "service_unavailable_error",
        "param": None,
        "code": "engine_unavailable",
    }


def test_a_mistake_of_ours_is_500_with_the_requests_id_and_its_cause_in_the_log(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(server.engine, "submit", broken)
    with caplog.at_level(logging.ERROR):
        response = server.client.post(
            "/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine-1"}
        )
    assert response.status_code == 500
    assert "mine-1" in error(response)["message"]
    assert "secret" not in response.text
    assert "secret detail" in caplog.text


def test_ids_are_returned_and_one_line_a_request_is_logged_without_its_prompt(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "winnow"):
        body = {"prompt": "confidential", "max_tokens": 2}
        response = server.post("/v1/completions", body, **{"x-request-id": "trace-7"})
        assert response.headers["x-request-id"] == "trace-7"
        other = server.post("/v1/completions", body, **{"x-request-id": "bad id"})
        assert len(other.headers["x-request-id"]) == 24
    lines = [line for line in caplog.messages if line.startswith("trace-7 ")]
    (line,) = lines
    assert line.startswith("trace-7 POST /v1/completions 200 prompt=12 cached=0 completion=2 ")
    assert line.endswith(" finish=length")
    assert "confidential" not in caplog.text


def test_tokens_go_there_and_back(server: Running) -> None:
    ids = server.post("/tokenize", {"prompt": "grain", "return_token_strs": True}).json()
    assert ids == {
        "count": 5,
        "max_model_len": INFO.max_model_len,
        "tokens": ids["tokens"],
        "token_strs": list("grain"),
    }
    assert server.post("/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": "grain"}


def test_a_chat_is_tokenised_as_it_would_be_served(server: Running) -> None:
    ids = server.post("/tokenize", {"messages": chat_body()["messages"]}).json()["tokens"]
    server.post("/v1/chat/completions", chat_body(max_tokens=1))
    assert server.engine.submitted[-1][0] == tuple(ids)


def test_models_names_the_model_and_its_length(server: Running) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("fake", INFO.max_model_len)
    assert server.client.get("/v1/models/fake").json() == model
    assert server.client.get("/v1/models/else").status_code == 404


def test_head_is_answered_as_get_without_its_body(server: Running) -> None:
    for path in ("/health", "/ready", "/metrics", "/v1/models", "/", "/page/app.js", "/nowhere"):
        got, head = server.client.get(path), server.client.head(path)
        assert head.status_code == got.status_code
        assert head.content == b""
        assert head.headers["content-type"] == got.headers["content-type"]
    assert server.client.head("/v1/completions").status_code == 405


def test_the_openapi_document_has_the_bodies_and_says_what_errors_are(server: Running) -> None:
    document = server.client.get("/openapi.json").json()
    names = set(document["components"]["schemas"])
    assert names >= {"ChatRequest", "CompletionRequest", "TokenizeRequest", "Error"}
    chat = document["paths"]["/v1/chat/completions"]["post"]
    schema = chat["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/ChatRequest"}
    assert set(chat["responses"]) >= {"200", "400", "413", "415", "429", "503"}
    assert "422" not in chat["responses"]
    for reference in set(find_references(document)):
        assert reference.removeprefix("#/components/schemas/") in names


def find_references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from find_references(inner)


def test_the_page_loads_nothing_from_elsewhere_and_cannot_be_framed(server: Running) -> None:
    for path in ("/", "/page/style.css", "/page/app.js"):
        response = server.client.get(path)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        text = response.text.replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text
        assert "https:" not in text


def test_counts_reach_the_metrics(server: Running) -> None:
    names = ("winnow_generation_tokens_total", "winnow_prompt_tokens_total",
             "winnow_time_to_first_token_seconds_count", "winnow_requests_refused_total",
             "winnow_inter_token_latency_seconds_count", "winnow_request_success_total",
             "winnow_request_queue_time_seconds_count")  # fmt: skip
    before = [server.metric(name) for name in names]
    server.post("/v1/completions", {"prompt": "abc", "max_tokens": 4})
    server.post("/v1/completions", {"prompt": ""})
    after = [server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, 3, 1, 1, 3, 1, 1]


def test_health_and_readiness_differ_while_the_model_loads() -> None:
    with running(loaded=False) as server:
        assert server.client.get("/health").status_code == 200
        server.serving.loading = 512, 2048
        ready = server.client.get("/ready")
        assert ready.status_code == 503
        assert "25%" in error(ready)["message"]
        assert server.metric("winnow_requests_refused_total") == 0
        response = server.post("/v1/chat/completions", chat_body())
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert server.metric("winnow_requests_refused_total") == 1
        assert server.client.get("/stats").json()["ready"] is False


def test_with_keys_the_api_is_closed_and_probes_and_the_page_are_open() -> None:
    with running(ServerConfig(api_keys=("k1", "k2"))) as server:
        for path in ("/", "/health", "/ready", "/metrics", "/page/app.js"):
            assert server.client.get(path).status_code == 200
        assert server.client.get("/v1/models").status_code == 401
        response = server.post("/v1/chat/completions", chat_body(max_tokens=1))
        assert response.status_code == 401
        assert error(response)["code"] == "invalid_api_key"
        key = {"authorization": "Bearer k2"}
        assert server.post("/v1/chat/completions", chat_body(max_tokens=1), **key).is_success
        assert not server.engine.aborted


def test_other_origins_are_let_in_only_when_they_are_named() -> None:
    asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
    with running() as server:
        assert server.client.options("/v1/completions", headers=asked).status_code == 405
        reply = server.client.get("/health", headers={"origin": ORIGIN})
        assert "access-control-allow-origin" not in reply.headers
    with running(ServerConfig(allow_origins=(ORIGIN,), api_keys=("k",))) as server:
        reply = server.client.options("/v1/completions", headers=asked)
        assert reply.headers["access-control-allow-origin"] == ORIGIN
        refused = server.post("/v1/completions", {}, origin=ORIGIN)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == ORIGIN
        other = server.post("/v1/completions", {}, origin="https://evil.example")
        assert "access-control-allow-origin" not in other.headers


def test_a_checkpoint_without_text_serves_token_ids_and_says_so_to_others() -> None:
    with running() as server:
        server.serving.tokenizer = None
        assert server.post("/v1/completions", {"prompt": [1], "max_tokens": 1}).is_success
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", chat_body()),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [1]}),
        ):
            response = server.post(path, body)
            assert response.status_code == 400
            assert "tokenizer.json" in error(response)["message"]
