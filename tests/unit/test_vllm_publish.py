"""Weights on disk for the servers: whole or absent, exact, and there for as long as somebody may read them."""

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.models import build, write_config
from support.pool import run_on_ranks
from trainer.core.distributed import build_mesh
from trainer.core.files import file_hook
from trainer.errors import TrainingError
from trainer.models.state import persistent_tensors
from trainer.rl.vllm.publish import MANIFEST, WeightsFolder, folder_for


@pytest.fixture
def folder(tmp_path) -> WeightsFolder:
    folder = WeightsFolder(tmp_path / "served")
    folder.clear()
    return folder


def tiny(tmp_path: Path, **changes):
    return build(write_config(tmp_path / "model", **changes), random_init=True)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_publication_holds_every_weight_once(tmp_path, folder, dtype, tied):
    model = tiny(tmp_path, tie_word_embeddings=tied)
    publication = folder.publish(model, 3, dtype, max_file_bytes=20_000)
    found = stored(publication.path)
    assert ("lm_head.weight" in found) is not tied
    expected = {name: tensor.to(dtype) for name, tensor in persistent_tensors(model).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    manifest = json.loads((publication.path / MANIFEST).read_text())
    sizes = {path.name: path.stat().st_size for path in publication.path.glob("*.safetensors")}
    assert len(sizes) > 1 and manifest == {"version": 3, "files": sizes}
    assert publication.weights_bytes == sum(sizes.values())


def test_a_version_appears_whole_after_its_manifest(tmp_path, folder):
    seen: list[tuple[str, str, bool]] = []

    def watch(operation: str, path: Path) -> None:
        seen.append((operation, path.name, folder.path(1).exists()))

    with file_hook(watch):
        folder.publish(tiny(tmp_path), 1, torch.float32)
    names = [(operation, name) for operation, name, _ in seen]
    assert names.index(("create", MANIFEST)) < names.index(("rename", folder.path(1).name))
    assert not any(exists for operation, _, exists in seen[: names.index(("rename", folder.path(1).name)) + 1])
    assert (folder.path(1) / MANIFEST).exists()


def test_a_full_disk_leaves_no_version_behind(tmp_path, folder):
    def full(operation: str, path: Path) -> None:
        if operation == "write":
            raise OSError(errno.ENOSPC, "No space left on device")

    with file_hook(full), pytest.raises(TrainingError, match=r"No space left.*engine\.weights_dir"):
        folder.publish(tiny(tmp_path), 1, torch.float32)
    assert not folder.path(1).exists() and folder.versions == []
    folder.publish(tiny(tmp_path), 1, torch.float32)  # what the failure left is in nobody's way
    assert folder.versions == [1]


def test_no_version_goes_before_the_slowest_reader_has_it(tmp_path, folder):
    model = tiny(tmp_path)
    for reader in ("fast", "slow"):
        folder.expect(reader)
    folder.publish(model, 1, torch.float32)
    folder.acknowledge("slow", 1)
    for version in (2, 3, 4):
        folder.publish(model, version, torch.float32)
        folder.acknowledge("fast", version)
        assert all((folder.path(v) / MANIFEST).exists() for v in range(2, version + 1))
    assert folder.versions == [2, 3, 4]
    folder.acknowledge("slow", 3)
    assert folder.versions == [4] and [path.name for path in folder.root.iterdir()] == [folder.path(4).name]


def test_the_newest_version_stays_for_servers_that_start_again(tmp_path, folder):
    folder.expect("a")
    folder.publish(tiny(tmp_path), 1, torch.float32)
    folder.acknowledge("a", 1)
    folder.forget("a")
    assert folder.versions == [1]
    folder.expect("a")  # it is back, and reads
    folder.publish(tiny(tmp_path), 2, torch.float32)
    assert folder.versions == [1, 2]


def test_a_reader_that_is_gone_holds_nothing(tmp_path, folder):
    folder.expect("a")
    folder.expect("b")
    for version in (1, 2):
        folder.publish(tiny(tmp_path), version, torch.float32)
        folder.acknowledge("a", version)
    assert folder.versions == [1, 2]
    folder.forget("b")
    assert folder.versions == [2]


def test_what_a_killed_run_left_is_cleared(tmp_path):
    root = tmp_path / "served"
    (root / "version_00000007").mkdir(parents=True)
    folder = WeightsFolder(root)
    folder.clear()
    assert list(root.iterdir()) == []
    folder.close()
    assert not root.exists()


def test_runs_that_share_a_disk_have_folders_of_their_own(tmp_path):
    one, two = tmp_path / "a" / "run", tmp_path / "b" / "run"
    assert folder_for(one, None) == one / "weights-served"
    assert folder_for(one, "/mnt/x") == folder_for(one, "/mnt/x") != folder_for(two, "/mnt/x")


def _publish_sharded(model_dir: str, root: str) -> list[int]:
    mesh = build_mesh("cpu", 1, -1, 2)
    model = build(Path(model_dir), mesh=mesh, random_init=True)
    folder = WeightsFolder(Path(root))
    folder.publish(model, 1, torch.float32)
    return folder.versions


def test_sharded_weights_are_published_whole(tmp_path, folder):
    model_dir = write_config(tmp_path / "model", tie_word_embeddings=True)
    run_on_ranks(_publish_sharded, 2, str(model_dir), str(folder.root))
    expected = persistent_tensors(build(model_dir, random_init=True))
    found = stored(folder.path(1))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
