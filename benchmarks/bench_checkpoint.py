"""Saving and loading against the disk itself, plain DCP, torch.save and safetensors; saves beside the training; finding
checkpoints; how much later the first step of a resumed run comes."""

# pyright: reportPrivateImportUsage=false
# torch documents these names without listing them in __all__.

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import CACHE, ROOT, Ratio, worker_environment
from benchmarks.options import Options
from benchmarks.results import Result, Target

SIZES = {"hidden_size": 768, "layers": 12, "vocab_size": 32000}
"""1.31 GB in 440 tensors."""
SMALL = {"hidden_size": 128, "layers": 2, "vocab_size": 2000}
DIRECTORIES = 1000


def run(options: Options) -> Result:
    import torch

    from benchmarks.checkpoint_io import bench, make_state
    from trainer.core.log import setup_logging

    setup_logging("warning", rank=0)
    torch.set_num_threads(max(options.threads))
    rounds = 1 if options.smoke else max(3, options.rounds)
    with bench(make_state(**(SMALL if options.smoke else SIZES)), CACHE) as place:
        settings = {"state_bytes": place.size_bytes, "tensors": len(place.state), "rounds": rounds}
        result = Result("checkpoint", settings | {"threads": max(options.threads)})
        seconds = _saves(result, place, rounds)
        _loads(result, place, rounds)
        _background(result, place, rounds, seconds)
    _discovery(result, 20 if options.smoke else DIRECTORIES)
    _resume(result, smoke=options.smoke, rounds=1 if options.smoke else 3)
    return result


