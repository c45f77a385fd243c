"""Samples responses with vLLM on a CPU, one at a time, and records the experts of each token that it was fed.

vLLM returns experts on accelerators only. Its routers tell them to the same function here.

    python -m tests.e2e.routed_vllm MODEL DTYPE OUT.npz
"""

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np

NUM_PROMPTS, NUM_RESPONSES, LENGTH = 3, 2, 40


def main(model: str, dtype: str, out: str) -> None:
    import vllm

    llm = vllm.LLM(
        model=model, dtype=dtype, max_model_len=256, max_num_seqs=1, enforce_eager=True, skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs", enable_prefix_caching=False,
    )  # fmt: skip
    fed: dict[int, list[np.ndarray]] = {}
    llm.apply_model(partial(record, fed))
    found: dict[str, np.ndarray] = {}
    generator = np.random.default_rng(0)
    for prompt in range(NUM_PROMPTS):
        tokens = generator.integers(0, 512, 30 + 10 * prompt)
        found[f"prompt.{prompt}"] = tokens
        for number in range(NUM_RESPONSES):
            fed.clear()
            params = vllm.SamplingParams(
                max_tokens=LENGTH, seed=100 * prompt + number, logprobs=0, detokenize=False, ignore_eos=True
            )
            (result,) = llm.generate([{"prompt_token_ids": tokens.tolist()}], params, use_tqdm=False)
            (output,) = result.outputs
            name = f"{prompt}.{number}"
            found[f"tokens.{name}"] = np.asarray(output.token_ids)
            found[f"log_probs.{name}"] = np.asarray(
                [of_token[token].logprob for token, of_token in zip(output.token_ids, output.logprobs, strict=True)]
            )
            for layer, rows in fed.items():
                found[f"experts.{name}.{layer}"] = np.concatenate(rows)
    np.savez(out, **found)


def record(fed: dict[int, list[np.ndarray]], model: object) -> None:
    """Have the model's routers tell which experts they choose."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    def note(layer: int, experts_RK: object) -> None:
        fed.setdefault(layer, []).append(experts_RK.cpu().numpy().astype(np.uint8))

    for module in model.modules():
        if isinstance(module, MoERunner):
            module.router.set_capture_fn(partial(note, module.layer_id))


if __name__ == "__main__":
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    main(*sys.argv[1:])
    assert Path(sys.argv[3]).exists()
