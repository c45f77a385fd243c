"""Measure how far vLLM's log-probs are from those of its weights, by the precision that it computes in.

Each engine samples from the demo's model after its warm-up, at temperature 1. transformers computes the log-probs of
the same tokens in float32. Its weights are rounded to bfloat16 as published ones are, but for the engine in float32.
"""

import argparse
import importlib
import multiprocessing
import os
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from benchmarks import report
from examples.arithmetic import task, warm_up

ENGINES: Mapping[str, Mapping[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "cache_fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "weights_fp8": {"dtype": "bfloat16", "quantization": "fp8_per_channel"},
    "both_fp8": {"dtype": "bfloat16", "quantization": "fp8_per_channel", "kv_cache_dtype": "fp8"},
}
_GROUP_SIZE, _MAX_TOKENS = 16, 6
# The bound of --rl-importance-sampling-truncation-coef that docs/algorithms.md begins with.
_BOUND = 2.0


class Sampled(NamedTuple):
    """A response, with the engine's log-probs of its tokens."""

    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a model of the demo; made if not given")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    importlib.import_module("vllm.entrypoints.llm")
    with tempfile.TemporaryDirectory(prefix="precision-") as folder:
        model = arguments.model or Path(folder) / "model"
        if arguments.model is None:
            recipe = warm_up.Recipe(num_steps=20, num_ramp_steps=1) if arguments.tiny else warm_up.Recipe()
            warm_up.make(model, 0, recipe)
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        problems = task.split(0).train[: 4 if arguments.tiny else 256]
        prompts = [tokenizer.encode(problem.prompt, add_special_tokens=False) for problem in problems]
        figures: dict[str, float] = {}
        print(f"\n{'engine':<14}{'tokens':>8}{'mean':>10}{'largest':>10}{'kl':>10}{'above 2':>10}")
        for name, engine in ENGINES.items():
            if "kv_cache_dtype" in engine and not torch.cpu._is_avx512_supported():
                print(f"{name:<14}vLLM keeps a cache in fp8 on processors with AVX-512 alone")
                continue
            differences = compare(model, name == "float32", sample(model, prompts, engine, tokenizer.eos_token_id))
            mean, largest = float(differences.abs().mean()), float(differences.abs().max())
            ratios = differences.exp()
            kl, share = float((ratios - 1 - differences).mean()), float((ratios > _BOUND).double().mean())
            print(f"{name:<14}{len(differences):>8}{mean:>10.2g}{largest:>10.2g}{kl:>10.2g}{share:>10.2g}", flush=True)
            figures |= {f"mean_{name}": mean, f"bounded_{name}": share}
    report.finish(figures)


def sample(model: Path, prompts: Sequence[Sequence[int]], engine: Mapping[str, str], end: int) -> list[Sampled]:
    """Have vLLM sample a group for each prompt, in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, str(model), prompts, engine, end)
    # Forked, because importing vLLM takes longer than all that follows.
    process = multiprocessing.get_context("fork").Process(target=_sample, args=arguments)
    process.start()
    theirs.close()
    try:
        responses: list[Sampled] = ours.recv()
        return responses
    finally:
        process.kill()
        process.join()


def _sample(to: Connection, model: str, prompts: Sequence[Sequence[int]], engine: Mapping[str, str], end: int) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model, max_model_len=32, max_num_seqs=256, enforce_eager=True, skip_tokenizer_init=True, seed=0, **engine)
    sampling = SamplingParams(
        n=_GROUP_SIZE, max_tokens=_MAX_TOKENS, temperature=1.0, logprobs=0, stop_token_ids=[end], detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False)
    to.send(
        [
            Sampled(
                list(output.prompt_token_ids),
                list(one.token_ids),
                [of_token[token].logprob for token, of_token in zip(one.token_ids, one.logprobs, strict=True)],
            )
            for output in outputs
            for one in output.outputs
        ]
    )


@torch.no_grad()
def compare(model: Path, is_exact: bool, responses: Sequence[Sampled]) -> torch.Tensor:
    """Return the log-probs of all tokens by their weights, less the engine's."""
    dtype = torch.float32 if is_exact else torch.bfloat16
    exact = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).float()
    found = []
    for some in (responses[start : start + 256] for start in range(0, len(responses), 256)):
        longest = max(len(one.prompt) + len(one.tokens) for one in some)
        rows = [[*one.prompt, *one.tokens] for one in some]
        # What follows a row changes nothing before it.
        logits = exact(torch.tensor([row + [0] * (longest - len(row)) for row in rows])).logits.log_softmax(-1)
        for one, of_row in zip(some, logits, strict=True):
            of_tokens = of_row[len(one.prompt) - 1 :][: len(one.tokens)].gather(1, torch.tensor(one.tokens)[:, None])
            found.append(of_tokens[:, 0].double() - torch.tensor(one.log_probs, dtype=torch.float64))
    return torch.cat(found)


if __name__ == "__main__":
    main()
