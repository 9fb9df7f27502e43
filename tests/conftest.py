"""What holds before any test module is imported: on a CPU, Triton means its interpreter (see kernels/conftest.py)."""

import os
import signal

if os.environ.get("EAGLE3_TEST_DEVICE", "cpu") == "cpu":
    # read when triton is imported, which torch's and other packages' modules do, too
    os.environ.setdefault("TRITON_INTERPRET", "1")
# no test needs the network; read when huggingface_hub is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell's background jobs ignore ^C, and so would the processes that tests start and interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
