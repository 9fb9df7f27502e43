"""The rooms of DESIGN section 2, read from the file list and the AST; nothing of ours is imported here.

Each rule is a function on paths or source text, so the tests below can also feed it what it must catch.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {".ci", "eagle3", "kernels", "infer", "train", "recipes", "tests", "notebooks", "docs"}
PACKAGES = {
    "eagle3": "eagle3",
    "eagle3_kernels": "kernels/eagle3_kernels",
    "eagle3_infer": "infer/eagle3_infer",
    "eagle3_train": "train/eagle3_train",
    "eagle3_recipes": "recipes/eagle3_recipes",
}
# package -> packages of ours that it may import; scripts, tests and notebooks may import all
ARROWS = {
    "eagle3_kernels": set(),
    "eagle3": {"eagle3_kernels"},
    "eagle3_infer": {"eagle3", "eagle3_kernels"},
    "eagle3_train": {"eagle3", "eagle3_kernels"},
    # settings alone: what runs is a subprocess
    "eagle3_recipes": {"eagle3", "eagle3_infer", "eagle3_train"},
}
# extras of pyproject.toml: the other packages run without them, and no file of eagle3 knows a tracker
TRAINING_ONLY = {"accelerate", "bitsandbytes", "datasets", "deepspeed", "psutil", "tensorboard", "trackio", "wandb"}
KERNELS_MAY_IMPORT = {"torch", "triton"}
SCRIPTS = {
    "train": {
        "bench_ttt.py",
        "build_vocab_map.py",
        "dump_features.py",
        "export_draft.py",
        "prepare_data.py",
        "regenerate.py",
        "train_draft.py",
    },
    "kernels": {"bench_kernels.py", "gpu_check.py"},
    "recipes": {"run_ablations.py"},
    "recipes/peers": {"compare_learning.py", "train_speculators.py"},
    "infer": set(),
}
# everything importable from a source root that is not one of the packages
NOT_FOR_IMPORT = {"tests", "oracles", "recipes", "notebooks"} | {
    name.removesuffix(".py") for names in SCRIPTS.values() for name in names
}
BARE_FOLDERS = {"kernels", "train", "infer", "recipes", "tests", "notebooks"}
NAMELESS = {"utils.py", "helpers.py", "common.py"}


def repository_files() -> list[str]:
    """Paths relative to the root that git tracks or would track; all files where there is no git."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0 and (ROOT / ".git").exists():
        return [line for line in listing.stdout.splitlines() if (ROOT / line).is_file()]
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [p.as_posix() for p in paths if p.parts[0] in FOLDERS or len(p.parts) == 1]


FILES = repository_files()


