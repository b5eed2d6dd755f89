"""Non-tensor state as JSON: the same types and bits come back, or it is refused by name."""

import enum
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.leaves import compare_leaves, dump_leaves, flatten_leaves, load_leaves, same
from trainer.errors import CheckpointError, CorruptCheckpoint

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text().filter(lambda key: key not in ("__tuple__", "__float__"))
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner), max_leaves=20
)


def exact(value):
    """repr tells types, -0.0 from 0.0 and the order of keys apart."""
    return repr(value)


@given(st.dictionaries(keys, values))
def test_what_goes_in_comes_out(leaves):
    assert exact(load_leaves(dump_leaves(leaves), "here")) == exact(leaves)


def test_floats_keep_their_bits():
    floats = {
        "lr": 0.007500000025,
        "tiny": 5e-324,
        "third": 1 / 3,
        "minus_zero": -0.0,
        "inf": math.inf,
        "minus": -math.inf,
    }
    assert exact(load_leaves(dump_leaves(floats), "here")) == exact(floats)
    assert math.isnan(load_leaves(dump_leaves({"nan": math.nan}), "here")["nan"])


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize("value", [np.float64(1.0), np.int32(1), Colour.RED, b"bytes", {1, 2}, object(), 1j])
def test_what_json_would_change_is_refused_by_name(value):
    with pytest.raises(CheckpointError, match=r"'optimizer\.groups\[1\]\.lr'"):
        dump_leaves({"optimizer": {"groups": [{"lr": 1.0}, {"lr": value}]}})


def test_keys_must_be_strings():
    with pytest.raises(CheckpointError, match=r"'optimizer\.state'.*key 0"):
        dump_leaves({"optimizer": {"state": {0: 1.0}}})
    with pytest.raises(CheckpointError, match="reserved"):
        dump_leaves({"a": {"__tuple__": 1}})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[1]",
        b"{",
        b'{"a": {"__float__": "1.0"}}',
        b'{"a": {"__tuple__": 3}}',
        b"\xff",
        b"[" * 10**5,
        b"[" * 900 + b"]" * 900,
    ],
)
def test_a_damaged_document_is_refused(data):
    with pytest.raises(CorruptCheckpoint, match="here"):
        load_leaves(data, "here")


def test_comparison_names_what_differs():
    saved = {"groups": [{"lr": 0.0075, "betas": (0.9, 0.95), "fused": True}], "step": 3, "nan": math.nan}
    assert compare_leaves(saved, {**saved, "extra": 1}, "optimizer") == []  # what was not saved keeps its live value
    live = {"groups": [{"lr": 1e-10, "betas": (0.9, 0.95), "fused": False}], "nan": math.nan}
    assert compare_leaves(saved, live, "optimizer", {"fused"}) == [
        "optimizer.groups[0].lr: checkpoint 0.0075, after loading 1e-10",
        "optimizer.step: checkpoint 3, not present after loading",
    ]
    assert len(compare_leaves(saved, live, "optimizer")) == 3


@pytest.mark.parametrize(("a", "b"), [(1, 1.0), (True, 1), (0.0, -0.0), (None, 0), ([1], [1, 2]), ("1", 1)])
def test_values_of_another_type_or_sign_are_not_the_same(a, b):
    assert same(a, a) and same(b, b)
    assert not same(a, b)


def test_flattened_names():
    leaves = {"groups": [{"lr": 1.0}, {}], "cursor": {"epoch": 2}, "empty": []}
    assert list(flatten_leaves(leaves, "o")) == [
        ("o.groups[0].lr", 1.0),
        ("o.groups[1]", {}),
        ("o.cursor.epoch", 2),
        ("o.empty", []),
    ]
