"""Who may import whom: the table of docs/design.md, section 3, enforced on the source text."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "stoker"


@dataclass(frozen=True)
class Row:
    """Modules that do not know each other, and the third-party modules they may import.

    `eager` may be imported at the top of a module, `lazy` only in a function or for type checking.
    """

    modules: frozenset[str]
    eager: frozenset[str] = frozenset()
    lazy: frozenset[str] = frozenset()


def _row(modules: str, eager: str = "", lazy: str = "") -> Row:
    return Row(*(frozenset(names.split()) for names in (modules, eager, lazy)))


# From the bottom to the top; a module imports only from rows before its own.
ROWS = [
    _row("_native errors augmentations"),
    _row(
        "plan order stats cache machine genuine transport finding",
        "numpy platformdirs",
        "fsspec aiohttp",
    ),
    _row(
        "storage copies engine slots draws rules stock fields collate state vitals",
        "numpy torch PIL",
        "rich pynvml",
    ),
    _row(
        "sources fallback proof header shrink verdict",
        "numpy PIL torch platformdirs rich",
        "torchvision lmdb pyarrow datasets pillow_heif google_crc32c pycocotools zstandard",
    ),
    _row(
        "lower_augmentations startup crossing bad_samples contents ranges sampling "
        "environment links",
        "numpy torch PIL",
    ),
    _row(
        "lower feed keyed explanation trace transfer samplers rendezvous",
        "numpy torch PIL",
        "torchvision timm",
    ),
    _row("iterate tiers costs", "numpy torch PIL", "torchvision"),
    _row("epochs", "torch"),
    _row("loader prepared", "numpy torch"),
    _row(
        "patching ceilings tune pack info verify doctor metrics",
        "numpy torch PIL",
        "torchvision matplotlib ray",
    ),
    _row("diagnosis", "torch", "torch"),
    _row("run"),
    _row("watched"),
    _row("cli", "numpy torch PIL typer rich", "torchvision matplotlib"),
    _row("__main__"),
]

# Of rows that may know torch, these do not: plain memory in, plain memory out.
WITHOUT_TORCH = {"engine", "fallback", "storage", "copies"}

# Inside a row: the importing module, what it may import, and whether only inside a function.
WITHIN_A_ROW = [
    ("copies", "storage", "anywhere"),
    ("sources", "sources.*", "lazily"),
    ("sources.*", "sources.index", "anywhere"),
    ("sources.filelist", "sources.labels", "anywhere"),
    ("sources.*", "sources.detection", "anywhere"),
    ("sources.detection", "sources.filelist", "anywhere"),
    ("sources.detection", "sources.labels", "anywhere"),
    ("sources.voc", "sources.labels", "anywhere"),
    ("sources.boxtable", "sources.labels", "anywhere"),
    ("sources.*", "sources.shards", "anywhere"),
    ("sources.*", "sources.protobuf", "anywhere"),
    ("sources.*", "sources.columns", "anywhere"),
    ("sources.parquet", "sources.parquet_footer", "anywhere"),
    ("sources.parquet", "sources.parquet_pages", "anywhere"),
    ("sources.*", "sources.thrift", "anywhere"),
    ("sources.*", "sources.pickled", "anywhere"),
    ("sources.*", "sources.expanded", "anywhere"),
    ("trace.*", "trace.*", "anywhere"),
    ("cli", "cli.*", "anywhere"),
    ("cli.*", "cli.data", "anywhere"),
]


@dataclass(frozen=True)
class Import:
    """One imported module: `name` within stoker or of a third party, at `line`.

    `lazy`: inside a function or for type checking; `types_only`: for type checking.
    """

    name: str
    line: int
    lazy: bool
    types_only: bool


def _module_name(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_for_type_checking(node: ast.If) -> bool:
    return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imports(tree: ast.Module, module: str, is_package: bool) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, lazy: bool, types_only: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, lazy, types_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ["stoker", *module.split(".")] if module else ["stoker"]
            if not is_package:
                package.pop()
            start = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                inside = PACKAGE.parent.joinpath(*source.split("."), alias.name)
                is_module = inside.with_suffix(".py").exists() or inside.is_dir()
                is_module |= (source, alias.name) == ("stoker", "_native")
                name = f"{source}.{alias.name}" if is_module else source
                found.append(Import(name, node.lineno, lazy, types_only))
        types_only |= isinstance(node, ast.If) and _is_for_type_checking(node)
        lazy |= types_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            visit(child, lazy, types_only)

    visit(tree, False, False)
    return found


def _number_of_row(module: str) -> int | None:
    top = module.split(".")[0]
    return next((number for number, row in enumerate(ROWS) if top in row.modules), None)


def _matches(module: str, pattern: str) -> bool:
    if pattern.endswith(".*"):
        return module.startswith(pattern[:-1])
    return module == pattern


def _fault(module: str, imported: Import) -> str | None:
    """Returns what is wrong with one import, or None."""
    number = _number_of_row(module)
    assert number is not None
    row = ROWS[number]
    top = imported.name.split(".")[0]
    if top != "stoker":
        if top in sys.stdlib_module_names:
            return None
        if top == "torch" and module in WITHOUT_TORCH:
            return "imports torch"
        if top in row.eager or (imported.lazy and top in row.lazy):
            return None
        return f"imports {top}" + ("" if top not in row.lazy else " at the top")
    target = imported.name.removeprefix("stoker").removeprefix(".")
    if not target:
        # The public names are for users; the command line is one.
        return None if module.startswith("cli") else "imports the public package"
    if target == "_native" and module != "engine" and not imported.types_only:
        return "imports _native, which only engine may"
    other = _number_of_row(target)
    if other is None:
        return f"imports {target}, which is in no row"
    if other < number:
        return None
    if other == number and any(
        _matches(module, user) and _matches(target, used) and (when == "anywhere" or imported.lazy)
        for user, used, when in WITHIN_A_ROW
    ):
        return None
    return f"imports {target} of row {other} from row {number}"


def _modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", _modules(), ids=_module_name)
def test_module_imports_only_from_lower_rows(path: Path) -> None:
    module = _module_name(path)
    assert _number_of_row(module) is not None, f"{module} is in no row of the table: add it"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    faults = [
        f"{path.relative_to(ROOT)}:{imported.line}: {fault}"
        for imported in _imports(tree, module, path.name == "__init__.py")
        if (fault := _fault(module, imported))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("order", "from stoker.loader import DataLoader", "imports loader of row"),
        ("order", "from stoker.plan import Plan", "imports plan of row"),
        ("order", "def f():\n    import torch", "imports torch"),
        ("fallback", "import torch", "imports torch"),
        ("lower", "import torchvision", "imports torchvision at the top"),
        ("lower", "from stoker import _native", "only engine may"),
        ("lower", "import stoker", "the public package"),
        ("sources", "import stoker.sources.index", "imports sources.index of row"),
        ("slots", "import torch", None),
        ("engine", "from stoker import _native", None),
        (
            "lower",
            "if TYPE_CHECKING:\n    import torchvision",
            None,
        ),
        ("sources", "def f():\n    import stoker.sources.index", None),
        ("cli.bench", "from stoker.cli.data import resolve", None),
        ("cli.bench", "from stoker.cli.parity import parity", "imports cli.parity of row"),
    ],
)
def test_the_rules_themselves(module: str, source: str, fault: str | None) -> None:
    faults = [_fault(module, found) for found in _imports(ast.parse(source), module, False)]
    told = [text for text in faults if text]
    if fault is None:
        assert not told
    else:
        assert len(told) == 1
        assert fault in told[0]


def test_import_stays_light() -> None:
    heavy = ["torchvision", "lmdb", "pyarrow", "fsspec", "timm", "typer"]
    # torch itself may bring fsspec in; what counts is what stoker adds.
    code = (
        "import sys, torch, torch.utils.data; before = set(sys.modules); import stoker; "
        f"print([m for m in {heavy!r} if m in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_import_does_no_work() -> None:
    """No output, no warning filter, no log handler, no thread."""
    code = (
        "import logging, threading, torch.utils.data, warnings; "
        "before = list(warnings.filters), list(logging.root.handlers), threading.active_count(); "
        "import stoker; "
        "after = list(warnings.filters), list(logging.root.handlers), threading.active_count(); "
        "assert before == after, (before, after)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr == ""


def test_only_bindings_include_nanobind() -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "native").rglob("*.[ch]pp")
        if "nanobind/" in path.read_text(encoding="utf-8")
    }
    assert users == {"native/bindings.hpp"}
