"""The directory of an export: never over something else, and its manifest says what is in it."""

import json
from pathlib import Path

import pytest

from data.errors import UserError
from data.files import sha256_file
from distill.export.card import model_card
from distill.export.directory import check_out_dir, measured, write_export


def fill(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "weights").write_text("w")


def write(out: Path, force: bool = False) -> None:
    facts = {"recipe": "smoke", "evaluation": {}, "candidate": "https://me:hf_abcdefghijk@host/m"}
    write_export(out, "hf", facts=facts, notes={"x": 1}, fill=fill, force=force)


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["files"] == {"sub/weights": sha256_file(tmp_path / "out" / "sub" / "weights")}
    assert manifest["kind"] == "hf" and manifest["x"] == 1 and manifest["facts"]["recipe"] == "smoke"
    assert "hf_abc" not in json.dumps(manifest)


def test_it_replaces_an_export_only_with_force_and_nothing_else_ever(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write(out)  # an empty directory is nobody's
    with pytest.raises(UserError, match="--force"):
        write(out)
    write(out, force=True)
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "thesis.txt").write_text("years of work")
    for force in (False, True):
        with pytest.raises(UserError, match="or remove it"):
            write(thesis, force=force)
    assert (thesis / "thesis.txt").exists()
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(UserError, match="no directory"):
            check_out_dir(tmp_path / place, True)


def test_a_manifest_of_another_tool_is_no_export(tmp_path: Path) -> None:
    for text in ("{}", "[1]", "no json", '{"format": "other/1"}'):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(UserError, match="no export"):
            check_out_dir(tmp_path, True)


def test_measures_in_short_carry_their_sample_sizes() -> None:
    speedup = {"mean": 1.5, "low": 1.4, "high": 1.6}
    greedy = {"mean": 0.9, "low": 0.8, "high": 0.95}
    row = {
        "drafter": "model",
        "split": "seen",
        "num_speculative_tokens": 3,
        "prompts": 30,
        "speedup": speedup,
    }
    found = measured(
        {
            "serving": {"temperature": 0.0},
            "machine": {"cpu": "x86", "cores": 2},
            "acceptance": [{"split": "seen", "task": "all", "temperature": 0.0, "greedy": greedy}],
            "decode": [{**row, "speedup": {**speedup, "mean": 1.1}, "num_speculative_tokens": 6}, row],
            "best": {"drafter": "model", "num_speculative_tokens": 3, "split": "seen"},
        }
    )
    assert found["decode"]["prompts"] == 30 and found["decode"]["speedup"] == speedup
    assert found["acceptance"]["greedy"]["mean"] == 0.9 and found["machine"] == "x86, 2 cores"
    assert measured({}) == {}


def test_acceptance_is_that_of_the_split_that_the_headline_names() -> None:
    acceptance = [
        {"split": split, "task": "all", "temperature": 0.0, "greedy": {"mean": mean}}
        for split, mean in (("seen", 0.9), ("unseen", 0.6))
    ]
    for rows, split, mean in ((acceptance, "seen", 0.9), (acceptance[1:], "unseen", 0.6)):
        evaluation = {"acceptance": rows, "best": {"split": split}}
        assert measured(evaluation)["acceptance"]["greedy"]["mean"] == mean
        facts = {"target_model": "t", "num_speculative_tokens": 3, "evaluation": evaluation}
        line = f"- `acceptance/greedy` ({split} templates, temperature 0): {mean:.3f}"
        assert line in model_card(facts, {"rows": 0, "filled": 0}, "name")
