"""The tables hold every row, with intervals and sample sizes, and no markup from names."""

import csv
import io

from rich.console import Console

from evaluation.tables import TextTable, cost_table, decode_table, draw_tables, latency_table
from tests.evaluation.test_plots import EVALUATION
from tests.evaluation.test_report import evaluation


def printed(table: TextTable) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(table.rich())
    return out.getvalue()


def test_the_decode_table_holds_every_row_with_interval_and_sample_size() -> None:
    text = printed(decode_table(EVALUATION))
    assert text.count("n-gram look-up") == 4 and text.count("up to") == 12
    assert "2.00 [1.90, 2.05]" in text
    assert "50.1" in text and "30" in text and "x86, 2 cores" in text
    assert decode_table(EVALUATION).rows[decode_table(EVALUATION).chosen or 0][:4] == (
        "drafter",
        "seen",
        "1",
        "4",
    )
    printed(decode_table({}))


def test_predicted_and_measured_stand_side_by_side() -> None:
    model = {
        "table": [
            {"batch_size": 1, "num_speculative_tokens": k, "tokens_per_target_call": 1 + k / 2,
             "round_cost": 1.5, "speedup": 1.7, "break_even_acceptance": even}
            for k, even in ((0, 0.0), (4, 0.5), (6, None))
        ],
        "best": [{"batch_size": 1, "num_speculative_tokens": 4}],
    }  # fmt: skip
    rows = cost_table({**EVALUATION, "cost_model": model}).rows
    assert rows[0][-2:] == ("-", "-") and rows[2][-1] == "never"
    assert rows[1] == ("1", "4 (best)", "3.00", "1.50", "1.70", "2.00 [1.90, 2.05]", "-15%", "0.50")


def test_latencies_stand_beside_plain_decoding() -> None:
    latency = {"ttft_ms_p50": 10.0, "ttft_ms_p95": 20.0, "tpot_ms_p50": 5.0, "tpot_ms_p95": 6.0}
    rows = latency_table({**EVALUATION, "plain": {"latency": {"seen": latency, "unseen": None}}}).rows
    assert rows[0] == ("plain decoding", "seen", "1", "0", "10.0", "20.0", "5.0", "6.0")
    assert len(rows) == 1 + len(EVALUATION["decode"])


def test_every_table_is_kept_as_csv_too() -> None:
    tables = draw_tables(evaluation())
    assert list(tables) == ["Speed", "Latency", "Cost model"]
    read = list(csv.reader(io.StringIO(tables["Speed"].csv())))
    assert tuple(read[0]) == tables["Speed"].heading and len(read) == 1 + len(EVALUATION["decode"])
    assert "Cost model" not in draw_tables({"decode": []})


def test_names_are_no_markup() -> None:
    assert "[bold]x" in printed(TextTable("[red]t", ("a",), 1, [("[bold]x",)]))
