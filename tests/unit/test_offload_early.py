"""Mode "full" without a norm to wait for: chunks are stepped while the backward pass goes on, with the same bits."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.lanes import SimulatedDevice
from support.offload import Run, adamw, groups_of
from trainer.core.transfer import HostArena
from trainer.data.batch import GlobalBatch, MicroBatch
from trainer.errors import TrainingError
from trainer.models.state import ModelState
from trainer.optim.offload import native
from trainer.optim.offload.base import named_parameters
from trainer.optim.offload.build import build_offload
from trainer.optim.offload.full import FullCPUOffloadOptimizer
from trainer.optim.offload.masters import HostMasters
from trainer.train.step import train_step

SMALL = {"chunk_bytes": 300}


def weights(run: Run) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named_parameters(run.optimizer).items()}


def changed(run: Run, before: dict[str, Tensor]) -> set[str]:
    return {name for name, now in weights(run).items() if not torch.equal(now, before[name])}


# --- the same bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transfer", ["auto", "copy"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw without kernel", "sgd", "momentum", "sign_sgd"])
def test_same_bits_as_without_offload(optimizer, transfer, dtype, accumulate, monkeypatch):
    if optimizer == "adamw without kernel":
        monkeypatch.setenv(native.SWITCH, "0")
    optimizer = optimizer.split()[0]
    kwargs: dict[str, Any] = {"dtype": dtype, "accumulate": accumulate}
    early = Run("full", optimizer, early=True, transfer=transfer, **SMALL, **kwargs)
    reference = Run("none", optimizer, **kwargs)
    for step in range(4):
        assert early.train() == reference.train()
        assert early.bits() == reference.bits(), f"step {step + 1}"
        masters = early.optimizer.masters.masters
        assert all(torch.equal(p, masters[name].to(dtype)) for name, p in early.model.named_parameters())


@pytest.mark.parametrize("transfer", ["auto", "copy"])
def test_weights_are_updated_before_the_step_is_called(transfer):
    """All but the chunk with `spare`, which never has a gradient."""
    run = Run("full", early=True, transfer=transfer, chunk_bytes=60)
    before = weights(run)
    run.backward()
    late = next(chunk for chunk in run.optimizer._chunks if any(
        p is run.optimizer.masters.masters["spare"] for p in chunk.parameters(run.optimizer.param_groups)
    ))  # fmt: skip
    late = {run.optimizer._name_of[id(p)] for p in late.parameters(run.optimizer.param_groups)}
    assert changed(run, before) == before.keys() - late
    assert len(before.keys() - late) >= 3
    run.optimizer.step()
    assert changed(run, before) == before.keys() - {"spare"}


def test_the_thread_steps_while_the_backward_pass_goes_on():
    """The first layer's gradient is made only after the last layer's chunk is stepped."""
    run, stepped = Run("full", early=True, **SMALL), threading.Event()
    step_chunk = run.optimizer._step_chunk

    def spy(*args: Any, **kwargs: Any) -> None:
        step_chunk(*args, **kwargs)
        assert threading.current_thread().name.startswith("update")
        stepped.set()

    run.optimizer._step_chunk = spy
    seen = []
    run.model.first.weight.register_hook(lambda gradient: seen.append(stepped.wait(30)))
    run.backward()
    run.optimizer.synchronize()
    assert seen == [True]


def test_a_parameter_whose_gradient_came_in_an_earlier_micro_step_only():
    def train(mode: str, early: bool) -> dict[str, Any]:
        run = Run(mode, "momentum", accumulate=2, early=early, **({} if mode == "none" else SMALL))
        for _ in range(3):
            batches = list(run.micro_batches())
            ((run.model(batches[0][0]) - batches[0][1]).square().sum() / 12).backward()
            if early:
                assert run.optimizer.begin_update()
            run.model.second(torch.ones(2, 10)).sum().backward()  # the other layers have no gradient here
            run.clip()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.step += 1
        return run.bits()

    assert train("full", True) == train("none", False)


def test_the_lr_moves_and_groups_are_the_live_ones():
    run, reference = Run("full", early=True, **SMALL), Run("none")
    held = run.optimizer.param_groups
    for lr in (0.05, 0.001):
        for either in (run, reference):
            for group in either.optimizer.param_groups:
                group["initial_lr"] = lr
            either.schedule.apply(either.step)
            either.train()
        assert run.bits() == reference.bits()
    assert run.optimizer.param_groups is held


@pytest.mark.parametrize("transfer", ["auto", "copy"])
def test_half_a_cycle_goes_on_in_another_run(transfer):
    """As after a save in the middle of a cycle: its gradients, then the last micro-step with the update in it."""
    kwargs: dict[str, Any] = {"accumulate": 2, "early": True, "transfer": transfer} | SMALL
    whole, resumed, reference = Run("full", **kwargs), Run("full", **kwargs), Run("none", accumulate=2)
    reference.train()
    for run in (whole, resumed):
        first, second = run.micro_batches()
        if run is whole:
            ((run.model(first[0]) - first[1]).square().sum() / 12).backward()
            taken = {name: gradient.clone() for name, gradient in run.optimizer.gradients().items()}
        else:
            run.optimizer.set_gradients(taken)
        assert run.optimizer.begin_update()
        ((run.model(second[0]) - second[1]).square().sum() / 12).backward()
        run.clip()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.step = 1
        assert run.bits() == reference.bits()


def test_state_dict_and_resume_after_early_updates(tmp_path):
    from trainer.checkpoint.storage import save_tensors

    first = Run("full", early=True, **SMALL)
    first.train(3)
    save_tensors(tmp_path, first.app.state_dict())
    for mode in ("none", "full"):
        second = Run(mode, seed=9, early=True, **({} if mode == "none" else SMALL))
        second.app.load(tmp_path)
        third = Run("none")
        third.train(3)
        second.train(2), third.train(2)
        assert second.bits() == third.bits()


@pytest.mark.parametrize("slot_bytes", [64, 512])
def test_steps_are_right_whatever_the_copies_do(slot_bytes):
    reference = Run("none", dtype=torch.bfloat16, accumulate=2)
    norms, wanted = reference.train(3), None
    for seed in range(8):
        run = Run("none", accumulate=2, early=True)
        run.model.compute_dtype = torch.bfloat16
        lanes, arena = SimulatedDevice(seed), HostArena(torch.device("cpu"), block_bytes=4096)
        masters = HostMasters(
            run.model.named_parameters(),
            arena,
            copies=True,
            compute_dtype=torch.bfloat16,
            slot_bytes=slot_bytes,
            lanes=lanes,
        )
        masters.cast_model(run.model)
        run.optimizer = FullCPUOffloadOptimizer(
            adamw, groups_of(run.model), masters, arena, transfer="copy", lanes=lanes, **SMALL
        )
        assert run.train(3) == norms, seed
        wanted = wanted or {name: p.tolist() for name, p in named_parameters(reference.optimizer).items()}
        assert {name: p.tolist() for name, p in named_parameters(run.optimizer).items()} == wanted, seed
        for name, parameter in run.model.named_parameters():
            assert parameter.tolist() == masters.masters[name].bfloat16().tolist(), (seed, name)


# --- where nothing may begin ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["muon", "group_step", "lazy"])
def test_rules_that_may_look_further_wait_for_the_whole_gradient(optimizer):
    run, reference = Run("full", optimizer, early=True, **SMALL), Run("none", optimizer)
    assert not run.optimizer.begin_update()
    before = weights(run)
    run.backward()
    assert changed(run, before) == set()
    run.clip(), run.optimizer.step(), run.optimizer.zero_grad()
    run.step = 1
    reference.train()
    assert run.bits()["leaves"]["optimizer"] == reference.bits()["leaves"]["optimizer"]
    for mode in ("none", "optimizer"):
        optimizer_of_mode = Run(mode).optimizer
        assert mode == "none" or not optimizer_of_mode.begin_update()


@pytest.mark.parametrize("whose", ["wrapper", "inner", "everyone"])
def test_hooks_before_a_step_come_before_all_of_it(whose):
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    run = Run("full", early=True, **SMALL)
    register = {
        "wrapper": run.optimizer.register_step_pre_hook,
        "inner": run.optimizer.inner.register_step_pre_hook,
        "everyone": register_optimizer_step_pre_hook,
    }[whose]
    handle = register(lambda *_: None)
    try:
        assert not run.optimizer.begin_update()
    finally:
        handle.remove()
    assert run.optimizer.begin_update()


def test_clipping_comes_too_late_once_it_has_begun():
    run = Run("full", early=True, max_norm=0.5, **SMALL)
    run.backward()
    with pytest.raises(TrainingError, match="cannot be clipped any more"):
        run.clip()


def test_gradients_that_were_clipped_and_kept_are_clipped_before_it_begins():
    run, reference = Run("full", early=True, max_norm=0.05, **SMALL), Run("none", max_norm=0.05)
    for either in (run, reference):
        either.early = False
        either.backward()
        either.clip()  # the first micro-step alone; more is added to what it left
        if either is run:
            assert run.optimizer.begin_update()
        either.backward()
        either.optimizer.step()
        either.optimizer.zero_grad()
        either.step = 1
    assert run.bits() == reference.bits()


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_an_exception_in_the_thread_is_raised_and_nothing_goes_on():
    run = Run("full", early=True, **SMALL)

    def fail(*_: Any) -> None:
        raise RuntimeError("no more")

    run.optimizer._step_natively = fail
    run.backward()
    with pytest.raises(RuntimeError, match="no more"):
        run.clip()
    for use in (run.optimizer.step, run.optimizer.state_dict, run.bits, run.optimizer.begin_update):
        with pytest.raises(TrainingError, match="given up"):
            use()


def test_an_update_that_was_given_up_cannot_be_gone_on_from_or_saved():
    run = Run("full", early=True, **SMALL)
    run.backward()
    assert not run.optimizer.is_torn
    run.optimizer.zero_grad()
    assert run.optimizer.is_torn
    with pytest.raises(TrainingError, match="go on from a checkpoint"):
        run.app.state_dict()
    run = Run("full", early=True, **SMALL)
    run.optimizer.begin_update()
    run.optimizer.zero_grad()  # before any gradient was there: nothing has happened
    assert not run.optimizer.is_torn
    reference = Run("none")
    assert run.train(2) == reference.train(2)
    assert run.bits() == reference.bits()


class Twice(nn.Module):
    """A layer that reentrant checkpointing runs backward through twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)  # type: ignore[assignment]
        return x


