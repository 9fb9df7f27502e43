"""The pages tell the truth: every command runs or is read by its real parser, every name, default and link exists.

Commands run in a workshop: a temporary folder in which what the pages name (MODEL, prompts.jsonl, a trained head, ...)
is there, and tiny. The tables below say what is changed about a command, and which ones are parsed alone and why.
"""

import dataclasses
import importlib
import json
import re
import shutil
from functools import cache
from importlib.util import find_spec
from urllib.parse import urlparse

import pytest
import torch
import yaml

from eagle3.checkpoint.export import ENGINES
from eagle3.checkpoint.reference import save_head
from eagle3.config import field_names, load_config
from eagle3.target import Target
from eagle3_infer.flags import build_parser
from eagle3_infer.models import random_head
from eagle3_infer.prompts import parse_prompt
from eagle3_infer.tune_flags import build_tune_parser
from eagle3_recipes.plan import Options, plan
from eagle3_recipes.sweep import read_sweep
from eagle3_train.chats import parse_chat
from eagle3_train.config import TrainConfig
from eagle3_train.regenerate_config import RegenerateConfig
from oracles.commands import PROGRAMS, perform
from oracles.pages import PAGES, ROOT, anchors, blocks, inline_code, links, name_of, prose, table_rows
from oracles.tiny import tiny_chats, tiny_folder

# what stands on the pages -> what is run; all else that they name lies in the workshop under its name
SUBSTITUTIONS = {
    r"smollm2-135m-instruct": "MODEL",
    r"infer/eagle3_infer/assets/head": "HEAD",
    r"(--max-new-tokens |max_new_tokens=)\d+": r"\g<1>6",
    r"--self \d+": "--self 2",
    # the chats of the workshop stay what they are
    r"--output chats.jsonl": "--output replies.jsonl",
    r"--head.draft_vocab_size \d+": "--head.draft_vocab_size 48",
    # the shell's own variables and substitutions
    r"\$\(\([^)]*\)\)|\$\([^)]*\)|\$\w+": "2",
}
# command -> why its parsers read it and it is not run
PARSED_ONLY = {
    r"^make ": "minutes: make reads its rules (make -n)",
    r"\bpip (un)?install|-m venv": "installs: pip's own parser reads it, and the extras must exist",
    r"^torchrun|^srun|--num_processes|cpu2.yaml": "several processes: tests/train/test_parallel.py runs such",
    r"hub:": "a data set of the hub, which needs the network",
    r"bench_kernels.py --op": "needs a GPU",
    r"eagle3_kernels.testing": "a minute of compilation: tests/kernels/test_compile.py runs it",
    r"bench_ttt.py": "minutes of timing: tests/train/test_bench_ttt.py runs it with --tiny",
    r"-m pytest": "another test, in its turn",
    r"--server": "a server: tests/infer/test_server.py has one",
    r"--log_with": "a tracker that is not everywhere: tests/train/test_trainer.py runs it",
}
# other programs' flags that the pages name
FOREIGN = {"--enable-metrics": "SGLang's"}
LANGUAGES = {"sh", "python", "yaml", "jsonl", "text"}
BLOCKS = [block for page in PAGES for block in blocks(page)]
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"runs"}


