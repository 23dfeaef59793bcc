"""The trainer's end of the pipe to a worker, which never blocks."""

from __future__ import annotations

import os
import socket
import struct
from multiprocessing.connection import Connection

_NUM_BYTES = 2**18  # of one read
_MAX_SHORT = 2**31 - 1


class Channel:
    """Sends and receives messages in the format of ``multiprocessing.connection.Connection``, without waiting.

    A worker may stop reading, or in the middle of a message; its neighbours must not wait for it.
    """

    def __init__(self, pipe: Connection, max_size: int) -> None:
        """
        Args:
            pipe: This end of the pipe; it is replaced by the channel.
            max_size: Size in bytes of the largest message that may arrive.
        """
        self._socket = socket.socket(fileno=os.dup(pipe.fileno()))
        self._socket.setblocking(False)
        pipe.close()
        self._max_size = max_size
        self._outgoing = bytearray()
        self._incoming = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: bytes) -> bool:
        """Send a message as far as possible. Return whether all is sent; otherwise call ``flush``."""
        is_short = len(message) <= _MAX_SHORT
        self._outgoing += struct.pack("!i", len(message)) if is_short else struct.pack("!iQ", -1, len(message))
        self._outgoing += message
        return self.flush()

    def flush(self) -> bool:
        """Send more. Return whether all is sent."""
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing[:_NUM_BYTES])]
        except BlockingIOError:
            return False
        except OSError:  # the worker has ended, which the next read shows
            self._outgoing.clear()
        return True

    def read(self) -> list[bytes]:
        """Return the messages that are complete.

        Raises an ``EOFError`` if the worker has closed its end, and a ``ValueError`` if a message is too large.
        """
        try:
            data = self._socket.recv(_NUM_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self._incoming += data
        messages = []
        while len(self._incoming) >= 4:
            (size,) = struct.unpack("!i", self._incoming[:4])
            if not 0 <= size <= self._max_size:
                raise ValueError
            if len(self._incoming) < 4 + size:
                break
            messages.append(bytes(self._incoming[4 : 4 + size]))
            del self._incoming[: 4 + size]
        return messages
