"""The command line: exit codes, one clear message, JSON alone on stdout, and interrupts that leave a way
back.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.errors import UserError
from distill import cli

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "trl", "datasets", "mlflow"}


def distill(*words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, after `code`; prints the heavy modules it loaded to fd
    3's file.
    """
    program = f"import sys\nfrom distill import cli\n{code}\nsys.exit(cli.main({list(words)!r}))"
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "smok"], "did you mean smoke?"),
        (["run", "../smoke"], "may hold only"),
        (["run", "smoke", "--set", "train.tokns=1"], "did you mean tokens?"),
        (["train", "smoke", "--set", "seed=x"], "'x'"),
        (["preflight", "nothing"], "no recipe 'nothing'"),
        (["run", "llama-1b"], "meta-llama/Llama-3.1-8B-Instruct"),
        (["run"], "recipe"),
        (["rum", "smoke"], "invalid choice"),
        ([], "COMMAND"),
        (["run", "smoke", "--fast"], "--fast"),
        (["evaluate", "smoke", "--require", "speedup=2"], "speedup>=1.5"),
        (["evaluate", "smoke", "--require", "nosuch>=1"], "no measure is called nosuch"),
        (["promote"], "candidate"),
        (["promote", ""], "'' names no candidate"),  # `make promote` without CANDIDATE
        (["bench", "alignment", "smoke", "--tokens", "-5"], "--tokens -5: give"),
    ],
)
def test_user_errors_exit_2_with_a_message_and_no_traceback(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    out, err = capfd.readouterr()
    assert out == "" and message in err and "Traceback" not in err


@pytest.mark.parametrize(
    "words", [["run", "smok", "--json"], ["run", "--json"], ["preflight", "nothing", "--json"]]
)
def test_user_errors_are_json_on_stdout_too(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    out, err = capfd.readouterr()
    assert json.loads(out) == {"error": err.rstrip("\n")}


def test_a_user_error_loads_nothing_heavy() -> None:
    code = f"import atexit; atexit.register(lambda: print(sorted({HEAVY!r} & set(sys.modules))))"
    for words in (["run", "smoke", "--set", "a=1"], ["run", "nothing"], ["preflight", "smoke"]):
        done = distill(*words, code=code)
        assert done.stdout.splitlines()[-1] == "[]", words


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    words = (*cli.STAGE_COMMANDS, "preflight", "compare", "promote", "report", "sync")
    assert all(word in text for word in words)


NOISE = """
import os, subprocess
def noisy(options):
    print("from python")
    os.write(1, b"from a library\\n")
    subprocess.run(["echo", "from a child"])
    return {"answer": 1}, 0
cli._compare = noisy
"""


def test_json_stands_alone_on_stdout() -> None:
    done = distill("compare", "--json", code=NOISE)
    assert json.loads(done.stdout) == {"answer": 1} and done.stdout.count("\n") == 1
    for source in ("from python", "from a library", "from a child"):
        assert source in done.stderr
    assert "from python" in distill("compare", code=NOISE).stdout


def test_our_own_fault_shows_a_traceback_and_exits_1() -> None:
    code = "def broken(options): raise KeyError('x')\ncli._compare = broken"
    done = distill("compare", "--json", code=code)
    assert done.returncode == 1 and "Traceback" in done.stderr
    assert json.loads(done.stdout) == {"error": "KeyError: 'x'"}


@pytest.mark.parametrize(("name", "mends"), [("ENOSPC", True), ("EROFS", True), ("EBADF", False)])
def test_a_full_disk_is_for_the_user_to_mend(name: str, mends: bool) -> None:
    code = f"""
import errno, os
def full(options): raise OSError(errno.{name}, os.strerror(errno.{name}), 'runs/x')
cli._compare = full
"""
    done = distill("compare", code=code)
    assert done.returncode == (2 if mends else 1)
    assert ("Traceback" in done.stderr) is not mends
    if mends:
        assert "runs/x" in done.stderr and "run the same command to resume" in done.stderr


LEFT = """
import os
def much(options):
    if %r:
        raise BrokenPipeError("a worker's pipe")
    print("x" * 100000)
    return {"answer": "x" * 100000}, 0
cli._compare = much
"""


@pytest.mark.parametrize("words", [["compare"], ["compare", "--json"]])
def test_it_ends_quietly_where_the_reader_leaves(words: list[str]) -> None:
    done = unread(LEFT % False, words)
    assert (done.returncode, done.stderr) == (141, "x" * 100000 + "\n" if "--json" in words else "")


def test_another_broken_pipe_is_a_fault() -> None:
    done = distill("compare", code=LEFT % True)
    assert done.returncode == 1 and "a worker's pipe" in done.stderr


def unread(code: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command line with a stdout that nobody reads any more."""
    program = f"import sys\nfrom distill import cli\n{code}\nsys.exit(cli.main({words!r}))"
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)


SLEEP = """
import time
def slow(options):
    try:
        print("ready", file=sys.stderr, flush=True)
        time.sleep(60)
    finally:
        if %r:
            time.sleep(60)
cli._compare = slow
"""


@pytest.fixture
def sleeper(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A command that is at work; with the parameter True, its clean-up takes a minute as well."""
    code = SLEEP % request.param
    program = f"import sys\nfrom distill import cli\n{code}\nsys.exit(cli.main(['compare', '--json']))"
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None and process.stderr.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("sleeper", [False], indirect=True)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_says_how_to_go_on(
    sleeper: subprocess.Popen[str], number: signal.Signals, code: int
) -> None:
    sleeper.send_signal(number)
    out, err = sleeper.communicate(timeout=30)
    assert sleeper.returncode == code
    assert "interrupted; run the same command to resume" in err and "Traceback" not in err
    assert json.loads(out) == {"error": "interrupted; run the same command to resume"}


@pytest.mark.parametrize("sleeper", [True], indirect=True)
def test_a_second_interrupt_ends_at_once(sleeper: subprocess.Popen[str]) -> None:
    sleeper.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):  # its clean-up goes on
        sleeper.wait(timeout=0.5)
    sleeper.send_signal(signal.SIGTERM)
    assert sleeper.wait(timeout=30) == -signal.SIGTERM


def test_signal_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    cli.main(["run", "nothing"])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_preflight_tells_and_exits_2_only_where_something_blocks(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["preflight", "smoke", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["ok"] is True and answer["recipe"] == "smoke"
    assert cli.main(["preflight", "llama-1b", "--json"]) == 2
    answer = json.loads(capfd.readouterr().out)
    assert answer["ok"] is False and "error" not in answer


def test_a_database_that_fails_later_is_named_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(options: object) -> None:
        try:
            raise ValueError("(sqlite3.DatabaseError) database disk image is malformed")
        except ValueError as error:
            raise RuntimeError("no such experiment") from error

    monkeypatch.setattr(cli, "_compare", fail)
    assert cli.main(["compare"]) == 2
    assert "database disk image is malformed; mend" in capfd.readouterr().err


def test_a_runs_folder_that_is_a_file_is_the_users_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "smoke").write_text("mine")
    for place, words in (
        ("file", ["sample", "smoke"]),
        ("file", ["show", "smoke"]),
        ("file", ["promote", "models:/a/1"]),
        (".", ["sample", "smoke"]),
    ):
        monkeypatch.setenv("DISTILL_RUNS", str(tmp_path / place))
        assert cli.main(words) == 2
        err = capfd.readouterr().err
        assert str(tmp_path) in err and "Traceback" not in err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["", "file/page.html", "device"])
def test_a_page_is_never_written_over_something_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTILL_RUNS", str(tmp_path / "runs"))
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "device")
    assert cli.main(["compare", "--html", str(tmp_path / name)]) == 2
    err = capfd.readouterr().err
    assert err.startswith(str(tmp_path)) and err.count("\n") == 1
    assert (tmp_path / "device").is_fifo()


def test_help_says_what_an_export_may_be_of(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["export", "--help"])
    assert "models:/NAME@champion" in capsys.readouterr().out


def test_compare_without_candidates(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"groups": []}
    assert cli.main(["compare"]) == 0
    assert "no candidates yet" in capfd.readouterr().out
    assert not (Path(os.environ["DISTILL_RUNS"]) / "mlflow.db").exists()


@pytest.mark.parametrize(("bound", "code"), [("1.5", 0), ("1.7", 3)])
def test_a_requirement_that_is_not_met_exits_3_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], bound: str, code: int
) -> None:
    from tests.evaluation.test_selection import EVALUATION

    class Result:
        def to_json(self) -> dict[str, object]:
            return {"evaluation": {**EVALUATION, "cost": {}}}

    monkeypatch.setattr("distill.pipeline.run", lambda *_, **__: Result())
    assert cli.main(["evaluate", "smoke", "--require", f"speedup>={bound}", "--json"]) == code
    out, err = capfd.readouterr()
    assert len(json.loads(out)["unmet"]) == bool(code)
    assert ("FAILED: speedup>=1.7 is required: it measured 1.6" in err) is bool(code)


def test_a_comparison_is_written_as_a_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "compare.html"
    assert cli.main(["compare", "--html", str(page)]) == 0
    assert "Drafters compared" in page.read_text() and str(page) in capfd.readouterr().err


def test_a_run_hands_everything_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, object] = {}

    class Result:
        def to_json(self) -> dict[str, object]:
            return {"done": True}

    def run(recipe: object, runs_dir: Path, command: str, **options: object) -> Result:
        seen.update(options, command=command, tokens=recipe.sample.tokens)  # type: ignore[attr-defined]
        return Result()

    monkeypatch.setattr("distill.pipeline.run", run)
    assert cli.main(["train", "smoke", "--set", "sample.tokens=77", "--fresh", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"done": True}
    assert (seen["command"], seen["fresh"], seen["tokens"]) == ("train", True, 77)

    def refuse(*_: object, **__: object) -> Result:
        raise UserError("that is missing")

    monkeypatch.setattr("distill.pipeline.run", refuse)
    assert cli.main(["run", "smoke"]) == 2
    assert capfd.readouterr().err == "that is missing\n"
