"""What is printed and written to config.toml loads to the same config."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.dump import dump_toml
from trainer.config.load import load_config
from trainer.config.run import RunConfig, SFTConfig
from trainer.config.schema import Shape, leaves, shape_of_field


def values(shape: Shape) -> st.SearchStrategy[Any]:
    """Legal values of a shape: numbers are chosen to satisfy every bound that a section uses."""
    match shape.kind:
        case "section":
            found = tables(shape.section)
        case "sections":
            found = st.lists(tables(shape.section), max_size=2)
        case "list" if shape.fixed:
            found = st.tuples(*map(values, shape.items))
        case "list":
            found = st.lists(values(shape.items[0]), min_size=1, max_size=3)
        case "bool":
            found = st.booleans()
        case "int":
            highest = [int(limit.removeprefix("<= ")) for limit in shape.limits if limit.startswith("<= ")]
            found = st.integers(2, min(highest, default=2**63))
        case "float":
            found = st.floats(0, 1, exclude_min=True, exclude_max=True)
        case "choice":
            found = st.sampled_from(shape.choices)
        case _:
            found = st.text(min_size=1).filter(lambda text: text not in ("none", "None"))
    return st.none() | found if shape.optional else found


def tables(section: type | None) -> st.SearchStrategy[dict[str, Any]]:
    assert section is not None
    fields = {name: values(shape_of_field(section, name)) for name in section.model_fields}
    required = {name: value for name, value in fields.items() if section.model_fields[name].is_required()}
    return st.fixed_dictionaries(required, optional={k: v for k, v in fields.items() if k not in required})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dump") / "config.toml"


@settings(max_examples=60, deadline=None)
@given(given_values=tables(RunConfig))
def test_dump_and_load_is_the_identity(file: Path, given_values: dict[str, Any]):
    config = RunConfig.model_validate(given_values)
    file.write_text(dump_toml(config), encoding="utf-8")
    assert load_config(RunConfig, ["@", str(file)]).config == config


def test_a_dump_has_every_value_with_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(
        "max_steps = 10\n[model]\nname = 'm'\n[[data.sources]]\npath = 'p'\n[resume]\nif_exists = true\n"
    )
    loaded = load_config(SFTConfig, ["@", "a.toml", "--optim.lr", "1e-4", "--data.no-pack"])
    text = loaded.dump_toml()
    lines = text.splitlines()
    for line in (
        "max_steps = 10  # a.toml",
        'epochs = "none"  # default',
        "lr = 0.0001  # flag --optim.lr",
        "pack = false  # flag --data.no-pack",
        'path = "p"  # a.toml',
        "betas = [0.9, 0.95]  # default",
        "[resume]  # a.toml",
        "[optim]",
    ):
        assert line in lines, line
    assert sum(" = " in line for line in lines) == len(list(leaves(loaded.config)))
    assert all("  # " in line for line in lines if " = " in line)

    Path("b.toml").write_text(text)
    again = load_config(SFTConfig, ["@", "b.toml"])
    assert again.config == loaded.config
    assert again.origins["epochs"] == "b.toml"
    assert tomllib.loads(loaded.dump_toml(comments=False)) == tomllib.loads(text)
    assert "#" not in loaded.dump_toml(comments=False)


def test_an_odd_file_name_cannot_break_the_document(tmp_path: Path):
    file = tmp_path / "a\nseed = 7\n.toml"
    file.write_text("output_dir = 'x'\n")
    text = load_config(RunConfig, ["@", str(file)]).dump_toml()
    assert tomllib.loads(text)["seed"] == 0
