"""Differences between versions of megatron-core, with stand-ins for the code of each; none needs to be installed."""

import functools
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_rl import versions
from megatron_rl.commands import doctor
from megatron_rl.errors import InputError, PlatformError
from megatron_rl.platforms import megatron_patches
from megatron_rl.platforms.megatron_patches import SharedResults
from megatron_rl.trainer.mcore.checkpoint import serialization

PACKAGE_INFO = """
MAJOR = {}
MINOR = {}
PATCH = {}
PRE_RELEASE = {}
VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes a tree which imports find first; megatron itself has no __init__.py."""
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)

    def make(*version: object, text: str | None = None) -> Path:
        folder = tmp_path / "megatron" / "core"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text("raise SystemExit('it was imported')")
        text = PACKAGE_INFO.format(*version) if text is None else text
        (folder / "package_info.py").write_text(text)
        return folder

    return make


@pytest.mark.parametrize(
    ("numbers", "version"),
    [((0, 18, 2, '""'), "0.18.2"), ((0, 17, 0, "'rc0'"), "0.17.0rc0"), ((0, 19, 1, "''"), "0.19.1")],
)
def test_the_version_is_that_of_the_tree_that_an_import_takes_and_nothing_is_imported(tree, numbers, version):
    folder = tree(*numbers)
    assert versions.installed("megatron-core") == version
    assert versions.find_megatron() == folder
    assert versions.describe_megatron() == f"{version} in {folder}"
    assert "megatron" not in sys.modules


def test_a_tree_that_was_not_installed_is_not_refused(tree, monkeypatch):
    monkeypatch.setattr(versions, "installed_by_pip", lambda package: None)
    tree(0, 18, 2, '""')
    assert versions.problem(versions.MEGATRON_CORE) is None


def test_a_tree_that_does_not_tell_its_version_has_that_of_the_installed_package(tree, monkeypatch):
    monkeypatch.setattr(versions, "installed_by_pip", lambda package: "0.17.1")
    tree(text="from setuptools_scm import version\n")
    assert versions.installed("megatron-core") == "0.17.1"


def test_a_tree_out_of_range_is_named_with_its_folder(tree):
    folder = tree(0, 20, 0, "''")
    assert versions.problem(versions.MEGATRON_CORE).startswith(
        f"megatron-core is 0.20.0 in {folder}, wanted >=0.16,<0.20: pip install"
    )


def test_an_unknown_megatron_is_named_with_version_and_folder_of_the_tree(tree):
    folder = tree(0, 19, 1, "''")
    text = str(megatron_patches.unknown_megatron("Some.function is not there"))
    assert text.startswith(f"megatron-core 0.19.1 in {folder}: Some.function is not there; a patch of megatron_rl")


@pytest.mark.parametrize(("installed", "hidden"), [("0.16.1", "; it hides the installed 0.16.1"), (None, "")])
def test_the_doctor_says_where_the_tree_lies_and_what_it_hides(tree, monkeypatch, capsys, installed, hidden):
    monkeypatch.setattr(versions, "installed_by_pip", lambda package: installed)
    folder = tree(0, 18, 2, '""')
    doctor._print_megatron()
    assert capsys.readouterr().out == f"    in {folder}{hidden}\n"


def queue_of_0_16(): ...


def queue_of_0_17(mp_mode="spawn"): ...


def writing_module(**functions) -> ModuleType:
    module = ModuleType("megatron.core.dist_checkpointing.strategies.filesystem_async")
    vars(module).update(functions)
    return module


@pytest.mark.parametrize(
    ("name", "function", "arguments"),
    [
        ("_get_write_results_queue", queue_of_0_16, ()),
        ("get_write_results_queue", queue_of_0_17, ()),
        ("get_write_results_queue", queue_of_0_17, ("fork",)),
    ],
)
def test_results_travel_through_shared_memory_whatever_the_function_is_called(name, function, arguments):
    module = writing_module(**{name: function})
    megatron_patches.share_write_results(module)
    results = getattr(module, name)(*arguments)
    assert isinstance(results, SharedResults)
    results.put({0: "written"})
    assert results.get_nowait() == {0: "written"}


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({}, "has neither, expected one of get_write_results_queue, _get_write_results_queue"),
        ({"get_write_results_queue": lambda mode: None}, r"takes \(mode\), expected \(mp_mode\)"),
        (
            {"_get_write_results_queue": queue_of_0_16, "get_write_results_queue": queue_of_0_17},
            "has get_write_results_queue and _get_write_results_queue",
        ),
    ],
)
def test_a_queue_of_results_that_is_not_known_is_an_error(functions, message):
    with pytest.raises(PlatformError, match=message):
        megatron_patches.share_write_results(writing_module(**functions))


