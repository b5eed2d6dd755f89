"""docs/performance.md, written from benchmarks/results/*.json and from nothing else."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cycles import CAP
from benchmarks.results import RESULTS, ROOT

PAGE = ROOT / "docs" / "performance.md"

INTRO = """\
# Performance

This page is written by the benchmarks from `benchmarks/results/*.json`; do not edit it. `make bench` measures again and
rewrites it, `python -m benchmarks step --threads 1` a part of it (see `python -m benchmarks --help`).

Ours and each reference run side by side in one go. Every participant is a process of its own, built and warmed up before
anything is timed; then they take turns in blocks of about a second, forwards and backwards (A B C, C B A, …), while the
others wait. Where a section says nothing else, a ratio is the median over the rounds of ours divided by theirs in that
round; the quartiles stand beside it.
All numbers here are from CPUs: they show what the trainer adds around the model, not how fast a GPU is.
"""


def render(results: Path = RESULTS) -> str:
    """Returns the page for the results that are there."""
    parts = [INTRO]
    for name, section in SECTIONS.items():
        path = results / f"{name}.json"
        if path.exists():
            parts.append(section(json.loads(path.read_text())))
        parts += [_elsewhere(further, section) for further in sorted(results.glob(f"{name}@*.json"))]
    return "\n".join(parts)


def _elsewhere(path: Path, section: Callable[[dict[str, Any]], str]) -> str:
    """Returns the tables of a section, of what `--machine` measured, without what introduces them."""
    text = section(json.loads(path.read_text()))
    tables = text[text.index("\n\n| ") + 1 :]
    return f"### The same on another machine: {path.stem.partition('@')[2]}\n{tables}"


def write() -> Path:
    """Writes the page and returns where."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render())
    return PAGE


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table; all columns but the first are right-aligned."""
    lines = ["| " + " | ".join(head) + " |", "| --- " + "| ---: " * (len(head) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def provenance(result: dict[str, Any]) -> str:
    """Returns the line under a table: command, date, revision, machine, load."""
    machine, load = result["machine"], result["load_average"]
    nice = f" (niceness {result['niceness']})" if result["niceness"] else ""
    return (
        f"`{result['command']}`, {result['date']}, revision {result['git_revision']}; {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB, Python {machine['python']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}; load average {load['before']} before, {load['after']} after{nice}.\n"
    )


def bounds(result: dict[str, Any]) -> str:
    """Returns one sentence: which bounds hold."""
    bound = [target for target in result["targets"] if target["met"] is not None]
    missed = [target for target in bound if not target["met"]]
    if not missed:
        return f"All {len(bound)} bounds hold.\n"
    lines = [
        f"- {target['what']}: {target['value']:.3g}, bound {'≥' if target['at_least'] else '≤'} {target['bound']:g}"
        for target in missed
    ]
    return f"{len(bound) - len(missed)} of {len(bound)} bounds hold. Missed:\n\n" + "\n".join(lines) + "\n"


def _ratio(entry: dict[str, float] | None) -> str:
    if entry is None:
        return "–"
    return f"**{entry['ratio']:.2f}** ({entry['ratio_low_quartile']:.2f}–{entry['ratio_high_quartile']:.2f})"


def _sure(entry: dict[str, float]) -> str:
    return f"**{entry['ratio']:.3f}** ± {entry['standard_error']:.3f}"


def _rate(entry: dict[str, float]) -> str:
    return f"{entry['tokens_per_second']:,.0f}"


def _step(result: dict[str, Any]) -> str:
    rows = [
        [
            f"`{case['case']}`",
            str(case["threads"]),
            _rate(case["ours"]),
            _sure(case["ours / bare chunked"]),
            f"{case['ours / bare chunked']['cpu_ratio']:.3f}",
            f"{case['ours / bare chunked']['whole_ratio']:.3f}",
            _sure(case["ours / bare full logits"]),
            _sure(case["bare chunked / bare full logits"]),
        ]
        for case in result["cases"]
    ]
    head = (
        "model",
        "threads",
        "ours, tokens/s",
        "ours / bare",
        "by CPU time",
        "uncapped",
        "ours / full logits",
        "bare / full logits",
    )
    return (
        "## Training step\n\n"
        "Our run as `trainer sft` starts it, whole loop (batches, loss, clipping, optimizer, schedule, metrics row), against a\n"
        "hand-written loop with the same model, chunked loss and fused AdamW, whose batches lie ready in memory and which\n"
        "logs nothing (*bare*), and against that loop with full logits and `F.cross_entropy`. Bounds: 0.97 and 1.1.\n"
        f"The three take steps in turn in one process ({result['settings']['processes']} such for each case), so whatever the "
        "machine does at the time\nmeets all of them, on the same documents, each in an order of its own. They go on until the "
        f"standard error of ours / bare\nis {result['settings']['precision']}, or for minutes. A ratio is that of the mean "
        f"times of a step, in which no step is more than {CAP} of the median at its\nplace among those that our loader prepares "
        "at once: pauses of the machine are cut off, and what ours does every so many\nsteps is not. Its standard error stands "
        "beside it, and *uncapped* is the ratio of all the time that passed.\n"
        "Names give hidden size, layers, vocabulary and row length. The ratio by CPU time is a check: with one thread it does\n"
        "not see what else the machine was doing.\n\n" + table(head, rows) + f"\n{bounds(result)}\n{provenance(result)}"
    )


def _peers(result: dict[str, Any]) -> str:
    columns = {
        "TRL packed": "ours packed / TRL packed",
        "TRL packed, row by row": "ours packed / TRL packed, row by row",
        "HF Trainer packed": "ours packed / HF Trainer packed",
        "HF, borders ignored": "ours packed / HF Trainer packed, borders ignored",
        "TRL padded": "ours padded / TRL padded",
        "HF Trainer padded": "ours padded / HF Trainer padded",
    }
    rows = [
        [
            f"`{case['case']}`",
            str(case["threads"]),
            _rate(case["ours packed"]),
            *(_ratio(case.get(key)) for key in columns.values()),
        ]
        for case in result["cases"]
    ]
    versions = ", ".join(f"{key.split()[0]} {value}" for key, value in result["settings"].items() if " in " in key)
    return (
        "## Other trainers\n\n"
        "Useful (non-padding) tokens per second, ours divided by theirs, on the same documents and the same random Llama.\n"
        "Each peer runs in its own environment (`benchmarks/peers/*/requirements.txt`) with fused AdamW, clipping, the same\n"
        "precision and batch, without activation checkpointing, saving or reports, and logs every tenth step where ours\n"
        "writes every step. TRL packs by itself (best fit, joining the rows of a micro-step, or one row at a time); the HF\n"
        "Trainer gets our packed rows with position ids, and once without, where documents wrongly see each other.\n"
        "Bounds: 1.8 against the faster of TRL's packed variants, 1.1 against the HF Trainer packed. "
        f"Versions: {versions}.\n\n"
        + table(("model", "threads", "ours packed, tokens/s", *columns), rows)
        + f"\n{bounds(result)}\n{provenance(result)}"
    )


def _packing(result: dict[str, Any]) -> str:
    settings = result["settings"]
    rows = [
        [
            case["case"],
            f"{case['seconds']:.3f}",
            f"{case['rows']:,}",
            f"{100 * case['fill']:.2f} %",
            f"{case['ours is faster by']:.1f}",
        ]
        for case in result["cases"]
    ]
    return (
        "## Packing\n\n"
        f"{settings['documents']:,} documents, log-normal with a mean of {settings['mean_tokens']} tokens, cut at "
        f"{settings['seq_len']}, one thread. Ours is the whole plan\nof an epoch (shuffle, best-fit-decreasing, order of "
        "rows); tokens are read when a batch needs them. TRL's copies the tokens\nas well; its `pack_dataset` packs within "
        "groups of 1,000 documents unless told otherwise.\n\n"
        + table(("", "seconds", "rows", "useful tokens", "time / ours"), rows)
        + f"\n{bounds(result)}\n{provenance(result)}"
    )


def _startup(result: dict[str, Any]) -> str:
    rows = [
        [f"`{case['case']}`", f"{case['seconds']:.3f}", f"{case['seconds beyond a bare interpreter']:.3f}"]
        for case in result["cases"]
    ]
    return (
        "## Start-up\n\n"
        "Wall time of commands that only answer, bytecode compiled; the last column is the median beyond `python -c pass` of\n"
        "the same environment. Bounds: 0.25 s for `trainer --help`, 0.5 s for `trainer config`.\n\n"
        + table(("command", "seconds", "beyond a bare interpreter"), rows)
        + f"\n{bounds(result)}\n{provenance(result)}"
    )


def _loss(result: dict[str, Any]) -> str:
    rows = [
        [
            case["case"],
            case["dtype"],
            str(case["threads"]),
            f"{case['seconds']:.3f}",
            f"{case['extra_bytes'] / 2**20:,.0f}",
            _ratio(case.get("time / full")),
            f"{case['memory / full']:.2f}",
        ]
        for case in result["cases"]
    ]
    settings = result["settings"]
    return (
        "## Loss\n\n"
        f"Forward and backward of the output head with its token cross-entropy: {settings['tokens']:,} tokens, hidden size "
        f"{settings['hidden_size']}, vocabulary\n{settings['vocab_size']:,}. Extra memory is the peak beyond inputs, in a "
        "process of its own. Bounds in float32: 0.4 of the full logits'\nmemory, 0.9 of their time.\n\n"
        + table(("", "dtype", "threads", "seconds", "extra MiB", "time / full", "memory / full"), rows)
        + f"\n{bounds(result)}\n{provenance(result)}"
    )


def _attention(result: dict[str, Any]) -> str:
    rows = [
        [case["case"], str(case["tokens"]), str(case["threads"]), _ratio(case["16 bits / float32"]), case["ours"]]
        for case in result["cases"]
    ]
    return (
        "## Attention in 16 bits on CPU\n\n"
        "Causal attention over one document, forward and backward, inputs and result in bfloat16: the time of torch's call as\n"
        "it is, divided by that of the call in float32 with the conversions; both in one process, a call of each in turn. Ours\n"
        "uses float32 where that is faster (bound 1).\n"
        "\n"
        + table(("heads", "tokens", "threads", "16 bits / float32", "ours runs in"), rows)
        + f"\n{bounds(result)}\n{provenance(result)}"
    )


def _products(result: dict[str, Any]) -> str:
    rows = [
        [case["case"], str(case["threads"]), _ratio(case["oneDNN / MKL"]), case["ours"]] for case in result["cases"]
    ]
    return (
        "## Products in float32 on CPU\n\n"
        "A linear layer, forward and backward: the time with oneDNN divided by that with MKL, which torch uses; both in one\n"
        "process, a call of each in turn, in three processes. Ours uses oneDNN on AMD's processors with AVX-512, for large\n"
        "products (bound 1).\n"
        "\n"
        + table(("rows x inputs by outputs", "threads", "oneDNN / MKL", "ours uses"), rows)
        + f"\n{bounds(result)}\n{provenance(result)}"
    )


def _checkpoint(result: dict[str, Any]) -> str:
    settings = result["settings"]
    rows = [
        [
            case["case"],
            case["kind"],
            f"{case['seconds']:.3f}",
            f"{case['gb_per_second']:.2f}" if "gb_per_second" in case else "",
        ]
        for case in result["cases"]
    ]
    figures = [
        [
            target["what"],
            f"{target['value']:.3g}",
            "" if target["bound"] is None else f"{'≥' if target['at_least'] else '≤'} {target['bound']:g}",
        ]
        for target in result["targets"]
    ]
    return (
        "## Checkpoints\n\n"
        f"A state of {settings['state_bytes'] / 1e9:.2f} GB in {settings['tensors']} tensors (Llama with AdamW). Every save "
        "ends with fsync, every load begins with a\ncold page cache. Ours writes all that a run's checkpoint has: checksums, "
        "tables, manifest, commit, retention. *Background* is\n`ckpt.async`: how long training stands still, and when the "
        "checkpoint is durable while steps go on. Medians; the ratios are\nthose of each round.\n\n"
        + table(("", "", "seconds", "GB/s"), rows)
        + "\n"
        + table(("figure", "median", "bound"), figures)
        + f"\n{bounds(result)}\n{provenance(result)}"
    )


def _rollout(result: dict[str, Any]) -> str:
    rows = [
        [
            f"`{case['case']}`",
            str(case["samples"]),
            str(case["threads"]),
            _rate(case["ours"]),
            _rate(case["transformers"]),
            _ratio(case["ours / transformers"]),
        ]
        for case in result["cases"]
    ]
    settings = result["settings"]
    head = (
        "model",
        "completions per prompt",
        "threads",
        "ours, tokens/s",
        "transformers, tokens/s",
        "ours / transformers",
    )
    return (
        "## Rollouts\n\n"
        f"{settings['prompts']} completions of {settings['new_tokens']} tokens at once, prompts of 8 to 39 tokens, vocabulary "
        f"{settings['vocab_size']:,}, {settings['dtype']}, sampled at temperature 1.\nOurs is `rl.rollout.LocalEngine`, which "
        "takes over the weights before every round and returns log-probabilities; theirs is\n`generate` with its default "
        "cache on a padded batch, without log-probabilities. Bound: 2 on different prompts.\n\n"
        + table(head, rows)
        + f"\n{bounds(result)}\n{provenance(result)}"
    )


def _muon(result: dict[str, Any]) -> str:
    rows = [
        [
            case["case"],
            str(case["threads"]),
            f"{case['seconds']:.3f}",
            _ratio(case["our time / its"]),
        ]
        for case in result["cases"]
    ]
    settings = result["settings"]
    shares = [
        f"{target['value']:.2f} ({target['what'].rpartition(', ')[2]})"
        for target in result["targets"]
        if "products alone" in target["what"]
    ]
    dion = "" if settings["dion"] == "measured" else " dion could not be imported and was left out."
    return (
        "## Muon\n\n"
        f"One step over {settings['matrices']} matrices of a decoder with {settings['parameters'] / 1e6:.1f} M parameters: "
        "ours, `torch.optim.Muon` and microsoft/dion's\nMuon, run eagerly, in bfloat16 with five iterations each; *products* "
        "multiplies square matrices and nothing else. Bounds with\nall threads: 0.62 of torch's time, 0.8 of dion's."
        f"{dion}\nOurs multiplies at this share of the rate of the products alone: {', '.join(shares)}.\n\n"
        + table(("", "threads", "seconds", "our time / its"), rows)
        + f"\n{bounds(result)}\n{provenance(result)}"
    )


def _grpo(result: dict[str, Any]) -> str:
    settings = result["settings"]
    steps = [case for case in result["cases"] if "saves" not in case]
    peers = [name for name in (steps[0] if steps else {}) if name.startswith("TRL")]
    rows = [
        [f"`{case['case']}`", str(case["threads"]), _seconds(case["ours"])]
        + [_seconds(case[name]) for name in peers]
        + [_ratio(case[f"ours / {name}"]) for name in peers]
        for case in steps
    ]
    head = ("model", "threads", "ours, seconds", *(f"{name}, seconds" for name in peers))
    saves = [
        [
            f"`{case['case']}`",
            name,
            f"{found['groups']:.0f}",
            f"{found['save_bytes'] / 2**20:.2f}",
            f"{found['save_seconds']:.4f}",
        ]
        for case in result["cases"]
        if "saves" in case
        for name, found in case["saves"].items()
    ]
    return (
        "## A GRPO step\n\n"
        f"{settings['prompts']} prompts x {settings['samples']} completions of at most {settings['max_new_tokens']} tokens, "
        f"vocabulary {settings['vocab_size']}, {settings['dtype']}; generation, scoring, one optimizer\nstep. Ours is the whole "
        "loop of `trainer rl` with its scoring process and its files; TRL's is `GRPOTrainer` with\ntransformers' `generate`, "
        "without a reference model, with two sizes of its micro-steps. Bound against the faster one: 1.5.\n\n"
        + table((*head, *(f"speed, ours / {name}" for name in peers)), rows)
        + "\nA checkpoint between two steps: the batch at hand is in every one, with `rl.max_lag = 1` "
        "those that wait too.\n\n"
        + table(("model", "rollouts in it", "groups", "MiB", "seconds"), saves)
        + f"\n{bounds(result)}\n{provenance(result)}"
    )


def _publication(result: dict[str, Any]) -> str:
    rows = [
        [
            f"`{case['case']}`",
            f"{case['weights_bytes'] / 2**20:.1f}",
            f"{case['seconds_to_write']:.3f}",
            f"{case['seconds_of_a_plain_write']:.3f}",
            f"{case['seconds_until_served']:.3f}" if "seconds_until_served" in case else "–",
        ]
        for case in result["cases"]
    ]
    vllm = result["settings"]["vllm"]
    server = f"vLLM {vllm} on the same CPU" if vllm else "none was there (`make vllm`)"
    return (
        "## New weights for a vLLM server\n\n"
        "Writing the weights as safetensors, a plain write with fsync of as many bytes, and the whole of it, until the server "
        f"answers\nwith them. The server: {server}.\n\n"
        + table(("model", "MiB", "written, seconds", "plain write, seconds", "served, seconds"), rows)
        + f"\n{provenance(result)}"
    )


def _offload(result: dict[str, Any]) -> str:
    rows = [
        [
            case["case"],
            str(case["threads"]),
            f"{case['ours']:.2f}",
            f"{case['reference']:.2f}",
            _ratio(case),
        ]
        for case in result["cases"]
    ]
    settings = result["settings"]
    return (
        "## Offload\n\n"
        f"An AdamW step under an offload mode on the CPU, where nothing has to be moved, in nanoseconds per parameter: a "
        f"decoder's\nparameters at hidden size {settings['hidden_size']}, {settings['layers']} layers, vocabulary "
        f"{settings['vocab_size']:,}. *torch* is its fused AdamW. Clipped steps hold the norm and the scaling too.\n"
        "`full bf16` takes bfloat16 gradients and writes bfloat16 weights beside the float32 ones; its reference moves the "
        "same\nbytes and computes nothing. Bounds: 1.05, 1.10, 0.80 and 1.15, in the order of the table.\n\n"
        + table(("", "threads", "ours", "reference", "time / reference"), rows)
        + f"\n{bounds(result)}\n{provenance(result)}"
    )


def _seconds(entry: dict[str, float]) -> str:
    return f"{entry['step_seconds']:.3f}"


SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "step": _step,
    "peers": _peers,
    "packing": _packing,
    "loss": _loss,
    "attention": _attention,
    "products": _products,
    "rollout": _rollout,
    "muon": _muon,
    "offload": _offload,
    "grpo": _grpo,
    "publication": _publication,
    "startup": _startup,
    "checkpoint": _checkpoint,
}


if __name__ == "__main__":
    print(write().relative_to(ROOT))
