"""`python -m train.plot`: the pictures of docs/quality.md from the committed records. Needs
matplotlib, which nothing else here does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

RECORDS = Path(__file__).parent / "records"
PICTURES = Path(__file__).parent.parent / "docs" / "pictures"


def main() -> None:
    matplotlib.use("Agg")
    # Fixed, so that the same records give the same file.
    plt.rcParams["svg.hashsalt"] = "demo"
    PICTURES.mkdir(exist_ok=True)
    _training(_lines("training.jsonl"))
    _quality(_lines("quality.jsonl"))


def _lines(name: str) -> list[dict[str, Any]]:
    with (RECORDS / name).open() as lines:
        return [json.loads(line) for line in lines]


def _training(records: list[dict[str, Any]]) -> None:
    figure, (losses, indexer) = plt.subplots(1, 2, figsize=(10, 3.6))
    for key, label in (("loss", "training, weighted"), ("answer_loss", "answers of tasks"),
                       ("held_out_loss", "held-out text")):  # fmt: skip
        points = [(r["tokens"] / 1e6, r[key]) for r in records if key in r]
        losses.plot(*zip(*points, strict=True), label=label, linewidth=1)
    losses.set_yscale("log")
    losses.set_ylabel("nats a token")
    losses.legend(frameon=False)
    points = [(r["tokens"] / 1e6, r["indexer_kl"]) for r in records if "indexer_kl" in r]
    indexer.plot(*zip(*points, strict=True), linewidth=1)
    indexer.set_ylabel("indexer, KL divergence")
    for axes in (losses, indexer):
        axes.set_xlabel("million tokens")
        last = None
        for record in records:
            if record["phase"] != last and last is not None:
                axes.axvline(record["tokens"] / 1e6, color="0.85", linewidth=0.8, zorder=0)
            last = record["phase"]
    _save(figure, "demo-training.svg")


def _quality(records: list[dict[str, Any]]) -> None:
    cells = [r for r in records if "recall_8192" in r]
    names = [r["cell"].replace("random selection", "random") for r in cells]
    figure, axes = plt.subplots(figsize=(10, 3.6))
    for shift, length in ((-0.2, 8192), (0.2, 16384)):
        values = [100 * r[f"recall_{length}"]["accuracy"] for r in cells]
        places = [at + shift for at in range(len(cells))]
        bars = axes.bar(places, values, 0.38, label=f"{length} tokens")
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(cells)), [n.replace(", ", "\n") for n in names], fontsize=7)
    axes.set_ylabel("facts recalled, %")
    axes.set_ylim(0, 108)
    axes.legend(frameon=False, loc="lower left")
    _save(figure, "demo-recall.svg")


def _save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(PICTURES / name, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
