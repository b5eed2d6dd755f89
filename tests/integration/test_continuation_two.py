"""The whole continuation matrix, on two processes."""

import pytest

from support.continuation import MODES, compare, name, product


@pytest.mark.slow
@pytest.mark.parametrize("case", product(ranks=2), ids=name)
def test_full_product(case, tmp_path, uninterrupted):
    compare(case, tmp_path, uninterrupted(case), MODES)
