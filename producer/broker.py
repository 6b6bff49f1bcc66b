"""What both sides must agree on in Redis: queue and task names, keys, encodings, and Celery's configuration.

Every Redis key, queue name and time-to-live of the project stands here or in `producer.queues`, and nowhere else.

A rollout in Redis is three things. Its *record* (a hash) is the truth. A Celery *message* in the queue's list is only
a wake-up call that carries the rollout's id. Its *result* is in Celery's result backend, and its end is announced by an
entry in its batch's *stream*.

Measured with 10,000 rollouts (``tests/benchmarks/bench_redis_memory.py``, Valkey 9.1), each with a request of 0.13 kB
and a result of 0.65 kB: a rollout takes 1.8 kB while it is queued, 1.3 kB while it runs, 1.9 kB when it has ended and
its result was not consumed, and nothing once that was consumed and `KEEP_CONSUMED` is over. A larger request adds its
size to the first three, a larger result its compressed size to the third.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from importlib.resources import files
from typing import Any, ClassVar
from urllib.parse import urlsplit

import orjson
import zstandard
from celery import Celery
from kombu import Connection, Queue
from kombu.serialization import register
from kombu.utils.json import dumps as kombu_dumps
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from producer import queues
from producer.contract import RolloutRequest, RolloutResult
from producer.queues import PREFIX

# tasks, and the queues that are not for rollouts
MAINTENANCE_QUEUE = "rollouts.maintenance"
HEALTH_QUEUE = "rollouts.health"  #: a fanout: every worker process is sent each of its messages
RUN_ROLLOUT = "rollouts.run"
SWEEP = "rollouts.sweep"
CHECK_TUNNELS = "rollouts.check_tunnels"
SWEEP_ORPHANS = "rollouts.sweep_orphans"

# keys
QUEUE, PRIORITY_STEPS = queues.QUEUE, queues.PRIORITY_STEPS
queue_key, queue_keys, pending_base, step_of = queues.queue_key, queues.queue_keys, queues.pending_base, queues.step_of
PENDING, DELAYED, RUNNING = queues.pending_key(), queues.delayed_key(), queues.running_key()  #: of the default queue
CANCELS = PREFIX + "cancels"  #: stream of rollout ids whose running attempt is to be cancelled
WORKERS = PREFIX + "workers"  #: sorted set of worker names, scored by when their last report expires (ms)
SWEPT = PREFIX + "swept"  #: lock with an expiry that keeps the fleet to one sweep per interval
LEDGER = PREFIX + "ledger"  #: hash of "ID ATTEMPT" to JSON: attempts that are over and may have left something behind
STRAYS = PREFIX + "strays"  #: how many things of no attempt the last look could not delete, by kind
ORPHANS_SWEPT = PREFIX + "orphans-swept"  #: as `SWEPT`, for clearing the ledger
LABELS_SWEPT = PREFIX + "labels-swept"  #: as `SWEPT`, for the look by label
FLEET_ID = PREFIX + "fleet-id"  #: this fleet's identity, in the labels of all that it creates
VERSIONS = PREFIX + "versions"  #: sorted set of unfinished rollouts that can become stale, scored by policy version
POLICY = PREFIX + "policy"  #: hash of version, steps (max_off_policy_steps), on_stale: what the trainer trains now
LIMITS = PREFIX + "limits"  #: hash of a place (``env:NAME``, ``gateway:URL``) to how many rollouts may hold it
PLACES = PREFIX + "places"  #: set of the places that somebody holds or waits for
LANES = PREFIX + "lanes"  #: hash of a queue to how many of its rollouts were claimed, for the share of its later lists
DELTAS = PREFIX + "deltas:"  #: + batch id: stream of what running episodes send to their door before they end
UNCLAIMED = PREFIX + "unclaimed:"  #: + batch id: set of rollout ids whose client was not there to be answered
EVENTS_KEPT = 10_000  #: entries kept in the cancel stream, about
ANSWER_TTL = 60  #: seconds for which the answers to a question are kept

#: After this an entry of the ledger is given up: no platform keeps a sandbox for more than a day.
LEDGER_LIFE = timedelta(hours=25)
#: How long a record, a batch's stream and a result outlive their last change, unless they are consumed.
RESULT_TTL = timedelta(days=7)
#: How long they are kept once the result was consumed, by default: a consumer that broke off goes back to what it had
#: been given, a batch that is submitted again finds its rollouts. Nobody wakes a rollout that has no record.
KEEP_CONSUMED = timedelta(hours=1)


class JobState(StrEnum):
    """Where a rollout's record stands: its lifecycle, not its outcome."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"


