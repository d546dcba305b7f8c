"""Several processes: what a configuration says, and that two of them come to what one does."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from data.errors import UserError
from data.prompts import Prompt
from data.records import Samples, collate
from data.sample import SampleConfig, drop_shards_after, plan, run, run_share, sample_shard
from distill.processes import CONFIGS, read_processes, run_stage_in
from distill.recipe import load_recipe
from evaluation.head import head_of

ROOT = Path(__file__).parents[2]
SMALL = ["sample.tokens=900", "train.tokens=4000", "sample.batch_size=4", "train.accumulation=2"]


def test_shipped_configurations() -> None:
    assert read_processes("single") is None
    for name in ("ddp", "fsdp2"):
        processes = read_processes(name)
        assert processes is not None and processes.count == 2
        assert processes == read_processes(str(CONFIGS / f"{name}.yaml"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("num_processes: 2", "distributed_type"),
        ("{distributed_type: MULTI_GPU, num_processes: two}", "two"),
        ("{distributed_type: DEEPSPEED, num_processes: 2}", "DEEPSPEED"),
        ("{distributed_type: MULTI_GPU, num_processes: 4, num_machines: 2}", "num_machines"),
        ("[", "configuration"),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=named):
        read_processes(str(path))


@pytest.mark.parametrize("name", ["dpp", "../ddp", "ddp.yaml"])
def test_an_unknown_configuration_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(UserError, match="ddp, fsdp2, single"):
        read_processes(name)


# --- sampling in shares, with an engine that counts ---


class Engine:
    """Continues every prompt with its own ids, in a fixed number of tokens."""

    def __init__(self) -> None:
        self.calls = 0

    def sample(self, requests: Any, *, temperature: float, max_new_tokens: int, on_tokens: Any) -> Any:
        from data.engines import Completion

        self.calls += 1
        on_tokens(max_new_tokens * len(requests))
        return [Completion([request.seed % 90] * max_new_tokens, "length", None) for request in requests]


def prompts(count: int) -> list[tuple[Prompt, list[int]]]:
    splits = ["select", "test", *["train"] * (count - 2)]
    return [
        (Prompt(f"p{number}", "x", "t", "t", (("user", "x"),), split, True), [1, 2])
        for number, split in enumerate(splits)
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_shares_add_up_to_one_sampling(shares: int, tmp_path: Path) -> None:
    config = SampleConfig(temperature=[0.0], max_new_tokens=4, tokens=60, batch_size=1)
    common: dict[str, Any] = {"held_out": 1, "seed": 0, "on_tokens": lambda count: None}
    run(prompts(40), Engine(), config, directory=tmp_path / "one", **common)
    for share in range(shares):
        run_share(
            prompts(40), Engine(), config, directory=tmp_path / "many", share=share, shares=shares, **common
        )
    rest = Engine()
    run(prompts(40), rest, config, directory=tmp_path / "many", **common)
    assert contents(tmp_path / "one") == contents(tmp_path / "many")
    if shares == 1:
        assert rest.calls == 0  # the share was the whole


def test_what_was_sampled_ahead_of_the_end_goes(tmp_path: Path) -> None:
    config = SampleConfig(temperature=[0.0], max_new_tokens=4, tokens=30, batch_size=1)
    shards = list(plan(prompts(40), config, held_out=1, seed=0))
    sample_shard(shards[-1], Engine(), config, tmp_path, len(shards) - 1, lambda count: None)
    assert len(list(tmp_path.glob("*.parquet"))) == 1
    drop_shards_after(tmp_path, len(shards) - 1)
    assert len(list(tmp_path.glob("*.parquet"))) == 1  # it is not after itself
    run(prompts(40), Engine(), config, held_out=1, seed=0, directory=tmp_path, on_tokens=lambda count: None)
    assert not (tmp_path / f"samples-{len(shards) - 1:05d}.parquet").exists()


# --- a process without a sample ---


def test_a_share_without_samples_takes_part_with_zero_gradients(
    make_samples: Callable[..., Samples], make_llama: Callable[..., LlamaForCausalLM]
) -> None:
    from distill.training_step import loss_forward

    batch = collate(make_samples(6), [0], 2).without_tokens()
    assert batch.signals is not None and len(batch.signals) == 0 and not batch.completion_mask.any()
    model = make_llama(4, tied=False).train().requires_grad_(True)
    loss, overlap, tokens = loss_forward(
        model,
        name="forward_kl",
        eta=3.0,
        beta=0.5,
        temperature=1.0,
        share=None,
        target_head=head_of(model).detached(),
        rows=None,
        input_ids=batch.input_ids,
        completion_mask=batch.completion_mask,
        hidden=batch.signals.hidden,
        logsumexp=batch.signals.logsumexp,
    )
    loss.backward()
    assert loss == 0 and overlap == 0 and tokens == 0
    assert all(
        parameter.grad is not None and not parameter.grad.any()
        for parameter in model.model.layers.parameters()
    )
    assert model.lm_head.weight.grad is not None and not model.lm_head.weight.grad.any()


# --- for real: processes over gloo ---


def test_a_process_that_ends_without_a_word_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = read_processes("ddp")
    assert processes is not None
    real = subprocess.Popen

    def broken(words: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", "import sys; sys.exit('lost my way')"], **options)

    monkeypatch.setattr(subprocess, "Popen", broken)
    with pytest.raises(RuntimeError, match="lost my way"):
        run_stage_in(processes, "train", load_recipe("smoke"), tmp_path, tmp_path, lambda message: None)


def command(runs: Path, *words: str) -> list[str]:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    return [sys.executable, "-m", "distill.cli", "train", "smoke", "--json", *settings, *words]


def environment(runs: Path) -> dict[str, str]:
    # one thread each: the sums of one process with two threads round otherwise
    return {**os.environ, "DISTILL_RUNS": str(runs), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def train(runs: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        command(runs, *words), capture_output=True, text=True, env=environment(runs), cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def stage(answer: dict[str, Any], name: str) -> Path:
    (found,) = [Path(each["directory"]) for each in answer["stages"] if each["name"] == name]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("alone"))


def check_equal(alone: dict[str, Any], shared: dict[str, Any], tolerance: float) -> None:
    """The same keys, the same samples byte for byte, the same training up to rounding; one run a stage."""
    assert [each["key"] for each in alone["stages"]] == [each["key"] for each in shared["stages"]]
    files = [
        json.loads((stage(answer, "sample") / "manifest.json").read_text()) for answer in (alone, shared)
    ]
    assert files[0]["files"] == files[1]["files"]
    assert len([name for name in files[0]["files"] if name.endswith(".parquet")]) > 4
    one, two = (
        json.loads((stage(answer, "train") / "training.json").read_text()) for answer in (alone, shared)
    )
    assert one["steps"] == two["steps"] > 5 and one["tokens"] == two["tokens"]
    for mine, theirs in zip(one["history"], two["history"], strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance)
    ours, others = (
        load_file(stage(answer, "train") / "drafter" / "model.safetensors") for answer in (alone, shared)
    )
    assert list(ours) == list(others)
    for name, value in ours.items():
        torch.testing.assert_close(others[name], value, rtol=0, atol=tolerance, msg=name)
    assert not (stage(shared, "train") / "checkpoints").exists()

    from mlflow import MlflowClient

    for answer in (alone, shared):
        client = MlflowClient(f"sqlite:///{stage(answer, 'train').parents[1] / 'mlflow.db'}")
        (experiment,) = client.search_experiments(filter_string="name != 'Default'")
        runs = client.search_runs([experiment.experiment_id])
        assert sorted(found.data.tags.get("stage", "") for found in runs) == ["", "sample", "train"]
        (trained,) = [found for found in runs if found.data.tags.get("stage") == "train"]
        history = client.get_metric_history(trained.info.run_id, "train/loss")
        steps = [metric.step for metric in history]
        assert len(steps) == len(set(steps)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_processes_come_to_what_one_does(name: str, alone: dict[str, Any], tmp_path: Path) -> None:
    check_equal(alone, train(tmp_path, "--accelerate", name), 1e-4)


@pytest.mark.slow
def test_two_processes_draw_the_same_text_of_the_drafter(tmp_path: Path) -> None:
    words = ("--set", "train.on_policy={share: 0.5, start: 0.3}")
    check_equal(train(tmp_path / "one", *words), train(tmp_path / "two", *words, "--accelerate", "ddp"), 1e-4)


@pytest.mark.slow
def test_sharded_weights_draft_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, "--accelerate", "fsdp2", "--set", "train.on_policy={share: 0.5}"),
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        cwd=ROOT,
    )
    assert done.returncode == 2 and "leave FSDP out" in json.loads(done.stdout)["error"]


CHOSEN = ("--set", "train.learnable_share=0.4", "--set", "train.signal=live")


@pytest.fixture(scope="module")
def chosen_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("chosen"), *CHOSEN)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_processes_choose_tokens_as_one_does(
    name: str, chosen_alone: dict[str, Any], tmp_path: Path
) -> None:
    """With a live target: replicated (ddp), or its layers sharded like the drafter's (fsdp2).

    A choice is no smooth function: where two tokens nearly tie, rounding decides, and the weights part a
    little. Which tokens are chosen from the same numbers is tested to the last one in test_data_selection.py.
    """
    shared = train(tmp_path, *CHOSEN, "--accelerate", name)
    one, two = (
        json.loads((stage(answer, "train") / "training.json").read_text())
        for answer in (chosen_alone, shared)
    )
    assert one["steps"] == two["steps"] and one["tokens"] == two["tokens"]
    for mine, theirs in zip(one["history"], two["history"], strict=True):
        assert mine["sampled"] == pytest.approx(theirs["sampled"], abs=5e-3)
    assert one["history"][-1]["sampled"] > one["history"][0]["sampled"] + 0.02
    assert not list(stage(shared, "train").glob("reference*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_killed_processes_resume(name: str, alone: dict[str, Any], tmp_path: Path) -> None:
    started = subprocess.Popen(
        command(tmp_path, "--accelerate", name),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(tmp_path),
        cwd=ROOT,
    )
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("smoke/train-*/checkpoints/checkpoint-*/complete.json")):
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    started.send_signal(signal.SIGKILL)
    started.wait()
    (checkpoints,) = tmp_path.glob("smoke/train-*/checkpoints")
    deadline = time.monotonic() + 60
    while workers(tmp_path):  # nobody listens, so they end by themselves
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert list(checkpoints.glob("checkpoint-*/complete.json"))
    answer = train(tmp_path, "--accelerate", name)
    assert [each["resumed"] for each in answer["stages"] if each["name"] == "train"] == [True]
    check = SimpleNamespace(**answer)
    one, two = (
        load_file(stage(each, "train") / "drafter" / "model.safetensors") for each in (alone, vars(check))
    )
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=0, atol=1e-4, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "code", "when"),
    [
        (signal.SIGTERM, 143, "train-*/checkpoints/checkpoint-*/complete.json"),
        (signal.SIGINT, 130, "sample-*/samples-*.parquet"),
    ],
)
def test_a_signal_ends_all_processes_in_order_and_no_step_is_done_twice(
    sent: int, code: int, when: str, tmp_path: Path
) -> None:
    words = ("--set", "train.tokens=20000", "--set", "sample.tokens=3000", "--accelerate", "ddp")
    started = subprocess.Popen(
        command(tmp_path, *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tmp_path),
        cwd=ROOT,
    )
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob(f"smoke/{when}")):
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    started.send_signal(sent)
    out, errors = started.communicate(timeout=100)
    assert started.returncode == code, errors
    assert "run the same command to resume" in json.loads(out)["error"] and "Traceback" not in errors
    assert not workers(tmp_path), "none outlives the command"
    before, training = logged_steps(tmp_path), "checkpoints" in when
    if training:
        saved = tmp_path.glob("smoke/train-*/checkpoints/checkpoint-*/complete.json")
        assert max(int(path.parent.name.partition("-")[2]) for path in saved) >= max(before)
    answer = train(tmp_path, *words)
    assert [each["resumed"] for each in answer["stages"]] == [not training, training]
    steps = logged_steps(tmp_path)
    assert len(steps) == len(set(steps)) > len(before), "no step is done twice"


def logged_steps(runs: Path) -> list[int]:
    """The training steps that MLflow was told a loss of, over all runs."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name != 'Default'")
    return [
        metric.step
        for found in client.search_runs([experiment.experiment_id])
        for metric in client.get_metric_history(found.info.run_id, "train/loss")
    ]


@pytest.mark.slow
def test_a_second_signal_ends_the_command_at_once_and_the_processes_soon(tmp_path: Path) -> None:
    errors = tmp_path / "errors.log"
    with errors.open("w") as stream:
        started = subprocess.Popen(
            command(tmp_path, "--accelerate", "ddp"),
            stdout=subprocess.DEVNULL,
            stderr=stream,
            env=environment(tmp_path),
            cwd=ROOT,
        )
    deadline = time.monotonic() + 300
    while not workers(tmp_path):
        assert started.poll() is None and time.monotonic() < deadline, errors.read_text()
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    started.send_signal(signal.SIGTERM)
    assert started.wait(timeout=30) == -signal.SIGTERM
    deadline = time.monotonic() + 60
    while workers(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def workers(runs: Path) -> list[str]:
    # -ww: whole lines, also where no terminal tells how wide
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "distill.worker" in line and str(runs) in line]


@pytest.mark.slow
def test_a_users_mistake_inside_a_process_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, "--accelerate", "ddp", "--set", "train.learning_rate=1e30"),
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        cwd=ROOT,
    )
    assert done.returncode == 2 and "lower train.learning_rate" in json.loads(done.stdout)["error"]
    assert "Traceback" not in done.stderr
