"""`megatron-rl verify --by-log-probs`: a weaker proof, for servers that have no extension of ours.

The server's log-probs of drawn tokens are compared with the log-probs that transformers computes from the folder on a
CPU. How far they may be apart follows from the model's own rounding: its log-probs in the server's dtype beside those
in a wider one. What such a comparison can see is measured: each layer's weights are changed a little, and the smallest
change that would have been seen is printed. A few numbers alone are never seen.
"""

import re
from collections.abc import Iterator
from typing import Any

import httpx

from megatron_rl.errors import ExitCode, InputError, UsageError

_NUM_ROWS, _LENGTH = 8, 32
_MARGIN = 4.0
"""The multiple of the model's own rounding that log-probs may be apart: kernels add in other orders."""
_CHANGE = 0.01
"""The part of each weight by which a layer is changed to measure what is seen."""


def verify(engine: str, folder: str, dtype_name: str | None, headers: dict[str, str]) -> int:
    """Print how far the log-probs are apart and what that can see; return RUN if they are too far apart."""
    import torch
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"transformers cannot load {folder}: {error}") from None
    generator = torch.Generator().manual_seed(0)
    shape = (_NUM_ROWS, _LENGTH)
    tokens = torch.randint(model.config.get_text_config().vocab_size, shape, generator=generator)
    served = torch.tensor(_ask(engine, tokens.tolist(), headers), dtype=torch.float64)
    dtype = getattr(torch, dtype_name) if dtype_name else model.dtype
    model.to(dtype)

    @torch.no_grad()
    def compute() -> torch.Tensor:
        log_probs = model(tokens).logits[:, :-1].double().log_softmax(-1)
        return log_probs.gather(-1, tokens[:, 1:, None])[..., 0]

    rounded = compute()
    model.to(torch.float64 if dtype == torch.float32 else torch.float32)
    ours = compute()
    limit = _MARGIN * _measure(rounded, ours)
    apart = _measure(served, ours)
    name = str(dtype).removeprefix("torch.")
    print(f"log-probs of {tokens[:, 1:].numel()} drawn tokens are {apart:.2g} apart, and {name} may be {limit:.2g}")
    for layer, parameters in _list_layers(model):
        held = [parameter.data.clone() for parameter in parameters]
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data.mul_(1 + _CHANGE * noise)
        effect = _measure(compute(), ours)
        for parameter, kept in zip(parameters, held, strict=True):
            parameter.data.copy_(kept)
        seen = f"{100 * _CHANGE * limit / effect:.2g} %" if effect else "no size"
        print(f"  {layer}: a random change of its weights is seen from {seen} on")
    if apart <= limit:
        print("the weights may be equal: a change that is smaller, or of a few numbers, is not seen")
        return ExitCode.OK
    print(f"the server holds other weights, or computes in another dtype than {name}: then name it with --dtype")
    return ExitCode.RUN


def _ask(engine: str, rows: list[list[int]], headers: dict[str, str]) -> list[list[float]]:
    """Return the server's log-probs of all tokens but each row's first."""
    asked = {"prompt": rows, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    try:
        served = httpx.get(f"{engine}/v1/models", headers=headers, timeout=60).json()["data"][0]["id"]
        answer = httpx.post(f"{engine}/v1/completions", json={"model": served, **asked}, headers=headers, timeout=600)
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        values = [choice["prompt_logprobs"][1:] for choice in choices]
        return [
            [float(one[str(token)]["logprob"]) for token, one in zip(row[1:], some, strict=True)]
            for row, some in zip(rows, values, strict=True)
        ]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"{engine} does not answer ({error}): name the address of a running server") from None
    except (KeyError, TypeError, ValueError, IndexError):
        raise UsageError(f"{engine} gives no log-probs of prompts, as vLLM's completions do: see its log") from None


def _measure(one: Any, other: Any) -> float:
    return float((one - other).square().mean().sqrt())


def _list_layers(model: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield the parameters of each layer, and one by one the parameters outside of layers."""
    layers: dict[str, list[Any]] = {}
    for name, parameter in model.named_parameters():
        layer = re.match(r".*\.layers\.\d+", name)
        layers.setdefault(layer[0] if layer else name, []).append(parameter)
    yield from layers.items()
