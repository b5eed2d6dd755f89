"""What a flag means: the truth table of booleans, none, lists, tables; what it must not be taken for."""

from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.arguments import parse_arguments
from trainer.config.base import Section
from trainer.config.load import load_config
from trainer.config.run import RunConfig
from trainer.config.schema import Shape, all_keys, dotted, lookup
from trainer.errors import ConfigError


class Inner(Section):
    on: bool = True
    off: bool = False
    maybe: bool | None = None


class Entry(Section):
    path: str
    flag: bool = True
    weight: float | None = None


class Root(Section):
    on: bool = True
    off: bool = False
    maybe: bool | None = None
    inner: Inner = Inner()
    extra: Inner | None = None
    count: int = 1
    rate: float = 1.0
    name: str | None = "x"
    mode: Literal["none", "some"] = "some"
    choice: Literal["a", "b"] | None = "a"
    at: tuple[int, ...] = (7,)
    pair: tuple[float, float] = (0.0, 1.0)
    words: tuple[str, ...] = ()
    entries: tuple[Entry, ...] = ()


def load(*argv: str) -> Root:
    return load_config(Root, list(argv)).config


def value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


BOOLS = ["on", "off", "maybe", "inner.on", "inner.off", "inner.maybe"]
RUN_BOOLS = [dotted(key) for key in all_keys(RunConfig) if lookup(RunConfig, key) == Shape("bool")]


def forms(key: str) -> dict[str, tuple[list[str], bool]]:
    head, _, last = key.rpartition(".")
    inside = f"--{head}.no-{last}" if head else f"--no-{last}"
    return {
        "bare": ([f"--{key}"], True),
        "kebab": ([f"--{key.replace('_', '-')}"], True),
        "true": ([f"--{key}", "true"], True),
        "false": ([f"--{key}", "false"], False),
        "=true": ([f"--{key}=true"], True),
        "=false": ([f"--{key}=false"], False),
        "no": ([f"--no-{key}"], False),
        "no inside": ([inside], False),
        "bare before a flag": ([f"--{key}", "--seed=3"], True),
    }


@pytest.mark.parametrize("key", BOOLS)
def test_k4_booleans_follow_the_truth_table(key: str, tmp_path: Path):
    default = {"on": True, "off": False, "maybe": None}[key.rpartition(".")[2]]
    assert value(load(), key) is default
    for argv, expected in forms(key).values():
        assert value(load(*(a for a in argv if a != "--seed=3")), key) is expected, argv
    for text, expected in (("true", True), ("false", False)):
        file = tmp_path / f"{text}.toml"
        file.write_text(f"{key} = {text}\n")
        assert value(load("@", str(file)), key) is expected


@pytest.mark.parametrize("key", RUN_BOOLS)
def test_k4_every_boolean_of_a_run_follows_it_too(key: str, tmp_path: Path):
    for argv, expected in forms(key).values():
        assert value(load_config(RunConfig, argv).config, key) is expected, argv
    for text, expected in (("true", True), ("false", False)):
        file = tmp_path / "a.toml"
        file.write_text(f"{key} = {text}\n")
        assert value(load_config(RunConfig, ["@", str(file)]).config, key) is expected


def test_the_table_covers_the_booleans_that_runs_have():
    assert {"data.pack", "data.shuffle", "ckpt.at_end", "resume.if_exists", "overwrite"} <= set(RUN_BOOLS)


@pytest.mark.parametrize("key", BOOLS)
@pytest.mark.parametrize("text", ["True", "FALSE", "yes", "no", "0", "1", "", "off", "null"])
def test_anything_else_is_not_a_boolean(key: str, text: str):
    with pytest.raises(ConfigError, match="expected true or false"):
        load(f"--{key}={text}")


@pytest.mark.parametrize("text", ["1", "0", '"true"', '"false"', "[]", "1.0"])
def test_neither_is_it_in_toml(text: str, tmp_path: Path):
    (tmp_path / "a.toml").write_text(f"[inner]\non = {text}\n")
    with pytest.raises(ConfigError, match=r"inner\.on = .*expected true or false"):
        load("@", str(tmp_path / "a.toml"))


@pytest.mark.parametrize("argv", [["--no-on", "true"], ["--no-on=false"], ["--inner.no-on", "false"]])
def test_the_negative_form_takes_no_value(argv: list[str]):
    with pytest.raises(ConfigError, match="takes no value"):
        load(*argv)


def test_none_unsets_what_may_be_unset(tmp_path: Path):
    for text in ("none", "None"):
        config = load("--name", text, f"--choice={text}", "--maybe", text)
        assert (config.name, config.choice, config.maybe) == (None, None, None)
        (tmp_path / "a.toml").write_text(f'name = "{text}"\nchoice = "{text}"\nmaybe = "{text}"\n')
        config = load("@", str(tmp_path / "a.toml"), "--maybe", text)
        assert (config.name, config.choice, config.maybe) == (None, None, None)
        with pytest.raises(ConfigError, match="expected a whole number"):
            load("--count", text)
    assert load("--mode", "none").mode == "none"  # here it is one of the choices


def test_plain_values():
    config = load("--count", "-3", "--rate=1e-4", "--name", "a b", "--mode", "none")
    assert (config.count, config.rate, config.name, config.mode) == (-3, 1e-4, "a b", "none")
    assert load("--rate", "2").rate == 2.0
    assert load("--name=").name == ""
    assert load("--name=@here").name == "@here"
    assert load("--count", "1", "--count", "2").count == 2


