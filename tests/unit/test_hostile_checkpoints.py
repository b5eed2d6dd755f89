"""Checkpoints that want to do harm: each is refused by name, nothing in them runs, and nobody waits or runs out of memory.

Two kinds of sample: our own format with tables that lie, and other trainers' with pickles that act. A pickle that was run
would leave a file behind.
"""

import json
import os
import pickle
import resource
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoints import Run
from trainer.checkpoint.discovery import Status, inspect_step
from trainer.checkpoint.layout import Chunk, overlap
from trainer.checkpoint.manifest import dump_manifest, read_manifest
from trainer.cli.ckpt import main
from trainer.errors import CheckpointError, TrainerError

LIMIT_BYTES = 8 << 30  # address space over what the process has: what an honest reader needs is far less


@pytest.fixture(autouse=True)
def little_memory():
    """Whoever asks for the terabytes that a table claims gets a MemoryError, and the test fails."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Payload:
    """Pickled, it is a call: `os.mkdir(marker)` as soon as somebody loads it."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path):
    """The directory that a payload would make."""
    path = tmp_path / "was-run"
    yield path
    assert not path.exists(), "something in the checkpoint was run"


def test_the_payload_acts_when_it_is_loaded(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "was-run")))
    assert (tmp_path / "was-run").exists()


# -- our own format --------------------------------------------------------------------------------------------------------


@pytest.fixture
def step_dir(tmp_path) -> Path:
    run = Run(tmp_path / "run")
    run.train(2)
    return run.save()


def sealed(path: Path, **files: bytes) -> Path:
    """Writes files and a manifest that vouches for them, as an attacker would."""
    from dataclasses import replace

    from trainer.core.files import FileRecord, xxh3

    for name, data in files.items():
        (path / name.replace("__", ".")).write_bytes(data)
    manifest = read_manifest(path)
    records = {name: FileRecord((path / name).stat().st_size, xxh3(path / name)) for name in manifest.files}
    (path / "manifest.json").write_bytes(dump_manifest(replace(manifest, files=records)))
    return path


def tables(path: Path) -> dict[str, Any]:
    return json.loads((path / "metadata.json").read_bytes())


def refused(path: Path, capsys, *words: str) -> None:
    """Every command that reads the checkpoint ends with a message that has the words; a resume refuses it as well."""
    commands = [["show", str(path)], ["diff", str(path), str(path)], ["verify", str(path)]]
    for command in commands:
        assert main(command) in (1, 2), command
        output = capsys.readouterr()
        text = output.out + output.err
        assert "damaged" in text or "error: " in text
        assert all(word in text for word in words), text
    run = Run(path.parents[1].parent / "other")
    with pytest.raises(TrainerError) as caught:
        run.resume(dir=str(path))
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_sample_is_sound_before_it_is_tampered_with(step_dir):
    assert main(["verify", str(sealed(step_dir))]) == 0


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "sub/file", ".hidden", "", "a\0b", 7, None, ["x"]])
def test_paths_that_lead_out_of_the_directory(step_dir, name, capsys):
    document = tables(step_dir)
    next(iter(document["tensors"].values()))["chunks"][0]["file"] = name
    refused(sealed(step_dir, metadata__json=json.dumps(document).encode()), capsys, "not a plain file name")


@pytest.mark.parametrize("target", ["/etc/passwd", "/dev/zero", "elsewhere"])
def test_symlinks_are_never_followed(step_dir, target, capsys):
    shard = step_dir / "rank_00000.safetensors"
    if target == "elsewhere":
        shutil.move(shard, step_dir.parent / "elsewhere")
        target = str(step_dir.parent / "elsewhere")
    else:
        shard.unlink()
    shard.symlink_to(target)
    assert inspect_step(step_dir).status is Status.CORRUPT
    for command in (["show", str(step_dir)], ["diff", str(step_dir), str(step_dir)], ["verify", str(step_dir)]):
        assert main(command) in (1, 2)
        output = capsys.readouterr()
        assert "is not a regular file" in output.out + output.err


def test_a_pipe_keeps_nobody_waiting(step_dir, capsys):
    (step_dir / "metadata.json").unlink()
    os.mkfifo(step_dir / "metadata.json")
    assert main(["show", str(step_dir)]) == 2
    assert "is not a regular file" in capsys.readouterr().err
    (step_dir / "manifest.json").unlink()
    os.mkfifo(step_dir / "manifest.json")
    assert inspect_step(step_dir).status is Status.CORRUPT


