"""A frozen target with its layers sharded over two processes (gloo): the same states, half of the weights."""

from pathlib import Path

import pytest
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.tensor import DTensor

from distill.sharding import shard_target
from evaluation.head import head_of
from evaluation.signals import completion_states
from tests.distill.conftest import tiny_llama


def one_of_two(rank: int, meeting_place: str) -> None:
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=2)
    model = tiny_llama(0).requires_grad_(False)
    ids = torch.arange(6 + rank, 46 + rank).reshape(2, 20)  # texts of its own
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, 8:] = True
    states = completion_states(model, ids, mask)
    logits = model(ids).logits[:, 7:-1].reshape(len(states), -1)
    whole = sum(weight.numel() for weight in model.model.layers.parameters())

    shard_target(model, torch.device("cpu"))
    for _ in range(2):
        layers = list(model.model.layers.parameters())
        assert all(isinstance(weight, DTensor) for weight in layers)
        assert 2 * sum(weight.to_local().numel() for weight in layers) == whole  # type: ignore[attr-defined]
        assert type(model.get_input_embeddings().weight) is torch.nn.Parameter  # whole, and still the head's
        assert model.get_input_embeddings().weight is model.lm_head.weight
        with torch.no_grad():
            found = completion_states(model, ids, mask)
        torch.testing.assert_close(found, states)
        torch.testing.assert_close(head_of(model).logits(found), logits)
    destroy_process_group()


@pytest.mark.slow
def test_two_processes_hold_a_target_between_them(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(one_of_two, args=(str(tmp_path / "meeting"),), nprocs=2)
