"""When a run saves: by step, by micro-step, at named steps, at its end; on data with a known number of batches."""

import json
import os
from pathlib import Path

import pytest

from support.runs import DEBUG, REPO, checkpoint, differences, metrics, samples, sft
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.tables import read_tables

FAKE = ["--data.sources=[]", "--data.val-documents=0", "--data.fake.vocab-size=384", "--data.no-pack"]
FAKE += ["--val.interval=0", "--ckpt.interval=0"]


def steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").iterdir() if path.name != "superseded")


TEN = [*FAKE, "--data.fake.documents=10", "--data.batch-size=4", "--data.micro-batch-size=1", "--max-steps=6"]
"""Ten micro-batches in an epoch, four in a cycle."""


def test_c1_the_arithmetic_is_that_of_the_loader(tmp_path):
    from trainer.config.load import load_config
    from trainer.config.run import SFTConfig
    from trainer.sft.supply import supply
    from trainer.train import setup
    from trainer.train.cross_entropy import cross_entropy

    os.chdir(REPO)
    for epoch_end, expected in (("flush", [4, 8, 10, 14, 18, 20]), ("carry", [4, 8, 12, 16, 20, 24])):
        argv = [*DEBUG, *TEN, "--data.epoch-end", epoch_end, "--output-dir", str(tmp_path / epoch_end)]
        with setup.start(load_config(SFTConfig, argv), supply(cross_entropy)) as run:
            done = [len(run.loader.next_batch().micro_batches) for _ in expected]
            assert [sum(done[: step + 1]) for step in range(6)] == expected
            assert [run.boundaries.after(step) for step in range(1, 7)] == expected


@pytest.mark.parametrize("epoch_end, saved", [("flush", [2, 3, 5, 6]), ("carry", [2, 3, 4, 5])])
def test_c1_micro_interval(epoch_end, saved, tmp_path):
    """Requests at micro-steps 5, 10, 15, 20: served at 8, 10, 18, 20 with flush, at 8, 12, 16, 20 with carry."""
    run_dir = tmp_path / "run"
    sft(run_dir, *TEN, "--data.epoch-end", epoch_end, "--ckpt.micro-interval", "5", "--ckpt.no-at-end")
    assert steps(run_dir) == saved


def test_c1_every_boundary_is_a_place_to_go_on_from(tmp_path):
    """A request every three micro-steps: served at 4, 8, 10, 14, 18, 24, 28 and 30, and resumed from each of them."""
    flags = [*TEN, "--max-steps=9", "--data.epoch-end=flush", "--ckpt.micro-interval=3", "--ckpt.no-export-weights"]
    whole = tmp_path / "whole"
    sft(whole, *flags, "--ckpt.no-at-end")
    assert steps(whole) == [1, 2, 3, 4, 5, 7, 8, 9]
    seen = [read_tables(checkpoint(whole, step))[1]["progress"]["samples"] for step in steps(whole)]
    assert seen == [4, 8, 10, 14, 18, 24, 28, 30]  # one document in a micro-step
    for step in steps(whole)[:-1]:
        fork = tmp_path / str(step)
        sft(fork, *flags, "--resume.dir", checkpoint(whole, step))
        assert differences(checkpoint(whole, 9), checkpoint(fork, 9)) == ""
        assert metrics(fork) == metrics(whole)[step:]
        assert samples(fork) == {number: ids for number, ids in samples(whole).items() if number > step}


