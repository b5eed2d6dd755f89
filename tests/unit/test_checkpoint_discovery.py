"""What lies in a checkpoints directory, and the manifest that decides it."""

import json
import os
import shutil

import pytest

from support.checkpoints import Run, flip_bit
from trainer.checkpoint.discovery import Status, discover, inspect_step, locate
from trainer.checkpoint.manifest import check_bytes, dump_manifest, parse_manifest, read_manifest
from trainer.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """A run with one committed checkpoint, to be copied."""
    run = Run(tmp_path_factory.mktemp("sample"))
    run.train(4)
    return run.save()


@pytest.fixture
def step(sample, tmp_path):
    return shutil.copytree(sample, tmp_path / "checkpoints" / "step_00000004")


def test_a_committed_checkpoint(step):
    (candidate,) = discover(step.parent)
    assert (candidate.status, candidate.step, candidate.path) == (Status.COMMITTED, 4, step)
    manifest = read_manifest(step)
    assert candidate.manifest == manifest
    assert (manifest.step, manifest.world_size, manifest.resumable, manifest.micro_step) == (4, 1, True, 0)
    assert set(manifest.files) == {"rank_00000.safetensors", "metadata.json"}
    assert set(manifest.versions) == {"trainer", "torch"}
    assert manifest.run == {"config": {"seed": 0}}
    check_bytes(step, manifest, manifest.files)


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "metadata.json"])
def test_a_missing_or_shorter_or_longer_file_is_found_by_size(step, name):
    data = (step / name).read_bytes()
    for damaged, reason in ((None, "missing"), (data[:-1], "bytes, expected"), (data + b"x", "bytes, expected")):
        if damaged is None:
            (step / name).unlink()
        else:
            (step / name).write_bytes(damaged)
        candidate = inspect_step(step, 4)
        assert candidate.status is Status.CORRUPT
        assert name in candidate.reason and reason in candidate.reason


def test_a_flipped_bit_is_found_in_each_file(step):
    """A sample of each file's bytes."""
    manifest = read_manifest(step)
    for name in ("manifest.json", "metadata.json", "rank_00000.safetensors"):
        size = (step / name).stat().st_size
        for position in range(0, size, 3 if name == "manifest.json" else 61):
            flip_bit(step / name, position, position % 8)
            with pytest.raises(CheckpointError):
                check_bytes(step, read_manifest(step), manifest.files)
            flip_bit(step / name, position, position % 8)
    check_bytes(step, read_manifest(step), manifest.files)


def test_a_changed_manifest_is_found_though_it_is_sound_json(step):
    body = json.loads((step / "manifest.json").read_text())
    body["run"]["config"]["seed"] = 1
    (step / "manifest.json").write_text(json.dumps(body, indent=1))
    assert inspect_step(step).status is Status.CORRUPT


def test_a_manifest_comes_back_whole(step):
    manifest = read_manifest(step)
    assert parse_manifest(dump_manifest(manifest), "here") == manifest


def test_a_newer_format_is_refused_and_not_called_damaged(step):
    body = json.loads((step / "manifest.json").read_text())
    (step / "manifest.json").write_text(json.dumps({**body, "format": 2}))
    candidate = inspect_step(step)
    assert candidate.status is Status.FOREIGN
    assert "newer trainer" in candidate.reason


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"checksum": ""}', '{"format": "1", "checksum": null}'])
def test_what_is_no_manifest_is_damaged(step, text):
    (step / "manifest.json").write_text(text)
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json"):
        read_manifest(step)
    assert inspect_step(step).status is Status.CORRUPT


def test_a_manifest_cannot_lead_outside(step):
    manifest = read_manifest(step)
    evil = dump_manifest(type(manifest)(step=4, files={"../../secret": manifest.files["metadata.json"]}))
    with pytest.raises(CorruptCheckpoint, match="plain file name"):
        parse_manifest(evil, "here")
    (step / "real").write_bytes((step / "metadata.json").read_bytes())
    (step / "metadata.json").unlink()
    (step / "metadata.json").symlink_to(step / "real")
    candidate = inspect_step(step)
    assert candidate.status is Status.CORRUPT
    assert "not a regular file" in candidate.reason


