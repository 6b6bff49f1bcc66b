"""The journal: what a gateway that was killed still knows, and how large its files become."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from workers.gateway.protocol import Registration
from workers.gateway.server import create_app
from workers.gateway.server.journal import Journal, JournalError
from workers.gateway.server.log import Kind
from workers.gateway.server.recorder import Recorder
from workers.gateway.server.snapshot import restore, snapshots
from workers.gateway.server.turns import Answered, Payload


def recorded(recorder: Recorder, rollout_id: str, turns: int = 1, **registration: Any) -> None:
    rollout = recorder.register(rollout_id, Registration(model="m", **registration), f"key of {rollout_id}")
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages = [*messages, {"role": "user", "content": f"turn {turn}"}]
        rollout.begin(messages)
        rollout.record(Answered(messages, Payload.of(answer(turn)), {"note": turn}, answer_id=f"a-{turn}"))
        messages = [*messages, {"role": "assistant", "content": f"answer {turn}"}]


def answer(turn: int) -> bytes:
    choice = {
        "message": {"role": "assistant", "content": f"answer {turn}"},
        "finish_reason": "stop",
        "token_ids": [turn],
        "logprobs": {"content": [{"logprob": -0.1234567890123 * turn}]},
    }
    return orjson.dumps({"choices": [choice], "prompt_token_ids": list(range(100 * (turn + 1)))})


def opened(directory: Path, **settings: Any) -> tuple[Journal, Recorder]:
    journal = Journal(directory, **settings)
    recorder = Recorder(journal)
    restore(recorder, journal.entries())
    journal.start()
    return journal, recorder


def whole(recorder: Recorder) -> dict[str, Any]:
    """All that is known, without what time alone changes."""
    found = {}
    for rollout in recorder:
        trajectory = rollout.trajectory()
        trajectory["trajectory"] = [turn.step(None) for turn in trajectory["trajectory"]]
        found[rollout.id] = trajectory | {"idle_seconds": None, "key": rollout.key, "ttl": rollout.ttl}
    return found


def test_what_was_recorded_is_known_after_a_restart(tmp_path: Path) -> None:
    journal, recorder = opened(tmp_path)
    recorded(recorder, "r-1", 3, max_turns=9, max_seq_len=500)
    recorded(recorder, "r-2")
    recorded(recorder, "r-3")
    recorder.get("r-2").record_failure(502, "it broke")
    recorder.get("r-2").cancel()
    recorder.unregister("r-3")
    known = whole(recorder)
    assert sorted(known) == ["r-1", "r-2"]
    journal.close()
    again, restored = opened(tmp_path)
    assert whole(restored) == known
    earlier = [{"role": "user", "content": "turn 0"}, {"role": "assistant", "content": "answer 0"}]
    assert restored.get("r-1").earlier("a-0") == (earlier, {"note": 0})
    again.close()


def test_compaction_keeps_what_lives_and_deletes_the_rest(tmp_path: Path) -> None:
    journal, recorder = opened(tmp_path, segment_bytes=20_000)
    for n in range(40):
        recorded(recorder, f"r-{n}", 10, max_seq_len=800)
        if n % 10:
            recorder.unregister(f"r-{n}")
    before, known = journal.size, whole(recorder)
    assert journal.is_due
    asyncio.run(journal.compact(snapshots(recorder)))
    assert not journal.is_due
    assert journal.size < before / 10
    assert journal.size == sum(path.stat().st_size for path in tmp_path.glob("*.log"))
    recorded(recorder, "r-later")
    known |= {"r-later": whole(recorder)["r-later"]}
    journal.close()
    again, restored = opened(tmp_path)
    assert whole(restored) == known
    again.close()


def test_a_call_that_is_answered_while_the_journal_is_compacted_is_kept(tmp_path: Path) -> None:
    journal, recorder = opened(tmp_path)
    recorded(recorder, "r-1", 2)
    recorded(recorder, "r-2", 2)

    def meanwhile() -> Any:
        for index, entry in enumerate(snapshots(recorder)):
            if index == 1:  # r-1 is in the new segments already, r-2 is not
                for name in ("r-1", "r-2"):
                    message = {"role": "user", "content": "meanwhile"}
                    recorder.get(name).record(Answered([message], Payload.of(answer(5)), {}))
                yield next(each for each in snapshots(recorder) if each[0]["id"] == "r-2")
            else:
                yield entry

    asyncio.run(journal.compact(meanwhile()))
    known = whole(recorder)
    assert [each["num_turns"] for each in known.values()] == [3, 3]
    journal.close()
    again, restored = opened(tmp_path)
    assert whole(restored) == known
    again.close()


@pytest.mark.parametrize("cut", [1, 9, 30])
def test_an_entry_that_was_not_written_whole_ends_its_segment(tmp_path: Path, cut: int) -> None:
    journal, recorder = opened(tmp_path)
    recorded(recorder, "r-1")
    recorded(recorder, "r-2")
    journal.close()
    segment = next(tmp_path.glob("*.log"))
    os.truncate(segment, segment.stat().st_size - cut)
    again, restored = opened(tmp_path)
    assert [rollout.id for rollout in restored] == ["r-1", "r-2"]
    assert [rollout.num_turns for rollout in restored] == [1, 0]
    recorded(restored, "r-3")
    again.close()
    third, last = opened(tmp_path)
    assert [rollout.id for rollout in last] == ["r-1", "r-2", "r-3"]
    third.close()


def test_bytes_that_changed_are_not_believed(tmp_path: Path) -> None:
    journal, recorder = opened(tmp_path)
    recorded(recorder, "r-1")
    journal.close()
    segment = next(tmp_path.glob("*.log"))
    content = bytearray(segment.read_bytes())
    content[-10] ^= 1
    segment.write_bytes(content)
    again, restored = opened(tmp_path)
    assert [rollout.num_turns for rollout in restored] == [0]
    again.close()


def test_a_directory_serves_one_process_at_a_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(JournalError, match="another gateway"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


def test_no_key_is_written_down(tmp_path: Path) -> None:
    journal, recorder = opened(tmp_path)
    recorded(recorder, "r-1")
    journal.close()
    assert b"key of" not in next(tmp_path.glob("*.log")).read_bytes()


def test_a_full_disk_makes_the_gateway_unready_and_loses_nothing_before_or_after(
    tmp_path: Path, serve: Callable[[Any], Any], model: Any, model_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(upstream=model_url, journal=tmp_path)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    real = os.writev

    def full(fd: int, parts: Any) -> int:
        real(fd, [b"".join(parts)[:7]])  # a part of it still fits
        raise OSError(errno.ENOSPC, "No space left on device")

    with httpx.Client(base_url=serve(app).url, timeout=20) as client:
        assert client.post("/v1/rollouts/r-1/register", json={"model": "m"}).status_code == 200
        assert client.post("/v1/rollouts/r-1/chat/completions", json=chat).status_code == 200
        monkeypatch.setattr(os, "writev", full)
        assert client.post("/v1/rollouts/r-1/chat/completions", json=chat).status_code == 200  # the agent goes on
        answer = client.get("/readyz")
        assert (answer.status_code, answer.json()["status"]) == (503, "journal failing")
        monkeypatch.setattr(os, "writev", real)
        assert client.post("/v1/rollouts/r-1/chat/completions", json=chat).status_code == 200
        assert client.get("/readyz").status_code == 200
        assert client.get("/v1/rollouts/r-1/trajectory").json()["num_turns"] == 3
    found = [entry.kind for entry in _entries(tmp_path)]
    assert found == [Kind.REGISTER, Kind.CALL, Kind.CALL]


def _entries(directory: Path) -> list[Any]:
    copy = directory.parent / "copy"
    copy.mkdir()
    for path in directory.glob("*.log"):
        (copy / path.name).write_bytes(path.read_bytes())
    journal = Journal(copy)
    try:
        return list(journal.entries())
    finally:
        journal.close()


def test_the_policy_version_survives(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start()
    journal.write(Kind.POLICY, {"version": 41})
    journal.write(Kind.POLICY, {"version": 42})
    journal.close()
    again = Journal(tmp_path)
    assert restore(Recorder(), again.entries()) == 42
    again.close()


def test_compaction_keeps_the_policy_version(tmp_path: Path) -> None:
    journal, recorder = opened(tmp_path)
    journal.write(Kind.POLICY, {"version": 42})
    asyncio.run(journal.compact(snapshots(recorder)))
    journal.close()
    again = Journal(tmp_path)
    assert restore(Recorder(), again.entries()) == 42
    again.start()
    asyncio.run(again.compact(iter(())))  # also when it was set in an earlier process
    again.close()
    third = Journal(tmp_path)
    assert restore(Recorder(), third.entries()) == 42
    third.close()


def test_compaction_that_gets_no_new_segment_keeps_what_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, recorder = opened(tmp_path)
    recorded(recorder, "r-1", 2)
    real = os.open

    def too_many(path: Any, *flags: Any) -> int:
        if str(path).endswith(".log"):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *flags)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", too_many)
        asyncio.run(journal.compact(snapshots(recorder)))
    recorded(recorder, "r-2")
    known = whole(recorder)
    journal.close()
    again, restored = opened(tmp_path)
    assert whole(restored) == known
    again.close()


def test_compaction_in_which_a_rollout_could_not_be_written_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, recorder = opened(tmp_path, segment_bytes=2_000)
    recorded(recorder, "r-small")
    recorded(recorder, "r-large", 20)
    recorded(recorder, "r-last")
    known, real = whole(recorder), os.writev

    def nearly_full(fd: int, parts: Any) -> int:
        if b"r-large" in parts[2]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, parts)

    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", nearly_full)
        assert journal.is_due
        asyncio.run(journal.compact(snapshots(recorder)))
    assert not journal.is_due  # it would fill the disk, in vain, again and again
    journal.close()
    again, restored = opened(tmp_path)
    assert whole(restored) == known
    again.close()


def test_what_is_deleted_or_closed_was_synced_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, recorder = opened(tmp_path, segment_bytes=2_000, sync_interval=1000)
    real, delete = os.fdatasync, Path.unlink
    synced: dict[str, int] = {}

    def sync(fd: int) -> None:
        real(fd)
        synced[Path(f"/proc/self/fd/{fd}").readlink().name] = os.fstat(fd).st_size

    def sizes() -> dict[str, int]:
        return {path.name: path.stat().st_size for path in tmp_path.glob("*.log")}

    def unlink(path: Path) -> None:
        assert synced.items() >= {name: size for name, size in sizes().items() if name not in before}.items()
        delete(path)

    monkeypatch.setattr(os, "fdatasync", sync)
    for n in range(5):
        recorded(recorder, f"r-{n}", 5)
    before = {name for name, size in sizes().items() if size}
    monkeypatch.setattr(Path, "unlink", unlink)
    asyncio.run(journal.compact(snapshots(recorder)))
    assert sizes().keys().isdisjoint(before)
    for n in range(5):
        recorded(recorder, f"r-later-{n}", 5)
    journal.close()
    assert synced.items() >= sizes().items()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(tmp_path) in str(fd.resolve())]
