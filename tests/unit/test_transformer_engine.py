"""TransformerEngine: which releases are used, and the signatures of the stand-in that tests build layers of.

    TRANSFORMER_ENGINE=FOLDER python -m pytest tests/unit/test_transformer_engine.py

compares the stand-in with the sources of a release: FOLDER holds its package `transformer_engine`.
"""

import ast
import importlib.util
import inspect
import os
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl import versions
from megatron_rl.command_line import parse as command_line
from megatron_rl.command_line import resolve
from tests import stand_in_transformer_engine as stand_in
from tests.command_lines import DENSE

NEEDS_SOURCES = pytest.mark.skipif(
    "TRANSFORMER_ENGINE" not in os.environ, reason="make test-clones TRANSFORMER_ENGINE=SOURCES runs it"
)
SOURCES = {
    stand_in.Linear: "module/linear.py",
    stand_in.LayerNormLinear: "module/layernorm_linear.py",
    stand_in.GroupedLinear: "module/grouped_linear.py",
    stand_in.RMSNorm: "module/rmsnorm.py",
    stand_in.FusedAdam: "optimizers/fused_adam.py",
}


@pytest.mark.parametrize(
    ("version", "has_torch_part", "refusal"),
    [
        (None, True, None),
        ("2.3.0", True, None),
        ("2.11.0+1a2b3c", True, None),
        ("2.20.2", True, None),
        ("2.2.0", True, "TransformerEngine 2.2.0 is not >=2.3,<3"),
        ("3.0.0", True, "TransformerEngine 3.0.0 is not >=2.3,<3"),
        ("2.11.0", False, "TransformerEngine 2.11.0 is installed without its part for torch"),
    ],
)
def test_another_release_and_one_without_its_part_for_torch_are_not_used(
    version: str | None, has_torch_part: bool, refusal: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleSpec("transformer_engine", None, is_package=True)
    folder = tmp_path / "transformer_engine"
    package.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", {"transformer_engine": package}.get)
    monkeypatch.setattr(versions, "installed_by_pip", lambda _: version)
    (folder / "wheel_lib").mkdir(parents=True)
    for place in (tmp_path, folder, folder / "wheel_lib") if has_torch_part else (None,):
        if place is not None:
            library = place / "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so"
            library.touch()
        assert versions.find_engine_refusal() == refusal
        if place is not None:
            library.unlink()


def test_transformer_engine_is_missing_here() -> None:
    assert versions.find_engine_refusal() == "TransformerEngine is not installed"


@pytest.mark.parametrize(
    ("words", "refusal", "impl", "notes"),
    [
        ("", None, None, []),
        ("", "it is too old", "local", ["layers are Megatron's own: it is too old"]),
        ("--transformer-impl local", "it is too old", "local", []),
        ("--transformer-impl local", None, "local", []),
        (
            "--transformer-impl transformer_engine",
            "it is too old",
            "local",
            ["without effect here, it is too old: --transformer-impl transformer_engine"],
        ),
    ],
)
def test_a_run_on_cuda_that_cannot_use_transformer_engine_says_why(
    words: str, refusal: str | None, impl: str | None, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "find_engine_refusal", lambda: refusal)
    able = SimpleNamespace(name="cuda", unsupported_fusions={})
    reading = command_line._read((*DENSE, *words.split()))
    fields = resolve.resolve_fields(reading.flags, reading.given, None, able)
    assert fields.transformer.get("transformer_impl") == impl
    assert [note for note in fields.notes if "too old" in note] == notes


@NEEDS_SOURCES
@pytest.mark.parametrize("kind", SOURCES, ids=lambda kind: kind.__name__)
def test_the_stand_in_has_the_released_signatures(kind: type) -> None:
    folder = Path(os.environ["TRANSFORMER_ENGINE"]) / "transformer_engine" / "pytorch"
    tree = ast.parse((folder / SOURCES[kind]).read_text())
    (released,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    for name in ("__init__", "forward"):
        found = [node for node in released.body if isinstance(node, ast.FunctionDef) and node.name == name]
        if found:
            assert _describe(inspect.signature(getattr(kind, name))) == _describe_source(found[0].args), name


@NEEDS_SOURCES
@pytest.mark.parametrize(
    ("function", "path"),
    [
        (stand_in.apply_rotary_pos_emb, "attention/rope.py"),
        (stand_in.get_dummy_wgrad, "module/base.py"),
    ],
)
def test_the_stand_ins_functions_have_the_released_signatures(function, path: str) -> None:
    folder = Path(os.environ["TRANSFORMER_ENGINE"]) / "transformer_engine" / "pytorch"
    tree = ast.parse((folder / path).read_text())
    (released,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function.__name__)
    assert _describe(inspect.signature(function)) == _describe_source(released.args)


def _describe(signature: inspect.Signature) -> list[tuple[str, str, bool]]:
    """Describe each parameter: its name, its kind, and whether it has a default."""
    return [
        (name, parameter.kind.description, parameter.default is not parameter.empty)
        for name, parameter in signature.parameters.items()
    ]


def _describe_source(arguments: ast.arguments) -> list[tuple[str, str, bool]]:
    kinds = inspect._ParameterKind
    placed = arguments.posonlyargs + arguments.args
    num_required = len(placed) - len(arguments.defaults)
    described = [
        (argument.arg, kinds.POSITIONAL_OR_KEYWORD.description, index >= num_required)
        for index, argument in enumerate(placed)
    ]
    if arguments.vararg:
        described.append((arguments.vararg.arg, kinds.VAR_POSITIONAL.description, False))
    described += [
        (argument.arg, kinds.KEYWORD_ONLY.description, default is not None)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        described.append((arguments.kwarg.arg, kinds.VAR_KEYWORD.description, False))
    return described
