"""`trainer ckpt prune` and `export`, and foreign directories told by name."""

import json
from pathlib import Path

import pytest
import torch

from support import runs
from support.checkpoints import Run, flip_bit, steps_of
from support.models import build, save_reference
from trainer.checkpoint.app_state import AppState
from trainer.checkpoint.discovery import Status, discover, inspect_step
from trainer.checkpoint.importers.recognise import mid_cycle_reason
from trainer.checkpoint.manager import CheckpointManager
from trainer.cli.ckpt import main
from trainer.config.train import CkptConfig
from trainer.models.state import ModelState


class TestPrune:
    @pytest.fixture
    def run_dir(self, tmp_path) -> Path:
        run = Run(tmp_path / "run")
        for _ in range(5):
            run.train()
            run.save()
        return tmp_path / "run"

    def test_the_rule_is_that_of_a_run(self, run_dir, capsys):
        """keep_last = 1 and keep_every = 2 of steps 1..5 leave 2, 4 and 5."""
        assert main(["prune", str(run_dir), "--keep-last", "1", "--keep-every", "2"]) == 0
        assert steps_of(run_dir) == [2, 4, 5]
        assert "removed 2 checkpoints" in capsys.readouterr().out

    def test_a_dry_run_removes_nothing_and_says_the_same(self, run_dir, capsys):
        assert main(["prune", str(run_dir), "--keep-last", "2", "--dry-run"]) == 0
        dry = capsys.readouterr().out
        assert steps_of(run_dir) == [1, 2, 3, 4, 5]
        assert main(["prune", str(run_dir), "--keep-last", "2"]) == 0
        assert capsys.readouterr().out == dry.replace("would remove", "removed")
        assert steps_of(run_dir) == [4, 5]

    def test_what_cannot_be_resumed_takes_no_place_and_stays(self, run_dir, capsys):
        (run_dir / "checkpoints/step_00000005/metadata.json").unlink()
        (run_dir / "checkpoints/step_00000009").mkdir()
        assert main(["prune", str(run_dir), "--keep-last", "1", "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["removed"], said["kept"], said["dry_run"]) == ([1, 2, 3], [4], False)
        assert steps_of(run_dir) == [4]
        assert (run_dir / "checkpoints/step_00000005").exists() and (run_dir / "checkpoints/step_00000009").exists()

    def test_the_best_can_stay(self, run_dir):
        run = Run(run_dir)
        assert run.resume() == 5
        for loss in (2.0, 1.0, 3.0):
            run.train()
            run.manager.save(run.step, metrics={"val_loss": loss})
        assert main(["prune", str(run_dir), "--keep-last", "1", "--keep-best", "1"]) == 0
        assert steps_of(run_dir) == [7, 8]

    def test_what_was_set_aside_goes_when_it_is_asked_for(self, run_dir, capsys):
        """Whole or not; a foreign directory stays there too."""
        aside = run_dir / "checkpoints/superseded"
        assert Run(run_dir).resume(step=3) == 3
        assert sorted(path.name for path in aside.iterdir()) == ["step_00000004", "step_00000005"]
        (aside / "step_00000005/metadata.json").unlink()
        (aside / "step_00000004.2.removed-00ff").mkdir()
        (aside / "mine").mkdir()
        before = sorted(aside.rglob("*"))
        assert main(["prune", str(run_dir), "--keep-last", "1"]) == 0
        assert main(["prune", str(run_dir), "--superseded", "--dry-run"]) == 0
        assert steps_of(run_dir) == [3] and sorted(aside.rglob("*")) == before
        capsys.readouterr()
        assert main(["prune", str(run_dir), "--superseded", "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["removed"], said["kept"]) == ([], [3])
        assert said["directories"] == [
            "superseded/step_00000004",
            "superseded/step_00000005",
            "superseded/step_00000004.2.removed-00ff",
        ]
        assert [path.name for path in aside.iterdir()] == ["mine"] and steps_of(run_dir) == [3]
        (aside / "mine").rmdir()
        assert main(["prune", str(run_dir), "--superseded"]) == 0
        assert not aside.exists()
        assert Run(run_dir).resume() == 3

    def test_what_was_set_aside_stays_while_there_is_nothing_else(self, run_dir, capsys):
        assert Run(run_dir).resume(step=4) == 4
        for step in (1, 2, 3, 4):
            (run_dir / f"checkpoints/step_{step:08d}/manifest.json").unlink()
        assert main(["prune", str(run_dir), "--superseded"]) == 2
        assert "no other checkpoint to resume from" in capsys.readouterr().err
        assert Run(run_dir).resume(dir=str(run_dir / "checkpoints/superseded/step_00000005")) == 5

    def test_the_last_one_cannot_be_asked_for(self, run_dir, tmp_path):
        assert main(["prune", str(run_dir), "--keep-last", "0"]) == 2
        assert main(["prune", str(run_dir)]) == 2
        assert main(["prune", str(run_dir), "--superseded", "--keep-best", "1"]) == 2
        assert main(["prune", str(run_dir / "checkpoints/step_00000003"), "--keep-last", "1"]) == 2
        assert main(["prune", str(tmp_path / "nothing"), "--keep-last", "1"]) == 2
        assert steps_of(run_dir) == [1, 2, 3, 4, 5]


def saved(model_dir: Path, run_dir: Path, **described) -> Path:
    """A checkpoint of the model's weights with a manifest that says which model it is."""
    model = build(model_dir, vocab_size=described.pop("vocab_size", 0))
    config = {"model": {"name": str(model_dir), "dtype": "float32", **described}}
    app = AppState(model=ModelState(model))
    return CheckpointManager(run_dir, CkptConfig(), app, describe=lambda: {"config": config}).save(3)


class TestExport:
    @pytest.mark.parametrize("tied", [True, False])
    def test_transformers_loads_the_same_weights(self, tied, tmp_path):
        import transformers

        reference = save_reference(tmp_path / "model", "qwen2", tie_word_embeddings=tied)
        path = saved(tmp_path / "model", tmp_path / "run")
        assert main(["export", str(path), str(tmp_path / "out")]) == 0
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        for name, parameter in reference.named_parameters():
            assert torch.equal(loaded.get_parameter(name), parameter), name

    def test_it_is_what_the_run_itself_exports(self, tmp_path):
        runs.sft(tmp_path / "run", "--max-steps", "2")
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
        theirs = {file.name: file.read_bytes() for file in (tmp_path / "run/weights").iterdir()}
        assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == theirs

    def test_a_vocabulary_that_grew(self, tmp_path, capsys):
        save_reference(tmp_path / "model")
        path = saved(tmp_path / "model", tmp_path / "run", vocab_size=101)
        assert main(["export", str(path), str(tmp_path / "out"), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        tensors = len(build(tmp_path / "model", vocab_size=101).state_dict())
        assert told == {"path": str(tmp_path / "out"), "checkpoint": str(path), "step": 3, "tensors": tensors}
        assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 101

    def test_a_model_that_moved_or_is_another(self, tmp_path, capsys):
        save_reference(tmp_path / "model")
        save_reference(tmp_path / "other", num_hidden_layers=3)
        path = saved(tmp_path / "model", tmp_path / "run")
        (tmp_path / "model").rename(tmp_path / "moved")
        assert main(["export", str(path), str(tmp_path / "out")]) == 2
        assert "is not a directory" in capsys.readouterr().err
        assert main(["export", str(path), str(tmp_path / "out"), "--model", str(tmp_path / "other")]) == 2
        assert "are not those of" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        assert main(["export", str(path), str(tmp_path / "out"), "--model", str(tmp_path / "moved")]) == 0
        assert main(["export", str(path), str(tmp_path / "out"), "--model", str(tmp_path / "moved")]) == 2

    def test_of_a_run_the_newest_with_sound_weights_is_taken(self, tmp_path, capsys):
        save_reference(tmp_path / "model")
        good = saved(tmp_path / "model", tmp_path / "run")
        model = build(tmp_path / "model")
        with torch.no_grad():
            model.output.weight[0, 0] = float("nan")
        manager = CheckpointManager(
            tmp_path / "run", CkptConfig(), AppState(model=ModelState(model)), describe=lambda: {"config": {}}
        )
        manager.save(4)
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["checkpoint"] == str(good)

    def test_changed_bytes_are_not_handed_on(self, tmp_path, capsys):
        save_reference(tmp_path / "model")
        path = saved(tmp_path / "model", tmp_path / "run")
        flip_bit(path / "rank_00000.safetensors", 5000)
        assert main(["export", str(path), str(tmp_path / "out")]) == 2
        assert "its bytes changed" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    def test_a_manifest_without_a_model(self, tmp_path, capsys):
        run = Run(tmp_path / "run")
        assert main(["export", str(run.save()), str(tmp_path / "out")]) == 2
        assert "no config with a [model] section" in capsys.readouterr().err


FOREIGN = [
    (["trainer_state.json", "optimizer.pt"], "Hugging Face Trainer, step 60; trainer ckpt import"),
    (["trainer_state.json", "model.safetensors"], "Hugging Face Trainer, step 60, without its optimizer.pt"),
    (["trainer_state.json", "global_step60"], "DeepSpeed ZeRO"),
    (["trainer_state.json", "pytorch_model_fsdp_0"], "in shards"),
    (["adapter_config.json", "trainer_state.json"], "LoRA adapter"),
    (["model.safetensors", "optimizer.bin"], "a checkpoint of Accelerate; trainer ckpt import"),
    ([".metadata", "__0_0.distcp"], "torch.distributed.checkpoint"),
    (["__0_0.distcp"], "incomplete: it has no .metadata"),
    (["config.json", "model.safetensors"], "a model directory: weights only"),
    (["mp_rank_00"], "Megatron-LM"),
    (["model_and_optim", "train"], "OLMo-core"),
    (["recipe_state.pt"], "torchtune"),
    (["meta_000100.json", "model_000100.pt"], "nanochat"),
    (["last.ckpt"], "Lightning"),
    (["notes.txt"], "files that this trainer never writes: notes.txt"),
]


@pytest.mark.parametrize(("names", "reason"), FOREIGN)
def test_foreign_directories_are_told_by_name(names, reason, tmp_path):
    step_dir = tmp_path / "checkpoints/step_00000060"
    step_dir.mkdir(parents=True)
    for name in names:
        (step_dir / name).write_text('{"global_step": 60}')
    candidate = inspect_step(step_dir, 60)
    assert candidate.status is Status.FOREIGN
    assert reason in candidate.reason
    assert [c.reason for c in discover(step_dir.parent)] == [candidate.reason]


def test_legacy_states_from_the_middle_of_a_cycle_are_told_by_name(tmp_path):
    """Retention and resume walk past it, with this reason."""
    run = Run(tmp_path / "run", keep_last=1)
    run.train(8)
    run.save()
    legacy = tmp_path / "run/checkpoints/step_00000012"
    legacy.mkdir()
    (legacy / "optimizer.pt").touch()
    state = {"global_step": 12, "micro_step": 50, "gradient_accumulation_steps": 4}
    (legacy / "trainer_state.json").write_text(json.dumps(state))
    candidate = discover(legacy.parent)[-1]
    assert candidate.status is Status.FOREIGN
    assert "in the middle of gradient accumulation (micro_step = 50: micro-batch 2 of 4" in candidate.reason
    assert Run(tmp_path / "run").resume() == 8


@pytest.mark.parametrize(
    ("entries", "inside"),
    [
        ({"micro_step": 0}, False),
        ({"micro_step": 3}, True),
        ({"progress.micro_step": 8, "config.gradient_accumulation_steps": 4}, False),
        ({"progress.micro_step": 9, "config.gradient_accumulation_steps": 4}, True),
        ({"accum_step": 1, "grad_accum_steps": 0}, True),
        ({"micro_step": "3", "step": 3, "steps": 7}, False),
        ({}, False),
    ],
)
def test_markers_of_a_cycle(entries, inside):
    assert bool(mid_cycle_reason(entries)) is inside
