"""Rules that join two fields: each is broken once, and the nearest legal config passes."""

import pytest
from pydantic import ValidationError

from trainer.config.load import load_config
from trainer.config.rules import check_steps
from trainer.config.run import RLConfig, RunConfig, SFTConfig
from trainer.errors import ConfigError

BASE = ["--model.name=m", "--max-steps=100", "--data.sources.0.path=a.jsonl"]

BROKEN = [
    ("--model.name=", "model.name is required"),
    ("--model.name= --model.random-init", "random_init reads its config.json"),
    ("--max-steps=none", "exactly one of max_steps and epochs"),
    ("--epochs=2", "exactly one of max_steps and epochs"),
    ("--data.fake", "exactly one of data.sources"),
    ("--data.sources=[]", "exactly one of data.sources"),
    ("--parallel.dp-shard=0", "dp_shard must be -1"),
    ("--model.attention=varlen --runtime.device=cpu", 'use model.attention = "auto" or "sdpa"'),
    ("--model.attention=varlen --model.dtype=float32", 'use model.dtype = "bfloat16"'),
    ("--model.attention=varlen --model.impl=hf", "belongs to model.impl"),
    ("--ckpt.interval=30 --ckpt.keep-every=100", "must be a multiple of ckpt.interval"),
    ("--ckpt.at=50,101", "ckpt.at names a step beyond the end"),
    ("--ckpt.skip-optimizer", "this is none: add --resume"),
    ("--ckpt.skip-scheduler --resume.if-exists", "every further start would leave it out again"),
    ("--ckpt.skip-progress --resume", "set another output_dir"),
    ("--ckpt.skip-progress --resume.dir=runs/x --output-dir=runs/x", "set another output_dir"),
    ("--ckpt.keep-best=1 --ckpt.keep-last=1", "ckpt.keep_best needs validation"),
    ("--ckpt.keep-best=1 --val.interval=5 --data.val-documents=5", "and ckpt.keep_last: without it"),
    ("--scheduler.warmup-steps=101", "warmup outlasts the run"),
    ("--scheduler.warmup-steps=60 --scheduler.decay-steps=41", "warmup and decay take 101 steps"),
    ("--scheduler.decay-steps=101", "warmup and decay take 101 steps"),
    ("--scheduler.type=cosine --scheduler.decay-steps=10", "a cosine schedule has no decay_steps"),
    ("--scheduler.type=constant --scheduler.decay-steps=10", "a constant schedule has no decay_steps"),
    ("--scheduler.min-lr=1e-3", "must not exceed the peak"),
    ("--stop-step=101", "stop_step lies beyond the end"),
    ("--optim.momentum=0.9", 'belongs to optim.type = "sgd"'),
    ("--optim.type=sgd --optim.betas=0.9,0.99", 'belong to optim.type = "adamw"'),
    ("--optim.type=sgd --optim.eps=1e-6", 'optim.eps belongs to optim.type = "adamw"'),
    ("--optim.type=custom --optim.class-path=torch.optim.NAdam --optim.betas=0.8,0.9", "put it in optim.args"),
    ("--optim.implementation=dion", 'optim.implementation belongs to optim.type = "muon"'),
    ("--resume.dir=runs/a/checkpoints/step_00000010 --resume.step=10", "already names one step"),
    ("--resume.dir=runs/a/checkpoints/step_00000010/ --resume.step=10", "already names one step"),
    ("--resume --overwrite", "moves the run aside that is to be resumed"),
    ("--resume.dir=runs/x/checkpoints --output-dir=./runs/x --overwrite", "moves the run aside"),
    ("--resume.override=optim.lr,schedule", "resume.override names schedule: no such key; did you mean scheduler?"),
    ("--data.batch-size=4 --data.micro-batch-size=8", "lower data.micro_batch_size"),
    ("--data.sources.0.weight=1 --data.sources.1.path=b.jsonl", "give all data.sources a weight"),
    ("--val.interval=5", "nothing to validate on"),
    ("--data.val-sources.0.path=v --data.val-documents=5", "not both"),
    ("--data.val-sources.0.path=v --data.val-sources.0.weight=2", "means nothing"),
    ("--data.sources=[] --data.fake --data.val-documents=5", "brings its own held-out documents"),
]

LEGAL = [
    "",
    "--max-steps=none --epochs=2",
    "--max-steps=none --epochs=2 --stop-step=1000 --scheduler.warmup-steps=1000",
    "--data.sources=[] --data.fake --val.interval=5",
    "--parallel.dp-shard=-1 --parallel.dp-replicate=4",
    "--model.attention=varlen --runtime.device=cuda",
    "--model.attention=sdpa --model.impl=hf --model.dtype=float32",
    "--ckpt.interval=50 --ckpt.keep-every=100",
    "--ckpt.keep-every=100",
    "--ckpt.interval=30 --ckpt.keep-every=100 --ckpt.at=100",
    "--ckpt.at=100",
    "--ckpt.skip-optimizer --resume",
    "--ckpt.skip-progress --resume.dir=runs/a --output-dir=runs/b",
    "--scheduler.warmup-steps=100",
    "--scheduler.warmup-steps=60 --scheduler.decay-steps=40",
    "--scheduler.type=cosine --scheduler.warmup-steps=60 --scheduler.min-lr=1e-5",
    "--stop-step=100",
    "--optim.type=sgd --optim.momentum=0.9",
    "--optim.type=muon --optim.implementation=dion --model.offload=full",
    "--resume.dir=runs/a --resume.step=10",
    "--resume.dir=runs/a --overwrite --output-dir=runs/b",
    "--resume.override=optim.lr,scheduler,data.batch_size",
    "--data.batch-size=8 --data.micro-batch-size=8",
    "--data.sources.0.weight=1 --data.sources.1.path=b --data.sources.1.weight=2",
    "--val.interval=5 --data.val-documents=10",
    "--val.interval=5 --data.val-sources.0.path=v",
]