def test_each_kind_of_entry(sample, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    assert discover(checkpoints) == []

    def copy(name):
        return shutil.copytree(sample, checkpoints / name)

    copy("step_00000004")
    copy("step_00000005")  # its manifest says 4
    (copy("step_00000006") / "manifest.json").unlink()
    copy("step_00000007.tmp-0a1b2c3d")
    copy("step_00000004.replaced-0a1b2c3d")
    copy("step_00000003.removed-0a1b2c3d")
    copy("superseded/step_00000004")
    (checkpoints / "step_00000008").mkdir()
    (checkpoints / "step_00000009").mkdir()
    (checkpoints / "step_00000009" / ".metadata").touch()
    (checkpoints / "step_10").mkdir()
    (checkpoints / "notes.txt").touch()
    (checkpoints / "step_00000011").symlink_to(sample)
    (checkpoints / "checkpoint-500").mkdir()
    found = {candidate.path.name: candidate for candidate in discover(checkpoints)}
    assert {name: candidate.status for name, candidate in found.items()} == {
        "step_00000004": Status.COMMITTED,
        "step_00000005": Status.CORRUPT,
        "step_00000006": Status.INCOMPLETE,
        "step_00000007.tmp-0a1b2c3d": Status.INCOMPLETE,
        "step_00000004.replaced-0a1b2c3d": Status.INCOMPLETE,
        "step_00000003.removed-0a1b2c3d": Status.INCOMPLETE,
        "step_00000008": Status.INCOMPLETE,
        "step_00000009": Status.FOREIGN,
        "step_10": Status.FOREIGN,
        "notes.txt": Status.FOREIGN,
        "step_00000011": Status.FOREIGN,
        "checkpoint-500": Status.FOREIGN,
    }
    assert all(candidate.reason for candidate in found.values() if candidate.status is not Status.COMMITTED)
    assert "another trainer" in found["step_00000009"].reason
    assert "step 4" in found["step_00000005"].reason
    (aside,) = (c for c in discover(checkpoints, superseded=True) if c.status is Status.SUPERSEDED)
    assert aside.path == checkpoints / "superseded" / "step_00000004"


def test_a_replaced_checkpoint_counts_until_its_successor_is_there(sample, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(sample, checkpoints / "step_00000004.replaced-0a1b2c3d")
    (candidate,) = discover(checkpoints)
    assert (candidate.status, candidate.step) == (Status.COMMITTED, 4)


def test_incomplete_is_told_from_corrupt(step):
    (step / "manifest.json").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"no manifest\.json"):
        read_manifest(step)


def test_users_may_name_a_step_or_a_run(step):
    run_dir = step.parent.parent
    assert locate(step) == (step, False)
    assert locate(run_dir) == locate(run_dir / "checkpoints") == (run_dir / "checkpoints", True)
    link = run_dir / "link"
    link.symlink_to(step)
    assert locate(link) == (step, False)


def test_a_model_directory_is_not_resumed_from(tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"model directory.*--model\.name"):
        locate(tmp_path)


def test_other_paths_are_refused_with_what_they_are(tmp_path):
    with pytest.raises(CheckpointError, match="is not a directory"):
        locate(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        locate(tmp_path)
    (tmp_path / "trainer_state.json").touch()
    with pytest.raises(CheckpointError, match="Hugging Face Trainer"):
        locate(tmp_path)


def test_an_unreadable_directory_is_an_error_and_not_empty(tmp_path):
    path = tmp_path / "checkpoints"
    path.touch()
    with pytest.raises(CheckpointError, match="cannot list the checkpoints"):
        discover(path)


def test_listing_opens_nothing_but_manifests(step, monkeypatch):
    for number in range(5, 8):
        shutil.copytree(step, step.with_name(f"step_{number:08d}"))
    opened = []
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(path) or real_open(path, *rest, **more))
    assert len(discover(step.parent)) == 4
    assert {os.path.basename(path) for path in opened} == {"manifest.json"}
    assert len(opened) == 4