def job_key(rollout_id: str) -> str:
    """Key of a rollout's record, a hash.

    The producer writes ``request, state, attempt, spent, max_attempts, batch, priority, enqueued_ms``; workers add
    ``worker, claimed_ms, outcome, history, finished_ms``, and ``carried`` where a message brought its own request; a
    cancel of a running rollout sets ``cancel``, and ``reason`` says why one was cancelled, where that was not its
    producer's wish. ``attempt`` only ever grows and fences writes; ``spent`` counts the attempts that are charged
    against ``max_attempts``.

    Where the request asks for it there are ``policy`` (its version, of one that can become stale), ``places`` (what it
    holds while it runs, of what may be limited), ``gateways`` (those it may use) and ``gateway`` (the one it uses), and
    ``parked`` (its wake-up message, while it waits for a place). One of another queue than the default one has
    ``queue``.
    """
    return f"{PREFIX}job:{rollout_id}"


def stream_key(batch_id: str) -> str:
    """Key of a batch's stream of completions; entries are ``{id, outcome}``."""
    return f"{PREFIX}batch:{batch_id}"


def tombstone_key(batch_id: str) -> str:
    """Key that stands while a batch or group accepts no further rollout: it was cancelled for good."""
    return f"{PREFIX}tombstone:{batch_id}"


def consumer_key(batch_id: str, consumer: str) -> str:
    """Key of what a named consumer of a batch has taken, a hash of ``generation, position, hand, delivered``."""
    return f"{PREFIX}consumer:{batch_id}:{consumer}"


def taken_key(batch_id: str, consumer: str) -> str:
    """Key of the set of rollout ids that a named consumer of a batch that it submits itself has acknowledged."""
    return f"{PREFIX}taken:{batch_id}:{consumer}"


def place_key(place: str) -> str:
    """Key of the set of rollout ids that hold a limited place: those that run, and one that was just woken for it."""
    return f"{PREFIX}place:{place}"


def parked_key(place: str) -> str:
    """Key of the sorted set of rollout ids that wait for a place, scored by when they were submitted (ms)."""
    return f"{PREFIX}parked:{place}"


def group_key(group_id: str) -> str:
    """Key of the gateway that the members of a group share, a string."""
    return f"{PREFIX}group:{group_id}"


def answer_key(token: str) -> str:
    """Key of the list of workers' answers to one question, with an expiry."""
    return f"{PREFIX}answer:{token}"


def worker_key(worker: str) -> str:
    """Key of a worker process's last report, as JSON, with an expiry."""
    return f"{PREFIX}worker:{worker}"


def worker_runs_key(worker: str) -> str:
    """Key of what a worker process runs, with an expiry: JSON of rollout id to attempt, phase and when it began (s)."""
    return f"{PREFIX}worker-runs:{worker}"


def throttle_key(name: str) -> str:
    """Key of the fleet's token bucket for ``name``, a hash with an expiry."""
    return f"{PREFIX}throttle:{name}"


def result_key(rollout_id: str) -> str:
    """Key under which Celery's result backend keeps the result."""
    return f"celery-task-meta-{rollout_id}"


_USES_MOVES = "-- uses moves.lua"


def acl_rule(redis_url: str = "") -> str:
    """Return the least that an ACL user of the fleet needs, for producers, workers, beat and Flower alike.

    To be used as ``ACL SETUSER NAME on >PASSWORD RULE``; without a URL it is for database 0::

        resetkeys ~rollouts* ~celery-task-meta-* ~_kombu.binding* ~*.pidbox* ~bcast.*
        resetchannels &celery-task-meta-* &/0.* &/0.celery.pidbox &/0.rollouts.health/rollouts &/0.celeryev/*
        +@read +@write +@pubsub +@connection +@transaction -@dangerous
        +eval +evalsha +script|load +script|exists +info +time

    The keys are this module's, and kombu's of queues, remote control and fanouts. kombu channels begin with the number
    of the database; what it subscribes to by pattern is compared as text, so it is named beside ``&/0.*``. Tried on
    Valkey 9.1 with workers, beat, producers, remote control and events.
    """
    path = urlsplit(redis_url).path.strip("/")
    database = path if path.isdigit() else "0"
    keys = "~rollouts* ~celery-task-meta-* ~_kombu.binding* ~*.pidbox* ~bcast.*"
    channels = ("*", "celery.pidbox", f"{HEALTH_QUEUE}/{QUEUE}", "celeryev/*")
    shown = " ".join(f"&/{database}.{channel}" for channel in channels)
    commands = "+@read +@write +@pubsub +@connection +@transaction -@dangerous"
    single = "+eval +evalsha +script|load +script|exists +info +time"
    return f"resetkeys {keys} resetchannels &celery-task-meta-* {shown} {commands} {single}"