@pytest.mark.parametrize("argv", [["--count", "1.5"], ["--count", "1e3"], ["--count", "ten"], ["--rate", "fast"]])
def test_wrong_types(argv: list[str]):
    with pytest.raises(ConfigError, match=f"{argv[0][2:]} = .*flag {argv[0]}.*expected a (whole )?number"):
        load(*argv)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_only_finite_numbers(text: str):
    with pytest.raises(ConfigError, match="rate = .*expected a number"):
        load(f"--rate={text}")


def test_lists(tmp_path: Path):
    assert load("--at", "1,2,3").at == (1, 2, 3)
    assert load("--at", "[1, 2]").at == (1, 2)
    assert load("--at", "1", "--at", "2,3").at == (1, 2, 3)
    assert load("--at=").at == ()
    assert load("--pair", "0.5, 1").pair == (0.5, 1.0)
    assert load("--words", '["a,b", "c"]').words == ("a,b", "c")
    (tmp_path / "a.toml").write_text("at = [1, 2]\n")
    assert load("@", str(tmp_path / "a.toml")).at == (1, 2)
    assert load("@", str(tmp_path / "a.toml"), "--at", "5").at == (5,)  # flags replace a file's list
    with pytest.raises(ConfigError, match="expected a list of 2 numbers"):
        load("--pair", "1")
    with pytest.raises(ConfigError, match=r"at\.1 = .*flag --at.*expected a whole number"):
        load("--at", "1,x")
    with pytest.raises(ConfigError, match="is not JSON"):
        load("--at", "[1,")
    with pytest.raises(ConfigError, match="no such key"):
        load("--at.0", "1")


def test_lists_of_tables(tmp_path: Path):
    assert load("--entries.0.path", "x").entries == (Entry(path="x"),)
    assert load("--entries.0.path=x", "--entries.0.no-flag").entries[0].flag is False
    assert load("--entries", '[{"path": "x"}, {"path": "y"}]').entries[1].path == "y"
    assert [e.path for e in load("--entries", '{"path": "x"}', "--entries", '{"path": "y"}').entries] == ["x", "y"]
    file = tmp_path / "a.toml"
    file.write_text('[[entries]]\npath = "a"\nweight = 2\n[[entries]]\npath = "b"\n')
    config = load("@", str(file), "--entries.1.path", "c", "--entries.2.path", "d")
    assert [(e.path, e.weight) for e in config.entries] == [("a", 2.0), ("c", None), ("d", None)]
    with pytest.raises(ConfigError, match=r"entries has 2 entries, the next one is entries\.2"):
        load("@", str(file), "--entries.3.path", "x")
    with pytest.raises(ConfigError, match=r"entries\.0\.path .*required"):
        load("--entries.0.weight", "1")


def test_optional_tables(tmp_path: Path):
    assert load().extra is None
    assert load("--extra").extra == Inner()
    assert load("--extra.maybe", "true").extra == Inner(maybe=True)
    assert load("--extra", "--extra.off").extra == Inner(off=True)
    assert load("--extra", '{"off": true}').extra == Inner(off=True)
    assert load("--extra.off", "--no-extra").extra is None
    assert load("--no-extra", "--extra.off").extra == Inner(off=True)
    file = tmp_path / "a.toml"
    file.write_text("[extra]\noff = true\n")
    assert load("@", str(file)).extra == Inner(off=True)
    assert load("@", str(file), "--extra").extra == Inner(off=True)  # keeps what the file says
    assert load("@", str(file), "--no-extra").extra is None
    assert load("@", str(file), "--extra", "none").extra is None
    file.write_text("[extra]\n")
    assert load("@", str(file)).extra == Inner()
    file.write_text('extra = "none"\n')
    assert load("@", str(file)).extra is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--extra", "5"], "--extra: is a table and takes no value; its own flags are --extra.on"),
        (["--inner"], "--inner: is a table"),
        (["--no-inner"], "--no-inner: only booleans and optional tables"),
        (["--no-name"], 'to unset it: "--name none"'),
        (["--name"], "--name: a value is missing; expected a string"),
        (["--name", "--on"], "--name: a value is missing"),
        (["--count", "@", "x.toml"], "--count: a value is missing"),
        (["stray"], "stray: unexpected argument"),
        (["x.toml"], 'x.toml: unexpected argument; a config file is given as "@ x.toml"'),
        (["-c", "1"], "-c: unexpected argument"),
        (["@"], "@: expected the path of a TOML file"),
        (["@", "--on"], "@: expected the path of a TOML file"),
        (["--"], "--: unexpected argument"),
        (["--cou", "3"], "cou .flag --cou.: no such key; did you mean count?"),
    ],
)
def test_what_makes_no_sense_is_said(argv: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    text = str(caught.value).replace("(", ".").replace(")", ".")
    assert message in text


@given(st.text().filter(lambda text: text not in ("none", "None")))
def test_any_text_arrives_unchanged(text: str):
    assert load(f"--name={text}").name == text


@given(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_arrive_unchanged(count: int, rate: float):
    config = load("--count", str(count), "--rate", repr(rate))
    assert (config.count, config.rate) == (count, rate)


@pytest.mark.parametrize("text", ["[" * 100_000, "[" + "9" * 5000 + "]"])
def test_json_that_python_will_not_read_is_told(text):
    with pytest.raises(ConfigError, match="is not JSON"):
        load("--entries", text)
    with pytest.raises(ConfigError, match="is not JSON"):
        parse_arguments([f"x={text}"], "optim.args")
