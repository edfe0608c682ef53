"""An OpenAI-compatible server with known delays, to measure a load generator with.

Owns a socket and a clock. Knows nothing of models: every answer is the same word again and again.
Run as a module it serves until interrupted:

    python tests/support/mock_openai.py --port 8800 --ttft-ms 200 --itl-ms 20
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

WORD = " the"
DEFAULT_TOKENS = 16


@dataclass
class Counters:
    """What /metrics shows, under the names of Winnow's own server."""

    running: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0

    def text(self) -> str:
        lines = []
        for kind, name, value in (
            ("gauge", "winnow_num_requests_running", self.running),
            ("gauge", "winnow_num_requests_waiting", 0),
            ("counter", "winnow_prompt_tokens_total", self.prompt_tokens),
            ("counter", "winnow_generation_tokens_total", self.generation_tokens),
            ("counter", "winnow_prefix_cache_query_tokens_total", self.query_tokens),
            ("counter", "winnow_prefix_cache_hit_tokens_total", self.hit_tokens),
        ):
            lines += [f"# HELP {name} Mock.", f"# TYPE {name} {kind}", f"{name} {value}.0"]
        return "\n".join(lines) + "\n"


@dataclass
class MockServer:
    """First token `ttft_s` after a request's arrival, the others `itl_s` apart, on a schedule:
    a late wake-up is made good at the next token, so the mean interval is `itl_s`."""

    ttft_s: float = 0.2
    itl_s: float = 0.02
    model: str = "mock"
    counters: Counters = field(default_factory=Counters)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until the client closes it."""
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) is not None:
                arrival = time.perf_counter()
                request_line, *header_lines = head.decode("latin-1").split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in header_lines if ": " in line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, *_ = request_line.split()
                if method == "HEAD":
                    await _send(writer, b"", "text/plain", 405)
                    continue
                await self._answer(path, json.loads(body) if body else {}, arrival, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            # The client has left: that is how a connection ends.
            return
        finally:
            writer.close()

    async def _answer(
        self, path: str, body: dict[str, Any], arrival: float, writer: asyncio.StreamWriter
    ) -> None:
        if path == "/metrics":
            await _send(writer, self.counters.text().encode(), "text/plain; version=0.0.4")
        elif path in ("/v1/models", "/health"):
            listing = {"object": "list", "data": [{"id": self.model, "object": "model"}]}
            await _send(writer, json.dumps(listing).encode(), "application/json")
        elif path in ("/v1/chat/completions", "/v1/completions"):
            await self._generate(path.endswith("chat/completions"), body, arrival, writer)
        else:
            await _send(writer, b'{"error": {"message": "no such path"}}', "application/json", 404)

    async def _generate(
        self, chat: bool, body: dict[str, Any], arrival: float, writer: asyncio.StreamWriter
    ) -> None:
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_TOKENS
        prompt_tokens = len(json.dumps(body.get("messages") or body.get("prompt")).split())
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": asked}
        usage["total_tokens"] = prompt_tokens + asked
        counters = self.counters
        counters.running += 1
        counters.prompt_tokens += prompt_tokens
        counters.query_tokens += prompt_tokens
        counters.hit_tokens += prompt_tokens // 2
        try:
            if body.get("stream"):
                await _send_head(writer, "text/event-stream", "Transfer-Encoding: chunked")
                for index in range(asked):
                    await _until(arrival + self.ttft_s + index * self.itl_s)
                    counters.generation_tokens += 1
                    await _send_event(writer, self._chunk(chat, WORD, index == asked - 1))
                if (body.get("stream_options") or {}).get("include_usage"):
                    last = {**self._chunk(chat, "", False), "choices": [], "usage": usage}
                    await _send_event(writer, last)
                writer.write(_chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")
                await writer.drain()
            else:
                await _until(arrival + self.ttft_s + (asked - 1) * self.itl_s)
                counters.generation_tokens += asked
                whole = self._chunk(chat, WORD * asked, True, stream=False) | {"usage": usage}
                await _send(writer, json.dumps(whole).encode(), "application/json")
        finally:
            counters.running -= 1

    def _chunk(self, chat: bool, text: str, last: bool, stream: bool = True) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
        if chat:
            choice["delta" if stream else "message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        kind = (
            ("chat.completion.chunk" if stream else "chat.completion")
            if chat
            else ("text_completion")
        )
        return {"id": "mock-1", "object": kind, "created": 0, "model": self.model,
                "choices": [choice]}  # fmt: skip


@asynccontextmanager
async def serving(server: MockServer, port: int = 0) -> AsyncIterator[str]:
    """Serve while the block runs; gives the base URL."""
    listener = await asyncio.start_server(server.connection, "127.0.0.1", port)
    async with listener:
        host, chosen = listener.sockets[0].getsockname()[:2]
        yield f"http://{host}:{chosen}"


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.perf_counter()))


async def _send_head(
    writer: asyncio.StreamWriter, kind: str, *more: str, status: int = 200
) -> None:
    lines = [f"HTTP/1.1 {status} Mock", f"Content-Type: {kind}", *more]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    await writer.drain()


async def _send(writer: asyncio.StreamWriter, body: bytes, kind: str, status: int = 200) -> None:
    await _send_head(writer, kind, f"Content-Length: {len(body)}", status=status)
    writer.write(body)
    await writer.drain()


async def _send_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    writer.write(_chunked(b"data: " + json.dumps(event).encode() + b"\n\n"))
    await writer.drain()


def _chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8800)
    parser.add_argument("--ttft-ms", type=float, default=200.0)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    args = parser.parse_args()
    async with serving(MockServer(args.ttft_ms / 1e3, args.itl_ms / 1e3), args.port) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
