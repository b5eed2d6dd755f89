import pytest
import torch

from support.models import build, save_reference
from trainer.models.generate import generate


def test_greedy_equals_transformers(tmp_path):
    reference = save_reference(tmp_path)
    model = build(tmp_path).train()
    ids = reference.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert generate(model, [5, 6, 7], max_new_tokens=8) == ids[0, 3:].tolist()
    assert model.training


def test_it_stops_at_the_end_token_and_keeps_it(tmp_path):
    save_reference(tmp_path)
    model = build(tmp_path)
    free = generate(model, [5], max_new_tokens=6)
    end = free[3]
    assert generate(model, [5], max_new_tokens=6, eos_ids=[end]) == free[: free.index(end) + 1]


def test_sampling_depends_on_the_seed_alone(tmp_path):
    save_reference(tmp_path)
    model = build(tmp_path)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed + 100)
        draws.append(generate(model, [5], max_new_tokens=12, temperature=5.0, seed=seed))
    assert draws[0] == draws[1] != draws[2]
    assert generate(model, [5], max_new_tokens=4, temperature=1e-4) == generate(model, [5], max_new_tokens=4)


@pytest.mark.parametrize("impl", ["native", "hf"])
def test_no_tokens_wanted_none_given(tmp_path, impl):
    save_reference(tmp_path)
    assert generate(build(tmp_path, impl=impl), [5], max_new_tokens=0) == []
