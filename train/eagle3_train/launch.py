"""`accelerate launch` on a machine without GPUs: it starts one process, whatever --num_processes says, unless it is
told of --multi_gpu, and none under DeepSpeed where it is told of --cpu. Here it is told what it needs.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

PR_SET_PDEATHSIG = 1
# what launchers give each of several processes
RANKED = ("LOCAL_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def start_all_processes() -> None:
    """Become the launch that was asked for, if accelerate started this process alone where several were wanted."""
    if "ACCELERATE_MIXED_PRECISION" not in os.environ or any(name in os.environ for name in RANKED):
        return
    _end_with_launcher()
    # accelerate names a place to meet only where it was asked for several
    if "MASTER_ADDR" not in os.environ:
        return
    import psutil

    words = several(psutil.Process(os.getppid()).cmdline())
    if words is None:
        return
    print(f"accelerate started one process for several; starting: accelerate launch {' '.join(words)}", flush=True)
    if os.environ.pop("ACCELERATE_USE_CPU", "").lower() == "true":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.execv(sys.executable, [sys.executable, "-m", "accelerate.commands.launch", *words])


def _end_with_launcher() -> None:
    """Take the launcher's end for a SIGTERM: one that it gets itself it does not pass on to the process it started."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def several(launcher: Sequence[str]) -> list[str] | None:
    """The words of `accelerate launch` that start all processes which this command line asks for.

    Args:
        launcher: a process's command line.
    Returns:
        None: it is no launch of accelerate, or of one process.
    """
    if (words := _launch_words(launcher)) is None:
        return None
    from accelerate.commands.launch import launch_command_parser

    args = launch_command_parser().parse_args(words)
    config = _config(args)
    if (args.num_processes or getattr(config, "num_processes", 1) or 1) < 2:
        return None
    # a word of accelerate's own stands before the script
    script = words.index(args.training_script)
    own = [word for word in words[:script] if word != "--cpu"]
    kind = str(getattr(config, "distributed_type", "")).rpartition(".")[-1]
    ranked = args.use_deepspeed or args.use_fsdp or args.multi_gpu or kind in ("DEEPSPEED", "FSDP", "MULTI_GPU")
    return [*([] if ranked else ["--multi_gpu"]), *own, *words[script:]]


def _launch_words(launcher: Sequence[str]) -> list[str] | None:
    for i, word in enumerate(launcher[:4]):
        if word == "launch" or os.path.basename(word) in ("accelerate-launch", "accelerate.commands.launch"):
            return list(launcher[i + 1 :])
        if word.endswith(os.path.join("accelerate", "commands", "launch.py")):
            return list(launcher[i + 1 :])
    return None


def _config(args: Any) -> Any:
    """The configuration file that accelerate would read, None if there is none."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    if args.config_file is None and (args.cpu or not os.path.isfile(default_config_file)):
        return None
    return load_config_from_file(args.config_file)
