"""`megatron-rl verify ENGINE --model FOLDER`: whether a running vLLM server holds the weights of a folder, bit for bit.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls megatron_rl.verify.worker.Verifier
    megatron-rl verify http://HOST:PORT --model FOLDER

FOLDER has a checkpoint in Hugging Face's format, on the server's host. It is loaded layer by layer, as if vLLM had to
replace its weights, and each tensor is compared with the one in use. These may be divided, stacked, quantized or
derived. Nothing changes in the server, which answers nothing else meanwhile. The key in VLLM_API_KEY is sent. The exit
code is 0 if every tensor is the folder's, and 5 if one is not, or cannot be compared.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from megatron_rl.errors import ExitCode, InputError, UsageError

_FLAG = "--worker-extension-cls megatron_rl.verify.worker.Verifier"
_NUM_LINES = 20


def main(argv: Sequence[str]) -> int:
    """Print what differs, and return RUN if anything does."""
    parser = argparse.ArgumentParser(
        "megatron-rl verify", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("engine", help="the server's address, http://HOST:PORT")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="the checkpoint, on the server's host")
    parser.add_argument("--json", action="store_true", help="print the workers' answers as they are")
    options = parser.parse_args(argv)
    answers = ask(options.engine, options.model)
    is_same = all(not answer["different"] and not answer["unknown"] for answer in answers)
    if options.json:
        print(json.dumps(answers))
    else:
        for answer in answers:
            print("\n".join(describe(answer)))
    return ExitCode.OK if is_same else ExitCode.RUN


def ask(engine: str, folder: str) -> list[dict[str, Any]]:
    """Have each worker of a server compare its tensors; raise an error that names what to change if one cannot."""
    key = os.environ.get("VLLM_API_KEY")
    try:
        answer = httpx.post(
            f"{engine.rstrip('/')}/collective_rpc",
            json={"method": "megatron_rl_verify", "args": [folder]},
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=None,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"{engine} does not answer ({error}): name the address of a running server") from None
    if answer.status_code in (401, 403):
        raise UsageError(f"{engine} asks for another key: set VLLM_API_KEY to the server's")
    if answer.status_code == 404:
        raise UsageError(f"{engine} takes no calls of its workers: start it with VLLM_SERVER_DEV_MODE=1 and {_FLAG}")
    if answer.status_code != 200:
        raise UsageError(f"{engine} refused ({answer.status_code}): start it with {_FLAG}; its log has the reason")
    answers: list[dict[str, Any]] = answer.json()["results"]
    if errors := [f"worker {one['rank']}: {one['error']}" for one in answers if "error" in one]:
        raise InputError("; ".join(errors))
    return answers


def describe(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about a worker."""
    different, unknown = answer["different"], answer["unknown"]
    same, all_of_it = answer["compared"] - len(different), answer["compared"] + len(unknown)
    yield f"worker {answer['rank']}: {same} of {all_of_it} tensors are the folder's, bit for bit"
    lines = [f"  {name}: {_describe_difference(one)}" for name, one in different.items()]
    lines += [f"  {name}: not compared, {reason}" for name, reason in unknown.items()]
    yield from lines[:_NUM_LINES]
    if len(lines) > _NUM_LINES:
        yield f"  and {len(lines) - _NUM_LINES} more: --json has all"


def _describe_difference(one: Mapping[str, Any]) -> str:
    if "numbers" not in one:
        return f"it holds {one['held']} in place of {one['wanted']}"
    return (
        f"{one['numbers']} of {one['of']} numbers differ, by at most {one['largest']}; the first at {one['first']}: "
        f"it holds {one['held']} in place of {one['wanted']}"
    )
