"""The worker's client of the rollout gateway. Foreign exceptions and statuses become `GatewayError` here, once."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, NoReturn

import aiohttp
import orjson
from pydantic import ValidationError
from yarl import URL

from producer.contract import Phase
from workers.aio import Turnstile, queued, uninterrupted
from workers.connections import session
from workers.errors import GatewayError
from workers.gateway.protocol import (
    ROLLOUT_KEY_HEADER,
    WORKER_HEADER,
    Progress,
    Registration,
    Trajectory,
    rollout_path,
)
from workers.instruments import GATEWAY_REQUESTS, NO_ANSWER

logger = logging.getLogger(__name__)

#: Idle seconds after which the client closes a connection, well below the server's 75: a connection that the server
#: closes just as a request goes out loses that request.
KEEPALIVE_EXPIRY = 15.0
CONNECT_TIMEOUT = 5.0
#: Connections to gateways; more calls than that wait their turn.
MAX_CONNECTIONS = 100
#: Calls that begin in one turn of the event loop.
PER_TURN = 4
RETRIES = 3
#: Bytes of an answer: of a trajectory, and of all others.
LARGEST_TRAJECTORY, LARGEST_ANSWER = 512 * 1024 * 1024, 1024 * 1024
#: Trajectories that are fetched at one time: some have tens of megabytes, and each is parsed on the event loop.
CONCURRENT_TRAJECTORIES = 8
DETAIL_LIMIT = 500
_UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_DROPPED = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionError)
_TRANSIENT_STATUSES = frozenset({502, 503, 504})


class GatewayStatusError(GatewayError):
    """The gateway answered with a status that is no success."""

    def __init__(self, message: str, *, status: int, detail: str, retryable: bool) -> None:
        super().__init__(message, detail=detail, retryable=retryable)
        self.status = status


class GatewayConnectionError(GatewayError):
    """The connection could not be made or was dropped: the call may or may not have reached the gateway."""


class HttpGateway:
    """A `Gateway` over HTTP: one pool of connections for all rollouts of a worker process.

    ``worker`` is told when a rollout is registered. All times are seconds. ``timeout`` bounds one call,
    ``cleanup_timeout`` the leaving of a registration, whoever is being cancelled. ``trajectory_wait`` is how long a
    trajectory waits for a model call that is still in flight (an agent that ran out of time often leaves one)
    before it is answered without that call's turn. ``retry_delay`` comes before the first of three retries and is
    doubled each time.
    """

    def __init__(
        self,
        *,
        control_key: str | None = None,
        worker: str = "",
        timeout: float = 30.0,
        cleanup_timeout: float = 15.0,
        trajectory_wait: float = 5.0,
        retry_delay: float = 0.1,
    ) -> None:
        self._headers = {"authorization": f"Bearer {control_key}"} if control_key else {}
        self._named = {WORKER_HEADER: worker} if worker else {}
        self._timeout = timeout
        self._cleanup_timeout = cleanup_timeout
        self._trajectory_wait = trajectory_wait
        self._retry_delay = retry_delay
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._fetches = asyncio.Semaphore(CONCURRENT_TRAJECTORIES)
        self._turnstile = Turnstile(PER_TURN)
        self._times = aiohttp.ClientTimeout(
            total=None, sock_read=timeout, sock_connect=min(timeout, CONNECT_TIMEOUT), connect=None
        )
        self._session: aiohttp.ClientSession | None = None  # made on the loop that uses it

    @asynccontextmanager
    async def registered(
        self, gateway_url: str, rollout_id: str, registration: Registration, *, api_key: str
    ) -> AsyncIterator[None]:
        """Hold a registration: registers on entry, unregisters on exit.

        The exit is shielded from cancellation and bounded. Its failure is raised, with the phase ``cleanup``, unless
        the block itself raised: then it is only logged.
        """
        registering = asyncio.create_task(self._register(gateway_url, rollout_id, registration, api_key))
        try:
            await asyncio.shield(registering)  # cancelled or not, the call goes on: only its end can be undone
            yield
        except BaseException:
            await self._release(gateway_url, rollout_id, registering, quiet=True)
            raise
        else:
            await self._release(gateway_url, rollout_id, registering, quiet=False)

    async def fetch_trajectory(self, gateway_url: str, rollout_id: str) -> Trajectory:
        """Return what was recorded so far; tens of megabytes for long rollouts."""
        url = f"{_url(gateway_url, rollout_id)}/trajectory?wait={self._trajectory_wait:g}"
        async with queued(self._fetches):
            content = await self._repeat("GET", url)
        try:
            return Trajectory.model_validate(orjson.loads(content))
        except (orjson.JSONDecodeError, ValidationError) as error:
            raise GatewayError(
                f"{url} answered something that is no trajectory; is this the address of a rollout gateway?",
                detail=f"{_head(str(error))}",
                retryable=False,
            ) from None

    async def progress(self, gateway_url: str, rollout_id: str) -> Progress:
        """Return how far the rollout has come, from its trajectory where the gateway has no ``progress``."""
        url = f"{_url(gateway_url, rollout_id)}/progress"
        try:
            return Progress.model_validate(orjson.loads(await self._repeat("GET", url)))
        except GatewayStatusError as error:
            if error.status not in {404, 405}:
                raise
        except (orjson.JSONDecodeError, ValidationError):
            pass  # some gateways answer any path with a page of their own
        return Progress.of(await self.fetch_trajectory(gateway_url, rollout_id))

    async def cancel(self, gateway_url: str, rollout_id: str) -> None:
        """Refuse the rollout's further model calls; a rollout that is forgotten already makes none."""
        await self._repeat("POST", f"{_url(gateway_url, rollout_id)}/cancel", missing_ok=True)

    async def unregister(self, gateway_url: str, rollout_id: str) -> None:
        """Forget the rollout; forgetting an unknown one is fine."""
        await self._repeat("POST", f"{_url(gateway_url, rollout_id)}/unregister", missing_ok=True)

    async def aclose(self) -> None:
        """Close pooled connections."""
        if self._session is not None:
            await self._session.close()

    async def _register(self, gateway_url: str, rollout_id: str, registration: Registration, api_key: str) -> None:
        url = f"{_url(gateway_url, rollout_id)}/register"
        body = orjson.dumps(registration.model_dump(mode="json"))
        headers = {"content-type": "application/json", ROLLOUT_KEY_HEADER: api_key, **self._named}
        try:
            await self._call("POST", url, data=body, headers=headers)
        except GatewayConnectionError as error:
            logger.info("registration of %s was dropped, trying once more: %s", rollout_id, error.detail)
        else:
            return
        # The lost call may have registered the rollout, and a second one would then be refused.
        await self.unregister(gateway_url, rollout_id)
        try:
            await self._call("POST", url, data=body, headers=headers)
        except GatewayStatusError as error:
            if error.status != 409:  # the lost call arrived late, between these two: registered all the same
                raise

    async def _release(
        self, gateway_url: str, rollout_id: str, registering: asyncio.Task[None], *, quiet: bool
    ) -> None:
        try:
            await uninterrupted(self._undo(gateway_url, rollout_id, registering), self._cleanup_timeout)
        except GatewayError as error:
            error.phase = Phase.CLEANUP
            logger.warning("rollout %s could not be unregistered: %s", rollout_id, error)
            if not quiet:
                raise
        except TimeoutError:
            message = f"unregistering {rollout_id} took longer than {self._cleanup_timeout:g} s; it may be left over"
            logger.warning("%s", message)
            if not quiet:
                raise GatewayError(message, phase=Phase.CLEANUP) from None

    async def _undo(self, gateway_url: str, rollout_id: str, registering: asyncio.Task[None]) -> None:
        if not registering.done():
            # Sent while the registration is on its way, unregistering could arrive before it, and it would stay.
            await asyncio.wait({registering}, timeout=self._cleanup_timeout / 2)
            registering.cancel()
            await asyncio.wait({registering})
        error = None if registering.cancelled() else registering.exception()
        if isinstance(error, GatewayStatusError) and error.status < 500:
            return  # refused: what has this id, if anything, is somebody else's
        await self.unregister(gateway_url, rollout_id)  # a registration whose answer was lost exists all the same

    async def _repeat(self, method: str, url: str, *, missing_ok: bool = False, **request: Any) -> bytes:
        """Make an idempotent call, and again when it is dropped or the gateway is briefly away."""
        for delay in [self._retry_delay * 2**n for n in range(RETRIES)]:
            try:
                return await self._call(method, url, missing_ok=missing_ok, **request)
            except GatewayConnectionError:
                pass
            except GatewayStatusError as error:
                if error.status not in _TRANSIENT_STATUSES:
                    raise
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311 - spreads load, guards nothing
        return await self._call(method, url, missing_ok=missing_ok, **request)

    async def _call(
        self,
        method: str,
        url: str,
        *,
        missing_ok: bool = False,
        headers: dict[str, str] | None = None,
        **request: Any,
    ) -> bytes:
        async with queued(self._slots):
            await self._turnstile()
            if self._session is None:
                self._session = session(keepalive_expiry=KEEPALIVE_EXPIRY)
            try:
                call = self._session.request(
                    method,
                    URL(url, encoded=True),
                    headers=self._headers | (headers or {}),
                    timeout=self._times,
                    allow_redirects=False,
                    **request,
                )
                # One bound for all of a call, and for what it answers: the address may have come with a request.
                async with asyncio.timeout(None if method == "GET" else self._timeout), call as response:
                    body = await _bounded_body(response, LARGEST_TRAJECTORY if method == "GET" else LARGEST_ANSWER)
            except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError) as error:
                GATEWAY_REQUESTS.labels(_operation(url), NO_ANSWER).inc()
                self._raise_unanswered(url, error)
        GATEWAY_REQUESTS.labels(_operation(url), response.status).inc()
        if response.ok or (missing_ok and response.status == 404):
            return body
        raise _refused(url, response.status, body)

    def _raise_unanswered(self, url: str, error: Exception) -> NoReturn:
        detail = _head(f"{type(error).__name__}: {error}")
        if isinstance(error, _UNREACHABLE):
            message = (
                f"cannot connect to the rollout gateway at {url.partition('/v1/rollouts/')[0]}; is it running there? "
                "Workers take its address from the request's gateway_url, else from ROLLOUTS_GATEWAY_URL"
            )
            raise GatewayConnectionError(message, detail=detail) from None
        if isinstance(error, TimeoutError):
            message = f"the rollout gateway did not answer {url} within {self._timeout:g} s"
            raise GatewayError(message, detail=detail) from None
        if isinstance(error, _DROPPED):
            message = f"the rollout gateway dropped the connection of {url}"
            raise GatewayConnectionError(message, detail=detail) from None
        raise GatewayError(f"the call of {url} failed: {detail}", detail=detail, retryable=False) from None