def of(language):
    return [block for block in BLOCKS if block.language == language]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A folder that holds the repository's, and what the pages name."""
    folder = tmp_path_factory.mktemp("workshop")
    for name in ("train", "recipes", "kernels", "infer", "constraints.txt", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    tiny_folder(folder / "MODEL")
    (folder / "Qwen").mkdir()
    (folder / "Qwen/Qwen3-1.7B").symlink_to(folder / "MODEL")
    save_head(folder / "HEAD", random_head(Target.load(folder / "MODEL")), torch.float32)
    tiny_chats(folder / "chats.jsonl", folder / "MODEL", count=8, new_tokens=10)
    asked = [{"prompt": "One"}, {"question_id": 81, "category": "c", "turns": ["Two", "Three"]}]
    for name in ("prompts.jsonl", "mine.jsonl", "mt_bench.jsonl"):
        (folder / name).write_text("\n".join(map(json.dumps, asked)), encoding="utf-8")
    shutil.copy(ROOT / "recipes/base/smollm2-135m-demo.yaml", folder / "RECIPE.yaml")
    return folder


@pytest.fixture
def at_work(workshop, monkeypatch):
    """In the workshop, without what an earlier block made."""
    for made in ("runs", "features", "exported", "charts"):
        shutil.rmtree(workshop / made, ignore_errors=True)
    for pattern in ("replies*", "selfgen*", "report*", "tuned*"):
        for made in workshop.glob(pattern):
            made.unlink()
    # the head that the Python blocks load by name
    shutil.copytree(workshop / "HEAD", workshop / "runs/qwen3/best")
    monkeypatch.chdir(workshop)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def substituted(text):
    for found, meant in SUBSTITUTIONS.items():
        text = re.sub(found, meant, text)
    return text


def test_every_block_says_what_it_is():
    """Catches: a command in a block that no test looks at."""
    assert not {str(block): block.language for block in BLOCKS if block.language not in LANGUAGES}


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_commands(block, at_work):
    for command in block.commands():
        parse_only = any(re.search(pattern, command) for pattern in PARSED_ONLY)
        undrawn = "--plot" in command and find_spec("matplotlib") is None
        perform(substituted(command), parse_only or undrawn)


@pytest.mark.parametrize("page", sorted({block.page for block in of("python")}))
def test_python(page, at_work):
    """The blocks of a page, one after the other, as a reader would type them."""
    names = {"__name__": "__docs__"}
    for block in of("python"):
        if block.page == page:
            exec(compile("\n" * (block.line - 1) + substituted(block.text), ROOT / page, "exec"), names)


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_settings(block, tmp_path):
    """A recipe on a page holds the trainer's settings; a sweep is one that can be planned."""
    (tmp_path / "base").symlink_to(ROOT / "recipes/base")
    file = tmp_path / "ablations/page.yaml"
    file.parent.mkdir()
    file.write_text(block.text, encoding="utf-8")
    if "variants:" in block.text:
        assert len(plan(read_sweep(file), Options(tmp_path))) > 1
    else:
        load_config(TrainConfig, ["--config", str(file)])


@pytest.mark.parametrize("block", of("jsonl"), ids=str)
def test_rows(block):
    """A row on a page is a chat with a reply, or a prompt."""
    for line in block.text.splitlines():
        row = json.loads(line)
        if "choices" in row or "conversations" in row or "assistant" in line:
            parse_chat(row, str(block))
        else:
            parse_prompt(line, str(block), "1")


def test_no_entry_is_stale():
    """Catches: a table that speaks of commands which no page has any more."""
    commands = [command for block in of("sh") for command in block.commands()]
    texts = [block.text for block in of("python")] + commands
    unused = [pattern for pattern in PARSED_ONLY if not any(re.search(pattern, command) for command in commands)]
    assert not unused + [pattern for pattern in SUBSTITUTIONS if not any(re.search(pattern, text) for text in texts)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_the_text(page, at_work):
    """Catches: a flag in a sentence that its command does not have."""
    for code in inline_code(page):
        if code.split()[0] in PROGRAMS and len(code.split()) > 1:
            perform(substituted(code.replace(" ...", "")), parse_only=True)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_exist(page):
    """Catches: a flag, a setting, a file or a module that a page names and nobody has."""
    wrong = []
    for code in inline_code(page):
        wrong += [flag for flag in re.findall(r"(?<![\w-])--[\w.-]+", code) if flag not in known_flags()]
        groups = {name.partition(".")[0] for name in defaults() if "." in name}
        named = re.findall(rf"(?<![\w./-])(?:{'|'.join(groups)})\.[a-z_0-9]+(?![\w./(])", code)
        wrong += [name for name in named if name not in defaults()]
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", code) and code.split("/")[0] in FOLDERS and not (ROOT / code).exists():
            wrong.append(code)
        if re.fullmatch(r"(eagle3|eagle3_\w+)(\.\w+)+", code) and not importable(code):
            wrong.append(code)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_defaults_are_those_of_the_code(page):
    """Of tables of settings or flags, and of a number in brackets behind a setting's name."""
    told = []
    for kind in ("setting", "flag"):
        for names, values, *_ in table_rows(page, kind, "default"):
            several = values.split(", ") if values.count(", ") == names.count(", ") else [values] * 9
            told += zip(re.findall(r"`(?:--)?(.+?)`", names), several, strict=False)
    told += re.findall(r"`(?:--)?([\w.]+)` \((\d[\d.]*)\)", prose(page))
    assert not [(name, value) for name, value in told if plain(yaml.safe_load(value)) not in defaults().get(name, [])]


def test_every_flag_and_setting_is_on_a_page():
    """Catches: one that is new, and that nobody reads of."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    words = set(re.findall(r"(?<![\w.-])[\w.-]*\w", text))
    parsers = build_parser(), build_tune_parser()
    flags = {flag for parser in parsers for flag in parser._option_string_actions} - {"-h", "--help"}
    names = flags | field_names(TrainConfig)
    assert not sorted(name for name in names if not {name, f"--{name}"} & words)


def test_engines_read_what_the_page_says():
    """Catches: an option of a head that an engine reads, or no longer, under a table that says otherwise."""
    page = ROOT / "docs/checkpoints.md"
    told = {
        cells[0].split(" (")[0]: set(re.findall(r"`head\.(\w+)`", cells[2])) for cells in table_rows(page, "engine")
    }
    assert told == {form.engine.split(" (")[0]: set(form.options) for form in ENGINES.values()}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links(page):
    """Every file and anchor is there; addresses are whole."""
    wrong = []
    for link in links(page):
        address = urlparse(link)
        there = (page.parent / address.path).resolve() if address.path else page
        if address.scheme:
            found = address.scheme in ("http", "https") and "." in address.netloc
        else:
            found = there.exists() and (not address.fragment or address.fragment in anchors(there))
        wrong += [] if found else [link]
    assert not wrong


@pytest.mark.parametrize(
    "command",
    [
        "eagle3-infer --tree-dept 3",
        "python train/train_draft.py --config recipes/base/smollm2-135m.yaml --optim.rate 1",
        "python train/train_drafts.py",
        "accelerate launch --config_file recipes/accelerate/none.yaml train/train_draft.py",
        "torchrun --processes 2 train/train_draft.py",
        "make demos",
        "pip install '.[trainer]'",
        "frobnicate --hard",
    ],
)
def test_a_wrong_command_is_seen(command, at_work):
    """Catches: parsers that let everything through."""
    with pytest.raises((Exception, SystemExit)):
        perform(command, parse_only=True)


def test_a_wrong_name_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title\n\n[a](#a-title) [b](#b) `code [c](#c)` ![d](e.png)\n", encoding="utf-8")
    assert links(page) == ["#a-title", "#b", "e.png"] and anchors(page) == {"a-title"}
    assert "--tree-depth" in known_flags() and "--tree-dept" not in known_flags()
    assert importable("eagle3_infer.generator") and not importable("eagle3_infer.generators")
    assert defaults()["optim.lr"] == [plain(1e-3)] and defaults()["temperature"] == ["0.0", "0.8"]


def plain(value):
    """A default as pages write it, whatever holds it."""
    if isinstance(value, list | tuple):
        return ",".join(map(plain, value))
    return str(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


@cache
def defaults():
    """Name of a setting or flag -> its defaults, of all our commands."""
    found = {}

    def add(config, prefix=""):
        for field in dataclasses.fields(config):
            value, name = getattr(config, field.name), prefix + field.name
            found.setdefault(name, []).append(plain(value))
            if dataclasses.is_dataclass(value):
                add(value, f"{name}.")

    for flag, action in build_parser()._option_string_actions.items():
        found.setdefault(flag.lstrip("-"), []).append(plain(action.default))
    add(TrainConfig())
    add(RegenerateConfig(self=1))
    return found


@cache
def known_flags():
    """Of all our commands, of the launchers and of pip."""
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    parsers = build_parser(), build_tune_parser(), launch_command_parser(), get_args_parser()
    flags = {flag for parser in parsers for flag in parser._option_string_actions} | {"--config", *FOREIGN}
    flags |= {f"--{name}" for config in (TrainConfig, RegenerateConfig) for name in field_names(config)}
    scripts = [path for folder in ("train", "kernels", "recipes") for path in (ROOT / folder).glob("*.py")]
    for script in [*scripts, ROOT / "kernels/eagle3_kernels/testing.py", *(ROOT / "recipes/peers").glob("*.py")]:
        source = script.read_text(encoding="utf-8")
        # argparse's, and the fields of a script's own settings
        flags |= set(re.findall(r'"(--[\w-]+)"', source))
        flags |= {f"--{name}" for name in re.findall(r"^    (\w+): [\w |\[\].,]+(?: = .+)?$", source, re.MULTILINE)}
    return flags


def importable(name):
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return hasattr(importlib.import_module(module), attribute)
    return True
