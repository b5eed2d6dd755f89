"""Muon's step on plain tensors: against its reference, torch's own optimizers, and its groups' promises."""

import copy

import pytest
import torch
from torch import Tensor, nn

from trainer.errors import TrainingError
from trainer.optim import muon
from trainer.optim.muon import Muon, adjusted_ratio
from trainer.optim.muon_groups import fast_dtype
from trainer.optim.muon_reference import muon_reference

SHAPES = [(8, 8), (8, 8), (24, 10), (10, 24), (8, 8), (4, 6, 15), (1, 5), (3, 7, 7)]


def tensors(shapes, seed: int, dtype=torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def set_gradients(parameters: list[nn.Parameter], step: int) -> list[Tensor]:
    for parameter, gradient in zip(parameters, tensors([p.shape for p in parameters], 100 + step), strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    return [parameter.grad for parameter in parameters]  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.8},
        {"adjust_lr": "spectral_norm", "weight_decay": 0.3},
        {"adjust_lr": "none", "ns_steps": 3},
        {"ns_coefficients": "polar_express"},
        {"split_sizes": (3, 3, 2), "weight_decay": 0.1},
    ],
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_the_reference(options, dtype, bound):
    shapes = [(8, 8), (8, 20), (2, 8, 3)] if "split_sizes" in options else SHAPES
    parameters = [nn.Parameter(tensor) for tensor in tensors(shapes, 0, dtype)]
    optimizer = Muon(parameters, lr=0.1, compute_dtype=str(dtype).removeprefix("torch."), **options)
    options = {"lr": 0.1, **options}
    expected = [(p.detach().double().clone(), torch.zeros_like(p).double()) for p in parameters]
    for step in range(3):
        gradients = set_gradients(parameters, step)
        optimizer.step()
        expected = [muon_reference(w, g, m, **options) for (w, m), g in zip(expected, gradients, strict=True)]
    for parameter, (weight, momentum) in zip(parameters, expected, strict=True):
        assert (parameter.double() - weight).abs().max() < bound
        assert (optimizer.state[parameter]["momentum_buffer"].double() - momentum).abs().max() < bound


def test_bfloat16_iteration_is_the_reference_up_to_its_rounding():
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((64, 64), (64, 160), (160, 64))]
    optimizer = Muon(parameters, lr=1.0, compute_dtype="bfloat16")
    gradients = set_gradients(parameters, 0)
    optimizer.step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        expected, _ = muon_reference(torch.zeros_like(gradient), gradient, torch.zeros_like(gradient), lr=1.0)
        assert (parameter.double() - expected).norm() / expected.norm() < 0.08