async def _bounded_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise ValueError(f"an answer of more than {limit} bytes")
    return b"".join(chunks)


def _refused(url: str, status: int, body: bytes) -> GatewayStatusError:
    """Return the error for an answer that is no success.

    A 409 can be retried, because another attempt registers under another id; so can a 404, because a gateway that was
    restarted has forgotten its rollouts and another attempt registers a new one.
    """
    said = _detail(status, body)
    detail = _head(f"HTTP {status}: {body[:DETAIL_LIMIT].decode(errors='replace')}")
    messages = {
        404: f"the rollout gateway does not know {url} ({said}); it was restarted, or this is no rollout gateway",
        409: f"the rollout gateway has this rollout already ({said}): in use, or left over from a dead worker",
        413: f"the rollout gateway refused {url} as too large ({said})",
        503: f"the rollout gateway is switched off or overloaded: {url} answered 503 ({said})",
    }
    messages |= dict.fromkeys(
        (401, 403),
        f"the rollout gateway refused the control key for {url}; "
        "set ROLLOUTS_GATEWAY_CONTROL_KEY to the key that the gateway was started with",
    )
    message = messages.get(status, f"the rollout gateway answered {status} to {url}: {said}")
    retryable = status >= 500 or status in {404, 408, 409, 425, 429}
    if status == 404 and url.endswith("/register"):
        retryable = False  # there is no such route, so this is no rollout gateway
    return GatewayStatusError(message, status=status, detail=detail, retryable=retryable)


def _detail(status: int, body: bytes) -> str:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:200].decode(errors="replace") or HTTPStatus(status).phrase
    detail = answer.get("detail", answer) if isinstance(answer, dict) else answer
    return detail if isinstance(detail, str) else orjson.dumps(detail).decode()[:200]


def _url(gateway_url: str, rollout_id: str) -> str:
    return gateway_url.rstrip("/").removesuffix("/v1") + rollout_path(rollout_id)


def _operation(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2]


def _head(text: str) -> str:
    return text[:DETAIL_LIMIT]
