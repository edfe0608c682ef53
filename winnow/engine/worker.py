"""The engine's own process: commands in, events out, one message a step. Knows nothing of HTTP.

It lives as long as the process at the other end of its socket, and no signal but KILL ends it
sooner: whether a Ctrl-C or a TERM ends the server is the other end's decision.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import traceback
from time import perf_counter

from winnow.config import CHECKPOINT_SAMPLING
from winnow.engine.build import build_engine
from winnow.engine.engine import Engine
from winnow.engine.messages import Abort, Add, Build, Failed, Loading, ModelInfo, Ready, Stepped
from winnow.engine.output import Output
from winnow.engine.wire import Channel
from winnow.errors import RequestError, WinnowError
from winnow.spec.model import BLOCK_TOKENS

_log = logging.getLogger(__name__)
_REPORT_SECONDS = 0.1
"""Between two messages about loading."""
_CLIPPING_SECONDS = 1.0
"""Between two looks at what the cache formats clipped."""


def run_worker(end: socket.socket) -> None:
    """Build the engine that the first command asks for; serve until the other end says Stop or
    goes away. Exits with status 1 after Failed.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(end)
    try:
        (build,) = channel.receive(wait=True)
        logging.basicConfig(
            level=build.log_level, format="winnow engine: %(message)s", stream=sys.stderr
        )
        engine = _build(channel, build)
        channel.send(Ready(_info(engine, build)))
        _serve(engine, channel)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # Whoever the tokens are for has gone.
        return
    except WinnowError as error:
        _fail(channel, str(error))
    except Exception as error:
        traceback.print_exc()
        _fail(channel, f"the engine stopped at a fault of its own: {type(error).__name__}: {error}")


def _build(channel: Channel, build: Build) -> Engine:
    reported = float("-inf")

    def report(done: int, total: int) -> None:
        nonlocal reported
        if done == total or perf_counter() - reported > _REPORT_SECONDS:
            reported = perf_counter()
            channel.send(Loading(done, total, "weights"))

    engine = build_engine(build.model, build.config, progress=False, report=report, **build.options)
    if engine.tokenizer is not None:
        # Takes seconds, which the first request with a grammar would cost all the others.
        try:
            engine.grammars()
        except RequestError as error:
            _log.warning("requests with grammars are refused: %s", error)
    return engine


def _serve(engine: Engine, channel: Channel) -> None:
    """Obey and step in turn; one message tells what came of both."""
    while True:
        outputs: list[Output] = []
        for command in channel.receive(wait=not engine.has_work):
            match command:
                case Add():
                    outputs += _add(engine, command)
                case Abort():
                    for request_id in command.request_ids:
                        engine.abort(request_id)
                case _:
                    return
        step_s = 0.0
        started: tuple[str, ...] = ()
        if engine.has_work:
            begin = perf_counter()
            outputs += engine.step()
            step_s, started = perf_counter() - begin, engine.started
        channel.send(Stepped(tuple(outputs), engine.stats(_CLIPPING_SECONDS), step_s, started))


def _add(engine: Engine, add: Add) -> list[Output]:
    """Begin a request; if it is refused, its only output."""
    try:
        engine.add(add.request_id, add.prompt, add.params, add.cache_salt, add.grammar)
    except WinnowError as error:
        return [Output(add.request_id, finish_reason="error", error=error)]
    return []


def _fail(channel: Channel, message: str) -> None:
    """Say why, if anyone is left to hear it, and end."""
    try:
        channel.send(Failed(message))
    except OSError:
        print(f"winnow engine: {message}", file=sys.stderr)
    sys.exit(1)


def _info(engine: Engine, build: Build) -> ModelInfo:
    spec, layout = engine.spec, engine.runner.storage.layout
    return ModelInfo(
        name=build.model,
        vocab_size=spec.vocab_size,
        max_model_len=engine.max_request_tokens,
        num_pages=engine.scheduler.cache.pool.num_usable,
        page_tokens=BLOCK_TOKENS,
        max_running=engine.scheduler.max_running,
        kv_format=layout.kv_format.name,
        index_format=layout.index_format.name,
        dtype=str(engine.runner.model.weights.embedding.dtype).removeprefix("torch."),
        backend=engine.runner.model.kernels.backend,
        eos_ids=spec.eos_ids,
        default_sampling={
            name: getattr(engine.default_params, name) for name in CHECKPOINT_SAMPLING
        },
        notes=spec.notes,
    )


if __name__ == "__main__":
    run_worker(socket.socket(fileno=int(sys.argv[1])))
