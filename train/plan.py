"""The phases of training: what is read, how attention works, for how many steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from train.geometry import Geometry
from train.mixture import Mixture
from train.model import State

_EARLY = {
    "text": 0.20, "chat": 0.25, "reading": 0.12, "needles": 0.10, "listing": 0.10, "table": 0.08,
    "copying": 0.03, "variables": 0.05, "arithmetic": 0.07,
}  # fmt: skip
"""Text is little beside what can be generated: more of it, and it is learnt by heart."""
_LATE = _EARLY | {
    "text": 0.16, "listing": 0.06, "table": 0.04, "copying": 0.02, "reading": 0.14, "needles": 0.16,
}  # fmt: skip
_RECALL = _LATE | {"text": 0.12, "reading": 0.2, "needles": 0.24}


@dataclass(frozen=True)
class Phase:
    name: str
    steps: int
    batch: int
    """Sequences a step."""
    mixture: Mixture
    state: State
    indexer_rows: int = 0
    """Rows of each sequence that teach the indexer; 0: it is not trained."""


@dataclass(frozen=True)
class Plan:
    """`matrix_rate` and `adam_rate` rise over `warmup` steps and fall to 0, linearly, from
    `decay_from` of all steps on."""

    geometry: Geometry
    phases: tuple[Phase, ...]
    matrix_rate: float = 3e-3
    adam_rate: float = 3e-3
    decay: float = 0.1
    warmup: int = 60
    decay_from: float = 0.35
    seed: int = 0

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def factor(self, step: int) -> float:
        """Of both rates at a step."""
        start = self.decay_from * self.steps
        fall = (self.steps - step) / (self.steps - start) if step > start else 1.0
        return min(1.0, (step + 1) / self.warmup, fall)

    def phase_at(self, step: int) -> tuple[int, int]:
        """Which phase a step is in, and its number there."""
        for number, phase in enumerate(self.phases):
            if step < phase.steps:
                return number, step
            step -= phase.steps
        raise ValueError(f"the plan has {self.steps} steps")


_NATIVE = State("sparse", "nvfp4", "nvfp4", quantised_weights=True)

# K and V are read through NVFP4 as soon as the answers of tasks are learnt and the rate is still
# high: the trunk grows up with that noise instead of meeting it at the end.
_DENSE_CACHE = State("dense", "nvfp4", "nvfp4")

DEMO = Plan(
    Geometry(),
    (
        Phase("short", 450, 128, Mixture(1024, _EARLY), State("dense")),
        Phase("medium", 200, 64, Mixture(2048, _EARLY, 0.2), _DENSE_CACHE, 64),
        Phase("warm-up", 120, 32, Mixture(4096, _LATE, 0.35), _DENSE_CACHE, 128),
        Phase("far", 120, 8, Mixture(16384, _LATE, 0.6), _DENSE_CACHE, 256),
        Phase("native", 600, 8, Mixture(16384, _RECALL, 0.7), _NATIVE, 256),
    ),
)


def shrunk(plan: Plan, share: float) -> Plan:
    """The same phases with a share of their steps, each at least 2."""
    phases = tuple(replace(p, steps=max(2, round(p.steps * share))) for p in plan.phases)
    return replace(plan, phases=phases)


TINY = Plan(
    Geometry(
        hidden_size=64, num_layers=3, num_heads=4, head_dim=32, index_dim=32, topk_blocks=2,
        num_experts=8, expert_width=32, shared_width=32, dense_width=64, max_positions=4096,
    ),
    (
        Phase("short", 3, 4, Mixture(256, _EARLY), State("dense")),
        Phase("warm-up", 3, 2, Mixture(512, _EARLY, 0.5), State("dense"), 16),
        Phase("sparse", 3, 2, Mixture(512, _EARLY, 0.5), State("sparse"), 16),
        Phase("native", 3, 2, Mixture(512, _EARLY, 0.5), _NATIVE, 16),
    ),
    warmup=2,
)  # fmt: skip
"""Every phase in seconds on a CPU: shows that the recipe runs, and teaches nothing."""
