"""Routes, counts and authenticates every request, and lets the injected faults happen."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson

from emulators.prime import forward
from emulators.prime.faults import Fault, Faults
from emulators.prime.gateway import ENDPOINTS as GATEWAY_ENDPOINTS
from emulators.prime.gateway import Gateway
from emulators.prime.platform import SandboxApi
from emulators.prime.refusals import AnswerError, RefusalError
from emulators.prime.tunnels import Tunnels
from emulators.prime.web import Answer, BodySink, Outcome, Request, json_answer

logger = logging.getLogger(__name__)

_API = "/api/v1/"
#: Endpoint by method and path below /api/v1; ``*`` stands for an id.
_ROUTES = {
    ("POST", "sandbox"): "create_sandbox",
    ("GET", "sandbox"): "list_sandboxes",
    ("DELETE", "sandbox"): "bulk_delete_sandboxes",
    ("POST", "sandbox/status:batchGet"): "sandbox_statuses",
    ("POST", "sandbox/background-jobs/status:batchGet"): "job_statuses",
    ("GET", "sandbox/*"): "get_sandbox",
    ("DELETE", "sandbox/*"): "delete_sandbox",
    ("POST", "sandbox/*/auth"): "sandbox_auth",
    ("GET", "sandbox/*/error-context"): "error_context",
    ("POST", "tunnel"): "create_tunnel",
    ("GET", "tunnel"): "list_tunnels",
    ("DELETE", "tunnel"): "bulk_delete_tunnels",
    ("GET", "tunnel/*"): "get_tunnel",
    ("DELETE", "tunnel/*"): "delete_tunnel",
}

Call = Callable[..., Outcome | Awaitable[Outcome]]


class Server:
    """The service behind every connection."""

    def __init__(self, api_key: str, sandboxes: SandboxApi, tunnels: Tunnels, gateway: Gateway) -> None:
        self.faults = Faults()
        self.counts: Counter[str] = Counter()
        self.refused: list[tuple[str, str]] = []
        self._api_key = api_key
        self._tunnels = tunnels
        self._gateway = gateway
        self._tasks: set[asyncio.Task[None]] = set()
        self._sandboxes = sandboxes
        self._plain: dict[str, Callable[..., Answer]] = {
            "create_sandbox": sandboxes.create,
            "list_sandboxes": sandboxes.list,
            "bulk_delete_sandboxes": sandboxes.bulk_delete,
            "get_sandbox": sandboxes.get,
            "delete_sandbox": sandboxes.delete,
            "sandbox_auth": sandboxes.auth,
            "error_context": sandboxes.error_context,
            "create_tunnel": tunnels.create,
            "list_tunnels": tunnels.list,
            "bulk_delete_tunnels": tunnels.bulk_delete,
            "get_tunnel": tunnels.get,
            "delete_tunnel": tunnels.delete,
        }

    # Requests through tunnels, whose bodies are not collected.

    def stream(self, request: Request) -> BodySink | None:
        if not request.path.startswith("/t/"):
            return None
        self.counts["forwarded"] += 1
        tunnel_id = request.path.split("/", 3)[2]
        fault = self.faults.take("forwarded", (tunnel_id,))
        if fault and fault.prevents:
            return Swallow(self, request, fault=fault)
        tunnel = self._tunnels.all.get(tunnel_id)
        answer = forward.refuse(tunnel, request)
        if answer or tunnel is None or tunnel.control is None:
            return Swallow(self, request, answer=answer)
        return forward.Forwarder(request, tunnel.control, tunnel, fault)

    # All others.

    def handle(self, request: Request) -> None:
        endpoint, ids, call = self._route(request)
        self.counts[endpoint] += 1
        fault = self.faults.take(endpoint, ids)
        if fault:
            if fault.code:
                call = partial(call, failing=dict.fromkeys([fault.sandbox_id] if fault.sandbox_id else ids, fault.code))
            self.spawn(self.suffer(fault, request, partial(self._attempt, endpoint, call)))
            return
        outcome = self._attempt(endpoint, call, request)
        if isinstance(outcome, Answer):
            request.connection.answer(outcome)
        elif outcome is not None:
            self.spawn(_finish(request, outcome))

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _attempt(self, endpoint: str, call: Call, request: Request) -> Outcome | Awaitable[Outcome]:
        try:
            return call(request)
        except RefusalError as refusal:
            self.refused.append((endpoint, str(refusal)))
            return refusal.answer()
        except AnswerError as failure:
            return failure.answer()
        except Exception:
            logger.exception("%s failed", endpoint)
            return json_answer({"detail": "the emulator failed; see its log"}, 500)

    async def suffer(self, fault: Fault, request: Request, attempt: Call) -> None:
        """Answer as the fault wants it."""
        connection = request.connection
        if fault.prevents:
            await self.faults.hold_back(fault)
            if fault.drop:
                connection.abort()
            elif fault.status is not None:
                connection.answer(failed(fault))
            return
        connection.hold()
        outcome = attempt(request)
        if outcome is not None and not isinstance(outcome, Answer):
            outcome = await outcome
        if outcome:
            connection.answer(outcome)
        await self.faults.hold_back(fault)
        if fault.drop:
            connection.abort()
        elif not fault.hang:
            connection.release()

    def _route(self, request: Request) -> tuple[str, tuple[str, ...], Call]:
        """Return the endpoint's name, the ids that a fault may be meant for, and what answers it."""
        if request.path.startswith("/gw/"):
            return self._route_gateway(request)
        if not request.path.startswith(_API):
            return "unknown", (), _no_such_route
        parts = request.path[len(_API) :].split("/")
        endpoint = _ROUTES.get((request.method, "/".join(parts)))
        if endpoint in {"sandbox_statuses", "job_statuses"}:
            answer = self._sandboxes.statuses if endpoint == "sandbox_statuses" else self._sandboxes.job_statuses
            return endpoint, _ids_in(request), partial(self._authenticated, partial(_batch, answer))
        if endpoint:
            return endpoint, _ids_in(request), partial(self._authenticated, self._plain[endpoint])
        pattern = "/".join("*" if index == 1 else part for index, part in enumerate(parts))
        endpoint = _ROUTES.get((request.method, pattern))
        if endpoint is None:
            return "unknown", (), _no_such_route
        call = partial(_with_id, self._plain[endpoint], parts[1])
        return endpoint, (parts[1],), partial(self._authenticated, call)

    def _route_gateway(self, request: Request) -> tuple[str, tuple[str, ...], Call]:
        parts = request.path.split("/", 4)
        endpoint = GATEWAY_ENDPOINTS.get((request.method, parts[4])) if len(parts) == 5 else None
        if endpoint is None:
            return "unknown", (), _no_such_route
        sandbox = self._gateway.sandbox_of(parts[3])
        call = partial(self._gateway.handle, endpoint, user_ns=parts[2], job_name=parts[3])
        return endpoint, (sandbox.id,) if sandbox else (), call

    def _authenticated(self, call: Call, request: Request, **more: Any) -> Outcome | Awaitable[Outcome]:
        if request.bearer != self._api_key:
            raise RefusalError(401, "no API key" if request.bearer is None else "a wrong API key")
        return call(request, **more)


