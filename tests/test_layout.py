"""The layout stays as it was drawn: who imports whom, what lies where, which names are public, and that importing runs nothing."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

# what each package may import besides the standard library and itself
MAY_IMPORT = {
    "calc": {"pydantic", "numpy"},
    "calc/sources": {"calc", "pydantic", "numpy", "huggingface_hub", "gguf", "safetensors", "yaml"},
    "kernels": {"torch", "triton"},
    "measure": {
        *(
            "calc",
            "kernels",
            "torch",
            "triton",
            "transformers",
            "peft",
            "bitsandbytes",
            "pydantic",
            "numpy",
            "safetensors",
        ),
    },
    "pages": {"calc", "streamlit", "starlette", "plotly", "pandas", "pydantic", "app"},
    "app.py": {"calc", "pages", "streamlit"},
}
# the doors of calc import these inside the function that needs them, so that nothing else pays for it
INSIDE_FUNCTIONS_ONLY = {"calc/sources": {"huggingface_hub", "gguf", "safetensors", "numpy", "yaml"}}

TOP_LEVEL = {
    *("app.py", "calc", "kernels", "measure", "pages", "tests", "requirements.txt"),
    *("README.md", "docs", "CHANGELOG.md", "Makefile", "pyproject.toml", "LICENSE", ".streamlit", ".ci", ".gitignore"),
    *(".pre-commit-config.yaml", "CONTRIBUTING.md"),
}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


class Import(NamedTuple):
    file: str
    line: int
    package: str
    inside_function: bool


def name_called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def imports_of(source: str, file: str) -> Iterator[Import]:
    """Every package that a file imports, also by `importlib.import_module("...")`; relative imports stay in the package."""

    def visit(node: ast.AST, inside: bool) -> Iterator[Import]:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Call) and name_called(node) in ("import_module", "__import__"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        for name in names:
            yield Import(file, node.lineno, name.split(".")[0], inside)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(parsed(source), False)


def package_of(file: str) -> str:
    return max((package for package in MAY_IMPORT if file == package or file.startswith(package + "/")), key=len)


def python_files() -> list[Path]:
    files = [
        path for package in ("calc", "kernels", "measure", "pages") for path in sorted((ROOT / package).rglob("*.py"))
    ]
    return [*files, *ROOT.glob("app.py")]


def forbidden_imports(source: str, file: str) -> list[str]:
    """The imports that break the rules, each as one line."""
    package = package_of(file)
    own = package.split("/")[0].removesuffix(".py")
    wrong = []
    for found in imports_of(source, file):
        where = f"{file}:{found.line} imports {found.package}"
        if found.package in sys.stdlib_module_names or found.package == own:
            continue
        if found.package not in MAY_IMPORT[package]:
            wrong.append(f"{where}, and {package} may not")
        elif found.package in INSIDE_FUNCTIONS_ONLY.get(package, ()) and not found.inside_function:
            wrong.append(f"{where} at its top; {package} imports it inside the function that needs it")
    return wrong


def test_no_package_reaches_into_another():
    files = {path.relative_to(ROOT).as_posix(): path for path in python_files()}
    wrong = [line for file, path in files.items() for line in forbidden_imports(path.read_text("utf-8"), file)]
    assert files
    assert wrong == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("calc/units.py", "import torch"),
        ("calc/units.py", "def f():\n    from streamlit import cache_data"),
        ("calc/units.py", "import measure.devices"),
        ("calc/units.py", "import importlib\nimportlib.import_module('torch.nn')"),
        ("calc/sources/hub.py", "import huggingface_hub"),
        ("calc/parameters.py", "def f():\n    import gguf"),
        ("kernels/copy.py", "from calc.units import GB"),
        ("measure/devices.py", "import streamlit"),
        ("pages/kv_cache.py", "import measure.devices"),
        ("pages/ui/charts.py", "import torch"),
        ("app.py", "import measure"),
    ],
)
def test_the_rule_catches_a_package_that_reaches_into_another(file, source):
    assert len(forbidden_imports(source, file)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("calc/sources/hub.py", "def fetch():\n    import huggingface_hub"),
        ("calc/units.py", "import json\nfrom calc.errors import InputError\nfrom . import dtypes"),
        ("measure/run.py", "import torch\nfrom kernels.copy import copy\nfrom calc.units import GB"),
        ("pages/kv_cache.py", "if __name__ == '__main__':\n    from app import main\n    main()"),
    ],
)
def test_the_rule_allows_what_the_layout_allows(file, source):
    assert forbidden_imports(source, file) == []


CLASS_NAME = re.compile(r"\b[A-Z]\w+(For[A-Z]\w+|LMHeadModel)\b")
# where class names of transformers may stand: each fact about one has one place
CLASS_NAMES = ("calc/training/model_classes.py", "calc/model/families/")


def class_names(source: str) -> set[str]:
    """The class names of transformers among the strings of a file, its docstrings left out."""
    tree = parsed(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {found[0] for text in strings - docstrings for found in CLASS_NAME.finditer(text)}


def test_a_class_name_stands_in_its_table_and_nowhere_else():
    files = {path.relative_to(ROOT).as_posix(): path for path in python_files()}
    elsewhere = [file for file in files if not file.startswith(CLASS_NAMES)]
    names = {file: class_names(files[file].read_text(encoding="utf-8")) for file in elsewhere}
    found = {file: wrong for file, wrong in names.items() if wrong}
    assert found == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('OWN = frozenset({"FalconForCausalLM"})', {"FalconForCausalLM"}),
        ('if name == "GPT2LMHeadModel": pass', {"GPT2LMHeadModel"}),
        ('"""Falcon, FalconForCausalLM."""\nHEADS = ("ForCausalLM", "LMHeadModel")', set()),
    ],
)
def test_the_rule_tells_a_class_name_from_other_text(source, names):
    assert class_names(source) == names


PROGRAMS = ("transformers", "torchtitan", "megatron", "deepspeed")


def modules_imported(source: str) -> Iterator[str]:
    """Every module that a file imports from, also inside functions."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def programs_imported(source: str, program: str) -> set[str]:
    """The programs other than its own that a file of one program imports."""
    names = (module.split(".") for module in modules_imported(source))
    found = {parts[2] for parts in names if parts[:2] == ["calc", "training"] and len(parts) > 2}
    return (found & set(PROGRAMS)) - {program}


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_training_program_imports_another(program):
    files = sorted((ROOT / "calc" / "training" / program).rglob("*.py"))
    found = {file.name: programs_imported(file.read_text(encoding="utf-8"), program) for file in files}
    assert {name: others for name, others in found.items() if others} == {}


