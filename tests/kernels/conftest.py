"""Kernel tests run Triton's interpreter, which tests/conftest.py chose before triton was imported; on a GPU compiled.

EAGLE3_TEST_DEVICE=cuda runs the same cases there (`make gpu-check` does); tests take the device from
`eagle3_kernels.testing.device()` or the fixture.
"""

import os

import pytest
import torch

from eagle3_kernels.dispatch import has_triton
from eagle3_kernels.interpreter import mend_interpreter
from eagle3_kernels.testing import device as test_device

if test_device().type == "cpu":
    assert os.environ.get("TRITON_INTERPRET") == "1", "tests/conftest.py chooses the interpreter"
    if has_triton():
        mend_interpreter()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return test_device()
