"""A resume holds the saved config against the new one: the saved one never silently overrides it, nor the reverse."""

from trainer.config.compare import differences
from trainer.config.load import load_config
from trainer.config.run import SFTConfig

BASE = ["--model.name=m", "--max-steps=8", "--data.fake", "--data.batch-size=4"]


def config(*flags: str) -> SFTConfig:
    return load_config(SFTConfig, [*BASE, *flags]).config


def winners(saved: SFTConfig, current: SFTConfig, *override: str) -> dict[str, str]:
    return {difference.key: difference.winner for difference in differences(saved, current, override)}


def test_another_micro_batch_and_cadence_are_the_new_configs_and_max_steps_stays():
    saved = config("--data.micro-batch-size=1", "--ckpt.interval=5")
    current = config("--data.micro-batch-size=4", "--ckpt.interval=50", "--resume")
    assert current.max_steps == saved.max_steps == 8
    assert winners(saved, current) == {"data.micro_batch_size": "config", "ckpt.interval": "config"}
    assert "ckpt.interval: checkpoint 5, config 50 -> config" in map(str, differences(saved, current))


def test_the_optimizers_settings_are_the_checkpoints_unless_overridden():
    saved = config("--optim.lr=1e-2", "--scheduler.warmup-steps=2")
    current = config("--optim.lr=1e-3", "--scheduler.warmup-steps=4", "--optim.max-norm=none")
    assert winners(saved, current) == {
        "optim.lr": "checkpoint",
        "scheduler.warmup_steps": "checkpoint",
        "optim.max_norm": "config",
    }
    line = next(str(d) for d in differences(saved, current) if d.key == "optim.lr")
    assert line == (
        "optim.lr: checkpoint 0.01, config 0.001 -> checkpoint; take the config's with --resume.override optim.lr"
    )
    assert winners(saved, current, "optim.lr", "scheduler")["optim.lr"] == "config"
    assert winners(saved, current, "scheduler")["scheduler.warmup_steps"] == "config"
    assert winners(saved, current, "scheduler")["optim.lr"] == "checkpoint"


def test_what_changes_the_data_order_is_a_conflict_unless_overridden():
    saved, current = config("--seed=1"), config("--seed=2", "--data.seq-len=64", "--data.fake.documents=5")
    assert set(winners(saved, current).values()) == {"conflict"}
    assert winners(saved, current, "data.fake", "seed") == {
        "seed": "config",
        "data.fake.documents": "config",
        "data.seq_len": "conflict",
    }


def test_what_is_trained_on_is_a_conflict_unless_overridden():
    saved, current = config(), config("--data.train-on=user,assistant", "--data.train-on-prompt")
    assert winners(saved, current) == {"data.train_on": "conflict", "data.train_on_prompt": "conflict"}
    assert "conflict: it changes what is trained on" in str(differences(saved, current)[0])
    assert set(winners(saved, current, "data").values()) == {"config"}


def test_added_sources_are_seen():
    base = ["--model.name=m", "--max-steps=8", "--data.sources.0.path=a"]
    saved = load_config(SFTConfig, base).config
    current = load_config(SFTConfig, [*base, "--data.sources.1.path=b"]).config
    assert winners(saved, current)["data.sources.1.path"] == "conflict"


def test_a_source_that_moved_is_no_conflict():
    """Whether its documents are still the same is seen when they are read."""
    base = ["--model.name=m", "--max-steps=8", "--data.sources.1.path=b"]
    saved = load_config(SFTConfig, [*base[:2], "--data.sources.0.path=a", *base[2:]]).config
    current = load_config(SFTConfig, [*base[:2], "--data.sources.0.path=/elsewhere/a", *base[2:]]).config
    assert winners(saved, current) == {"data.sources.0.path": "config"}
    fewer = load_config(SFTConfig, [*base[:2], "--data.sources.0.path=a"]).config
    assert winners(saved, fewer)["data.sources.1.path"] == "conflict"


def test_equal_configs_have_no_differences():
    assert differences(config(), config("--resume")) == []


def test_who_steps_muon_is_the_new_configs_choice():
    """Both implementations have the same groups and state."""
    saved = config("--optim.type=muon")
    current = config("--optim.type=muon", "--optim.implementation=dion", "--resume")
    assert winners(saved, current) == {"optim.implementation": "config"}
