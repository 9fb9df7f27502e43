"""capture_copy fills its own columns and refuses to overrun."""

import pytest
import torch

from eagle3_kernels.capture_copy import capture_copy


def test_writes_one_column_block_of_the_real_rows():
    out = torch.full((5, 6), torch.nan)
    hidden, residual = torch.randn(3, 2), torch.randn(3, 2)
    capture_copy(hidden, out, 1, residual)
    assert torch.equal(out[:3, 2:4], hidden + residual)
    assert out.isnan().sum() == 5 * 6 - 6


@pytest.mark.parametrize("rows, column", [(6, 0), (2, 3)])
def test_overrun_raises(rows, column):
    with pytest.raises(RuntimeError, match="exceeds the buffer"):
        capture_copy(torch.zeros(rows, 2), torch.zeros(5, 6), column)
