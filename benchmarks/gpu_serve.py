"""`winnow serve` on a GPU: the model that ships with Winnow, and layers of real widths.

For each, with 4-bit state: a greedy answer to a prompt beyond the selection window over HTTP must
be the one that `winnow generate` gives; then answers at once, one of them streamed and one whose
client leaves, must end as asked, and no page may stay held. Exits with 1 if one does not hold.

    python benchmarks/gpu_serve.py [--device cuda] [--model NAME]...
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.served import Served

MODELS = {
    "demo": ("demo",),
    "minimax-m3.1-flash": ("minimax-m3.1-flash", "--random-weights", "--layers", "3"),
}
STATE = ("--kv-format", "nvfp4", "--index-format", "nvfp4")
PROMPT = [3 + 7 * n % 500 for n in range(3_000)]
"""More tokens than the 16 blocks of 128 that a row reads."""
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ROUTES = {"demo": CHAT, "minimax-m3.1-flash": COMPLETION}
"""Random weights come without a tokenizer and a template."""
TOKENS = 24
AT_ONCE = 24


def generated(model: tuple[str, ...], device: str) -> str:
    """What `winnow generate` continues PROMPT with."""
    command = [
        *(sys.executable, "-m", "winnow", "generate", *model, *STATE, "--device", device),
        *("--token-ids", ",".join(map(str, PROMPT)), "--max-tokens", str(TOKENS), "--ignore-eos"),
        *("--temperature", "0", "--json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    answer = json.loads(done.stdout)
    return str(answer["text"] or called(answer["token_ids"]))


def called(ids: list[int]) -> str:
    """Tokens by the names that the server's logprobs give them where no tokenizer is."""
    return " ".join(f"token_id:{one}" for one in ids)


def served(client: httpx.Client) -> str:
    """What the server continues PROMPT with, or what it says is wrong."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    reply = client.post(COMPLETION, json={**body, "logprobs": 0})
    if reply.status_code != 200:
        return reply.text
    choice = reply.json()["choices"][0]
    return str(choice["text"] or " ".join(choice["logprobs"]["tokens"]))


def answered(client: httpx.Client, route: str, number: int) -> dict[str, Any]:
    """A short or a long question; `usage` and `finish_reason` of its answer."""
    content = f"Tell me of {number} foxes. " * (1 if number % 2 else 300)
    asked: dict[str, Any] = {"prompt": list(content.encode())}
    if route == CHAT:
        asked = {"messages": [{"role": "user", "content": content}]}
    body = {**asked, "max_tokens": TOKENS, "seed": number, "ignore_eos": True}
    if number == 1:
        return streamed(client, route, body)
    if number == 2:
        try:
            client.post(route, json={**body, "max_tokens": 4_000}, timeout=0.5)
        except httpx.ReadTimeout:
            return {"left": True}
        return {"left": False}
    reply = client.post(route, json=body)
    if reply.status_code != 200:
        return {"status": reply.status_code, "said": reply.text}
    answer = reply.json()
    return {**answer["usage"], "finish_reason": answer["choices"][0]["finish_reason"]}


def streamed(client: httpx.Client, route: str, body: dict[str, Any]) -> dict[str, Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    found: dict[str, Any] = {}
    with client.stream("POST", route, json={**body, **options}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                found |= event.get("usage") or {}
                for choice in event.get("choices", []):
                    if choice["finish_reason"] is not None:
                        found["finish_reason"] = choice["finish_reason"]
    return found


def check(name: str, model: tuple[str, ...], device: str) -> bool:
    """Serve it; print a line for each that must hold; whether all do."""
    fine = True

    def must(holds: bool, what: str) -> None:
        nonlocal fine
        fine = fine and holds
        print(f"{'ok' if holds else 'FAILED'}  {name}: {what}", flush=True)

    wanted = generated(model, device)
    begun = time.monotonic()
    with (
        Served(model[0], *model[1:], *STATE, "--device", device) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        print(f"    {name}: ready after {time.monotonic() - begun:.1f} s")
        text = served(client)
        must(text == wanted, f"{len(PROMPT)} tokens continued over HTTP as by generate")
        if text != wanted:
            print(f"    over HTTP: {text!r}\n    generate:  {wanted!r}")
        begun = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(
                pool.map(lambda number: answered(client, ROUTES[name], number), range(AT_ONCE))
            )
        took = time.monotonic() - begun
        left = answers.pop(2)
        must(left == {"left": True}, "a client that leaves within an answer of 4,000 tokens")
        ended = [
            answer.get("completion_tokens") == TOKENS and answer.get("finish_reason") == "length"
            for answer in answers
        ]
        must(all(ended), f"{sum(ended)} of {len(answers)} answers at once, in {took:.1f} s")
        for answer in (one for one, good in zip(answers, ended, strict=True) if not good):
            print(f"    {answer}")
        metrics = server.idle_metrics()
        must(not metrics["winnow_pages_used"], "no page is held at the end")
        if not fine:
            print(server.log())
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    args = parser.parse_args()
    results = [check(name, MODELS[name], args.device) for name in args.model or MODELS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
