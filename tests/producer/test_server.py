"""What Redis answers when it cannot do something, and what is made of it, from a real one."""

from __future__ import annotations

import shutil
import threading
from typing import Any

import pytest
import redis
from support import RedisServer, wait_until

from producer.server import is_about_the_data, is_refusal, passes

WRITE = "redis.call('SET', KEYS[1], 'x')"


def refused(client: Any, *, script: bool) -> Exception:
    with pytest.raises(redis.RedisError) as raised:
        client.eval(WRITE, 1, "key") if script else client.set("key", "x")
    return raised.value


def judged(error: Exception) -> tuple[bool, bool, bool]:
    return passes(error), is_about_the_data(error), is_refusal(error)


@pytest.mark.parametrize("script", [False, True], ids=["a command", "a script"])
@pytest.mark.parametrize(
    "setting",
    ["CONFIG SET maxmemory 1", "CONFIG SET min-replicas-to-write 1", "REPLICAOF 127.0.0.1 1"],
    ids=["full", "too few replicas", "fails over"],
)
def test_a_server_that_takes_no_writes_passes(own_redis: RedisServer, setting: str, script: bool) -> None:
    client: Any = own_redis.client
    client.execute_command(*setting.split())
    assert judged(refused(client, script=script)) == (True, False, False)


@pytest.mark.parametrize("script", [False, True], ids=["a command", "a script"])
def test_a_server_that_cannot_save_passes(own_redis: RedisServer, script: bool) -> None:
    client: Any = own_redis.client
    client.config_set("appendonly", "no")
    shutil.rmtree(own_redis.directory)
    client.config_set("save", "3600 1000000")
    client.bgsave()
    wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
    error = refused(client, script=script)
    own_redis.directory.mkdir()
    assert "MISCONF" in str(error)
    assert judged(error) == (True, False, False)


def test_who_waits_when_a_server_fails_over_is_sent_away_and_it_passes(own_redis: RedisServer) -> None:
    errors: list[Exception] = []

    def wait() -> None:
        with redis.Redis.from_url(own_redis.url) as client:
            try:
                client.blpop(["nothing"], timeout=20)
            except redis.RedisError as error:
                errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    client: Any = own_redis.client
    wait_until(lambda: client.info("clients")["blocked_clients"] == 1)
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    waiting.join(20)
    assert "UNBLOCKED" in str(errors[0])
    assert judged(errors[0]) == (True, False, False)


def test_a_server_that_is_away_passes_and_one_that_refuses_the_user_or_the_data_does_not(
    own_redis: RedisServer,
) -> None:
    client: Any = own_redis.client
    client.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+get", "+eval")
    with redis.Redis.from_url(own_redis.url, username="reader", password="pw") as reader:
        for script in (False, True):
            assert judged(refused(reader, script=script)) == (False, False, True)
    client.set("text", "x")
    with pytest.raises(redis.ResponseError) as wrong:
        client.hget("text", "field")
    with pytest.raises(redis.ResponseError) as odd:
        client.eval("return tonumber(redis.call('GET', KEYS[1])) + 1", 1, "text")
    for raised in (wrong, odd):
        assert judged(raised.value) == (False, True, False)
    own_redis.stop()
    assert judged(refused(client, script=False)) == (True, False, False)
