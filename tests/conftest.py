"""What holds before any test module is imported: on a CPU, Triton means its interpreter (see kernels/conftest.py)."""

import os

if os.environ.get("EAGLE3_TEST_DEVICE", "cpu") == "cpu":
    # read when triton is imported, which torch's and other packages' modules do, too
    os.environ.setdefault("TRITON_INTERPRET", "1")