class Swallow:
    """Reads the body of a request that is not passed on, then answers it."""

    def __init__(
        self, server: Server, request: Request, *, answer: Answer | None = None, fault: Fault | None = None
    ) -> None:
        self._server = server
        self._request = request
        self._answer = answer
        self._fault = fault

    def feed(self, data: bytes) -> None:
        """Throw it away."""

    def finish(self) -> None:
        if self._fault:
            self._server.spawn(self._server.suffer(self._fault, self._request, lambda _: self._answer))
        elif self._answer:
            self._request.connection.answer(self._answer)

    def client_gone(self) -> None:
        """Nothing is under way."""

    def client_writable(self, writable: bool) -> None:
        """Nothing is written that could be too much."""


def failed(fault: Fault) -> Answer:
    assert fault.status is not None
    detail = fault.detail if fault.detail is not None else f"injected fault {fault.status}"
    headers = {"retry-after": f"{fault.retry_after:g}"} if fault.retry_after is not None else {}
    return json_answer(detail if isinstance(detail, dict) else {"detail": detail}, fault.status, **headers)


async def _finish(request: Request, outcome: Awaitable[Outcome]) -> None:
    answer = await outcome
    if answer:
        request.connection.answer(answer)


def _batch(answer: Callable[..., Answer], request: Request, failing: dict[str, str] | None = None) -> Answer:
    return answer(request, failing or {})


def _with_id(answer: Callable[..., Answer], item: str, request: Request) -> Answer:
    return answer(request, item)


def _no_such_route(request: Request) -> Outcome:
    raise RefusalError(404, f"no such route: {request.method} {request.path}", {"detail": "Not Found"})


def _ids_in(request: Request) -> tuple[str, ...]:
    """Return the sandbox and tunnel ids that a body names."""
    try:
        body = orjson.loads(request.body)
        named = [*(body.get("sandbox_ids") or ()), *(body.get("tunnel_ids") or ())]
        named += [job["sandbox_id"] for job in body.get("jobs") or ()]
        return tuple(named)
    except (ValueError, AttributeError, TypeError, KeyError):
        return ()
