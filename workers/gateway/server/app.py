"""The gateway as a bare ASGI application: who may call what, and which part answers. Its parts hang off ``state``."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from workers.garbage import collect_garbage
from workers.gateway.server.admin import Admin, is_inner_host
from workers.gateway.server.calls import CallSettings, ModelCalls
from workers.gateway.server.control import Control
from workers.gateway.server.dialects import Dialect, JsonObject, Side, SideCall
from workers.gateway.server.dialects.table import DIALECTS, natives
from workers.gateway.server.errors import GatewayRefusal, UpstreamError, fault, unauthorized
from workers.gateway.server.exchange import ClientGoneError, Exchange, Receive, Scope, Send
from workers.gateway.server.gate import Gate
from workers.gateway.server.journal import Journal
from workers.gateway.server.jsonio import parse_object
from workers.gateway.server.metrics import Metrics
from workers.gateway.server.openapi import document
from workers.gateway.server.peers import FORWARDED, Peers
from workers.gateway.server.recorder import REGISTRATION_TTL, RecordedRollout, Recorder, key_digest
from workers.gateway.server.relay import Relay
from workers.gateway.server.snapshot import restore
from workers.gateway.server.upkeep import keep_tidy, settle_when_idle, unending
from workers.gateway.server.upstreams import UpstreamLimits, Upstreams

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 1024 * 1024
#: Seconds without a byte of a request's body after which it is given up.
BODY_TIMEOUT = 30.0

#: The contract's ids, with room for the suffix that later attempts add.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,159}")
_ROLLOUTS = "/v1/rollouts/"
_MODELS = frozenset({"models", "v1/models"})


@dataclass
class State:
    """The gateway's parts."""

    recorder: Recorder
    upstreams: Upstreams
    calls: ModelCalls
    gate: Gate
    journal: Journal | None
    instance: str
    control_key: bytes | None
    inner_hosts: frozenset[str]
    max_body_bytes: int
    peers: Peers | None = None
    metrics: Metrics = field(init=False)

    async def read_body(self, exchange: Exchange) -> bytes:
        """Read a request's body within the limits."""
        return await exchange.body(self.max_body_bytes, BODY_TIMEOUT)


def create_app(
    *,
    upstream: str | list[str],
    upstream_api_key: str | None = None,
    control_key: str | None = None,
    upstream_timeout: float = 600.0,
    max_body_bytes: int = MAX_BODY_BYTES,
    ask_tokens: bool = True,
    journal: Path | None = None,
    data_parallel_size: int = 1,
    limits: UpstreamLimits | None = None,
    native: Iterable[str] = (),
    keep_alive: float = 15.0,
    pause_limit: float = 600.0,
    registration_ttl: float = REGISTRATION_TTL,
    inner_hosts: frozenset[str] = frozenset(),
    instance: str | None = None,
    peers: Peers | None = None,
) -> GatewayApp:
    """Build the rollout gateway as an ASGI application.

    ``upstream`` is an OpenAI-compatible server's base URL, or several; each counts ``data_parallel_size`` times, and is
    told the rank as ``X-data-parallel-rank``. ``upstream_timeout`` is the seconds without a byte after which a model
    call is given up; ``ask_tokens`` whether ``logprobs`` and ``return_token_ids`` are asked for, which a server that
    refuses fields it does not know needs off; ``native`` names the dialects that the upstreams speak themselves, or
    that one of them does (``DIALECT@URL``). With ``control_key``, it is wanted on everything but the model calls.
    ``journal`` is a directory of this process alone. ``pause_limit`` bounds how long a paused call is held,
    ``registration_ttl`` how long a rollout is remembered that nobody asks anything of. ``inner_hosts`` are host names
    under which ``/admin`` and ``/metrics`` answer too. ``peers`` are the other processes that serve beside this one.

    Raises:
        ValueError: an upstream is no http(s) URL, or ``native`` names no dialect or upstream.
        JournalError: the journal's directory cannot be used.
    """
    urls = [upstream] if isinstance(upstream, str) else upstream
    spoken = natives(native, urls, DIALECTS)
    upstreams = Upstreams(
        urls, upstream_api_key, upstream_timeout, ranks=data_parallel_size, limits=limits, native=spoken
    )
    opened = Journal(journal) if journal else None
    recorder, gate = Recorder(opened, registration_ttl), Gate(pause_limit)
    state = State(
        recorder=recorder,
        upstreams=upstreams,
        calls=ModelCalls(upstreams, gate, CallSettings(ask_tokens, keep_alive)),
        gate=gate,
        journal=opened,
        instance=instance or secrets.token_hex(4),
        control_key=key_digest(control_key) if control_key else None,
        inner_hosts=inner_hosts,
        max_body_bytes=max_body_bytes,
        peers=peers,
    )
    state.metrics = state.calls.metrics = Metrics(state)
    if opened is not None:
        gate.version = restore(recorder, opened.entries())
        opened.start()
    return GatewayApp(state)


