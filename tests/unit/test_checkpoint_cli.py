"""`trainer ckpt ls | show | diff`."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from support.checkpoints import Run, Table
from trainer.cli.ckpt import main


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two runs of the same history, saved at steps 2 and 4."""
    root = tmp_path_factory.mktemp("pair")
    for name in ("a", "b"):
        run = Run(root / name)
        for _ in range(2):
            run.train(2)
            run.save()
    return root


def diff(capsys, *argv):
    code = main(["diff", *map(str, argv)])
    return code, capsys.readouterr()


def changed(tmp_path, change):
    """A run like those of `pair`, at step 4, with `change(run)` applied before it is saved."""
    run = Run(tmp_path / "changed")
    run.train(4)
    with torch.no_grad():
        change(run)
    return run.save()


def test_equal_states_are_identical(pair, capsys):
    code, output = diff(capsys, pair / "a/checkpoints/step_00000004", pair / "b/checkpoints/step_00000004")
    assert code == 0
    assert output.out.splitlines()[-1] == "identical"
    assert diff(capsys, pair / "a", pair / "b")[0] == 0  # of a run, the newest
    assert diff(capsys, pair / "a", pair / "a/checkpoints/step_00000002")[0] == 1


def test_one_bit_of_one_element_is_a_difference(pair, tmp_path, capsys):
    def change(run):
        weight = run.module[2].weight
        weight.view(torch.int32)[1, 3] ^= 1

    code, output = diff(capsys, pair / "a", changed(tmp_path, change))
    assert code == 1
    assert "1 differences\nmodel: 1\n  model.2.weight: 1 of 30 elements differ, at most by " in output.out
    assert "identical" not in output.out


def test_negative_zero_and_nan_are_compared_by_their_bits(tmp_path, capsys):
    def run(name, *values):
        run = Run(tmp_path / name)
        run.app.owners["extra"] = Table(values=torch.tensor(values))
        return run.save()

    a, b = run("a", 0.0, 1.0, float("nan")), run("b", -0.0, 1.0, float("nan"))
    assert diff(capsys, a, a)[0] == 0
    code, output = diff(capsys, a, b)
    assert code == 1
    assert "extra.values: 1 of 3 elements differ, at most by 0" in output.out
    assert "1 not finite" in diff(capsys, a, run("c", 0.0, float("inf"), float("nan")))[1].out


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e5m2]
)
def test_every_kind_of_tensor_is_compared(tmp_path, capsys, dtype):
    def run(name, *values):
        run = Run(tmp_path / name)
        run.app.owners["extra"] = Table(values=torch.tensor(values).to(dtype), scalar=torch.tensor(values[0]).to(dtype))
        return run.save()

    a, b = run("a", 0.0, 1.0, 0.0), run("b", 1.0, 1.0, 0.0)
    assert diff(capsys, a, run("same", 0.0, 1.0, 0.0))[0] == 0
    code, output = diff(capsys, a, b)
    assert code == 1
    assert "extra.values: 1 of 3 elements differ" in output.out
    assert "extra.scalar: 1 of 1 elements differ" in output.out
    assert ("at most by 1" in output.out) == (dtype != torch.float8_e5m2)


def test_entries_counters_and_shapes_are_compared(pair, tmp_path, capsys):
    def change(run):
        run.optimizer.inner.param_groups[0]["lr"] = 1e-10
        run.progress.entries["tokens"] += 1
        run.progress.entries["extra"] = None
        run.optimizer.inner.state[run.module[0].bias]["exp_avg"] = torch.zeros(11)
        run.app.owners["data"] = Table(cursor=7)

    code, output = diff(capsys, pair / "a", changed(tmp_path, change))
    assert code == 1
    for line in (
        "5 differences",
        "  optimizer.group.lr: 0.025 != 1e-10",
        "  optimizer.state.0.bias.exp_avg: F32 [10] != F32 [11]",
        "  progress.tokens: 192 != 193",
        "  progress.extra: None, only in B",
        "  data: only in B",
    ):
        assert line in output.out.splitlines()


def test_few_differences_are_printed_unless_all_are_wanted(pair, tmp_path, capsys):
    path = changed(tmp_path, lambda run: [tensor.add_(1) for tensor in run.app.state_dict().values() if tensor.dim()])
    code, output = diff(capsys, pair / "a", path, "--limit", 2)
    assert code == 1
    assert "more; --all prints them" in output.out
    _, everything = diff(capsys, pair / "a", path, "--all")
    assert "more; --all" not in everything.out
    assert len(everything.out.splitlines()) > len(output.out.splitlines())
    code, as_json = diff(capsys, pair / "a", path, "--json")
    found = json.loads(as_json.out)["differences"]
    assert code == 1
    assert {entry["owner"] for entry in found} == {"model", "optimizer"}


def test_what_cannot_be_compared_is_an_error_of_its_own(pair, tmp_path, capsys):
    damaged = shutil.copytree(pair / "b/checkpoints/step_00000004", tmp_path / "step_00000004")
    (damaged / "rank_00000.safetensors").write_bytes(b"")
    code, output = diff(capsys, pair / "a", damaged)
    assert code == 2
    assert "rank_00000.safetensors has 0 bytes" in output.err
    assert diff(capsys, pair / "a", tmp_path / "nothing")[0] == 2
    assert main(["diff", "one"]) == 2
    assert main(["nonsense"]) == 2
    assert main(["--help"]) == 0


def test_ls(pair, tmp_path, capsys):
    run_dir = shutil.copytree(pair / "a", tmp_path / "run")
    (run_dir / "checkpoints/step_00000004/metadata.json").unlink()
    (run_dir / "checkpoints/step_00000006.tmp-0123abcd").mkdir()
    assert main(["ls", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert [word in line for word, line in zip(["committed", "corrupt", "incomplete"], lines[1:], strict=True)] == [
        True
    ] * 3
    assert "metadata.json is missing" in lines[2]
    assert main(["ls", str(run_dir), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["status"]) for row in rows] == [(2, "committed"), (4, "corrupt"), (None, "incomplete")]
    assert main(["ls", str(run_dir / "checkpoints/step_00000002")]) == 2
    assert main(["ls", str(tmp_path)]) == 2


def test_show(pair, capsys):
    assert main(["show", str(pair / "a")]) == 0
    text = capsys.readouterr().out
    for part in (
        "step 4",
        "resumable",
        "progress.tokens = 192",
        "optimizer.group.lr = 0.025",
        "model.0.weight  F32 [10, 6]",
    ):
        assert part in text
    assert main(["show", str(pair / "a"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["manifest"]["step"] == 4
    assert shown["state"]["progress"] == {"step": 4, "tokens": 192}
    assert shown["tensors"]["model.0.weight"] == {"dtype": "F32", "shape": [10, 6], "bytes": 240}


def test_show_tells_the_mesh(tmp_path, capsys):
    run = Run(tmp_path)
    for mesh, text in (
        ({}, "written by 1 rank\n"),
        ({"replicate": 2, "shard": 4}, "by 1 rank (replicate 2 x shard 4)"),
    ):
        run.manager.describe = lambda mesh=mesh: {"mesh": mesh}
        run.train()
        assert main(["show", str(run.save())]) == 0
        assert text in capsys.readouterr().out


def test_none_of_it_imports_torch(pair):
    a, b = str(pair / "a"), str(pair / "b")
    code = (
        "import sys; from trainer.cli.ckpt import main; "
        f"codes = [main(['ls', {a!r}]), main(['show', {a!r}]), main(['diff', {a!r}, {b!r}])]; "
        "assert codes == [0, 0, 0], codes; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
