"""Mistakes that only a started run can find: one error that says what to do, and nothing is lost."""

import json
import re
import shutil
from functools import partial

import pytest

from support.checkpoints import Run
from support.models import save_reference
from support.runs import REPO, metrics, sft
from trainer.errors import CheckpointMismatch, ConfigError, DataError, ModelError, TrainingError
from trainer.models.parallelize import compile_blocks

TINY = REPO / "configs/debug/assets/tiny-llama"
SHORT = ["--max-steps=2", "--scheduler.warmup-steps=0", "--val.interval=0", "--ckpt.interval=0"]


def test_synthetic_tokens_beyond_the_vocabulary(tmp_path):
    fake = ["--data.sources=[]", "--data.val-documents=0", "--data.fake.documents=50", "--data.fake.vocab-size=385"]
    with pytest.raises(ConfigError, match=r"data.fake.vocab_size = 385, but .*tiny-llama has a vocabulary of 384"):
        sft(tmp_path / "run", *SHORT, *fake)
    sft(tmp_path / "run", *SHORT, *fake, "--data.fake.vocab-size=384")


def test_random_weights_although_there_are_others_is_told(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    flags = [*SHORT, "--model.name", model, "--model.random-init"]
    warning = f"model.random_init: the weights in {model} are not read"
    sft(tmp_path / "plain", *flags)
    assert warning not in (tmp_path / "plain" / "logs" / "rank_0.log").read_text()
    shutil.copy(tmp_path / "plain" / "weights" / "model.safetensors", model)
    sft(tmp_path / "beside", *flags)
    assert warning in (tmp_path / "beside" / "logs" / "rank_0.log").read_text()


def test_memory_that_runs_out(tmp_path, monkeypatch):
    def greedy(model, micro_batch, **_):
        import torch

        return torch.empty(2**60, dtype=torch.uint8).sum()

    monkeypatch.setattr("trainer.sft.train.cross_entropy", greedy)
    with pytest.raises(TrainingError, match="(?s)out of memory: .*data.micro_batch_size.*activation_checkpointing"):
        sft(tmp_path / "run", *SHORT)


def test_a_compilation_that_fails(tmp_path, monkeypatch):
    def backend(graph, inputs):
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("trainer.models.build.compile_blocks", partial(compile_blocks, backend=backend))
    with pytest.raises(TrainingError, match="torch.compile fails here: .*No working C.. compiler.*--model.compile off"):
        sft(tmp_path / "run", *SHORT, "--model.compile=on")
    assert "Traceback" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


def test_errors_of_the_code_keep_their_traceback(tmp_path, monkeypatch):
    def wrong(model, micro_batch, **_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("trainer.sft.train.cross_entropy", wrong)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        sft(tmp_path / "run", *SHORT)
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "the run ends with RuntimeError: shapes do not match" in log and "Traceback" in log


def test_a_token_far_behind_the_others_has_an_embedding(tmp_path):
    """The tokenizer counts 385 tokens, but its last id is 399."""
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    content = json.loads((model / "tokenizer.json").read_text())
    far = {"id": 399, "content": "<far>", "single_word": False, "lstrip": False, "rstrip": False}
    content["added_tokens"].append(far | {"normalized": False, "special": True})
    content["model"]["vocab"]["<far>"] = 399
    (model / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "a.jsonl").write_text('{"text": "to <far> and back"}\n' * 20)
    flags = [*SHORT, "--model.name", model, "--data.sources.0.path", tmp_path / "a.jsonl", "--data.val-documents=0"]
    sft(tmp_path / "run", *flags)
    assert json.loads((tmp_path / "run" / "weights" / "config.json").read_text())["vocab_size"] == 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": "four"}, "transformers cannot (read|build)"),
        ({"num_attention_heads": 0}, "transformers cannot (read|build)"),
        ({"hidden_act": "nonsense"}, "transformers cannot build a causal LM"),
        ({"model_type": "nonsense"}, "transformers cannot read"),
        ({"vocab_size": -5}, "transformers cannot"),
    ],
)
def test_a_config_json_that_makes_no_sense_to_transformers(tmp_path, changes, message):
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message):
        sft(tmp_path / "run", *SHORT, "--model.impl=hf", "--model.name", model)


