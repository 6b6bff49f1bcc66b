"""Connect RPC's wire form: five bytes of prefix and a protobuf message for each event of a server stream.

The messages are the SDK's own generated ones; the module is loaded from its file, because importing the SDK's package
would cost the server's start half a second.
"""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import Any

import orjson

CONTENT_TYPE = "application/connect+proto"
_END_OF_STREAM = 0x02
_COMPRESSED = 0x01


def _load_messages() -> Any:
    package = importlib.util.find_spec("prime_sandboxes")
    if package is None or not package.submodule_search_locations:
        raise ImportError("prime_sandboxes is not installed")
    path = Path(package.submodule_search_locations[0]) / "_proto" / "command_session" / "command_session_pb2.py"
    spec = importlib.util.spec_from_file_location("emulated_command_session_pb2", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_messages = _load_messages()


def _frame(flags: int, payload: bytes) -> bytes:
    return struct.pack(">BI", flags, len(payload)) + payload


def _event(**event: Any) -> bytes:
    response = _messages.StartResponse(event=_messages.CommandSessionEvent(**event))
    return _frame(0, response.SerializeToString())


def decode_start(body: bytes) -> Any:
    """Return the StartRequest in a request's body; raises ValueError when there is not exactly one message."""
    if len(body) < 5:
        raise ValueError("the body has no envelope")
    flags, length = struct.unpack(">BI", body[:5])
    if flags & _COMPRESSED:
        raise ValueError("compressed messages are not supported")
    if length != len(body) - 5:
        raise ValueError("the envelope's length is not the body's")
    request = _messages.StartRequest()
    try:
        request.ParseFromString(body[5:])
    except Exception as error:  # the protobuf runtime's DecodeError is another class in each implementation
        raise ValueError(f"not a StartRequest: {error}") from error
    return request


def start(pid: int) -> bytes:
    return _event(start=_messages.CommandSessionEvent.StartEvent(pid=pid))


def data(stream: str, content: bytes) -> bytes:
    return _event(data=_messages.CommandSessionEvent.DataEvent(**{stream: content}))


def end(exit_code: int) -> bytes:
    event = _messages.CommandSessionEvent.EndEvent(exit_code=exit_code, exited=True, status=f"exit status {exit_code}")
    return _event(end=event)


#: The frame that ends every stream that went well.
CLOSE = _frame(_END_OF_STREAM, b"{}")


def failure(code: str, message: str) -> bytes:
    """Return the frame that ends a stream with an error."""
    return _frame(_END_OF_STREAM, orjson.dumps({"error": {"code": code, "message": message}}))


def whole(exit_code: int, stdout: bytes = b"", stderr: bytes = b"", pid: int = 1) -> bytes:
    """Return all frames of a command whose outcome is known already."""
    frames = [start(pid)]
    frames += [data(name, content) for name, content in (("stdout", stdout), ("stderr", stderr)) if content]
    return b"".join([*frames, end(exit_code), CLOSE])
