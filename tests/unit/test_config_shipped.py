"""Every TOML in configs/ is valid, and the debug assets are what their script writes."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trainer.config.kinds import KINDS, kind_of
from trainer.config.load import load_config
from trainer.config.run import RunConfig

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
ALL = sorted(path.relative_to(REPOSITORY) for path in CONFIGS.rglob("*.toml"))
ASSETS = CONFIGS / "debug" / "assets"


def overlays(path: Path) -> bool:
    return path.parent.name == "add"


def load(*argv: str) -> RunConfig:
    return load_config(KINDS[kind_of([*argv])], [*argv]).config


def test_there_are_configs():
    assert len(ALL) >= 10


@pytest.mark.parametrize("path", ALL, ids=str)
def test_k3_shipped_config_is_valid(path: Path):
    base = ["@", str(CONFIGS / "sft.toml")] if overlays(path) else []
    load(*base, "@", str(REPOSITORY / path))


@pytest.mark.parametrize("path", [path for path in ALL if not overlays(path)], ids=str)
def test_runs_do_not_share_an_output_directory(path: Path):
    directory = load("@", str(REPOSITORY / path)).output_dir
    assert directory != RunConfig().output_dir
    others = [load("@", str(REPOSITORY / p)) for p in ALL if p != path and not overlays(p)]
    assert directory not in [other.output_dir for other in others]


@pytest.mark.parametrize("path", [path for path in ALL if path.parent.name == "debug"], ids=str)
def test_debug_configs_name_files_that_exist(path: Path):
    config = load("@", str(REPOSITORY / path))
    assert (REPOSITORY / config.model.name / "config.json").is_file()
    assert all((REPOSITORY / source.path).is_file() for source in config.data.sources)


def test_documents_show_no_key_that_does_not_exist():
    """TOML blocks in the docs are fragments: each is laid over a valid config."""
    blocks = [
        block.partition("```")[0]
        for text in (REPOSITORY / "docs" / "config.md").read_text().split("```toml\n")[1:]
        for block in [text]
    ]
    assert blocks
    for block in blocks:
        RunConfig.model_validate(tomllib.loads(block))


def test_the_script_writes_the_assets_byte_for_byte(tmp_path: Path):
    subprocess.run([sys.executable, REPOSITORY / "scripts" / "make_debug_assets.py", tmp_path], check=True)
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert written == sorted(path.relative_to(ASSETS) for path in ASSETS.rglob("*") if path.is_file())
    for path in written:
        assert (tmp_path / path).read_bytes() == (ASSETS / path).read_bytes(), path
