"""The platforms: which one is chosen, the changes of installing one, and all that it leaves alone."""

import datetime
import importlib.machinery
import mmap
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d

from megatron_rl import versions
from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.platforms import cuda, host, megatron_patches, npu, select
from megatron_rl.platforms import platform as interface
from tests.processes import run_python


def test_an_unknown_platform_is_refused_with_the_alternatives():
    with pytest.raises(UsageError, match="'tpu'.*auto, cpu, cuda, npu"):
        select("tpu")


def test_detection_takes_the_cpu_where_there_is_nothing_else(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select().name == "cpu"
    assert select("auto") is select("cpu")


def test_detection_prefers_an_npu_to_cuda_to_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert select().name == "cuda"
    _fake_torch_npu(monkeypatch, available=False)
    assert select().name == "cuda"
    _fake_torch_npu(monkeypatch, available=True)
    assert select().name == "npu"


def test_a_torch_npu_that_does_not_load_is_said_and_passed_over(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _fake_torch_npu(monkeypatch, available=True)
    monkeypatch.setattr(npu, "importlib", SimpleNamespace(import_module=_raise_import_error))
    assert select().name == "cpu"
    assert "does not load" in caplog.text


@pytest.mark.each_change
def test_installing_after_megatron_was_imported_is_an_error_that_says_what_to_do():
    output = run_python(
        """
        import megatron.core.enums
        from megatron_rl.errors import PlatformError
        from megatron_rl.platforms import select
        try:
            select("cpu").install()
        except PlatformError as error:
            print(error)
        """
    )
    assert "megatron was imported before" in output
    assert "select('cpu').install()" in output


@pytest.mark.each_change
def test_installing_twice_does_nothing_and_changing_the_platform_is_an_error():
    output = run_python(
        """
        import sys, torch
        from megatron_rl.errors import PlatformError
        from megatron_rl.platforms import select
        select("cpu").install()
        ours = lambda: [finder for finder in sys.meta_path if "megatron_rl" in type(finder).__module__]
        before = (ours(), torch.Tensor.type)
        assert before[0]
        select("cpu").install()
        import megatron.core.enums
        select("cpu").install()
        assert before == (ours(), torch.Tensor.type)
        try:
            select("cuda").install()
        except PlatformError as error:
            print(error)
        """
    )
    assert "already set up for the platform 'cpu'" in output


@pytest.mark.each_change
def test_the_cpu_platform_leaves_torch_as_it_is_for_code_that_is_not_megatrons():
    run_python(
        """
        import torch, torch.distributed, torch._dynamo
        modules = (torch, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.distributed)
        before = [dict(vars(module)) for module in modules]
        from megatron_rl.platforms import select
        platform = select("cpu")
        platform.install()
        import megatron.core.models.gpt
        for module, names in zip(modules, before):
            changed = {name for name, value in names.items() if vars(module)[name] is not value}
            assert not changed, (module, changed)
        assert not torch.cuda.is_available()
        assert torch.ones(1).type() == "torch.FloatTensor"
        for move in (torch.ones(1).cuda, torch.nn.Linear(1, 1).cuda, lambda: torch.ones(1, device="cuda")):
            try:
                move()
            except (AssertionError, RuntimeError):
                continue
            raise SystemExit(f"{move} did not raise")
        """
    )


def test_megatron_finds_the_host_under_the_name_of_cuda():
    run_python(
        """
        import torch
        from megatron_rl.platforms import select
        select("cpu").install()
        import megatron.core.optimizer.clip_grads as module
        code = '''
        import torch.distributed as dist
        from torch.cuda import current_stream, current_device
        def check():
            import torch as inner
            assert inner is torch
            assert torch.cuda.current_device() == current_device() == torch.device("cpu")
            assert torch.zeros(2, device="cuda", pin_memory=True).device.type == "cpu"
            assert torch.zeros(2).cuda().type() == "torch.cuda.FloatTensor"
            assert isinstance(torch.nn.Linear(2, 2).cuda(), torch.nn.Module)
            assert not torch.cuda.is_available()
            with torch.cuda.stream(torch.cuda.Stream()):
                current_stream().wait_stream(torch.cuda.default_stream())
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            assert event.query()
            assert dist.all_to_all_single is torch.distributed.all_to_all_single
            torch.cuda.nvtx.range_push("name")
            torch.cuda.nvtx.range_pop()
        check()
        '''
        import textwrap
        exec(textwrap.dedent(code), vars(module))
        """
    )


@pytest.mark.each_change
def test_a_fork_of_the_random_numbers_restores_them_and_warns_of_nothing():
    output = run_python(
        """
        import torch
        from megatron_rl.platforms import select
        platform = select("cpu")
        platform.install()
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        platform.seed(7)
        expected = torch.rand(4)
        platform.seed(7)
        tracker = CudaRNGStatesTracker()
        tracker.add("other", 11)
        with tracker.fork("other"):
            first = torch.rand(4)
        assert torch.equal(torch.rand(4), expected)
        with tracker.fork("other"):
            second = torch.rand(4)
        platform.seed(11)
        assert torch.equal(torch.cat([first, second]), torch.rand(8))
        state = platform.rng_state()
        third = torch.rand(4)
        platform.set_rng_state(state)
        assert torch.equal(torch.rand(4), third)
        """
    )
    assert "RNG state changed" not in output


def test_every_patch_of_the_cpu_has_a_name_and_a_reason():
    patches = select("cpu").patches()
    assert len({name for name, _ in patches}) == len(patches) >= 15
    assert all(len(reason) > 20 for _, reason in patches)


def test_memory_on_the_cpu_counts_the_bytes_of_a_tensor():
    platform = select("cpu")
    before = platform.memory().allocated
    # Memory of its own: torch may find room in memory that this process has freed, and still has.
    memory = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    after = platform.memory()
    assert 0.9 * tensor.nbytes < after.allocated - before < 1.2 * tensor.nbytes
    assert after.allocated < after.peak < after.total
    del tensor, memory
    platform.reset_peak_memory()
    assert platform.memory().peak < after.peak


def test_a_version_out_of_range_is_an_error_with_package_found_wanted_and_remedy(monkeypatch):
    monkeypatch.setattr(versions, "installed", {"python": "3.11.2", "torch": "2.13.0+cpu"}.get)
    with pytest.raises(PlatformError, match="megatron-core is not installed, wanted >=0.16,<0.20: pip install"):
        versions.check()
    found = {"python": "3.11.2", "torch": "2.1.0", "megatron-core": "0.20.0"}
    monkeypatch.setattr(versions, "installed", found.get)
    with pytest.raises(PlatformError, match=r"torch is 2.1.0, wanted >=2.6.*; megatron-core is 0.20.0 in .*, wanted"):
        versions.check()


def test_versions_compare_by_their_leading_numbers():
    assert versions.MEGATRON_CORE.accepts("0.16.0rc1")
    assert versions.MEGATRON_CORE.accepts("0.19.2")
    assert not versions.MEGATRON_CORE.accepts("0.15.9")
    assert not versions.MEGATRON_CORE.accepts("0.20")
    assert versions.TORCH.accepts("2.13.0+cpu")


def test_a_patch_refuses_a_megatron_core_that_it_does_not_know():
    class DistributedOptimizer:
        def load_state_dict(self, state_dict, strict): ...

    module = ModuleType("megatron.core.optimizer.distrib_optimizer")
    module.HAVE_APEX_OR_TE = False
    module.DistributedOptimizer = DistributedOptimizer
    with pytest.raises(PlatformError, match=r"megatron-core .*takes \(self, state_dict, strict\), expected"):
        megatron_patches.separate_steps_after_load(module)
    with pytest.raises(PlatformError, match="does not exist"):
        megatron_patches.keep_step_on_load(module)
    with pytest.raises(PlatformError, match="HAVE_APEX_OR_TE"):
        megatron_patches.keep_step_on_load(ModuleType("megatron.core.optimizer.distrib_optimizer"))


def test_the_optimizer_is_left_alone_where_a_fused_one_is_installed():
    module = ModuleType("megatron.core.optimizer.distrib_optimizer")
    module.HAVE_APEX_OR_TE = True
    module.DistributedOptimizer = type("DistributedOptimizer", (), {})
    before = dict(vars(module.DistributedOptimizer))
    megatron_patches.keep_step_on_load(module)
    megatron_patches.allocate_state_before_saving(module)
    megatron_patches.separate_steps_after_load(module)
    assert dict(vars(module.DistributedOptimizer)) == before


def test_cuda_without_a_device_is_an_error_that_names_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlatformError, match="--platform cpu"):
        cuda.CudaPlatform()._prepare()


def test_cuda_switches_off_the_fusions_whose_kernels_are_missing(monkeypatch):
    there = set()
    monkeypatch.setattr(cuda, "_importable", there.__contains__)
    assert cuda.CudaPlatform().unsupported_fusions == dict.fromkeys(cuda._KERNELS, False)
    there.add("transformer_engine")
    assert set(cuda.CudaPlatform().unsupported_fusions) == {"masked_softmax_fusion", "persist_layer_norm"}


def test_the_npu_loads_torch_npu_and_then_mindspeeds_adaptor(monkeypatch):
    imported = []
    _fake_npu_packages(monkeypatch)
    _fake_torch_npu(monkeypatch, available=True)
    monkeypatch.setattr(npu.importlib, "import_module", imported.append)
    platform = npu.NpuPlatform()
    platform._prepare()
    platform._after_install()
    assert imported == ["torch_npu", "mindspeed.megatron_adaptor"]


def test_the_npu_adaptor_comes_before_megatron_and_a_failed_one_installs_nothing(monkeypatch):
    _fake_npu_packages(monkeypatch, **{"megatron-core": "0.16.1", "python": "3.11.2"})
    _fake_torch_npu(monkeypatch, available=True)
    monkeypatch.setattr(npu.importlib, "import_module", _raise_import_error)
    monkeypatch.setattr(interface, "install_patches", lambda patches: None)
    monkeypatch.setattr(interface, "_installed", None)
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(PlatformError, match=r"torch_npu does not load \(libhccl.so\): run CANN's set_env.sh"):
        npu.NpuPlatform().install()
    assert interface._installed is None


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({"torch_npu": None}, "torch_npu is not installed: pip install torch_npu=="),
        ({"torch_npu": "2.1.0.post3"}, "torch_npu is 2.1.0.post3, torch is .* must have the same version"),
        ({"mindspeed": None}, "mindspeed is not installed: git checkout core_r0.16.0"),
        ({"mindspeed": "0.12.1"}, "mindspeed is 0.12.1, megatron-core is 0.16.1, .* core_r0.16.0"),
        ({"megatron-core": "0.17.1"}, "with megatron-core 0.16, and this is 0.17.1: .*MegatronAdaptor"),
    ],
)
def test_a_missing_or_mismatched_piece_of_the_npu_stack_is_named_with_its_remedy(monkeypatch, installed, message):
    _fake_npu_packages(monkeypatch, **installed)
    with pytest.raises(PlatformError, match=message):
        npu.NpuPlatform()._prepare()


