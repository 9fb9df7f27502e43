"""A model as users load it, and the engine to run inside its `generate`."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_infer import generator
from oracles.prompted import save_pair


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("generate"))


@pytest.fixture(scope="module")
def model(folder) -> Any:
    """Loaded as users do, without a Target."""
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder) -> Any:
    return AutoTokenizer.from_pretrained(folder / "target", padding_side="left")


@pytest.fixture
def speculate(folder, tokenizer):
    return generator(folder / "head", tokenizer=tokenizer)