def change(document, key, value):
    """Sets an entry of the first tensor of more than one dimension, or of its chunk."""
    tensor = next(t for t in document["tensors"].values() if len(t["shape"]) > 1)
    target = tensor if key in tensor else tensor["chunks"][0]
    target[key] = value
    return tensor


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape", [1 << 50, 1 << 50]),
        ("shape", [-1, 6]),
        ("shape", [1.5, 6]),
        ("shape", [True, 6]),
        ("shape", "many"),
        ("dtype", "F128"),
        ("dtype", ["F32"]),
        ("chunks", {}),
        ("chunks", []),
        ("chunks", [7]),
        ("offsets", [0, 1]),
        ("offsets", [1 << 70, 0]),
        ("sizes", [1 << 40, 6]),
        ("start", 1 << 62),
        ("start", -8),
        ("start", None),
        ("bytes", 1 << 45),
        ("bytes", 0),
    ],
)
def test_sizes_and_offsets_that_cannot_be(step_dir, key, value, capsys):
    document = tables(step_dir)
    change(document, key, value)
    refused(sealed(step_dir, metadata__json=json.dumps(document).encode()), capsys, "metadata.json: tensor")


def test_a_consistent_lie_about_terabytes(step_dir, capsys):
    """Shape, chunk and byte count agree with each other, and not with the file."""
    document = tables(step_dir)
    rows = 1 << 40
    tensor = change(document, "shape", [rows, 6])
    tensor["chunks"] = [{**tensor["chunks"][0], "sizes": [rows, 6], "bytes": rows * 24}]
    refused(sealed(step_dir, metadata__json=json.dumps(document).encode()), capsys, "ends at byte", "which has")
    document["tensors"]["json"]["shape"] = [1 << 45]
    document["tensors"]["json"]["chunks"] = [
        {**document["tensors"]["json"]["chunks"][0], "sizes": [1 << 45], "bytes": 1 << 45}
    ]
    refused(sealed(step_dir, metadata__json=json.dumps(document).encode()), capsys, "ends at byte")


def test_tensors_that_share_bytes(step_dir, capsys):
    document = tables(step_dir)
    big = [t for t in document["tensors"].values() if t["shape"] == [10, 6]]
    big[1]["chunks"][0]["start"] = big[0]["chunks"][0]["start"] + 4
    refused(sealed(step_dir, metadata__json=json.dumps(document).encode()), capsys, "shares bytes")


def test_chunks_that_cover_an_element_twice(step_dir, capsys):
    document = tables(step_dir)
    tensor = change(document, "shape", [10, 6])
    (chunk,) = tensor["chunks"]
    half = {**chunk, "sizes": [5, 6], "bytes": 120}
    tensor["chunks"] = [half, {**half, "start": chunk["start"] + 120, "offsets": [3, 0]}]
    refused(sealed(step_dir, metadata__json=json.dumps(document).encode()), capsys, "exactly once")


