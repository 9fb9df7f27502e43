"""The rollout: each step against an independent recurrent drafter, its supervision and loss against plain loops."""

import copy
import math
from dataclasses import asdict, replace

import pytest
import torch

from eagle3.attention import DenseCausal
from eagle3_train import ttt
from eagle3_train.batches import pack, supervise
from eagle3_train.config import TTTConfig
from eagle3_train.evaluate import Tally
from eagle3_train.features import Features
from eagle3_train.ttt import TTTRollout, dpace_weights, noisy
from oracles.chain import ChainDrafter
from oracles.overfit import mapped_head
from oracles.tiny import tiny_target

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")

OPTIONS = {
    "default": {},
    "two_layers": {"num_layers": 2},
    "three_layers_windowed": {"num_layers": 3, "sliding_window": 5},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "qk_norm": {"qk_norm": True, "attention_bias": True},
    "own_embedding": {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 1},
    "one_feature": {"capture_layers": (3,)},
    "everything": {
        "num_layers": 2,
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": True,
        "qk_norm": True,
    },
}


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


def documents(lengths, seed=0, vocab=300):
    """Random rows: a prompt of three tokens, then one span; every second row has a second span."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for i, length in enumerate(lengths):
        spans = [0] * 3 + [1] * (length - 3)
        if i % 2:
            spans[length // 2 :] = [0, *[2] * (length - length // 2 - 1)]
        rows.append({"input_ids": torch.randint(0, vocab, (length,), generator=draw).tolist(), "span_ids": spans})
    return rows


def random_head(target, rows, draft_vocab_size=60, **options):
    """Every weight away from its initial value, so that no norm or bias is an identity."""
    head = mapped_head(target, pack(rows), draft_vocab_size, **options)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in head.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=draw))
    return head


def prepare(target, head, rows, steps):
    batch = pack(rows)
    return Features(target, head, len(batch.ids)).prepare(batch, supervise(batch, head.t2d, steps))


def oracle(target, head):
    embedding = target.embed(torch.arange(target.vocab_size))
    return ChainDrafter(head.state_dict(), asdict(head.config), embedding)


def parts(inputs):
    """(offset, ids, features, span ids) of each document of a packed batch."""
    start = 0
    for length in inputs.batch.lengths:
        at = slice(start, start + length)
        yield start, inputs.batch.ids[at].tolist(), inputs.features[at], inputs.batch.span_ids[at].tolist()
        start += length


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_step_k_is_the_kth_step_of_a_recurrent_drafter(target, options, monkeypatch):
    """Wrong position, key, embedding or hidden state at any of the steps 0..6; documents that leak into another."""
    steps, rows = 7, documents([14, 19, 3, 11])
    head = random_head(target, rows, **options)
    inputs = prepare(target, head, rows, steps)
    outputs = []
    step = head.step
    monkeypatch.setattr(head, "step", lambda *args: outputs.append(step(*args)) or outputs[-1])
    with torch.no_grad():
        TTTRollout(head)(inputs, torch.ones(steps))
        drafter, compared = oracle(target, head), 0
        for start, ids, features, _ in parts(inputs):
            chains = drafter.chains(features, ids, steps, known=True)
            for r, row in enumerate((inputs.supervision.rows - start).tolist()):
                if not 0 <= row < len(chains):
                    continue
                hidden = torch.stack([outputs[k][r] for k in range(len(chains[row].hidden))])
                for k, wanted in enumerate(chains[row].hidden):
                    assert (hidden[k] - wanted).norm() < 1e-5 * wanted.norm(), f"row {row} step {k}"
                    logits = chains[row].logits[k]
                    assert (head.logits(hidden[k]) - logits).norm() < 1e-5 * logits.norm(), f"row {row} step {k}"
                compared += len(hidden)
    assert compared > 100


def brute_counted(rows, in_vocab, steps):
    """(row, step) -> (predicted token) of a packed batch, by the words of DESIGN section 4."""
    out, start = {}, 0
    for row in rows:
        x, spans = row["input_ids"], row["span_ids"]
        for t in range(len(x)):
            for k in range(steps):
                if t + 2 + k >= len(x) or spans[t + 1] == 0 or spans[t + 1] != spans[t + 2 + k]:
                    continue
                if all(x[i] in in_vocab for i in range(t + 2, t + 2 + k)):
                    out[start + t, k] = x[t + 2 + k]
        start += len(x)
    return out


def test_supervised_set_at_both_edges():
    """Off by one at a span's ends; rows that cross into the next document; a token that cannot be drafted passed."""
    rows = [
        {"input_ids": [1, 2, 3, 4, 5, 6, 7], "span_ids": [0, 0, 1, 1, 1, 1, 0]},
        {"input_ids": [1, 2, 30, 4, 5], "span_ids": [0, 1, 1, 1, 1]},
    ]
    t2d = torch.tensor([i < 10 for i in range(40)])
    supervision = supervise(pack(rows), t2d, 4)
    # spans at 2..5 and 8..11 of the pack; token 30 at 9 may be predicted, but not drafted past
    assert supervision.rows.tolist() == [1, 2, 3, 7, 8, 9]
    counted = [set(supervision.rows[c].tolist()) for c in supervision.counted]
    assert counted == [{1, 2, 3, 7, 8, 9}, {1, 2, 8}, {1}, set()]
    assert supervision.tokens[0].tolist() == [4, 5, 6, 30, 4, 5]
    assert supervision.tokens[2, 0] == 6


