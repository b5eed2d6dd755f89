"""A run that stops and resumes is the run that never stopped: through real loops, checkpoints and processes."""

import math
import os
import signal
from pathlib import Path

import pytest

from support import runs
from support.runs import checkpoint, differences, metrics, samples, sft
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.tables import read_tables
from trainer.core.files import FileRecord, xxh3
from trainer.errors import CheckpointError, CheckpointMismatch, LaunchError, ModelError, TrainerError
from trainer.optim.schedule import Schedule


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Ten steps without a stop."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    sft(run_dir)
    return run_dir


def test_stop_and_resume_is_bit_exact(whole, tmp_path):
    run_dir = tmp_path / "run"
    sft(run_dir, "--stop-step", "5")
    assert metrics(run_dir)[-1]["step"] == 5
    sft(run_dir, "--resume")
    assert differences(checkpoint(whole, 10), checkpoint(run_dir, 10)) == ""
    assert metrics(run_dir) == metrics(whole)
    assert samples(run_dir) == samples(whole)


def test_many_resumes_are_no_different_from_one(whole, tmp_path):
    run_dir = tmp_path / "run"
    sft(run_dir, "--stop-step", "1")
    for stop in ("2", "3", "6", "9", "10"):
        sft(run_dir, "--resume", "--stop-step", stop)
    assert differences(checkpoint(whole, 10), checkpoint(run_dir, 10)) == ""
    assert metrics(run_dir) == metrics(whole)


