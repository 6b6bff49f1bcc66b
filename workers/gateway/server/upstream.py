"""The transport to the model's server: any OpenAI-compatible one. Foreign failures are mapped here, once."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx
import orjson

from workers.connections import ManyConnections
from workers.gateway.server.errors import UpstreamError

CONNECT_TIMEOUT = 10.0
READY_TIMEOUT = 5.0
#: Below the 5 s after which uvicorn, and so vLLM, closes an idle connection: equal times would race, and lose calls.
KEEPALIVE_EXPIRY = 3.0

#: What an agent is answered for an upstream's status; any other failure is 502.
_ANSWERS = {400: 400, 408: 504, 413: 413, 422: 400, 429: 429, 504: 504}
_KINDS = {400: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error", 504: "upstream_timeout"}


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


def _credentials(upstream: str) -> httpx.BasicAuth | None:
    parts = urlsplit(upstream.strip())
    return httpx.BasicAuth(unquote(parts.username), unquote(parts.password or "")) if parts.username else None


class Upstream:
    """The model's server. Every call raises `UpstreamError`: what the agent is to be answered, and why.

    ``timeout`` is the number of seconds without a byte after which a call is given up.
    """

    def __init__(self, upstream: str, api_key: str | None, timeout: float) -> None:
        self.base_url = base_url(upstream)
        self._timeout = timeout
        headers = {"accept-encoding": "identity", "content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            auth=None if api_key else _credentials(upstream),
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT), pool=None),
            transport=ManyConnections(keepalive_expiry=KEEPALIVE_EXPIRY),
        )

    async def complete(self, path: str, body: dict[str, Any]) -> bytes:
        """Post ``body`` and return the answer's bytes."""
        async with self._answer(path, orjson.dumps(body)) as response:
            with self._mapped():
                return await response.aread()

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[bytes]]:
        """Post ``body`` and hold the answer's event stream, as bytes; leaving early ends the call at the upstream."""
        async with self._answer(path, orjson.dumps(body)) as response:
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                message = f"The model's server answered a streamed call with {kind or 'no type'}, not an event stream."
                raise UpstreamError(502, message, "upstream_malformed")
            yield self._chunks(response)

    async def check(self) -> None:
        """Raise `UpstreamError` unless the upstream answers (with whatever it thinks of the question)."""
        with self._mapped():
            response = await self._client.get(f"{self.base_url}/models", timeout=READY_TIMEOUT)
        if response.status_code >= 500:
            raise _refused(response)

    async def aclose(self) -> None:
        """Close pooled connections."""
        await self._client.aclose()

    async def _chunks(self, response: httpx.Response) -> AsyncIterator[bytes]:
        with self._mapped():
            async for chunk in response.aiter_bytes():
                yield chunk

    @asynccontextmanager
    async def _answer(self, path: str, content: bytes) -> AsyncIterator[httpx.Response]:
        with self._mapped():
            response = await self._send(path, content)
        try:
            if response.status_code != 200:
                with self._mapped():
                    await response.aread()
                raise _refused(response)
            yield response
        finally:
            await response.aclose()

    async def _send(self, path: str, content: bytes) -> httpx.Response:
        def request() -> httpx.Request:
            return self._client.build_request("POST", f"{self.base_url}{path}", content=content)

        try:
            return await self._client.send(request(), stream=True)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            # Dropped before any answer: most likely a kept connection that the server closed as the call went out.
            return await self._client.send(request(), stream=True)

    @contextlib.contextmanager
    def _mapped(self) -> Any:
        """Turn httpx's exceptions into `UpstreamError`."""
        where = self.base_url
        try:
            yield
        except httpx.ConnectTimeout:
            message = f"The model's server at {where} did not take a connection in time."
            raise UpstreamError(504, message, "upstream_timeout") from None
        except httpx.TimeoutException:
            message = f"The model's server at {where} did not answer for {self._timeout:g} s."
            raise UpstreamError(504, message, "upstream_timeout") from None
        except httpx.ConnectError as error:
            message = f"The model's server at {where} cannot be reached: {error}."
            raise UpstreamError(502, message, "upstream_unreachable") from None
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            message = f"The connection to the model's server at {where} broke: {reason}."
            raise UpstreamError(502, message, "upstream_disconnected") from None


def _refused(response: httpx.Response) -> UpstreamError:
    """Map an answer other than 200; 400 and 429 keep the upstream's own message, as agents act on it."""
    status = response.status_code
    code, said = _error_in(response)
    retry_after = response.headers.get("retry-after")
    answer = _ANSWERS.get(status, 502)
    if answer in {400, 413, 429}:
        return UpstreamError(answer, said, _KINDS[answer], code=code, retry_after=retry_after)
    if status in {401, 403}:
        message = f"The model's server refused the gateway's key (ROLLOUTS_GATEWAY_UPSTREAM_API_KEY): {said}"
        return UpstreamError(502, message, "upstream_auth_error", code=code)
    kind = _KINDS.get(answer, "upstream_error")
    return UpstreamError(
        answer, f"The model's server answered {status}: {said}", kind, code=code, retry_after=retry_after
    )


def _error_in(response: httpx.Response) -> tuple[object, str]:
    """Return code and message of an upstream's error, in OpenAI's, FastAPI's or no shape."""
    try:
        body = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        said = error.get("message") or error.get("detail")
        if said is not None:
            return error.get("code"), said if isinstance(said, str) else orjson.dumps(said).decode()
    if isinstance(error, str):
        return None, error
    return None, response.text[:1000] or response.reason_phrase