@pytest.mark.parametrize("seed", range(3))
def test_supervised_set_equals_a_plain_loop(seed):
    """The same on random rows and maps: the supervised set is exact."""
    rows = documents([9, 4, 16, 7, 12], seed)
    draw = torch.Generator().manual_seed(seed)
    t2d = torch.rand(300, generator=draw) < 0.8
    supervision = supervise(pack(rows), t2d, 5)
    at = [(k, r, int(supervision.rows[r])) for k, r in supervision.counted.nonzero().tolist()]
    found = {(t, k): int(supervision.tokens[k, r]) for k, r, t in at}
    assert found == brute_counted(rows, set(t2d.nonzero().flatten().tolist()), 5)


@torch.no_grad()
def brute_loss(target, head, inputs, rows, steps, decay):
    """(loss, its sums per step, right per step) by loops over documents, rows and steps."""
    draft_ids = (torch.arange(head.draft_vocab_size) + head.d2t).tolist()
    counted = brute_counted(rows, set(draft_ids), steps)
    loss, right = [0.0] * steps, [0] * steps
    drafter = oracle(target, head)
    for start, ids, features, _ in parts(inputs):
        x = torch.tensor(ids)
        teacher = target.logits(target.hidden(x, torch.arange(len(x)), DenseCausal([len(x)])))
        chains = drafter.chains(features, ids, steps, known=True)
        for t in range(len(ids)):
            for k in range(steps):
                if (start + t, k) not in counted or int(teacher[t + 1 + k].argmax()) not in draft_ids:
                    continue
                p = teacher[t + 1 + k, draft_ids].softmax(-1)
                loss[k] += float(-(p * chains[t].logits[k].log_softmax(-1)).sum())
                right[k] += chains[t].tokens[k] == int(teacher[t + 1 + k].argmax())
    counts = [max(1, sum(step == k for _, step in counted)) for k in range(steps)]
    return sum(decay**k * loss[k] / counts[k] for k in range(steps)), loss, right


def test_loss_and_hits_equal_plain_loops(target):
    """A teacher of another position, logits of other tokens, a decay or N_k that is off, rows counted twice."""
    steps, decay, rows = 4, 0.7, documents([12, 10, 3, 13])
    head = random_head(target, rows, 40)
    inputs = prepare(target, head, rows, steps)
    normalisers = inputs.supervision.counted.sum(1).float()
    with torch.no_grad():
        output = TTTRollout(head, TTTConfig(decay=decay))(inputs, normalisers)
    loss, step_loss, right = brute_loss(target, head, inputs, rows, steps, decay)
    assert output.loss.item() == pytest.approx(loss, rel=1e-5)
    assert output.step_loss.tolist() == pytest.approx(step_loss, rel=1e-5)
    tally = Tally(steps)
    tally.add(inputs, output)
    assert tally.counts().right == right
    assert tally.counts().counted == inputs.supervision.counted.sum(1).tolist()


