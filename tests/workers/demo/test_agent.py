"""The demo's agent, run as a sandbox runs it, against the stand-in and against models that misbehave."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import free_port

from workers.demo.agent import CALCULATOR, evaluate


@pytest.mark.parametrize("stream", ["0", "1"])
def test_solves_a_task_with_one_tool_call_per_operation(run_agent: Any, model_url: str, stream: str) -> None:
    ran = run_agent(model_url, "Formula: (17 + 5) * 3 - 6", DEMO_STREAM=stream, OPENAI_MODEL="stand-in")

    assert ran.code == 0, ran.stderr
    assert ran.answer == "The calculation gives 60.\nANSWER: 60"
    assert ran.stdout.strip() == ran.answer


def test_sends_tools_key_model_and_the_results_of_its_calls(run_agent: Any, scripted: Any) -> None:
    scripted.call("calculator", '{"expression": "12 * 6"}')
    scripted.say({"content": "ANSWER: 72"})

    ran = run_agent(scripted.url)

    assert (ran.code, ran.answer) == (0, "ANSWER: 72")
    first, second = scripted.requests
    assert first["path"] == "/v1/rollouts/r1/chat/completions"
    assert first["key"] == "Bearer k1"
    assert (first["model"], first["tools"], first["stream"]) == ("m", [CALCULATOR], False)
    assert second["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"expression": "12 * 6"}'
    assert second["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "72"}


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("calculator", "{not json", "error: give the expression as a string"),
        ("calculator", '["a list"]', "error: give the expression as a string"),
        ("calculator", '{"expression": 7}', "error: give the expression as a string"),
        ("calculator", '{"expression": "import os"}', "error: cannot read 'import os'"),
        ("shell", "{}", "error: there is no tool 'shell'"),
    ],
)
def test_garbage_in_a_tool_call_is_answered_with_an_error(
    run_agent: Any, scripted: Any, name: str, arguments: str, result: str
) -> None:
    scripted.call(name, arguments)
    scripted.say({"content": "I give up"})

    ran = run_agent(scripted.url)

    assert (ran.code, ran.answer) == (0, "I give up")
    returned = scripted.requests[1]["messages"]
    assert returned[2]["content"] == result
    # Servers that render arguments as JSON refuse a conversation with broken ones.
    assert isinstance(json.loads(returned[1]["tool_calls"][0]["function"]["arguments"]), dict)


def test_an_empty_answer_ends_the_task(run_agent: Any, scripted: Any) -> None:
    scripted.say({"content": None})

    assert run_agent(scripted.url).answer == ""


def test_a_call_that_the_model_wrote_as_text_is_answered_in_kind(run_agent: Any, scripted: Any) -> None:
    scripted.say({"content": "CALL: 12 * 6 + 9"})
    scripted.say({"content": "ANSWER: 81"})

    assert run_agent(scripted.url).answer == "ANSWER: 81"
    assert scripted.requests[1]["messages"][-1] == {"role": "user", "content": "RESULT: 81"}


def test_stops_after_its_turns(run_agent: Any, scripted: Any) -> None:
    for _ in range(3):
        scripted.call("calculator", '{"expression": "1 + 1"}')

    assert run_agent(scripted.url, max_turns=3).code == 0
    assert len(scripted.requests) == 3


def test_keeps_its_last_words_when_the_gateway_takes_no_more_turns(run_agent: Any, scripted: Any) -> None:
    scripted.say({"content": "CALL: 1 + 1"})
    scripted.fail(409, "Rollout completed")

    ran = run_agent(scripted.url)

    assert (ran.code, ran.answer) == (0, "CALL: 1 + 1")
    assert "Rollout completed" in ran.stderr


@pytest.mark.parametrize("status", [0, 429, 502, 503])
def test_tries_again_after_a_failure_that_may_pass(run_agent: Any, scripted: Any, status: int) -> None:
    scripted.fail(status)
    scripted.fail(status)
    scripted.say({"content": "ANSWER: 1"})

    assert run_agent(scripted.url).answer == "ANSWER: 1"
    assert len(scripted.requests) == 3


def test_a_stream_that_breaks_off_is_asked_for_again(run_agent: Any, scripted: Any) -> None:
    hello = '{"choices": [{"index": 0, "delta": {"content": "ANSWER: 5"}}]}'
    scripted.events(hello)
    scripted.events('{"error": {"message": "worker died"}}')
    scripted.events(hello, "[DONE]")

    assert run_agent(scripted.url, DEMO_STREAM="1").answer == "ANSWER: 5"


def test_a_model_that_stays_away_ends_the_agent_with_one_line(run_agent: Any) -> None:
    ran = run_agent(f"http://127.0.0.1:{free_port()}/v1")

    assert (ran.code, ran.answer) == (1, None)
    assert ran.stderr.startswith("agent: cannot reach the model at http://127.0.0.1:")
    assert "in 5 tries: ConnectionRefusedError" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_a_refused_request_is_not_tried_again(run_agent: Any, scripted: Any) -> None:
    scripted.fail(401, "wrong key")

    ran = run_agent(scripted.url)

    assert ran.code == 1
    assert "HTTP 401" in ran.stderr
    assert "wrong key" in ran.stderr
    assert len(scripted.requests) == 1


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"choices": []}'])
def test_an_answer_that_is_no_completion_ends_the_agent(run_agent: Any, scripted: Any, body: bytes) -> None:
    scripted.replies.append((200, "application/json", body))

    ran = run_agent(scripted.url)

    assert ran.code == 1
    assert ran.stderr.startswith("agent: ")


def test_a_missing_variable_is_named(run_agent: Any) -> None:
    ran = run_agent("ftp://elsewhere")

    assert ran.code == 2
    assert "OPENAI_BASE_URL is 'ftp://elsewhere'; expected an http(s) URL" in ran.stderr


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * -3", "-9"),
        ("7 / 2", "3.5"),
        ("144 / 12", "12"),
        ("7 // 2 + 7 % 4", "6"),
        ("0.1 + 0.2", "0.3"),
        ("5 \u00d7 4 =", "20"),
        ("1 / 0", "error: division by zero"),
        ("", "error: a number is missing"),
        ("2 +", "error: a number is missing"),
        ("(2", "error: a parenthesis is not closed"),
        ("2 2", "error: did not expect '2'"),
        ("9 ** 9", "error: a number is missing"),
        ("__import__('os')", "error: cannot read \"__import__('os')\""),
        ("1" * 201, "error: the expression is longer than 200 characters"),
        ("(" * 100 + "1" + ")" * 99, "error: a parenthesis is not closed"),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    assert evaluate(expression) == value
