"""The engine's process, run in this one: its last words."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from winnow.config import EngineConfig
from winnow.engine import worker
from winnow.engine.build import build_engine
from winnow.engine.messages import Build, Failed, Ready
from winnow.engine.wire import Channel


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    """The worker's end, and a channel over the other one; signals are as before afterwards."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield theirs, Channel(ours)
    for number, handler in kept.items():
        signal.signal(number, handler)


def build(model: str) -> Build:
    return Build(model, EngineConfig(num_pages=8), {}, log_level=30)


def test_a_fault_of_its_own_is_named_with_a_traceback_and_a_status(
    ends: tuple[socket.socket, Channel],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    theirs, channel = ends
    monkeypatch.setattr(worker, "_build", lambda *_: 1 // 0)
    channel.send(build("anything"))
    with pytest.raises(SystemExit) as end:
        worker.run_worker(theirs)
    assert end.value.code == 1
    (failed,) = channel.receive(wait=True)
    assert failed == Failed(
        "the engine stopped at a fault of its own: ZeroDivisionError: integer division or modulo "
        "by zero"
    )
    assert "Traceback" in capfd.readouterr().err


def test_a_checkpoint_that_cannot_be_served_is_one_sentence_without_a_traceback(
    ends: tuple[socket.socket, Channel], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    theirs, channel = ends
    channel.send(build(str(tmp_path)))
    with pytest.raises(SystemExit) as end:
        worker.run_worker(theirs)
    assert end.value.code == 1
    (failed,) = channel.receive(wait=True)
    assert isinstance(failed, Failed)
    assert str(tmp_path) in failed.message
    assert "Traceback" not in capfd.readouterr().err


def test_a_front_that_leaves_before_it_asks_for_anything_ends_the_worker(
    ends: tuple[socket.socket, Channel],
) -> None:
    theirs, channel = ends
    channel._socket.close()
    worker.run_worker(theirs)


def test_a_step_that_breaks_off_ends_the_process_with_its_cause(
    tiny: Path,
    ends: tuple[socket.socket, Channel],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Clients are told at once and the server is started anew, on a device that may be at fault."""
    theirs, channel = ends
    engine = build_engine(str(tiny), EngineConfig(num_pages=8), progress=False)
    monkeypatch.setattr(engine.runner, "run", lambda *_: 1 // 0)
    monkeypatch.setattr(worker, "_build", lambda *_: engine)
    engine.add("one", [1, 2])
    channel.send(build(str(tiny)))
    with pytest.raises(SystemExit) as end:
        worker.run_worker(theirs)
    assert end.value.code == 1
    ready, failed = channel.receive(wait=True)
    assert isinstance(ready, Ready)
    assert isinstance(failed, Failed)
    assert "ZeroDivisionError" in failed.message
    assert "Traceback" in capfd.readouterr().err
