"""`megatron-rl verify ENGINE --model FOLDER`: whether a running vLLM server holds the weights of a folder, bit for bit.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls megatron_rl.verify.worker.Verifier
    megatron-rl verify http://HOST:PORT --model FOLDER

FOLDER has a checkpoint in Hugging Face's format, on the server's host. It is loaded layer by layer, as if vLLM had to
replace its weights, and each tensor is compared with the one in use. These may be divided, stacked, quantized or
derived. Nothing changes in the server, which answers nothing else meanwhile. The key in VLLM_API_KEY is sent.

With --watch it continues: FOLDER may have a folder for each version, and a new one is compared when it is written.
The server must hold it by then.

Without the extension --by-log-probs compares log-probs of drawn tokens, and prints which changes these can show.

The exit code is 0 if every tensor is the folder's, and 5 if one is not, or cannot be compared.
"""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from megatron_rl.errors import ExitCode, InputError, MegatronRLError, UsageError
from megatron_rl.verify import log_probs
from megatron_rl.verify.folders import list_safetensors

_FLAG = "--worker-extension-cls megatron_rl.verify.worker.Verifier, or add --by-log-probs"
_NUM_LINES = 20
_SECONDS = 1.0
"""For how long no file of a version may change before it counts as written."""


def main(argv: Sequence[str]) -> int:
    """Print what differs, and return RUN if anything does."""
    parser = argparse.ArgumentParser(
        "megatron-rl verify", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("engine", help="the server's address, http://HOST:PORT")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="the checkpoint, on the server's host")
    parser.add_argument("--adapter", metavar="FOLDER", help="LoRA in PEFT's format, which a slot must hold too")
    parser.add_argument("--by-log-probs", action="store_true", help="the weaker proof, of any vLLM server")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, help="the server's for --by-log-probs, if not the checkpoint's")
    parser.add_argument("--watch", action="store_true", help="compare each version until Ctrl-C, in a line each")
    parser.add_argument(
        "--json", action="store_true", help="print the workers' answers as they are, with every tensor that differs"
    )
    options = parser.parse_args(argv)
    engine = options.engine.rstrip("/")
    if options.by_log_probs:
        if options.adapter or options.watch or options.json:
            raise UsageError("--by-log-probs takes no --adapter, --watch or --json: leave them out")
        return log_probs.verify(engine, options.model, options.dtype, _make_headers())
    if options.watch:
        return watch(engine, Path(options.model), options.adapter)
    answers = ask(engine, options.model, options.adapter)
    if options.json:
        print(json.dumps(answers))
    else:
        for answer in answers:
            print("\n".join(describe_worker(answer)))
    return ExitCode.OK if all(map(is_equal, answers)) else ExitCode.RUN


def watch(engine: str, folder: Path, adapter: str | None) -> int:
    """Print a line for each version that is written, until Ctrl-C; return RUN if one was not the server's."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: name one with checkpoints")
    # Of the versions that exist only the newest can be the server's.
    compared = {*sorted(_list_versions(folder))[:-1]}
    is_same = True
    try:
        while True:
            before = _list_versions(folder) - compared
            time.sleep(_SECONDS)
            for version in sorted(before & _list_versions(folder)):
                compared.add(version)
                try:
                    answers = ask(engine, str(version[1]), adapter)
                except MegatronRLError as error:
                    lines, is_same = [str(error)], False
                else:
                    wrong = [answer for answer in answers if not is_equal(answer)]
                    is_same = is_same and not wrong
                    lines = [line.strip() for answer in wrong[:1] or answers[:1] for line in describe_worker(answer)]
                print(f"{time.strftime('%H:%M:%S')} {version[1]}: {'; '.join(lines[:2])}", flush=True)
    except KeyboardInterrupt:
        return ExitCode.OK if is_same else ExitCode.RUN


def _list_versions(folder: Path) -> set[tuple[float, Path]]:
    """Return the time and the folder of each whole checkpoint, in a folder or directly below it."""
    versions = set()
    for place in {file.parent for depth in ("", "*/") for file in folder.glob(f"{depth}*.safetensors")}:
        # A file may go at any time.
        with contextlib.suppress(OSError, InputError):
            versions.add((max(file.stat().st_mtime for file in list_safetensors(place)), place))
    return versions


def is_equal(answer: Mapping[str, Any]) -> bool:
    """Check whether a worker holds the folder's tensors, and the adapter's where it was asked for."""
    return (
        not answer["different"] and not answer["unknown"] and ("adapter" not in answer or is_equal(answer["adapter"]))
    )


def ask(engine: str, folder: str, adapter: str | None = None) -> list[dict[str, Any]]:
    """Have each worker of a server compare its tensors; raise an error that names what to change if one cannot."""
    try:
        answer = httpx.post(
            f"{engine}/collective_rpc",
            json={"method": "megatron_rl_verify", "args": [folder, *filter(None, [adapter])]},
            headers=_make_headers(),
            timeout=None,
        )
        size = httpx.get(f"{engine}/get_world_size", headers=_make_headers(), timeout=60)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"{engine} does not answer ({error}): name the address of a running server") from None
    if answer.status_code in (401, 403):
        raise UsageError(f"{engine} asks for another key: set VLLM_API_KEY to the server's")
    if answer.status_code == 404:
        raise UsageError(f"{engine} takes no calls of its workers: start it with VLLM_SERVER_DEV_MODE=1 and {_FLAG}")
    if answer.status_code != 200:
        raise UsageError(f"{engine} refused ({answer.status_code}): start it with {_FLAG}; its log has the reason")
    answers: list[dict[str, Any]] = answer.json()["results"]
    if size.status_code != 200:
        raise UsageError(f"{engine} does not say how many workers it has: verify a server of vLLM 0.32 or 0.33")
    # vLLM hands on the answers of one of several data-parallel engines.
    if len(answers) != (num_workers := size.json()["world_size"]):
        raise UsageError(
            f"{engine} answers for {len(answers)} of its {num_workers} workers, so the others may hold anything: "
            "verify a server without --data-parallel-size"
        )
    if errors := [f"worker {one['rank']}: {one['error']}" for one in answers if "error" in one]:
        raise InputError("; ".join(errors))
    return answers


def _make_headers() -> dict[str, str]:
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def describe_worker(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about a worker."""
    yield from _describe_tensors(f"worker {answer['rank']}", answer)
    if "adapter" in answer:
        adapter = answer["adapter"]
        yield from _describe_tensors(f"worker {answer['rank']}, adapter {adapter['number']}", adapter)


def _describe_tensors(holder: str, answer: Mapping[str, Any]) -> Iterator[str]:
    different, unknown = answer["different"], answer["unknown"]
    same, all_of_it = answer["compared"] - len(different), answer["compared"] + len(unknown)
    yield f"{holder}: {same} of {all_of_it} tensors are equal, bit for bit"
    lines = [f"  {name}: {_describe_difference(one)}" for name, one in different.items()]
    lines += [f"  {name}: not compared, {reason}" for name, reason in unknown.items()]
    yield from lines[:_NUM_LINES]
    if len(lines) > _NUM_LINES:
        yield f"  and {len(lines) - _NUM_LINES} more"


def _describe_difference(one: Mapping[str, Any]) -> str:
    if "numbers" not in one:
        return f"it holds {one['held']} in place of {one['wanted']}"
    return (
        f"{one['numbers']} of {one['of']} numbers differ, by at most {one['largest']}; the first at {one['first']}: "
        f"it holds {one['held']} in place of {one['wanted']}"
    )