def test_sigkill_between_checkpoints(whole, tmp_path):
    run_dir = tmp_path / "run"
    process = runs.start("sft", *runs.DEBUG, "--output-dir", run_dir, "--ckpt.interval", "3")
    runs.wait_for_step(run_dir, 7, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    runs.command("sft", *runs.DEBUG, "--output-dir", run_dir, "--ckpt.interval", "3", "--resume")
    assert differences(checkpoint(whole, 10), checkpoint(run_dir, 10)) == ""
    assert metrics(run_dir) == metrics(whole)
    assert samples(run_dir) == samples(whole)


@pytest.mark.parametrize("owner", ["model", "optimizer", "schedule", "progress", "data"])
def test_skipping_any_part_of_the_restore_is_seen(owner, whole, tmp_path, monkeypatch):
    """Anti-inert: the comparison above fails if an owner's state is not restored."""
    from trainer.checkpoint.app_state import AppState

    run_dir = tmp_path / "run"
    sft(run_dir, "--stop-step", "5")
    load = AppState.load
    monkeypatch.setattr(AppState, "load", lambda self, path, **_: load(self, path, skip={owner}))
    flags = ["--max-steps", "13", "--stop-step", "10"] if owner == "schedule" else []  # the horizon is in the state
    try:
        sft(run_dir, "--resume", *flags)
    except TrainerError:
        return  # refused, before it could train wrongly or because it did
    same = differences(checkpoint(whole, 10), checkpoint(run_dir, 10)) == "" and metrics(run_dir) == metrics(whole)
    assert not same


def test_saving_is_inert(whole, tmp_path):
    """Never saved, saved at every step: the same run."""
    sft(tmp_path / "never", "--ckpt.interval", "0")
    sft(tmp_path / "always", "--ckpt.interval", "1", "--ckpt.keep-last", "1")
    assert metrics(tmp_path / "never") == metrics(tmp_path / "always") == metrics(whole)
    assert differences(checkpoint(tmp_path / "never", 10), checkpoint(tmp_path / "always", 10)) == ""
    assert len(list((tmp_path / "always" / "checkpoints").iterdir())) == 1


def test_the_checkpoints_lr_and_schedule_win_unless_overridden(whole, tmp_path):
    """A9: one rule, and the override moves lr, initial_lr and the schedule together."""
    run_dir = tmp_path / "run"
    sft(run_dir, "--stop-step", "5")
    other = ["--optim.lr", "1e-3", "--optim.weight-decay", "0.5", "--scheduler.type", "cosine"]
    sft(tmp_path / "kept", "--resume.dir", run_dir, *other)
    assert differences(checkpoint(whole, 10), checkpoint(tmp_path / "kept", 10)) == ""
    sft(tmp_path / "taken", "--resume.dir", run_dir, *other, "--resume.override", "optim.lr,scheduler")
    rows = {row["step"]: row["lr"] for row in metrics(tmp_path / "taken")}

    expected = [1e-3 * (1 + math.cos(math.pi * (step - 2) / 8)) / 2 for step in range(5, 10)]
    assert [rows[step] for step in range(6, 11)] == pytest.approx(expected, rel=1e-12)


def test_extending_max_steps_never_makes_the_lr_climb(tmp_path):
    """Past its end the checkpoint's cosine stays at min_lr; overridden it is the longer cosine at this step."""
    run_dir = tmp_path / "run"
    sft(run_dir, "--scheduler.type", "cosine", "--scheduler.min-lr", "1e-4")
    sft(run_dir, "--resume", "--scheduler.type", "cosine", "--scheduler.min-lr", "1e-4", "--max-steps", "13")
    rows = {row["step"]: row["lr"] for row in metrics(run_dir) if row["step"]}
    assert [rows[step] for step in (11, 12, 13)] == pytest.approx([1e-4] * 3)
    told = "the checkpoint's schedule ends at step 10: steps 11 to 13 run at its last lr, 1.00e-04; --resume.override scheduler"
    assert told in (run_dir / "logs" / "rank_0.log").read_text()
    longer = ["--scheduler.type", "cosine", "--scheduler.min-lr", "1e-4", "--max-steps", "16"]
    sft(tmp_path / "longer", "--resume.dir", checkpoint(run_dir, 10), *longer, "--resume.override", "scheduler")
    rows = {row["step"]: row["lr"] for row in metrics(tmp_path / "longer")}
    cosine = Schedule("cosine", 16, warmup_steps=2, min_factor=1e-4 / 3e-3)
    assert [rows[step] for step in range(11, 17)] == [3e-3 * cosine.factor(step - 1) for step in range(11, 17)]
    assert "schedule ends" not in (tmp_path / "longer" / "logs" / "rank_0.log").read_text()


def test_a8_weights_of_a_run_are_a_start_and_no_resume(whole, tmp_path):
    """Told apart in the first lines; a start from weights warms up from step 0."""
    sft(tmp_path / "new", "--model.name", whole / "weights", "--no-model.random-init", "--stop-step", "1")
    started = (tmp_path / "new" / "logs" / "rank_0.log").read_text()
    assert f"fresh start: weights of {whole / 'weights'}, step 0, new optimizer, data from its beginning" in started
    assert "resumed from" not in started
    assert metrics(tmp_path / "new")[-1]["lr"] == pytest.approx(3e-3 * 1e-8)
    sft(tmp_path / "fork", "--resume.dir", checkpoint(whole, 5), "--stop-step", "6")
    resumed = (tmp_path / "fork" / "logs" / "rank_0.log").read_text()
    assert f"resumed from {checkpoint(whole, 5)}: step 5" in resumed and "fresh start" not in resumed
    assert metrics(tmp_path / "fork")[-1]["lr"] == metrics(whole)[6]["lr"]
    with pytest.raises(ModelError, match="is a checkpoint.*--resume.dir.*trainer ckpt export"):
        sft(tmp_path / "wrong", "--model.name", checkpoint(whole, 5), "--no-model.random-init")


def test_epochs_are_not_counted_in_batches_of_another_size(tmp_path):
    """Two steps of an epoch in batches of 8: in batches that are larger, that many may be all there are, and in smaller
    ones the epoch would be passed over more than once."""
    flags = ("--max-steps", "none", "--epochs", "1", "--val.interval", "0", "--no-ckpt.export-weights")
    sft(tmp_path / "run", *flags, "--data.batch-size", "8", "--stop-step", "2")
    again = ("--resume", "--data.batch-size", "4", "--resume.override", "data.batch_size")
    with pytest.raises(
        CheckpointMismatch, match=r"epochs = 1(.|\n)*data.batch_size: checkpoint 8, config 4(.|\n)*--max-steps"
    ):
        sft(tmp_path / "run", *flags, *again)
    sft(tmp_path / "run", *flags[4:], *again, "--epochs", "none", "--max-steps", "5", "--scheduler.warmup-steps", "0")
    assert metrics(tmp_path / "run")[-1]["step"] == 5


def test_b5_the_horizon_is_counted_in_steps_and_not_in_epochs(tmp_path):
    """One fall over all steps of three epochs; a resume in the second goes on from where the lr was."""
    flags = ("--max-steps", "none", "--epochs", "3", "--scheduler.type", "cosine", "--val.interval", "0")
    sft(tmp_path / "whole", *flags, "--ckpt.interval", "0", "--no-ckpt.export-weights")
    rows = metrics(tmp_path / "whole")
    first_epoch = sum(row["epoch"] == 0 for row in rows)
    assert rows[-1]["epoch"] == 2 and 3 * (first_epoch - 1) < len(rows) <= 3 * first_epoch
    expected = [3e-3 * (1 + math.cos(math.pi * (step - 2) / (len(rows) - 2))) / 2 for step in range(2, len(rows))]
    assert [row["lr"] for row in rows[2:]] == pytest.approx(expected, rel=1e-9)
    middle = len(rows) // 2
    sft(tmp_path / "half", *flags, "--stop-step", middle, "--no-ckpt.export-weights")
    sft(tmp_path / "half", *flags, "--resume", "--no-ckpt.export-weights")
    assert metrics(tmp_path / "half") == rows


def test_g4_who_is_in_which_group_is_told(tmp_path):
    sft(tmp_path / "run", "--optim.type", "muon", "--optim.adamw-lr", "1e-4", "--stop-step", "1", "--val.interval", "0")
    told = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    lines = {
        name: line
        for line in told.splitlines()
        for name in ("muon", "adamw_decay", "adamw")
        if f"group {name} " in line
    }
    muon, head, rest = lines["muon"], lines.get("adamw_decay", ""), lines["adamw"]
    assert "layers.*" in muon and "by muon" in muon and "peak lr 0.003" in muon and "embed" not in muon
    assert "lm_head" in head or "embed" in rest
    assert "embed" in rest and "norm" in rest and "peak lr 0.0001, weight decay 0" in rest
    assert metrics(tmp_path / "run")[-1]["lr_adamw"] == pytest.approx(1e-4 * 1e-8)


def test_resuming_a_finished_run_trains_nothing(whole, tmp_path):
    before = (whole / "metrics.jsonl").read_bytes(), sorted((whole / "checkpoints").iterdir())
    sft(whole, "--resume")
    assert ((whole / "metrics.jsonl").read_bytes(), sorted((whole / "checkpoints").iterdir())) == before


def test_a_fork_never_writes_to_its_source(whole, tmp_path):
    def listing():
        return {p: p.stat().st_mtime_ns for p in (whole / "checkpoints").rglob("*")}

    before = listing()
    sft(tmp_path / "fork", "--resume.dir", checkpoint(whole, 5))
    assert listing() == before
    assert differences(checkpoint(whole, 10), checkpoint(tmp_path / "fork", 10)) == ""
    assert [row["step"] for row in metrics(tmp_path / "fork")] == [6, 7, 8, 9, 10]
    from trainer.checkpoint.manifest import read_manifest

    parent = read_manifest(checkpoint(tmp_path / "fork", 10)).parent
    assert parent is not None
    assert (parent["step"], Path(parent["path"])) == (5, checkpoint(whole, 5))


def test_an_older_step_supersedes_the_newer_ones(whole, tmp_path):
    run_dir = tmp_path / "run"
    sft(run_dir, "--ckpt.interval", "2", "--stop-step", "8")
    sft(run_dir, "--ckpt.interval", "2", "--resume.step", "4", "--stop-step", "5")
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == [
        "step_00000002",
        "step_00000004",
        "step_00000005",
        "superseded",
    ]
    assert [row["step"] for row in metrics(run_dir)] == [0, 1, 2, 3, 4, 5]
    sft(run_dir, "--resume")
    assert differences(checkpoint(whole, 10), checkpoint(run_dir, 10)) == ""


def test_a_used_directory_is_refused_and_overwrite_moves_it_aside(tmp_path):
    run_dir = tmp_path / "run"
    sft(run_dir, "--stop-step", "1")
    with pytest.raises(LaunchError, match="already holds a run.*--resume.*--overwrite"):
        sft(run_dir)
    sft(run_dir, "--stop-step", "2", "--overwrite")
    assert metrics(run_dir)[-1]["step"] == 2
    assert metrics(tmp_path / "run.old-1")[-1]["step"] == 1


def test_nothing_to_resume(tmp_path):
    with pytest.raises(CheckpointError, match="--resume.if-exists"):
        sft(tmp_path / "run", "--resume")
    sft(tmp_path / "run", "--resume.if-exists", "--stop-step", "2")
    assert metrics(tmp_path / "run")[-1]["step"] == 2


def test_what_changes_the_data_order_is_an_error_unless_overridden(tmp_path):
    run_dir = tmp_path / "run"
    sft(run_dir, "--stop-step", "2")
    with pytest.raises(CheckpointMismatch, match=r"data.batch_size.*--resume.override data.batch_size"):
        sft(run_dir, "--resume", "--data.batch-size", "4")
    sft(run_dir, "--resume", "--data.batch-size", "4", "--resume.override", "data.batch_size", "--stop-step", "4")
    assert [len(rows) for _, rows in sorted(samples(run_dir).items())] == [8, 8, 4, 4]


def test_another_mask_or_template_is_told_and_can_be_overridden(tmp_path):
    run_dir = tmp_path / "run"
    sft(run_dir, "--stop-step", "2")
    with pytest.raises(
        CheckpointMismatch, match=r"data.train_on: .*what is trained on.*--resume.override data.train_on"
    ):
        sft(run_dir, "--resume", "--data.train-on", "user,assistant")
    template = tmp_path / "other.jinja"
    template.write_text(
        "{% for m in messages %}{% generation %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(CheckpointMismatch, match=r"data.sources: .*(.|\n)*its chat template"):
        sft(run_dir, "--resume", "--model.chat-template", str(template))
    changed = ["--resume", "--data.train-on", "user,assistant"]
    sft(run_dir, *changed, "--resume.override", "data.train_on", "--stop-step", "3")
    changed += ["--model.chat-template", str(template)]
    sft(run_dir, *changed, "--resume.override", "model.chat_template", "--stop-step", "4")
    assert [row["step"] for row in metrics(run_dir)][-2:] == [3, 4]


def test_cadence_and_horizon_are_the_new_configs(whole, tmp_path):
    """K6: micro-batch size and save interval are free to change; max_steps does not move by itself."""
    run_dir = tmp_path / "run"
    sft(run_dir, "--stop-step", "5")
    sft(run_dir, "--resume", "--data.micro-batch-size", "8", "--ckpt.interval", "4", "--data.num-workers", "1")
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir())[-2:] == ["step_00000008", "step_00000010"]
    assert metrics(run_dir)[-1]["step"] == 10
    assert samples(run_dir) == samples(whole)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """Ten steps on two ranks."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    sft(run_dir, world_size=2)
    return run_dir


class TestRanks:
    """World sizes 2 -> 1, 2, 4: the same samples in the same global batches; bit-equal at the same size."""

    @pytest.mark.parametrize("world_size", [1, 2, 4])
    def test_resumed_on(self, world_size, two, whole, tmp_path):
        run_dir = tmp_path / "run"
        sft(run_dir, "--resume.dir", checkpoint(two, 5), world_size=world_size)
        assert samples(run_dir) == {step: ids for step, ids in samples(two).items() if step > 5}
        exact = ("step", "lr", "tokens", "samples", "epoch")
        rows = [row for row in metrics(two) if row["step"] > 5]
        assert [[row[key] for key in exact] for row in metrics(run_dir)] == [
            [row[key] for key in exact] for row in rows
        ]
        if world_size == 2:
            assert differences(checkpoint(two, 10), checkpoint(run_dir, 10)) == ""
            assert metrics(run_dir) == rows
        else:
            assert [row["loss"] for row in metrics(run_dir)] == pytest.approx([row["loss"] for row in rows], rel=2e-4)

    def test_a_manifest_says_all_there_is_to_know_before_the_tensors_are_read(self, two, tmp_path):
        path = checkpoint(two, 5)
        manifest, (_, state) = read_manifest(path), read_tables(path)
        assert (manifest.format, manifest.step, manifest.micro_step, manifest.pending) == (1, 5, 0, None)
        assert (manifest.resumable, manifest.reason, manifest.parent) == (True, "", None)
        assert set(manifest.files) == {"rank_00000.safetensors", "rank_00001.safetensors", "metadata.json"}
        for name, record in manifest.files.items():
            assert record == FileRecord((path / name).stat().st_size, xxh3(path / name)), name
        assert (manifest.world_size, manifest.run["mesh"]) == (2, {"shard": 2})
        assert set(manifest.dtypes) == {"F32", "U8"} and manifest.metrics.keys() == {"val_loss"}
        assert manifest.run["schedule"] == state["schedule"] and manifest.run["schedule"]["total_steps"] == 10
        assert manifest.run["data"] == {key: state["data"][key] for key in ("version", "cursor", "order")}
        config = manifest.run["config"]
        assert (config["seed"], config["max_steps"], config["model"]["dtype"]) == (0, 10, "float32")
        assert config["optim"]["lr"] == 3e-3 and config["scheduler"]["warmup_steps"] == 2
        run_dir = tmp_path / "run"
        sft(run_dir, "--parallel.dp-replicate", "2", "--resume.dir", path, "--stop-step", "6", world_size=4)
        forked = read_manifest(checkpoint(run_dir, 6))
        assert forked.parent == {"path": str(path), "step": 5, "checksum": manifest.checksum}
        assert (forked.world_size, forked.run["mesh"]) == (4, {"replicate": 2, "shard": 2})

    def test_two_ranks_are_one_rank(self, two, whole):
        """B8: a schedule moves once a step, however many ranks there are. I1: the same batch gives the same loss and
        gradient norm however it is cut up."""
        assert samples(two) == samples(whole)
        for key in ("loss", "grad_norm", "lr", "tokens"):
            ours, theirs = ([row[key] for row in metrics(run)[1:]] for run in (two, whole))
            assert ours == (theirs if key in ("lr", "tokens") else pytest.approx(theirs, rel=2e-4)), key

    def test_hsdp(self, two, tmp_path):
        run_dir = tmp_path / "run"
        sft(run_dir, "--parallel.dp-replicate", "2", "--resume.dir", checkpoint(two, 5), world_size=4)
        assert samples(run_dir) == {step: ids for step, ids in samples(two).items() if step > 5}
        rows = [row["loss"] for row in metrics(two) if row["step"] > 5]
        assert [row["loss"] for row in metrics(run_dir)] == pytest.approx(rows, rel=2e-4)


def test_two_ranks_killed_under_torchrun(tmp_path):
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    sft(whole, world_size=2)
    process = runs.start("sft", *runs.DEBUG, "--output-dir", run_dir, "--ckpt.interval", "4", nproc=2)
    runs.wait_for_step(run_dir, 6, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _kill_ranks(run_dir)
    runs.command("sft", *runs.DEBUG, "--output-dir", run_dir, "--ckpt.interval", "4", "--resume", nproc=2)
    assert differences(checkpoint(whole, 10), checkpoint(run_dir, 10)) == ""
    assert metrics(run_dir) == metrics(whole)


def _kill_ranks(run_dir: Path) -> None:
    """torchrun gives every rank a session of its own, which outlives the agent's SIGKILL."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(run_dir).encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
