"""The engine `vllm` against a module with the recorded names and shapes of vLLM's offline API.

No GPU and no vLLM here: this proves what is passed and how answers are read, not that vLLM runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from data.engines import Completion, Failure
from data.errors import UserError
from data.vllm_engine import VllmConfig, VllmEngine
from tests.data.fake_server import EOS, requests


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Installs the fake; what it was given, and the answers it will give."""
    seen = SimpleNamespace(options={}, params=[], answer=lambda prompt: ([prompt[1], EOS], "stop"))

    class SamplingParams:
        def __init__(self, **options: Any) -> None:
            self.__dict__.update(options)

    class LLM:
        def __init__(self, **options: Any) -> None:
            seen.options = options

        def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> list[Any]:
            seen.params = sampling_params
            outputs = []
            for prompt in prompts:
                ids = prompt["prompt_token_ids"]
                tokens, finish = seen.answer(ids)
                answer = SimpleNamespace(token_ids=tuple(tokens), finish_reason=finish)
                outputs.append(SimpleNamespace(prompt_token_ids=ids, outputs=[answer]))
            return outputs

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return seen


def engine(**settings: Any) -> VllmEngine:
    return VllmEngine(Path("/m"), "bfloat16", VllmConfig(**settings), max_length=64, eos_ids=(EOS,))


def test_parallelism_is_passed_on_and_the_models_own_sampling_defaults_are_not_used(
    vllm: SimpleNamespace,
) -> None:
    engine(tensor_parallel_size=4, pipeline_parallel_size=2)
    assert vllm.options == {
        "model": "/m",
        "dtype": "bfloat16",
        "max_model_len": 64,
        "generation_config": "vllm",
        "trust_remote_code": False,
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 2,
        "gpu_memory_utilization": 0.9,
    }


def test_each_prompt_has_its_own_seed_and_answers_keep_their_order(vllm: SimpleNamespace) -> None:
    heard: list[int] = []
    asked = requests(3)
    done = engine().sample(asked, temperature=0.7, max_new_tokens=8, on_tokens=heard.append)
    assert done == [Completion([request.prompt[1], EOS], "stop", None) for request in asked]
    assert sum(heard) == 6
    assert [params.seed for params in vllm.params] == [request.seed % 2**31 for request in asked]
    assert all((params.temperature, params.max_tokens) == (0.7, 8) for params in vllm.params)
    assert vllm.params[0].stop_token_ids == [EOS]


@pytest.mark.parametrize("answer", [([], "length"), ([5], "abort")])
def test_an_answer_that_was_cut_off_fails(vllm: SimpleNamespace, answer: Any) -> None:
    vllm.answer = lambda prompt: answer if prompt[1] == 4 else ([5, EOS], "stop")
    done = engine().sample(requests(3), temperature=0.0, max_new_tokens=8, on_tokens=lambda count: None)
    assert [isinstance(result, Failure) for result in done] == [False, True, False]


def test_without_vllm_the_message_says_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match="run `vllm serve` in an environment of its own"):
        engine()
