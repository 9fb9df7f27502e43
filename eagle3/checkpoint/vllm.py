"""Heads for vLLM: `--speculative-config` of method eagle3, which drafts chains.

Read in vLLM 0.32 (model_executor/models/llama_eagle3.py) and judged by it: tests/oracles/test_vllm.py. Its layer id i
is the INPUT of decoder layer i, one more than our number of the same stream.
"""

import json
import shlex

from eagle3.checkpoint.serving import ROPES, Launch, ServingFormat

_YARN = ROPES["linear"] | {
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
    *("attention_factor", "mscale", "mscale_all_dim"),
}


def _command(launch: Launch) -> str:
    speculative = {"method": "eagle3", "model": launch.folder, "num_speculative_tokens": launch.drafts}
    return shlex.join(["vllm", "serve", launch.target, "--speculative-config", json.dumps(speculative)])


FORMAT = ServingFormat(
    engine="vLLM (0.32 was read)",
    shift=1,
    options=frozenset({"num_layers", "fc_norm", "norm_before_residual", "norm_output", "sliding_window"}),
    ropes=ROPES | {"default": ROPES["default"] | {"partial_rotary_factor"}, "yarn": _YARN},
    own_width=True,
    fc_by_width=False,
    reads_layers=True,
    command=_command,
)
