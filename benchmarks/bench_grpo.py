"""One GRPO step of ours against TRL's GRPOTrainer, and what a checkpoint with waiting rollouts costs."""

import json
import statistics
from typing import Any

from benchmarks.cases import Case
from benchmarks.harness import CACHE, ROOT, compare, interleave, our_worker, participants, summarize
from benchmarks.options import Options
from benchmarks.peers.environment import python_of, version_of
from benchmarks.results import Result, Target

BOUND = 1.5
PROMPTS, SAMPLES, NEW_TOKENS = 8, 8, 64
VOCAB_SIZE = 384
"""The tokenizer's own, so that every drawn token is text."""
SIZES = ((256, 6), (128, 4))
TOKENIZER = ROOT / "configs" / "debug" / "assets" / "tiny-llama"
ENVIRONMENT = f"{ROOT / 'configs' / 'debug' / 'vowels.py'}:Vowels"
TRL_MICRO_ROWS = (64, 16)
"""Completions of a micro-step; both are measured, and the bound holds against the faster one."""


def run(options: Options) -> Result:
    """Compares steps per second, then measures saves between steps."""
    sizes = ((32, 1),) if options.smoke else SIZES
    shape = {
        "prompts": 2 if options.smoke else PROMPTS,
        "samples": 2 if options.smoke else SAMPLES,
        "max_new_tokens": 4 if options.smoke else NEW_TOKENS,
    }
    versions = {"trl": version_of("trl", "trl")} if options.peers else {}
    result = Result("grpo", options.settings() | shape | {"vocab_size": VOCAB_SIZE, "dtype": "float32"} | versions)
    for hidden_size, layers in sizes:
        case = Case(hidden_size, layers, VOCAB_SIZE, seq_len=256, rows=1, micro_rows=8, documents=1)
        _steps(result, options, case, shape)
        _checkpoints(result, options, case, shape)
    return result


def _steps(result: Result, options: Options, case: Case, shape: dict[str, int]) -> None:
    workers = {"ours": _ours(case, shape)}
    if options.peers:
        completions = shape["prompts"] * shape["samples"]
        for rows in dict.fromkeys(min(rows, completions) for rows in TRL_MICRO_ROWS):
            workers[f"TRL, {rows} at once"] = _trl(case, shape, rows)
    with participants(workers, threads=max(options.threads)) as started:
        for threads in options.threads:
            blocks = interleave(started, threads=threads, rounds=options.rounds, block_seconds=options.block_seconds)
            ratios = {name: compare(blocks["ours"], blocks[name]) for name in workers if name != "ours"}
            what = f"d{case.hidden_size}-l{case.layers}"
            result.cases.append(
                {"case": what, "threads": threads}
                | {name: summarize(measured) for name, measured in blocks.items()}
                | {f"ours / {name}": ratio for name, ratio in ratios.items()}
            )
            where = f"{what}, {threads} thread{'s' if threads > 1 else ''}"
            if ratios:
                best = min(ratios, key=lambda name: ratios[name]["ratio"])
                result.targets.append(Target(f"ours / {best}, {where}", ratios[best]["ratio"], BOUND))


def _checkpoints(result: Result, options: Options, case: Case, shape: dict[str, int]) -> None:
    """Saves between steps: one batch is at hand in every RL run; with rl.max_lag = 1 another one waits."""
    workers = {
        "batch at hand": _ours(case, shape, saves=True),
        "and a full queue": _ours(case, shape, saves=True, max_lag=1),
    }
    with participants(workers, threads=max(options.threads)) as started:
        threads = options.threads[0]
        blocks = interleave(started, threads=threads, rounds=max(3, options.rounds), block_seconds=0)
    found = {
        name: {key: statistics.median(block.notes[key] for block in measured) for key in measured[0].notes}
        for name, measured in blocks.items()
    }
    what = f"d{case.hidden_size}-l{case.layers}"
    result.cases.append({"case": what, "threads": threads, "saves": found})
    for key, unit in (("save_seconds", "seconds"), ("save_bytes", "bytes")):
        ratio = found["and a full queue"][key] / found["batch at hand"][key]
        result.targets.append(Target(f"{unit} of a save, full queue / batch at hand, {what}", ratio))


def _arguments(case: Case, shape: dict[str, int]) -> dict[str, Any]:
    return {"case": case.arguments(), **shape}


def _ours(case: Case, shape: dict[str, int], *, saves: bool = False, max_lag: int = 0) -> list[str]:
    arguments = {"tokenizer": str(TOKENIZER), "environment": ENVIRONMENT, "saves": saves, "max_lag": max_lag}
    return our_worker("benchmarks.grpo_loop", _arguments(case, shape) | arguments)


def _trl(case: Case, shape: dict[str, int], micro_rows: int) -> list[str]:
    arguments = {
        "micro_rows": micro_rows,
        "model_dir": str(case.model_dir()),
        "prompt_file": str(_prompts()),
        "tokenizer_file": str(TOKENIZER / "tokenizer.json"),
    }
    arguments = json.dumps(_arguments(case, shape) | arguments)
    return [str(python_of("trl")), "-m", "benchmarks.peers.trl.grpo", arguments]


def _prompts():
    """Writes the environment's prompts as the text that our model reads, and returns the file."""
    from trainer.config.model import ModelConfig
    from trainer.config.rl import EnvConfig
    from trainer.models.tokenizer import load_tokenizer
    from trainer.rl.envs import load_environments
    from trainer.rl.prompts import PromptSequence
    from trainer.rl.rendering import Renderer

    tokenizer = load_tokenizer(ModelConfig(name=str(TOKENIZER)))
    prompts = PromptSequence(load_environments((EnvConfig(name=ENVIRONMENT),), 0), 0)
    renderer = Renderer(tokenizer)
    texts = [tokenizer.decode(renderer.prompt_ids(prompts.prompt(number).messages)) for number in range(512)]
    path = CACHE / "documents" / "grpo-prompts.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(texts))
    return path