class GatewayApp:
    """The application; ``state`` holds its parts."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._headers = [(b"x-gateway-instance", state.instance.encode("latin-1", "replace"))]
        self._control = Control(state.recorder, state.read_body).routes
        self._calls: dict[str, Dialect] = {path[1:]: dialect for dialect in DIALECTS for path in dialect.paths}
        self._sides: dict[str, tuple[Dialect, Side]] = {
            path[1:]: (dialect, side) for dialect in DIALECTS for path, side in dialect.sides.items()
        }
        admin = Admin(state)
        self._own: dict[str, tuple[str, Callable[[Exchange], Awaitable[None]]]] = {
            "/healthz": ("GET", self._healthz),
            "/readyz": ("GET", self._readyz),
            "/openapi.json": ("GET", self._openapi),
            "/metrics": ("GET", admin.metrics),
            "/admin/pause": ("POST", admin.pause),
            "/admin/resume": ("POST", admin.resume),
            "/admin/status": ("GET", admin.status),
        }
        self._background: list[asyncio.Task[None]] = []

    @property
    def call_paths(self) -> list[str]:
        """The model calls' paths, below a rollout's base."""
        return list(self._calls)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        exchange = Exchange(scope, receive, send, self._headers)
        try:
            await self._route(exchange)
        except GatewayRefusal as error:
            await self._refuse(exchange, error)
        except ClientGoneError:
            pass
        except Exception as error:
            if exchange.started:
                raise
            logger.exception("a request failed by a fault of the gateway's own")
            await self._refuse(exchange, fault(error))

    async def _route(self, exchange: Exchange) -> None:
        path = exchange.path
        if not path.startswith(_ROLLOUTS):
            await self._answer_own(exchange)
            return
        rollout_id, _, rest = path[len(_ROLLOUTS) :].partition("/")
        if not _ID.fullmatch(rollout_id):
            raise GatewayRefusal(404, "Not Found")
        peers = self.state.peers
        if peers and (owner := peers.owner(rollout_id)) and not exchange.header(FORWARDED):
            await peers.pass_on(exchange, owner, await self.state.read_body(exchange))
            return
        dialect = self._calls.get(rest)
        if dialect is not None:
            _only(exchange, "POST")
            await self._model_call(exchange, rollout_id, dialect)
        elif rest in self._control:
            method, handler = self._control[rest]
            _only(exchange, method)
            self._check_control_key(exchange)
            await handler(exchange, rollout_id)
        else:
            await self._agents_other(exchange, rollout_id, rest)

    async def _model_call(self, exchange: Exchange, rollout_id: str, dialect: Dialect) -> None:
        rollout = self._agents_rollout(exchange, rollout_id)
        body = await self.state.read_body(exchange)
        call = self.state.calls.read(rollout, dialect, body)
        if call.call.stream:
            await Relay(call, exchange).run()
        else:
            await call.whole(exchange)

    async def _agents_other(self, exchange: Exchange, rollout_id: str, rest: str) -> None:
        if rest in _MODELS:
            _only(exchange, "GET")
            await _models(exchange, self._agents_rollout(exchange, rollout_id))
        elif rest in self._sides:
            _only(exchange, "POST")
            await self._side_call(exchange, self._agents_rollout(exchange, rollout_id), *self._sides[rest])
        elif rest in {"", "/"}:
            _only(exchange, "GET")
            await exchange.json({})  # agents look whether somebody is there, without a key; they learn no more
        else:
            raise GatewayRefusal(404, "Not Found")

    async def _side_call(self, exchange: Exchange, rollout: RecordedRollout, dialect: Dialect, side: Side) -> None:
        body = parse_object(await self.state.read_body(exchange))

        async def ask(path: str, content: JsonObject) -> JsonObject:
            asked = path, orjson.dumps(content)
            opened = await self.state.upstreams.open(rollout, lambda server: asked)
            try:
                answer: JsonObject = orjson.loads(opened.answer.body())
            except orjson.JSONDecodeError as error:
                raise UpstreamError(
                    502, f"The model's server answered no JSON: {error}", "upstream_malformed"
                ) from None
            finally:
                self.state.upstreams.close(opened)
            return answer

        native = all(dialect.name in server.native for server in self.state.upstreams.servers)
        await exchange.json(await side(SideCall(rollout.registration, body, ask, native)))

    async def _answer_own(self, exchange: Exchange) -> None:
        route = self._own.get(exchange.path)
        if route is None:
            raise GatewayRefusal(404, "Not Found")
        if exchange.path.startswith(("/admin", "/metrics")):
            hosts = [str(value, "latin-1") for name, value in exchange.scope["headers"] if name == b"host"]
            if len(hosts) != 1 or not is_inner_host(hosts[0], self.state.inner_hosts):
                raise GatewayRefusal(404, "Not Found")
            if exchange.path != "/metrics":
                self._check_control_key(exchange)
        _only(exchange, route[0])
        await route[1](exchange)

    async def _healthz(self, exchange: Exchange) -> None:
        """Answer whether the event loop makes progress: ``loop_lag`` is the seconds that its queue took just now."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        await asyncio.sleep(0)
        about = {"status": "ok", "rollouts": len(self.state.recorder), "loop_lag": loop.time() - asked}
        await exchange.json(about | {"instance": self.state.instance})

    async def _readyz(self, exchange: Exchange) -> None:
        """Answer whether model calls can be made, and recorded."""
        if self.state.journal is not None and self.state.journal.failed:
            await exchange.json({"status": "journal failing", "detail": self.state.journal.failed}, 503)
            return
        try:
            await self.state.upstreams.check()
        except UpstreamError as error:
            await exchange.json({"status": "upstream unavailable", "detail": error.message}, 503)
            return
        await exchange.json({"status": "ready"})

    async def _openapi(self, exchange: Exchange) -> None:
        """Answer the OpenAPI document."""
        await exchange.json(document((f"/{path}" for path in self._calls), (f"/{path}" for path in self._sides)))

    async def _refuse(self, exchange: Exchange, error: GatewayRefusal) -> None:
        rest = exchange.path[len(_ROLLOUTS) :].partition("/")[2]
        dialect = self._calls.get(rest) or self._sides.get(rest, (None,))[0]
        is_dialects = dialect is not None and exchange.path.startswith(_ROLLOUTS)
        body = dialect.error(error) if is_dialects and dialect else error.body
        with contextlib.suppress(RuntimeError):  # it refused in the middle of an answer
            await exchange.json(body, error.status_code, error.headers)

    def _agents_rollout(self, exchange: Exchange, rollout_id: str) -> RecordedRollout:
        """Return the rollout of an agent's call, if it carries that rollout's key."""
        rollout = self.state.recorder.get(rollout_id)
        if rollout.key is not None and not rollout.accepts_key(exchange.bearer or exchange.header(b"x-api-key")):
            raise unauthorized(
                "This rollout's key is missing or wrong. Send it as a bearer token; agents find it in OPENAI_API_KEY."
            )
        return rollout

    def _check_control_key(self, exchange: Exchange) -> None:
        wanted = self.state.control_key
        if wanted is not None and not hmac.compare_digest(key_digest(exchange.bearer or ""), wanted):
            raise unauthorized(
                "The control key is missing or wrong. Workers send ROLLOUTS_GATEWAY_CONTROL_KEY as a bearer token."
            )

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                recorder, journal = self.state.recorder, self.state.journal
                work = [partial(settle_when_idle, recorder), partial(keep_tidy, recorder, journal)]
                work += [partial(self.state.upstreams.watch), partial(collect_garbage)]
                self._background = [asyncio.create_task(unending(each)) for each in work]
                await send({"type": "lifespan.startup.complete"})
            else:
                await self._close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self.state.upstreams.aclose()
        if self.state.peers is not None:
            self.state.peers.close()
        if self.state.journal is not None:
            await asyncio.to_thread(self.state.journal.close)


async def _models(exchange: Exchange, rollout: RecordedRollout) -> None:
    """List the one model that the rollout may use."""
    registration = rollout.registration
    model: dict[str, Any] = {"id": registration.model, "object": "model", "created": 0, "owned_by": "rollout-gateway"}
    if registration.max_seq_len is not None:
        model["max_model_len"] = registration.max_seq_len
    await exchange.json({"object": "list", "data": [model]})


def _only(exchange: Exchange, method: str) -> None:
    if exchange.method == method or (method == "GET" and exchange.method == "HEAD"):
        return
    allowed = "GET, HEAD" if method == "GET" else method
    raise GatewayRefusal(405, "Method Not Allowed", headers={"allow": allowed})
