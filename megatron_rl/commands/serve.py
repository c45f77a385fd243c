"""`megatron-rl serve RUN`: vLLM's OpenAI interfaces for the policy of a run, for lm-eval, Inspect and chat clients.

    megatron-rl serve RUN
    megatron-rl serve FOLDER --max-model-len 4096 --gpu-memory-utilization 0.5

RUN is a run's folder: the newest checkpoint of --save or --save-hf is served, as the run's engines compute it. So it is
for a live run, whose own engines answer the run alone and get other weights with each publish. FOLDER is a checkpoint
in Hugging Face's format. Further flags are vLLM's.

Once it serves, the command prints the fingerprint of the weights, the address, and the key: a new one, or the key in
VLLM_API_KEY. SIGTERM and Ctrl-C end it.

With --tinker it trains instead, as clients of Tinker's interface ask: `megatron-rl serve --tinker --help`.
"""

import argparse
import asyncio
import importlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from megatron_rl.config.hardware import count_cores
from megatron_rl.config.rollout import RewardConfig, RolloutConfig
from megatron_rl.errors import ExitCode, InputError, MegatronRLError, UsageError
from megatron_rl.observe.run_folder import CONFIG_FILE, find_run, read_saved_config
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.files import read_fingerprint
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.sidecar.child import MESSAGE_FILE
from megatron_rl.sidecar.launcher import Handle, LocalLauncher, ProcessSpec
from megatron_rl.sidecar.serving import find_url, open_listener, set_at_end
from megatron_rl.sidecar.settings import MESSAGE_FLAG, SidecarSettings, read_settings
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.flags import names_flag
from megatron_rl.sidecar.vllm.server import MODEL_NAME, configure_server, make_open_spec
from megatron_rl.trainer.mcore.checkpoint.folders import holds_checkpoint, iteration_folder, latest_iteration

_TINKER = "megatron_rl.tinker.command"
_SET = ("--model", "--api-key", "--uds", "--config", "--served-model-name", "--ssl-keyfile", "--ssl-certfile")
_CONVERT = (
    "import sys; from megatron_rl.sidecar.parent import tie; tie(); from megatron_rl.cli import main; sys.exit(main())"
)
_POLL_SECONDS, _ANSWER_SECONDS, _NUM_LINES = 0.2, 5.0, 30


class ServingFailed(MegatronRLError):
    """A process of the command that has ended, or does not answer in time."""

    exit_code = ExitCode.RUN


class Source(NamedTuple):
    """The weights to serve."""

    name: str
    settings: SidecarSettings
    folder: Path | None
    """Their folder in Hugging Face's format; None if a checkpoint is converted."""
    words: Sequence[str] = ()
    """The flags of `megatron-rl convert` for the checkpoint."""


def main(argv: Sequence[str]) -> int:
    """Serve until a signal ends it."""
    if "--tinker" in argv:
        code: int = importlib.import_module(_TINKER).main(argv)
        return code
    parser = argparse.ArgumentParser(
        "megatron-rl serve", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run's folder, or one in Hugging Face's format")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at; 127.0.0.1 if not given")
    parser.add_argument("--port", type=int, default=8000, help="its port; 8000 if not given, 0 for a free one")
    arguments, flags = parser.parse_known_args(argv)
    if names_flag(flags, *_SET):
        raise UsageError(f"{', '.join(_SET)} are set by this command: drop them; VLLM_API_KEY may have your own key")
    return asyncio.run(_serve(find_source(arguments.folder), (arguments.host, arguments.port), flags))


def find_source(path: Path) -> Source:
    """Find the weights in a folder of Hugging Face's format, or the newest ones of a run."""
    if _is_model(path):
        return Source(str(path), SidecarSettings("auto", path, None, RolloutConfig(), RewardConfig()), path)
    run = find_run(path, MESSAGE_FILE)
    settings, config = read_settings([MESSAGE_FLAG, str(run / MESSAGE_FILE)]), read_saved_config(run / CONFIG_FILE)

    def read(section: str, name: str) -> str | None:
        value = None if config is None else config.sections.get(section, {}).get(name)
        return None if value is None or value.text == "-" else value.text

    def place(flag: str, text: str | Path | None) -> Path:
        return Path(os.devnull) if text is None else _find_place(run, settings.rollout.folder, flag, Path(text))

    save = path if holds_checkpoint(path) else place("--save", read("checkpoint", "save"))
    exported = place("--save-hf", read("checkpoint", "save_hf"))
    newest = latest_iteration(save) or 0
    last = max((int(one.name[5:]) for one in exported.glob("iter_*") if one.name[5:].isdigit()), default=0)
    folder = iteration_folder(exported if last >= newest else save, max(last, newest))
    name = f"version {max(last, newest)} of the run {run.resolve().name}, from {folder}"
    if last and last >= newest:
        return Source(name, settings, folder)
    if not newest or settings.hf_model is None:
        raise InputError(
            f"{run} has no checkpoint to serve: --save and --save-hf keep them, the first after --save-interval "
            "iterations; if their folder was moved, name the folder of --save, or of one in Hugging Face's format"
        )
    flags = {
        "--load": str(save),
        "--ckpt-step": str(newest),
        "--hf-model": str(place("--hf-model", settings.hf_model)),
        "--weights-bridge": settings.weights_bridge,
        "--publish-dtype": read("publish", "dtype"),
        "--lora-rank": read("lora", "rank"),
        "--lora-alpha": read("lora", "alpha"),
    }
    words = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    targets = read("lora", "targets")
    return Source(name, settings, None, words if targets is None else [*words, "--lora-targets", *targets.split()])


