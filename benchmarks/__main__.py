"""`python -m benchmarks [NAME ...]`: runs benchmarks, prints their figures and writes benchmarks/results/NAME.json."""

import argparse
import importlib
import os
import shlex
import sys
import time

from benchmarks import report
from benchmarks.harness import wait_for_quiet
from benchmarks.options import Options
from benchmarks.results import ROOT, Result

NAMES = (
    "startup",
    "packing",
    "loss",
    "attention",
    "products",
    "rollout",
    "grpo",
    "publication",
    "step",
    "muon",
    "offload",
    "checkpoint",
    "peers",
)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (default: all)")
    parser.add_argument(
        "--threads", type=int, nargs="+", help="measure with so many threads (default: 1 and all cores)"
    )
    parser.add_argument("--rounds", type=int, default=Options.rounds, help="interleaved blocks of each participant")
    parser.add_argument("--block-seconds", type=float, default=Options.block_seconds, help="length of a block")
    parser.add_argument("--smoke", action="store_true", help="seconds instead of minutes; the numbers mean nothing")
    parser.add_argument(
        "--no-peers", action="store_true", help="leave the other trainers out (each needs 6 GB of disk)"
    )
    parser.add_argument("--smoke-peers", action="store_true", help="a smoke run with the other trainers")
    parser.add_argument(
        "--machine", metavar="NAME", help="keep the results that are there, and show these below them, under this name"
    )
    parser.add_argument("--quiet-load", type=float, default=0.5, help="wait until the machine's load is below this")
    parser.add_argument("--quiet-timeout", type=float, default=120.0, help="but no longer than so many seconds")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in NAMES]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(NAMES)}")
    if "/" in (arguments.machine or ""):
        parser.error(f"--machine {arguments.machine}: the name is part of a file's name, so it can have no /")
    return arguments


def options_of(arguments: argparse.Namespace) -> Options:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if arguments.smoke or arguments.smoke_peers:
        return Options.for_smoke(threads=tuple(arguments.threads or (1,)), peers=arguments.smoke_peers)
    threads = tuple(arguments.threads or dict.fromkeys((1, cores)))
    return Options(
        threads=threads,
        peers=not arguments.no_peers,
        rounds=arguments.rounds,
        block_seconds=arguments.block_seconds,
    )


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if a figure misses its bound, else 0; a smoke run has no bounds to miss."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv)
    options = options_of(arguments)
    command = shlex.join(["python", "-m", "benchmarks", *argv])
    missed = 0
    for name in arguments.names or NAMES:
        load = 0.0 if options.smoke else wait_for_quiet(arguments.quiet_load, arguments.quiet_timeout)
        started = time.monotonic()
        print(f"{name} (load average {load:.2f} before)", flush=True)
        result: Result = importlib.import_module(f"benchmarks.bench_{name}").run(options)
        path = result.write(smoke=options.smoke, load_before=load, command=command, machine_name=arguments.machine)
        print("\n".join(target.line(judged=not options.smoke) for target in result.targets))
        print(f"  {path.relative_to(ROOT)}, {time.monotonic() - started:.0f} s", flush=True)
        missed += sum(target.met is False for target in result.targets)
    if options.smoke:
        return 0
    print(f"{missed} figures miss their bound; {report.write().relative_to(ROOT)} is rewritten")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
