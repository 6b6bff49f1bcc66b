"""Results read again by a person: the table, one trajectory, and the page; whatever is written in them."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from producer import ErrorInfo, ErrorKind, Phase, RolloutRequest, RolloutResult, StopCondition, Timing
from producer.cli import app
from producer.contract import FailedAttempt
from producer.files.output import prepare_results
from producer.files.read import ResultsReader
from producer.report import ReportOptions, plots, write_report
from producer.report.page import in_script
from producer.report.stats import MAX_ROWS, Stats
from producer.show import SORTS, find, safe, show_result
from producer.trajectory import turns_of_steps

#: What a hostile model might write.
HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)><!-- \x1b]0;title\x07\x1b[2J [red]markup[/red] "
    "\u202ereversed \x9b1m \u2028 &amp; $title ${data}"
)


def message(role, content, **more):
    return {"role": role, "content": content} | more


CALL = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
ASK = [message("system", "be brief"), message("user", "what is here?")]
STEPS = [
    {
        "prompt": ASK,
        "completion": [message("assistant", None, tool_calls=[CALL], reasoning_content="let me look")],
        "tokens": {"prompt_ids": [1, 2, 3], "completion_ids": [4]},
    },
    {
        "prompt": [*ASK, message("assistant", "", tool_calls=[CALL]), message("tool", "a.txt", tool_call_id="c")],
        "completion": [message("assistant", [{"type": "text", "text": "a file"}])],
        "tokens": None,
        "is_truncated": True,
        "reward": 0.5,
    },
]


def make(example=1, stop=StopCondition.COMPLETED, **fields):
    request = RolloutRequest(model="m", rollout_id=f"batch-{example}-0", example_id=example, environment="math")
    return RolloutResult.for_request(request, stop, **fields)


def failed(example=2, message="the agent broke", **fields):
    error = ErrorInfo(kind=ErrorKind.AGENT, type="AgentFailedError", message=message, detail="its own words")
    return make(example, StopCondition.HAS_ERROR, error=error, **fields)


@pytest.fixture(params=["jsonl", "parquet"])
def save(request, tmp_path):
    """Writes results, in either form, and returns where."""
    if request.param == "parquet":
        pytest.importorskip("pyarrow")

    def save(*results):
        path = tmp_path / f"results.{request.param}"
        with prepare_results(path, overwrite=True) as file:
            for result in results:
                file.write(result)
        return path

    return save


def show(*arguments):
    ended = CliRunner().invoke(app, ["show", *map(str, arguments)])
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def refused(*arguments):
    ended = CliRunner().invoke(app, [*map(str, arguments)])
    assert ended.exit_code == 2, ended.output
    return " ".join(ended.stderr.split())


# -- the table ---------------------------------------------------------------------------------------------------------


def rows(*arguments):
    return re.findall(r"batch-(\w+)-0", show(*arguments))


def test_the_table_has_what_tells_rollouts_apart(save):
    took = Timing(start_time=1.0, total_ms=1234)
    path = save(make(1, reward=0.5, trajectory=STEPS, timing=took), failed(2), make(3, StopCondition.AGENT_TIMEOUT))
    shown = show(path)
    first, second, third = (line.split() for line in shown.splitlines()[1:4])
    assert first == ["batch-1-0", "1", "completed", "0.5", "2", "4", "1.2"]
    assert second == [*"batch-2-0 2 has_error - 0 0 0.0 AgentFailedError: the agent broke".split()]
    assert third[2] == "agent_timeout"
    assert shown.splitlines()[-1] == "3 rollouts, 2 failed"


def test_filters_sorting_and_limits(save):
    path = save(*(make(n, reward=r) for n, r in ((1, 0.2), (2, None), (3, 0.9))), failed(4), make(5, reward=0.1))
    assert rows(path, "--sort", "reward") == ["5", "1", "3", "2", "4"]
    assert rows(path, "--sort", "reward", "--reverse") == ["3", "1", "5", "2", "4"]
    assert rows(path, "--sort", "reward", "--reverse", "--limit", "2") == ["3", "1"]
    assert rows(path, "--sort", "id", "--limit", "0") == ["1", "2", "3", "4", "5"]
    assert rows(path, "--failed") == ["4"]
    shown = show(path, "--limit", "2")
    assert "batch-3" not in shown
    assert shown.splitlines()[-1] == "5 rollouts, 1 failed; 2 are shown, --limit 0 shows all"
    assert show(path, "--failed").splitlines()[-1] == "1 of 5 rollouts, 1 failed"


@pytest.mark.parametrize("sort", SORTS)
def test_every_sort_sorts(save, sort):
    assert len(rows(save(make(1), make(2)), "--sort", sort)) == 2


def test_a_line_that_is_being_written_is_said(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(make(1).to_json() + b"\n" + make(2).to_json()[:40])
    assert "the last line is not whole" in show(path)


# -- one rollout -------------------------------------------------------------------------------------------------------


def test_a_trajectory_is_printed_turn_by_turn(save):
    path = save(
        make(
            7,
            reward=0.25,
            metrics={"format": 1.0},
            trajectory=STEPS,
            durations={"agent": 1.5},
            timing=Timing(start_time=1_700_000_000.0, total_ms=2000),
            agent_stdout="printed",
            warnings=("careful",),
        )
    )
    shown = show(path, "batch-7-0")
    for words in ("reward  0.25", "format 1", "agent 1.500 s", "2023-11-14 22:13:20 UTC", "careful", "printed"):
        assert words in shown
    for words in ("turn 1 of 2: 3 prompt + 1 completion tokens", "turn 2 of 2: no tokens, reward 0.5, truncated"):
        assert words in shown
    assert shown.count("what is here?") == 1  # not again with the second turn
    order = [
        shown.index(words) for words in ("be brief", "let me look", "→ bash", '"command": "ls"', "a.txt", "a file")
    ]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"ok": True, "problems": [], "branches": [[0, 1]]}, "ok"),
        ({"ok": False, "problems": [{"turn": 1, "kind": "retokenised", "token": 7}]}, "not ok; retokenised in turn 2"),
        ({"ok": False, "problems": [{"kind": "no_tokens"}], "branches": [[0], [1]]}, "not ok; no tokens; 2 branches"),
        (
            {"ok": False, "problems": [{"kind": "unseen_answer"}] * 7},
            f"not ok; {', '.join(['unseen answer'] * 5)} and 2 more",
        ),
        ({"ok": "yes", "problems": 5, "branches": None}, "not ok"),
    ],
)
def test_what_the_gateway_checked_is_printed_and_kept(save, page, told, words):
    path = save(make(7, integrity=told))
    assert re.search(rf"integrity  {words}\n", show(path, "batch-7-0"))
    assert find(ResultsReader(path), "batch-7-0").integrity == told
    assert ["integrity", words] in page(make(7, integrity=told)).data["details"]["0"]["facts"]


def test_failures_are_printed_with_their_words_and_earlier_attempts(save):
    lost = ErrorInfo(kind=ErrorKind.LEASE, message="the worker died", retryable=True)
    attempt = FailedAttempt(attempt=1, worker="w", error=lost, turns=9, trajectory=STEPS[:1])
    path = save(failed(3, agent_stderr="x" * 3000 + "Traceback", agent_exit_code=1, failed_attempts=(attempt,)))
    shown = show(path, "3")  # by its example id
    for words in ("agent error: the agent broke", "AgentFailedError", "its own words", "exit code  1", "Traceback"):
        assert words in shown
    for words in ("attempt 1, before: 9 turns", "lease error: the worker died", "attempt 1, turn 1: 3 prompt"):
        assert words in shown
    assert "without its first 1009 characters" in shown
    assert "x" * 3000 in show(path, "3", "--full").replace("\n", "").replace(" ", "")


def test_an_error_that_each_attempt_ended_with_is_printed_once_in_full(save):
    words = ("its own words", "other words")
    before = [ErrorInfo(kind=ErrorKind.AGENT, message="broke", detail=detail) for detail in words]
    attempts = tuple(FailedAttempt(attempt=number, error=error) for number, error in enumerate(before, start=1))
    said = show(save(failed(3, failed_attempts=attempts)), "3")
    assert (said.count("its own words"), said.count("the same as before"), said.count("other words")) == (1, 1, 1)


def test_long_texts_are_cut_unless_all_is_asked_for(save):
    path = save(make(1, trajectory=[{"prompt": [message("user", "y" * 5000)], "completion": []}]))
    shown = show(path, "batch-1-0")
    assert "… 3000 more characters" in shown
    assert "--full shows them whole" in shown
    assert show(path, "batch-1-0", "--full").count("y") == 5000


def test_a_history_that_the_agent_changed_is_said_and_shown():
    steps = [
        {"prompt": [message("user", "a")], "completion": [message("assistant", "b")]},
        {"prompt": [message("user", "summary")], "completion": [message("assistant", "c")]},
    ]
    first, second = turns_of_steps(steps)
    assert (first.rewritten, second.rewritten, second.kept) == (False, True, 0)
    assert [said.text for said in second.asked] == ["summary"]


def test_json_prints_the_whole_result(save):
    whole = make(1, trajectory=[STEPS[0]])
    assert RolloutResult.parse(show(save(whole), "batch-1-0", "--json")) == whole


def test_ids_may_be_given_in_part_when_that_is_clear(save):
    path = save(make(1), make(12), make(2))
    assert "batch-12-0" in show(path, "batch-12")
    assert "batch-2-0" in show(path, "2")
    assert "'batch-1' may be 2 rollouts: batch-1-0, batch-12-0; name one" in refused("show", path, "batch-1")
    assert "has no rollout 'other'" in refused("show", path, "other")


def test_what_cannot_be_shown_is_said(tmp_path, save):
    assert "no such file" in refused("show", tmp_path / "none")
    assert "is a directory without parts" in refused("show", tmp_path)
    path = tmp_path / "r.jsonl"
    path.write_text("junk\n")
    assert f"{path}:1: is not a result" in refused("show", path)
    path.write_bytes(make(1).to_json() + b"\n" + make(2).to_json().replace(b'"reward":null', b'"reward":"x"') + b"\n")
    assert f"{path}:2: is not a result: reward: Input should be a valid number" in refused("show", path)
    assert "there are id, reward, turns" in refused("show", path, "--sort", "nothing")
    assert "are for one rollout" in refused("show", path, "--json")
    path.write_bytes(b"")
    assert show(path).splitlines()[-1] == "0 rollouts, 0 failed"


# -- hostile content ---------------------------------------------------------------------------------------------------


def hostile():
    call = {"function": {"name": HOSTILE, "arguments": HOSTILE}}
    steps = [{"prompt": [message(HOSTILE, HOSTILE)], "completion": [message("assistant", HOSTILE, tool_calls=[call])]}]
    error = ErrorInfo(kind=ErrorKind.AGENT, type=HOSTILE, message=HOSTILE, detail=HOSTILE)
    return make(1).model_copy(
        update={
            "rollout_id": "batch-1-0" + HOSTILE,
            "example_id": HOSTILE,
            "stop_condition": StopCondition.HAS_ERROR,
            "error": error,
            "trajectory": steps,
            "agent_stdout": HOSTILE,
            "agent_stderr": HOSTILE,
            "environment": HOSTILE,
            "model": HOSTILE,
            "answer": HOSTILE,
            "metrics": {HOSTILE: 1.0},
            "durations": {HOSTILE: 1.0, "agent": 2.0},
            "warnings": (HOSTILE,),
            "worker": HOSTILE,
            "timing": Timing(start_time=1e300, total_ms=1000.0),
            "failed_attempts": (FailedAttempt(attempt=1, error=error, trajectory=steps),),
        }
    )


def test_control_characters_reach_no_terminal_and_markup_is_not_read(save):
    path = save(hostile())
    for shown in (show(path), show(path, "batch-1"), show(path, "batch-1", "--full")):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]", shown)
        assert r"\x1b" in shown
    whole = show(path, "batch-1", "--full")
    assert "[red]markup[/red]" in whole
    assert r"\u202ereversed" in whole
    terminal = io.StringIO()
    show_result(hostile(), Console(file=terminal, force_terminal=True, width=100, color_system="standard"))
    colours = re.compile("\x1b\\[[0-9;]*m")  # rich's own
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]", colours.sub("", terminal.getvalue()))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.dictionaries(
    st.sampled_from(["role", "content", "tool_calls", "reasoning", "name"]), ANYTHING, max_size=4
)
JUNK = st.dictionaries(
    st.sampled_from(["prompt", "completion", "tokens", "reward", "extras", "is_truncated"]),
    ANYTHING | st.lists(MESSAGES | ANYTHING, max_size=3),
    max_size=5,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(JUNK, max_size=3))
def test_steps_of_any_form_are_shown(steps):
    terminal = io.StringIO()
    show_result(make(1, trajectory=steps), Console(file=terminal, width=80))
    assert f"turn {len(steps)} of {len(steps)}" in terminal.getvalue() or not steps


def test_safe_leaves_ordinary_text_alone():
    assert safe("tab\tline\r\nüñ 汉 🙂 \\x") == "tab\tline\nüñ 汉 🙂 \\x"
    assert safe("\x1b\x00\ud800\u200b") == r"\x1b\x00\ud800\u200b"


# -- the page ----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.blocks, self.policy, self._open = [], [], "", None
        self.attributes = []
        self.feed(text)
        self.data = json.loads(next(text for kind, text in self.blocks if kind == "application/json"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        if tag in {"script", "style"}:
            self._open = given.get("type", tag)
            self.blocks.append((self._open, ""))

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open:
            kind, before = self.blocks.pop()
            self.blocks.append((kind, before + data))

    def block(self, kind):
        [text] = [text for found, text in self.blocks if found == kind]
        return text


@pytest.fixture
def page(tmp_path, save):
    def page(*results, **options):
        out = tmp_path / "report.html"
        written = write_report(ResultsReader(save(*results)), out, ReportOptions(**options))
        text = out.read_text(encoding="utf-8")
        assert written.size == len(text.encode())
        return Page(text)

    return page


def digest(text):
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_the_page_lets_in_its_own_script_and_style_and_nothing_else(page):
    found = page(make(1))
    assert found.policy == (
        f"default-src 'none'; script-src '{digest(found.block('script'))}'; "
        f"style-src '{digest(found.block('style'))}'; base-uri 'none'; form-action 'none'"
    )
    assert not {name for _, name, _ in found.attributes} & {"src", "href", "style", "action", "onclick"}
    assert "url(" not in found.block("style")
    assert "@import" not in found.block("style")
    assert "innerHTML" not in found.block("script")


def test_hostile_content_stays_text(page):
    plain, found = page(failed(1, trajectory=STEPS, durations={"agent": 1.0})), page(hostile(), title=HOSTILE)
    assert set(found.tags) <= {*plain.tags, "path"}
    assert found.tags.count("script") == 2
    assert found.tags.count("img") == 0
    assert not [name for _, name, _ in found.attributes if name.startswith("on")]
    detail = found.data["details"]["0"]
    assert detail["turns"][0]["says"][0]["text"] == safe(HOSTILE)
    assert found.data["rows"][0][1] == "batch-1-0" + safe(HOSTILE)


def test_data_cannot_end_its_element():
    data = json.dumps(["</script>", "<!--", "&lt;", "\u2028"], ensure_ascii=False)
    assert not set(in_script(data)) & set("<>&\u2028")
    assert json.loads(in_script(data)) == json.loads(data)


def test_the_page_holds_turns_tool_calls_and_failures(page):
    lost = FailedAttempt(attempt=1, error=ErrorInfo(kind=ErrorKind.LEASE, message="lost"), turns=3)
    found = page(make(1, trajectory=STEPS, reward=0.5), failed(2, failed_attempts=(lost,), agent_stdout="printed"))
    first, second = found.data["details"]["0"], found.data["details"]["1"]
    assert [turn["p"] for turn in first["turns"]] == [3, None]
    assert first["turns"][0]["says"][2]["calls"] == [["bash", '{\n  "command": "ls"\n}']]
    assert second["error"] == "agent error: the agent broke\nits own words"
    assert second["attempts"][0]["title"] == "attempt 1: 3 turns"
    assert second["stdout"] == "printed"
    assert [row[4] for row in found.data["rows"]] == ["completed", "has_error"]


def test_plots_are_there_for_what_was_measured(page):
    took = {"durations": {phase.value: 1.0 for phase in Phase}, "timing": Timing(start_time=5.0, total_ms=3000)}
    found = page(*(make(n, reward=n / 10, trajectory=STEPS, **took) for n in range(5)), failed(9, **took))
    titles = [value for tag, name, value in found.attributes if (tag, name) == ("svg", "aria-label")]
    assert titles == [
        *("Rewards", "Time by phase", "Rollouts in flight", "Turns of a rollout"),
        *("Completion tokens", "Prompt tokens", "Failures by class"),
    ]
    bare = page(make(1))
    assert [value for tag, name, value in bare.attributes if (tag, name) == ("svg", "aria-label")] == [
        "Turns of a rollout"
    ]


def test_only_so_many_trajectories_are_taken_half_of_them_failures(page):
    results = [failed(n) if n % 2 else make(n) for n in range(40)]
    found = page(*results, trajectories=10)
    assert len(found.data["rows"]) == 40
    chosen = [int(number) for number in found.data["details"]]
    assert sum(number % 2 for number in chosen) == 5
    assert len(chosen) == 10
    assert page(*results, trajectories=0).data["details"] == {}


def test_trajectories_that_do_not_fit_are_left_out(page):
    long = [{"prompt": [message("user", "z" * 3000)], "completion": []}]
    found = page(*(make(n, trajectory=long) for n in range(9)), max_bytes=7000)
    assert len(found.data["details"]) == 2


def test_one_big_trajectory_is_cut_until_it_fits(page):
    steps = [{"prompt": [message("user", f"{n} " + "z" * 3000)], "completion": []} for n in range(600)]
    detail = page(make(1, trajectory=steps)).data["details"]["0"]
    assert len(json.dumps(detail)) < 200_000
    assert [turn["n"] for turn in detail["turns"]] == [*range(1, 51), *range(551, 601)]
    assert detail["left"] == 500


def test_counting_ten_thousand_keeps_no_trajectory_and_the_list_has_an_end():
    stats = Stats(trajectories=10)
    brief = next(ResultsReaderOf(make(1, reward=1.0)).briefs())
    for number in range(MAX_ROWS + 5):
        stats.add(brief.__class__(**{name: getattr(brief, name) for name in brief.__slots__} | {"number": number}))
    assert (stats.count, len(stats.rows), len(stats.chosen())) == (MAX_ROWS + 5, MAX_ROWS, 10)
    assert stats.chosen() != set(range(10))  # from everywhere, not the first that ended


class ResultsReaderOf(ResultsReader):
    def __init__(self, result):
        self._files, self._result = [], result

    def briefs(self):
        from producer.files.read import _brief

        yield _brief(0, self._result)


def test_the_command_makes_a_page_and_says_what_is_in_it(tmp_path, save):
    path, out = save(make(1), failed(2)), tmp_path / "page.html"
    ended = CliRunner().invoke(app, ["report", str(path), "-o", str(out), "--title", "My run"])
    assert ended.exit_code == 0, ended.output
    assert "2 rollouts, 2 trajectories" in ended.stderr
    assert "<h1>My run</h1>" in out.read_text()
    assert re.search("holds no results|without parts of results", refused("report", save(), "-o", out))
    assert "is the results themselves" in refused("report", path, "-o", path)
    assert "cannot be written" in refused("report", save(make(1)), "-o", tmp_path / "no" / "page.html")


# -- plots -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0], [("1", 1)]),
        ([0.0, 1.0, 1.0], [("0", 1), ("1", 2)]),
        ([0.25, 0.5], [("0.25", 1), ("0.5", 1)]),
        ([1, 3, 3], [("1", 1), ("2", 0), ("3", 2)]),
        ([0, 1, 100, 3000], [("0", 1), ("1", 1)]),
        ([-1.0, 0.0, 0.5, 1.0], None),
        ([1e-9, 1.0, 1e12], None),
    ],
)
def test_bins_count_every_value_once(values, expected):
    found = plots.bins(values)
    assert sum(count for _, _, count in found) == len(values)
    for below, count in expected or ():
        assert (below, count) in [(bin_[0], bin_[2]) for bin_ in found]
    assert len(found) < 60


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-1e9, 1e9) | st.integers(0, 10**7), min_size=1, max_size=50))
def test_any_finite_numbers_can_be_drawn(values):
    assert sum(count for _, _, count in plots.bins(values)) == len(values)
    assert plots.histogram(values, "t").startswith("<svg")


def test_the_timeline_shows_the_most_that_ran_at_once():
    assert plots.peaks([0.0, 0.0, 5.0], [4.0, 10.0, 6.0], 5) == [2, 2, 2, 2, 1]


def test_numbers_and_times_read_well():
    assert [plots.number(v) for v in (0, 0.25, 12, 1500, 2e7)] == ["0", "0.25", "12", "1.5k", "20M"]
    assert [plots.duration(s) for s in (0.0123, 3.21, 125, 7380)] == ["12.3 ms", "3.21 s", "2:05 min", "2:03 h"]
