"""Every way a rollout can end, on a real fleet: real processes, a real gateway, a real Redis-protocol server.

The whole module runs on each of `conftest.SYSTEMS`.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from support import wait_until

from producer import Producer, RolloutRequest, RolloutResult, broker
from producer.contract import ErrorKind, Phase, StopCondition
from producer.settings import ProducerSettings
from workers.demo.environment import demo_requests
from workers.local import LocalStack

#: A message as a producer of another kind might send it; tests spoil it.
WAKE_UP = """{"body": "W1tdLCB7fSwge31d", "content-encoding": "utf-8", "content-type": "application/json",
 "headers": {"lang": "py", "task": "rollouts.run", "id": "odd"},
 "properties": {"correlation_id": "odd", "delivery_info": {"exchange": "", "routing_key": "rollouts"}, "priority": 3,
 "body_encoding": "base64", "delivery_tag": "odd"}}"""


def request(**fields: Any) -> RolloutRequest:
    return RolloutRequest.parse({"model": "stand-in", "prompt": "hi", "max_attempts": 1, **fields})


def one(run: Any, **fields: Any) -> RolloutResult:
    (result,) = run(request(**fields))
    return result


@pytest.fixture
def nobody() -> Iterator[str]:
    """A URL at which nobody listens, nor can anybody begin to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def error_of(result: RolloutResult) -> tuple[ErrorKind, str]:
    assert result.stop_condition is StopCondition.HAS_ERROR
    assert result.error is not None
    return result.error.kind, result.error.message


def test_the_demos_tasks_complete_with_tokens_that_extend_each_other(run: Any) -> None:
    results = run(*demo_requests(samples=1))

    assert [r.stop_condition for r in results] == [StopCondition.COMPLETED] * 16
    for result in results:
        assert result.reward in {0.0, 1.0}
        assert len(result.trajectory) >= 3
        assert result.metrics["model_calls"] == len(result.trajectory)
        for step, following in zip(result.trajectory, result.trajectory[1:], strict=False):
            seen = step["tokens"]["prompt_ids"] + step["tokens"]["completion_ids"]
            assert following["tokens"]["prompt_ids"][: len(seen)] == seen
        for step in result.trajectory:
            assert len(step["tokens"]["completion_ids"]) == len(step["tokens"]["completion_logprobs"]) > 0
        assert set(result.durations) == {phase.value for phase in Phase}


def test_an_agent_that_exits_3(run: Any) -> None:
    result = one(run, run_command="echo out; echo oops >&2; exit 3")
    assert error_of(result) == (ErrorKind.AGENT, "the agent exited with 3")
    assert result.error is not None
    assert result.error.detail == "oops"
    assert (result.agent_exit_code, result.agent_stdout, result.agent_stderr) == (3, "out\n", "oops\n")


def test_an_agent_that_exits_3_runs_again_where_that_is_asked_for(run: Any, agents: Any) -> None:
    mark = agents.directory / "failed"
    result = one(run, run_command=f"[ -e {mark} ] || {{ touch {mark}; exit 3; }}", retry_agent=True, max_attempts=2)
    assert (result.stop_condition, result.attempt) == (StopCondition.COMPLETED, 2)
    (failed,) = result.failed_attempts
    assert (failed.error.kind, failed.error.message, failed.counted) == (
        ErrorKind.AGENT,
        "the agent exited with 3",
        True,
    )


def test_an_agent_that_never_ends(run: Any) -> None:
    result = one(run, run_command="echo thinking; sleep 600", deadlines={"agent": 3})
    assert result.stop_condition is StopCondition.AGENT_TIMEOUT
    assert (result.agent_timed_out, result.agent_exit_code, result.agent_stdout) == (True, None, "thinking\n")


def test_an_agent_that_makes_no_model_call_is_flagged(run: Any) -> None:
    result = one(run, run_command="true")
    assert result.stop_condition is StopCondition.COMPLETED
    assert result.metrics["model_calls"] == 0
    assert "it probably ignores OPENAI_BASE_URL" in result.warnings[0]
    assert result.prompt == [{"role": "user", "content": "hi"}]


def test_a_stdout_of_5_mb_keeps_head_and_tail(run: Any) -> None:
    result = one(run, run_command="echo HEAD; yes 0123456789 | head -c 5000000; echo TAIL")
    assert result.stop_condition is StopCondition.COMPLETED
    assert result.agent_stdout.startswith("HEAD\n")
    assert result.agent_stdout.endswith("TAIL\n")
    assert "cut" in result.agent_stdout
    assert len(result.agent_stdout) < 100_000


def test_an_unknown_environment_is_an_invalid_request_that_names_those_there_are(run: Any) -> None:
    kind, message = error_of(one(run, environment="os:system"))
    assert kind is ErrorKind.INVALID_REQUEST
    assert "'os:system' is not known to this worker, which has command, demo, harbor" in message


