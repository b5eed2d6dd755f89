"""Our run against TRL's SFTTrainer and transformers' Trainer: the same documents and model, each in its environment."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.cases import Case, cases
from benchmarks.harness import CACHE, ROOT, compare, interleave, our_worker, participants, summarize
from benchmarks.options import Options
from benchmarks.peers.environment import python_of, version_of
from benchmarks.results import Result, Target

TRL_BOUND, HF_BOUND = 1.8, 1.1
TOKENIZER = ROOT / "configs" / "debug" / "assets" / "tiny-llama" / "tokenizer.json"
"""TRL wants one, for its pad token; the documents are token ids already."""

# Participant -> (peer, variant of its worker, rows of a micro-step or None for as many as ours has). TRL joins the rows
# of a micro-step into one sequence; row by row its attention costs less, at more micro-steps, so both are measured.
Variant = tuple[str, str, int | None]
PACKED: dict[str, Variant] = {
    "TRL packed": ("trl", "packed", None),
    "TRL packed, row by row": ("trl", "packed", 1),
    "HF Trainer packed": ("hf_trainer", "packed", None),
    "HF Trainer packed, borders ignored": ("hf_trainer", "stream", None),
}
PADDED: dict[str, Variant] = {
    "TRL padded": ("trl", "padded", None),
    "HF Trainer padded": ("hf_trainer", "padded", None),
}
PAIRS = dict.fromkeys(PACKED, "ours packed") | dict.fromkeys(PADDED, "ours padded")


def run(options: Options) -> Result:
    """Measures useful tokens per second of all variants."""
    peers = ("trl", "hf_trainer") if options.peers else ()
    packages = [(peer, {"trl": "trl", "hf_trainer": "transformers"}[peer]) for peer in peers]
    result = Result(
        "peers",
        options.settings()
        | {"unit": "useful tokens per second"}
        | {f"{package} in {peer}": version_of(peer, package) for peer, package in packages},
    )
    for case in cases(smoke=options.smoke):
        padded = replace(case, pack=False)
        workers = {
            "ours packed": our_worker("benchmarks.our_loop", case.arguments()),
            "ours padded": our_worker("benchmarks.our_loop", padded.arguments()),
        }
        for variants, used in ((PACKED, case), (PADDED, padded)):
            workers |= {name: _peer(used, *variant) for name, variant in variants.items() if variant[0] in peers}
        with participants(workers, threads=max(options.threads)) as started:
            for threads in options.threads:
                blocks = interleave(
                    started, threads=threads, rounds=options.rounds, block_seconds=options.block_seconds
                )
                ratios = {name: compare(blocks[ours], blocks[name]) for name, ours in PAIRS.items() if name in blocks}
                result.cases.append(
                    {"case": case.label, "threads": threads}
                    | {name: summarize(measured) for name, measured in blocks.items()}
                    | {f"{PAIRS[name]} / {name}": ratio for name, ratio in ratios.items()}
                )
                result.targets += _targets(ratios, f"{case.label}, {threads} thread{'s' if threads > 1 else ''}")
    return result


def _peer(case: Case, peer: str, variant: str, micro_rows: int | None) -> list[str]:
    data = case.run_config(Path("unused"))["data"]
    arguments = {
        "case": case.arguments(),
        "variant": variant,
        "rows": data["batch_size"],
        "micro_rows": micro_rows or data["micro_batch_size"],
        "model_dir": str(case.model_dir()),
        "documents": str(_documents(replace(case, pack=True))),
        "tokenizer": str(TOKENIZER),
    }
    return [str(python_of(peer)), "-m", f"benchmarks.peers.{peer}.train", json.dumps(arguments)]


@cache
def _documents(case: Case) -> Path:
    """Writes our run's documents, and the row that our plan puts each of them into, and returns the file."""
    from trainer.config.run import SFTConfig
    from trainer.core.distributed import World
    from trainer.core.log import setup_logging
    from trainer.data.build import build_data
    from trainer.data.packing import pack_rows

    setup_logging("error", rank=0)
    config = SFTConfig.model_validate(case.run_config(Path("unused")))
    world = World(rank=0, local_rank=0, size=1, local_size=1)
    corpus = build_data(config.data, tokenizer=None, seed=config.seed, world=world).train
    ids, _ = corpus.gather(np.arange(len(corpus)))
    row_of, _ = pack_rows(corpus.lengths, corpus.seq_len)
    path = CACHE / "documents" / f"{case.label}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, ids=ids, lengths=corpus.lengths, row_of=row_of)
    return path


def _targets(ratios: dict[str, dict[str, float]], where: str) -> list[Target]:
    """The bound holds against a peer's faster packed variant; the others are reported."""
    targets = []
    trl = [name for name in ratios if name.startswith("TRL packed")]
    if trl:
        best = min(trl, key=lambda name: ratios[name]["ratio"])
        targets.append(Target(f"ours packed / {best}, {where}", ratios[best]["ratio"], TRL_BOUND))
    if "HF Trainer packed" in ratios:
        value = ratios["HF Trainer packed"]["ratio"]
        targets.append(Target(f"ours packed / HF Trainer packed, {where}", value, HF_BOUND))
    for name in ("HF Trainer packed, borders ignored", *PADDED):
        if name in ratios:
            targets.append(Target(f"{PAIRS[name]} / {name}, {where}", ratios[name]["ratio"]))
    return targets
