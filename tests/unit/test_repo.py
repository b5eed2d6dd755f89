"""What holds for the files of the repository as a whole."""

import ast
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 450
LEFT_OUT = {".git", ".venv", ".vllm", ".uv", ".cache", "runs", "wandb", "dist", "build", "__pycache__"}

# Put together from halves, so that this file does not find itself.
MACHINE_PATHS = ["/wo" + "rk/", "/opt/" + "wheels", "/ro" + "ot/", "/home/" + "user"]
REGISTRIES = ["pypi" + ".org", "python" + "hosted.org", "npm" + "js.", "deb." + "debian.org"]


def files() -> list[Path]:
    """The files that git has or would take; without git, everything but caches and environments."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [path for name in sorted(listed.stdout.split("\0")) if name and (path := ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and not LEFT_OUT & set(path.relative_to(ROOT).parts)]


def text_of(path: Path) -> str:
    """ "" for what is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def mentions(words: list[str], *, but: tuple[str, ...] = ()) -> list[str]:
    """The lines of the repository's files that hold one of the words, as file:line: word."""
    found = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        text = "" if name in but else text_of(path)
        if any(word in text for word in words):
            lines = enumerate(text.splitlines(), 1)
            found += [f"{name}:{number}: {word}" for number, line in lines for word in words if word in line]
    return found


def test_no_source_file_is_too_long_to_read():
    sources = [path for path in files() if path.suffix == ".py" and path.is_relative_to(ROOT / "src")]
    assert len(sources) > 20
    lengths = {path.relative_to(ROOT).as_posix(): len(text_of(path).splitlines()) for path in sources}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_machine_paths():
    assert mentions(MACHINE_PATHS) == []


def test_no_registry_addresses_outside_the_lock_file():
    assert mentions(REGISTRIES, but=("uv.lock",)) == []


def test_the_search_for_words_works():
    assert f"{Path(__file__).relative_to(ROOT).as_posix()}:1: repository as a whole" in mentions(
        ["repository as a whole"]
    )


def test_links_in_markdown_lead_somewhere():
    broken = []
    for path in files():
        if path.suffix == ".md":
            targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(path))
            targets += re.findall(r'<img[^>]*\ssrc="([^"]+)"', text_of(path))
            local = [target for target in targets if not re.match(r"[a-z]+:", target)]
            broken += [f"{path.relative_to(ROOT)}: {name}" for name in local if not (path.parent / name).exists()]
    assert broken == []


def test_paths_that_the_readme_names_exist():
    named = re.findall(r"`((?:src|tests|configs|scripts|docs|benchmarks)/[^`<]+)`", text_of(ROOT / "README.md"))
    assert named
    assert [path for path in named if not list(ROOT.glob(path))] == []


def test_names_of_test_files_are_unique():
    """pytest imports them by their bare names, and worker processes find their functions by those."""
    counts = Counter(path.name for path in files() if re.fullmatch(r"test_.*\.py", path.name))
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_test_is_hidden():
    """pytest finds tests in modules and classes. One inside a function, or under a name that is taken, never runs."""
    hidden = []
    for path in files():
        if re.fullmatch(r"test_.*\.py", path.name):
            tree = ast.parse(text_of(path))
            hidden += [f"{path.name}:{line}" for line in hidden_tests(tree)]
    assert hidden == []
    assert hidden_tests(ast.parse("def f():\n    def test_a(): pass")) == [2]
    assert hidden_tests(ast.parse("class A:\n    def test_a(self): pass\n    def test_a(self): pass")) == [3]
    assert hidden_tests(ast.parse("class A:\n    def test_a(self): pass\ndef test_a(): pass")) == []


def hidden_tests(scope: ast.AST, inside: bool = False) -> list[int]:
    """The lines of the tests in a piece of code that are within a function, or whose name is given twice."""
    hidden, names = [], set()
    for node in ast.iter_child_nodes(scope):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.lower().startswith("test") and (inside or node.name in names):
                hidden.append(node.lineno)
            names.add(node.name)
        hidden += hidden_tests(node, inside or is_function)
    return hidden


@pytest.mark.parametrize("script", [path for path in files() if path.suffix == ".sh" or path.name == "run"], ids=str)
def test_scripts_can_be_started(script: Path):
    assert os.access(script, os.X_OK)
    assert text_of(script).startswith("#!/usr/bin/env bash\n")
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""


def test_make_help_lists_the_targets():
    made = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("demo", "test", "test-full", "soak", "lint", "types", "bench", "clean", "sync"):
        assert re.search(rf"make {target}\s", made), f"make help does not name {target}"