def test_teacher_outside_the_draft_vocabulary(target):
    """Such a row must cost nothing, yet count in N_k and be a miss: else accuracy looks better than it is."""
    rows = documents([16, 18])
    head = random_head(target, rows, 20)
    inputs = prepare(target, head, rows, 1)
    outside = ~inputs.teacher.in_vocab
    assert 0 < outside.sum() < len(outside), "the test needs both kinds"
    normalisers = inputs.supervision.counted.sum(1).float()
    assert normalisers.tolist() == [len(outside)]
    output = TTTRollout(head)(inputs, normalisers)
    output.loss.backward()
    gradient = head.fc.weight.grad
    assert gradient is not None
    tally = Tally(1)
    tally.add(inputs, output)
    assert tally.counts().rates()["coverage"] == pytest.approx(float(inputs.teacher.in_vocab.float().mean()))
    assert tally.counts().counted == [len(outside)]
    # whatever the teacher says there, loss, gradient and accuracy do not move
    inputs.teacher.logits[outside] = 50 * torch.rand(int(outside.sum()), 20)
    head.fc.weight.grad = None
    again, changed = Tally(1), TTTRollout(head)(inputs, normalisers)
    changed.loss.backward()
    again.add(inputs, changed)
    assert torch.equal(changed.step_loss, output.step_loss)
    torch.testing.assert_close(head.fc.weight.grad, gradient, rtol=0, atol=0)
    assert again.counts().right == tally.counts().right


@torch.no_grad()
def brute_alpha(target, head, inputs, rows, steps):
    """By step, the sum of sum_v min(p_v, q_v) over rows whose teacher's choice [0] can, [1] cannot be drafted."""
    draft_ids = (torch.arange(head.draft_vocab_size) + head.d2t).tolist()
    counted = brute_counted(rows, set(draft_ids), steps)
    alpha, drafter = torch.zeros(2, steps), oracle(target, head)
    for start, ids, features, _ in parts(inputs):
        x = torch.tensor(ids)
        # over the whole vocabulary: what the target gives to tokens outside the draft's is never accepted
        p = target.logits(target.hidden(x, torch.arange(len(x)), DenseCausal([len(x)]))).softmax(-1)
        chains = drafter.chains(features, ids, steps, known=True)
        for t, k in ((t, k) for t in range(len(ids)) for k in range(steps) if (start + t, k) in counted):
            q, spoken = chains[t].logits[k].softmax(-1), p[t + 1 + k]
            alpha[int(int(spoken.argmax()) not in draft_ids), k] += spoken[draft_ids].minimum(q).sum()
    return alpha


def test_alpha_is_over_all_supervised_rows(target):
    """Rows whose teacher's choice cannot be drafted left out, or p renormalised: alpha would look better than it is."""
    steps, rows = 3, documents([16, 18, 20, 17])
    head = random_head(target, rows, 60)
    inputs = prepare(target, head, rows, steps)
    inside, outside = brute_alpha(target, head, inputs, rows, steps)
    assert (inside > 0).all(), "the test needs both kinds"
    assert (outside > 0).all(), "the test needs both kinds"
    with torch.no_grad():
        output = TTTRollout(head)(inputs, torch.ones(steps))
    torch.testing.assert_close(output.step_alpha, inside + outside, rtol=1e-4, atol=1e-5)
    # those rows alone: an alpha and a prediction, but no loss
    counted, in_vocab = inputs.supervision.counted, inputs.teacher.in_vocab
    entry = torch.arange(counted.shape[1]) + torch.arange(steps)[:, None]
    unlearned = counted & ~in_vocab[entry.clamp(max=counted.shape[1] - 1)]
    alone = replace(inputs, supervision=replace(inputs.supervision, counted=unlearned))
    with torch.no_grad():
        output = TTTRollout(head)(alone, torch.ones(steps))
    torch.testing.assert_close(output.step_alpha, outside, rtol=1e-4, atol=1e-5)
    assert output.loss == 0
    assert not output.step_loss.any()
    assert torch.equal(output.prediction >= 0, unlearned)


