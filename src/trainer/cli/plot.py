"""``trainer plot``: metrics of one or more runs as a PNG."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import ConfigError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer plot",
        description="Draw loss, learning rate, gradient norm and throughput of one or more runs into a PNG.",
        epilog="Of several runs the first is a broad pale line and the others lie on top of it as thin ones.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="directory of a run (its output_dir)")
    parser.add_argument(
        "-o", "--out", type=Path, help="the picture; default RUN/plots/metrics.png of one run, metrics.png of several"
    )
    parser.add_argument("--keys", help="metrics to draw, separated by commas, such as loss,lr,peak_memory_gib")
    parser.add_argument("--labels", help="names of the runs in the legend, separated by commas; default: directories")
    parser.add_argument("--title", help="title of the picture")
    parser.add_argument("--superseded", action="store_true", help="also draw the rows that a resume repeated (dotted)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. Raises ``TrainerError`` for what the user has to change."""
    arguments = build_parser().parse_args(argv)
    runs: list[Path] = arguments.runs
    labels = _listed(arguments.labels)
    if labels is not None and len(labels) != len(runs):
        raise ConfigError(f"--labels has {len(labels)} names for {len(runs)} runs; give one for each, in their order")
    out: Path = arguments.out or (runs[0] / "plots" / "metrics.png" if len(runs) == 1 else Path("metrics.png"))
    if out.suffix != ".png":
        raise ConfigError(f"-o {out}: the picture is a PNG, so its name must end in .png")

    from trainer.train.plots import DEFAULT_KEYS, plot_runs

    keys = _listed(arguments.keys) or DEFAULT_KEYS
    plot_runs(runs, out, keys=keys, superseded=arguments.superseded, labels=labels, title=arguments.title)
    print(out)
    return 0


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]