def test_a_checkpoint_that_no_run_of_ours_has_written(tmp_path):
    """CheckpointManager is for everybody; what `describe` says is up to them."""
    other = Run(tmp_path / "other")
    other.manager.describe = dict
    with pytest.raises(CheckpointMismatch, match="manifest holds no config"):
        sft(tmp_path / "run", "--resume.dir", other.save())


def test_data_that_changed_between_stop_and_resume(tmp_path):
    """Edited, reordered, shortened, lengthened: refused with the reason, whatever the names say; restored, it goes on."""
    path, run_dir = tmp_path / "a.jsonl", tmp_path / "run"
    lines = (REPO / "configs/debug/assets/chat.jsonl").read_text().splitlines(keepends=True)
    flags = [*SHORT, "--max-steps=4", "--data.sources.0.path", path, "--data.val-documents=0"]
    path.write_text("".join(lines))
    sft(run_dir, *flags, "--stop-step=2")
    for changed in (
        [line.replace("24.", "25.") for line in lines],
        lines[::-1],
        lines[:100],
        [*lines, lines[0]],
    ):
        path.write_text("".join(changed))
        with pytest.raises(Exception, match=r"data.sources: checkpoint(.|\n)*a file, the tokenizer.*have changed"):
            sft(run_dir, *flags, "--resume")
    path.unlink()
    with pytest.raises(DataError, match="does not exist"):
        sft(run_dir, *flags, "--resume")
    (tmp_path / "b.jsonl").write_text("".join(lines))  # the same documents elsewhere
    sft(run_dir, *flags, "--resume", "--data.sources.0.path", tmp_path / "b.jsonl")
    assert [row["step"] for row in metrics(run_dir)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("flags", "spoil", "message"),
    [
        ([], {"rms_norm_eps": "small"}, "config.json: rms_norm_eps must be a number"),
        ([], {"model_type": "gpt2"}, "model_type = 'gpt2' is not supported"),
        (["--model.impl=hf"], {"num_attention_heads": "four"}, "transformers cannot read .*config.json"),
        (["--no-model.random-init"], {}, "neither model.safetensors nor"),
    ],
)
def test_a_model_that_cannot_be_is_told_before_data_are_tokenized(tmp_path, flags, spoil, message):
    """Not after an hour of tokenizing, and not as a fault of the tokenizer, which reads config.json as well."""
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | spoil))
    source = ["--data.sources.0.path", tmp_path / "gone.jsonl"]
    with pytest.raises(ModelError, match=message):
        sft(tmp_path / "run", *SHORT, *source, "--model.name", model, *flags)


def _fake(documents_of: int, vocab_size: int) -> list[str]:
    flags = ["--data.sources=[]", "--data.val-documents=0", "--data.fake.documents=20", "--data.fake.sigma=0"]
    return [*flags, f"--data.fake.mean-tokens={documents_of}", f"--data.fake.vocab-size={vocab_size}"]


def test_documents_longer_than_a_table_of_positions(tmp_path):
    """GPT-2 has a row for each of 64 positions: the 65th, of a document or of padding, would be an index error of torch's."""
    save_reference(tmp_path / "model", "gpt2")
    flags = [*SHORT, "--model.impl=hf", "--model.name", tmp_path / "model"]
    told = "rows have .* tokens, but .*model has 64 positions .*, and none beyond; set data.seq_len = 64"
    for wrong in (["--data.seq-len=128", *_fake(10, 97)], ["--data.seq-len=128", "--data.no-pack", *_fake(65, 97)]):
        with pytest.raises(ConfigError, match=told):
            sft(tmp_path / "run", *flags, *wrong)
    sft(tmp_path / "one", *flags, "--data.seq-len=64", *_fake(40, 97))
    sft(tmp_path / "two", *flags, "--data.seq-len=128", "--data.no-pack", *_fake(40, 97))


def test_documents_longer_than_the_model_has_seen(tmp_path):
    """Rotary positions go on, but the model was never trained on them."""
    told = "has 300 tokens, but .*tiny-llama has 256 positions .*never seen those beyond"
    sft(tmp_path / "long", *SHORT, "--data.seq-len=512", *_fake(300, 384))
    assert re.search(told, (tmp_path / "long" / "logs" / "rank_0.log").read_text())
    sft(tmp_path / "short", *SHORT, "--data.seq-len=512", *_fake(256, 384))
    assert "positions" not in (tmp_path / "short" / "logs" / "rank_0.log").read_text()
