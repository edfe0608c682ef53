"""Serving measured from outside: named workloads at several loads, as records.

Owns the order of things. The load is AIPerf's, the metrics' definitions are those of
`winnow.bench.runs`. Works on any OpenAI-compatible endpoint.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from winnow.bench import aiperf
from winnow.bench.aiperf import Load
from winnow.bench.exports.aiperf import read
from winnow.bench.record import Record
from winnow.bench.runs import serving_records
from winnow.bench.workloads import Workload, write_trace
from winnow.errors import PeerError, RequestError

_PROBE_S = 10.0


@dataclass(frozen=True)
class Target:
    """An endpoint: base URL, the model's name there, and where its tokenizer is."""

    url: str
    model: str
    tokenizer: str


@dataclass(frozen=True)
class Plan:
    """What to send, how hard, and what to say of the server: all that a record needs.

    `per_load` measured requests or sessions at each load; None takes the workload's own number
    for each user.
    """

    workload: Workload
    loads: Sequence[Load]
    conditions: Mapping[str, Any]
    machine: Mapping[str, Any]
    software: Mapping[str, Any]
    commit: str
    seed: int = 1
    per_load: int | None = None
    honour_eos: bool = False
    timeout_s: float = 3600.0


def target(url: str, model: str | None, tokenizer: str | None) -> Target:
    """Ask the endpoint what it serves where that was not said.

    PeerError if it does not answer, RequestError if something has to be said after all.
    """
    name = model or _only_model(url)
    if tokenizer is None and not Path(name, "tokenizer.json").is_file():
        raise RequestError(
            f"prompts are made with the tokenizer of model {name!r}, which is no directory with a "
            "tokenizer.json here: name one with --tokenizer"
        )
    return Target(url.rstrip("/"), name, tokenizer or name)


def measure(endpoint: Target, plan: Plan, artifacts: Path) -> Iterator[list[Record]]:
    """The records of each load in turn; AIPerf's own files stay in `artifacts`."""
    for place, load in enumerate(plan.loads):
        yield _measure_one(endpoint, plan, load, artifacts / f"load-{place}")


def _measure_one(endpoint: Target, plan: Plan, load: Load, artifacts: Path) -> list[Record]:
    workload = plan.workload
    if (artifacts / "profile_export.jsonl").exists():
        raise RequestError(f"{artifacts} holds an earlier run: name another --artifacts directory")
    users = load.concurrency or 1
    total = plan.per_load or workload.per_user * users
    warmup = workload.warmup_per_user * users
    options = dict(workload.options)
    if workload.trace:
        options["input-file"] = write_trace(workload, artifacts / "trace")
    words = aiperf.arguments(
        endpoint.url,
        endpoint.model,
        endpoint.tokenizer,
        load,
        options,
        _counts(workload, total, warmup),
        [] if plan.honour_eos else ["ignore_eos:true"],
        plan.seed,
        artifacts,
    )
    aiperf.profile(words, artifacts, plan.timeout_s)
    (run,) = read(artifacts)
    return serving_records(
        replace(run, load=load.conditions()),
        workload.described(plan.per_load, plan.seed, plan.honour_eos),
        plan.conditions,
        plan.machine,
        plan.software,
        plan.commit,
    )


def _counts(workload: Workload, total: int, warmup: int) -> dict[str, int]:
    if workload.count == "requests":
        return {"request-count": total, "warmup-request-count": warmup}
    return {"num-sessions": total, "num-warmup-sessions": warmup}


def _only_model(url: str) -> str:
    address = f"{url.rstrip('/')}/v1/models"
    try:
        with urllib.request.urlopen(address, timeout=_PROBE_S) as answer:
            names = [entry["id"] for entry in json.load(answer)["data"]]
    except (urllib.error.URLError, TimeoutError) as error:
        raise PeerError(f"{address} does not answer ({error}): start the server first") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PeerError(f"{address} does not list models: name one with --model") from error
    if len(names) != 1:
        raise RequestError(f"{url} serves {', '.join(names) or 'nothing'}: choose with --model")
    found: str = names[0]
    return found
