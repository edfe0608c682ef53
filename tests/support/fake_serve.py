"""`winnow serve` with a fake engine, in a process of its own: what signals and deaths do to it.

Run as a program: MODEL, seconds that loading takes, seconds between words, then options of the
command. SIGUSR1 is the engine's death.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

from support.fake_engine import DEATH, INFO, FakeEngine, FakeGrammars

from winnow.cli import main
from winnow.engine.messages import Loading, ModelInfo
from winnow.server import run


class FakeClient(FakeEngine):
    """The engine's client, whose process is this one."""

    load_s = 0.0

    @property
    def died(self) -> asyncio.Future[str]:
        return self._died

    async def start(self, *_: Any, progress: Any, **__: Any) -> ModelInfo:
        loop = asyncio.get_running_loop()
        self._died: asyncio.Future[str] = loop.create_future()
        loop.add_signal_handler(signal.SIGUSR1, self._die)
        progress(Loading(1, 2, "weights"))
        await asyncio.sleep(self.load_s)
        return INFO

    async def stop(self, timeout: float = 5.0) -> None:
        pass

    def _die(self) -> None:
        self.is_dead = True
        self._died.set_result(DEATH)


class StartedGrammars(FakeGrammars):
    """The service for constraints, which compiles nothing."""

    async def start(self, *_: Any) -> None:
        pass

    async def stop(self) -> None:
        pass


if __name__ == "__main__":
    model, load_s, gap_s, *options = sys.argv[1:]

    class Client(FakeClient):
        def __init__(self) -> None:
            super().__init__()
            self.load_s, self.gap_s = float(load_s), float(gap_s)

    run.EngineClient = Client  # type: ignore[misc,assignment]
    run.GrammarService = StartedGrammars  # type: ignore[misc,assignment]
    sys.exit(main(["serve", model, *options]))
