import pytest
import torch

from support.models import build, gradients, loss_sum, packed, save_reference, write_config
from trainer.errors import CheckpointMismatch
from trainer.models.state import ModelState


def test_every_parameter_once_live_and_nothing_else(tmp_path):
    model = build(write_config(tmp_path, tie_word_embeddings=True), random_init=True)
    state = ModelState(model).state_dict()
    assert "lm_head.weight" not in state and "model.rotary_emb.inv_freq" not in state
    assert {id(tensor) for tensor in state.values()} == {id(parameter) for parameter in model.parameters()}


def test_loading_copies_into_the_live_tensors(tmp_path):
    """Optimizers and losses that hold the model from before the load train and see the loaded weights."""
    write_config(tmp_path)
    model, source = build(tmp_path, random_init=True, seed=1), build(tmp_path, random_init=True, seed=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    saved = {name: tensor.detach().clone() for name, tensor in ModelState(source).state_dict().items()}
    ModelState(model).load_state_dict(saved)
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert all(torch.equal(parameter, saved[name]) for name, parameter in model.named_parameters())
    batch = packed([7, 5], tokens=16)
    for each in (model, source):
        loss_sum(each, batch).backward()
    assert all(torch.equal(grad, gradients(source)[name]) for name, grad in gradients(model).items())
    optimizer.step()
    assert not torch.equal(model.embedding.weight, saved["model.embed_tokens.weight"])


def test_loading_its_own_state_is_inert(tmp_path):
    model = build(write_config(tmp_path), random_init=True)
    state = ModelState(model)
    before = {name: tensor.detach().clone() for name, tensor in state.state_dict().items()}
    state.load_state_dict(state.state_dict())
    assert all(torch.equal(before[name], tensor) for name, tensor in state.state_dict().items())


def test_what_does_not_fit_is_named_and_nothing_is_copied(tmp_path):
    model = build(write_config(tmp_path), random_init=True)
    state = ModelState(model)
    wrong = {name: tensor.detach() + 1 for name, tensor in state.state_dict().items()}
    del wrong["model.norm.weight"]
    wrong["extra"] = torch.zeros(1)
    wrong["lm_head.weight"] = torch.zeros(3, 4)
    before = model.embedding.weight.detach().clone()
    with pytest.raises(CheckpointMismatch) as caught:
        state.load_state_dict(wrong)
    message = str(caught.value)
    assert "missing: model.norm.weight" in message and "unexpected: extra" in message
    assert "lm_head.weight: shape (3, 4) in the checkpoint, (97, 32) in the model" in message
    assert torch.equal(model.embedding.weight, before)


def test_persistent_buffers_are_state_and_derived_ones_are_not(tmp_path):
    save_reference(tmp_path)
    model = build(tmp_path)
    model.register_buffer("counter", torch.zeros(2))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    assert "counter" in ModelState(model).state_dict() and "scratch" not in ModelState(model).state_dict()
