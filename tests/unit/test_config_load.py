"""Files: merging, origins, and what is said about files and keys that are wrong."""

from pathlib import Path

import pytest

from trainer.config.load import Loaded, load_config
from trainer.config.run import RLConfig, RunConfig, SFTConfig
from trainer.config.schema import nearest
from trainer.errors import ConfigError

VALID = ["--model.name", "m", "--max-steps", "10", "--data.fake"]


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a file into the current directory."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return name

    return write


def problems(*argv: str, root: type[RunConfig] = RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(root, list(argv))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_later_files_win_tables_merge_and_lists_are_replaced(toml):
    toml("a.toml", "seed = 1\n[optim]\nlr = 0.1\neps = 1e-6\n[data]\ntrain_on = ['user', 'assistant']\n")
    toml("b.toml", "[optim]\nlr = 0.2\n[data]\ntrain_on = ['tool']\nseq_len = 64\n")
    config = load_config(RunConfig, ["@", "a.toml", "@b.toml"]).config
    assert (config.seed, config.optim.lr, config.optim.eps) == (1, 0.2, 1e-6)
    assert (config.data.train_on, config.data.seq_len) == (("tool",), 64)
    assert load_config(RunConfig, ["@b.toml", "@", "a.toml"]).config.optim.lr == 0.1


def test_a_list_of_tables_is_replaced_as_a_whole(toml):
    toml("a.toml", "[[data.sources]]\npath = 'x'\nweight = 1\n[[data.sources]]\npath = 'y'\nweight = 1\n")
    toml("b.toml", "[[data.sources]]\npath = 'z'\n")
    loaded = load_config(RunConfig, ["@", "a.toml", "@", "b.toml"])
    assert [(s.path, s.weight) for s in loaded.config.data.sources] == [("z", None)]
    assert loaded.origins["data.sources.0.path"] == "b.toml"
    assert loaded.origins["data.sources.0.weight"] == "default"
    assert "data.sources.1.path" not in loaded.origins


def test_flags_win_over_files_wherever_they_stand(toml):
    toml("a.toml", "[optim]\nlr = 0.1\n")
    for argv in (["--optim.lr", "0.3", "@", "a.toml"], ["@", "a.toml", "--optim.lr", "0.3"]):
        assert load_config(RunConfig, argv).config.optim.lr == 0.3


def test_every_value_knows_its_origin(toml):
    toml("a.toml", "seed = 1\n[optim]\nlr = 0.1\neps = 1e-6\n[resume]\n")
    toml("b.toml", "[optim]\neps = 1e-7\n")
    argv = ["@", "a.toml", "@", "b.toml", "--output-dir=x", "--data.no-pack", "--data.sources.0.path", "p"]
    loaded = load_config(RunConfig, argv)
    expected = {
        "seed": "a.toml",
        "optim.lr": "a.toml",
        "optim.eps": "b.toml",
        "optim.betas": "default",
        "output_dir": "flag --output-dir",
        "data.pack": "flag --data.no-pack",
        "data.sources.0.path": "flag --data.sources.0.path",
        "data.sources.0.split": "default",
        "resume": "a.toml",
        "resume.step": "default",
    }
    assert {key: loaded.origins[key] for key in expected} == expected


def test_configs_are_frozen():
    loaded: Loaded[RunConfig] = load_config(RunConfig, [])
    with pytest.raises(Exception, match="frozen"):
        loaded.config.optim.lr = 1.0  # pyright: ignore[reportAttributeAccessIssue]


UNKNOWN = [
    ("[optim]\nlrr = 1e-3", "optim.lrr (a.toml): no such key; did you mean optim.lr?"),
    ("[scheduler]\nwarmup = 10", "scheduler.warmup (a.toml): no such key; did you mean scheduler.warmup_steps?"),
    ("[optim]\nwarmup_steps = 1", "optim.warmup_steps (a.toml): no such key; did you mean scheduler.warmup_steps?"),
    ("[lr_scheduler]\ntype = 'linear'", "lr_scheduler (a.toml): no such key; did you mean scheduler?"),
    ("quantizaton = true", "quantizaton (a.toml): no such key; the top level has: output_dir,"),
    ("[data]\nmax_len = 5", "data.max_len (a.toml): no such key; did you mean data.seq_len?"),
    ("lr = 1", "lr (a.toml): no such key; did you mean optim.lr?"),
    ("output-dir = 'x'", "output-dir (a.toml): no such key; did you mean output_dir?"),
    (
        "[[data.sources]]\npath = 'x'\nwieght = 1",
        "data.sources.0.wieght (a.toml): no such key; did you mean data.sources.0.weight?",
    ),
    ("[data.fake]\nsigm = 1", "data.fake.sigm (a.toml): no such key; did you mean data.fake.sigma?"),
    ("[resume]\nexists = true", "resume.exists (a.toml): no such key; did you mean resume.if_exists?"),
    ("[train]\nlearning_rate = 1\nmax_steps = 3", "train.learning_rate (a.toml): no such key; did you mean optim.lr?"),
    ("[train]\nlearning_rate = 1\nmax_steps = 3", "train.max_steps (a.toml): no such key; did you mean max_steps?"),
]


@pytest.mark.parametrize(("text", "message"), UNKNOWN)
def test_k1_unknown_keys_in_files(toml, text: str, message: str):
    toml("a.toml", text)
    assert message in problems("@", "a.toml")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--optim.lrr=1", "optim.lrr (flag --optim.lrr): no such key; did you mean optim.lr?"),
        (
            "--optim.warmup-steps=1",
            "optim.warmup_steps (flag --optim.warmup-steps): no such key; did you mean scheduler.warmup",
        ),
        ("--scheduler.lr=1", "scheduler.lr (flag --scheduler.lr): no such key; did you mean optim.lr?"),
        ("--optm.lr=1", "optm.lr (flag --optm.lr): no such key; did you mean optim.lr?"),
        ("--data.sources.0.pth=1", "no such key; did you mean data.sources.0.path?"),
        ("--data.path=1", "no such key; did you mean data.sources.0.path"),
        ("--no-data.pak", "no_data.pak (flag --no-data.pak): no such key"),
        ("--optim.lr.x=1", "optim.lr.x (flag --optim.lr.x): no such key"),
        ("--quantizaton", "the top level has: output_dir,"),
        ("--data.train-on.0=user", "no such key; did you mean data.train_on?"),
        ("--data.sources.00.path=x", "no such key; did you mean data.sources.0.path"),
    ],
)
def test_k1_unknown_keys_in_flags(flag: str, message: str):
    assert message in problems(flag)


