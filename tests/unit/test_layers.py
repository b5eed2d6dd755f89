"""The arrows of the architecture: imports go downward only, the command line stays light, one file knows about GPUs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "trainer"

LAYERS = (
    {"errors"},
    {"config"},
    {"core"},
    {"kernels"},
    {"models", "data", "optim"},
    {"checkpoint"},
    {"train"},
    {"sft", "rl"},
    {"cli"},
    {"__main__"},
)
"""From the bottom up. Packages of one layer do not import each other."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

HEAVY = {
    "torch",
    "torchdata",
    "numpy",
    "transformers",
    "tokenizers",
    "datasets",
    "triton",
    "wandb",
    "matplotlib",
    "pyarrow",
}
"""What `trainer --help` and a mistyped flag must not wait for."""
LIGHT = ("config", "cli")

GPU_WORD = "cuda"
GPU_FILES = ("core/device.py", "kernels/")
GPU_EXCEPTIONS = {"config/train.py": 1}  # the name of a choice of runtime.device


# --- reading imports ------------------------------------------------------------------------------------------------


def modules(root: Path) -> dict[str, Path]:
    """Dotted name below the package -> file; a package is its ``__init__.py``, the top package is ""."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(node: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Full names that an import statement of the package `trainer` may bring in: "torch.nn", "trainer.core.rng"."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            here = ["trainer", *module.split(".")] if module else ["trainer"]
            here = here[: len(here) - node.level + is_package]
            base = ".".join([*here, base] if base else here)
        yield from (f"{base}.{alias.name}" for alias in node.names)


def walk_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: no function bodies, nothing under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (n for branch in child.orelse for n in (branch, *walk_at_import(branch)))
            continue
        yield child
        yield from walk_at_import(child)


def resolve(name: str, known: dict[str, Path]) -> str | None:
    """The module of the package that the name stands for (it may be an attribute of one); None if it is not ours."""
    if name != "trainer" and not name.startswith("trainer."):
        return None
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts)


# --- the three checks -----------------------------------------------------------------------------------------------


def upward_edges(root: Path) -> list[str]:
    """Every import, also inside functions, that does not go down."""
    known, wrong = modules(root), []
    for module, path in known.items():
        source = module.split(".")[0]
        if not source:
            continue  # the package's own __init__ names public things lazily
        if source not in LEVEL:
            wrong.append(f"{path.relative_to(root)}: {source!r} is in no layer; add it to LAYERS")
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in imported(node, module, path.name == "__init__.py"):
                found = resolve(name, known)
                if found is None or (target := found.split(".")[0]) == source:
                    continue
                edge = f"{path.relative_to(root)}:{getattr(node, 'lineno', '?')}: {source} imports {name}"
                if not target:
                    if not name.endswith("__version__"):
                        wrong.append(f"{edge}: import it from the module that defines it")
                elif LEVEL.get(target, 99) >= LEVEL[source]:
                    wrong.append(f"{edge}, which is {'beside' if LEVEL.get(target) == LEVEL[source] else 'above'} it")
    return wrong


def heavy_chains(root: Path) -> list[str]:
    """Ways on which importing a module of a light package imports a heavy one."""
    known = modules(root)
    direct: dict[str, set[str]] = {}
    heavy: dict[str, set[str]] = {}
    for module, path in known.items():
        names = {
            name
            for node in walk_at_import(ast.parse(path.read_text(encoding="utf-8")))
            for name in imported(node, module, path.name == "__init__.py")
        }
        parts = module.split(".")
        parents = {".".join(parts[:n]) for n in range(1, len(parts))}
        direct[module] = {m for name in names if (m := resolve(name, known))} | parents
        heavy[module] = {name.split(".")[0] for name in names} & HEAVY
    wrong = []
    for start in (module for module in known if module.split(".")[0] in LIGHT):
        ways, seen = [[start]], {start}
        while ways:
            way = ways.pop(0)
            wrong += [" -> ".join([*way, package]) for package in sorted(heavy[way[-1]])]
            new = [module for module in sorted(direct[way[-1]]) if module in known and module not in seen]
            seen.update(new)
            ways += [[*way, module] for module in new]
    return wrong


def gpu_mentions(root: Path) -> list[str]:
    """Where code, not a comment or docstring, says the GPU's name outside the files that may."""
    wrong = []
    for path in modules(root).values():
        name = path.relative_to(root).as_posix()
        if name.startswith(GPU_FILES):
            continue
        found = [f"{name}:{line}" for line in sorted(set(_gpu_lines(ast.parse(path.read_text(encoding="utf-8")))))]
        if len(found) > GPU_EXCEPTIONS.get(name, 0):
            wrong += found
    return wrong