def script(package: str, name: str) -> str:
    """Return the text of ``lua/NAME.lua`` of ``package``, after what all scripts that end or move records share.

    A script that says ``-- uses moves.lua`` gets that file, and this module's keys as the table ``KEY``.
    """
    text = (files(package) / "lua" / f"{name}.lua").read_text()
    if _USES_MOVES not in text:
        return text
    return _lua_keys() + (files("producer") / "lua" / "moves.lua").read_text() + text


def _lua_keys() -> str:
    names = {
        **{"cancels": CANCELS, "versions": VERSIONS, "policy": POLICY, "limits": LIMITS, "places": PLACES},
        **{"lanes": LANES, "job": job_key(""), "place": place_key(""), "parked": parked_key("")},
        **{"tombstone": tombstone_key(""), "group": group_key(""), "stream": stream_key(""), "mark": WakeUp.MARK},
    }
    keys = ", ".join(f"{name} = {queues.lua_string(key)}" for name, key in names.items())
    return f"local KEY = {{{keys}}}\n{queues.lua_tables()}"


#: The names of what `record_fields` returns.
RECORD_FIELDS = ("policy", "places", "gateways", "shares", "queue")


def record_fields(request: RolloutRequest) -> tuple[str, str, str, str, str]:
    """Return the `RECORD_FIELDS` of a request's record; "" for what it has not."""
    policy = str(request.policy_version) if request.may_become_stale else ""
    places = f"env:{'_'.join(request.environment.split()) or '_'}"
    if request.gateway_url:
        places += f" gateway:{request.gateway_url}"
    shares = request.group_id if request.share_gateway and request.gateway_urls else None
    queue = "" if request.queue == QUEUE else request.queue
    return policy, places, " ".join(request.gateway_urls), shares or "", queue


# -- encodings ---------------------------------------------------------------------------------------------------------

#: Serializer of results: JSON, compressed. A trajectory of many turns repeats its prefix once per turn, so it shrinks
#: by well over ten times; level 3 costs about 2 ms per megabyte.
RESULT_SERIALIZER = "rollout"
_RESULT_CONTENT_TYPE = "application/x-rollout+json+zstd"
_ZSTD_LEVEL = 3
_MAX_RESULT_BYTES = 1 << 30
_kept = threading.local()


def _json_default(value: object) -> Any:
    if isinstance(value, RolloutResult):
        return dict(value)  # not dumped: that would copy the whole trajectory, which takes longer than to write it
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    try:
        # kombu knows how Celery writes everything else (exceptions' arguments, dates, UUIDs, decimals).
        return orjson.loads(kombu_dumps(value))
    except TypeError:
        return to_jsonable_python(value)  # such as a set that an environment's hook put there


def clock_ms(time: Sequence[int]) -> int:
    """Return Redis's answer to TIME, seconds and microseconds, in milliseconds."""
    return int(time[0]) * 1000 + int(time[1]) // 1000


def encode_result(value: object) -> bytes:
    """Encode ``value`` as compressed JSON; models are written as objects."""
    data = orjson.dumps(value, default=_json_default, option=orjson.OPT_NON_STR_KEYS)
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(data)


def decode_result(data: bytes) -> Any:
    """Decode what `encode_result` wrote; raises `zstandard.ZstdError` or `ValueError` on other bytes."""
    if not hasattr(_kept, "decompressor"):
        _kept.decompressor = zstandard.ZstdDecompressor()  # no two threads may use one
    return orjson.loads(_kept.decompressor.decompress(data, max_output_size=_MAX_RESULT_BYTES))


register(RESULT_SERIALIZER, encode_result, decode_result, _RESULT_CONTENT_TYPE, "binary")


# -- Celery ------------------------------------------------------------------------------------------------------------


def verified(redis_url: str) -> str:
    """Return the URL such that kombu and Celery verify the server's certificate, where it is one for TLS.

    That is redis-py's own default. kombu's is not to, and Celery refuses to choose.
    """
    if not redis_url.startswith("rediss://") or "ssl_cert_reqs=" in redis_url:
        return redis_url
    return f"{redis_url}{'&' if '?' in redis_url else '?'}ssl_cert_reqs=required"


