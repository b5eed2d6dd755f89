"""A checkpoint saved under any offload mode resumes under any other, with the same bits from there on."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from support.offload import MODES, Run
from trainer.checkpoint.manager import CheckpointManager
from trainer.config.train import CkptConfig, ResumeConfig
from trainer.optim.offload.base import named_parameters
from trainer.optim.schedule import Schedule

PAIRS = list(itertools.product(MODES, MODES))
WARMUP = Schedule("linear", 20, warmup_steps=4)
COPY = {"transfer": "copy", "chunk_bytes": 300}


def manager(run: Run, folder: Path) -> CheckpointManager:
    return CheckpointManager(folder, CkptConfig(), run.app, describe=lambda: {"config": {}})


def save(run: Run, folder: Path) -> Path:
    return manager(run, folder).save(run.step)


def load(run: Run, folder: Path) -> Run:
    checkpoints = manager(run, folder)
    checkpoint = checkpoints.choose(ResumeConfig())
    assert checkpoint is not None
    checkpoints.load(checkpoint)
    return run


def options(mode: str) -> dict[str, Any]:
    """Offloaded runs exchange data through buffers here, as on a GPU."""
    return {} if mode == "none" else COPY


# --- modes interchange ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum", "muon", "group_step"])
@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_continues_as_if_never_stopped(tmp_path, saved, resumed, optimizer):
    kwargs = {"schedule": WARMUP, "accumulate": 3, "max_norm": 0.5}
    first = Run(saved, optimizer, **options(saved), **kwargs)
    first.train(3)
    save(first, tmp_path)
    second = load(Run(resumed, optimizer, seed=9, **options(resumed), **kwargs), tmp_path)
    assert second.bits() == first.bits()
    for _ in range(3):
        assert second.train() == first.train()
        assert second.bits() == first.bits()


@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_nothing_is_rounded_to_the_compute_dtype(tmp_path, saved, resumed):
    """Weights near 1 and small updates: in bf16 they would be lost on the way."""
    kwargs = {"dtype": torch.bfloat16, "schedule": Schedule("constant", 100)}
    first = Run(saved, **options(saved), **kwargs)
    first.train(3)
    save(first, tmp_path)
    second = load(Run(resumed, seed=9, **options(resumed), **kwargs), tmp_path)
    assert second.bits() == first.bits()
    second.train(3), first.train(3)
    assert second.bits() == first.bits()


# --- groups, schedule, counters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_lr_after_a_resume_in_the_warmup(tmp_path, mode):
    """Warmup of 4 from 1e-8 to 0.01, saved after 3 updates: 0.007500000025 in every live group, never 1e-10."""
    first = Run(mode, schedule=WARMUP, **options(mode))
    first.train(3)
    save(first, tmp_path)
    second = load(Run(mode, seed=9, schedule=WARMUP, **options(mode)), tmp_path)
    assert [group["lr"] for group in second.optimizer.param_groups] == [0.007500000025, 0.007500000025]
    assert [group["initial_lr"] for group in second.optimizer.param_groups] == [0.01, 0.01]
    second.train()
    assert [group["lr"] for group in second.optimizer.param_groups] == [0.01, 0.01]


CONTRACT = [
    pytest.param(Schedule("linear", 200, warmup_steps=50, decay_steps=0), 60, 5e-5, id="after a warmup"),
    pytest.param(Schedule("cosine", 200, warmup_steps=50), 60, 4.9453690e-5, id="cosine at 60"),
    pytest.param(Schedule("cosine", 200), 140, 1.0305369e-5, id="cosine at 140"),
    pytest.param(Schedule("linear", 200, decay_steps=100), 140, 2.9797980e-5, id="linear decay at 140"),
]


@pytest.mark.parametrize(("schedule", "step", "lr"), CONTRACT)
@pytest.mark.parametrize("mode", MODES)
def test_lr_of_a_peak_of_5e_5_after_a_resume(tmp_path, mode, schedule, step, lr):
    """Never 5e-13, which is the warmup's start, and never the peak while it decays; it moves on from there."""

    def make(seed: int) -> Run:
        run = Run(mode, seed=seed, schedule=schedule, **options(mode))
        for group in run.optimizer.param_groups:
            group["initial_lr"] = 5e-5
        run.schedule.apply(0)
        return run

    first = make(0)
    first.step = step
    first.schedule.apply(step)
    save(first, tmp_path)
    second = load(make(9), tmp_path)
    for later in range(step, step + 5):
        assert [group["lr"] for group in second.optimizer.param_groups] == [5e-5 * schedule.factor(later)] * 2
        if later == step:
            assert second.optimizer.param_groups[0]["lr"] == pytest.approx(lr, rel=1e-7)
        second.train(), first.train()
    assert second.bits() == first.bits()