@pytest.mark.slow
def test_c1_requests_in_long_epochs(tmp_path):
    """1001 micro-batches in an epoch, a request every 2000: served at 2001 and 4003, and the first goes on to the second."""
    flags = [
        *FAKE,
        "--data.fake.documents=1001",
        "--data.fake.mean-tokens=6",
        "--data.fake.sigma=0",
        "--data.seq-len=8",
    ]
    flags += ["--data.batch-size=4", "--data.micro-batch-size=1", "--data.epoch-end=flush", "--max-steps=1003"]
    flags += ["--ckpt.micro-interval=2000", "--ckpt.no-at-end", "--ckpt.no-export-weights"]
    whole, fork = tmp_path / "whole", tmp_path / "fork"
    sft(whole, *flags)
    assert steps(whole) == [501, 1003]
    assert [read_tables(checkpoint(whole, step))[1]["progress"]["samples"] for step in steps(whole)] == [2001, 4003]
    sft(fork, *flags, "--resume.dir", checkpoint(whole, 501))
    assert steps(fork) == [1003]
    assert differences(checkpoint(whole, 1003), checkpoint(fork, 1003)) == ""


def test_the_best_by_validation_stays(tmp_path):
    """A learning rate at which the model gets worse: the best is not the last."""
    flags = ["--max-steps=6", "--val.interval=1", "--ckpt.interval=1", "--optim.lr=0.3", "--scheduler.type=constant"]
    run_dir = tmp_path / "run"
    sft(run_dir, *flags, "--ckpt.keep-last=1", "--ckpt.keep-best=1", "--stop-step=3")
    sft(run_dir, *flags, "--ckpt.keep-last=1", "--ckpt.keep-best=1", "--resume")
    losses = {row["step"]: row["val_loss"] for row in metrics(run_dir) if row["step"] > 0}
    best = min(losses, key=lambda step: losses[step])
    assert len(losses) == 6 and best < 6
    assert steps(run_dir) == [best, 6]
    assert read_manifest(checkpoint(run_dir, best)).metrics == {"val_loss": losses[best]}


def test_named_steps_and_time(tmp_path):
    sft(tmp_path / "at", *TEN, "--ckpt.at", "2,3", "--ckpt.no-at-end")
    assert steps(tmp_path / "at") == [2, 3]
    sft(tmp_path / "minutes", *TEN, "--ckpt.minutes", "1e-9", "--ckpt.no-at-end")
    assert steps(tmp_path / "minutes") == [0, 1, 2, 3, 4, 5, 6]


def test_e13_the_last_step_is_saved_once(tmp_path):
    """interval 4, 15 steps, 10 batches in an epoch; resumed from 12; then extended to 20."""
    flags = [*FAKE, "--data.fake.documents=20", "--data.batch-size=2", "--ckpt.interval=4", "--scheduler.type=constant"]
    whole, run_dir, fork = tmp_path / "whole", tmp_path / "run", tmp_path / "fork"
    sft(whole, *flags, "--max-steps=20")
    sft(run_dir, *flags, "--max-steps=15")
    assert steps(run_dir) == [4, 8, 12, 15]
    sft(fork, *flags, "--max-steps=15", "--resume.dir", checkpoint(run_dir, 12))
    assert steps(fork) == [15]
    sft(run_dir, *flags, "--max-steps=20", "--resume")
    assert steps(run_dir) == [4, 8, 12, 15, 16, 20]
    assert samples(run_dir) == samples(whole)
    epoch = [ids for step, ids in samples(run_dir).items() if 10 < step <= 20]
    assert samples(run_dir)[16] == epoch[5]
    assert len({name for rows in epoch for row in rows for name in row}) == 20  # the second epoch, each once
    assert metrics(run_dir)[-1] == metrics(whole)[-1]
    assert "schedule" in differences(checkpoint(whole, 20), checkpoint(run_dir, 20))  # only its horizon, 15


@pytest.mark.parametrize("workers", [0, 1])
def test_d1_a_run_saved_at_an_epochs_end_goes_on_with_the_next_epoch(workers, tmp_path):
    """20 documents, 2 in a batch, 3 epochs; stopped after the 10 steps of the first."""
    flags = [*FAKE, "--data.fake.documents=20", "--data.batch-size=2", "--data.micro-batch-size=2", "--max-steps=none"]
    flags += ["--epochs=3", "--data.log-ids", "--scheduler.type=constant", "--scheduler.warmup-steps=0"]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    sft(whole, *flags)
    sft(run_dir, *flags, "--stop-step=10", f"--data.num-workers={workers}")
    sft(run_dir, *flags, "--resume", f"--data.num-workers={workers}")
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, 31))
    assert samples(run_dir) == samples(whole)
    assert differences(checkpoint(run_dir, 30), checkpoint(whole, 30)) == ""