def gradients(target, head, micro, steps):
    """(loss, gradients) of one optimizer step over packed micro-batches of rows."""
    head = copy.deepcopy(head)
    inputs = [prepare(target, head, rows, steps) for rows in micro]
    normalisers = sum(i.supervision.counted.sum(1).float() for i in inputs)
    total = 0.0
    for one in inputs:
        output = TTTRollout(head)(one, normalisers)
        output.loss.backward()
        total += output.loss.item()
    return total, {name: p.grad for name, p in head.named_parameters()}


def check_same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    for name, grad in wanted[1].items():
        error = (found[1][name] - grad).norm() / grad.norm().clamp(min=1e-12)
        assert error < 1e-5, f"{name}: {error}"


@pytest.mark.parametrize("options", ["default", "everything", "own_embedding"])
def test_packing_and_accumulation_change_nothing(target, options):
    """Attention across documents, a mean per micro-batch, an unequal weight of short rows."""
    rows = documents([12, 9, 16, 5])
    head = random_head(target, rows, 60, **OPTIONS[options])
    whole = gradients(target, head, [rows], 3)
    check_same(gradients(target, head, [rows[:1], rows[1:2], rows[2:3], rows[3:]], 3), whole)
    check_same(gradients(target, head, [rows[:2], rows[2:]], 3), whole)
    check_same(gradients(target, head, [rows[::-1]], 3), whole)


