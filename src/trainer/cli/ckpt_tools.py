"""`trainer ckpt verify | prune | export | repair`: tools that judge, thin out and hand on checkpoints.

Only `export` and `prune` import torch, when they run.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli.ckpt_common import console, pick, print_json, size
from trainer.errors import CheckpointError

if TYPE_CHECKING:
    from trainer.checkpoint.discovery import Candidate
    from trainer.checkpoint.verify import Report

DAMAGED = 1  # exit code of `verify`

_MARKS = {"ok": ("✓", "green"), "damaged": ("✗", "bold red"), "note": ("·", "yellow"), "skipped": ("-", "dim")}


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verify = commands.add_parser(
        "verify", help="read a checkpoint, or every one of a run, and say whether it is sound", description=_VERIFY_HELP
    )
    verify.add_argument("path", metavar="PATH", help="a step directory; of a run directory, every checkpoint is read")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(run=_verify)

    prune = commands.add_parser("prune", help="remove old checkpoints of a run by the rule of [ckpt]")
    prune.add_argument("run_dir", metavar="RUN", help="a run's output directory, or its checkpoints directory")
    prune.add_argument("--keep-last", type=_positive, metavar="N", help="the newest N resumable stay")
    prune.add_argument("--keep-every", type=_positive, metavar="M", help="steps that are multiples of M stay as well")
    prune.add_argument("--keep-best", type=_positive, metavar="K", help="and the K with the lowest val_loss")
    prune.add_argument(
        "--superseded", action="store_true", help="remove what was set aside when the run went back to an older step"
    )
    prune.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    prune.add_argument("--json", action="store_true", help="print JSON")
    prune.set_defaults(run=_prune)

    export = commands.add_parser("export", help="write the weights of a checkpoint as a Hugging Face model directory")
    export.add_argument(
        "path", metavar="STEP_DIR", help="a step directory; of a run directory, the newest resumable one is taken"
    )
    export.add_argument("out", metavar="OUT", help="the model directory to write; it must not exist")
    export.add_argument(
        "--model", metavar="DIR", help="directory of config.json and tokenizer (default: the run's model.name)"
    )
    export.add_argument("--json", action="store_true", help="print JSON")
    export.set_defaults(run=_export)

    repair = commands.add_parser(
        "repair", help="write a copy of a checkpoint whose learning rates are damaged", description=_REPAIR_HELP
    )
    repair.add_argument("path", metavar="STEP_DIR", help="the damaged step directory; it is only read")
    repair.add_argument("out", metavar="OUT", help="directory for the copy: OUT/checkpoints/step_NNNNNNNN")
    repair.add_argument("--json", action="store_true", help="print JSON")
    repair.set_defaults(run=_repair)

    # `ckpt.main` hands it on before this parser sees it; here it only stands in the list.
    commands.add_parser("import", help="bring in a checkpoint of another trainer", add_help=False)


_VERIFY_HELP = (
    "Checks the manifest, the size and checksum of every file, the tables, the counters, every group's learning rate "
    "against the schedule at that step, and that every number is finite. Exits with 0 if all is sound, 1 if something is "
    "damaged, 2 if PATH is no checkpoint."
)
_REPAIR_HELP = (
    "Sets every param group's learning rate to what the saved schedule gives at that step, in a copy. The original is "
    "never touched; changed bytes or weights that are not finite are refused. Go on with --resume.dir OUT."
)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


# -- verify --------------------------------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    from trainer.checkpoint.verify import verify

    directories, others = _to_verify(arguments.path)
    reports = []
    for directory in directories:
        report = verify(directory)
        reports.append(report)
        if not arguments.json:
            _print_report(report)
    if arguments.json:
        print_json([_json_report(report) for report in reports])
    else:
        for candidate in others:
            print(f"{candidate.path.name}: {candidate.status}: {candidate.reason}")
    return 0 if all(report.sound for report in reports) else DAMAGED


def _to_verify(path: str) -> tuple[list[Path], "list[Candidate]"]:
    """Returns the step directories to read, and what lies beside them and is no checkpoint.

    Raises:
        CheckpointError: there is nothing to verify.
    """
    from trainer.checkpoint.discovery import Status, discover, inspect_step, locate

    directory, is_run = locate(path)
    if not is_run:
        candidate = inspect_step(directory)
        if candidate.status in (Status.INCOMPLETE, Status.FOREIGN):
            raise CheckpointError(f"{path} is {candidate.status}: {candidate.reason}")
        return [directory], []
    candidates = discover(directory)
    no_checkpoints = (Status.INCOMPLETE, Status.FOREIGN)
    chosen = [candidate.path for candidate in candidates if candidate.status not in no_checkpoints]
    if not chosen:
        raise CheckpointError(f"{directory} has no checkpoint; `trainer ckpt ls {path}` shows what is there")
    return chosen, [candidate for candidate in candidates if candidate.status in no_checkpoints]


def _print_report(report: "Report") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for check in report.checks:
        mark, style = _MARKS[check.outcome]
        text = Text(check.text, style=style if check.outcome == "damaged" else "")
        table.add_row(Text(f"  {mark}", style=style), Text(check.name), text)
    verdict = Text("sound", style="bold green") if report.sound else Text("damaged", style="bold red")
    out = console()
    out.print(Text.assemble(str(report.path), "  ", verdict))
    out.print(table)


def _json_report(report: "Report") -> dict[str, Any]:
    return {
        "path": str(report.path),
        "step": report.step,
        "sound": report.sound,
        "checks": [asdict(check) for check in report.checks],
    }


# -- prune, export, repair -----------------------------------------------------------------------------------------------


def _prune(arguments: argparse.Namespace) -> int:
    from trainer.checkpoint.discovery import Status, discover, locate
    from trainer.checkpoint.retention import plan_removals, plan_superseded

    if arguments.keep_last is None and (arguments.keep_every or arguments.keep_best or not arguments.superseded):
        raise CheckpointError("prune needs --keep-last N, which says how many stay in any case, or --superseded alone")
    directory, is_run = locate(arguments.run_dir)
    if not is_run:
        raise CheckpointError(f"{arguments.run_dir} is a single checkpoint; prune takes a run")
    candidates = discover(directory, superseded=arguments.superseded)
    rule = {"keep_last": arguments.keep_last, "keep_every": arguments.keep_every, "keep_best": arguments.keep_best}
    plan = plan_removals(candidates, **rule)
    removed = {candidate.path for candidate in plan}
    kept = [c.step for c in candidates if c.status is Status.COMMITTED and c.path not in removed]
    plan += plan_superseded(candidates) if arguments.superseded else []
    if not arguments.dry_run:
        from trainer.checkpoint.store import CheckpointStore

        store = CheckpointStore(directory)
        for candidate in plan:
            store.remove(candidate.path)
        if arguments.superseded:
            store.remove_empty_superseded()
    size_bytes = sum(candidate.manifest.size_bytes for candidate in plan if candidate.manifest)
    if arguments.json:
        names = [str(candidate.path.relative_to(directory)) for candidate in plan]
        steps = [candidate.step for candidate in plan if candidate.path in removed]
        found = {"removed": steps, "directories": names, "kept": kept, "size_bytes": size_bytes}
        print_json(found | {"dry_run": arguments.dry_run})
        return 0
    verb = "would remove" if arguments.dry_run else "removed"
    for candidate in plan:
        print(f"{verb} {candidate.path}")
    print(f"{verb} {len(plan)} checkpoints, {size(size_bytes)}; kept: {', '.join(map(str, kept)) or 'none'}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    out = Path(arguments.out)
    if out.exists():
        raise CheckpointError(f"{out} exists; export writes a new directory")
    checkpoint = pick(arguments.path, resumable=True)

    from trainer.checkpoint.export import export_checkpoint

    count = export_checkpoint(checkpoint, out, model_dir=arguments.model)
    if arguments.json:
        print_json({"path": str(out), "checkpoint": str(checkpoint.path), "step": checkpoint.step, "tensors": count})
        return 0
    print(f"{out}: {count} tensors of step {checkpoint.step}, float32, with config.json and tokenizer")
    return 0


def _repair(arguments: argparse.Namespace) -> int:
    from trainer.checkpoint.paths import CHECKPOINTS
    from trainer.checkpoint.repair import repair

    source = pick(arguments.path).path
    done = repair(source, Path(arguments.out) / CHECKPOINTS)
    if arguments.json:
        print_json({"path": None if done.path is None else str(done.path), "changes": done.changes})
    elif done.path is None:
        print(f"{source} is sound: nothing to repair, nothing written")
    else:
        print("\n".join([f"{source} is untouched; the copy is {done.path}", *(f"  {line}" for line in done.changes)]))
        print(f"go on with --resume.dir {arguments.out}")
    return 0
