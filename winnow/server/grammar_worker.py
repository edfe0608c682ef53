"""The process that compiles grammars: a vocabulary first, then one constraint after the other.

It may be killed at any moment, and says nothing on stderr: what it reads is a client's.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from winnow.config import Constraint
from winnow.engine.text import load_tokenizer
from winnow.engine.wire import Channel
from winnow.errors import CheckpointError, RequestError, WinnowError

MEMORY_BYTES = 2 << 30
"""For compiling, beyond what the process needs to be there."""


@dataclass(frozen=True)
class Vocabulary:
    """The first message: whose text the grammars are about. The answer is True, or an error:
    a RequestError where every constraint will be refused, as the library is not installed."""

    directory: str
    vocab_size: int
    stop_ids: tuple[int, ...]


def main(end: socket.socket) -> None:
    """Answer each constraint with its dumped grammar or a RequestError, until the socket closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(end)
    try:
        _serve(channel)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _serve(channel: Channel) -> None:
    (vocabulary,) = channel.receive(wait=True)
    try:
        tokenizer = load_tokenizer(Path(vocabulary.directory))
    except WinnowError as error:
        channel.send(error)
        return
    if tokenizer is None:
        channel.send(CheckpointError(f"{vocabulary.directory} has no tokenizer.json"))
        return
    # Imported here, so that the front can import this module's messages without torch.
    try:
        from winnow.engine.grammar import GrammarCompiler, dump, try_out
    except RequestError as error:
        channel.send(error)
        return

    compiler = GrammarCompiler(tokenizer, vocabulary.vocab_size, vocabulary.stop_ids)
    # The first of a kind loads code; that is not to count against a request.
    compiler.compile(Constraint("json_object"))
    channel.send(True)
    # The library quotes patterns in its warnings.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    _limit_memory()
    while True:
        for constraint in channel.receive(wait=True):
            answer: bytes | RequestError
            try:
                matcher = compiler.matcher(constraint)
                try_out(matcher)
                answer = dump(matcher.grammar)
            except RequestError as error:
                answer = error
            channel.send(answer)


def _limit_memory() -> None:
    """Let private memory grow by MEMORY_BYTES from now on."""
    status = Path("/proc/self/status").read_text()
    (now,) = (int(line.split()[1]) << 10 for line in status.splitlines() if line[:7] == "VmData:")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + MEMORY_BYTES, hard))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