def test_a_missing_run_command_is_an_invalid_request(run: Any) -> None:
    kind, message = error_of(one(run))
    assert (kind, message.split(":")[0]) == (ErrorKind.INVALID_REQUEST, "run_command")


def test_an_unreachable_gateway_names_it(run: Any, nobody: str) -> None:
    url = nobody
    kind, message = error_of(one(run, gateway_url=url, run_command="true"))
    assert kind is ErrorKind.GATEWAY
    assert url in message


def test_another_gateway_is_not_sent_our_control_key(run: Any, stack: LocalStack) -> None:
    import http.server
    import threading

    seen: list[dict[str, str]] = []

    class Thief(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(dict(self.headers))
            self.send_response(403)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Thief) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            one(run, gateway_url=f"http://127.0.0.1:{server.server_port}", run_command="true")
        finally:
            server.shutdown()
            thread.join()
    assert seen
    assert stack.control_key not in json.dumps(seen)


def test_a_failing_rollout_is_tried_again_and_the_last_failure_is_its_result(run: Any, nobody: str) -> None:
    result = one(run, gateway_url=nobody, run_command="true", max_attempts=2)
    assert error_of(result)[0] is ErrorKind.GATEWAY
    assert result.attempt == 2


def test_secrets_reach_the_agent_by_name_and_nothing_else_does(run: Any, stack: LocalStack) -> None:
    result = one(run, run_command="echo [$TEST_SECRET]; env", secret_env=["TEST_SECRET"])

    assert "[[redacted TEST_SECRET]]" in result.agent_stdout
    assert "s3cret!" not in result.to_json().decode()
    assert stack.control_key not in result.agent_stdout
    assert "ROLLOUTS_REDIS_URL" not in result.agent_stdout
    client = redis.Redis.from_url(stack.redis_url)
    dump = b"".join(client.dump(key) or b"" for key in client.scan_iter())
    assert b"s3cret!" not in dump
    assert stack.control_key.encode() not in dump


def test_secrets_do_not_reach_errors_histories_or_logs(run: Any, stack: LocalStack) -> None:
    command = 'echo "$TEST_SECRET $OPENAI_API_KEY" >&2; exit 1'
    result = one(run, run_command=command, secret_env=["TEST_SECRET"])

    assert result.error is not None
    assert result.error.detail == "[redacted TEST_SECRET] [redacted OPENAI_API_KEY]"
    assert result.agent_stderr.strip() == "[redacted TEST_SECRET] [redacted OPENAI_API_KEY]"
    assert "s3cret!" not in stack.logs["worker1"].read_text()


def test_entries_of_the_queue_that_are_no_messages_harm_no_worker(run: Any, stack: LocalStack) -> None:
    client = redis.Redis.from_url(stack.redis_url)
    (pid,) = [child.process.pid for child in stack._children if child.name == "worker1"]
    wake_up = json.loads(WAKE_UP)
    odd = [b"hello", b"5", b"[]", b"{}", b"\xff\x00", b"", b'{"headers": {}, "properties": {}}']
    odd += [json.dumps(wake_up | {"properties": None}).encode(), json.dumps(wake_up | {"body": "!!!"}).encode()]
    odd += [json.dumps(wake_up | {"headers": wake_up["headers"] | {"id": {"a": 1}}}).encode()]
    odd += [json.dumps(wake_up | {"headers": wake_up["headers"] | {"timelimit": "x"}}).encode()]
    client.rpush(broker.queue_key(3), *odd)

    assert one(run, run_command="true").stop_condition is StopCondition.COMPLETED
    assert client.llen(broker.queue_key(3)) == 0
    assert [child.process.pid for child in stack._children if child.name == "worker1"] == [pid]


def test_a_secret_that_the_worker_does_not_offer_is_refused(run: Any) -> None:
    kind, message = error_of(one(run, run_command="true", secret_env=["ROLLOUTS_GATEWAY_CONTROL_KEY"]))
    assert kind is ErrorKind.INVALID_REQUEST
    assert "ROLLOUTS_SECRET_ENV" in message


def test_an_agent_cannot_reach_control_endpoints_with_its_own_key(run: Any) -> None:
    python = (
        "import os,urllib.request as u,urllib.error as e\n"
        "r=u.Request(os.environ['OPENAI_BASE_URL']+'/trajectory',"
        "headers={'Authorization':'Bearer '+os.environ['OPENAI_API_KEY']})\n"
        "try: print(u.urlopen(r).status)\n"
        "except e.HTTPError as x: print(x.code)\n"
    )
    result = one(run, run_command=f'python3 -c "{python}"')
    assert result.agent_stdout.strip() == "401"


