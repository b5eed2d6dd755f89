"""`trainer ckpt ls | show | diff`: look at checkpoints without loading them. None of it imports torch.

The other subcommands are in `ckpt_tools` and `ckpt_import`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli.ckpt_common import console, guarded, pick, print_json, run_command, size
from trainer.cli.ckpt_tools import add_parsers
from trainer.errors import CheckpointError

if TYPE_CHECKING:
    from trainer.checkpoint.discovery import Candidate

DIFFERENT = 1  # exit code of a comparison that found something

_STYLES = {
    "committed": "green",
    "not resumable": "yellow",
    "mid-cycle": "yellow",
    "superseded": "dim",
    "corrupt": "red",
}


def main(argv: Sequence[str]) -> int:
    """Runs `trainer ckpt` with the arguments after "ckpt"; returns 0, 1 (`diff`, `verify`: not so) or 2 (error)."""
    if argv[:1] == ["import"]:  # its flags are those of a config
        from trainer.cli.ckpt_import import main as import_main

        return guarded(lambda: import_main(list(argv[1:])))
    return guarded(lambda: run_command(_parser(), argv))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer ckpt", description="Look at and work on checkpoints.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    ls = commands.add_parser("ls", help="list the checkpoints of a run, with what is wrong where one is not whole")
    ls.add_argument("run_dir", metavar="RUN", help="a run's output directory, or its checkpoints directory")
    ls.add_argument("--json", action="store_true", help="print JSON")
    ls.set_defaults(run=_ls)

    show = commands.add_parser("show", help="show what a checkpoint holds: counters, group entries, cursors, tensors")
    show.add_argument("path", metavar="STEP_DIR", help="a step directory; of a run directory, the newest is taken")
    show.add_argument("--json", action="store_true", help="print JSON, with every entry and tensor")
    show.add_argument("--all", action="store_true", help="print every entry and tensor")
    show.set_defaults(run=_show)

    diff = commands.add_parser(
        "diff", help="compare two checkpoints by value, whatever world size wrote them", description=_DIFF_HELP
    )
    diff.add_argument("a", metavar="A", help="a step directory; of a run directory, the newest is taken")
    diff.add_argument("b", metavar="B", help="likewise")
    diff.add_argument("--limit", type=int, default=5, metavar="N", help="differences printed per owner (default: 5)")
    diff.add_argument("--all", action="store_true", help="print every difference")
    diff.add_argument("--json", action="store_true", help="print JSON, with every difference")
    diff.set_defaults(run=_diff)
    add_parsers(commands)
    return parser


_DIFF_HELP = (
    "Compares every tensor bit for bit and every group entry, counter and cursor. Prints `identical` and exits with 0, "
    "or prints the differences and exits with 1; 2 means that a checkpoint could not be read."
)


def _ls(arguments: argparse.Namespace) -> int:
    from trainer.checkpoint.discovery import discover, locate

    directory, is_run = locate(arguments.run_dir)
    if not is_run:
        raise CheckpointError(f"{arguments.run_dir} is a single checkpoint; `trainer ckpt show` shows it")
    candidates = discover(directory, superseded=True)
    if arguments.json:
        print_json([_row(candidate, directory) for candidate in candidates])
        return 0
    if not candidates:
        print(f"{directory}: no checkpoints")
        return 0
    from rich.table import Table
    from rich.text import Text

    table = Table("step", "status", "size", "ranks", "created", "directory", "", box=None, pad_edge=False)
    for candidate in candidates:
        row = _row(candidate, directory)
        manifest = candidate.manifest
        table.add_row(
            "" if row["step"] is None else str(row["step"]),
            Text(row["status"], style=_STYLES.get(row["status"], "")),
            size(manifest.size_bytes) if manifest else "",
            str(manifest.world_size) if manifest else "",
            manifest.created if manifest else "",
            row["directory"],
            Text(row["reason"], style="dim"),
        )
    console().print(table)
    return 0


def _row(candidate: "Candidate", directory: Path) -> dict[str, Any]:
    manifest = candidate.manifest
    return {
        "directory": str(candidate.path.relative_to(directory)),
        "step": candidate.step,
        "status": str(candidate.status),
        "reason": candidate.reason,
        "size_bytes": manifest.size_bytes if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "created": manifest.created if manifest else None,
    }


def _show(arguments: argparse.Namespace) -> int:
    from trainer.checkpoint.leaves import dump_leaves, flatten_leaves
    from trainer.checkpoint.tables import JSON_TENSOR, read_tables

    checkpoint = pick(arguments.path)
    layout, leaves = read_tables(checkpoint.path)
    manifest = checkpoint.manifest
    tensors = {
        name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "bytes": tensor.size_bytes}
        for name, tensor in layout.items()
        if name != JSON_TENSOR
    }
    if arguments.json:
        state = json.loads(dump_leaves(leaves))  # infinities and NaN tagged: JSON has none
        print_json({"path": str(checkpoint.path), "manifest": asdict(manifest), "state": state, "tensors": tensors})
        return 0
    versions = manifest.versions
    print(checkpoint.path)
    print(
        f"step {manifest.step}, {size(manifest.size_bytes)} in {len(manifest.files)} files, "
        f"written by {manifest.world_size} rank{'s' if manifest.world_size > 1 else ''}{_mesh(manifest.run)}"
    )
    print(f"created {manifest.created} by trainer {versions.get('trainer')}, torch {versions.get('torch')}")
    print("resumable" if manifest.resumable else f"not resumable: {manifest.reason}")
    if manifest.micro_step:
        print(f"in the middle of step {manifest.step + 1}: {manifest.micro_step} micro-steps done")
    if manifest.parent:
        print(f"forked from step {manifest.parent.get('step')} of {manifest.parent.get('path')}")
    limit = None if arguments.all else 12
    for owner, state in leaves.items():
        own = {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] == owner}
        entries = [(key, value) for key, value in flatten_leaves(_without_names(state), owner) if key != owner]
        print(f"\n{owner}: {len(own)} tensors, {size(sum(t['bytes'] for t in own.values()))}; {len(entries)} entries")
        lines = [f"  {key} = {value!r}" for key, value in entries]
        lines += [f"  {name}  {tensor['dtype']} {tensor['shape']}" for name, tensor in own.items()]
        _print_some(lines, limit)
    return 0


def _mesh(run: Mapping[str, Any]) -> str:
    """Returns " (replicate 2 x shard 4)"; "" where there was one process, or the manifest does not say."""
    mesh = run.get("mesh")
    sides = [f"{name} {size}" for name, size in mesh.items()] if isinstance(mesh, dict) else []
    return f" ({' x '.join(sides)})" if sides else ""


def _without_names(value: Any) -> Any:
    """Returns `value` with each long list of strings, such as a group's parameter names, cut to its ends."""
    if isinstance(value, dict):
        return {key: _without_names(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if len(value) > 2 and all(isinstance(item, str) for item in value):
            return f"{value[0]} ... {value[-1]} ({len(value)})"
        return [_without_names(item) for item in value]
    return value


def _diff(arguments: argparse.Namespace) -> int:
    from trainer.checkpoint.diff import differences, open_contents

    a, b = open_contents(pick(arguments.a).path), open_contents(pick(arguments.b).path)
    found = list(differences(a, b))
    if arguments.json:
        print_json({"a": str(a.directory), "b": str(b.directory), "differences": [asdict(d) for d in found]})
        return DIFFERENT if found else 0
    print(f"A {a.directory}\nB {b.directory}")
    if not found:
        print("identical")
        return 0
    print(f"{len(found)} differences")
    for owner in dict.fromkeys(difference.owner for difference in found):
        own = [difference for difference in found if difference.owner == owner]
        print(f"{owner}: {len(own)}")
        _print_some([f"  {d.key}: {d.text}" for d in own], None if arguments.all else arguments.limit)
    return DIFFERENT


def _print_some(lines: Sequence[str], limit: int | None) -> None:
    for line in lines[:limit]:
        print(line)
    if limit is not None and len(lines) > limit:
        print(f"  ... and {len(lines) - limit} more; --all prints them")
