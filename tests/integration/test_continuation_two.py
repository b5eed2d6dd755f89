"""The whole continuation matrix, on two processes."""

import pytest

from support.continuation import MODES, Uninterrupted, compare, name, product


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return Uninterrupted(tmp_path_factory.mktemp("uninterrupted"))


@pytest.mark.slow
@pytest.mark.parametrize("case", product(ranks=2), ids=name)
def test_full_product(case, tmp_path, uninterrupted):
    compare(case, tmp_path, uninterrupted(case), MODES)
