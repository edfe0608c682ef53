"""Messages over a stream socket between two processes of one server. Knows no message's meaning.

A message is its length in bytes, as eight bytes little-endian, and its pickle. Both ends are our
own processes; nothing that a client sends is ever unpickled.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_HEADER = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 18


def encode(message: object) -> bytes:
    """A message as it goes over the socket."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


class Decoder:
    """Bytes in, however they are cut; whole messages out, in order."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that `data` completes."""
        self._buffer += data
        messages: list[Any] = []
        start = 0
        while len(self._buffer) >= start + _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer, start)
            begin, end = start + _HEADER.size, start + _HEADER.size + length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                messages.append(pickle.loads(view[begin:end]))
            start = end
        if start:
            del self._buffer[:start]
        return messages


class Channel:
    """The blocking end of a socket. EOFError or OSError once the other end has gone."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(True)
        self._decoder = Decoder()

    def send(self, message: object) -> None:
        """Waits while the other end reads slowly."""
        self._socket.sendall(encode(message))

    def receive(self, *, wait: bool) -> list[Any]:
        """What has come in. With `wait` at least one message, however long that takes."""
        messages: list[Any] = []
        while True:
            block = wait and not messages
            try:
                data = self._socket.recv(_CHUNK_BYTES, 0 if block else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            if not data:
                raise EOFError("the other process has closed the connection")
            messages += self._decoder.feed(data)