def test_c6_a_short_cycle_logs_what_a_whole_one_does(tmp_path):
    """Ten equal documents in cycles of 4, 4 and 2 micro-steps, weights that stay as they are: one loss, one gradient norm."""
    talk = [{"role": "user", "content": "Are you a robot?"}, {"role": "assistant", "content": "On weekdays."}]
    (tmp_path / "same.jsonl").write_text(10 * (json.dumps({"messages": talk}) + "\n"))
    flags = ["--data.sources.0.path", tmp_path / "same.jsonl", "--data.cache-dir", tmp_path / "cache", "--data.no-pack"]
    flags += ["--data.val-documents=0", "--val.interval=0", "--ckpt.interval=0", "--no-ckpt.export-weights"]
    flags += ["--data.batch-size=4", "--data.micro-batch-size=1", "--data.epoch-end=flush", "--max-steps=3"]
    flags += ["--optim.lr=1e-30"]
    sft(tmp_path / "run", *flags)
    rows = metrics(tmp_path / "run")
    assert [row["samples"] for row in rows] == [4, 8, 10]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([rows[0][key]] * 3, rel=1e-6)


@pytest.mark.parametrize("micro", [8, 4, 2])
def test_c8_steps_are_updates_whatever_the_accumulation(micro, tmp_path):
    """grad_accum 1, 2 and 4, saved at 5 and resumed: the next row is 6, the next checkpoint 5 + interval, samples go on."""
    flags = ["--data.batch-size=8", f"--data.micro-batch-size={micro}", "--max-steps=10", "--val.interval=0"]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    sft(whole, *flags)
    sft(run_dir, *flags, "--stop-step=5")
    assert metrics(run_dir)[-1]["step"] == 5 and steps(run_dir) == [5]
    before = len(metrics(run_dir))
    sft(run_dir, *flags, "--resume", "--ckpt.interval=5")
    assert metrics(run_dir)[before]["step"] == 6 and steps(run_dir) == [5, 10]
    assert samples(run_dir) == samples(whole)
    assert metrics(run_dir)[-1] == metrics(whole)[-1]