def in_turn(
    ways: dict[str, Callable[[], float]], rounds: int, between: Callable[[str], None] = lambda name: None
) -> dict[str, list[float]]:
    """Returns the seconds of each way in each round: A B C, C B A, ..., after a first round that does not count.

    between: called after each, outside of what is timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in ways if number % 2 == 0 else reversed(ways):
            took = ways[name]()
            if number:
                seconds[name].append(took)
            between(name)
    return seconds


def _cases(result: Result, kind: str, seconds: dict[str, list[float]], size_bytes: int) -> None:
    for name, values in seconds.items():
        middle = statistics.median(values)
        case = {
            "case": name,
            "kind": kind,
            "seconds": round(middle, 4),
            "gb_per_second": round(size_bytes / middle / 1e9, 3),
        }
        result.cases.append(case | {"fastest_seconds": round(min(values), 4)})


def _ratio(result: Result, what: str, ours: Sequence[float], theirs: Sequence[float], bound: float | None, **more: Any):
    """ours / theirs, round by round; the median is the figure."""
    result.targets.append(Target(what, round(Ratio.of(ours, theirs).median, 4), bound, **more))


def _fastest(*ways: Sequence[float]) -> list[float]:
    return [min(values) for values in zip(*ways, strict=True)]


def _saves(result: Result, place: Any, rounds: int) -> list[float]:
    from benchmarks.checkpoint_io import remove, timed

    ways = {
        "raw write, buffered": place.raw_buffered,
        "raw write, direct": place.raw_direct,
        "ours": place.ours,
        "ours without checksums and tables": place.ours_bare,
        "plain DCP": place.plain_dcp,
        "torch.save": place.torch_save,
        "safetensors": place.safetensors_save,
    }
    timings = {name: (lambda way=way: timed(way)) for name, way in ways.items()}
    seconds = in_turn(timings, rounds, lambda name: remove(place.folder / "out"))
    _cases(result, "save", seconds, place.size_bytes)
    ours = seconds["ours"]
    raw = _fastest(seconds["raw write, buffered"], seconds["raw write, direct"])
    _ratio(result, "save: throughput / the faster raw write with fsync", raw, ours, 0.8)
    for other in ("plain DCP", "torch.save", "safetensors"):
        _ratio(result, f"save: throughput / {other}", seconds[other], ours, 1.0)
    bare = seconds["ours without checksums and tables"]
    _ratio(result, "save: time / the same without checksums and manifest", ours, bare, 1.1, at_least=False)
    return ours


def _loads(result: Result, place: Any, rounds: int) -> None:
    from benchmarks.checkpoint_io import drop_cache, timed

    files = {}
    writers = {"raw": place.raw_direct, "ours": place.ours, "dcp": place.plain_dcp}
    writers |= {"torch": place.torch_save, "safetensors": place.safetensors_save}
    for name, write in writers.items():
        write()
        files[name] = (place.folder / "out").rename(place.folder / name)
    ways = {
        "raw read": ("raw", place.raw_read),
        "ours, checksums compared": ("ours", lambda path: place.load_ours(path, "checksum")),
        "ours, sizes compared": ("ours", lambda path: place.load_ours(path, "size")),
        "plain DCP": ("dcp", place.load_dcp),
        "torch.load + copy": ("torch", place.load_torch),
        "safetensors + copy": ("safetensors", place.load_safetensors),
    }

    def cold(file: str, read: Callable[[Path], None]) -> Callable[[], float]:
        def measure() -> float:
            drop_cache(files[file])
            return timed(lambda: read(files[file]))

        return measure

    seconds = in_turn({name: cold(file, read) for name, (file, read) in ways.items()}, rounds)
    _cases(result, "load, cold", seconds, place.size_bytes)
    ours = seconds["ours, checksums compared"]
    _ratio(result, "load: throughput / raw read, cold", seconds["raw read"], ours, 0.8)
    for other in ("plain DCP", "torch.load + copy", "safetensors + copy"):
        _ratio(result, f"load: throughput / {other}, cold", seconds[other], ours, 1.0)
    for path in files.values():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _background(result: Result, place: Any, rounds: int, sync_seconds: Sequence[float]) -> None:
    """Each round: a memcpy, a save in the foreground, a save in the background while steps go on, steps alone."""
    from benchmarks.checkpoint_io import remove, timed

    manager, progress = place.manager(place.folder / "background", **{"async": True})
    foreground, counter = place.manager(place.folder / "foreground")
    place.save(manager, progress)  # the first one touches the memory
    manager.wait()
    step = _a_step()
    found: dict[str, list[float]] = {
        name: [] for name in ("memcpy", "stands still", "durable", "sync", "step", "quiet")
    }
    for _ in range(rounds):
        found["memcpy"].append(min(timed(place.memcpy) for _ in range(3)))
        found["sync"].append(timed(lambda: place.save(foreground, counter)))
        found["quiet"].append(statistics.median(timed(step) for _ in range(10)))
        started = time.perf_counter()
        place.save(manager, progress)
        found["stands still"].append(time.perf_counter() - started)
        steps = []
        while manager._writer is not None and manager._writer.busy:
            steps.append(timed(step))
            manager.poll()
        found["durable"].append(time.perf_counter() - started)
        found["step"].append(statistics.median(steps))
    manager.close()
    remove(place.folder / "background")
    remove(place.folder / "foreground")
    for name in ("memcpy", "stands still", "durable", "sync"):
        _cases(result, "background", {f"background: {name}": found[name]}, place.size_bytes)
    _ratio(
        result,
        "async: training stands still / one warm memcpy",
        found["stands still"],
        found["memcpy"],
        1.2,
        at_least=False,
    )
    _ratio(
        result,
        "async: time to durable / the save in the foreground",
        found["durable"],
        found["sync"],
        1.3,
        at_least=False,
    )
    _ratio(result, "async: time of a step meanwhile / alone", found["step"], found["quiet"], None)
    _torch_async(result, place, rounds, found["memcpy"])


def _torch_async(result: Result, place: Any, rounds: int, memcpy: Sequence[float]) -> None:
    """torch's own save in the background; its cached staging memory wants a GPU. It wants a process group, too."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemWriter

    from benchmarks.checkpoint_io import remove

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    still, durable = [], []
    writer = FileSystemWriter(place.folder / "torch", cache_staged_state_dict=torch.cuda.is_available())
    try:
        for number in range(rounds + 1):
            started = time.perf_counter()
            future: Any = dcp.async_save(dict(place.state), storage_writer=writer)
            stopped = time.perf_counter()
            future.result()
            if number:
                still.append(stopped - started)
                durable.append(time.perf_counter() - started)
            remove(place.folder / "torch")
    finally:
        dist.destroy_process_group()
    _cases(
        result,
        "background",
        {"torch async_save: stands still": still, "torch async_save: durable": durable},
        place.size_bytes,
    )
    _ratio(result, "torch async_save: training stands still / one warm memcpy", still, memcpy, None)


