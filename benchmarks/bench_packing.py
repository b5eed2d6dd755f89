"""Our plan of 50,000 documents against TRL's best-fit-decreasing over the same lengths."""

import json
import statistics
from pathlib import Path

import numpy as np

from benchmarks.harness import CACHE, Ratio, interleave, our_worker, participants
from benchmarks.options import Options
from benchmarks.peers.environment import python_of, version_of
from benchmarks.results import Result, Target

DOCUMENTS, MEAN_TOKENS, SIGMA, SEQ_LEN = 50_000, 400, 0.8, 2048
TRL_VARIANTS = ("plan and copy", "pack_dataset, all at once", "pack_dataset, default")


def log_normal_lengths(documents: int, seed: int = 0) -> np.ndarray:
    """Returns int64 [documents], tokens of each document: a chat data set's distribution, cut at SEQ_LEN."""
    mu = np.log(MEAN_TOKENS) - SIGMA**2 / 2
    drawn = np.random.default_rng(seed).lognormal(mu, SIGMA, documents)
    return np.clip(np.rint(drawn), 2, SEQ_LEN).astype(np.int64)


def run(options: Options) -> Result:
    """Times plans side by side, on one thread."""
    documents = 500 if options.smoke else DOCUMENTS
    path = CACHE / "lengths.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, log_normal_lengths(documents))
    workers = {"ours": our_worker("benchmarks.our_packing", {"lengths": str(path), "seq_len": SEQ_LEN})}
    if options.peers:
        workers |= {f"TRL {variant}": _trl(variant, path) for variant in TRL_VARIANTS}
    result = Result(
        "packing",
        options.settings()
        | {"documents": documents, "mean_tokens": MEAN_TOKENS, "sigma": SIGMA, "seq_len": SEQ_LEN, "threads": 1}
        | ({"trl": version_of("trl", "trl")} if options.peers else {}),
    )
    with participants(workers, threads=1) as started:
        blocks = interleave(started, threads=1, rounds=options.rounds, block_seconds=options.block_seconds)
    seconds = {name: [block.seconds / block.steps for block in measured] for name, measured in blocks.items()}
    for name, measured in blocks.items():
        ratio = Ratio.of(seconds[name], seconds["ours"])
        result.cases.append(
            {
                "case": name,
                "seconds": round(statistics.median(seconds[name]), 5),
                "rows": measured[-1].notes["rows"],
                "fill": round(measured[-1].notes["fill"], 6),
                "ours is faster by": round(ratio.median, 2),
            }
        )
    result.targets += _targets(result.cases)
    return result


def _trl(variant: str, lengths: Path) -> list[str]:
    arguments = {"lengths": str(lengths), "seq_len": SEQ_LEN, "variant": variant}
    return [str(python_of("trl")), "-m", "benchmarks.peers.trl.pack", json.dumps(arguments)]


def _targets(cases: list[dict]) -> list[Target]:
    ours = cases[0]
    targets = [
        Target("seconds for the plan", ours["seconds"], 0.2, at_least=False),
        Target("useful fraction of the rows' tokens", ours["fill"], 0.999),
    ]
    for case in cases[1:]:
        reported = case["case"].endswith("default")  # packs less well, so it is no reference for the time
        bound = None if reported else 10.0
        targets.append(Target(f"seconds of {case['case']} / ours", case["ours is faster by"], bound))
    return targets
