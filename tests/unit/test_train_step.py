"""One step: how a batch is cut up never changes the gradient, and what is not finite never reaches the weights."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from support.pool import run_on_ranks
from trainer.data.batch import GlobalBatch, MicroBatch
from trainer.train.cross_entropy import cross_entropy
from trainer.train.progress import Progress
from trainer.train.step import evaluate, train_step

VOCAB = 16


class Model(nn.Module):
    """Embedding and head: what the loss needs of a language model."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 8)
        self.dropout = nn.Dropout(dropout)
        self.lm_head = nn.Linear(8, VOCAB, bias=False)

    def forward(self, input_ids, position_ids, document_ids, head=None):
        hidden = self.dropout(self.embed(input_ids))
        return self.lm_head(hidden) if head is None else head(hidden, self.lm_head.weight)


def micro_batch(*rows: int, width: int = 128) -> MicroBatch:
    """One row for each number: that many supervised tokens, the rest padding."""
    generator = torch.Generator().manual_seed(sum(rows))
    ids = torch.randint(0, VOCAB, (len(rows), width), generator=generator)
    labels = torch.full_like(ids, -100)
    for row, count in enumerate(rows):
        labels[row, :count] = (ids[row, :count] * 3 + 1) % VOCAB
    places = torch.arange(width).expand_as(ids)
    return MicroBatch(ids, labels, places.contiguous(), torch.zeros_like(ids, dtype=torch.int32), [[""]] * len(rows))


def batch(micro_batches: list[MicroBatch], supervised_tokens: int | None = None) -> GlobalBatch:
    supervised = sum(int((m.labels != -100).sum()) for m in micro_batches)
    rows = sum(len(m.ids) for m in micro_batches)
    return GlobalBatch(0, 0, False, micro_batches, rows, rows, 0, supervised_tokens or supervised)


def one_step(
    micro_batches, *, model=None, optimizer=None, supervised_tokens=None, step=0, max_norm=None, loss=cross_entropy
):
    model = model or Model()
    gradients = {}
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(
        lambda *_: gradients.update({name: p.grad.clone() for name, p in model.named_parameters()})
    )
    result = train_step(
        model,
        optimizer,
        loss,
        batch(micro_batches, supervised_tokens),
        step=step,
        seed=0,
        rank=0,
        device=torch.device("cpu"),
        max_norm=max_norm,
    )
    return result, gradients, model


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and a
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-7)


def test_i1_tokens_weigh_the_same_in_every_micro_batch():
    """Means 1 and 2 over 10 and 100 tokens are 1.909 together, not 1.5."""

    def constant(model, micro):
        count = int((micro.labels != -100).sum())
        return sum(p.sum() * 0.0 for p in model.parameters()) + float(count * (1.0 if count == 10 else 2.0))

    result, _, _ = one_step([micro_batch(10), micro_batch(100)], loss=constant)
    assert result.loss == pytest.approx((10 * 1 + 100 * 2) / 110)


def test_i2_accumulated_equals_the_whole_batch():
    whole, parts = micro_batch(11, 101), micro_batch(11, 101)
    pieces = [
        MicroBatch(
            *(getattr(parts, key)[i : i + 1] for key in ("input_ids", "labels", "position_ids", "document_ids")),
            ids=[[""]],
        )
        for i in range(2)
    ]
    (one, one_gradients, _), (two, two_gradients, _) = one_step([whole]), one_step(pieces)
    assert one.loss == pytest.approx(two.loss, rel=1e-6)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-6)
    same(one_gradients, two_gradients)


def test_c6_a_short_cycle_is_normalised_by_its_own_tokens():
    sample = micro_batch(20)
    full, short = one_step([sample] * 4)[0], one_step([sample] * 2)[0]
    assert full.loss == pytest.approx(short.loss, rel=1e-6)
    assert full.grad_norm == pytest.approx(short.grad_norm, rel=1e-6)


def _one_rank_of_two(rows: list[int], supervised_tokens: int):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = fully_shard(Model(), mesh=mesh)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    mine = [micro_batch(rows[dist.get_rank()])]
    result, gradients, _ = one_step(mine, model=model, supervised_tokens=supervised_tokens)
    return result.loss, result.grad_norm, {name: grad.full_tensor() for name, grad in gradients.items()}


def test_i1_two_ranks_give_the_gradient_of_one():
    """Rank 0 has 5 supervised tokens, rank 1 has 1."""
    loss, norm, gradients = run_on_ranks(_one_rank_of_two, 2, [5, 1], 6)[0]
    single, single_gradients, _ = one_step([micro_batch(5), micro_batch(1)])
    assert loss == pytest.approx(single.loss, rel=1e-6)
    assert norm == pytest.approx(single.grad_norm, rel=1e-6)
    same(gradients, single_gradients)


def test_a_rank_without_supervised_tokens_takes_part():
    loss, _, gradients = run_on_ranks(_one_rank_of_two, 2, [5, 0], 5)[0]
    single, single_gradients, _ = one_step([micro_batch(5)])
    assert loss == pytest.approx(single.loss, rel=1e-6)
    same(gradients, single_gradients)


def test_clipping_bounds_the_global_norm_and_reports_the_norm_before():
    free, before, _ = one_step([micro_batch(30)])
    clipped, after, _ = one_step([micro_batch(30)], max_norm=free.grad_norm / 4)
    assert clipped.grad_norm == pytest.approx(free.grad_norm)
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in after.values()))
    assert norm == pytest.approx(free.grad_norm / 4, rel=1e-5)
    assert before.keys() == after.keys()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(bad):
    def poisoned(model, micro):
        return cross_entropy(model, micro) * bad

    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result, _, _ = one_step([micro_batch(8)], model=model, loss=poisoned)
    assert not result.finite
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    good, _, _ = one_step([micro_batch(8)], model=model)
    assert good.finite
    assert not all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_d11_dropout_is_addressed_by_step_and_micro_step():
    """The same draws after a resume, whatever was drawn before; others in another step or micro-step."""

    def loss_at(step, micro_steps=1, drawn=0):
        torch.rand(drawn)
        return one_step([micro_batch(20)] * micro_steps, model=Model(dropout=0.5), step=step)[0].loss

    assert loss_at(3) == loss_at(3, drawn=100)
    assert loss_at(3) != loss_at(4)
    assert loss_at(3, micro_steps=2) != pytest.approx(loss_at(3), rel=1e-9)


def test_evaluation_touches_nothing():
    model = Model(dropout=0.5).train()
    state = torch.get_rng_state()
    batches = [batch([micro_batch(10)]), batch([micro_batch(100)])]
    loss, tokens = evaluate(model, partial(cross_entropy), batches, device=torch.device("cpu"))
    again, _ = evaluate(model, partial(cross_entropy), batches, device=torch.device("cpu"))
    assert (loss, tokens) == (again, 110)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_progress_counts_training_only_and_survives_a_round_trip():
    progress = Progress()
    counted = GlobalBatch(0, 2, False, [], rows=8, documents=20, tokens=900, supervised_tokens=300)
    progress.advance(counted, applied=True)
    progress.advance(counted, applied=False)
    assert progress == Progress(2, 1800, 600, 16, 40, epoch=2, skipped_updates=1)
    restored = Progress()
    restored.load_state_dict(progress.state_dict())
    assert restored == progress