def test_equals_torch_muon():
    """torch iterates in bfloat16 and keeps (1 - momentum) times our momentum."""
    shapes = [(64, 64), (64, 160), (160, 64)]
    ours, theirs = ([nn.Parameter(tensor) for tensor in tensors(shapes, 0)] for _ in range(2))
    optimizers = [
        Muon(ours, lr=0.02, weight_decay=0.1, compute_dtype="float32"),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for optimizer in optimizers:
            optimizer.step()
    for mine, other, start in zip(ours, theirs, tensors(shapes, 0), strict=True):
        assert (mine - other).norm() / (mine - start).norm() < 0.05


def test_fused_matrices_and_stacks_are_their_matrices():
    (q, k, v), experts = tensors([(8, 12), (4, 12), (4, 12)], 0), tensors([(3, 5, 9)], 1)[0]
    gradients = tensors([(8, 12), (4, 12), (4, 12)], 2), tensors([(3, 5, 9)], 3)[0]
    options = {"lr": 0.1, "weight_decay": 0.2, "compute_dtype": "float64", "adjust_lr": "rms_norm"}

    def step(parameters: list[nn.Parameter], grads: list[Tensor], **more) -> list[Tensor]:
        for parameter, gradient in zip(parameters, grads, strict=True):
            parameter.grad = gradient.clone()
        Muon(parameters, **options, **more).step()
        return [parameter.detach() for parameter in parameters]

    apart = step([nn.Parameter(t.clone()) for t in (q, k, v)], list(gradients[0]))
    fused = step([nn.Parameter(torch.cat([q, k, v]))], [torch.cat(gradients[0])], split_sizes=(8, 4, 4))[0]
    assert torch.allclose(fused, torch.cat(apart), atol=1e-6)
    assert not torch.allclose(
        step([nn.Parameter(torch.cat([q, k, v]))], [torch.cat(gradients[0])])[0], fused, atol=1e-3
    )
    each = step([nn.Parameter(matrix.clone()) for matrix in experts], list(gradients[1]))
    assert torch.allclose(step([nn.Parameter(experts)], [gradients[1]])[0], torch.stack(each), atol=1e-6)


def test_a_parameters_update_does_not_depend_on_its_company(monkeypatch):
    """Stepping units apart, as chunked offloading does, and batching by any size give the same bits."""

    def run(unit_elements: int, apart: bool) -> list[Tensor]:
        monkeypatch.setitem(muon._UNIT_ELEMENTS, "cpu", unit_elements)
        parameters = [nn.Parameter(tensor) for tensor in tensors(SHAPES, 0)]
        optimizer = Muon(parameters, lr=0.1, compute_dtype="bfloat16")
        set_gradients(parameters, 0)
        units = optimizer.chunk_units()
        assert sorted(map(id, sum(units, []))) == sorted(map(id, parameters))
        if not apart:
            optimizer.step()
        for unit in units if apart else []:
            optimizer.param_groups[0]["params"] = unit
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    results = [run(2**22, False), run(2**22, True), run(1, False), run(128, True)]
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_adjusted_lr_numbers():
    assert adjusted_ratio("rms_norm", 768, 2048) == adjusted_ratio("rms_norm", 2048, 768)
    assert adjusted_ratio("rms_norm", 768, 2048) == pytest.approx(9.050966799187808)  # 0.2 sqrt(2048)
    assert adjusted_ratio("spectral_norm", 2048, 512) == 2.0
    assert adjusted_ratio("spectral_norm", 512, 2048) == 1.0
    assert adjusted_ratio("none", 2048, 512) == 1.0


def test_rms_norm_gives_updates_the_rms_of_adamws():
    parameter = nn.Parameter(torch.zeros(48, 120))
    optimizer = Muon([parameter], lr=1.0, ns_coefficients="polar_express", ns_steps=8, compute_dtype="float64")
    set_gradients([parameter], 0)
    optimizer.step()
    assert parameter.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-3)


def test_decay_is_applied_without_a_gradient_signal():
    """G6: weight decay 10 at lr 0.01 and zero gradients: every weight is multiplied by 0.9."""
    muon_parameter, adamw_parameter = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8))
    optimizer = Muon(
        [{"params": [muon_parameter]}, {"params": [adamw_parameter], "algorithm": "adamw"}], lr=1e-2, weight_decay=10
    )
    for parameter in (muon_parameter, adamw_parameter):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in (muon_parameter, adamw_parameter):
        assert torch.equal(parameter.detach(), torch.full_like(parameter, 1 - 1e-2 * 10))


def test_the_adamw_half_is_torchs_bit_for_bit():
    shapes = [(16, 8), (8,), (1,), (33,)]
    ours, theirs = ([nn.Parameter(tensor) for tensor in tensors(shapes, 0)] for _ in range(2))
    optimizers = [
        Muon([{"params": ours, "algorithm": "adamw"}], lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
        torch.optim.AdamW(theirs, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, fused=True),
    ]
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        for entry in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizers[0].state[mine][entry], optimizers[1].state[other][entry])


def test_parameters_without_a_gradient_are_left_alone():
    parameters = [nn.Parameter(torch.ones(6, 6)) for _ in range(2)] + [nn.Parameter(torch.ones(6))]
    optimizer = Muon(
        [{"params": parameters[:2]}, {"params": parameters[2:], "algorithm": "adamw"}], lr=0.1, weight_decay=1.0
    )
    parameters[0].grad = torch.ones(6, 6)
    optimizer.step()
    assert not torch.equal(parameters[0], torch.ones(6, 6))
    for parameter in parameters[1:]:
        assert torch.equal(parameter.detach(), torch.ones_like(parameter))
        assert not any(tensor.any() for tensor in optimizer.state[parameter].values())
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


