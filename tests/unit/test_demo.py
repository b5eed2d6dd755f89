"""The demo's own parts: the conversations it makes, and the comparison that must not be able to pass by accident."""

import copy
import math

import pytest

from scripts.demo import assets
from scripts.demo.runs import DemoFailed, compare_metrics, read_metrics

YAML = {
    "talk.yml": "conversations:\n- - Hello\n  - Hi\n  - How are you?\n  - Well.\n  - And you?\n- - Hello\n  - Hi there\n",
    "emotion.yml": "conversations:\n- - You are sad\n  - No.\n  - I am  not.\n- a broken entry\n",
    "twice.yml": "conversations:\n- - Hello\n  - Hi there\n",
    "coding.yml": "conversations:\n- - Write a loop\n  - for i in x\n",
}


@pytest.fixture
def corpus(tmp_path):
    for name, text in YAML.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def spoken(messages):
    return [(m["role"][0], m["content"]) for m in messages[1:]]


def test_conversations(corpus):
    talks = list(assets.conversations(corpus))
    assert {(m[0]["role"], m[0]["content"]) for m in talks} == {("system", assets.SYSTEM)}
    assert [spoken(m) for m in talks] == [
        [("u", "You are sad"), ("a", "No.")],
        [("u", "You are sad"), ("a", "I am not.")],
        [("u", "Hello"), ("a", "Hi"), ("u", "How are you?"), ("a", "Well.")],
        [("u", "Hello"), ("a", "Hi there")],
        [("u", "Hello"), ("a", "Hi there")],
    ]


def test_split_drops_repeats_and_keeps_openings_together(corpus):
    train, val = assets.split(assets.conversations(corpus))
    assert len(train) + len(val) == 4
    assert not {m[1]["content"] for m in train} & {m[1]["content"] for m in val}


def test_split_is_about_a_tenth_and_does_not_depend_on_the_order():
    talks = [[{"content": "s"}, {"content": f"line {i // 2}"}, {"content": str(i)}] for i in range(2000)]
    train, val = assets.split(iter(talks))
    assert 120 < len(val) < 280
    again = assets.split(iter(talks[::-1]))
    assert [sorted(side, key=str) for side in again] == [sorted(side, key=str) for side in (train, val)]


def test_cached_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "cache" / "model"

    def half_done(folder):
        (folder / "part").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        assets.cached(out, half_done)
    assert not out.exists()
    assert assets.cached(out, lambda folder: (folder / "whole").touch())
    assert [path.name for path in out.iterdir()] == ["whole"]
    assert not assets.cached(out, half_done)


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(SystemExit, match="no-such-package.*make demo"):
        assets.installed("no-such-package", "x")


ROWS = [
    {"step": 0, "val_loss": 4.0},
    {
        "step": 1,
        "loss": 3.5,
        "lr": 1e-4,
        "grad_norm": 2.0,
        "tokens": 500,
        "samples": 12,
        "epoch": 0,
        "step_seconds": 1.0,
    },
    {"step": 2, "loss": 3.1, "lr": 5e-5, "grad_norm": 1.0, "tokens": 900, "samples": 25, "epoch": 0, "val_loss": 3.0},
]


def test_equal_runs_have_all_numbers_in_common_whatever_their_speed():
    other = copy.deepcopy(ROWS)
    other[1]["step_seconds"] = 9.0
    assert compare_metrics(ROWS, other) == 14


@pytest.mark.parametrize("key", ["loss", "lr", "grad_norm", "tokens", "samples", "epoch", "val_loss"])
def test_the_last_bit_of_one_number_fails_the_comparison(key):
    other = copy.deepcopy(ROWS)
    value = other[2][key]
    other[2][key] = value + 1 if isinstance(value, int) else math.nextafter(value, math.inf)
    with pytest.raises(DemoFailed, match=f"step 2: {key} is"):
        compare_metrics(ROWS, other)


def test_a_missing_step_fails_the_comparison():
    with pytest.raises(DemoFailed, match="other steps"):
        compare_metrics(ROWS, ROWS[:2])


def test_a_line_that_is_still_being_written_is_not_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