class Detached(nn.Module):
    """The second layer's weight is read by the first one as well, without a gradient of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.linear(self.a(x), self.b.weight.detach()))


def built(model: nn.Module) -> FullCPUOffloadOptimizer:
    optimizer = build_offload("full", adamw, groups_of(model), model, ModelState(model), chunk_bytes=1).optimizer
    assert isinstance(optimizer, FullCPUOffloadOptimizer)
    return optimizer


def test_a_gradient_in_two_parts_is_an_error():
    model = Twice()
    optimizer = built(model)
    x = torch.randn(4, 6, requires_grad=True)
    model(x).sum().backward()  # one after the other they are summed
    optimizer.step(), optimizer.zero_grad()
    seen = threading.Event()  # until then the weight is not written: autograd would find that, with words of its own
    step_chunk = optimizer._step_chunk
    optimizer._step_chunk = lambda *args, **kwargs: (seen.wait(30), step_chunk(*args, **kwargs))  # type: ignore
    optimizer.begin_update()
    with pytest.raises(TrainingError, match="came in two parts.*max_norm"):
        model(x).sum().backward()
    seen.set()


def test_a_weight_that_is_read_after_its_update_is_an_error_and_no_wrong_gradient():
    model = Detached()
    optimizer = built(model)
    done = threading.Event()
    step_chunk = optimizer._step_chunk
    optimizer._step_chunk = lambda *args, **kwargs: (step_chunk(*args, **kwargs), done.set())  # type: ignore
    hidden = []
    model.b.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    optimizer.begin_update()
    loss = model(torch.randn(4, 6)).sum()
    hidden[0].register_hook(
        lambda gradient: done.wait(30) and None
    )  # the weight is written before the backward goes on
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- in the training step -------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(ids))))


def loss_of(model: nn.Module, micro: MicroBatch, factor: float = 1.0) -> Tensor:
    return F.cross_entropy(model(micro.input_ids).flatten(0, 1), micro.labels.flatten(), reduction="sum") * factor


def one_step(mode: str, *, early: bool, max_norm: float | None = None, factor: float = 1.0) -> Any:
    """Two micro-batches. Returns result, model, optimizer and the parameters that had moved before `step` was called."""
    model = Model()
    options = {} if mode == "none" else SMALL
    optimizer = build_offload(mode, adamw, groups_of(model), model, ModelState(model), **options).optimizer  # type: ignore[arg-type]
    before = {name: p.detach().clone() for name, p in named_parameters(optimizer).items()}
    moved: set[str] = set()
    step = optimizer.step

    def spy(closure: Any = None) -> Any:
        moved.update(n for n, p in named_parameters(optimizer).items() if not torch.equal(p, before[n]))
        return step(closure)

    optimizer.step = spy  # type: ignore[method-assign]
    micros = []
    for seed in range(2):
        ids = torch.randint(0, 16, (2, 9), generator=torch.Generator().manual_seed(seed))
        none = torch.zeros(2, 8, dtype=torch.int32)
        micros.append(MicroBatch(ids[:, :-1], ids[:, 1:], none.long(), none, [[""]] * 2))
    result = train_step(
        model,
        optimizer,
        lambda model, micro: loss_of(model, micro, factor),
        GlobalBatch(0, 0, False, micros, 4, 4, 32, 32),
        step=0,
        seed=0,
        rank=0,
        device=torch.device("cpu"),
        max_norm=max_norm,
        early=early,
    )
    return result, model, optimizer, moved


def test_the_training_step_lets_it_begin_in_the_last_micro_step():
    expected, reference, _, _ = one_step("none", early=True)
    result, model, _, moved = one_step("full", early=True)
    assert result == expected
    assert moved == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize(("early", "max_norm"), [(False, None), (True, 0.1), (True, 1e9)])
def test_the_training_step_waits_where_it_must(early, max_norm):
    expected, reference, _, _ = one_step("none", early=early, max_norm=max_norm)
    result, model, _, moved = one_step("full", early=early, max_norm=max_norm)
    assert moved == set()
    assert result == expected
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_a_step_that_is_not_finite():
    """Skipped as ever where it waits; where it does not, it says so and cannot be gone on from."""
    result, model, optimizer, _ = one_step("full", early=False, factor=float("nan"))
    assert not result.finite and not optimizer.is_torn
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), Model().parameters(), strict=True))
    result, _, optimizer, _ = one_step("full", early=True, factor=float("nan"))
    assert not result.finite and optimizer.is_torn
