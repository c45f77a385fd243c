"""Two real vLLM engines under a supervisor, killed and stopped at every kind of moment; and 200 publishes."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_rl.errors import PlatformError
from megatron_rl.shared.protocol.wire import decode_log_probs, decode_tokens
from megatron_rl.shared.weights.families import find_family, read_architecture
from megatron_rl.sidecar.engines import EngineLost, EngineRefused, EngineState
from megatron_rl.sidecar.launcher import LocalLauncher
from megatron_rl.sidecar.publication import StepDeadlines
from megatron_rl.sidecar.supervisor import PublishFailed, Supervisor, SupervisorConfig
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.engine import Deadlines, VllmEngine
from megatron_rl.sidecar.vllm.factory import VllmFactory
from tests import hf_models
from tests.sidecar import vllm_models
from tests.sidecar.naming import NAMED_SECONDS, naming
from tests.sidecar.vllm_models import Models, Reference, configure, created, in_shared_memory, started
from tests.sidecar.vllm_models import request as group_of
from tests.truth import distance, error_over_bound

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_GROUPS, GROUP_SIZE, NUM_TOKENS = 24, 8, 120
# The widths that vLLM's multi-latent attention on a CPU takes; `head_dim` is the part that rotates.
LATENT_SIZES = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64, "moe_intermediate_size": 64,
}  # fmt: skip
OTHER_NAMES = {"kimi_k2": "deepseek_v3"}
"""Families that transformers knows by another family's name."""
CONFIG = SupervisorConfig(watch_seconds=0.2, first_pause=0.1, deadlines=StepDeadlines(load=8))
FAULTS = ("api", "core", "hang")
"""The process that is killed; or the engine stands still. An engine of one worker has it in its core."""


@pytest.fixture(scope="module")
def supervisor(run, models: Models) -> Iterator[Supervisor]:
    with supervised(run, models) as supervisor:
        yield supervisor


@pytest.fixture(scope="module")
def pairs(run, models: Models) -> Iterator[Supervisor]:
    """Start engines of two workers each."""
    with supervised(run, models, tensor_parallel_size=2) as supervisor:
        yield supervisor


@contextlib.contextmanager
def supervised(run, models: Models, **settings: Any) -> Iterator[Supervisor]:
    architecture = read_architecture(models.first)
    is_text_only = find_family(architecture.family).images is not None
    if is_text_only and importlib.util.find_spec("torchvision") is None:
        paths = (Path(__file__).parents[2], Path(__file__).with_name("stand_in_modules"))
        settings["environment"] = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    config = dataclasses.replace(
        vllm_models.CONFIG, model=str(models.first), attends_plainly=architecture.latents is not None,
        is_text_only=is_text_only, **settings,
    )  # fmt: skip
    factory = VllmFactory(config, make_socket_folder(), LocalLauncher(), deadlines=Deadlines(stall=4))

    async def make() -> Supervisor:
        return Supervisor(factory, CONFIG)

    supervisor = run(make())
    try:
        run(supervisor.start(2))
        yield supervisor
    finally:
        run(supervisor.close())


def engine_of(supervisor: Supervisor, name: str):
    return supervisor._members[name].engine


def processes(supervisor: Supervisor, name: str) -> dict[str, psutil.Process]:
    found = find_processes(engine_of(supervisor, name)._handle.pid)
    assert set(found) >= {"api", "core"}
    return found


def find_processes(pid: int) -> dict[str, psutil.Process]:
    """Find the processes of an engine that exist by now, by their kinds."""
    api = psutil.Process(pid)
    found = {"api": api}
    for child in api.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = "".join(child.cmdline()[:1])
            found |= {kind: child for kind, word in (("core", "EngineCore"), ("worker", "Worker")) if word in title}
    return found


def gone(members: list[psutil.Process], seconds: float) -> bool:
    return not psutil.wait_procs(members, timeout=seconds)[1]


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "sem.mp", "vllm_"))}


def shared_memory_of(process: psutil.Process) -> set[str]:
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return {name for name in shared_memory() if f"/dev/shm/{name}" in maps}


