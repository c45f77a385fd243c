"""Breaches of the layers of a source tree, found in the imports of its files."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "megatron_rl"
_NAMED = re.compile(rf"{PACKAGE}(\.[a-z_]+)+(:\w+)?")

# The floors of the package, the lowest first: its folders, and the files next to them. A part imports lower floors and
# itself, at any place in a file. A name with a dot is a part of a folder whose parts are on several floors.
LAYERS = (
    {"errors", "types"},
    {"versions", "flag"},
    {"code_files", "confined", "flag_parser"},
    {"algorithm"},
    {"config", "ops"},
    {"platforms"},
    {"shared.protocol", "shared.weights", "shared.chat", "shared.garbage"},
    {"shared.records", "shared.device_memory"},
    {"rewards", "tool_calls"},
    {"environments"},
    {"gateway"},
    {"trainer.data"},
    {"observe"},
    {"sidecar", "trainer.mcore"},
    {"command_line"},
    {"trainer.loop"},
    {"tinker"},
    {"trainer.recipe"},
    {"recipe", "__main__"},
    {"analysis", "commands", "drift", "launch", "migrate", "verify"},
    {"cli"},
    {"api"},
)
# Folders in which a file imports the folder's own `__init__.py`, which imports the file.
CIRCLES_IN = {
    "ops.sampled": "the type of the result is in the interface, and the naive twin makes it",
    "ops.slices": "the types of slices are in the interface, and its implementations are checked with them",
}
# Packages that belong to some parts only. What is not listed may be imported anywhere.
OWNERS = {
    "megatron": {"platforms", "shared.weights", "trainer.mcore", "trainer.recipe"},
    "megatron.training": {"trainer.recipe"},
    "mindspeed": {"platforms"},
    "torch_npu": {"platforms", "ops"},
    "vllm": {"sidecar", "trainer.mcore", "verify"},
    "ray": {"sidecar"},
    "triton": {"ops"},
    "flash_attn": {"ops"},
}
# Parts, or files in a part, that must do without torch.
WITHOUT_TORCH = (
    "errors", "types", "versions", "flag", "flag_parser", "code_files", "config", "algorithm.settings",
    "algorithm.library", "algorithm.declaration", "cli", "commands.doctor", "observe", "shared.weights.families",
    "shared.device_memory",
    "trainer.loop.entry", "trainer.loop.lifelines", "trainer.loop.watch",
)  # fmt: skip
# Modules of which others import no name: that they are imported is what they are for.
ACTS_WHEN_IMPORTED = {"megatron_rl.verify.verl"}
# Parts that may name the kinds of accelerators.
KNOWS_DEVICES = {"platforms", "ops"}


@dataclasses.dataclass(frozen=True)
class Import:
    """A module that a file imports, and whether this happens when the file itself is imported."""

    module: str
    line: int
    at_top: bool
    for_types: bool = False
    """Only a type checker imports it."""


def violations(root: Path) -> list[str]:
    """List the breaches in the tree below `root`, which holds the folder of the package; one sentence each."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = _module_name(path.relative_to(root))
        # A literal of importlib is also a name.
        messages = dict.fromkeys(
            (*_import_violations(name, tree), *_device_violations(name, tree), *_effects(name, tree))
        )
        found += [f"{path.relative_to(root)}:{line}: {message}" for line, message in messages]
    return found + list(_circles(root))


def imports(tree: ast.Module, by_name: bool = False) -> Iterator[Import]:
    """Yield the imports of a file, including those by a literal name through importlib.

    With `by_name`, yield also the modules of the package that literals name, as tables of optional parts do.
    """
    inner = {id(node) for function in _functions(tree) for node in ast.walk(function) if node is not function}
    typed = {id(node) for block in ast.walk(tree) if _is_for_types(block) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # `from package import part` may import a module or a name; the longer form covers both.
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node) == "import_module" and isinstance(node.args[0], ast.Constant):
            modules = [str(node.args[0].value)]
        elif by_name and isinstance(node, ast.Constant) and _NAMED.fullmatch(str(node.value)):
            modules = [str(node.value).partition(":")[0]]
        else:
            continue
        for module in modules:
            yield Import(module, node.lineno, id(node) not in inner, id(node) in typed)


