"""train_draft.py with a target that lies elsewhere: divided among the ranks, or spread by a device map."""

import runpy
import socket
import subprocess
import sys

import pytest
import torch

from eagle3.errors import ConfigError
from eagle3_train import features as features_module
from eagle3_train.batches import idle_batch, pack, supervise
from eagle3_train.config import FeaturesConfig, TrainConfig
from eagle3_train.features import DividedRun, Features
from eagle3_train.shards import Codec
from eagle3_train.shelf import MemoryShelf
from oracles.overfit import mapped_head
from oracles.runs import arguments, check_equal, final, metrics, train
from oracles.script import ENV, SCRIPT
from oracles.tiny import tiny_chats, tiny_folder, tiny_target

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")
# three chats a step: a rank that takes them one by one has a stand-in in every step
SETTINGS = {"data__eval_rows": 3, "data__max_length": 60, "tokens_per_batch": 60, "rows_per_step": 3}
SETTINGS |= {"max_steps": 8, "eval.every": 8, "eval__engine_every": 8, "eval__prompt_count": 2, "eval__new_tokens": 8}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with `target` and `chats.jsonl`."""
    folder = tmp_path_factory.mktemp("made")
    tiny_folder(folder / "target")
    tiny_chats(folder / "chats.jsonl", folder / "target")
    return folder


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    return train(made, tmp_path_factory.mktemp("whole") / "run", **SETTINGS)


def check_same_run(found, wanted, tolerance, moved=0.0):
    """`tolerance` of every figure, relative; `moved` of the weights: Adam divides by gradients that may be tiny."""
    assert len(metrics(found)) == 8
    for split in (None, "eval", "engine"):
        for ours, theirs in zip(metrics(found, split), metrics(wanted, split), strict=True):
            assert ours.keys() == theirs.keys()
            for name in ours.keys() - {"split", "tokens_per_second", "peak_memory_bytes"}:
                assert ours[name] == pytest.approx(theirs[name], rel=tolerance), (split, name)
    check_equal(final(found), final(wanted), moved)


def test_divided_among_two_ranks(made, whole, tmp_path):
    """Features of another rank's chats, a rank that waits for one that has nothing left to run (its second epoch, its
    stand-ins), an engine that one rank runs alone; losses, updates, held-out and engine tau are the whole target's."""
    words = arguments(made, tmp_path / "run", **SETTINGS, target_placement="tensor_parallel", features__source="memory")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port, SCRIPT]
    env = {**ENV, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([*command, *words], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    check_same_run(tmp_path / "run", whole, 1e-4, moved=1e-3)


def test_device_map_without_accelerators(made, whole, tmp_path):
    """The setting does not reach the target, or changes what is learned."""
    check_same_run(train(made, tmp_path / "run", **SETTINGS, target_placement="device_map"), whole, 0)


def test_one_process_cannot_divide(made, tmp_path, capsys):
    """A run that silently holds all of a target that was to be divided."""
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main(arguments(made, tmp_path / "run", target_placement="tensor_parallel")) == 2
    assert "there is one" in capsys.readouterr().err


def test_settings():
    """Layers placed that are never loaded; a word that does nothing."""
    with pytest.raises(ConfigError, match="target_placement is 'sharded'; use whole, device_map or tensor_parallel"):
        TrainConfig(target_placement="sharded")
    offline = FeaturesConfig(source="offline", store="x")
    with pytest.raises(ConfigError, match="does not load the target's layers; set target_placement: whole"):
        TrainConfig(target_placement="device_map", features=offline)


class TestTurns:
    """The turns of ranks, played by one process that is handed the others' chats."""

    @pytest.fixture
    def target(self):
        target = tiny_target()
        target.collective = True
        return target

    @pytest.fixture
    def others(self, monkeypatch):
        """Chats that rank 0 and rank 2 bring along; this process is rank 1 of three."""
        chats = [[(torch.arange(5), [5])], [], [(torch.arange(7), [3, 4]), (torch.arange(6), [6])]]

        def gather(everyone, mine):
            everyone[:] = [chats[0], mine, chats[2]]

        monkeypatch.setattr(features_module.dist, "get_world_size", lambda: 3)
        monkeypatch.setattr(features_module.dist, "get_rank", lambda: 1)
        monkeypatch.setattr(features_module.dist, "all_gather_object", gather)

    @pytest.fixture
    def forwards(self, target, monkeypatch):
        """Tokens of every forward of the target."""
        hidden, sizes = target.hidden, []
        monkeypatch.setattr(target, "hidden", lambda ids, *rest: sizes.append(len(ids)) or hidden(ids, *rest))
        return sizes

    def prepare(self, features, batch):
        return features.prepare(batch, supervise(batch, features.head.t2d, 1))

    @pytest.mark.parametrize("keep", [False, True])
    def test_order_and_values(self, target, others, forwards, keep):
        """Ranks in another order than each other, which is a deadlock or a sum over different chats; features of
        somebody else's forward; a rank that stops with its own chats, or that leaves out a turn with none."""
        documents = [{"input_ids": list(range(n)), "span_ids": [0, 0, 0] + [1] * (n - 3)} for n in (12, 9)]
        batch = pack(documents)
        head = mapped_head(target, batch, 40)
        features = Features(target, head, len(batch.ids), MemoryShelf(Codec("float32", 3)) if keep else None)
        found = self.prepare(features, batch)
        mine = [12, 9] if keep else [21]
        assert forwards == [5, *mine, 7, 6]
        target.collective = False
        alone = self.prepare(Features(target, head, len(batch.ids)), batch)
        torch.testing.assert_close(found.features, alone.features)
        torch.testing.assert_close(found.teacher.logits, alone.teacher.logits)
        forwards.clear()
        self.prepare(features, batch)
        assert forwards == ([5, 7, 6] if keep else [5, 21, 7, 6])
        forwards.clear()
        self.prepare(features, idle_batch())
        assert forwards == ([5, 7, 6] if keep else [5, 2, 7, 6])

    def test_twice_in_one_batch(self, target, others, forwards):
        """A chat that is in a batch twice is kept twice."""
        document = {"input_ids": list(range(12)), "span_ids": [0, 0, 0] + [1] * 9}
        batch = pack([document, document])
        shelf = MemoryShelf(Codec("float32", 3))
        features = Features(target, mapped_head(target, batch, 40), len(batch.ids), shelf)
        found = self.prepare(features, batch)
        assert forwards == [5, 12, 7, 6]
        assert len(shelf._kept) == 1
        assert torch.equal(found.features[:12], found.features[12:])

    def test_a_whole_target_runs_alone(self):
        """Collectives in a run whose ranks are independent of each other."""
        batch = pack([{"input_ids": list(range(9)), "span_ids": [0, 0, 0] + [1] * 6}])
        target = tiny_target()
        assert not isinstance(Features(target, mapped_head(target, batch, 40), 9)._run, DividedRun)
