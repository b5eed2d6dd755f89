"""Groups of rollouts in checkpoints, bit for bit, and in files to read."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.tokenizers import byte_tokenizer
from trainer.checkpoint.leaves import dump_leaves, load_leaves
from trainer.cli.main import main
from trainer.errors import CorruptCheckpoint, DataError
from trainer.rl.records import pack_groups, read_rollouts, recorded_steps, unpack_groups, write_rollouts
from trainer.rl.rendering import Renderer
from trainer.rl.types import Group, Rollout

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def rollout(draw) -> Rollout:
    size = draw(st.integers(0, 20))
    trained = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), np.bool_)
    floats = draw(st.lists(st.floats(width=32, allow_nan=False), min_size=size, max_size=size))
    ints = st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)
    return Rollout(
        ids=np.array(draw(ints), np.int32),
        trained=trained,
        logprobs=np.where(trained, np.array(floats, np.float32), np.float32(0)),
        versions=np.where(trained, np.array(draw(ints), np.int32), np.int32(-1)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        turns=draw(st.integers(0, 9)),
        reward=draw(st.none() | FLOATS),
        parts=draw(st.dictionaries(st.text(max_size=5).filter(lambda name: "__" not in name), FLOATS, max_size=3)),
        error=draw(st.none() | st.text(max_size=9)),
    )


GROUPS = st.lists(
    st.builds(Group, st.integers(0, 2**62), st.text("0123456789:", max_size=8), st.lists(rollout(), max_size=4)),
    max_size=4,
)


def bits(groups: list[Group]) -> list:
    """Everything, with floats as their bits: -0.0 is not 0.0."""
    exact = lambda value: None if value is None else struct.pack("d", value)  # noqa: E731
    return [
        (
            group.number,
            group.id,
            [
                (
                    *((a.dtype, a.tobytes()) for a in (r.ids, r.trained, r.logprobs, r.versions)),
                    (r.finish_reason, r.turns, exact(r.reward), r.error),
                    [(name, exact(value)) for name, value in r.parts.items()],
                )
                for r in group.rollouts
            ],
        )
        for group in groups
    ]


@settings(max_examples=40, deadline=None)
@given(GROUPS)
def test_packing_is_exact_through_a_checkpoints_json(groups):
    packed = pack_groups(groups)
    text = load_leaves(dump_leaves({"text": packed["text"]}), "test")["text"]
    arrays = {name: a.copy() for name, a in packed.items() if name != "text"}
    assert bits(unpack_groups({**arrays, "text": text})) == bits(groups)


def made(tokenizer=None) -> list[Group]:
    tokenizer = tokenizer or byte_tokenizer()

    def one(prompt: str, said: str, reward: float | None, error: str | None = None) -> Rollout:
        before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        after = tokenizer(said, add_special_tokens=False)["input_ids"]
        trained = np.array([False] * len(before) + [True] * len(after))
        return Rollout(
            ids=np.array(before + after, np.int32),
            trained=trained,
            logprobs=np.where(trained, np.float32(-0.5), np.float32(0)),
            versions=np.where(trained, 11 + np.arange(trained.size) % 2, -1).astype(np.int32),
            finish_reason="stop",
            reward=reward,
            parts={} if reward is None else {"exact": float(reward == 1)},
            error=error,
        )

    return [
        Group(40, "0:3", [one("Reverse: abc", "cba", 1.0), one("Reverse: abc", "NaN", 0.25)]),
        Group(41, "1:7", [one("Sort: 2 1", "\x1b[31m1\n2\u2028é", 0.5), one("Sort: 2 1", "?", None, "it [b]hung[/b]")]),
    ]


def test_packing_is_compact():
    groups = made()
    packed = pack_groups(groups)
    arrays = [value for name, value in packed.items() if name != "text"]
    assert sum(array.nbytes for array in arrays) < 1.2 * sum(r.ids.nbytes * 3 for g in groups for r in g.rollouts) + 300
    assert all(array.ndim == 1 for array in arrays)
    assert [array.size for array in pack_groups([]).values() if isinstance(array, np.ndarray)] == [0] * len(arrays)


@pytest.mark.parametrize("name", [name for name in pack_groups([]) if name != "text"])
def test_arrays_that_do_not_belong_together_are_refused(name):
    packed = pack_groups(made())
    short = packed[name][:-1] if name != "trained" else packed[name][:1]
    with pytest.raises(CorruptCheckpoint):
        unpack_groups({**packed, name: short})
    with pytest.raises(CorruptCheckpoint):
        unpack_groups({key: value for key, value in packed.items() if key != name})


@pytest.fixture
def run_dir(tmp_path):
    renderer = Renderer(byte_tokenizer())
    for step in (3, 12):
        write_rollouts(
            tmp_path, step, made(), renderer=renderer, names=["reverse-text", "sort"], advantages=[[0.5, -0.5], [1, 0]]
        )
    return tmp_path


def test_lines_say_what_happened(run_dir):
    assert recorded_steps(run_dir) == [3, 12]
    lines = (run_dir / "rollouts" / "step_00000012.jsonl").read_text().split("\n")
    assert lines.pop() == "" and len(lines) == 4
    assert json.loads(lines[0]) == {
        "step": 12,
        "env": "reverse-text",
        "prompt_id": "0:3",
        "number": 40,
        "sample": 0,
        "prompt": "Reverse: abc",
        "completion": "cba",
        "reward": 1.0,
        "parts": {"exact": 1.0},
        "length_tokens": len(byte_tokenizer()("cba")["input_ids"]),
        "finish_reason": "stop",
        "turns": 1,
        "versions": [11, 12],
        "error": None,
        "advantage": 0.5,
    }
    rows = read_rollouts(run_dir, 12)
    assert [row["completion"] for row in rows] == ["cba", "NaN", "\x1b[31m1\n2\u2028é", "?"]
    assert rows[3]["error"] == "it [b]hung[/b]"
    assert read_rollouts(run_dir) == rows


def test_a_step_written_again_replaces_the_file(run_dir):
    write_rollouts(run_dir, 12, made()[:1], renderer=Renderer(byte_tokenizer()), names=["reverse-text"])
    rows = read_rollouts(run_dir, 12)
    assert len(rows) == 2 and rows[0]["advantage"] is None
    assert [path.name for path in (run_dir / "rollouts").iterdir() if path.name.startswith(".")] == []


def test_a_missing_step_names_its_neighbours(run_dir, tmp_path_factory):
    with pytest.raises(DataError, match=r"no rollouts of step 5; the nearest are 3, 12"):
        read_rollouts(run_dir, 5)
    with pytest.raises(DataError, match="give the directory of an RL run"):
        read_rollouts(tmp_path_factory.mktemp("empty"))


def test_show_orders_and_cuts(run_dir, capsys):
    def shown(*flags: str) -> list:
        assert main(["rollouts", "show", str(run_dir), *flags, "--json"]) == 0
        return [row["reward"] for row in json.loads(capsys.readouterr().out)]

    assert shown("--step", "3") == [1.0, 0.25, 0.5, None]
    assert shown("--best") == [1.0, 0.5, 0.25, None]
    assert shown("--worst") == [None, 0.25, 0.5, 1.0]
    assert shown("--worst", "-n", "2") == [None, 0.25]


def test_show_prints_a_table(run_dir, capsys):
    assert main(["rollouts", "show", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "step 12: 4 rollouts, mean reward 0.5833, 1 failed; 4 shown" in out
    assert "Reverse: abc → cba" in out and "+0.500" in out and "exact 1" in out
    assert "it [b]hung[/b]" in out and "NaN" in out
    assert "\x1b[31m" not in out and "\\x1b[31m1\\n2" in out
    assert main(["rollouts", "show", str(run_dir), "-n", "1", "--worst"]) == 0
    assert "Reverse" not in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--step", "5"], ["-n", "0"], ["--best", "--worst"], ["--nonsense"]])
def test_show_fails_with_2(run_dir, capsys, argv):
    assert main(["rollouts", "show", str(run_dir), *argv]) == 2
    assert "error" in capsys.readouterr().err