def _a_step() -> Callable[[], None]:
    import torch

    a, b = torch.randn(512, 512), torch.randn(512, 512)

    def step() -> None:
        for _ in range(4):
            torch.mm(a, b)

    return step


def _discovery(result: Result, count: int) -> None:
    from dataclasses import replace

    import numpy as np
    import torch

    from benchmarks.checkpoint_io import Bench, timed
    from trainer.checkpoint.discovery import Status, discover
    from trainer.checkpoint.manifest import dump_manifest, read_manifest

    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        place = Bench({"w": torch.ones(10)}, Path(folder), np.empty(0, dtype=np.uint8))
        manager, progress = place.manager(Path(folder), keep_last=None)
        place.save(manager, progress)
        first = Path(folder) / "checkpoints/step_00000001"
        manifest = read_manifest(first)
        for step in range(2, count + 1):
            copy = shutil.copytree(first, first.with_name(f"step_{step:08d}"))
            (copy / "manifest.json").write_bytes(dump_manifest(replace(manifest, step=step)))
        seconds = [timed(lambda: discover(first.parent)) for _ in range(5)]
        found = discover(first.parent)
        assert len(found) == count and all(candidate.status is Status.COMMITTED for candidate in found)
    result.cases.append(
        {"case": f"discovery of {count}", "kind": "discovery", "seconds": round(statistics.median(seconds), 4)}
    )
    result.targets.append(
        Target(f"seconds to find {count} checkpoints", statistics.median(seconds), 0.5, at_least=False)
    )


def _resume(result: Result, *, smoke: bool, rounds: int) -> None:
    """From the start of the command to the row of its first step: fresh, and resumed from a checkpoint of the same model."""
    from dataclasses import replace

    import tomli_w

    from benchmarks.cases import SMALL as SMALL_CASE
    from benchmarks.cases import Case

    large = Case(hidden_size=768, layers=12, vocab_size=32000, seq_len=64, rows=1, micro_rows=1, documents=200)
    case = replace(SMALL_CASE, documents=200) if smoke else large
    fresh, resumed = [], []
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        for number in range(rounds + 1):
            run_dir, path = Path(folder) / "run", Path(folder) / "run.toml"
            config = case.run_config(run_dir)
            config["ckpt"] = {"at_end": True, "export_weights": False}
            path.write_text(tomli_w.dumps(config))
            took = _to_first_row(path, run_dir, ["--stop-step", "1"])
            more = ["--no-overwrite", "--resume", "--stop-step", "2", "--ckpt.no-at-end"]
            again = _to_first_row(path, run_dir, more)
            shutil.rmtree(run_dir)  # or rows of this round would be taken for those of the next
            if number or smoke:  # the first round makes the cache of the tokens
                fresh.append(took)
                resumed.append(again)
    for name, values in (("fresh start", fresh), ("resume", resumed)):
        result.cases.append(
            {"case": f"{name} to its first step", "kind": "resume", "seconds": round(statistics.median(values), 3)}
        )
    _ratio(result, "resume to the first step / fresh start to the first step", resumed, fresh, None)


def _to_first_row(config: Path, run_dir: Path, flags: Sequence[str]) -> float:
    rows = run_dir / "metrics.jsonl"
    before = len(rows.read_text().splitlines()) if "--resume" in flags else 0
    started = time.perf_counter()
    argv = [sys.executable, "-m", "trainer", "sft", "@", str(config), *flags]
    environment = worker_environment(1) | {"PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None and not _has_rows(rows, before + 1, started):
        time.sleep(0.005)
    seconds = time.perf_counter() - started
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    if process.wait():
        raise RuntimeError(f"{' '.join(argv)} ended with {process.returncode}:\n{errors[-2000:]}")
    return seconds


def _has_rows(path: Path, count: int, since: float) -> bool:
    try:
        lines = path.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return False
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return len(whole) >= count