def _gpu_lines(tree: ast.AST) -> Iterator[int]:
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # bare strings: documentation
    for node in ast.walk(tree):
        texts: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            texts = [node.value]
        elif isinstance(node, ast.Name | ast.Attribute):
            texts = [node.id if isinstance(node, ast.Name) else node.attr]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            texts = list(imported(node, "", True))
        if any(GPU_WORD in text.lower() for text in texts):
            yield getattr(node, "lineno", 0)


# --- the package keeps the rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [upward_edges, heavy_chains, gpu_mentions], ids=lambda check: check.__name__)
def test_package_keeps_the_layers(check):
    assert check(SRC) == []


# --- the checks see what they should --------------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for package in path.relative_to(root).parents:
            (root / package / "__init__.py").touch()
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("optim/a.py", "from trainer.train.loop import fit", "optim/a.py:1: optim imports trainer.train.loop.fit"),
        ("optim/a.py", "def f():\n    import trainer.models.layers", "optim imports trainer.models.layers"),
        ("core/a.py", "from ..checkpoint import store", "core imports trainer.checkpoint.store"),
        ("core/deep/a.py", "from ... import cli", "core imports trainer.cli"),
        ("sft/a.py", "from trainer import SFTConfig", "import it from the module that defines it"),
        ("surprise/a.py", "", "'surprise' is in no layer"),
    ],
)
def test_wrong_edges_are_named(tmp_path, file, text, named):
    others = {f"{name}/__init__.py": "" for name in ("train", "models", "checkpoint", "cli")}
    others |= {"train/loop.py": "", "models/layers.py": "", "checkpoint/store.py": ""}
    wrong = upward_edges(write(tmp_path, {**others, file: text}))
    assert wrong and all(named in line for line in wrong)


def test_right_edges_pass(tmp_path):
    files = {"errors.py": "", "core/rng.py": "from trainer.errors import TrainerError", "train/loop.py": "import torch"}
    files["cli/main.py"] = "from trainer.core import rng\nfrom trainer.train.loop import fit\nfrom . import plot"
    assert upward_edges(write(tmp_path, files)) == []


def test_heavy_imports_are_traced_through_other_modules(tmp_path):
    files = {
        "cli/main.py": "from trainer.core.tools import f",
        "core/tools.py": "try:\n    import numpy.random\nexcept ImportError:\n    pass",
        "config/late.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f():\n    import torch",
        "optim/free.py": "import torch",
    }
    assert heavy_chains(write(tmp_path, files)) == ["cli.main -> core.tools -> numpy"]


def test_heavy_imports_of_a_parent_package_count(tmp_path):
    files = {"cli/main.py": "from trainer.core.tools import f", "core/tools.py": "", "core/__init__.py": "import torch"}
    assert heavy_chains(write(tmp_path, files)) == ["cli.main -> core.tools -> core -> torch"]


@pytest.mark.parametrize(
    "line", ['x = "cuda:0"', "import torch.cuda", "torch.cuda.synchronize()", "def f(cuda_graph=0): cuda_graph"]
)
def test_gpu_words_are_found(tmp_path, line):
    text = f'"""Docs may say cuda."""\n# as may comments: cuda\n{line}\n'
    files = {"train/step.py": text, "core/device.py": text, "kernels/fast.py": text}
    assert gpu_mentions(write(tmp_path, files)) == ["train/step.py:3"]