async def until_ready(supervisor: Supervisor, seconds: float = 120) -> None:
    async with asyncio.timeout(seconds):
        while {member["state"] for member in supervisor.status()["engines"].values()} != {"ready"}:
            await asyncio.sleep(0.1)


def requests():
    return [
        group_of(number, GROUP_SIZE, max_tokens=NUM_TOKENS, temperature=1.0, ignore_eos=True)
        for number in range(NUM_GROUPS)
    ]


async def all_groups(supervisor: Supervisor):
    return await asyncio.gather(*(supervisor.generate(request) for request in requests()))


def tokens(groups) -> list[list[bytes]]:
    return [[response.tokens for response in group] for group in groups]


@pytest.mark.parametrize(("engines", "fault"), [*(("supervisor", fault) for fault in FAULTS), ("pairs", "worker")])
def test_groups_of_an_engine_that_is_killed_or_hangs_come_once_and_are_the_same(run, request, models, engines, fault):
    supervisor = request.getfixturevalue(engines)

    async def break_it_while_it_samples(weights):
        await supervisor.publish(weights)
        await until_ready(supervisor)
        expected = tokens(await all_groups(supervisor))
        victims = processes(supervisor, "engine-1")
        # A worker that lives in the core shares nothing with it.
        theirs = shared_memory_of(victims["worker"]) if "worker" in victims else set()
        assert bool(theirs) == ("worker" in victims)
        task = asyncio.create_task(all_groups(supervisor))
        await asyncio.sleep(0.4)
        assert supervisor.status()["engines"]["engine-1"]["in_flight"] > 0
        if fault == "hang":
            victims["core"].suspend()
        else:
            victims[fault].kill()
        killed = time.monotonic()
        groups = await asyncio.wait_for(task, 120)
        print(f"{fault}: all groups {time.monotonic() - killed:.1f} s after the fault")
        assert tokens(groups) == expected
        assert {response.fingerprint for group in groups for response in group} == {weights.fingerprint}
        assert await asyncio.to_thread(gone, list(victims.values()), 10 if fault == "hang" else 5)
        await until_ready(supervisor)
        print(f"{fault}: ready again after {time.monotonic() - killed:.1f} s")
        assert not theirs & shared_memory()
        assert tokens(await all_groups(supervisor)) == expected

    with in_shared_memory(models.second, 1) as weights:
        run(break_it_while_it_samples(weights))


@pytest.mark.parametrize(("engines", "fault"), [*(("supervisor", fault) for fault in FAULTS), ("pairs", "worker")])
def test_a_publish_outlives_an_engine_that_is_killed_or_hangs_in_it(run, request, models, engines, fault):
    supervisor = request.getfixturevalue(engines)

    async def break_it_while_it_loads(first, second):
        await supervisor.publish(first)
        await until_ready(supervisor)
        victims = processes(supervisor, "engine-1")
        engine = engine_of(supervisor, "engine-1")
        load = engine.load

        async def load_slowly(weights):
            # A worker that is stopped keeps the publish at this step.
            victims.get("worker", victims["core"]).suspend()
            if fault != "hang":
                asyncio.get_running_loop().call_later(0.5, victims[fault].kill)
            return await load(weights)

        engine.load = load_slowly
        task = asyncio.create_task(supervisor.publish(second))
        published = await asyncio.wait_for(task, 120)
        assert [proof.engine for proof in published.proofs] == ["engine-0", "engine-1"]
        assert {proof.report.fingerprint for proof in published.proofs} == {second.fingerprint}
        assert await asyncio.to_thread(gone, list(victims.values()), 5)
        groups = await all_groups(supervisor)
        assert {response.fingerprint for group in groups for response in group} == {second.fingerprint}
        assert {response.engine for group in groups for response in group} == {"engine-0", "engine-1"}

    with in_shared_memory(models.first, 1) as first, in_shared_memory(models.second, 2) as second:
        run(break_it_while_it_loads(first, second))


