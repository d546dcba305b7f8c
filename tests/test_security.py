"""The promises of SECURITY.md, as far as a machine can hold us to them."""

import ast
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from data import files
from distill import cli
from distill.context import Run
from distill.recipe import load_recipe
from tests.data.fake_server import fake_server, good_answer

ROOT = Path(__file__).resolve().parent.parent
MODULES = [path for floor in ("data", "evaluation", "distill") for path in (ROOT / floor).rglob("*.py")]
HF = "hf_" + "PLANTEDplantedPLANTED1"
OPENAI = "sk-" + "PLANTEDplantedPLANTED2"
PLAIN = "PLANTED key of another service"
PASSWORD = "PLANTEDplantedPLANTED3"
FORBIDDEN = {"eval", "exec", "os.system", "torch.load", "yaml.load", "yaml.unsafe_load", "joblib.load"}


def dangers(source: str) -> list[str]:
    """Calls that would run what came from outside."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if name in FORBIDDEN:
            found.append(name)
        if name.startswith(("pickle.", "dill.", "marshal.", "mlflow.pyfunc")):
            found.append(name)
        if keywords.get("trust_remote_code", "False") != "False":
            found.append(f"{name}(trust_remote_code)")
        if keywords.get("shell", "False") != "False":
            found.append(f"{name}(shell)")
        if name.endswith("from_pretrained") and name.startswith("Auto"):
            if "trust_remote_code" not in keywords and "gguf_file" not in keywords:
                found.append(f"{name} without trust_remote_code=False")
            if (
                "AutoModel" in name
                and keywords.get("use_safetensors") != "True"
                and "gguf_file" not in keywords
            ):
                found.append(f"{name} without use_safetensors=True")
        if (
            name in ("Environment", "jinja2.Environment", "jinja2.Template")
            and keywords.get("autoescape") != "True"
        ):
            found.append(f"{name} without autoescape")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_from_outside_is_run(path: Path) -> None:
    assert dangers(path.read_text(encoding="utf-8")) == []


def test_dangers_are_seen() -> None:
    for source in (
        "torch.load(path)",
        "pickle.load(stream)",
        "eval(text)",
        "AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, use_safetensors=True)",
        "AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)",
        "AutoTokenizer.from_pretrained(path)",
        "subprocess.run(text, shell=True)",
        "Environment(loader=folder)",
    ):
        assert dangers(source), source


def planted(folder: Path) -> list[str]:
    """Files in which one of the planted secrets stands."""
    return [
        str(path)
        for path in folder.rglob("*")
        if path.is_file()
        and any(secret.encode() in path.read_bytes() for secret in (HF, OPENAI, PASSWORD, PLAIN))
    ]


def test_secrets_of_the_environment_reach_neither_files_nor_logs_nor_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", HF)
    monkeypatch.setenv("OPENAI_API_KEY", OPENAI)
    words = [
        "sample",
        "smoke",
        "--set",
        "sample.tokens=40",
        "--set",
        "data.prompts=[{source: builtin:sql, count: 60}]",
    ]
    assert cli.main(words) == 0
    runs = Path(os.environ["DISTILL_RUNS"])
    assert (runs / "mlflow.db").exists() and planted(runs) == []
    out, err = capfd.readouterr()
    assert "PLANTED" not in out + err
    (runs / "proof").write_text(HF)
    assert planted(runs) == [str(runs / "proof")], "the search finds what is there"


def test_a_server_that_repeats_the_key_spreads_it_nowhere(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the header of every request it is; in what the server says of it, it must not be kept."""
    monkeypatch.setenv("OPENAI_API_KEY", PLAIN)

    def behave(body: dict[str, Any], times: int) -> tuple[int, dict[str, Any]]:
        if body["seed"] % 6 == 0:  # few enough that no ten come back one after another, whoever is first
            return 400, {"error": f"no key {PLAIN}"}
        return 200, good_answer(body, **({"finish_reason": PLAIN} if body["seed"] % 6 == 1 else {}))

    with fake_server(behave) as server:
        words = ["sample.engine=openai", f"sample.endpoint={{model: x, url: '{server.url}'}}"]
        words += ["train.signal=live", "sample.tokens=40", "data.prompts=[{source: builtin:sql, count: 60}]"]
        assert cli.main(["sample", "smoke", *(word for text in words for word in ("--set", text))]) == 0
    assert server.headers[0]["Authorization"] == f"Bearer {PLAIN}"
    runs = Path(os.environ["DISTILL_RUNS"])
    kept = "".join(path.read_text() for path in runs.glob("smoke/sample-*/quarantine-*.jsonl"))
    assert "HTTP 400" in kept and "finish_reason" in kept
    out, err = capfd.readouterr()
    assert planted(runs) == [] and "PLANTED" not in out + err