def test_a_wrong_entry_of_a_list_is_one_problem():
    text = problems("--data.train-on=asistant")
    assert text.startswith("a problem in the configuration\n  data.train_on.0 = ") and "empty" not in text


def test_every_unknown_key_has_an_answer_and_every_answer_exists():
    from trainer.config.schema import all_keys, dotted

    keys = {dotted(key) for key in all_keys(RunConfig)}
    for key in keys:
        assert nearest(RunConfig, tuple(key.split(".")))[0] == key
        assert set(nearest(RunConfig, (*key.split(".")[:-1], key.split(".")[-1] + "x"))) <= keys


def test_all_problems_are_listed_together(toml):
    toml("a.toml", "max_steps = 'ten'\n[optim]\nlr = -1\nlrr = 2\n[model]\ndtype = 'fp8'\n")
    text = problems("@", "a.toml", "@", "gone.toml", "--sed=1", "--data.pack=maybe", root=SFTConfig)
    assert text.startswith("7 problems in the configuration")
    for line in (
        'max_steps = "ten" (a.toml): expected a whole number > 0, or "none"',
        "optim.lr = -1 (a.toml): expected a number > 0",
        "optim.lrr (a.toml): no such key",
        'model.dtype = "fp8" (a.toml): expected one of "float32", "bfloat16"',
        "gone.toml: no such file",
        "sed (flag --sed): no such key; did you mean seed?",
        'data.pack = "maybe" (flag --data.pack): expected true or false',
    ):
        assert f"\n  {line}" in text
    assert "pydantic" not in text and "errors.pydantic.dev" not in text