def test_state_is_complete_and_inert_at_construction():
    matrix, vector = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(6))
    optimizer = Muon([{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}])
    made = {id(p): set(entries) for p, entries in optimizer.state.items()}
    assert made == {id(matrix): {"momentum_buffer"}, id(vector): {"exp_avg", "exp_avg_sq"}}
    assert not any(tensor.any() or tensor.requires_grad for e in optimizer.state.values() for tensor in e.values())
    before = set(optimizer.state[matrix]), set(optimizer.state[vector])
    for parameter in (matrix, vector):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert (set(optimizer.state[matrix]), set(optimizer.state[vector])) == before


def test_groups_hold_what_their_algorithm_uses():
    matrix, vector = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(6))
    groups = [{"name": "muon", "params": [matrix]}, {"name": "adamw", "params": [vector], "algorithm": "adamw"}]
    optimizer = Muon(groups, lr=0.3)
    shared = {"name", "params", "lr", "weight_decay", "algorithm", "step"}
    options = {"momentum", "nesterov", "adjust_lr", "ns_coefficients", "ns_steps", "compute_dtype", "split_sizes"}
    assert set(optimizer.param_groups[0]) == shared | options
    assert set(optimizer.param_groups[1]) == shared | {"betas", "eps"}
    assert optimizer.param_groups[0]["compute_dtype"] == fast_dtype(torch.device("cpu"))
    assert fast_dtype(torch.device("meta")) == "bfloat16"


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"params": [torch.ones(4)]}, "no matrix.*adamw"),
        ({"params": [torch.ones(2, 2, 2, 2)]}, "no matrix"),
        ({"params": [torch.ones(4, 4)], "split_sizes": (3, 2)}, r"\[3, 2\].*4 rows"),
        ({"params": [torch.ones(4, 4)], "split_sizes": (4, 0)}, "positive"),
        ({"params": [torch.ones(4, 4)], "adjust_lr": "spectral"}, "adjust_lr.*spectral_norm"),
        ({"params": [torch.ones(4, 4)], "ns_coefficients": "cubic"}, "ns_coefficients.*quintic"),
        ({"params": [torch.ones(4, 4)], "compute_dtype": "float16"}, "compute_dtype"),
        ({"params": [torch.ones(4, 4)], "ns_steps": 0}, "ns_steps"),
        ({"params": [torch.ones(4, 4)], "algorithm": "lion"}, "algorithm.*lion"),
    ],
)
def test_impossible_groups_are_refused_by_name(group, words):
    optimizer = Muon([nn.Parameter(torch.ones(4, 4))])
    with pytest.raises(TrainingError, match=rf"'mine'.*{words}"):
        optimizer.add_param_group({"name": "mine", **group})
    assert len(optimizer.param_groups) == len(optimizer.state) == len(optimizer.chunk_units()) == 1


def test_a_closure_runs_once_with_gradients_before_the_update():
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([parameter], lr=0.1)
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (parameter * 2).sum()
        loss.backward()
        seen.append(loss.item())
        return loss

    assert optimizer.step(closure) == 32.0  # type: ignore[arg-type]
    assert seen == [32.0] and not torch.equal(parameter, torch.ones(4, 4))
    assert optimizer.param_groups[0]["step"] == 1


def test_a_copy_steps_on_its_own():
    parameters = [nn.Parameter(tensor) for tensor in tensors(SHAPES, 0)]
    optimizer = Muon(parameters, lr=0.1)
    other = copy.deepcopy(optimizer)
    copied = other.param_groups[0]["params"]
    for each, theirs in ((optimizer, parameters), (other, copied)):
        set_gradients(theirs, 0)
        each.step()
    assert all(torch.equal(a, b) and a is not b for a, b in zip(parameters, copied, strict=True))


def test_low_precision_weights_and_no_parameters():
    parameter = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    optimizer = Muon([{"params": [parameter]}, {"params": []}, {"params": [], "algorithm": "adamw"}], lr=0.5)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert parameter.dtype == torch.bfloat16 and parameter.isfinite().all()


def test_matrices_can_be_orthogonalised_elsewhere():
    results = []
    for device in (None, torch.device("cpu")):
        parameters = [nn.Parameter(tensor) for tensor in tensors(SHAPES, 0)]
        optimizer = Muon(parameters, lr=0.1, compute_device=device)
        set_gradients(parameters, 0)
        copy.deepcopy(optimizer).step()
        assert copy.deepcopy(optimizer).compute_device == device
        optimizer.step()
        results.append(parameters)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
