"""Kernel tests run Triton's interpreter, which must be chosen before triton is imported; on a GPU they run compiled.

EAGLE3_TEST_DEVICE=cuda runs the same cases there (`make gpu-check` does); tests take the device from
`eagle3_kernels.testing.device()` or the fixture.
"""

import os
import sys

import pytest
import torch

from eagle3_kernels.dispatch import has_triton
from eagle3_kernels.interpreter import mend_interpreter
from eagle3_kernels.testing import device as test_device

if test_device().type == "cpu":
    assert "triton" not in sys.modules or "TRITON_INTERPRET" in os.environ, "triton was imported too early"
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if has_triton():
        mend_interpreter()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return test_device()
