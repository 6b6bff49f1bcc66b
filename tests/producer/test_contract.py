from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from producer import (
    Deadlines,
    ErrorInfo,
    ErrorKind,
    InvalidRequestError,
    Phase,
    RolloutRequest,
    RolloutResult,
    StopCondition,
    broker,
)

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
text = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
names = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | numbers | text
values = st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(text, v, max_size=3), max_leaves=6)
objects = st.dictionaries(text, values, max_size=3)

requests = st.builds(
    RolloutRequest,
    rollout_id=ids,
    batch_id=ids,
    example_id=st.integers(0, 2**40) | text,
    group_id=st.none() | ids,
    sample_index=st.integers(0, 1000),
    policy_version=st.none() | st.integers(0, 10**9),
    labels=st.lists(text, max_size=3).map(tuple),
    priority=st.integers(0, 9),
    environment_args=objects,
    prompt=text | st.lists(objects, max_size=3),
    answer=values,
    info=objects,
    model=text.filter(bool),
    sampling_params=objects,
    env=st.dictionaries(names, text.filter(lambda t: "\x00" not in t), max_size=2),
    deadlines=st.builds(
        Deadlines, agent=st.floats(0.1, 1000), register=st.integers(1, 100), idle=st.none() | st.just(5)
    ),
)
errors = st.builds(
    ErrorInfo, kind=st.sampled_from(ErrorKind), message=text, phase=st.none() | st.sampled_from(Phase), detail=text
)


@quick
@given(requests)
def test_a_request_survives_the_wire(request_):
    assert RolloutRequest.parse(request_.to_json()) == request_
    assert RolloutRequest.parse(request_.to_json()).to_json() == request_.to_json()


@quick
@given(requests, st.sampled_from(StopCondition), st.none() | errors, objects)
def test_a_result_survives_the_result_backend_s_encoding(request_, stop, error, step):
    result = RolloutResult.for_request(request_, stop, error=error, trajectory=[step], warnings=("w",), attempt=2)
    meta = broker.decode_result(broker.encode_result({"status": "SUCCESS", "result": result}))
    assert RolloutResult.parse(meta["result"]) == result
    assert RolloutResult.parse(result.to_json()) == result


@quick
@given(st.binary(max_size=60) | text)
def test_any_text_is_a_request_or_a_named_error(data):
    message = None
    try:
        parsed = RolloutRequest.parse(data)
    except InvalidRequestError as error:
        message = str(error)
    else:
        assert isinstance(parsed, RolloutRequest)
    assert message != ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_turns": "x"}, "max_turns: Input should be a valid integer"),
        ({"max_turnss": 3}, "max_turnss: no such field; did you mean 'max_turns'?"),
        ({"deadlines": {"agnet": 3}}, "deadlines.agnet: no such field; did you mean 'agent'?"),
        ({"deadlines": {"regster": 3}}, "deadlines.regster: no such field; did you mean 'register'?"),
        ({"resources": {"cpu": 3}}, "resources.cpu: no such field; there are cpu_cores, memory_gb, "),
        ({"model": None}, "model: Input should be a valid string (got null"),
        ({"rollout_id": "a b"}, "rollout_id: String should match pattern"),
        ({"priority": 10}, "priority: Input should be less than or equal to 9 (got int 10)"),
        ({"gateway_url": "ftp://x"}, "gateway_url: 'ftp://x' is not an http(s) URL"),
        ({"deadlines": {"agent": -1}}, "deadlines.agent: Input should be greater than 0"),
        ({"deadlines": {"idle": 0}}, "deadlines.idle: Input should be greater than 0"),
        ({"deadlines": {"rollout": 1e9}}, "deadlines.rollout: Input should be less than or equal to 604800"),
        ({"env": {"NOT OK": "x"}}, "env: 'NOT OK' is not an environment variable's name"),
        ({"env": {"A": "1"}, "secret_env": ["A"]}, "A: given in env and in secret_env"),
        ({"schema_version": 2}, "schema_version: 2 is not known here; this side speaks version 1"),
        ({"resources": {"cpu_cores": 0}}, "resources.cpu_cores: Input should be greater than 0"),
    ],
)
def test_a_wrong_field_is_named(fields, message):
    with pytest.raises(InvalidRequestError) as caught:
        RolloutRequest.parse({"model": "m"} | fields)
    assert message in str(caught.value)


def test_a_missing_model_is_named():
    with pytest.raises(InvalidRequestError, match="model: missing"):
        RolloutRequest.parse({})


def test_a_value_of_env_is_never_shown():
    with pytest.raises(InvalidRequestError) as caught:
        RolloutRequest.parse({"model": "m", "env": {"TOKEN": ["hunter2"]}})
    assert "hunter2" not in str(caught.value)


def test_a_gateway_url_loses_its_v1():
    assert RolloutRequest.parse({"model": "m", "gateway_url": "http://g:1/v1/"}).gateway_url == "http://g:1"


@pytest.mark.parametrize("resources", [{"gpu_count": 1}, {"gpu_type": "H100_80GB"}])
def test_gpus_and_their_type_go_together(resources: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="resources: gpu_count and gpu_type go together: name the type"):
        RolloutRequest.parse({"model": "m", "resources": resources})


def test_a_request_cannot_name_a_gateway_and_use_none() -> None:
    with pytest.raises(InvalidRequestError, match="a rollout uses a gateway or none"):
        RolloutRequest.parse({"model": "m", "gateway_url": "http://g:1", "use_gateway": False})


def test_a_rollouts_own_key_cannot_be_replaced_by_a_secret() -> None:
    with pytest.raises(InvalidRequestError, match="OPENAI_API_KEY: given in secret_env, but it is what each rollout"):
        RolloutRequest.parse({"model": "m", "secret_env": ["OPENAI_API_KEY"]})
