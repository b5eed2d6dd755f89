"""Who holds a model, a tensor or a group from before a load holds what trains after it; tied and grown tables included."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from support.models import save_reference
from support.runs import REPO, checkpoint, differences, opened, sft
from trainer.checkpoint.manager import CheckpointManager
from trainer.optim.offload.base import named_parameters
from trainer.train.cross_entropy import cross_entropy
from trainer.train.loop import take_step

MODES = ("none", "optimizer", "full")
QUICK = ("--val.interval", "0")


def held(owners: Any, schedule: Any) -> dict[str, Any]:
    """Objects and addresses: weights, optimizer state, and the groups that the schedule writes into."""
    optimizer = owners["optimizer"].optimizer
    tensors = dict(owners["model"].state_dict())
    for name, parameter in named_parameters(optimizer).items():
        tensors |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return {
        "tensors": {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors.items()},
        "parameters": [id(parameter) for parameter in named_parameters(optimizer).values()],
        "groups": [id(group) for group in optimizer.param_groups],
        "scheduled": [id(group) for group in schedule._groups],
    }


@pytest.mark.parametrize("mode", MODES)
def test_h1_a_load_replaces_nothing_that_others_hold(mode, tmp_path, monkeypatch):
    """Tied weights, parameters, state and groups are the same objects at the same addresses, with the saved values."""
    sft(tmp_path / "run", *QUICK, "--stop-step", "5")
    seen, load = [], CheckpointManager.load

    def spy(self: CheckpointManager, *args: Any, **kwargs: Any) -> None:
        seen.append(held(self.app.owners, self.app.owners["schedule"]))
        load(self, *args, **kwargs)
        seen.append(held(self.app.owners, self.app.owners["schedule"]))

    monkeypatch.setattr(CheckpointManager, "load", spy)
    with opened(tmp_path / "b", *QUICK, "--model.offload", mode, "--resume.dir", tmp_path / "run") as run:
        assert seen[0] == seen[1] == held(run.checkpoints.app.owners, run.schedule)
        assert seen[0]["groups"] == seen[0]["scheduled"]
        assert run.model.output.weight.data_ptr() == run.model.embedding.weight.data_ptr()
        assert {group["lr"] for group in run.optimizer.param_groups} == {3e-3 * run.schedule.schedule.factor(5)}
        take_step(run, run.loader.next_batch())
        assert held(run.checkpoints.app.owners, run.schedule) == seen[0]
        assert run.model.output.weight.data_ptr() == run.model.embedding.weight.data_ptr()


def test_h1_a_tied_table_is_trained_saved_and_exported_once(tmp_path):
    sft(tmp_path / "run", *QUICK, "--stop-step", "5")
    sft(tmp_path / "run", *QUICK, "--resume")
    names = _exported(tmp_path / "run" / "weights")
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    with opened(tmp_path / "b", *QUICK, "--resume.dir", tmp_path / "run", "--max-steps", "12") as run:
        names = [name for group in run.optimizer.param_groups for name in group["param_names"]]
        assert names.count("model.embed_tokens.weight") == 1 and "lm_head.weight" not in names


def _exported(weights_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: t for path in weights_dir.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("added", [2, 7])
def test_h4_a_table_has_the_rows_that_the_tokenizer_needs_and_never_fewer(added, mode, tmp_path):
    """Three rows more than tokens; two new tokens fit, seven make it grow. Old rows, state and config agree."""
    source = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(REPO / "configs/debug/assets/tiny-llama")
    padded = len(tokenizer) + 3
    reference = save_reference(source, vocab_size=padded, max_position_embeddings=256, tie_word_embeddings=False)
    tokenizer.add_tokens([f"<new-{index}>" for index in range(added)])
    tokenizer.save_pretrained(source)
    rows = max(padded, len(tokenizer))
    flags = (*QUICK, "--model.name", source, "--no-model.random-init", "--model.offload", mode, "--max-steps", "3")
    with opened(tmp_path / "start", *flags) as run:
        for table, old in (
            (run.model.embedding.weight, reference.get_input_embeddings().weight),
            (run.model.output.weight, reference.get_output_embeddings().weight),
        ):
            assert len(table) == rows
            assert torch.equal(table[:padded], old)
    sft(tmp_path / "whole", *flags)
    sft(tmp_path / "run", *flags, "--stop-step", "2")
    sft(tmp_path / "run", *flags, "--resume")
    assert differences(checkpoint(tmp_path / "whole", 3), checkpoint(tmp_path / "run", 3)) == ""
    with opened(tmp_path / "again", *flags, "--resume.dir", tmp_path / "run") as run:
        named = named_parameters(run.optimizer)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            state = run.optimizer.state[named[name]]
            assert [len(state[key]) for key in ("exp_avg", "exp_avg_sq")] == [rows, rows]
            assert state["exp_avg"].any()
    config = json.loads((tmp_path / "run" / "weights" / "config.json").read_text())
    assert config["vocab_size"] == rows
    assert len(_exported(tmp_path / "run" / "weights")["model.embed_tokens.weight"]) == rows


@pytest.mark.parametrize("mode", MODES)
def test_h5_a_loss_that_closes_over_the_model_trains_the_resumed_one(mode, tmp_path):
    """It holds the model of the run, whose weights are those of the checkpoint; its gradients reach the optimizer."""
    sft(tmp_path / "run", *QUICK, "--stop-step", "5")
    holds: dict[str, Any] = {}

    def loss(model: Any, micro_batch: Any) -> Any:
        holds["given"] = model
        return cross_entropy(holds["model"], micro_batch)

    flags = (*QUICK, "--model.offload", mode, "--resume.dir", tmp_path / "run")
    with opened(tmp_path / "b", *flags, loss=loss) as run, opened(tmp_path / "c", *flags) as plain:
        holds["model"] = run.model
        before = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
        row, expected = (take_step(either, either.loader.next_batch()) for either in (run, plain))
        assert holds["given"] is run.model
        assert row["loss"] == expected["loss"] and row["grad_norm"] == expected["grad_norm"]
        live = dict(run.model.named_parameters())
        assert all(not torch.equal(live[name], before[name]) for name in before)
        saved = run.checkpoints.app.state_dict()
        for name, parameter in named_parameters(run.optimizer).items():
            assert run.optimizer.state[parameter]
            for key, tensor in run.optimizer.state[parameter].items():
                assert saved[f"optimizer.state.{name}.{key}"] is tensor