def _find_place(run: Path, typed: Path | None, flag: str, path: Path) -> Path:
    """Return a path of a run as it was meant where the run was started; `typed` is its folder as it was written."""
    if path.is_absolute():
        return path
    start, last = run.resolve().parts, typed.parts if typed is not None else ()
    if typed is None or typed.is_absolute() or start[-len(last) :] != last:
        raise InputError(
            f"{run} was started with {flag} {path}, in a folder that is not known: name the folder of the checkpoint"
        )
    return Path(*start[: -len(last)], path)


def _is_model(path: Path) -> bool:
    try:
        return "model_type" in json.loads((path / CONFIG_FILE).read_bytes())
    except (OSError, ValueError):
        return False


async def _serve(source: Source, place: tuple[str, int], flags: Sequence[str]) -> int:
    ended = asyncio.Event()
    set_at_end(ended)
    # Opened for a moment: a port that is in use is refused before weights are read.
    with open_listener(*place, "the address") as listener:
        url, place = find_url(listener), (place[0], listener.getsockname()[1])
    scratch = make_socket_folder()
    try:
        folder = source.folder or await _convert(source, scratch, ended)
        if not ended.is_set():
            await _run_server(source, folder, scratch, url, place, flags, ended)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return ExitCode.OK


async def _convert(source: Source, scratch: Path, ended: asyncio.Event) -> Path:
    print(f"converting {source.name}", flush=True)
    folder = scratch / "policy"
    command = (sys.executable, "-c", _CONVERT, "convert", *source.words, "--save-hf", str(folder))
    handle = LocalLauncher().start(ProcessSpec("convert", command, os.environ, scratch / "convert.log", ""))
    try:
        await _wait(handle, ended)
        if not folder.is_dir() and not ended.is_set():
            raise _explain("megatron-rl convert", handle)
        return folder
    finally:
        handle.kill()


async def _run_server(
    source: Source,
    folder: Path,
    scratch: Path,
    url: str,
    place: tuple[str, int],
    flags: Sequence[str],
    ended: asyncio.Event,
) -> None:
    settings, rollout = source.settings, source.settings.rollout
    architecture = read_architecture(folder, settings.weights_bridge)
    fingerprint = await asyncio.to_thread(read_fingerprint, folder, Mapping(architecture))
    longest, num_threads = settings.seq_length or architecture.longest_sequence, rollout.num_threads or count_cores()
    config = configure_server(rollout, folder, longest, settings.device, num_threads, None, settings.weights_bridge)
    if rollout.tool_parser is not None:
        flags = ["--enable-auto-tool-choice", "--tool-call-parser", rollout.tool_parser, *flags]
    if rollout.reasoning_parser is not None:
        flags = ["--reasoning-parser", rollout.reasoning_parser, *flags]
    key, log = os.environ.get("VLLM_API_KEY") or f"mrl-{secrets.token_hex(24)}", scratch / "serve.log"
    print(f"starting vLLM, whose log is {log}", flush=True)
    handle = LocalLauncher().start(make_open_spec(config, scratch, log, place, key, flags))

    async def is_up() -> bool:
        try:
            return (await client.get(f"{url}/health")).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        async with asyncio.timeout(60 * rollout.start_minutes), httpx.AsyncClient(timeout=_ANSWER_SECONDS) as client:
            is_serving = await _wait(handle, ended, is_up)
        if is_serving:
            print(f"serving {source.name}, with the fingerprint {fingerprint}, as the model {MODEL_NAME}")
            shown = "$VLLM_API_KEY" if os.environ.get("VLLM_API_KEY") else key
            print(f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={shown}", flush=True)
            await _wait(handle, ended)
        if not ended.is_set():
            raise _explain("vLLM", handle)
    except TimeoutError:
        raise _explain(f"vLLM was not up after {rollout.start_minutes:g} minutes, and", handle) from None
    finally:
        handle.kill()


async def _wait(handle: Handle, ended: asyncio.Event, is_up: Callable[[], Awaitable[bool]] | None = None) -> bool:
    """Wait until the process is up; return False once it has ended, or the command is ended."""
    while not ended.is_set() and handle.find_fault() is None:
        if is_up is not None and await is_up():
            return True
        await asyncio.sleep(_POLL_SECONDS)
    return False


def _explain(name: str, handle: Handle) -> ServingFailed:
    lines = "\n".join(f"  {line}" for line in handle.log_lines()[-_NUM_LINES:])
    return ServingFailed(f"{name} {handle.poll() or handle.find_fault() or 'still runs'}; its last lines are\n{lines}")
