"""The page holds everything it shows, says the verdict first, and escapes what came from outside.

In a real browser where there is one (`pytest -m slow`): it lays out, in light and dark, with no request out.
"""

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from evaluation.report import candidate_page, comparison_page
from evaluation.selection import rank
from evaluation.verdict import verdict
from tests.evaluation.test_plots import EVALUATION, HISTORY
from tests.evaluation.test_selection import row

CERTIFICATE = {
    "holds": True,
    "reasons": [],
    "greedy": {"outputs": 60, "identical_outputs": 60, "near_ties": 0, "bugs": 0},
    "sampled": {
        "temperature": 1.0, "tokens": 1536, "law_p_value": 0.4, "plain_p_value": 0.5, "control_p_value": 0.6,
        "smallest_leak": 0.12, "smallest_distance": 0.05, "power": 0.9,
    },
    "self_draft": {"greedy": 1.0, "sampled": 1.0, "required": 0.98},
}  # fmt: skip
ATTACK = "<script>document.title='owned'</script><img src=https://example.org/x>"


def evaluation(speedup: float = 2.0, **changes: Any) -> dict[str, Any]:
    best = {
        **EVALUATION["best"],
        "speedup": {"mean": speedup, "low": speedup - 0.1, "high": speedup + 0.1},
    }
    cost = {
        "cost_ratio": 0.2,
        "verify_overhead": {"4": 0.3},
        "time_shares": {"target_step": 0.6, "drafting": 0.3, "wider_check": 0.1},
    }
    table = [
        {**entry, "tokens_per_target_call": 2.0, "round_cost": 1.5, "break_even_acceptance": 0.4}
        for entry in EVALUATION["cost_model"]["table"]
    ]
    model = {
        **EVALUATION["cost_model"],
        "table": table,
        "stops_paying_at": 9.0,
        "costs": [{"batch_size": 16}],
    }
    made = {
        **EVALUATION,
        "best": best,
        "cost": cost,
        "cost_model": model,
        "certificate": CERTIFICATE,
        **changes,
    }
    best["verdict"] = verdict(made)
    return made


class Reader(HTMLParser):
    """Collects tags, and what would be fetched."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action") and value and not value.startswith("#"):
                self.fetched.append(value)


@pytest.fixture(scope="module")
def page() -> str:
    return candidate_page(evaluation(), HISTORY, f"demo {ATTACK}", f"description: {ATTACK}")


def test_the_page_stands_alone(page: str) -> None:
    read = Reader(page)
    assert read.fetched == [] and "script" not in read.tags and "link" not in read.tags
    assert "@import" not in page and "url(http" not in page
    assert "default-src 'none'" in page
    assert len(set(read.ids)) == len(read.ids)
    assert read.tags.count("svg") == 8


def test_what_came_from_outside_is_text(page: str) -> None:
    assert ATTACK not in page and "img" not in Reader(page).tags
    assert page.count("&lt;script&gt;") >= 2  # in the title and in the recipe


def test_the_verdict_stands_first_and_in_words(page: str) -> None:
    text = re.sub(r"<[^>]+>", "", page[: page.index("<main>")])
    assert "YES: Serve with K = 4 at batch 1: 2.00x, 95 % interval 1.90-2.10" in " ".join(text.split())
    assert "do not speculate above batch 9" in text
    assert "60% target steps" in text
    bad = candidate_page(evaluation(0.5), HISTORY, "demo", "")
    assert 'class="verdict bad"' in bad and "NO:</strong> Do not speculate" in bad


def test_every_part_is_there(page: str) -> None:
    expected = (
        *("Speedup over batch size", "Acceptance by task", "Training", "break-even acceptance", "TTFT p50"),
        *("Losslessness certificate", "12% of tokens leaking", "Recipe", "prefers-color-scheme"),
    )
    for words in expected:
        assert words in page


def test_a_lost_certificate_is_the_headline() -> None:
    lossy = {**CERTIFICATE, "holds": False, "reasons": ["3 of 60 greedy outputs differ."]}
    page = candidate_page(evaluation(certificate=lossy), HISTORY, "demo", "")
    assert "NO:</strong> Do not serve: 3 of 60 greedy outputs differ." in page
    without = candidate_page(evaluation(certificate=None), HISTORY, "demo", "")
    assert "nothing may be promoted" in without


def test_a_comparison_names_leader_and_ties() -> None:
    rows = [row("lead", 2.0, name=f"demo{ATTACK}"), row("near", 1.9), row("other", 1.0, data_digest="d2")]
    page = comparison_page(rank([*rows, replace(rows[1], drafter_digest="none", speedup=None)]))
    read = Reader(page)
    assert read.fetched == [] and "img" not in read.tags and read.tags.count("svg") == 2
    assert "tied with demo v1" in page and "2.00x [1.90, 2.10]" in page
    assert "No candidate" in comparison_page([])


@pytest.mark.parametrize("name", ["$\\frac", "$\\nothing$", "5 $ or 6 $", "a\\$b"])
def test_a_dollar_in_a_name_is_no_formula(name: str) -> None:
    assert name in comparison_page(rank([row("lead", 2.0, name=name)]))
    tasks = [
        {**entry, "task": "all" if entry["task"] == "all" else name} for entry in EVALUATION["acceptance"]
    ]
    assert name in candidate_page(evaluation(acceptance=tasks), HISTORY, "demo", "")


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[bytes]:
    assert BROWSER is not None
    base = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={page.parent / 'profile'}",
    ]
    return subprocess.run([*base, *options, page.as_uri()], capture_output=True, timeout=120, check=True)


def comparison() -> str:
    rows = [row("lead", 2.0, name=f"demo {ATTACK}"), row("other", 1.0, data_digest="d2")]
    return comparison_page(rank(rows))


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("kind", ["candidate", "comparison"])
def test_in_a_browser(page: str, kind: str, tmp_path: Path) -> None:
    from matplotlib.image import imread

    shown, plots = (page, 8) if kind == "candidate" else (comparison(), 2)
    path = tmp_path / "report.html"
    # The test's own script measures the laid-out page; the page's policy would forbid it.
    probe = """<script>addEventListener('load', () => {
      const boxes = [...document.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect());
      document.body.dataset.drawn = boxes.filter(box => box.width > 200 && box.height > 100).length;
      document.body.dataset.overflow = document.documentElement.scrollWidth > innerWidth;
      document.body.dataset.requests = performance.getEntriesByType('resource').length;
    })</script>"""
    path.write_text(re.sub(r"<meta http-equiv.*?>", "", shown).replace("</body>", probe + "</body>"))
    title = "Drafter demo &lt;script&gt;" if kind == "candidate" else "Drafters compared"
    for width in ("1200", "420"):
        dom = browse(path, "--dump-dom", f"--window-size={width},900").stdout.decode()
        body = dom[dom.index("<body") : dom.index("<header>")]
        wanted = [f'data-drawn="{plots}"', 'data-overflow="false"', 'data-requests="0">']
        assert body.split() == ["<body", *wanted]
        assert f"<title>{title}" in dom  # the attack did not run
    path.write_text(shown)
    corners = {}
    for mode, value in (("light", "1"), ("dark", "0")):
        shot = tmp_path / f"{mode}.png"
        browse(path, f"--blink-settings=preferredColorScheme={value}", f"--screenshot={shot}")
        corners[mode] = imread(shot)[2, 2, :3].mean()
    assert corners["light"] > 0.9 and corners["dark"] < 0.2
