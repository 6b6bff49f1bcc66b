"""One model server: any OpenAI-compatible one. Foreign failures are mapped here, once."""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit, urlunsplit

import orjson

from workers.gateway.server.connection import Answer, ConnectFailedError, Connections, DroppedError, SilentError
from workers.gateway.server.dialects import Native
from workers.gateway.server.errors import UpstreamError

CONNECT_TIMEOUT = 10.0
READY_TIMEOUT = 5.0
#: Below the 5 s after which uvicorn, and so vLLM, closes an idle connection: equal times would race, and lose calls.
KEEPALIVE_EXPIRY = 3.0
#: Failures in a row after which a server is left alone until it answers a health check.
EJECT_AFTER = 3

#: What an agent is answered for an upstream's status; any other failure is 502.
_ANSWERS = {400: 400, 408: 504, 413: 413, 422: 400, 429: 429, 504: 504}
_KINDS = {400: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error", 504: "upstream_timeout"}
#: Failures that speak against the server rather than against the call.
_SICK = frozenset({"upstream_unreachable", "upstream_timeout", "upstream_disconnected", "upstream_error"})


def base_url(upstream: str) -> str:
    """Return the upstream's base with its ``/v1``, which may be left out when the URL has no path.

    A user and password in the URL are not in it, so that no log can show them.

    Raises:
        ValueError: it is no http(s) URL.
    """
    parts = urlsplit(upstream.strip())
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(
            f"{upstream!r} is not an http(s) URL; give the model server's base, such as http://host:8000/v1"
        )
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/") or "/v1", "", ""))


class ModelServer:
    """A model server, or one data-parallel rank of it (``rank``, sent as ``X-data-parallel-rank``).

    ``timeout`` is the number of seconds without a byte after which a call is given up. ``in_flight``, ``failures`` (in
    a row), ``ejected``, ``calls`` and ``failed`` are for whoever chooses among servers; ``native`` are the dialects,
    by name, that it speaks besides chat completions.
    """

    def __init__(
        self,
        upstream: str,
        api_key: str | None,
        timeout: float,
        *,
        rank: int | None = None,
        tls: ssl.SSLContext | None,
        native: Mapping[str, Native],
    ) -> None:
        self.native = native
        self.base_url = base_url(upstream)
        self.name = self.base_url if rank is None else f"{self.base_url} rank {rank}"
        self.in_flight = 0
        self.failures = 0
        self.ejected = False
        self.checked = 0.0
        self.calls = 0
        self.failed = 0
        self._timeout = timeout
        parts = urlsplit(self.base_url)
        secure = parts.scheme == "https"
        self._path = parts.path
        self._connections = Connections(
            parts.hostname or "",
            parts.port or (443 if secure else 80),
            tls if secure else None,
            timeout=timeout,
            connect=min(timeout, CONNECT_TIMEOUT),
            keepalive=KEEPALIVE_EXPIRY,
        )
        authorization = f"Bearer {api_key}" if api_key else _basic(upstream)
        lines = [f"host: {parts.netloc}", "accept: */*", "accept-encoding: identity", "content-type: application/json"]
        lines += [f"authorization: {authorization}"] if authorization else []
        lines += [f"x-data-parallel-rank: {rank}"] if rank is not None else []
        lines += [f"{name}: {value}" for each in native.values() for name, value in each.headers(api_key).items()]
        self._head = "".join(f"{line}\r\n" for line in lines).encode("latin-1")

    async def post(self, path: str, content: bytes) -> Answer:
        """Send a call and wait for its answer's head: of an answer that is no event stream, for all of it.

        ``path`` is below ``/v1``, or below the server's root when it begins with ``//`` (vLLM's ``//tokenize``).
        Every answer must be given back with `release`. Raises `UpstreamError`; ``unsent`` when nothing was sent, so
        that the call may be made elsewhere.
        """
        target = self._path.removesuffix("/v1") + path[1:] if path.startswith("//") else self._path + path
        request = self._request(b"POST", target, content)
        try:
            answer = await self._send(request)
        except (ConnectFailedError, DroppedError, SilentError) as error:
            raise self._mapped(error) from None
        if answer.status != 200:
            self._connections.release(answer)
            raise _refused(answer)
        return answer

    async def check(self) -> None:
        """Raise `UpstreamError` unless the server answers (with whatever it thinks of the question)."""
        request = self._request(b"GET", f"{self._path}/models", b"")
        self.checked = time.monotonic()
        try:
            async with asyncio.timeout(READY_TIMEOUT):
                answer = await self._send(request)
        except TimeoutError:
            message = f"The model's server at {self.base_url} did not answer for {READY_TIMEOUT:g} s."
            raise UpstreamError(504, message, "upstream_timeout") from None
        except (ConnectFailedError, DroppedError, SilentError) as error:
            raise self._mapped(error) from None
        self._connections.release(answer)
        if answer.status >= 500:
            raise _refused(answer)

    async def next(self, answer: Answer) -> bytes:
        """Return the next part of a stream, b"" at its end; raises `UpstreamError`."""
        try:
            return await answer.next()
        except (DroppedError, SilentError) as error:
            raise self._mapped(error) from None

    def release(self, answer: Answer) -> None:
        """Give an answer back; one that has not ended ends its call at the server."""
        self._connections.release(answer)

    def note(self, error: UpstreamError | None) -> None:
        """Count a call's outcome; a server that fails call after call is ejected."""
        self.calls += 1
        if error is None or error.kind not in _SICK:
            self.failures, self.ejected = 0, False
            return
        self.failed += 1
        self.failures += 1
        self.ejected = self.failures >= EJECT_AFTER

    def close(self) -> None:
        """Close idle connections."""
        self._connections.close()

    async def _send(self, request: bytes) -> Answer:
        try:
            return await self._answered(await self._connections.send(request))
        except DroppedError as error:
            if not error.unanswered:
                raise
            # Dropped before any answer: most likely a kept connection that the server closed as the call went out.
            return await self._answered(await self._connections.send(request, fresh=True))

    async def _answered(self, answer: Answer) -> Answer:
        try:
            await answer.head()
        except BaseException:
            self._connections.release(answer)
            raise
        return answer

    def _request(self, method: bytes, path: str, content: bytes) -> bytes:
        length = b"content-length: %d\r\n" % len(content) if content else b""
        return b"%s %s HTTP/1.1\r\n%s%s\r\n%s" % (method, path.encode(), self._head, length, content)

    def _mapped(self, error: Exception) -> UpstreamError:
        where = self.base_url
        if isinstance(error, ConnectFailedError):
            message = f"The model's server at {where} cannot be reached: {error}."
            return UpstreamError(502, message, "upstream_unreachable", unsent=True)
        if isinstance(error, DroppedError):
            message = f"The connection to the model's server at {where} broke: {error}."
            return UpstreamError(502, message, "upstream_disconnected")
        if str(error) == "connect":
            message = f"The model's server at {where} did not take a connection in time."
            return UpstreamError(504, message, "upstream_timeout", unsent=True)
        message = f"The model's server at {where} did not answer for {self._timeout:g} s."
        return UpstreamError(504, message, "upstream_timeout")


def _basic(upstream: str) -> str | None:
    parts = urlsplit(upstream.strip())
    if not parts.username:
        return None
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _refused(answer: Answer) -> UpstreamError:
    """Map an answer other than 200; 400 and 429 keep the upstream's own message, as agents act on it."""
    status, body = answer.status, answer.body()
    code, said = _error_in(body)
    retry_after = answer.headers.get("retry-after")
    answered = _ANSWERS.get(status, 502)
    if answered in {400, 413, 429}:
        return UpstreamError(answered, said, _KINDS[answered], code=code, retry_after=retry_after)
    if status in {401, 403}:
        message = f"The model's server refused the gateway's key (ROLLOUTS_GATEWAY_UPSTREAM_API_KEY): {said}"
        return UpstreamError(502, message, "upstream_auth_error", code=code)
    kind = _KINDS.get(answered, "upstream_error")
    return UpstreamError(
        answered, f"The model's server answered {status}: {said}", kind, code=code, retry_after=retry_after
    )


def _error_in(content: bytes) -> tuple[object, str]:
    """Return code and message of an upstream's error, in OpenAI's, FastAPI's or no shape."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        said = error.get("message") or error.get("detail")
        if said is not None:
            return error.get("code"), said if isinstance(said, str) else orjson.dumps(said).decode()
    if isinstance(error, str):
        return None, error
    return None, content[:1000].decode(errors="replace") or "no reason given"
