"""The native AdamW kernel: torch's bits, or torch."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import Adam, AdamW

from support.offload import Run
from support.pool import run_on_ranks
from trainer.optim.offload import native
from trainer.optim.offload.native import NativeAdamW, load_kernel


@pytest.fixture(scope="module")
def kernel() -> Any:
    found = load_kernel()
    if found is None:
        pytest.skip("there is no C compiler here, or torch's arithmetic is another one")
    return found


def make(shapes: list[tuple[int, ...]], **options: Any) -> AdamW:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = AdamW(parameters, **({"lr": 1e-2, "weight_decay": 0.1, "fused": True} | options))
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)
        }  # fmt: skip
    return optimizer


def everything(optimizer: AdamW) -> list[torch.Tensor]:
    parameters = optimizer.param_groups[0]["params"]
    return [t for p in parameters for t in (p.detach(), *optimizer.state[p].values())]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.51, 0.5)])
def test_bits_of_torch_over_many_steps(kernel, monkeypatch, threads, factor, betas):
    shapes = [(64, 33), (5,), (1,), (7, 9), (0,), (16,), (1001,)]
    ours, theirs = make(shapes, betas=betas), make(shapes, betas=betas)
    stepper = NativeAdamW(ours, kernel)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for step in range(30):
        generator = torch.Generator().manual_seed(step)
        for a, b in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
            a.grad = torch.randn(a.shape, generator=generator) * 10.0 ** (step % 5 - 4)
            b.grad = a.grad.clone() if factor is None else a.grad * torch.tensor(factor)
        unscaled = [p.grad.clone() for p in ours.param_groups[0]["params"]]
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 1e-2 / (step + 1)
        mine = ours.param_groups[0]["params"]
        members = stepper.plan({0: mine})
        assert members is not None
        rounded = {id(p): torch.zeros_like(p, dtype=torch.bfloat16) for p in mine[::2]}
        stepper.step(members, None if factor is None else torch.tensor(factor), rounded)
        theirs.step()
        assert all(torch.equal(a, b) for a, b in zip(everything(ours), everything(theirs), strict=True)), step
        assert all(torch.equal(rounded[id(p)], p.bfloat16()) for p in mine[::2])
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(mine, unscaled, strict=True))


def test_rounding_of_special_values(kernel):
    optimizer = make([(8,), (4,)], lr=0.0, weight_decay=0.0)
    values = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1.00390625, 1.01171875, 3.4e38, 1e-45])
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].copy_(values)
        optimizer.param_groups[0]["params"][1].copy_(torch.tensor([float("nan"), 1.0, -2.0, 1e-40]))
    parameters = optimizer.param_groups[0]["params"]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    out = {id(p): torch.zeros_like(p, dtype=torch.bfloat16) for p in parameters}
    stepper = NativeAdamW(optimizer, kernel)
    stepper.step(stepper.plan({0: parameters}), None, out)
    for parameter in parameters:
        assert torch.equal(out[id(parameter)].isnan(), parameter.isnan())
        finite = ~parameter.isnan()
        assert torch.equal(out[id(parameter)][finite], parameter.bfloat16()[finite])


@pytest.mark.parametrize("transfer", ["auto", "copy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_full_has_the_same_bits_with_and_without_it(kernel, monkeypatch, transfer, dtype, max_norm):
    kwargs = {"dtype": dtype, "max_norm": max_norm, "accumulate": 2, "transfer": transfer}
    runs = [Run("full", chunk_bytes=chunk_bytes, **kwargs) for chunk_bytes in (300, 10**6)]
    assert all(run.optimizer._native is not None for run in runs)
    monkeypatch.setenv(native.SWITCH, "0")
    runs.append(Run("full", chunk_bytes=300, **kwargs))
    assert runs[-1].optimizer._native is None
    runs.append(Run("none", dtype=dtype, max_norm=max_norm, accumulate=2))
    for _ in range(4):
        assert len({tuple(run.train()) for run in runs}) == 1
        assert all(run.bits() == runs[-1].bits() for run in runs)
        for run in runs[:-1]:
            for name, parameter in run.model.named_parameters():
                assert torch.equal(parameter, run.optimizer.masters.masters[name].to(dtype)), name


def test_it_is_used(kernel, monkeypatch):
    """The test above must compare two ways: with a wrong kernel the bits differ."""
    run, reference = Run("full", max_norm=0.5), Run("none", max_norm=0.5)
    run.optimizer._native._kernel = lambda *arguments: None
    run.train(), reference.train()
    assert run.bits() != reference.bits()


@pytest.mark.parametrize(
    "options",
    [{"amsgrad": True}, {"maximize": True}, {"betas": (0.5, 0.9)}, {"fused": False}, {"lr": torch.tensor(0.1)}],
)
def test_other_branches_are_left_to_torch(kernel, options):
    optimizer = make([(4,)], **options)
    parameters = optimizer.param_groups[0]["params"]
    parameters[0].grad = torch.ones(4)
    assert NativeAdamW(optimizer, kernel).plan({0: parameters}) is None


def test_other_tensors_and_rules_are_left_to_torch(kernel):
    optimizer = make([(4, 4), (4,)])
    stepper, (matrix, vector) = NativeAdamW(optimizer, kernel), optimizer.param_groups[0]["params"]
    vector.grad = torch.ones(4)
    assert stepper.plan({0: [vector]}) is not None
    optimizer.state[vector]["exp_avg"] = torch.zeros(4, dtype=torch.float64)
    assert stepper.plan({0: [vector]}) is None
    matrix.grad = torch.ones(4, 4)
    assert stepper.plan({0: [matrix]}) is not None
    for gradient in (torch.ones(4, 4).t(), torch.ones(4, 8)[:, ::2]):  # another order in memory than the weight's
        matrix.grad = gradient
        assert stepper.plan({0: [matrix]}) is None
    del optimizer.state[vector]
    assert stepper.plan({0: [vector]}) is None

    for entry in ("exp_avg", "exp_avg_sq", "step"):  # the same tensor as in the step before, with other memory
        optimizer = make([(4,)])
        stepper, (vector,) = NativeAdamW(optimizer, kernel), optimizer.param_groups[0]["params"]
        vector.grad = torch.ones(4)
        assert stepper.plan({0: [vector]}) is not None
        optimizer.state[vector][entry].data = optimizer.state[vector][entry].double()
        assert stepper.plan({0: [vector]}) is None, entry

    class Mine(AdamW):
        pass

    assert NativeAdamW.of(Mine([nn.Parameter(torch.ones(1))], fused=True)) is None
    assert NativeAdamW.of(Adam([nn.Parameter(torch.ones(1))], fused=True)) is None


def sharded_apart() -> tuple[list[bool], bool]:
    """Whether it takes a weight in shards with its gradient in such shards, in others; and equality with torch's step."""
    mesh = init_device_mesh("cpu", (2,))
    optimizers = []
    for _ in range(2):
        weight = nn.Parameter(distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]))
        weight.grad = distribute_tensor(torch.arange(8.0) - 3.5, mesh, [Shard(0)])
        optimizer = AdamW([weight], lr=0.1, fused=True)
        optimizer.state[weight] = {
            "step": distribute_tensor(torch.zeros(()), mesh, [Replicate()]),
            "exp_avg": torch.zeros_like(weight, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(weight, requires_grad=False),
        }
        optimizers.append(optimizer)
    kernel = load_kernel()
    (ours,), (theirs,) = (optimizer.param_groups[0]["params"] for optimizer in optimizers)
    stepper = NativeAdamW(optimizers[0], kernel)
    members = stepper.plan({0: [ours]})
    taken = [members is not None]
    stepper.step(members, None, {})
    optimizers[1].step()
    pairs = zip(
        [ours, *optimizers[0].state[ours].values()], [theirs, *optimizers[1].state[theirs].values()], strict=True
    )
    same = all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    for placement in (Replicate(), Partial()):
        ours.grad = DTensor.from_local(torch.ones(8), mesh, [placement])
        taken.append(stepper.plan({0: [ours]}) is not None)
    return taken, same


def test_shards(kernel):
    assert run_on_ranks(sharded_apart, 2) == [([True, False, False], True)] * 2


# --- where it cannot be had -----------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No kernel is known yet, and the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "load_kernel", native.load_kernel.__wrapped__)
    return tmp_path


def test_without_a_compiler_torch_does_it(fresh, monkeypatch):
    monkeypatch.setenv("CC", "there-is-no-such-compiler")
    assert native.load_kernel() is None
    run = Run("full", dtype=torch.bfloat16, max_norm=0.5)
    assert run.optimizer._native is None
    reference = Run("none", dtype=torch.bfloat16, max_norm=0.5)
    run.train(2), reference.train(2)
    assert run.bits() == reference.bits()


def test_a_compiler_that_fails_is_survived(fresh, monkeypatch):
    compiler = fresh / "cc"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'it is broken' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    assert native.load_kernel() is None


def test_a_compiler_without_openmp_is_survived(fresh, monkeypatch):
    compiler = fresh / "cc"
    compiler.write_text(
        '#!/bin/sh\ncase " $* " in *" -fopenmp "*) echo "no such option" >&2; exit 1; esac\nexec cc "$@"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    assert native.load_kernel() is None


def test_two_may_compile_at_the_same_time(fresh, kernel, monkeypatch):
    """Containers on several machines, with one home directory and the same process ids."""
    done, compiler = fresh / "done", fresh / "cc"
    done.mkdir()
    wait = f"touch {done}/$$; for _ in $(seq 1000); do [ $(ls {done} | wc -l) = 2 ] && exit; sleep 0.01; done"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec cc --version\ncc "$@" && {{ {wait}; }}\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    with ThreadPoolExecutor(2) as threads:
        first, second = [threads.submit(native._compiled) for _ in range(2)]
    assert first.result() == second.result()
    assert [path.name for path in (fresh / "cache" / "exact-trainer").iterdir()] == [first.result().name]


def test_a_user_without_a_home_is_no_reason_to_fail(fresh, kernel, monkeypatch):
    """A container that runs under any number as its user: Path.home() raises RuntimeError."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.setattr(native.tempfile, "tempdir", str(fresh))
    assert native.load_kernel() is not None
    assert [path.name for path in fresh.glob("exact-trainer-*/*")]


def test_a_kernel_with_other_bits_is_refused(fresh, kernel, monkeypatch, tmp_path):
    wrong = tmp_path / "wrong.c"
    wrong.write_text(
        native.SOURCE.read_text().replace("#define TAIL __builtin_fmaf(v, beta2, (rest2 * g) * g)", "#define TAIL BODY")
    )
    monkeypatch.setattr(native, "SOURCE", wrong)
    assert native.load_kernel() is None


@pytest.mark.parametrize("default", ["dtype", "device"])
def test_it_is_checked_whatever_the_defaults_are(kernel, default):
    """A kernel for float32 that is given bfloat16 writes behind its end."""
    set_default = torch.set_default_dtype if default == "dtype" else torch.set_default_device
    set_default(torch.bfloat16 if default == "dtype" else "meta")
    try:
        assert native.equals_torch(kernel)
    finally:
        set_default(torch.float32 if default == "dtype" else None)


def test_it_is_compiled_once(fresh, kernel):
    assert native.load_kernel() is not None
    folder = fresh / "cache" / "exact-trainer"
    (library,) = folder.iterdir()
    before = os.stat(library).st_mtime_ns
    assert native.load_kernel() is not None
    assert [path.name for path in folder.iterdir()] == [library.name] and os.stat(library).st_mtime_ns == before