def celery_config(redis_url: str) -> dict[str, Any]:
    """Return the Celery configuration that producers, workers and beat share.

    Why each setting is as it is: long tasks on Redis are redelivered, lost or run twice with Celery's defaults. Nothing
    of ours stays unacknowledged for longer than a claim takes, so the broker has nothing to redeliver; a lost
    connection must neither end the worker nor touch what it runs.
    """
    sockets = {
        "socket_timeout": 30,
        "socket_connect_timeout": 10,
        "socket_keepalive": True,
        "health_check_interval": 25,
    }
    return {
        "broker_url": verified(redis_url),
        "result_backend": verified(redis_url),
        "task_serializer": "json",
        "result_serializer": RESULT_SERIALIZER,
        "accept_content": ["json"],
        "result_accept_content": ["json", RESULT_SERIALIZER],
        "result_expires": RESULT_TTL,
        "result_backend_always_retry": True,
        "result_backend_max_sleep_between_retries_ms": 1000,
        "task_default_queue": QUEUE,
        "task_queues": [Queue(QUEUE), Queue(MAINTENANCE_QUEUE)],  # a producer's; a worker's are in its settings
        "task_routes": {SWEEP: {"queue": MAINTENANCE_QUEUE}, SWEEP_ORPHANS: {"queue": MAINTENANCE_QUEUE}},
        "task_acks_late": False,
        "task_track_started": False,
        "worker_prefetch_multiplier": 1,
        "worker_disable_prefetch": True,
        "worker_enable_prefetch_count_reduction": False,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_hijack_root_logger": False,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_channel_error_retry": True,
        "broker_transport_options": sockets
        | {
            "visibility_timeout": 300,
            "priority_steps": list(PRIORITY_STEPS),
            # One that serves several queues takes from each in turn, and by priority within each.
            "queue_order_strategy": "round_robin",
            # With it redis-py reconnects by itself, also within the read that Celery's thread waits in: kombu hears of
            # no loss, subscribes to nothing and asks for no message, and the worker is deaf from then on.
            "retry_on_timeout": False,
        },
        "redis_socket_timeout": sockets["socket_timeout"],
        "redis_socket_connect_timeout": sockets["socket_connect_timeout"],
        "redis_socket_keepalive": True,
        "redis_retry_on_timeout": True,
        "redis_backend_health_check_interval": sockets["health_check_interval"],
        "enable_utc": True,
        "timezone": "UTC",
    }


@dataclass(frozen=True)
class WakeUp:
    """Renders the Celery message that wakes a worker for one rollout.

    Celery's own code writes the message once, for a placeholder id, into kombu's in-memory transport, which uses the
    same form as its Redis one. Rendering then replaces the placeholder: ids are `contract.ID_PATTERN`, so nothing needs
    quoting. The message has no arguments: the request is in the record, so none shows in ``inspect active``.
    """

    _template: str
    _ID = "__rollout_id__"
    _TAG = ":delivery_tag:"  # no id holds these
    #: Stands for the name of the queue where a script fills it in.
    MARK: ClassVar[str] = ":queue:"

    @classmethod
    def for_app(cls, app: Celery, priority: int) -> WakeUp:
        """Have Celery render the template for ``priority`` (0 to 9)."""
        with Connection("memory://") as connection, connection.channel() as channel:
            queue = Queue(f"template-{uuid.uuid4().hex}")
            queue(channel).declare()
            with app.amqp.Producer(channel, auto_declare=False) as producer:
                message = app.amqp.create_task_message(cls._ID, RUN_ROLLOUT, (), {})
                app.amqp.send_task_message(
                    producer, RUN_ROLLOUT, message, queue=queue, routing_key=queue.name, exchange="", priority=priority
                )
            rendered = channel._get(queue.name)
            channel.queue_delete(queue.name)
        rendered["properties"]["delivery_info"] = {"exchange": "", "routing_key": cls.MARK}
        rendered["properties"]["delivery_tag"] = cls._TAG
        return cls(orjson.dumps(rendered).decode())

    def render(self, rollout_id: str, queue: str | None = QUEUE) -> bytes:
        """Return the message for ``rollout_id``, as kombu's Redis transport keeps it in a list of its ``queue``.

        The name in it is where kombu puts a message back. None leaves the `MARK` to a script that knows the queue.
        """
        name = self.MARK if queue is None else queues.celery_name(queue)
        # A delivery tag of its own for each message: kombu files unacknowledged messages under it.
        text = self._template.replace(self._ID, rollout_id).replace(self._TAG, uuid.uuid4().hex)
        return text.replace(self.MARK, name).encode()