def test_m5_epochs_are_counted_in_samples_and_not_in_micro_steps(tmp_path):
    """grad_accum 4, 10 samples an epoch, resumed at 10: each row's epoch is floor(samples before it / 10)."""
    flags = [*TEN, "--max-steps=15"]
    sft(tmp_path / "run", *flags, "--stop-step=10")
    sft(tmp_path / "run", *flags, "--resume")
    rows = metrics(tmp_path / "run")
    assert [(row["step"], row["samples"]) for row in rows] == [(step, 4 * step) for step in range(1, 16)]
    assert [row["epoch"] for row in rows] == [4 * (step - 1) // 10 for step in range(1, 16)]


def test_c10_a_checkpoint_holds_what_the_next_step_begins_with(tmp_path):
    """step_3: counter 3, AdamW's step 3, the schedule's lr at 3, three batches seen, and the weights of step 4's forward."""
    import torch

    from trainer.checkpoint.layout import read_layout
    from trainer.checkpoint.storage import load_tensors
    from trainer.config.load import load_config
    from trainer.config.run import SFTConfig
    from trainer.sft.supply import supply
    from trainer.train import setup
    from trainer.train.cross_entropy import cross_entropy
    from trainer.train.loop import fit

    run_dir, seen = tmp_path / "run", []
    argv = [*DEBUG, "--output-dir", str(run_dir), "--ckpt.interval=3", "--max-steps=4", "--val.interval=0"]

    def loss(model, micro_batch):
        seen.append({name: value.detach().clone() for name, value in model.named_parameters()})
        return cross_entropy(model, micro_batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPO)
        with setup.start(load_config(SFTConfig, argv), supply(loss)) as run:
            fit(run)
    directory = checkpoint(run_dir, 3)
    layout, leaves = read_tables(directory)
    rows = {row["step"]: row for row in metrics(run_dir)}
    assert leaves["progress"]["step"] == 3 and leaves["progress"]["samples"] == rows[3]["samples"]
    groups = leaves["optimizer"]["groups"]
    assert {group["entries"]["lr"] for group in groups} == {rows[4]["lr"]}
    names = [name for name in layout if name.startswith("model.") or name.endswith(".step")]
    state = {name: torch.zeros(layout[name].shape) for name in names}
    load_tensors(directory, read_layout(directory), state)
    assert {value.item() for name, value in state.items() if name.endswith(".step")} == {3.0}
    forward = seen[3 * 4]  # four micro-steps a step
    weights = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
    assert weights.keys() == forward.keys()
    assert all(torch.equal(value, forward[name]) for name, value in weights.items())


def test_m3_validation_is_not_counted_and_a_resume_goes_on_counting(tmp_path):
    """Validated every 2 steps, saved at 4, resumed to 8: tokens and samples are those of the training batches alone."""
    flags = ["--max-steps=8", "--scheduler.warmup-steps=0", "--ckpt.interval=0", "--val.interval=2"]
    never, run_dir = tmp_path / "never", tmp_path / "run"
    sft(never, *flags, "--val.interval=0")
    sft(run_dir, *flags, "--stop-step=4")
    sft(run_dir, *flags, "--resume")
    rows = [row for row in metrics(run_dir) if row["step"]]
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4, 6, 8]
    counted = [(row["step"], row["tokens"], row["samples"]) for row in rows]
    assert counted == [(row["step"], row["tokens"], row["samples"]) for row in metrics(never)]
    assert [row["samples"] for row in rows] == [8 * step for step in range(1, 9)]


def test_k6_the_configs_cadence_and_cut_are_taken_and_the_horizon_does_not_move(tmp_path):
    """Saved with micro-batches of 1 (4 micro-steps), 8 steps, interval 5; resumed with micro-batches of 4 and interval 50."""
    flags = ["--data.batch-size=4", "--max-steps=8", "--val.interval=0"]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    sft(whole, *flags)
    sft(run_dir, *flags, "--data.micro-batch-size=1", "--ckpt.interval=5", "--stop-step=6")
    assert steps(run_dir) == [5, 6]
    sft(run_dir, *flags, "--data.micro-batch-size=4", "--ckpt.interval=50", "--resume")
    assert metrics(run_dir)[-1]["step"] == 8 and steps(run_dir) == [5, 6, 8]
    assert samples(run_dir) == samples(whole)
    assert [row["lr"] for row in metrics(run_dir)] == [row["lr"] for row in metrics(whole)]
    told = (run_dir / "logs" / "rank_0.log").read_text()
    assert "data.micro_batch_size: checkpoint 1, config 4 -> config" in told
    assert "ckpt.interval: checkpoint 5, config 50 -> config" in told


def test_i8_what_is_logged_does_not_depend_on_recomputation(tmp_path):
    """Nothing of a step happens twice because its blocks run twice: no count, no loss, no draw."""
    flags = ["--max-steps=3", "--scheduler.warmup-steps=0", "--ckpt.interval=0", "--no-ckpt.export-weights"]
    for mode in ("none", "selective", "full"):
        sft(tmp_path / mode, *flags, "--model.activation-checkpointing", mode)
    assert metrics(tmp_path / "full") == metrics(tmp_path / "selective") == metrics(tmp_path / "none")