def test_rules_are_not_reported_for_a_config_that_is_wrong_anyway():
    text = problems("--model.name=m", "--data.fake", "--max-stesp=10", root=SFTConfig)
    assert (
        text == "a problem in the configuration\n  max_stesp (flag --max-stesp): no such key; did you mean max_steps?"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"seed = 1\nlr == 2\n", "a.toml: is not TOML: Invalid value (at line 2, column 5)"),
        (b"seed = 1\nseed = 2\n", "a.toml: is not TOML: Cannot overwrite a value (at line 2"),
        (b"name = '\xff'\n", "a.toml: is not UTF-8 text"),
        (b"seed = " + b"[" * 100_000, "a.toml: is not TOML"),
        (b"seed = " + b"9" * 5000, "a.toml: cannot be read: Exceeds the limit"),
    ],
)
def test_files_that_are_not_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_bytes(content)
    assert message in problems("@", "a.toml")


def test_files_that_cannot_be_read(tmp_path: Path):
    assert "no such file (looked in" in problems("@", "gone.toml")
    assert f"{tmp_path}: cannot be read: Is a directory" in problems("@", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim = 5", "optim = 5 (a.toml): expected a table"),
        (
            "[data.sources]\npath = 'x'",
            "data.sources = {…} (a.toml): expected a list of tables; begin each with [[data.sources]]",
        ),
        ("[data]\nsources = ['x']", 'data.sources.0 = "x" (a.toml): expected a table'),
        ("[seed]\nx = 1", "seed = {…} (a.toml): expected a whole number >= 0"),
        ("[optim]\nbetas = [1, 0.5]", "optim.betas.0 = 1 (a.toml): expected a number >= 0 and < 1"),
        ("[optim]\nbetas = [0.5]", "optim.betas"),
        ("[data]\ntrain_on = []", "data.train_on = [] (a.toml): expected a non-empty list"),
        ("output_dir = 2020-01-01", "output_dir = 2020-01-01 (a.toml): expected a string"),
        ("max_steps = 1e3", "max_steps = 1000.0 (a.toml): expected a whole number > 0"),
        ("[[data.sources]]\npath = ''", 'data.sources.0.path = "" (a.toml): expected a string that is not empty'),
        ("[resume]\ndir = ''", 'resume.dir = "" (a.toml): expected a string that is not empty, or "none"'),
        ("max_steps = '5'", 'max_steps = "5" (a.toml): expected a whole number > 0'),
        ("[[data.sources]]\nweight = 1", "data.sources.0.path (a.toml): required, but not set"),
    ],
)
def test_wrong_values_in_files(toml, text: str, message: str):
    toml("a.toml", text)
    assert message in problems("@", "a.toml")


def test_a_valid_run_loads():
    assert load_config(SFTConfig, VALID).config.max_steps == 10


def test_a_config_of_the_other_command_says_which(toml):
    toml("rl.toml", "max_steps = 3\n[rl]\nprompts = 2\n[[envs]]\nname = 'reverse'\n")
    first, second, *_ = problems("@rl.toml", *VALID, root=SFTConfig).splitlines()
    assert "problems in the configuration" in first
    assert second.strip() == "envs, rl (rl.toml): for reinforcement learning, which is `trainer rl`"
    assert "trainer rl" not in problems("@rl.toml", *VALID, "--optim.lr=x", root=RLConfig)
    assert "train on data with `trainer sft`" in problems(*VALID, root=RLConfig)