def imports(source: str) -> Iterator[str]:
    """Top-level names that the source imports: statements anywhere in it, and import_module("literal")."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.split(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.split(".")[0]
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if getattr(
                function, "attr", getattr(function, "id", "")
            ) in {"import_module", "__import__"}:
                yield name.split(".")[0]


def owner(path: str) -> str | None:
    """The package of ours that the file belongs to; None for scripts, recipes, tests."""
    for package, folder in PACKAGES.items():
        if path.startswith(f"{folder}/"):
            return package
    return None


def wrong_imports(path: str, source: str) -> list[str]:
    """Imports of one Python file that go against the arrows."""
    package = owner(path)
    found = set(imports(source))
    if package is None:
        in_tests = path.startswith("tests/")
        return sorted(found & (NOT_FOR_IMPORT - {"oracles"} if in_tests else NOT_FOR_IMPORT))
    wrong = found & (set(PACKAGES) - ARROWS[package] - {package}) | found & NOT_FOR_IMPORT
    if package != "eagle3_train":
        wrong |= found & TRAINING_ONLY
    if package == "eagle3_kernels":
        wrong |= found - set(sys.stdlib_module_names) - KERNELS_MAY_IMPORT - {package}
    return sorted(wrong)


def misplaced(path: str) -> str | None:
    """Why a file may not lie where it lies."""
    parts = path.split("/")
    if len(parts) > 1 and parts[0] not in FOLDERS:
        return f"top-level folder {parts[0]} is not one of {sorted(FOLDERS)}"
    if parts[-1] in NAMELESS:
        return "names nothing: split it and name each part by its verb"
    if len(parts) == 1:
        return "Python file at the root" if path.endswith(".py") else None
    if len(parts) == 2 and parts[0] in BARE_FOLDERS and parts[1] == "__init__.py":
        return f"{parts[0]}/ must stay a bare folder, else it hides packages of PyPI"
    folder = "/".join(parts[:-1])
    beside = parts[0] in SCRIPTS and path.endswith(".py") and owner(path) is None
    if beside and parts[-1] not in SCRIPTS.get(folder, set()):
        return f"no script of {folder}/: of Python files {sorted(SCRIPTS.get(folder, set()))} may lie there"
    return None


def test_imports_go_one_way():
    wrong = {
        path: names
        for path in FILES
        if path.endswith(".py") and (names := wrong_imports(path, (ROOT / path).read_text()))
    }
    assert not wrong


def test_files_lie_where_they_may():
    assert not {path: reason for path in FILES if (reason := misplaced(path))}


def test_packages_have_an_init():
    for folder in PACKAGES.values():
        assert f"{folder}/__init__.py" in FILES


@pytest.mark.parametrize(
    "path, source",
    [
        ("eagle3_kernels", "import eagle3"),
        ("eagle3_kernels", "from transformers import LlamaConfig"),
        ("eagle3", "from eagle3_train.ttt import rollout"),
        ("eagle3", "def f():\n    import eagle3_infer.engine"),
        ("eagle3", "import wandb"),
        ("eagle3_infer", "from eagle3_train import data"),
        ("eagle3_infer", "import importlib\nimportlib.import_module('eagle3_train.data')"),
        ("eagle3_infer", "import accelerate"),
        ("eagle3_infer", "from oracles.chain import draft"),
        ("eagle3_train", "if TYPE_CHECKING:\n    from eagle3_infer.engine import Engine"),
        ("eagle3_train", "import train_draft"),
        ("eagle3_train", "from eagle3_recipes import sweep"),
        ("eagle3_recipes", "import run_ablations"),
        ("eagle3_recipes", "import wandb"),
        ("eagle3_train", "from tests.oracles import chain"),
    ],
)
def test_a_wrong_import_is_caught(path, source):
    assert wrong_imports(f"{PACKAGES[path]}/some/file.py", source)


@pytest.mark.parametrize(
    "path, source",
    [
        ("train/train_draft.py", "import recipes"),
        ("train/prepare_data.py", "import train_draft"),
        ("tests/infer/test_engine.py", "from train_draft import main"),
    ],
)
def test_a_wrong_import_of_a_script_is_caught(path, source):
    assert wrong_imports(path, source)


@pytest.mark.parametrize(
    "path, source",
    [
        ("kernels/eagle3_kernels/build_tree/kernel.py", "import math\nimport triton\nfrom . import reference"),
        ("eagle3/target.py", "import torch\nimport eagle3_kernels\nfrom eagle3.errors import Eagle3Error"),
        ("train/eagle3_train/data.py", "import datasets\nfrom eagle3 import vocab"),
        ("train/regenerate.py", "import eagle3_infer\nimport eagle3_train"),
        ("tests/infer/test_engine.py", "from oracles.chain import draft\nimport eagle3_train"),
    ],
)
def test_a_right_import_is_let_through(path, source):
    assert not wrong_imports(path, source)


@pytest.mark.parametrize(
    "path",
    [
        "kernels/__init__.py",
        "train/__init__.py",
        "tests/__init__.py",
        "train/datasets.py",
        "train/lib/loop.py",
        "train/peers/compare_learning.py",
        "recipes/peers/utils.py",
        "recipes/peers/anything.py",
        "infer/run.py",
        "eagle3/utils.py",
        "tests/infer/common.py",
        "src/eagle3/target.py",
        "setup.py",
    ],
)
def test_a_misplaced_file_is_caught(path):
    assert misplaced(path)


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "tests/eagle3/test_target.py",
        "train/train_draft.py",
        "recipes/base/a.yaml",
        "recipes/peers/compare_learning.py",
        ".ci/run",
    ],
)
def test_a_well_placed_file_is_let_through(path):
    assert misplaced(path) is None


def run_python(code: str) -> str:
    """Output of a fresh interpreter that sees the source roots."""
    roots = [str(ROOT), *(str(ROOT / folder) for folder in ("kernels", "infer", "train", "recipes"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LIGHT = ("eagle3", "eagle3.embedded", "eagle3.config", "eagle3.chats", "eagle3_infer.cli", "eagle3_recipes.stages")


@pytest.mark.parametrize("module", LIGHT)
def test_import_is_light(module):
    """`eagle3-infer --help` answers at once."""
    heavy = {"torch", "transformers", "triton", "datasets", "accelerate", "gguf"}
    assert run_python(f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_kernels_import_without_triton():
    """Only kernel.py may need Triton, and nothing imports it before an op dispatches to it."""
    names = [
        path.removeprefix("kernels/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in FILES
        if path.startswith("kernels/eagle3_kernels/") and path.endswith(".py") and "kernel.py" not in path
    ]
    lines = ["import sys, importlib", "sys.modules['triton'] = None"]
    lines += [f"importlib.import_module({name!r})" for name in names]
    run_python("\n".join(lines))
