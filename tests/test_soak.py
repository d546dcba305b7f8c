"""The soak test's own judgement: what grows is seen, what is flat is not blamed."""

from pathlib import Path

import pytest

from tests.soak import LIMITS, WARM_UP, grown, measure, slopes

FLAT = dict.fromkeys(LIMITS, 100.0)


def test_flat_rounds_pass_and_a_warm_up_is_no_growth() -> None:
    assert grown([{name: 1.0 for name in LIMITS}] * WARM_UP + [FLAT] * 6) == []
    noisy = [{name: 100.0 + (-1) ** place * 0.2 for name in LIMITS} for place in range(8)]
    assert grown([FLAT] * WARM_UP + noisy) == []


@pytest.mark.parametrize("name", LIMITS)
def test_growth_is_named(name: str) -> None:
    rounds = [{**FLAT, name: 100 + 3 * place} for place in range(WARM_UP + 6)]
    assert slopes(rounds)[name] == pytest.approx(3)
    (fault,) = grown(rounds)
    assert name in fault and "3.00" in fault


def test_what_is_measured_is_there(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x" * (1 << 20))
    before = measure(tmp_path)
    with (tmp_path / "x").open():
        assert measure(tmp_path)["open_files"] == before["open_files"] + 1
    assert before["disk_mib"] == 1 and before["memory_mib"] > 1 and set(before) == set(LIMITS)