def test_an_npu_that_is_not_visible_is_an_error(monkeypatch):
    _fake_torch_npu(monkeypatch, available=False)
    monkeypatch.setattr(npu.importlib, "import_module", lambda name: None)
    with pytest.raises(PlatformError, match="finds no NPU"):
        npu.NpuPlatform()._after_install()


@pytest.mark.parametrize(("platform", "noun"), [(cuda.CudaPlatform(), "GPU"), (npu.NpuPlatform(), "NPU")])
def test_an_accelerator_uses_the_calls_of_its_namespace_and_counts_the_devices_of_its_ranks(
    platform, noun, monkeypatch
):
    calls = _fake_torch_npu(monkeypatch, available=True)
    for name, function in vars(torch.npu).items():
        monkeypatch.setattr(torch.cuda, name, function)
    platform.set_device(1)
    platform.synchronize()
    assert calls == ["set_device 1", "synchronize"]
    with pytest.raises(PlatformError, match=f"local rank 2 has no {noun}, 2 are visible: start at most 2 ranks"):
        platform.set_device(2)
    # Those of engines do not count.
    assert (platform.smallest_device(1), platform.smallest_device(8)) == (3 << 30, 2 << 30)
    assert select("cpu").smallest_device(1) is None


def _raise_import_error(name):
    raise ImportError("libhccl.so")


