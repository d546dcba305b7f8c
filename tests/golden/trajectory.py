"""A fixed tiny training run, 20 steps on a CPU: its losses and held-out acceptances.

`python tests/golden/trajectory.py` records them anew beside this file; do so only when a change of numbers is
meant, and say why in the commit. The models come from numpy's seeded generator, so they do not depend on how
torch or transformers initialise.
"""

import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.records import SampleRecord, Samples, collate
from distill.drafter import DraftConfig, InitConfig, build_drafter
from distill.loss_config import LossConfig
from distill.models import Target
from distill.train import TrainConfig, train_drafter
from evaluation.signals import target_signals

GOLDEN = Path(__file__).with_name("trajectory.json")
LOSSES = ("forward_kl", "lk_hybrid")
STEPS = 20
_VOCAB, _HIDDEN, _EOS = 96, 32, 2


def trajectory(loss: str, out_dir: Path) -> dict[str, list[float]]:
    """The loss of every step and the held-out checks of one run."""
    target = _target()
    samples = _samples(target)
    counts = torch.bincount(
        torch.tensor([id_ for record in samples for id_ in record.input_ids]), minlength=_VOCAB
    )
    config = DraftConfig(init=InitConfig(**{"from": "target"}, layers=[0, 3]), vocab_size=48)
    drafter = build_drafter(config, target, counts, out_dir, lambda name: Path(name))
    losses: dict[int, float] = {}

    def report(step: int, steps: int, tokens: int, measures: dict[str, float]) -> None:
        assert steps == STEPS
        # the trainer logs after the step is reported: what is known at step n is the loss of step n - 1
        if "loss" in measures:
            losses[step - 1] = measures["loss"]

    train = [record for record in samples if record.split == "train"]
    per_epoch = sum(sum(record.completion_mask) for record in train)
    result = train_drafter(
        drafter,
        target,
        samples,
        # 24 training samples in batches of 6: five epochs are 20 steps
        TrainConfig(loss=LossConfig(name=loss), tokens=5 * per_epoch, learning_rate=3e-3, batch_size=6),  # type: ignore[arg-type]
        temperature=1.0,
        seed=0,
        out_dir=out_dir,
        report=report,
        metric="sampled",
    )
    assert sorted(losses) == list(range(1, STEPS))
    return {
        "loss": [losses[step] for step in sorted(losses)],
        **{name: [check[name] for check in result.history] for name in ("sampled", "argmax", "greedy")},
    }


def _target() -> Target:
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=_HIDDEN,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=_EOS,
        pad_token_id=_EOS,
    )
    model = LlamaForCausalLM(config).float().eval()
    generator = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.from_numpy(0.2 * generator.standard_normal(tuple(parameter.shape))))
            else:
                assert "norm" in name
                parameter.fill_(1)
    core: Any = Tokenizer(models.WordLevel({f"w{index}": index for index in range(_VOCAB)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="w1", eos_token="w2", pad_token="w2")
    return Target(model.requires_grad_(False), tokenizer, (_EOS,), _EOS, "golden", "golden")


def _samples(target: Target) -> Samples:
    generator = np.random.default_rng(1)
    records = []
    for index in range(30):
        prompt, completion = int(generator.integers(3, 9)), int(generator.integers(4, 12))
        records.append(
            SampleRecord(
                prompt_id=f"p{index}",
                task="json",
                template="t",
                split="select" if index % 5 == 0 else "train",
                seen_template=True,
                sample_index=0,
                temperature=1.0,
                seed=index,
                input_ids=[*generator.integers(3, _VOCAB, prompt + completion - 1).tolist(), _EOS],
                completion_mask=[False] * prompt + [True] * completion,
                finish_reason="stop",
            )
        )
    signals = [
        target_signals(target.model, collate(Samples([record], None), [0], _EOS), 1.0) for record in records
    ]
    return Samples(records, [(one, 0) for one in signals])


def main() -> None:
    recorded: dict[str, Any] = {
        "environment": {
            "machine": platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    }
    for loss in LOSSES:
        with tempfile.TemporaryDirectory() as folder:
            recorded[loss] = trajectory(loss, Path(folder))
    GOLDEN.write_text(json.dumps(recorded, indent=2) + "\n")


if __name__ == "__main__":
    main()
