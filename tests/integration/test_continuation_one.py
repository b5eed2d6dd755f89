"""The whole continuation matrix, on one process."""

import pytest

from support.continuation import MODES, compare, name, product


@pytest.mark.slow
@pytest.mark.parametrize("case", product(ranks=1), ids=name)
def test_full_product(case, tmp_path, uninterrupted):
    compare(case, tmp_path, uninterrupted(case), MODES)