@pytest.mark.slow
def test_a_whole_run_keeps_no_secret_in_any_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, manifests, reports, cards, scripts, MLflow's parameters and artifacts."""
    for name, secret in (
        ("HF_TOKEN", HF),
        ("OPENAI_API_KEY", OPENAI),
        ("MLFLOW_TRACKING_PASSWORD", PASSWORD),
    ):
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("HUB_TOKEN", PLAIN)
    runs = Path(os.environ["DISTILL_RUNS"])
    store = f"sqlite:///{runs / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    assert cli.main(["run", "smoke", "--set", "sample.tokens=300", "--set", "train.tokens=400"]) == 0
    kinds = {path.suffix for path in runs.rglob("*") if path.is_file()}
    assert {".html", ".md", ".sh", ".json", ".yaml", ".db", ".safetensors", ".parquet"} <= kinds
    assert planted(runs) == []


@pytest.mark.parametrize("command", ["sample", "compare", "promote", "sync"])
def test_a_dead_tracking_server_is_named_without_its_password(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:PLA@{PASSWORD}@127.0.0.1:9")
    words = {"sample": ["smoke"], "promote": ["models:/x/1"]}.get(command, [])
    code = cli.main([command, *words, "--json"])
    out, err = capfd.readouterr()
    assert code == (0 if command == "sync" else 2), "there is nothing to send"
    assert "PLA" not in out + err and ("127.0.0.1" in err or command == "sync")


@pytest.mark.parametrize(
    "setting",
    [
        f"description={HF}",
        f"description=see https://me:{PASSWORD}@host/x",
        f"target.model=https://me:{PASSWORD}@host/x",
        f"train.learning_rate={OPENAI}",
        f"target.token={HF}",
        f"{HF}",
        f"{HF}=1",
    ],
)
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(
    setting: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sample", "smoke", "--json", "--set", setting]) == 2
    out, err = capfd.readouterr()
    assert "PLANTED" not in out + err and err
    path = tmp_path / "mine.yaml"
    path.write_text((ROOT / "recipes" / "smoke.yaml").read_text() + f"\n# {HF}\n")
    assert load_recipe(str(path)), "a comment is not read, let alone kept"


def test_a_fault_of_ours_does_not_repeat_a_secret(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(options: object) -> None:
        raise RuntimeError(f"GET https://me:{PASSWORD}@host/ Bearer {OPENAI}")

    monkeypatch.setattr(cli, "_compare", broken)
    assert cli.main(["compare", "--json"]) == 1
    out, err = capfd.readouterr()
    assert "Traceback" in err and "PLANTED" not in out + err


def test_the_password_of_a_tracking_server_is_in_no_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{PASSWORD}@host")
    with ExitStack() as stack:
        stages = Run(load_recipe("smoke"), tmp_path, lambda text: None, stack).stages
    assert all("PLANTED" not in repr(stage) for stage in stages.values())


def test_chat_templates_are_rendered_in_the_sandbox(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    from data.errors import UserError
    from data.prompts import Prompt, encode_prompt
    from distill.model_files import read_tokenizer

    tokenizer = read_tokenizer(tiny_pair[0])
    asked = Prompt("0", "file:x", "chat", "file", (("user", "hello"),), "train", True)
    for reach in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
    ):
        tokenizer.chat_template = reach
        with pytest.raises(UserError, match="chat template"):
            encode_prompt(tokenizer, asked)


def test_outputs_stay_in_the_runs_folder(tmp_path: Path) -> None:
    """A recipe's name is its folder's, and nothing but letters, digits, '.', '_' and '-'."""
    before = set(tmp_path.rglob("*"))
    for name in ("../escape.yaml", "..yaml", "a b.yaml", "-.yaml"):
        (tmp_path / "deep").mkdir(exist_ok=True)
        path = tmp_path / "deep" / name
        path.write_text((ROOT / "recipes" / "smoke.yaml").read_text())
        made = path.resolve()
        if name == "../escape.yaml":
            assert load_recipe(str(path)).name == "escape", "the folder before the name is no part of it"
        else:
            assert cli.main(["sample", str(path)]) == 2
        made.unlink()
    assert {path for path in tmp_path.rglob("*")} - before == {tmp_path / "deep"}


def test_what_is_written_is_the_owners_and_the_groups_as_the_umask_says(tmp_path: Path) -> None:
    files.write_atomic(tmp_path / "x", "x")
    (tmp_path / "y.tmp").write_text("y")
    (tmp_path / "y.tmp").chmod(0o600)
    files.commit_file(tmp_path / "y.tmp", tmp_path / "y")
    (tmp_path / "usual").touch()
    for name in ("x", "y"):
        assert (tmp_path / name).stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_the_promises_are_written_down() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8").lower()
    for promise in ("safetensors", "trust_remote_code", "127.0.0.1", "make audit", "sandbox", "report"):
        assert promise in text
