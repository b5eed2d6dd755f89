"""Kills a run at random instants, again and again, and holds its end against the run that was never killed.

  python -m scripts.soak --kills 200            on one process, saving in the foreground and background by turns
  python -m scripts.soak --kills 50 --nproc 2   on two ranks, of which all or a random one is killed
  python -m scripts.soak --kills 50 --rl        runs of reinforcement learning, generating ahead or not by turns

A round is one run: killed and started again until it reaches its last step, then compared, bit for bit. Rounds go on until
the kills are used up. Exit code 0 = every round ended identical; else what differs is printed and its folder is kept.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from scripts import warm
from scripts.demo.runs import DemoFailed, checkpoint, compare_checkpoints, compare_metrics, read_metrics

STEPS = 24
SAVE_SECONDS = 0.02  # about what the save of a tiny model takes in memory
TRAINING = "while starting or training"
COMMON = [
    *("--max-steps", str(STEPS), "--val.interval", "8", "--val.at-start", "--ckpt.no-export-weights"),
    *("--log.level", "error", "--runtime.gc-interval", "0"),
]
CONFIGS = {
    "sft": ["@", str(warm.ROOT / "configs/debug/sft.toml"), *COMMON, "--data.batch-size", "2", "--data.seq-len", "64"],
    "rl": [
        "@",
        str(warm.ROOT / "configs/debug/rl.toml"),
        *COMMON,
        "--val.prompts",
        "2",
        "--data.micro-batch-size",
        "2",
    ],
}
KINDS = {
    "sft": [[]],
    "rl": [[], ["--rl.max-lag", "1"], ["--objective.iterations", "2", "--objective.old-logprobs", "trainer"]],
}
"""Flags that rounds take in turn, each of which has a whole run of its own."""


@dataclass
class Soak:
    place: Path
    kind: str
    nproc: int
    chance: random.Random
    where: Counter[str] = field(default_factory=Counter)
    """What the run was doing when it was killed -> how often."""
    rounds: int = 0

    def run(self, kills: int) -> None:
        """Raises DemoFailed if a run does not end as it must."""
        variants = KINDS[self.kind]
        self._finish(self.place / "first", *variants[0])  # this one does the imports
        shutil.rmtree(self.place / "first")
        seconds: dict[int, float] = {}
        while self.where.total() < kills:
            number = self.rounds % len(variants)
            whole = self.place / f"whole_{number}"
            if number not in seconds:
                started = time.monotonic()
                self._finish(whole, *variants[number])
                seconds[number] = time.monotonic() - started
            self._round(whole, variants[number], seconds[number], kills)
            self.rounds += 1

    def _round(self, whole: Path, variant: list[str], seconds: float, kills: int) -> None:
        run_dir = self.place / f"round_{self.rounds}"
        flags = [*variant, "--ckpt.interval", str(self.chance.choice((1, 2, 5))), "--ckpt.keep-last", "1"]
        if self.chance.random() < 0.5:
            flags.append("--ckpt.async")
        ended = False
        while not ended and self.where.total() < kills:
            ended = self._start_and_kill(run_dir, flags, seconds)
        if not ended:
            self._finish(run_dir, *flags)
        compare_checkpoints(checkpoint(whole, STEPS), checkpoint(run_dir, STEPS))
        compare_metrics(read_metrics(whole / "metrics.jsonl"), read_metrics(run_dir / "metrics.jsonl"))
        self._compare_rollouts(whole / "rollouts", run_dir / "rollouts")
        left = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
        if left != [checkpoint(run_dir, STEPS).name]:
            raise DemoFailed(f"{run_dir}: left behind is {', '.join(left)}")
        shutil.rmtree(run_dir)

    def _compare_rollouts(self, a: Path, b: Path) -> None:
        """Every step's rollouts, of which only reinforcement learning has any: prompts, texts, rewards, advantages."""
        files = sorted(path.name for path in a.iterdir()) if a.is_dir() else []
        for name in files:
            if not (b / name).exists() or (a / name).read_bytes() != (b / name).read_bytes():
                raise DemoFailed(f"{b / name} is not {a / name}")

    def _start_and_kill(self, run_dir: Path, flags: list[str], seconds: float) -> bool:
        """Whether the run came to its end before its time was up."""
        run = self._start(run_dir, *flags)
        time.sleep(self.chance.uniform(0.0, seconds))
        if self.chance.random() < 0.5:  # saves are short: wait for one
            self._wait_for_save(run, run_dir)
            time.sleep(self.chance.uniform(0.0, SAVE_SECONDS))
        ranks = None if self.nproc == 1 or self.chance.random() < 0.5 else [self.chance.randrange(self.nproc)]
        doing = self._doing(run_dir)
        run.kill(ranks=ranks)
        codes = run.wait()
        if not any(codes):
            return True
        if -9 not in codes:
            raise DemoFailed(f"{run_dir} ended by itself with {codes}:\n{run.output()}")
        self.where[doing] += 1
        return False

    def _wait_for_save(self, run: warm.WarmRun, run_dir: Path) -> None:
        while self._doing(run_dir) == TRAINING and all(process.is_alive() for process in run.processes):
            time.sleep(0.0005)

    def _doing(self, run_dir: Path) -> str:
        checkpoints = run_dir / "checkpoints"
        names = os.listdir(checkpoints) if checkpoints.is_dir() else []
        if any(".tmp-" in name for name in names):
            return "while saving"
        if any(".removed-" in name for name in names):
            return "while removing"
        return TRAINING

    def _start(self, run_dir: Path, *flags: str) -> warm.WarmRun:
        logs = run_dir.with_suffix(".logs")
        logs.mkdir(exist_ok=True)
        argv = [self.kind, *CONFIGS[self.kind], "--output-dir", str(run_dir), "--resume.if-exists", *flags]
        return warm.start(argv, logs, nproc=self.nproc)

    def _finish(self, run_dir: Path, *flags: str) -> None:
        run = self._start(run_dir, *flags)
        codes = run.wait()
        if any(codes):
            raise DemoFailed(f"{run_dir} ended with {codes}:\n{run.output()}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--nproc", type=int, default=1, help="ranks of the run")
    parser.add_argument(
        "--rl", action="store_true", help="kill reinforcement learning instead of supervised fine-tuning"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="of the instants; they depend on the machine's speed too"
    )
    arguments = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    kind = "rl" if arguments.rl else "sft"
    print(f"soak: {arguments.kills} kills of {kind} runs, {arguments.nproc} ranks, seed {seed}", flush=True)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where an fsync costs nothing
    place = Path(tempfile.mkdtemp(prefix="soak-", dir=memory))
    soak = Soak(place, kind, arguments.nproc, random.Random(seed))
    try:
        soak.run(arguments.kills)
    except DemoFailed as failure:
        print(f"soak: FAILED in round {soak.rounds}, seed {seed}; everything is kept in {place}\n{failure}")
        return 1
    shutil.rmtree(place)
    where = ", ".join(f"{count} {name}" for name, count in soak.where.most_common())
    print(f"soak: {soak.where.total()} kills ({where}) in {soak.rounds} runs; every one ended identical")
    return 0


if __name__ == "__main__":
    sys.exit(main())
