"""Every recipe parses into the trainer's settings and names data that is shipped; every sweep can be planned."""

from pathlib import Path

import pytest

from eagle3.config import load_config, read_yaml
from eagle3_recipes.plan import Options, plan
from eagle3_recipes.sweep import read_sweep
from eagle3_train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "recipes/base").glob("*.yaml"))
SWEEPS = sorted((ROOT / "recipes/ablations").glob("*.yaml"))


def test_there_are_recipes():
    """Catches: a moved folder, after which the tests below check nothing."""
    assert {"smollm2-135m.yaml", "smollm2-135m-demo.yaml"} <= {path.name for path in RECIPES}
    assert {"capture_layers.yaml", "loss.yaml", "tree_shape.yaml", "draft_noise.yaml"} <= {path.name for path in SWEEPS}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses(path):
    """Catches: a setting that was renamed under a recipe, a value out of range."""
    config = load_config(TrainConfig, ["--config", str(path)])
    given = read_yaml(path)
    assert config.output == given["output"]
    assert config.max_steps == given["max_steps"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_names_shipped_data(path):
    """Catches: a recipe that runs on its author's machine only."""
    files = load_config(TrainConfig, ["--config", str(path)]).data.files
    assert files
    assert not [name for name in files if not (ROOT / name).is_file()]


def test_an_override_reaches_the_recipe():
    """Catches: flags that do not win over the recipe."""
    recipe = str(ROOT / "recipes/base/smollm2-135m.yaml")
    config = load_config(TrainConfig, ["--config", recipe, "--optim.lr", "3e-4", "--head.capture_layers", "[1, 5]"])
    assert (config.optim.lr, config.head.capture_layers) == (3e-4, (1, 5))
    assert config.head.draft_vocab_size == read_yaml(recipe)["head"]["draft_vocab_size"]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_sweep_can_be_planned(path, tmp_path):
    """Catches: a setting that trainer or eagle3-infer refuses, variants that are one; a question that is none."""
    sweep = read_sweep(path)
    assert len(plan(sweep, Options(tmp_path, seeds=(0,)))) == len(sweep.variants)
    assert sweep.question.endswith("?")
    assert f"run_ablations.py recipes/ablations/{path.stem}" in path.read_text()
