"""Named traffic: what is sent, and how much of it, as options of AIPerf. Sends nothing."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from winnow.errors import RequestError


@dataclass(frozen=True)
class Workload:
    """`count` is requests or sessions, `per_user` how many of them each user of a closed loop
    does. `trace` names a file of this package with the sessions to replay."""

    name: str
    about: str
    count: str
    per_user: int
    warmup_per_user: int
    options: Mapping[str, Any]
    trace: str = ""

    def described(self, total: int | None, seed: int, honour_eos: bool) -> dict[str, Any]:
        """What a record says of it, the same at every load of a sweep; `total` requests or
        sessions replace the number for each user."""
        measured = (
            {f"{self.count}_per_user": self.per_user} if total is None else {self.count: total}
        )
        return {
            "name": self.name,
            "about": self.about,
            **measured,
            f"warmup_{self.count}_per_user": self.warmup_per_user,
            "seed": seed,
            "answers": "end by themselves" if honour_eos else "of set length",
            **self.options,
        }


def workloads() -> dict[str, Workload]:
    """Every workload of this package, by name."""
    text = files(__name__).joinpath("workloads.toml").read_text(encoding="utf-8")
    return {name: Workload(name, **fields) for name, fields in tomllib.loads(text).items()}


def workload(name: str) -> Workload:
    """RequestError names the known ones."""
    known = workloads()
    if name not in known:
        raise RequestError(f"no workload {name!r}; known: {', '.join(known)}")
    return known[name]


def write_trace(chosen: Workload, directory: Path) -> Path:
    """A workload's sessions as AIPerf reads them, one file each; the directory that holds them."""
    sessions = json.loads(files(__name__).joinpath(f"{chosen.trace}.json").read_text("utf-8"))
    directory.mkdir(parents=True, exist_ok=True)
    for session in sessions:
        target = directory / f"{session['id']}.json"
        target.write_text(json.dumps(session), encoding="utf-8")
    return directory