@pytest.mark.parametrize("optimizer", ["muon", "group_step"])
@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_a_group_counter_of_60_is_61_after_the_next_step(tmp_path, saved, resumed, optimizer):
    first = Run(saved, optimizer, **options(saved))
    first.train(60)
    save(first, tmp_path)
    second = load(Run(resumed, optimizer, seed=9, **options(resumed)), tmp_path)
    assert [group["step"] for group in second.optimizer.param_groups] == [60, 60]
    second.train(), first.train()
    assert [group["step"] for group in second.optimizer.param_groups] == [61, 61]
    second.train(4), first.train(4)
    assert [group["step"] for group in second.optimizer.param_groups] == [65, 65]
    assert second.bits() == first.bits()


@pytest.mark.parametrize("mode", ["optimizer", "full"])
def test_without_the_group_restore_the_continuation_differs(tmp_path, monkeypatch, mode):
    """The tests above must be able to fail: moments alone are not enough."""
    first = Run(mode, "group_step", **COPY)
    first.train(3)
    save(first, tmp_path)
    monkeypatch.setattr("trainer.optim.state.write_entries", lambda live, saved, keep: [])
    monkeypatch.setattr("trainer.optim.state.OptimizerState.verify", lambda self, saved: [])
    second = load(Run(mode, "group_step", seed=9, **COPY), tmp_path)
    second.train(2), first.train(2)
    assert second.bits() != first.bits()


@pytest.mark.parametrize("optimizer", ["adamw", "group_step"])
@pytest.mark.parametrize("mode", MODES)
def test_saving_is_inert(tmp_path, mode, optimizer):
    """Never saved, saved at 0 and continued, saved at 0 and resumed: the same bits."""
    never, saved = Run(mode, optimizer, **options(mode)), Run(mode, optimizer, **options(mode))
    before = saved.bits()
    save(saved, tmp_path)
    assert saved.bits() == before
    if optimizer == "adamw":
        assert all(state["step"].item() == 0 for state in saved.optimizer.state.values())
    resumed = load(Run(mode, optimizer, seed=9, **options(mode)), tmp_path)
    for run in (never, saved, resumed):
        run.train(2)
    assert never.bits() == saved.bits() == resumed.bits()


# --- what a checkpoint holds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_state_is_complete_before_the_first_step_and_with_live_gradients(mode):
    run = Run(mode, **options(mode))
    names = set(run.app.state_dict())
    trained = {name for group in run.optimizer.param_groups for name in group["param_names"]}
    assert {f"optimizer.state.{name}.{key}" for name in trained for key in ("step", "exp_avg", "exp_avg_sq")} <= names
    run.train(5)
    run.backward()
    with_gradients = run.bits()
    run.optimizer.zero_grad()
    assert run.bits() == with_gradients
    assert set(run.app.state_dict()) == names == set(Run("none").app.state_dict())