@pytest.mark.timeout(2400)
def test_a_core_that_is_killed_as_a_publish_begins_is_named_and_the_publish_succeeds(run, supervisor, models):
    async def break_it(first, second, delay: float) -> float:
        await supervisor.publish(first)
        await until_ready(supervisor)
        await all_groups(supervisor)
        core = processes(supervisor, "engine-1")["core"]
        with naming("engine-1") as named:
            task = asyncio.create_task(supervisor.publish(second))
            await asyncio.sleep(delay)
            core.kill()
            killed = time.monotonic()
            await asyncio.wait_for(named.event.wait(), NAMED_SECONDS)
            await asyncio.wait_for(task, 300)
        await until_ready(supervisor, 300)
        print(f"core killed {1e3 * delay:.0f} ms after the publish began: {named.at - killed:.2f} s: {named.text}")
        return named.at - killed

    with in_shared_memory(models.first, 1) as first, in_shared_memory(models.second, 2) as second:
        seconds = [run(break_it(first, second, 0.01 * number)) for number in range(10)]
    print(f"named after {max(seconds):.2f} s at most")


def test_a_publish_of_half_a_file_reaches_no_engine(run, supervisor, models):
    async def publish_half(good, half):
        await supervisor.publish(good)
        with pytest.raises(PublishFailed, match=r"engine-\d, worker 0, load: .* cannot be read"):
            await supervisor.publish(half)
        assert EngineState.READY not in {member.engine.state for member in supervisor._members.values()}
        await asyncio.sleep(0.3)
        await supervisor.publish(good)
        await until_ready(supervisor)

    with in_shared_memory(models.first, 3) as good, in_shared_memory(models.second, 4) as half:
        os.truncate(Path(half.folder) / "model.safetensors", 50_000)
        run(publish_half(good, half))


def test_two_hundred_publishes_leak_nothing(run, supervisor, models):
    async def publish_often() -> list[dict[str, tuple[int, int]]]:
        uses = []
        for version in range(210):
            with in_shared_memory((models.first, models.second)[version % 2], version) as weights:
                await supervisor.publish(weights)
            if version in (9, 209):
                uses.append(
                    {
                        f"{name} {kind}": (member.memory_info().rss, member.num_fds())
                        for name in ("engine-0", "engine-1")
                        for kind, member in processes(supervisor, name).items()
                    }
                    | {"sidecar": (psutil.Process().memory_info().rss, psutil.Process().num_fds())}
                )
        return uses

    started = time.monotonic()
    early, late = run(publish_often())
    print(f"{(time.monotonic() - started) / 210:.3f} s a publish to two engines")
    for name, (memory, handles) in late.items():
        print(f"{name}: {(memory - early[name][0]) / 1e6:+.1f} MB, {handles - early[name][1]:+d} handles")
        # 200 copies of these weights would take 70 MB.
        assert memory - early[name][0] < 20e6
        assert handles - early[name][1] <= 2
    for name in ("engine-0", "engine-1"):
        maps = Path(f"/proc/{processes(supervisor, name)['core'].pid}/maps").read_text().splitlines()
        # The last folder, until the next load sees that it was removed.
        assert len([line for line in maps if ".safetensors" in line]) == 1


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("family", "changes", "num_workers"),
    # Experts of 64 fit the layout of a CPU's kernel, those of 48 are padded to it.
    [
        ("qwen3", {}, 1),
        ("llama", {}, 1),
        ("qwen3_moe", {"moe_intermediate_size": 64}, 1),
        ("qwen3_moe", {"moe_intermediate_size": 48}, 1),
        ("glm4_moe", {"moe_intermediate_size": 64}, 1),
        ("qwen2_moe", {"num_attention_heads": 2, "num_key_value_heads": 1}, 1),
        ("seed_oss", {}, 1),
        ("ernie4_5", {}, 1),
        ("gpt_oss", {"intermediate_size": 64}, 1),
        ("gemma3_text", WINDOWS, 1),
        ("qwen3_vl", {}, 1),
        ("gemma3", WINDOWS, 1),
        # vLLM keeps what follows from weights here: the products by which it multiplies queries and outputs. The first
        # has yarn, which vLLM computes in torch in any case.
        ("deepseek_v3", LATENT_SIZES, 1),
        ("glm4_moe_lite", LATENT_SIZES, 1),
        ("deepseek_v2", LATENT_SIZES, 1),
        ("kimi_k2", LATENT_SIZES, 1),
        # Two workers divide sinks, experts with biases, and the heads of multi-latent attention.
        ("gpt_oss", {"intermediate_size": 128}, 2),
        ("deepseek_v2", LATENT_SIZES, 2),
    ],
)
def test_after_a_publish_every_greedy_token_is_that_of_the_new_weights(
    run, tmp_path, request, family, changes, num_workers
):
    with contextlib.ExitStack() as stack:
        if family == "qwen3":
            models, supervisor = request.getfixturevalue("models"), request.getfixturevalue("supervisor")
        else:
            models = vllm_models.draw(OTHER_NAMES.get(family, family), tmp_path, **changes)
            start = vllm_models.rename(models.first, family) if family in OTHER_NAMES else models.first
            served = supervised(run, dataclasses.replace(models, first=start), tensor_parallel_size=num_workers)
            supervisor = stack.enter_context(served)
        check_greedy_tokens(run, supervisor, models, f"{family} of {num_workers} workers {changes or ''}")