def test_a_table_of_countless_chunks_costs_no_hours():
    """100,000 steps of a staircase, each as wide as all of it, would be five billion comparisons."""

    def chunk(row: int, column: int, rows: int) -> Chunk:
        return Chunk((row, column), (rows, 1), "rank_00000.safetensors", 0, 4 * rows)

    count = 100_000
    assert overlap([chunk(step, 2 * step, count) for step in range(count)])
    assert not overlap([chunk(step, 2 * step, 500) for step in range(500)])
    assert not overlap([chunk(0, column, 4) for column in range(count)])
    assert not overlap([chunk(row, 0, 1) for row in range(count)])
    assert overlap([chunk(0, column, 4) for column in range(count)] + [chunk(3, count // 2, 1)])


@pytest.mark.parametrize("depth", [150, 100_000])
def test_deep_json(step_dir, depth, capsys):
    deep = ("[" * depth + "]" * depth).encode()
    table = (b'{"a":' * depth) + b"1" + b"}" * depth
    for data in (deep, table):
        refused(sealed(step_dir, metadata__json=data), capsys, "metadata.json")
    original = read_manifest(step_dir)
    (step_dir / "manifest.json").write_bytes(table)
    assert inspect_step(step_dir).status is Status.CORRUPT
    body = json.loads(dump_manifest(original))
    text = json.dumps(body | {"run": "@"}).replace('"@"', deep.decode().replace("[", '{"a":[').replace("]", "]}"))
    (step_dir / "manifest.json").write_text(text)
    candidate = inspect_step(step_dir)
    assert candidate.status is Status.CORRUPT and candidate.reason


def test_deep_state(step_dir, capsys):
    """The JSON document of entries, nested just below what Python's own parser takes."""
    shard = step_dir / "rank_00000.safetensors"
    document = tables(step_dir)
    chunk = document["tensors"]["json"]["chunks"][0]
    data = bytearray(shard.read_bytes())
    depth = min(400, (chunk["bytes"] - 20) // 2)
    text = b'{"progress":{"a":' + b"[" * depth + b"]" * depth + b"}}"
    data[chunk["start"] : chunk["start"] + chunk["bytes"]] = text.ljust(chunk["bytes"])
    shard.write_bytes(data)
    del chunk["xxh3"]
    refused(sealed(step_dir, metadata__json=json.dumps(document).encode()), capsys, "nested more than")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "2"),
        ("step", -1),
        ("step", 2.0),
        ("step", True),
        ("world_size", 1e308),
        ("micro_step", None),
        ("resumable", "yes"),
        ("reason", 3),
        ("run", []),
        ("versions", "new"),
        ("parent", [1]),
        ("metrics", ["val_loss"]),
        ("metrics", {"val_loss": "low"}),
        ("surprise", 1),
        ("files", {"../x": {"size_bytes": 1, "xxh3": "0"}}),
        ("files", {"x": {"size_bytes": 1e400, "xxh3": "0"}}),
        ("files", []),
        ("format", 10**6),
    ],
)
def test_manifests_that_lie_about_their_types(step_dir, name, value, capsys):
    from trainer.core.files import xxh3_bytes

    body = json.loads((step_dir / "manifest.json").read_bytes()) | {name: value, "checksum": "0" * 16}
    text = json.dumps({"checksum": body.pop("checksum"), **body})
    (step_dir / "manifest.json").write_text(text.replace("0" * 16, xxh3_bytes(text.encode()), 1))
    assert inspect_step(step_dir).status in (Status.CORRUPT, Status.FOREIGN)
    assert main(["show", str(step_dir)]) == 2
    assert "manifest.json" in capsys.readouterr().err


def test_files_of_unbelievable_size(step_dir, capsys):
    """Sparse files: terabytes of nothing, which cost no disk and would cost all memory."""
    for name in ("metadata.json", "manifest.json"):
        with (step_dir / name).open("r+b") as file:
            file.truncate(1 << 43)
        assert main(["show", str(step_dir)]) == 2
        assert name in capsys.readouterr().err


def test_pickles_beside_our_files_are_never_opened(step_dir, marker):
    for name in (".metadata", "__0_0.distcp", "optimizer.pt", "training_args.bin"):
        (step_dir / name).write_bytes(pickle.dumps(Payload(marker)))
    sealed(step_dir)
    assert main(["verify", str(step_dir)]) == 0
    run = Run(step_dir.parents[1].parent / "other")
    assert run.resume(dir=str(step_dir)) == 2


# -- other trainers' -------------------------------------------------------------------------------------------------------


def brought_in(source: Path, out: Path) -> None:
    from support import runs
    from trainer.config.load import load_config
    from trainer.config.run import SFTConfig
    from trainer.train.importing import import_checkpoint

    os.chdir(runs.REPO)
    import_checkpoint(source, out, load_config(SFTConfig, runs.DEBUG).config)


def is_refused(source: Path, tmp_path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        brought_in(source, tmp_path / "in")
    assert not (tmp_path / "in").exists()


@pytest.fixture(scope="module")
def hf_source(tmp_path_factory) -> Path:
    from support.foreign import ForeignRun

    return ForeignRun().train(2).save_hf_trainer(tmp_path_factory.mktemp("hf") / "checkpoint-2")


@pytest.fixture(scope="module")
def dcp_source(tmp_path_factory) -> Path:
    from support.foreign import ForeignRun

    def one_group(model, weight_decay):
        return [{"params": list(model.parameters())}]

    return ForeignRun(groups=one_group).train(2).save_prime_rl(tmp_path_factory.mktemp("dcp") / "step_2")


def copy_of(source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source, tmp_path / "source")


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt"])
@pytest.mark.parametrize("form", ["torch.save", "pickle", "legacy"])
def test_payloads_in_files_that_are_read(hf_source, tmp_path, marker, file, form):
    source = copy_of(hf_source, tmp_path)
    if form == "pickle":
        (source / file).write_bytes(pickle.dumps(Payload(marker)))
    else:
        payload = {"state": Payload(marker), "param_groups": [Payload(marker)], "last_epoch": Payload(marker)}
        torch.save(payload, source / file, _use_new_zipfile_serialization=form == "torch.save")
    is_refused(source, tmp_path, f"{file}.*(nothing of it was run|bare pickles and not read)")


def test_payloads_in_files_that_are_not_read(hf_source, tmp_path, marker):
    source = copy_of(hf_source, tmp_path)
    for name in ("training_args.bin", "rng_state.pth", "pytorch_model.bin", "scaler.pt"):
        (source / name).write_bytes(pickle.dumps(Payload(marker)))
    brought_in(source, tmp_path / "in")
    assert inspect_step(tmp_path / "in/checkpoints/step_00000002").status is Status.COMMITTED


def test_a_bomb_of_zeros(hf_source, tmp_path):
    source = copy_of(hf_source, tmp_path)
    with zipfile.ZipFile(source / "optimizer.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (64 << 20))
    assert (source / "optimizer.pt").stat().st_size < 1 << 20
    is_refused(source, tmp_path, "optimizer.pt is compressed, which torch.save never does")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "[]",
        "",
        '{"global_step": 1e999}',
        '{"global_step": -1}',
        '{"global_step": "2"}',
    ],
)
def test_trainer_states_that_are_none(hf_source, tmp_path, text):
    source = copy_of(hf_source, tmp_path)
    (source / "trainer_state.json").write_text(text)
    is_refused(source, tmp_path, "trainer_state.json")


def test_a_trainer_state_of_unbelievable_size(hf_source, tmp_path):
    source = copy_of(hf_source, tmp_path)
    os.truncate(source / "trainer_state.json", 1 << 42)
    is_refused(source, tmp_path, "trainer_state.json has 4398046511104 bytes")


def test_weights_outside_the_directory(hf_source, tmp_path):
    from trainer.errors import ModelError

    source = copy_of(hf_source, tmp_path)
    (source / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    state = json.loads((source / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    with pytest.raises(ModelError, match="refusing to follow it"):
        brought_in(source, tmp_path / "in")


@pytest.mark.parametrize("header", [(1 << 62).to_bytes(8, "little"), (200 << 20).to_bytes(8, "little"), b"short"])
def test_safetensors_with_a_huge_header(hf_source, tmp_path, header):
    from trainer.errors import ModelError

    source = copy_of(hf_source, tmp_path)
    (source / "model.safetensors").write_bytes(header + b"{}")
    with pytest.raises(ModelError, match="model.safetensors cannot be read as safetensors"):
        brought_in(source, tmp_path / "in")


def metadata_of(source: Path) -> Any:
    return pickle.loads((source / ".metadata").read_bytes())


@pytest.mark.parametrize("function", [os.mkdir, eval, exec, getattr, torch.load, pickle.loads, sys.exit, open])
def test_metadata_that_names_a_function(dcp_source, tmp_path, marker, function):
    class Call:
        def __reduce__(self):
            return function, (str(marker),)

    source = copy_of(dcp_source, tmp_path)
    metadata = metadata_of(source)
    metadata.planner_data = Call()
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    is_refused(source, tmp_path, "it wants .*, which has no place in a checkpoint's metadata; nothing of it was run")


def test_metadata_cannot_change_dcps_own_classes(dcp_source, tmp_path):
    """BUILD on a class sets its attributes. The classes that a pickle gets are its own."""
    from torch.distributed.checkpoint.metadata import Metadata

    source = copy_of(dcp_source, tmp_path)
    attack = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'poisoned'\nI1\nstb."
    (source / ".metadata").write_bytes(attack)
    is_refused(source, tmp_path, "metadata")
    assert not hasattr(Metadata, "poisoned")


@pytest.mark.parametrize("data", [b"", b"junk", b"\x80\x05", pickle.dumps(7), pickle.dumps({}), pickle.dumps([[]] * 9)])
def test_metadata_that_is_none(dcp_source, tmp_path, data):
    source = copy_of(dcp_source, tmp_path)
    (source / ".metadata").write_bytes(data)
    is_refused(source, tmp_path, r"\.metadata")


def test_metadata_behind_a_symlink(dcp_source, tmp_path):
    source = copy_of(dcp_source, tmp_path)
    (source / ".metadata").rename(tmp_path / "real")
    (source / ".metadata").symlink_to(tmp_path / "real")
    is_refused(source, tmp_path, "symlinks are not followed")


def tampered(dcp_source: Path, tmp_path: Path, change) -> Path:
    source = copy_of(dcp_source, tmp_path)
    metadata = metadata_of(source)
    change(metadata)
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    return source


NORM = "app.model.model.norm.weight"


def place_of_norm(metadata):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == NORM)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("relative_path", "../outside.distcp", "not a plain file name"),
        ("relative_path", "/etc/passwd", "not a plain file name"),
        ("relative_path", 7, "not a plain file name"),
        ("relative_path", "missing.distcp", "is missing"),
        ("offset", 1 << 60, "which has"),
        ("offset", -5, "bytes from -5"),
        ("length", 1 << 60, "which has"),
        ("length", 10, "are said to lie in 10"),
        ("length", "all", "bytes from"),
        ("transform_descriptors", ["zstd"], "which is not read"),
    ],
)
def test_places_that_cannot_be(dcp_source, tmp_path, field, value, message):
    source = tampered(dcp_source, tmp_path, lambda metadata: setattr(place_of_norm(metadata), field, value))
    is_refused(source, tmp_path, message)


def test_a_shard_behind_a_symlink(dcp_source, tmp_path):
    source = copy_of(dcp_source, tmp_path)
    (source / "__0_0.distcp").rename(tmp_path / "real")
    (source / "__0_0.distcp").symlink_to(tmp_path / "real")
    is_refused(source, tmp_path, "is a symlink; refusing to follow it")


def test_a_tensor_of_terabytes(dcp_source, tmp_path):
    def change(metadata):
        entry = metadata.state_dict_metadata[NORM]
        entry.size = torch.Size([1 << 42])
        entry.chunks[0].sizes = torch.Size([1 << 42])

    is_refused(tampered(dcp_source, tmp_path, change), tmp_path, "bytes are said to lie in")


def test_chunks_over_each_other(dcp_source, tmp_path):
    def change(metadata):
        entry = metadata.state_dict_metadata[NORM]
        entry.chunks.append(entry.chunks[0])

    is_refused(tampered(dcp_source, tmp_path, change), tmp_path, "exactly once")


def test_a_payload_in_place_of_a_value_or_tensor(dcp_source, tmp_path, marker):
    """Another entry's bytes are put where one is read: first a number of the progress, then a weight."""
    import io

    for name, message in (("app.progress.step", "nothing of it was run"), (NORM, "nothing of it was run")):
        source = tmp_path / name
        shutil.copytree(dcp_source, source)
        buffer = io.BytesIO()
        torch.save(Payload(marker), buffer)
        metadata = metadata_of(source)
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == name)
        shard = source / info.relative_path
        info.offset, info.length = shard.stat().st_size, len(buffer.getvalue())
        with shard.open("ab") as file:
            file.write(buffer.getvalue())
        (source / ".metadata").write_bytes(pickle.dumps(metadata))
        is_refused(source, tmp_path, message)


def test_a_tensor_that_is_another_than_announced(dcp_source, tmp_path):
    def change(metadata):
        other = next(info for index, info in metadata.storage_data.items() if "down_proj" in index.fqn)
        info = place_of_norm(metadata)
        info.offset, info.length = other.offset, other.length

    is_refused(tampered(dcp_source, tmp_path, change), tmp_path, r"norm.weight' is torch.float32 \[64, 128\]")


def test_names_without_end_and_odd_keys(dcp_source, tmp_path):
    def change(metadata):
        metadata.state_dict_metadata["x" * 100_000] = metadata.state_dict_metadata[NORM]
        metadata.state_dict_metadata[7] = metadata.state_dict_metadata[NORM]

    is_refused(tampered(dcp_source, tmp_path, change), tmp_path, r"\.metadata")
