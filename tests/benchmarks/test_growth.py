"""The soak's judge: it must see what grows slowly, and nothing in what only goes up and down."""

from __future__ import annotations

import random

import pytest
from benchmarks.growth import FDS, KEYS, RSS, THREADS, Sample, judged

HALF_AN_HOUR, WARM_UP = range(0, 1800, 10), 300.0


def is_flat(measure: str, values: dict[int, float]) -> bool:
    [growth] = judged([Sample(at, {measure: value}) for at, value in values.items()], WARM_UP)
    return growth.is_flat


@pytest.mark.parametrize("measure", [f"worker {RSS}", f"worker {FDS}", f"redis {KEYS}", f"gateway {THREADS}"])
def test_what_goes_up_and_down_is_flat(measure: str) -> None:
    rng = random.Random(1)
    assert is_flat(measure, {at: 200 + rng.uniform(-15, 15) for at in HALF_AN_HOUR})


def test_what_grows_while_it_warms_up_and_then_no_more_is_flat() -> None:
    assert is_flat(f"worker {RSS}", {at: min(at, 290) + 100.0 for at in HALF_AN_HOUR})


def test_what_shrinks_is_flat() -> None:
    assert is_flat(f"redis {KEYS}", {at: 1000 - at / 3 for at in HALF_AN_HOUR})


@pytest.mark.parametrize(
    ("measure", "first", "each_second"),
    [
        (f"worker {RSS}", 100.0, 0.004),  # 400 bytes for each of 10 rollouts a second
        (f"worker {FDS}", 60, 0.01),
        (f"gateway {THREADS}", 8, 0.005),
        (f"redis {KEYS}", 2000, 0.1),
    ],
)
def test_what_grows_slowly_all_the_time_is_not_flat(measure: str, first: float, each_second: float) -> None:
    rng = random.Random(1)
    assert not is_flat(measure, {at: first + each_second * at + rng.uniform(-2, 2) for at in HALF_AN_HOUR})


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="tell nothing"):
        judged([Sample(at, {f"worker {RSS}": 1.0}) for at in (0, 290, 310)], WARM_UP)