@pytest.mark.parametrize("mode", ["optimizer", "full"])
def test_state_dict_is_live_and_what_was_saved_is_not(tmp_path, mode):
    """Whoever writes in the background must copy: the host's tensors go on changing with the next step."""
    run = Run(mode, **COPY)
    run.train()
    state = run.app.state_dict()
    for name, parameter in named_parameters(run.optimizer).items():
        for key, tensor in run.optimizer.state[parameter].items():
            assert state[f"optimizer.state.{name}.{key}"] is tensor
    copied = {name: tensor.detach().clone() for name, tensor in state.items()}
    saved = save(run, tmp_path)
    files = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    run.train()
    run.optimizer.synchronize()
    moved = {name for name, tensor in state.items() if not torch.equal(tensor, copied[name])}
    assert {name for name in moved if name.startswith("optimizer")} >= {
        "optimizer.state.first.weight.exp_avg", "optimizer.state.first.weight.step"
    }  # fmt: skip
    assert "model.first.weight" in moved
    assert files == {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_state_is_where_this_runs_mode_wants_it(tmp_path, saved, resumed):
    save(Run(saved, **options(saved)), tmp_path)
    run = Run(resumed, seed=9, **options(resumed))
    before = {id(t): t.data_ptr() for state in run.optimizer.state.values() for t in state.values()}
    load(run, tmp_path)
    assert {id(t): t.data_ptr() for state in run.optimizer.state.values() for t in state.values()} == before
    if resumed != "none":
        arena = run.optimizer._arena
        assert all(arena.owns(tensor) for state in run.optimizer.state.values() for tensor in state.values())


# --- weights without optimizer state --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["checkpoint", "given", "in the model"])
@pytest.mark.parametrize("mode", MODES)
def test_loaded_weights_stay(tmp_path, mode, how, dtype):
    """Masters that keep their old values write them back over the loaded weights in the first step."""
    source = Run("none", dtype=dtype, seed=3)
    weights = {name: value.detach().clone() for name, value in source.built.weights.state_dict().items()}
    run = Run(mode, dtype=dtype, schedule=Schedule("constant", 10), **options(mode))
    parameters = {name: weights[name] for name, _ in source.model.named_parameters()}
    if how == "checkpoint":
        save(source, tmp_path)
        folder = next((tmp_path / "checkpoints").iterdir())
        run.app.load(folder, skip=frozenset({"optimizer", "schedule", "progress"}))
    elif mode == "none":
        run.model.load_state_dict(parameters, strict=False)
    elif how == "given":
        trained = named_parameters(run.optimizer)
        known = parameters if mode == "full" else {name: w for name, w in parameters.items() if name in trained}
        run.optimizer.load_master_weights(known)
        if mode == "optimizer":
            run.model.load_state_dict({"frozen": weights["frozen"]}, strict=False)
    else:
        run.model.load_state_dict(parameters, strict=False)
        run.optimizer.load_master_weights()
        if mode == "full":
            parameters = {name: w.to(dtype).float() for name, w in parameters.items()}  # what the model could hold

    def check() -> None:
        found = run.built.weights.state_dict()
        for name, parameter in run.model.named_parameters():
            assert torch.equal(found[name], parameters[name]), name
            assert torch.equal(parameter, parameters[name].to(parameter.dtype)), name

    check()
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run.schedule.apply = lambda step: None  # type: ignore[method-assign]
    run.train()
    check()


@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_small_updates_go_on_after_a_resume(tmp_path, saved, resumed):
    """Weights near 1 move by 1e-4 a step, below the spacing of bf16: masters must come back as float32."""

    def make(mode: str, seed: int = 0) -> Run:
        run = Run(mode, dtype=torch.bfloat16, seed=seed, **options(mode))
        with torch.no_grad():
            run.model.spare.fill_(1.0)
            run.model.first.bias.fill_(1.0)
        if mode != "none":
            run.optimizer.load_master_weights()
        for group in run.optimizer.param_groups:
            group["initial_lr"] = 1e-4
        run.schedule.apply(run.step)
        return run

    first = make(saved)
    first.train(5)
    save(first, tmp_path)
    second = load(make(resumed, seed=9), tmp_path)
    before = copy.deepcopy(second.built.weights.state_dict()["first.bias"].detach())
    second.train(50), first.train(50)
    after = second.built.weights.state_dict()["first.bias"].detach()
    assert after.dtype == torch.float32
    assert 0 < (after - before).abs().sum().item() < 1
    assert second.bits() == first.bits()