def _circles(root: Path) -> Iterator[str]:
    """Yield the circles between files and folders of the same folder; an import at any place in a file counts.

    Files that import each other in a circle belong to two such members of a folder. A program (`__main__.py`) is in
    none, because no file imports it.
    """
    paths = [path for path in sorted((root / PACKAGE).rglob("*.py")) if path.stem != "__main__"]
    files = {_module_name(path.relative_to(root)): path for path in paths}
    graphs: dict[str, dict[str, set[str]]] = {}
    for path in files.values():
        for imported in imports(ast.parse(path.read_text(encoding="utf-8"))):
            target = files.get(imported.module) or files.get(imported.module.rpartition(".")[0])
            if target is None or target == path:
                continue
            sides = path.relative_to(root).with_suffix("").parts, target.relative_to(root).with_suffix("").parts
            depth = next(index for index, (here, there) in enumerate(zip(*sides, strict=False)) if here != there)
            folder, importer, member = ".".join(sides[0][1:depth]), sides[0][depth], sides[1][depth]
            graphs.setdefault(folder, {}).setdefault(importer, set()).add(member)
    for folder, graph in sorted(graphs.items()):
        members = _members_of_circles(graph)
        if members and folder not in CIRCLES_IN:
            names = ", ".join(sorted(members))
            yield f"{'/'.join((PACKAGE, *filter(None, folder.split('.'))))}: {names} import each other in a circle"


def _members_of_circles(graph: dict[str, set[str]]) -> set[str]:
    """Return the members of circles, and the members on a way from one circle to another."""
    left = set(graph)
    while True:
        imported = {member for importer in left for member in graph[importer]}
        kept = {member for member in left & imported if graph[member] & left}
        if kept == left:
            return left
        left = kept


def part_of(module: str) -> str | None:
    """Return the part of our package that a module belongs to; None for the package itself and for others."""
    package, _, rest = module.partition(".")
    if package != PACKAGE:
        return None
    if rest.endswith(".__main__"):
        # A program of its own, which may start what is above its folder.
        return "__main__"
    inner = [part for layer in LAYERS for part in layer if "." in part and f"{rest}.".startswith(f"{part}.")]
    return inner[0] if inner else rest.split(".")[0] or None


def _import_violations(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    part = part_of(name)
    if part is None:
        return
    if name == f"{PACKAGE}.{part}" and any(known.startswith(f"{part}.") for layer in LAYERS for known in layer):
        # The file of a folder that only holds parts: it has a docstring.
        return
    if _layer(part) is None:
        yield 1, f"{part} is in no layer; put it into LAYERS of tests/layering.py"
        return
    for imported in imports(tree, by_name=True):
        target = part_of(imported.module)
        message = _between_parts(part, target) if target is not None else _from_outside(name, part, imported)
        if message:
            yield imported.line, message


def _between_parts(part: str, target: str) -> str | None:
    layer, target_layer = _layer(part), _layer(target)
    if target_layer is None or part == target:
        return None
    assert layer is not None
    return None if target_layer < layer else f"{part} imports {target}, which is not below it"


def _from_outside(name: str, part: str, imported: Import) -> str | None:
    package = imported.module.split(".")[0]
    for owned, owners in OWNERS.items():
        if f"{imported.module}.".startswith(f"{owned}.") and part not in owners:
            return f"{part} imports {owned}, which only {', '.join(sorted(owners))} may"
    if package == "megatron" and part == "platforms" and imported.at_top:
        return "platforms imports megatron outside of a function"
    module = name.removeprefix(f"{PACKAGE}.")
    if (
        package == "torch"
        and not imported.for_types
        and any(module == free or module.startswith(f"{free}.") for free in WITHOUT_TORCH)
    ):
        return f"{module} imports torch, and must do without"
    return None


def _device_violations(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if part_of(name) in KNOWS_DEVICES:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "npu"):
            yield node.lineno, f"says .{node.attr}; ask the platform"
    for imported in imports(tree):
        if imported.module.startswith(("torch.cuda", "torch.npu")):
            yield imported.line, f"imports {imported.module}; ask the platform"


def _effects(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the statements that do more than define when the module is imported."""
    if name in ACTS_WHEN_IMPORTED:
        return
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if all(isinstance(target, ast.Name | ast.Tuple) for target in targets):
                continue
        if _is_for_types(node) or (isinstance(node, ast.If) and "__name__" in ast.dump(node.test)):
            continue
        if isinstance(node, ast.Try) and all(isinstance(inner, ast.Import | ast.ImportFrom) for inner in node.body):
            continue
        yield node.lineno, f"importing the module runs: {ast.unparse(node).splitlines()[0]}"


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _functions(tree: ast.Module) -> Iterator[ast.AST]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _layer(part: str) -> int | None:
    return next((index for index, layer in enumerate(LAYERS) if part in layer), None)


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
