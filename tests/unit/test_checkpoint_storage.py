"""Tensors through the shard files: every dtype and shape, bit for bit, and readable by the safetensors library."""

import itertools
import pickle

import pytest
import torch
from safetensors import safe_open

from support.checkpoints import fails_at, whole
from trainer.checkpoint.dcp import DTYPE_NAMES
from trainer.checkpoint.layout import ITEM_BYTES, read_layout
from trainer.checkpoint.storage import load_tensors, save_tensors
from trainer.core.files import file_hook, xxh3
from trainer.errors import CheckpointError, CorruptCheckpoint


def of_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits of a dtype, so NaNs with payloads, denormals and negative zeros too."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(shape)


def everything() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {}
    for dtype in DTYPE_NAMES:
        for shape in ((), (0,), (3, 0, 2), (1,), (7,), (3, 5), (2, 3, 4)):
            state[f"o.{DTYPE_NAMES[dtype]}.{'x'.join(map(str, shape)) or 'scalar'}"] = of_dtype(dtype, shape)
    state["o.transposed"] = torch.randn(4, 6).t()
    state["o.slice"] = torch.randn(6, 6)[1:5, ::2]
    state["o.parameter"] = torch.nn.Parameter(torch.randn(5, 2))
    return state


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    state = everything()
    before = whole(state)
    written = save_tensors(tmp_path, state)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    target["o.parameter"] = torch.nn.Parameter(torch.zeros(5, 2))
    target["o.transposed"] = torch.zeros(4, 6).t()  # loaded into other memory than it can be read into
    target["o.slice"] = torch.zeros(8, 8)[2:6, 1:7:2]
    load_tensors(tmp_path, read_layout(tmp_path), target)
    assert whole(target) == before == whole(state)
    assert target["o.parameter"].requires_grad
    for name, record in written.items():
        assert (tmp_path / name).stat().st_size == record.size_bytes
        assert xxh3(tmp_path / name) == record.xxh3


def test_the_dtype_table_has_the_right_sizes():
    assert {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()} == ITEM_BYTES


def test_another_tool_reads_the_file(tmp_path):
    state = {name: tensor for name, tensor in everything().items() if "E8M0" not in name}
    save_tensors(tmp_path, state)
    with safe_open(tmp_path / "rank_00000.safetensors", "pt") as file:
        assert set(file.keys()) == set(state)
        found = {name: file.get_tensor(name) for name in state}
    assert whole(found) == whole(state)


def test_entries_are_aligned_and_without_holes(tmp_path):
    save_tensors(tmp_path, everything())
    places = []
    for tensor in read_layout(tmp_path).values():
        for chunk in tensor.chunks:
            assert chunk.start % ITEM_BYTES[tensor.dtype] == 0
            places.append((chunk.start, chunk.start + chunk.size_bytes))
    places.sort()
    assert places[0][0] % 64 == 0
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(places))
    assert places[-1][1] == (tmp_path / "rank_00000.safetensors").stat().st_size


@pytest.mark.parametrize("k", range(6))  # shard: create, write, fsync; metadata: create, write, fsync
def test_a_failed_write_names_rank_file_and_reason(tmp_path, k):
    with (
        file_hook(fails_at(k, OSError(28, "No space left on device"))),
        pytest.raises(CheckpointError, match=r"rank 0: cannot write .*No space left on device") as failure,
    ):
        save_tensors(tmp_path, {"o.a": torch.ones(3), "o.b": torch.ones(3)})
    assert ("metadata.json" if k >= 3 else "rank_00000.safetensors") in str(failure.value)


def test_dtypes_without_a_name_are_refused_by_tensor(tmp_path):
    with pytest.raises(CheckpointError, match=r"rank 0: tensor 'o\.z' has dtype torch\.complex64"):
        save_tensors(tmp_path, {"o.z": torch.zeros(2, dtype=torch.complex64)})


def test_a_value_that_is_no_tensor_is_refused_and_never_pickled(tmp_path):
    with pytest.raises(CheckpointError, match=r"'o\.n' is not a tensor"):
        save_tensors(tmp_path, {"o.n": 3})  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())


def test_a_truncated_file_is_named(tmp_path):
    save_tensors(tmp_path, {"o.a": torch.ones(300)})
    layout = read_layout(tmp_path)
    path = tmp_path / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpoint, match=r"rank_00000\.safetensors ends at byte"):
        load_tensors(tmp_path, layout, {"o.a": torch.zeros(300)})


def test_a_symlinked_shard_is_not_followed(tmp_path):
    (tmp_path / "ckpt").mkdir()
    save_tensors(tmp_path / "ckpt", {"o.a": torch.ones(3)})
    layout = read_layout(tmp_path / "ckpt")
    shard = tmp_path / "ckpt" / "rank_00000.safetensors"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpoint, match="is a symlink"):
        load_tensors(tmp_path / "ckpt", layout, {"o.a": torch.zeros(3)})


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was executed",)


def test_pickles_lying_in_the_directory_are_never_read(tmp_path, monkeypatch):
    save_tensors(tmp_path, {"o.a": torch.ones(3)})
    for name in (".metadata", "__0_0.distcp", "state.pt", "o.a.pkl"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb()))

    def refuse(*_, **__):
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    target = {"o.a": torch.zeros(3)}
    load_tensors(tmp_path, read_layout(tmp_path), target)
    assert target["o.a"].tolist() == [1, 1, 1]
