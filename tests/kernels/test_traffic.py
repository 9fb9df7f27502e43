"""The traffic on paper against what the kernels load and store, counted in Triton's interpreter."""

from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_kernels.dispatch import set_kernels
from eagle3_kernels.testing import device

pytest.importorskip("triton")
traffic = pytest.importorskip("eagle3_kernels.traffic")
workloads = pytest.importorskip("eagle3_kernels.workloads")
training = pytest.importorskip("eagle3_kernels.training_traffic")
training_workloads = pytest.importorskip("eagle3_kernels.training_workloads")
pytestmark = pytest.mark.skipif(device().type != "cpu", reason="only the interpreter counts")

README = Path(__file__).parents[2] / "kernels" / "README.md"
SMALL = traffic.Model(layers=2, heads=8, kv_heads=2, head_dim=64, hidden=64, vocab=2100, draft_vocab=2100)
TINY = traffic.Model(heads=4, kv_heads=2, head_dim=64, hidden=8, draft_vocab=1100)


@pytest.fixture
def counted(monkeypatch):
    """Bytes that unmasked lanes load and store; kernels forced to Triton."""
    from triton.runtime.interpreter import InterpreterBuilder

    total = [0]

    def counting(original, mask_at: int):
        def access(self, pointers, *rest):
            lanes = np.broadcast_to(rest[mask_at].data, pointers.data.shape).sum()
            total[0] += int(lanes) * max(1, pointers.dtype.scalar.element_ty.primitive_bitwidth // 8)
            return original(self, pointers, *rest)

        return access

    for name, mask_at in (("create_masked_load", 0), ("create_masked_store", 1)):
        monkeypatch.setattr(InterpreterBuilder, name, counting(getattr(InterpreterBuilder, name), mask_at))
    set_kernels("triton")
    yield total
    set_kernels(None)


@pytest.mark.parametrize("nodes", traffic.TREES)
@pytest.mark.parametrize("op", traffic.OPS)
def test_kernels_spend_what_the_paper_says(op, nodes, counted):
    x = traffic.Round(2, nodes, 300, *traffic.TREES[nodes])
    torch.manual_seed(0)
    set_kernels("torch")
    work = workloads.WORKS[op](workloads.Place(torch.device("cpu"), torch.bfloat16, SMALL, x))
    set_kernels("triton")
    counted[0] = 0
    work.run()
    # the interpreter counts as one processor
    paper = traffic.OPS[op](SMALL, x, 1) if op == "tree_attention" else traffic.OPS[op](SMALL, x)
    # scalars per program are left out on paper
    assert counted[0] == pytest.approx(paper.spent.bytes, rel=0.05)
    assert paper.must.bytes <= paper.spent.bytes
    assert paper.must.flops <= paper.spent.flops


@pytest.mark.parametrize("batch", [training.Packed(1, 190, 2), training.Packed(3, 50, 1, share=1.0)], ids=str)
@pytest.mark.parametrize("op", training.TRAINING_OPS)
def test_training_kernels_spend_what_the_paper_says(op, batch, counted):
    torch.manual_seed(0)
    at = training_workloads.TrainingPlace(torch.device("cpu"), torch.bfloat16, TINY, batch)
    work = training_workloads.TRAINING_WORKS[op](at)
    # a backward counts alone
    work.run() if op == "ttt_backward" else None
    counted[0] = 0
    work.run()
    paper = training.TRAINING_OPS[op](TINY, batch)
    # of the loss the rows are ours, the products torch's
    rows = len(batch.rows()) * (batch.step + 1)
    expected = training.loss_rows_bytes(TINY, rows) if op == "draft_loss" else paper.spent.bytes
    assert counted[0] == pytest.approx(expected, rel=0.05)
    assert paper.must.bytes <= paper.spent.bytes
    assert paper.must.flops <= paper.spent.flops


@pytest.mark.parametrize("nodes, tiles", [(8, 1), (31, 1), (32, 2), (60, 2), (130, 5)])
def test_attention_reads_a_page_once_per_kv_head_and_tile_of_at_most_128_rows(nodes, tiles):
    """Llama-3.1-8B: a group of 4 heads over each KV head."""
    x, model = traffic.Round(1, nodes, 8192, 6, 10), traffic.Model()
    queries = 2 * x.rows * model.heads * model.head_dim * 2
    rest = traffic.tree_attention(model, x, 1).spent.bytes - queries
    keys = (x.context + x.rows) * model.kv_row_bytes
    assert tiles * keys <= rest < 1.05 * tiles * keys


def test_readme_holds_the_paper_tables():
    """`python kernels/bench_kernels.py --paper` prints them."""
    for table in (traffic.paper_table(), training.training_table()):
        assert "\n".join(table) in README.read_text()
