"""The loop itself: updates that are not finite, garbage at fixed steps, sharded accumulation, what a run leaves behind."""

import gc
import json
import os
import tomllib

import pytest
import torch

from support.models import build, loss_sum, packed, write_config
from support.pool import run_on_ranks
from support.runs import checkpoint, command, metrics, read, samples, sft
from trainer.errors import TrainingError

SHORT = ["--max-steps=4", "--scheduler.warmup-steps=0", "--val.interval=0", "--ckpt.interval=0"]


@pytest.fixture
def poisoned(monkeypatch):
    """The loss of the third step's first micro-batch is NaN; four micro-steps make a step."""
    from trainer.train.cross_entropy import cross_entropy

    seen: list[int] = []

    def loss(model, micro_batch, **options):
        seen.append(1)
        return cross_entropy(model, micro_batch, **options) * (float("nan") if len(seen) == 9 else 1.0)

    monkeypatch.setattr("trainer.sft.train.cross_entropy", loss)
    return seen


def test_an_update_that_is_not_finite_ends_the_run_before_it_is_applied(poisoned, tmp_path):
    with pytest.raises(TrainingError, match="step 3: loss nan.* is not finite; the weights are those of step 2"):
        sft(tmp_path / "run", *SHORT)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "the run ends with TrainingError: step 3: loss nan" in log and "Traceback" not in log


def test_an_update_that_is_not_finite_can_be_left_out(poisoned, tmp_path):
    """Its batch is used up and counted; the next step goes on from the weights of the one before it."""
    from trainer.checkpoint.tables import read_tables

    run_dir = tmp_path / "run"
    sft(run_dir, *SHORT, "--optim.on-nonfinite=skip")
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert (rows[2]["loss"], rows[2]["grad_norm"]) == ("NaN", "NaN") and isinstance(rows[3]["loss"], float)
    _, leaves = read_tables(checkpoint(run_dir, 4))
    assert leaves["progress"]["skipped_updates"] == 1 and leaves["progress"]["step"] == 4
    poisoned.extend([1] * 100)  # no more poison
    sft(tmp_path / "clean", *SHORT)
    assert samples(run_dir) == samples(tmp_path / "clean")
    assert rows[3]["loss"] != metrics(tmp_path / "clean")[3]["loss"]


def test_garbage_is_collected_at_fixed_steps_only():
    from trainer.train.loop import scheduled_garbage_collection

    collected: list[dict] = []
    gc.callbacks.append(lambda phase, info: collected.append(info) if phase == "start" else None)
    try:
        with scheduled_garbage_collection(5) as collect:
            assert not gc.isenabled()
            collected.clear()
            at = []
            for step in range(1, 21):
                before = len(collected)
                collect(step)
                if len(collected) > before:
                    at.append(step)
            assert at == [5, 10, 15, 20]
        assert gc.isenabled()
        with scheduled_garbage_collection(0) as collect:
            assert gc.isenabled()
            collected.clear()
            collect(5)
            assert not collected
    finally:
        gc.callbacks.pop()


def _gradients_after_each_micro_step(model_dir: str) -> list[tuple[int, int]]:
    """(elements of all gradients that this rank holds, elements of the model) after each of three micro-steps."""
    from torch.distributed.tensor import DTensor

    from trainer.core.distributed import build_mesh
    from trainer.train.step import _reduce_over_replicas

    model = build(model_dir, mesh=build_mesh("cpu", 1, -1, 2), random_init=True)
    held = []
    for micro_step in range(3):
        _reduce_over_replicas(model, micro_step == 2)
        loss_sum(model, packed([9, 12], tokens=24, seed=micro_step)).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        assert all(isinstance(grad, DTensor) for grad in grads)
        held.append((sum(g.to_local().numel() for g in grads), sum(p.numel() for p in model.parameters())))
    return held


def test_gradients_stay_sharded_while_they_accumulate(tmp_path):
    """Each micro-step is reduced at once: a rank never holds more than its share."""
    for held in run_on_ranks(_gradients_after_each_micro_step, 2, write_config(tmp_path)):
        assert len(held) == 3
        assert all(0.4 * total < mine < 0.6 * total for mine, total in held)


def test_what_a_run_leaves_behind(tmp_path):
    run_dir = tmp_path / "run"
    sft(run_dir, *SHORT, "--val.interval=2", "--optim.lr", "2e-3")
    assert {path.name for path in run_dir.iterdir()} == {
        "checkpoints",
        "config.toml",
        "events.jsonl",
        "logs",
        "metrics.jsonl",
        "run.json",
        "samples.jsonl",
        "weights",
    }
    rows = read(run_dir / "metrics.jsonl")
    step = {"step", "loss", "lr", "grad_norm", "tokens", "samples", "epoch", "tokens_per_second", "step_seconds"}
    step |= {"peak_memory_gib"}
    held_out = {"val_loss", "val_tokens"}
    expected = [{"step"} | held_out, step, step | held_out, step, step | held_out]
    assert [row.keys() for row in rows] == expected
    text = (run_dir / "config.toml").read_text()
    assert "lr = 0.002  # flag --optim.lr" in text
    assert tomllib.loads(text)["optim"]["lr"] == 2e-3
    again = command("config", "@", run_dir / "config.toml").stdout
    assert tomllib.loads(again) == tomllib.loads(text)
    assert command("plot", run_dir).stdout.strip() == str(run_dir / "plots" / "metrics.png")
    assert (run_dir / "plots" / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run_dir / "weights" / "config.json").read_text())["model_type"] == "llama"


def test_wandb_offline_keeps_one_run_over_a_resume(tmp_path, monkeypatch):
    """No account is needed; the id is that of the run directory."""
    from trainer.train.sinks.wandb_history import history_steps, offline_logs

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    run_dir, flags = tmp_path / "run", [*SHORT, "--wandb.mode", "offline"]
    sft(run_dir, *flags, "--stop-step=2")
    sft(run_dir, *flags, "--resume")
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    logs = offline_logs(run_dir / "wandb", run_id)
    assert len(logs) == len(list((run_dir / "wandb").glob("offline-run-*"))) == 2
    assert [step for log in logs for _, step in history_steps(log)] == [1, 2, 3, 4]


def test_blocks_are_compiled_on_a_gpu_and_not_on_a_cpu_unless_told():
    from trainer.config.model import ModelConfig
    from trainer.models.build import _compiles

    def compiles(choice: str, device: str) -> bool:
        return _compiles(ModelConfig.model_validate({"name": "m", "compile": choice}), torch.device(device))

    assert [compiles(choice, "cpu") for choice in ("auto", "on", "off")] == [False, True, False]
    assert [compiles(choice, "meta") for choice in ("auto", "on", "off")] == [True, True, False]


def test_threads_are_those_of_the_config(monkeypatch):
    from trainer.core import device as devices
    from trainer.core.distributed import World

    before = torch.get_num_threads()
    try:
        devices.configure(torch.device("cpu"), threads=3, deterministic=True, world=World())
        assert torch.get_num_threads() == 3
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        cores = len(os.sched_getaffinity(0))
        devices.configure(torch.device("cpu"), threads=0, deterministic=True, world=World(local_size=cores))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
