"""The door's ZeroMQ socket, and who can be reached over it.

A client has no name of its own: the server's socket numbers connections, so that after a restart of the door, or a
broken connection, nobody knows which of them is the client that waits. It says nothing either, for it has nothing to
say until it is answered. But numbers are given in order, and a send to one that nobody has is refused: so newcomers
are found by trying the next ones. The first number is random; a connection of the door to itself tells it.
Source: libzmq 4, ``router.cpp``, ``identify_peer``.
"""

from __future__ import annotations

import errno
from typing import Self

import zmq
import zmq.asyncio

#: Bytes of the largest frame that is taken in; whoever sends a larger one is disconnected.
_MAX_FRAME = 64 * 1024 * 1024
#: Numbers that are tried beyond the last one that was seen: connections that came and went have used some.
_WINDOW = 64
_LINGER_MS = 1000
_NUMBER = 4  #: bytes of a connection's number; a zero goes before it


class DoorSocket:
    """A bound ROUTER socket; ``address`` is where, with the port that was taken if none was asked for.

    ``peers`` are those whose connection was seen to live.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, _MAX_FRAME),
        ):
            self._socket.setsockopt(option, value)
        self.peers: set[bytes] = set()
        self._next: int | None = None
        try:
            self._socket.bind(address)
            self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError:
            self.close()
            raise

    async def __aenter__(self) -> Self:
        self._socket.bind("inproc://numbers")
        probe = self._context.socket(zmq.DEALER)
        probe.setsockopt(zmq.LINGER, 0)
        probe.connect("inproc://numbers")
        await probe.send(b"")
        early: list[list[bytes]] = []
        while True:  # clients of a door that was restarted are connected already
            frames = await self._socket.recv_multipart()
            if len(frames) == 2 and frames[1] == b"":
                self._next = _number(frames[0])
                break
            early.append(frames)
        probe.close()
        self._early = early
        if self._next is not None:
            self._next -= _WINDOW // 2  # who connected before the probe did
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; what was not sent a second later is dropped."""
        self._socket.close(_LINGER_MS)
        self._context.term()

    async def receive(self) -> list[bytes]:
        """Wait for the next message; its first frame says from whom."""
        frames: list[bytes] = self._early.pop(0) if self._early else await self._socket.recv_multipart()
        self._saw(frames[0])
        return frames

    async def send(self, peer: bytes, *frames: bytes) -> bool:
        """Send a message, in the order of the calls; returns False when that connection is gone."""
        try:
            await self._socket.send_multipart([peer, *frames], copy=False)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.peers.discard(peer)
            return False
        self._saw(peer)
        return True

    async def look(self, nothing: list[bytes]) -> None:
        """Look who has connected without a word, and who has gone, by sending ``nothing``."""
        for peer in list(self.peers):
            await self.send(peer, *nothing)
        if self._next is None:
            return
        tried = self._next
        while tried < self._next + _WINDOW:
            peer = _routing_id(tried)
            if peer not in self.peers:
                await self.send(peer, *nothing)
            tried += 1

    def _saw(self, peer: bytes) -> None:
        self.peers.add(peer)
        number = _number(peer)
        if number is not None and self._next is not None and 0 <= number - self._next < _WINDOW:
            self._next = max(self._next, number - _WINDOW // 2)


def _number(peer: bytes) -> int | None:
    return int.from_bytes(peer[1:], "big") if len(peer) == 1 + _NUMBER and peer[0] == 0 else None


def _routing_id(number: int) -> bytes:
    return b"\x00" + (number % (1 << 8 * _NUMBER)).to_bytes(_NUMBER, "big")