def _fake_npu_packages(monkeypatch, **changed):
    torch_release = ".".join(map(str, versions.release(torch.__version__)))
    packages = {"megatron-core": "0.16.1", "torch_npu": torch_release, "mindspeed": "0.16.0", "torch": "2.13.0"}
    monkeypatch.setattr(versions, "installed", {**packages, **changed}.get)


def _fake_torch_npu(monkeypatch, available):
    """Fake a torch_npu that can be found and imported, with the torch.npu that it brings; return the calls it gets."""
    calls = []
    module = ModuleType("torch_npu")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    namespace = SimpleNamespace(
        is_available=lambda: available,
        device_count=lambda: 2,
        get_device_properties=lambda index: SimpleNamespace(total_memory=(3 << 30, 2 << 30)[index]),
        set_device=lambda index: calls.append(f"set_device {index}"),
        synchronize=lambda: calls.append("synchronize"),
    )
    monkeypatch.setattr(torch, "npu", namespace, raising=False)
    return calls


def test_groups_of_gloo_share_a_thread_on_a_cpu_and_compute_as_others_do(tmp_path):
    output = run_python(
        f"""
        import datetime
        import os
        from pathlib import Path
        import torch
        import torch.distributed as dist
        from megatron_rl.platforms import select

        select("cpu").install()
        select("cpu").install()
        dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
        groups = [dist.new_group([0], timeout=datetime.timedelta(seconds=77)) for _ in range(10)]
        values = torch.arange(3.0)
        for group in groups:
            dist.all_reduce(values, group=group)
        # A device opens its epoll instance before its thread runs, and so before the thread has a name.
        opened = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        print(opened.count("anon_inode:[eventpoll]"), values.tolist(), dist.get_backend(groups[0]))
        print(groups[0]._get_backend(torch.device("cpu")).options._timeout)
        # A thread of gloo's that releases a tensor while Python ends would abort the process.
        del group, groups
        dist.destroy_process_group()
        """
    )
    assert output.splitlines()[-2:] == ["1 [0.0, 1.0, 2.0] gloo", "0:01:17"]


@pytest.mark.parametrize(("named", "devices"), [("", ["default"]), ("eth1", ["eth1"]), ("eth1,eth2", ["eth1", "eth2"])])
def test_groups_of_gloo_listen_on_the_interfaces_that_the_user_names(named, devices, monkeypatch):
    class Group:
        _Options = SimpleNamespace

        def __init__(self, store, rank, size, options):
            self.devices = options._devices

        @staticmethod
        def create_default_device():
            return "default"

        @staticmethod
        def create_device(interface):
            return interface

    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", Group)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    host.share_gloo_device()
    assert Group(None, 0, 1, timeout=datetime.timedelta(seconds=7)).devices == devices
