"""The harness's arithmetic and protocol, the page it writes, and that every benchmark runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.__main__ import NAMES, main
from benchmarks.cases import cases
from benchmarks.harness import Block, Participant, Ratio, compare, interleave, participants
from benchmarks.results import RESULTS, ROOT, Result, Target

WORKER = """
import sys
from benchmarks.gate import Gate, Stopped
print("noise on stdout is not an answer")
gate = Gate(lambda threads: print("threads", threads))
try:
    while True:
        gate.before_step()
        gate.count({tokens})
        print("more noise")
except Stopped:
    pass
"""


def worker(tokens: int) -> list[str]:
    return [sys.executable, "-c", WORKER.format(tokens=tokens)]


def block(seconds: float, tokens: int) -> Block:
    return Block(seconds=seconds, cpu_seconds=seconds / 2, steps=1, tokens=tokens)


def test_ratio_pairs_the_rounds():
    """Both halve their speed in the second round: paired ratios do not see it, a ratio of medians would."""
    ratio = Ratio.of([200.0, 100.0, 150.0], [100.0, 50.0, 50.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.5)


def test_compare_divides_useful_tokens_per_second():
    ours, theirs = [block(1.0, 300), block(2.0, 600)], [block(1.0, 100), block(1.0, 200)]
    found = compare(ours, theirs)
    assert found["ratio"] == pytest.approx((3.0 + 1.5) / 2)
    assert found["cpu_ratio"] == found["ratio"]


@pytest.mark.parametrize(
    ("value", "at_least", "met"), [(0.97, True, True), (0.969, True, False), (0.4, False, False), (0.2, False, True)]
)
def test_target(value: float, at_least: bool, met: bool):
    assert Target("x", value, 0.97 if at_least else 0.3, at_least=at_least).met is met
    assert Target("x", value).met is None


def test_blocks_run_as_ordered_and_in_turn(monkeypatch: pytest.MonkeyPatch):
    order: list[tuple[str, int]] = []
    run_block = Participant.block

    def recorded(self: Participant, steps: int, threads: int) -> Block:
        order.append((self.name, steps))
        return run_block(self, steps, threads)

    monkeypatch.setattr(Participant, "block", recorded)
    with participants({"a": worker(3), "b": worker(5)}, threads=1) as started:
        blocks = interleave(started, threads=1, rounds=3, block_seconds=0)
        assert started[0].block(steps=7, threads=2).tokens == 21
    assert order == [(name, 1) for name in "ab" + "ab" + "ba" + "ab"] + [("a", 7)]
    assert {name: [b.tokens for b in measured] for name, measured in blocks.items()} == {"a": [3] * 3, "b": [5] * 3}


def test_a_worker_that_dies_is_told_with_its_last_words():
    code = "import sys; sys.exit('no such model')"
    with (
        pytest.raises(RuntimeError, match="no such model"),
        participants({"x": [sys.executable, "-c", code]}, threads=1),
    ):
        pass


def test_results_carry_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.results.RESULTS", tmp_path)
    result = Result("x", {"rounds": 1}, targets=[Target("speed", 2.0, 1.0)])
    written = json.loads(result.write(smoke=False, load_before=0.25, command="python -m benchmarks x").read_text())
    assert written["targets"] == [{"what": "speed", "value": 2.0, "bound": 1.0, "at_least": True, "met": True}]
    assert written["load_average"]["before"] == 0.25
    assert {"cpu", "cores", "torch", "python"} <= set(written["machine"])
    assert written["git_revision"]


def test_the_page_is_what_the_results_say():
    assert {path.stem.partition("@")[0] for path in RESULTS.glob("*.json")} <= set(NAMES)
    assert report.PAGE.read_text() == report.render(), "run python -m benchmarks.report"


@pytest.mark.parametrize(
    "path", [RESULTS / "peers.json", *sorted(RESULTS.glob("peers@*.json"))], ids=lambda path: path.stem
)
def test_trl_is_held_to_its_faster_packed_variant(path: Path):
    from benchmarks.bench_peers import TRL_BOUND

    result = json.loads(path.read_text())
    held = [target["value"] for target in result["targets"] if target["bound"] == TRL_BOUND]
    keys = [f"ours packed / TRL packed{variant}" for variant in ("", ", row by row")]
    assert held == [min(case[key]["ratio"] for key in keys) for case in result["cases"]]


def test_page_lists_what_is_missed(tmp_path: Path):
    result = json.loads((RESULTS / "startup.json").read_text())
    result["targets"].append({"what": "speed of light", "value": 2.0, "bound": 3.0, "at_least": True, "met": False})
    (tmp_path / "startup.json").write_text(json.dumps(result))
    assert "- speed of light: 2, bound ≥ 3" in report.render(tmp_path)


def test_a_second_machine_stands_below_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.results.RESULTS", tmp_path)
    first = json.loads((RESULTS / "packing.json").read_text())
    (tmp_path / "packing.json").write_text(json.dumps(first))
    alone = report.render(tmp_path)
    second = Result("packing", first["settings"], first["cases"], [Target("speed of light", 2.0, 3.0)])
    path = second.write(smoke=False, load_before=0.0, command="here", machine_name="a laptop")
    page = report.render(tmp_path)
    assert path.name == "packing@a laptop.json" and page.startswith(alone)
    added = page[len(alone) :]
    assert added.startswith("\n### The same on another machine: a laptop\n\n| ")
    assert "- speed of light: 2, bound ≥ 3" in added and "`here`" in added


def test_every_benchmark_has_its_part_of_the_page():
    assert set(NAMES) == set(report.SECTIONS)


def test_cases_are_valid_configs():
    from trainer.config.run import SFTConfig

    for case in cases(smoke=False):
        SFTConfig.model_validate(case.run_config(Path("unused")))


def test_a_machine_whose_name_is_a_path_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["packing", "--machine", "a/b"])
    assert "--machine a/b" in capsys.readouterr().err


def test_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["stepp"])
    assert ", ".join(NAMES) in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "startup",
        "packing",
        "step",
        "attention",
        "products",
        "muon",
        pytest.param("offload", marks=pytest.mark.slow),
        pytest.param("checkpoint", marks=pytest.mark.slow),
        pytest.param("rollout", marks=pytest.mark.slow),
        pytest.param("grpo", marks=pytest.mark.slow),
        pytest.param("publication", marks=pytest.mark.slow),
        pytest.param("loss", marks=pytest.mark.slow),
        pytest.param("peers", marks=pytest.mark.slow),
    ],
)
def test_smoke(name: str):
    """The shortest form of each benchmark, without the other trainers: they are 6 GB each."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--smoke"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((ROOT / ".cache" / "bench" / "smoke" / f"{name}.json").read_text())
    assert written["cases"] and written["targets"]
    assert all(target["value"] > 0 for target in written["targets"])
    page = report.SECTIONS[name](written)
    assert page.startswith("## ") and all(str(case["case"]) in page for case in written["cases"])