def check_greedy_tokens(run, supervisor: Supervisor, models: Models, label: str) -> None:
    """Check the tokens and log-probs of two engines after a publish of each model."""
    asked = [group_of(number, temperature=0.0, max_tokens=16, ignore_eos=True) for number in range(24)]
    sampled = [group_of(number, temperature=0.8, max_tokens=16, ignore_eos=True) for number in range(24, 32)]
    continuations = []
    for version, model in enumerate((models.first, models.second)):
        groups = run(greedy(supervisor, model, version, [*asked, *sampled]))
        reference = Reference(model)
        pairs = [(req, group[0]) for req, group in zip(sampled, groups[len(asked) :], strict=True)]
        assert reference.error_over_bound(pairs) <= 1
        groups = groups[: len(asked)]
        counts = [reference.num_greedy(req, group[0]) for req, group in zip(asked, groups, strict=True)]
        num_engines = len({group[0].engine for group in groups})
        print(f"{label} version {version}: {sum(counts)} of 384 tokens, {num_engines} engines")
        assert sum(counts) == 384
        assert num_engines == 2
        continuations.append([group[0].tokens for group in groups])
    different = sum(old != new for old, new in zip(*continuations, strict=True))
    print(f"{label}: {different} of 24 continuations differ between the versions")
    assert different >= 0.9 * 24


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        # vLLM's linear layers compute in bfloat16 alone on a CPU.
        ("qwen3_next", {
            "layer_types": ["linear_attention", "full_attention"], "moe_intermediate_size": 64,
            "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        }),
        ("qwen3_5_images", {
            "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        }),
        # All experts, so that rounding does not choose others.
        ("gpt_oss", {"intermediate_size": 64, "num_experts_per_tok": 4}),
    ],
)  # fmt: skip
def test_engines_in_bfloat16_follow_each_publish(run, tmp_path, family, changes):
    models = vllm_models.draw(family, tmp_path, **changes)
    for model in (models.first, models.second):
        vllm_models.round_to_bfloat16(model)
    with supervised(run, models, dtype="bfloat16") as supervisor:
        asked = [group_of(number, temperature=0.8, max_tokens=16, ignore_eos=True, length=70) for number in range(8)]
        for version, model in enumerate((models.first, models.second)):
            groups = run(greedy(supervisor, model, version, asked))
            pairs = [(list(one.prompt_tokens), group[0]) for one, group in zip(asked, groups, strict=True)]
            sequences = [prompt + decode_tokens(response.tokens).tolist() for prompt, response in pairs]
            ours = torch.cat([torch.from_numpy(decode_log_probs(response.log_probs).copy()) for _, response in pairs])
            theirs, truth, other = (
                torch.cat([one[-16:] for one in hf_models.log_probs(folder, sequences, 0.8, dtype)])
                for folder, dtype in (
                    (model, torch.bfloat16),
                    (model, torch.float64),
                    (models.second if model is models.first else models.first, torch.float64),
                )
            )
            error = error_over_bound(ours, theirs, truth)
            print(f"version {version}: error / bound {error:.2f}, {distance(ours, truth)}, {distance(theirs, truth)}")
            assert error <= 1
            assert distance(other, truth) > 10 * distance(ours, truth)


async def greedy(supervisor: Supervisor, model: Path, version: int, asked):
    with in_shared_memory(model, version) as weights:
        await supervisor.publish(weights)
    return await asyncio.gather(*(supervisor.generate(group) for group in asked))


def test_an_engine_that_cannot_update_its_model_in_place_does_not_start(run, tmp_path):
    """Take experts whose layout fits, so that nothing else shows, without the patch that they need on a CPU."""
    (tmp_path / "unpatched.py").write_text(
        "from megatron_rl.sidecar.vllm import patches\n"
        "from megatron_rl.sidecar.vllm.worker import WorkerExtension as Patched\n"
        "class WorkerExtension(Patched):\n"
        "    def megatron_rl_prepare(self, *arguments):\n"
        "        patches.patch_method = lambda method: 'not applied: by this test'\n"
        "        return super().megatron_rl_prepare(*arguments)\n"
    )
    models = vllm_models.draw("qwen3_moe", tmp_path, moe_intermediate_size=64)
    with created(run, configure(models.first, "unpatched.WorkerExtension", tmp_path)) as engine:
        with pytest.raises(EngineRefused, match="cannot update this model here .*by this test"):
            run(engine.start())
        adopted = VllmEngine("adopted", engine.address)
        with pytest.raises(EngineRefused, match="let the sidecar start the engine"):
            run(adopted.start())
        run(adopted.close())


def test_a_publish_that_leaves_derived_parameters_stale_is_refused(run, tmp_path):
    """Give them memory of their own, and leave their update out: on a CPU they are views of the tensor of a publish."""
    (tmp_path / "stale.py").write_text(
        "import torch\n"
        "from megatron_rl.sidecar.vllm.worker import WorkerExtension as Deriving\n"
        "class WorkerExtension(Deriving):\n"
        "    def megatron_rl_prepare(self, *arguments):\n"
        "        from vllm.model_executor.layers.attention.mla_attention import MLAAttention\n"
        "        MLAAttention.process_weights_after_loading = lambda self, dtype: None\n"
        "        for layer in self.model_runner.get_model().modules():\n"
        "            for name in ('W_UK_T', 'W_UV') if isinstance(layer, MLAAttention) else ():\n"
        "                own = getattr(layer, name).detach().clone()\n"
        "                setattr(layer, name, torch.nn.Parameter(own, requires_grad=False))\n"
        "        return super().megatron_rl_prepare(*arguments)\n"
    )
    models = vllm_models.draw("deepseek_v3", tmp_path, **LATENT_SIZES)
    config = configure(models.first, "stale.WorkerExtension", tmp_path, attends_plainly=True)
    with (
        started(run, config) as engine,
        in_shared_memory(models.second, 1) as weights,
        pytest.raises(Exception, match="do not follow from"),
    ):
        run(engine.load(weights))


def test_an_engine_on_a_cpu_that_rotates_queries_by_wrong_positions_does_not_start(run, tmp_path):
    """Leave out the flag that engines need. With one head the operation stays inside its tensors until it is tried."""
    changes = {**LATENT_SIZES, "num_attention_heads": 1, "num_key_value_heads": 1}
    models = vllm_models.draw("glm4_moe_lite", tmp_path, **changes)
    config = dataclasses.replace(vllm_models.CONFIG, model=str(models.first))
    said = "rotates queries and keys by wrong positions: start it with --compil"
    with created(run, config) as engine, pytest.raises(PlatformError, match=said):
        run(engine.start())


def test_an_engine_that_dies_of_its_first_request_says_what_its_worker_met_and_keeps_its_log(run, tmp_path):
    # The sidecar refuses this model before it starts an engine; vLLM starts, and fails when it attends.
    models = vllm_models.draw("qwen3", tmp_path / "models", head_dim=16)
    config = dataclasses.replace(vllm_models.CONFIG, model=str(models.first))
    logs = tmp_path / "logs"
    logs.mkdir()
    for _ in range(2):
        with created(run, config, logs=logs) as engine, pytest.raises(EngineLost) as raised:
            run(engine.start())
        text = str(raised.value)
        assert "engine engine-0: probe was answered 500\nin its core:\n" in text
        assert "RuntimeError: Unsupported CPU attention configuration: head_dim=16" in text
        assert "see stack trace" not in text.lower()
        assert text.endswith(f"its log is {logs / 'engine-0.log'}")
    for name in ("engine-0.log", "engine-0.log.1"):
        assert "head_dim=16" in (logs / name).read_text()


@pytest.mark.parametrize(
    ("victim", "seconds", "said"),
    [
        *(("api", seconds, "its server ended by SIGKILL") for seconds in (0.0, 2.0, 5.0)),
        # Killed between two looks, a core is named by vLLM's last words.
        ("core", 0.0, r"its process \d+ \(VLLM::EngineCore\) has ended|its server ended with exit code 1 .*core"),
        *(("core", seconds, r"its process \d+ \(VLLM::EngineCore\) has ended") for seconds in (2.0, 5.0)),
    ],
)
def test_a_process_that_is_killed_while_its_engine_starts_ends_the_start_by_name(run, models, victim, seconds, said):
    async def break_it(engine: VllmEngine) -> None:
        starting = asyncio.create_task(engine.start())
        async with asyncio.timeout(120):
            while (found := find_processes(engine._handle.pid)).keys() < {"api", "core"}:
                await asyncio.sleep(0.1)
        await asyncio.sleep(seconds)
        assert not starting.done()
        found[victim].kill()
        killed = time.monotonic()
        with pytest.raises(EngineLost) as raised:
            await asyncio.wait_for(starting, NAMED_SECONDS)
        print(f"{victim} killed {seconds:g} s after the core exists: {time.monotonic() - killed:.2f} s: {raised.value}")
        assert re.match(f"engine engine-0: (?:{said})", str(raised.value), re.DOTALL)
        assert await asyncio.to_thread(gone, list(found.values()), NAMED_SECONDS)

    with created(run, dataclasses.replace(vllm_models.CONFIG, model=str(models.first))) as engine:
        run(break_it(engine))


def test_nothing_outlives_a_sidecar_that_is_killed(models, tmp_path):
    code = f"""
        import asyncio, dataclasses
        from pathlib import Path
        from megatron_rl.sidecar.launcher import LocalLauncher
        from megatron_rl.sidecar.supervisor import Supervisor
        from megatron_rl.sidecar.vllm.factory import VllmFactory
        from megatron_rl.sidecar.temporary import make_socket_folder
        from megatron_rl.sidecar.vllm.server import ServerConfig

        async def main():
            config = ServerConfig(model={str(models.first)!r}, max_model_len=512, tensor_parallel_size=2)
            await Supervisor(VllmFactory(config, make_socket_folder(), LocalLauncher())).start(1)
            print("ready", flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    sidecar = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert sidecar.stdout is not None
        assert sidecar.stdout.readline() == "ready\n"
        members = psutil.Process(sidecar.pid).children(recursive=True)
        assert len(members) >= 4
        theirs = {name for member in members for name in shared_memory_of(member)}
        assert theirs
        sidecar.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        sidecar.wait()
        assert gone(members, 5)
        print(f"gone after {time.monotonic() - killed:.2f} s")
        assert not theirs & shared_memory()
    finally:
        sidecar.kill()