def test_what_every_training_program_needs_imports_none():
    files = [path for part in ("autograd", "states") for path in (ROOT / "calc" / "training" / part).rglob("*.py")]
    found = {file.name: programs_imported(file.read_text(encoding="utf-8"), "") for file in files}
    assert files
    assert {name: programs for name, programs in found.items() if programs} == {}


def test_the_rule_catches_a_program_that_imports_another():
    source = "def f():\n    from calc.training.transformers.attention import named"
    assert programs_imported(source, "torchtitan") == {"transformers"}
    assert programs_imported("from calc.training import megatron", "torchtitan") == {"megatron"}
    assert programs_imported(source, "transformers") == set()


MOST_MODULES = 20


def test_no_folder_holds_more_modules_than_one_can_read_down():
    folders = {path.parent for path in python_files() if path.parent.name != "families"} - {ROOT}
    counts = {
        folder.relative_to(ROOT).as_posix(): len([path for path in folder.glob("*.py") if path.stem != "__init__"])
        for folder in folders
    }
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_no_module_stands_next_to_a_package_of_its_name():
    """Python would import the package, and nobody the module."""
    assert [path for path in python_files() if path.with_suffix("").is_dir()] == []


def tracked_top_level() -> set[str]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode == 0 and listing.stdout:
        return {name.split("/")[0] for name in listing.stdout.decode().split("\0") if name}
    return {path.name for path in ROOT.iterdir()} & TOP_LEVEL  # an archive without its history


def test_the_top_level_holds_what_is_listed_and_nothing_else():
    assert tracked_top_level() - TOP_LEVEL == set()


PUBLIC = {  # what measure and pages may rely on
    "calc.pipeline": (
        "SCHEDULES ClosedForm Event PipelineAnswer PipelinePlan Schedule check_layout in_flight simulate weight_versions"
    ),
    "calc.serving": "ServingAnswer ServingPlan ServingSuggestions serve serve_and_suggest",
    "calc.training": "Suggested TrainingAnswer TrainingPlan suggest train train_and_suggest",
}


@pytest.mark.parametrize("package", PUBLIC)
def test_a_packages_public_names_are_pinned(package):
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(PUBLIC[package].split())
    assert all(hasattr(module, name) for name in module.__all__)


def modules() -> dict[str, Path]:
    """Every module of the four packages by its dotted name."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in python_files()}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imported_at_the_top(node: ast.AST, known: Collection[str]) -> Iterator[str]:
    """The known modules that importing a file imports: not what its functions import, nor what runs only as a script."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.If):
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            named = (f"{child.module}.{alias.name}" for alias in child.names)
            yield from {name if name in known else child.module for name in named} & set(known)
        yield from imported_at_the_top(child, known)


def circles(graph: dict[str, set[str]]) -> set[str]:
    """The names that reach themselves: what is left when all that import nothing of the rest are taken away, from both sides."""
    left = set(graph)
    while True:
        imported = {name for module in left for name in graph[module]}
        ends = {name for name in left if not graph[name] & left or name not in imported}
        if not ends:
            return left
        left -= ends


def test_no_modules_import_each_other_in_a_circle():
    known = modules()
    graph = {name: set(imported_at_the_top(parsed(path.read_text("utf-8")), known)) for name, path in known.items()}
    assert sum(map(len, graph.values())) > 500
    assert circles(graph) == set()


def test_a_circle_is_found_and_its_neighbours_are_not():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"b", "c"}