def test_a_plain_send_task_that_carries_the_whole_request_works(stack: LocalStack) -> None:
    app = Celery(set_as_current=False)
    app.config_from_object(broker.celery_config(stack.redis_url))
    try:
        task = app.send_task(broker.RUN_ROLLOUT, args=[{"model": "stand-in", "run_command": "echo plain"}])
        result = RolloutResult.parse(task.get(timeout=30))
        assert (result.rollout_id, result.agent_stdout) == (task.id, "plain\n")

        again = app.send_task(broker.RUN_ROLLOUT, args=[{"model": "m", "run_command": "echo 2"}], task_id=task.id)
        marker = app.send_task(broker.RUN_ROLLOUT, args=[{"model": "m", "run_command": "echo 3"}])
        marker.get(timeout=30)
        assert RolloutResult.parse(again.get(timeout=30)) == result, "a duplicate ends without touching the result"
    finally:
        app.close()


@pytest.mark.parametrize(
    ("carried", "words"),
    [
        ({"model": "m", "modle": "m"}, "modle: no such field; did you mean 'model'?"),
        ({"model": "m", "schema_version": 99}, "schema_version: 99 is not known here"),
        ({"model": "m", "rollout_id": "../../etc"}, "rollout_id: differs from the message's task id"),
        ([1, 2], "the request is list"),
        ("{not json", "the request is not JSON"),
    ],
)
def test_hostile_requests_end_as_invalid_request_results(stack: LocalStack, carried: Any, words: str) -> None:
    app = Celery(set_as_current=False)
    app.config_from_object(broker.celery_config(stack.redis_url))
    try:
        result = RolloutResult.parse(app.send_task(broker.RUN_ROLLOUT, args=[carried]).get(timeout=30))
    finally:
        app.close()
    kind, message = error_of(result)
    assert kind is ErrorKind.INVALID_REQUEST
    assert words in message


# -- cancelling --------------------------------------------------------------------------------------------------------


def test_a_running_rollout_is_cancelled_at_once_and_cleans_up(
    stack: LocalStack, agents: Any, sandboxes_left: Callable[[], list[object]]
) -> None:
    async def scenario() -> RolloutResult:
        async with Producer(ProducerSettings(redis_url=stack.redis_url)) as producer, asyncio.timeout(30):
            handle = await producer.submit(request(run_command=agents.command()))
            await asyncio.to_thread(wait_until, agents.starts)
            await handle.cancel()
            return await handle.result()

    result = asyncio.run(scenario())
    assert result.stop_condition is StopCondition.CANCELLED
    assert result.error is not None
    assert (result.error.kind, result.error.phase) == (ErrorKind.CANCELLED, Phase.AGENT)
    wait_until(lambda: not sandboxes_left(), what="no sandbox")


def test_celerys_own_revoke_cancels_too(stack: LocalStack, agents: Any) -> None:
    async def scenario() -> RolloutResult:
        async with Producer(ProducerSettings(redis_url=stack.redis_url)) as producer, asyncio.timeout(30):
            handle = await producer.submit(request(run_command=agents.command()))
            await asyncio.to_thread(wait_until, agents.starts)
            app = Celery(set_as_current=False)
            app.config_from_object(broker.celery_config(stack.redis_url))
            await asyncio.to_thread(app.control.revoke, handle.rollout_id, terminate=True)
            result = await handle.result()
            app.close()
            return result

    assert asyncio.run(scenario()).stop_condition is StopCondition.CANCELLED


def test_inspect_active_shows_running_rollouts_and_no_request(stack: LocalStack, agents: Any) -> None:
    async def scenario() -> dict[str, Any]:
        async with Producer(ProducerSettings(redis_url=stack.redis_url)) as producer, asyncio.timeout(30):
            handle = await producer.submit(request(run_command=agents.command(), env={"MARKER": "do-not-show"}))
            await asyncio.to_thread(wait_until, agents.starts)
            app = Celery(set_as_current=False)
            app.config_from_object(broker.celery_config(stack.redis_url))
            active = await asyncio.to_thread(app.control.inspect(timeout=20, limit=1).active)
            app.close()
            assert handle.rollout_id in json.dumps(active)
            agents.release()
            await handle.result()
            return dict(active)

    active = asyncio.run(scenario())
    assert "do-not-show" not in json.dumps(active)


def test_nothing_is_left_after_all_that(
    run: Any, stack: LocalStack, sandboxes_left: Callable[[], list[object]]
) -> None:
    one(run, run_command="echo $TEST_SECRET", secret_env=["TEST_SECRET"])  # if it is the only one
    client = redis.Redis.from_url(stack.redis_url)
    wait_until(lambda: client.zcard(broker.RUNNING) == client.zcard(broker.PENDING) == 0)
    wait_until(lambda: client.hlen("unacked") == 0, what="no message that is not acknowledged")
    wait_until(lambda: not sandboxes_left(), what="no sandbox")
    log = Path(stack.logs["worker1"]).read_text()
    for stage in (
        "start register_rollout resolve_tunnel_local_addr start_tunnel create_sandbox start_agent "
        "wait_for_agent_completion fetch_trajectory agent_completed finish"
    ).split():
        assert f" {stage}: " in log, stage
    assert "s3cret!" not in log
    assert stack.control_key not in log