def test_order_of_a_pack_does_not_matter_to_the_target(target):
    """The target's own attention across documents: features of a document depend on its neighbours."""
    rows = documents([12, 9, 16])
    head = random_head(target, rows)
    together = prepare(target, head, rows, 2)
    start = 0
    for row in rows:
        alone = prepare(target, head, [row], 2)
        at = slice(start, start + len(row["input_ids"]))
        torch.testing.assert_close(together.features[at], alone.features, rtol=1e-5, atol=1e-5)
        mine = (together.supervision.rows >= at.start) & (together.supervision.rows < at.stop)
        torch.testing.assert_close(together.teacher.logits[mine], alone.teacher.logits, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(together.teacher.lse[mine], alone.teacher.lse, rtol=1e-5, atol=1e-4)
        start = at.stop


@pytest.mark.parametrize("options", ["default", "two_layers", "own_embedding"])
def test_micro_batch_that_supervises_nothing(target, options):
    """NaN loss, a crash, or a weight without a gradient (which hangs other ranks)."""
    rows = [{"input_ids": [1, 2, 3, 4], "span_ids": [0] * 4}, {"input_ids": [5, 6], "span_ids": [0, 0]}]
    head = random_head(target, documents([12]), **OPTIONS[options])
    loss, grads = gradients(target, head, [rows], 3)
    assert loss == 0.0
    assert all(grad is not None and not grad.any() for grad in grads.values())
    # it has no round and no row to tally
    tally, inputs = Tally(3), prepare(target, head, rows, 3)
    with torch.no_grad():
        tally.add(inputs, TTTRollout(head)(inputs, torch.zeros(3)))
    assert tally.counts() == Tally(3).counts()
    # and beside one that does, it changes nothing
    full = documents([12, 9])
    check_same(gradients(target, head, [full, rows], 3), gradients(target, head, [full], 3))


def test_more_steps_than_any_span(target):
    """Steps that nobody is supervised at: N_k = 0 must not divide."""
    rows = documents([6, 7])
    loss, grads = gradients(target, random_head(target, rows), [rows], 9)
    assert math.isfinite(loss)
    assert all(grad is not None and grad.isfinite().all() for grad in grads.values())


def test_gradients_are_those_of_finite_differences(target):
    """A detached step: the loss of the last step must reach the weights through all earlier ones."""
    rows = documents([12, 9])
    head = random_head(target, rows, 300)
    inputs = prepare(target, head, rows, 3)
    rollout, last_only = TTTRollout(head), torch.tensor([torch.inf, torch.inf, 10.0])
    rollout(inputs, last_only).loss.backward()
    for p in (head.fc.weight, head.midlayer.self_attn.k_proj.weight, head.midlayer.input_layernorm.weight):
        assert p.grad is not None
        size, direction, losses = float(p.grad.norm()), p.grad / p.grad.norm(), []
        assert size > 1e-3
        with torch.no_grad():
            for sign in (1, -1):
                p.add_(direction, alpha=sign * 1e-2)
                losses.append(rollout(inputs, last_only).loss.item())
                p.sub_(direction, alpha=sign * 1e-2)
        assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(size, rel=0.02)


def test_rows_that_nobody_reads_are_not_computed(target, monkeypatch):
    """Supervised rows only in the layer's queries, MLP and loss: prompts would else cost as much as replies."""
    rows = [{"input_ids": list(range(40)), "span_ids": [0] * 30 + [1] * 10}]
    head = random_head(target, rows)
    asked = []
    op = ttt.ttt_attention
    monkeypatch.setattr(ttt, "ttt_attention", lambda q, *rest: asked.append(q.shape[1]) or op(q, *rest))
    with torch.no_grad():
        TTTRollout(head)(prepare(target, head, rows, 3), torch.ones(3))
    assert asked == [9, 9, 9]


def stepped(rollout, inputs):
    """(loss, gradients by name) of one forward and backward."""
    rollout.zero_grad()
    output = rollout(inputs, inputs.supervision.counted.sum(1).float())
    output.loss.backward()
    return output.loss.detach(), {name: p.grad.clone() for name, p in rollout.named_parameters()}


def check_bit_equal(found, wanted):
    assert torch.equal(found[0], wanted[0])
    for name, grad in wanted[1].items():
        assert torch.equal(found[1][name], grad), name


@pytest.mark.parametrize("options", ["default", "everything", "own_embedding"])
def test_checkpointing_changes_no_bit(target, options):
    """A recomputed step that sees its own keys twice, or none; a weight whose gradient is lost."""
    rows = documents([14, 19, 3, 11])
    head = random_head(target, rows, **OPTIONS[options])
    inputs = prepare(target, head, rows, 4)
    plain = stepped(TTTRollout(head), inputs)
    check_bit_equal(stepped(TTTRollout(head, TTTConfig(checkpointing=True)), inputs), plain)
    check_bit_equal(stepped(TTTRollout(head), inputs), plain)


def test_checkpointing_keeps_less(target):
    """Activations of the layer kept all the same."""
    rows = documents([40, 40])
    head = random_head(target, rows)
    inputs = prepare(target, head, rows, 4)

    def kept(config):
        sizes = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.setdefault(x.data_ptr(), x.numel()) and x, lambda x: x
        )
        with hooks:
            TTTRollout(head, config)(inputs, torch.ones(4))
        return sum(sizes.values())

    weights = sum(p.numel() for p in head.parameters())
    assert kept(TTTConfig(checkpointing=True)) - weights < 0.5 * (kept(TTTConfig()) - weights)


def test_dpace_weights_by_hand():
    """A row's step is worth the accepted tokens that hang on it: later ones too, weighed by all before."""
    counted = torch.tensor([[True, True, True], [True, False, True], [True, False, False]])
    # step by step: rows 0, 1, 2; rows 0, 2; row 0
    alpha = torch.tensor([0.5, 0.9, 0.0, 0.8, 0.7, 0.25])
    row_0 = [0.5 + 0.5 * 0.8 + 0.5 * 0.8 * 0.25, 0.5 * 0.8 + 0.5 * 0.8 * 0.25, 0.5 * 0.8 * 0.25]
    wanted = [row_0[0], 0.9, 0.0, row_0[1], 0.0, row_0[2]]
    torch.testing.assert_close(dpace_weights(alpha, counted), torch.tensor(wanted))