BASE_RL = ["--model.name=m", "--max-steps=100", "--envs.0.name=sort", "--data.seq-len=1024", "--rl.max-new-tokens=64"]

BROKEN_RL = [
    ("--envs=[]", "nothing to learn from"),
    ("--envs.0.min-reward=1 --envs.0.max-reward=0", "min_reward must not exceed max_reward"),
    ("--max-steps=none --epochs=2", "set max_steps instead of epochs"),
    ("--ckpt.micro-interval=2", "save by ckpt.interval instead"),
    ("--rl.max-new-tokens=1024", "a rollout must fit into a row"),
    ("--data.sources.0.path=a.jsonl", "set both, or neither"),
    ("--objective.sft=0.1", "set both, or neither"),
    ("--envs.0.score-seconds=451", "must not exceed a quarter of it"),
    ("--rl.samples=1", "has nothing to compare"),
    ("--rl.samples=1 --objective.advantage=reinforce_pp_baseline", "has nothing to compare"),
    ("--rl.filter-equal --objective.advantage=reinforce_pp", "a group of equal rewards does teach"),
    ("--objective.loss=custom", "go together: set both"),
    ("--objective.loss=reinforce --objective.iterations=2", "set objective.iterations = 1"),
    ("--objective.reference=r", "a reference model is used by objective.kl only"),
    ("--objective.distill=0.1", "objective.teacher and objective.distill go together"),
    ("--objective.iterations=2 --rl.max-lag=1", "nothing is gained by generating ahead"),
    ("--engine.launch", 'servers are used with engine.type = "vllm"'),
    ("--engine.type=vllm", "set one of engine.urls"),
    ("--engine.type=vllm --engine.launch --rl.top-p=0.9 --rl.temperature=0.7", "set both temperatures to 1"),
]

LEGAL_RL = [
    "",
    "--envs.0.min-reward=0 --envs.0.max-reward=0",
    "--rl.max-new-tokens=1023",
    "--data.sources.0.path=a.jsonl --objective.sft=0.1",
    "--envs.0.score-seconds=450",
    "--rl.samples=1 --objective.advantage=reinforce_pp",
    "--rl.filter-equal --objective.advantage=reinforce_pp_baseline",
    "--objective.loss=reinforce",
    "--objective.iterations=2",
    "--engine.type=vllm --engine.launch --rl.temperature=0.7",
]


def of_both(sft: list, rl: list) -> list:
    """Each entry with the config that it is for, and the flags that make it whole."""
    return [pytest.param(SFTConfig, BASE, entry) for entry in sft] + [
        pytest.param(RLConfig, BASE_RL, entry) for entry in rl
    ]


@pytest.mark.parametrize(("config", "base", "broken"), of_both(BROKEN, BROKEN_RL))
def test_broken(config: type[RunConfig], base: list[str], broken: tuple[str, str]):
    flags, message = broken
    with pytest.raises(ConfigError) as caught:
        load_config(config, [*base, *flags.split()])
    text = str(caught.value)
    assert text.startswith("a problem in the configuration\n"), "one broken rule, one problem"
    assert message in text


@pytest.mark.parametrize(("config", "base", "flags"), of_both(LEGAL, LEGAL_RL))
def test_legal(config: type[RunConfig], base: list[str], flags: str):
    load_config(config, [*base, *flags.split()])


def test_a_broken_rule_shows_the_values_and_where_they_come_from(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("max_steps = 50\n[model]\nname = 'm'\n[data.fake]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(SFTConfig, ["@", str(file), "--scheduler.warmup-steps", "51"])
    assert "      scheduler.warmup_steps = 51  (flag --scheduler.warmup-steps)\n" in str(caught.value)
    assert f"      max_steps = 50  ({file})" in str(caught.value)


def test_several_broken_rules_are_listed_together():
    with pytest.raises(ConfigError, match="^3 problems"):
        load_config(SFTConfig, [])


def test_rules_hold_for_configs_made_in_python_too():
    with pytest.raises(ValidationError, match="exactly one of max_steps and epochs"):
        SFTConfig.model_validate({"model": {"name": "m"}, "data": {"fake": {}}})


def test_rules_about_steps_are_checked_again_when_epochs_are_known():
    flags = "--max-steps=none --epochs=2 --scheduler.warmup-steps=60 --stop-step=90"
    config = load_config(SFTConfig, [*BASE, *flags.split()]).config
    check_steps(config, 90)
    with pytest.raises(ConfigError, match="stop_step lies beyond the end of the run.*max_steps is 89, from epochs"):
        check_steps(config, 89)
    with pytest.raises(ConfigError, match="^2 problems(.|\n)*the warmup outlasts the run"):
        check_steps(config, 59)


@pytest.mark.parametrize(
    ("root", "flags"),
    [
        (SFTConfig, [*BASE, "--data.sources.0.weight"]),
        (RLConfig, ["--model.name=m", "--max-steps=100", "--envs.0.name=sort", "--envs.0.weight"]),
    ],
)
def test_weights_whose_sum_would_be_no_number_are_refused(root, flags):
    with pytest.raises(ConfigError, match=r"weight = 1.7e\+308 .*expected a number > 0 and <= 1e\+100"):
        load_config(root, [*flags, "1.7e308"])
