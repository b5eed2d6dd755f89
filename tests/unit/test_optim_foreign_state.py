"""State as third parties' optimizers have it: beside the parameters, and in lists and tables."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from support.offload import MODES, Run
from trainer.checkpoint.storage import save_tensors
from trainer.errors import CheckpointError, TrainingError
from trainer.optim.offload.state import CPUOffloadOptimizer
from trainer.optim.state import OptimizerState


class Odd(Optimizer):
    """Counters that belong to no parameter (MADGRAD has "k"), a list of tensors (SOAP has them), a table with a tuple."""

    def __init__(self, params, lr: float = 0.01, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0])
            self.state["calls"] = 0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, group["lr"])
        self.state["k"] += 1
        self.state["calls"] += 1

    def move(self, p: Tensor, lr: float) -> None:
        state = self.state[p]
        if not state:
            state["last"] = torch.zeros_like(p)
            state["sums"] = [torch.zeros_like(p), [], torch.zeros(3)]
            state["table"] = {"pair": (torch.ones_like(p), 1.0)}
        state["sums"][0].mul_(0.9).add_(p.grad).add_(state["last"], alpha=0.1)
        state["sums"][2].add_(1.0)
        state["last"].copy_(p.grad)
        scale, power = state["table"]["pair"]
        scale.mul_(1.1)
        state["table"]["pair"] = (scale, power * 0.9)
        rate = lr * (self.state["k"].item() + 1) ** 0.5 * (self.state["calls"] + 1) * power
        p.add_(state["sums"][0] * scale * state["sums"][2].sum(), alpha=-rate)


def odd(groups) -> Optimizer:
    optimizer = Odd(groups)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


@pytest.mark.parametrize("resumed", MODES)
@pytest.mark.parametrize("saved", ["none", "full"])
def test_it_is_resumed_exactly(resumed, saved, tmp_path):
    run = Run(saved, odd)
    run.train(3)
    save_tensors(tmp_path, run.app.state_dict())
    assert run.app.leaves()["optimizer"]["shared"] == {"calls": 3}
    run.train(2)
    other = Run(resumed, odd, seed=1)
    other.app.load(tmp_path)
    assert type(other.optimizer.state[other.optimizer.param_groups[0]["params"][0]]["sums"]) is list
    other.train(2)
    assert other.bits() == run.bits()
    other.app.load(tmp_path)  # into state that is there already
    other.train(2)
    assert other.bits() == run.bits()


@pytest.mark.parametrize("mode", ["optimizer", "full"])
def test_what_belongs_to_no_parameter_advances_once_per_step_for_all_chunks(mode):
    run, reference = Run(mode, odd, transfer="copy", chunk_bytes=300), Run("none", odd)
    run.train(3), reference.train(3)
    assert len(run.optimizer._chunks) >= 3
    assert run.bits() == reference.bits()
    again = Run(mode, odd, transfer="copy", chunk_bytes=300, seed=1)
    again.optimizer.load_state_dict(run.optimizer.state_dict())
    assert again.optimizer.state["k"].item() == again.optimizer.state["calls"] == 3


class Coupled(Odd):
    """Its counter depends on all gradients."""

    def move(self, p: Tensor, lr: float) -> None:
        super().move(p, lr)
        self.state["k"] += int(p.grad.sum())  # type: ignore[union-attr]


def test_what_couples_the_chunks_is_found_out():
    pool = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = CPUOffloadOptimizer(Coupled(pool), transfer="copy", chunk_bytes=1)
    for step in range(2):
        for number, parameter in enumerate(pool):
            parameter.grad = torch.full((4,), float(number))
        if step == 0:
            optimizer.step()  # its state is not there yet: one chunk
        else:
            with pytest.raises(TrainingError, match="Coupled changes state that belongs to no parameter"):
                optimizer.step()


def test_a_name_that_a_checkpoint_cannot_hold_is_refused():
    run = Run("none", odd)
    run.optimizer.state[run.optimizer.param_groups[0]["params"][0]]["a.b"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"'a.b'.*without a dot"):
        OptimizerState(run.optimizer).state_dict()