@pytest.mark.parametrize("name", ["write_preloaded_data_multiproc", "write_preloaded_data_multithread"])
def test_a_rank_writes_its_files_in_one_process_whatever_megatrons_writer_is_called(name, monkeypatch):
    for other in serialization._WRITERS:
        monkeypatch.delattr(FileSystemWriterAsync, other, raising=False)
    monkeypatch.setattr(FileSystemWriterAsync, name, lambda *_: None, raising=False)
    theirs = functools.partial(getattr(FileSystemWriterAsync, name), ["transform"], False)
    write = serialization._in_one_process(AsyncRequest(theirs, (), [])).async_fn
    assert write.func is serialization._write
    assert write.args == (["transform"],)


def test_a_rank_that_has_nothing_to_write_writes_nothing():
    assert serialization._in_one_process(AsyncRequest(None, (), [])).async_fn is None


def test_a_writer_that_is_not_known_is_an_error():
    with pytest.raises(
        PlatformError, match="checkpoints are written by .*, and must be written by one of write_preloaded_data_multi"
    ):
        serialization._in_one_process(AsyncRequest(functools.partial(print), (), []))


def save_of_0_16(state, folder, strategy=None, async_sharded_save=False, content_metadata=None):
    return "of 0.16"


def save_of_0_17(state, folder, strategy=None, async_sharded_save=False, content_metadata=None, async_strategy="nvrx"):
    return async_strategy


@pytest.mark.parametrize(("save", "strategy"), [(save_of_0_16, "of 0.16"), (save_of_0_17, "mcore")])
def test_saving_never_asks_for_nvidia_resiliency_ext(save, strategy, tmp_path, monkeypatch):
    monkeypatch.setattr(dist_checkpointing, "save", save)
    assert serialization._plan({}, tmp_path, fully_parallel=False) == strategy


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["weight", "common_state/shard_0_1"],
            "was written by megatron-core 0.19 or newer, which megatron-core .* cannot",
        ),
        (["weight"], "is incomplete, copy it again"),
    ],
)
@pytest.mark.parametrize(
    "error", [AttributeError("'str' object has no attribute 'iterdir'"), CheckpointingException("it does not exist")]
)
def test_a_checkpoint_of_a_newer_megatron_is_not_called_incomplete(keys, message, error, tmp_path, monkeypatch):
    def load(folder):
        try:
            return (tmp_path / "common.pt").read_bytes()
        except FileNotFoundError:
            # 0.16.1 trips over its own message here, later ones raise the intended one.
            raise error from None

    monkeypatch.setattr(dist_checkpointing, "load_common_state_dict", load)
    monkeypatch.setattr(serialization, "read_metadata", lambda source: dict.fromkeys(keys))
    with pytest.raises(InputError, match=message):
        serialization.read_common(tmp_path)


def test_a_checkpoint_that_lacks_a_shard_is_incomplete_whatever_it_keeps_there(tmp_path, monkeypatch):
    def load(folder):
        try:
            return (tmp_path / "__0_0.distcp").read_bytes()
        except FileNotFoundError as error:
            raise CheckpointingException("a shard is missing") from error

    monkeypatch.setattr(dist_checkpointing, "load_common_state_dict", load)
    monkeypatch.setattr(serialization, "read_metadata", lambda source: {"common_state/shard_0_1": None})
    with pytest.raises(InputError, match="is incomplete, copy it again"):
        serialization.read_common(tmp_path)


def test_megatrons_notes_to_every_run_about_its_plans_are_not_warnings(caplog):
    module = SimpleNamespace(__name__="megatron.core.models.test_notices")
    megatron_patches.silence_notices(module)
    logger = logging.getLogger(module.__name__)
    logger.warning("GPTModel IS DEPRECATED. GPTModel is only accepting critical bug fixes")
    logger.warning("a warning of a run")
    assert caplog.messages == ["a warning of a run"]
