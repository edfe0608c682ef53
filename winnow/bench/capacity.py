"""What a plan says fits, as records of the capacity level. Plans nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from winnow import __version__
from winnow.bench.exports.files import export_of, load_json
from winnow.bench.machine import commit
from winnow.bench.record import Record
from winnow.errors import RequestError

_VERSION = 1
"""Of the JSON of `winnow plan` that is read here."""


def capacity_records(path: Path) -> list[Record]:
    """The records of a file that `winnow plan --json` wrote, one plan or several.

    RequestError if it is no such file.
    """
    found = load_json(path)
    with export_of("winnow plan", path):
        if found["version"] != _VERSION:
            raise RequestError(
                f"{path} is version {found['version']} of a plan, this winnow reads {_VERSION}: "
                "write it anew"
            )
        plans = found.get("plans", [found])
        return [record for plan in plans for record in _records(plan)]


def _records(plan: Mapping[str, Any]) -> list[Record]:
    asked = plan["settings"]
    shared: dict[str, Any] = {
        "level": "capacity",
        "workload": {"model": asked["model"], "context": asked["context"]},
        "conditions": {
            "formats": {name: asked[name] for name in ("kv", "index", "experts", "linear")},
            "parallel": {"plan": asked["parallel"], "devices": asked["gpus"]},
            "acceptance": None,
            "cache_state": None,
            "concurrency": None,
            "latency_objective": None,
            "draft_layers": asked["draft"],
            "memory_fraction": asked["memory_fraction"],
            "reserve_bytes": asked["reserve_bytes"],
            "index_charged": asked["charge_index"],
        },
        "machine": {"gpu": asked["gpu"] or "none", "memory_bytes": asked["memory_bytes"]},
        "software": {"winnow": __version__},
        "commit": commit(),
    }
    rows = [
        ("weights of one device", "bytes", plan["weight_bytes"]),
        ("cache of one token", "bytes", sum(plan["token_bytes"].values())),
    ]
    fit = plan["fit"]
    if fit is not None:
        rows.append(("sequences that fit", "sequences", fit["sequences"]))
        rows.append(("tokens that fit in one group", "tokens", fit["num_tokens"]))
    return [Record(what=w, unit=u, samples=(v,), **shared) for w, u, v in rows]
