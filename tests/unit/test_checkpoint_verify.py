"""`trainer ckpt verify` and `repair`: sound checkpoints pass, every kind of damage is found and named."""

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from support.checkpoints import Table, flip_bit
from trainer.checkpoint.app_state import AppState
from trainer.checkpoint.discovery import Status, discover, inspect_step
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.manifest import dump_manifest, read_manifest
from trainer.checkpoint.repair import repair
from trainer.checkpoint.tables import read_tables
from trainer.checkpoint.verify import verify
from trainer.cli.ckpt import main
from trainer.config.train import CkptConfig
from trainer.errors import CheckpointError
from trainer.optim.schedule import Schedule, ScheduleState

PEAK = 5e-5
COSINE = Schedule("cosine", total_steps=200, warmup_steps=50)
AT_60 = 4.9453690e-5  # the cosine after 60 updates, from the closed form


def save(run_dir: Path, *, lr: float = COSINE.factor(60) * PEAK, step: int = 60, **changes) -> Path:
    """A checkpoint with the owners that `trainer sft` has: two groups under a cosine, counters and tensors."""
    groups = [
        {"name": name, "param_names": [name], "entries": {"lr": lr, "initial_lr": PEAK, "weight_decay": decay}}
        for name, decay in (("decay", 0.1), ("no_decay", 0.0))
    ]
    weight = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    owners = {
        "model": Table(**{"layer.weight": weight, "norm": torch.ones(5, dtype=torch.bfloat16)}),
        "optimizer": Table(groups=groups, state={"layer.weight": {"exp_avg": weight / 7, "step": torch.tensor(60.0)}}),
        "schedule": Table(**asdict(COSINE)),
        "progress": Table(step=step, tokens=4321, samples=480),
    } | changes
    app = AppState(**owners)
    return CheckpointManager(run_dir, CkptConfig(), app, describe=lambda: {"config": {"seed": 1}}).save(60)


def outcomes(path: Path) -> dict[str, str]:
    return {check.name: check.outcome for check in verify(path).checks}


def damage(path: Path) -> str:
    return "\n".join(f"{check.name}: {check.text}" for check in verify(path).damaged())


def reseal(path: Path) -> None:
    """Writes a manifest that belongs to the files as they are now, as a faulty writer would have."""
    from dataclasses import replace

    from trainer.core.files import FileRecord, xxh3

    manifest = read_manifest(path)
    records = {name: FileRecord((path / name).stat().st_size, xxh3(path / name)) for name in manifest.files}
    (path / "manifest.json").write_bytes(dump_manifest(replace(manifest, files=records)))


def test_a_sound_checkpoint_passes_every_check(tmp_path, capsys):
    path = save(tmp_path)
    assert set(outcomes(path).values()) == {"ok"}
    assert main(["verify", str(path)]) == 0
    out = capsys.readouterr().out
    assert "sound" in out and "4.94537e-05: what the schedule gives at step 60" in out and "all finite in 4" in out


@pytest.mark.parametrize("file", ["rank_00000.safetensors", "metadata.json", "manifest.json"])
@pytest.mark.parametrize("place", [0, 9, -1])
def test_every_flipped_bit_is_found(tmp_path, file, place):
    path = save(tmp_path)
    flip_bit(path / file, place, bit=2)
    assert file in damage(path)
    assert main(["verify", str(path)]) == 1


@pytest.mark.parametrize("file", ["rank_00000.safetensors", "metadata.json"])
def test_a_cut_or_missing_file_is_found(tmp_path, file):
    path = save(tmp_path)
    (path / file).write_bytes((path / file).read_bytes()[:-1])
    assert f"{file} has" in damage(path)
    (path / file).unlink()
    assert f"{file} is missing" in damage(path)
    assert outcomes(path)["tables"] == "skipped"