def test_dpace_weights_are_the_derivative_of_the_accepted_length():
    """The rule itself, against autograd of the expected number of accepted tokens."""
    draw = torch.Generator().manual_seed(0)
    log_alpha = torch.rand(5, 4, generator=draw).log().requires_grad_()
    counted = torch.arange(5)[:, None] < torch.tensor([5, 2, 0, 3])
    expected = torch.stack([log_alpha[:n, r].cumsum(0).exp().sum() for r, n in enumerate([5, 2, 0, 3])]).sum()
    (grad,) = torch.autograd.grad(expected, log_alpha)
    torch.testing.assert_close(dpace_weights(log_alpha.detach()[counted].exp(), counted), grad[counted])


def test_dpace_loss_equals_an_enumeration(target):
    """Weights of another row or step, decay or N_k dropped, a gradient through the weights."""
    steps, rows = 3, documents([12, 9])
    head = random_head(target, rows, 40)
    inputs = prepare(target, head, rows, steps)
    counted, counts = inputs.supervision.counted, inputs.supervision.counted.sum(1).float()
    config = TTTConfig(weights="dpace", decay=0.7)
    loss, grads = stepped(TTTRollout(head, config), inputs)

    def pairs(k, r):
        """The same rollout, asked about one row at one step alone."""
        alone = torch.zeros_like(counted)
        alone[k, r] = True
        one = replace(inputs, supervision=replace(inputs.supervision, counted=alone))
        return TTTRollout(head, TTTConfig(decay=1.0))(one, torch.ones(steps))

    total = loss.new_zeros(())
    for r in range(counted.shape[1]):
        depth = int(counted[:, r].sum())
        outputs = [pairs(k, r) for k in range(depth)]
        alphas = [float(output.step_alpha[k]) for k, output in enumerate(outputs)]
        for k in range(depth):
            worth = sum(math.prod(alphas[: m + 1]) for m in range(k, depth))
            total = total + worth * 0.7**k / counts[k] * outputs[k].loss
    head.zero_grad()
    total.backward()
    total = total.detach()
    check_same((float(loss), grads), (float(total), {f"head.{name}": p.grad for name, p in head.named_parameters()}))


def test_terms_reach_the_loss(target):
    """A mix of terms that is dropped on the way: the loss is linear in the weights of its terms."""
    rows = documents([12, 9])
    head = random_head(target, rows, 40)
    inputs, ones = prepare(target, head, rows, 2), torch.ones(2)
    with torch.no_grad():
        losses = {
            str(terms): float(TTTRollout(head, terms=terms)(inputs, ones).loss)
            for terms in ({"soft_ce": 1.0}, {"tv": 1.0}, {"soft_ce": 0.5, "tv": 2.0})
        }
    soft_ce, tv, mix = losses.values()
    assert soft_ce != pytest.approx(tv, rel=0.1)
    assert mix == pytest.approx(0.5 * soft_ce + 2 * tv, rel=1e-5)


def test_noise_depends_on_seed_step_and_document_alone(target):
    """Noise that changes with the pack, the rank or the order: resume or another world size would train otherwise."""
    rows = documents([12, 9, 7])
    head = random_head(target, rows, 40)

    def noise(rows, seed=3, step=7):
        inputs = prepare(target, head, rows, 2)
        noised = noisy(replace(inputs, features=torch.zeros(len(inputs.batch.ids), 5000)), 0.5, seed, step)
        return noised.features.split(inputs.batch.lengths)

    together = noise(rows)
    for alone, document in zip(noise(rows[::-1][:2]), together[::-1][:2], strict=True):
        torch.testing.assert_close(alone, document, rtol=0, atol=0)
    assert float(torch.cat(together).std()) == pytest.approx(0.5, rel=0.02)
    assert abs(float(torch.cat(together).mean())) < 0.01
    for other in (noise(rows, seed=4), noise(rows, step=8)):
        assert all(not torch.equal(a, b) for a, b in zip(other, together, strict=True))
    assert abs(float((together[0][:7] * together[2]).mean())) < 0.02
    inputs = prepare(target, head, rows, 2)
    assert noisy(inputs, 0.0, 3, 7) is inputs
