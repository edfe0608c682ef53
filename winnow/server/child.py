"""A process of ours and the socket to it. Knows what a message is, not what it says."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable

from winnow.engine.wire import Decoder, encode

_LAST_WORD_SECONDS = 0.5
"""Between a process's end and its connection's: the time left for what was said last."""


class Child:
    """A running module that was given one end of a socket; `start()` makes one.

    The module's command line holds the number of its descriptor. Its process sees the modules that
    this one sees, belongs to no terminal, and is expected to end when the socket closes.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, transport: asyncio.Transport, link: _Link
    ) -> None:
        self._process = process
        self._transport = transport
        self._link = link

    @classmethod
    async def start(cls, module: str, receive: Callable[[object], None]) -> Child:
        """Run `python -m module`; `receive` is called with every message that it sends."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", module, str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            )
        loop = asyncio.get_running_loop()
        transport, link = await loop.create_unix_connection(lambda: _Link(receive), sock=ours)
        return cls(process, transport, link)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_connected(self) -> bool:
        """Whether what is sent may still arrive."""
        return not self._transport.is_closing()

    def send(self, message: object) -> None:
        """Never blocks: what the socket does not take now is sent when it does."""
        self._transport.write(encode(message))

    def kill(self) -> None:
        """End the process at once; does nothing to one that has ended."""
        if self._process.returncode is None:
            self._process.kill()

    async def disconnected(self) -> None:
        """Wait until nothing more will be received."""
        await self._link.closed.wait()

    async def ended(self) -> str:
        """Wait until the process or its connection has ended, see that both have; then say how.

        Everything that it sent has been received by then.
        """
        ends = [
            asyncio.create_task(self._process.wait()),
            asyncio.create_task(self._link.closed.wait()),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(ends, timeout=_LAST_WORD_SECONDS)
        finally:
            for end in ends:
                end.cancel()
            self._transport.close()
            self.kill()
        status = await self._process.wait()
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"


class _Link(asyncio.Protocol):
    """Bytes of the socket to messages."""

    def __init__(self, receive: Callable[[object], None]) -> None:
        self.closed = asyncio.Event()
        self._receive = receive
        self._decoder = Decoder()

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