def test_a_damaged_lr_is_found_with_both_values(tmp_path, capsys):
    path = save(tmp_path, lr=5e-13)
    assert outcomes(path) == dict.fromkeys(outcomes(path), "ok") | {"learning rates": "damaged"}
    assert main(["verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert "'decay' has lr 5e-13, but the schedule gives 4.945369e-05 at step 60" in out
    assert "'no_decay' has lr 5e-13" in out and "ckpt repair" in out


@pytest.mark.parametrize(("factor", "sound"), [(1 + 9e-7, True), (1 + 2e-6, False), (1 - 2e-6, False)])
def test_the_bound_is_one_in_a_million(tmp_path, factor, sound):
    assert verify(save(tmp_path, lr=COSINE.factor(60) * PEAK * factor)).sound is sound


def test_verify_and_resume_share_one_judgement(tmp_path):
    """Whatever the one calls damaged, the other refuses, and the reverse."""
    from trainer.errors import CheckpointMismatch

    for index, lr in enumerate((COSINE.factor(60) * PEAK, 5e-13, PEAK, AT_60)):
        sound = verify(save(tmp_path / str(index), lr=lr)).sound
        state = ScheduleState(COSINE, [{"name": "decay", "lr": lr, "initial_lr": PEAK}])
        if sound:
            state.check_lr(60)
        else:
            with pytest.raises(CheckpointMismatch, match="trainer ckpt repair"):
                state.check_lr(60)
    assert math.isclose(AT_60, COSINE.factor(60) * PEAK, rel_tol=1e-8)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_value_that_is_no_number_is_found(tmp_path, value, dtype):
    weight = torch.zeros(4, 6, dtype=dtype)
    weight[2, 3] = value
    path = save(tmp_path, model=Table(weight=weight, largest=torch.tensor([torch.finfo(dtype).max], dtype=dtype)))
    assert damage(path) == "values: model.weight: 1 of 24 values are not finite"


def test_counters_that_disagree_are_found(tmp_path):
    path = save(tmp_path)
    renamed = path.rename(path.with_name("step_00000061"))
    assert "holds the manifest of step 60" in damage(renamed)
    document = json.dumps({"step": 61})
    other = save(tmp_path / "other", progress=Table(step=60))
    shard = other / "rank_00000.safetensors"
    shard.write_bytes(
        shard.read_bytes().replace(b'"progress":{"step":60}', f'"progress":{document}'.encode().replace(b" ", b""))
    )
    reseal(other)
    assert damage(other) == "counters: progress.step is 61, the manifest is of step 60"


def test_what_is_not_saved_is_a_note_and_no_damage(tmp_path):
    app = AppState(model=Table(weight=torch.ones(3)))
    path = CheckpointManager(tmp_path, CkptConfig(), app, describe=dict).save(1)
    report = verify(path)
    assert report.sound
    assert outcomes(path)["counters"] == outcomes(path)["learning rates"] == "note"


def test_a_run_is_verified_checkpoint_by_checkpoint(tmp_path, capsys):
    path = save(tmp_path)
    damaged = shutil.copytree(path, tmp_path / "checkpoints/step_00000070")
    (tmp_path / "checkpoints/step_00000080.tmp-00ff").mkdir()
    assert main(["verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "step_00000060  sound" in out and "step_00000070  damaged" in out and "tmp-00ff: incomplete" in out
    assert main(["verify", str(tmp_path), "--json"]) == 1
    reports = json.loads(capsys.readouterr().out)
    assert [(report["step"], report["sound"]) for report in reports] == [(60, True), (70, False)]
    shutil.rmtree(damaged)
    assert main(["verify", str(tmp_path)]) == 0


def test_what_is_no_checkpoint_has_an_exit_code_of_its_own(tmp_path, capsys):
    (tmp_path / "step_00000001").mkdir()
    for path in (tmp_path / "step_00000001", tmp_path / "nothing", tmp_path):
        assert main(["verify", str(path)]) == 2
    assert "never" not in capsys.readouterr().out


def test_none_of_it_imports_torch(tmp_path):
    import subprocess
    import sys

    path = save(tmp_path, lr=5e-13)
    code = (
        "import sys; from trainer.cli.ckpt import main; "
        f"codes = [main(['verify', {str(path)!r}]), main(['repair', {str(path)!r}, {str(tmp_path / 'out')!r}])]; "
        "assert codes == [1, 0], codes; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


class TestRepair:
    def test_a_damaged_lr_is_set_to_the_schedules_in_a_copy(self, tmp_path, capsys):
        path = save(tmp_path / "run", lr=5e-13)
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        assert main(["repair", str(path), str(tmp_path / "out")]) == 0
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before
        out = capsys.readouterr().out
        assert "optimizer.groups[1].entries.lr: 5e-13 -> 4.945369" in out and "--resume.dir" in out

        copy = tmp_path / "out/checkpoints/step_00000060"
        assert verify(copy).sound
        assert inspect_step(copy, 60).status is Status.COMMITTED
        _, old = read_tables(path)
        _, new = read_tables(copy)
        for group in new["optimizer"]["groups"]:
            assert group["entries"]["lr"] == PEAK * COSINE.factor(60)
            group["entries"]["lr"] = 5e-13
        assert new == old
        manifest = read_manifest(copy)
        assert manifest.parent == {"path": str(path), "step": 60, "checksum": read_manifest(path).checksum}
        assert len(manifest.run["repaired"]) == 2

    def test_nothing_but_the_lr_differs(self, tmp_path, capsys):
        path = save(tmp_path / "run", lr=5e-13)
        repair(path, tmp_path / "out/checkpoints")
        assert main(["diff", str(path), str(tmp_path / "out/checkpoints/step_00000060"), "--json"]) == 1
        found = json.loads(capsys.readouterr().out)["differences"]
        assert [difference["key"] for difference in found] == [f"optimizer.groups[{i}].entries.lr" for i in (0, 1)]

    def test_any_safetensors_reader_opens_the_copy(self, tmp_path):
        from safetensors.torch import load_file

        path = save(tmp_path / "run", lr=5e-13)
        copy = repair(path, tmp_path / "out/checkpoints").path
        assert copy is not None
        old, new = (load_file(directory / "rank_00000.safetensors") for directory in (path, copy))
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name], new[name]) for name in old if name != "json")

    def test_a_sound_checkpoint_is_not_copied(self, tmp_path, capsys):
        path = save(tmp_path / "run")
        assert main(["repair", str(path), str(tmp_path / "out")]) == 0
        assert "nothing to repair" in capsys.readouterr().out
        assert not (tmp_path / "out").exists()

    def test_other_damage_is_refused_with_every_finding(self, tmp_path):
        weight = torch.full((4, 6), math.nan)
        path = save(tmp_path / "run", lr=5e-13, model=Table(weight=weight))
        with pytest.raises(CheckpointError, match="values: model.weight: 24 of 24"):
            repair(path, tmp_path / "out/checkpoints")
        flip_bit(save(tmp_path / "flipped", lr=5e-13) / "rank_00000.safetensors", -1)
        with pytest.raises(CheckpointError, match="checksums: .*its bytes changed"):
            repair(tmp_path / "flipped/checkpoints/step_00000060", tmp_path / "out/checkpoints")
        assert not (tmp_path / "out").exists()

    def test_a_step_that_is_there_is_never_replaced(self, tmp_path):
        path = save(tmp_path / "run", lr=5e-13)
        with pytest.raises(CheckpointError, match="exists"):
            repair(path, path.parent)
        assert [c.status for c in discover(path.parent)] == [Status.COMMITTED]

    def test_shards_of_several_ranks_keep_their_bytes(self, tmp_path):
        from support.pool import run_on_ranks

        path = run_on_ranks(save_sharded, 2, str(tmp_path / "run"))[0]
        copy = repair(Path(path), tmp_path / "out/checkpoints").path
        assert copy is not None and verify(copy).sound
        assert len(list(copy.glob("rank_*.safetensors"))) == 2
        assert main(["diff", path, str(copy), "--json"]) == 1

    def test_a_failing_disk_leaves_nothing_behind(self, tmp_path):
        import errno

        from support.checkpoints import fails_at
        from trainer.core.files import file_hook

        path = save(tmp_path / "run", lr=5e-13)
        for k in range(40):
            out = tmp_path / f"out{k}/checkpoints"
            try:
                with file_hook(fails_at(k, OSError(errno.ENOSPC, "No space left on device"))):
                    repair(path, out)
            except CheckpointError as error:
                assert "No space left on device" in str(error)
                assert not out.exists() or [c for c in discover(out) if c.status is Status.COMMITTED] == []
            else:
                assert k > 8
                return
        raise AssertionError("the copy has more operations than were tried")


def save_sharded(run_dir: str) -> str:
    """On two ranks: a weight sharded by rows, groups with a damaged lr."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0)])
    return str(save(Path(run_dir), lr=5e-13, model=Table(weight=weight)))
