"""Let the target write training data: its replies to given prompts, or chats of its own.

    python train/regenerate.py --target MODEL --prompts prompts.jsonl --output replies.jsonl.gz
    python train/regenerate.py --target MODEL --self 2000 --output selfgen.jsonl.gz
    torchrun --nproc_per_node 8 train/regenerate.py --prompts prompts.jsonl --output replies.jsonl.gz --draft HEAD

Rows are `messages` with the generated `token_ids`, as the trainer reads them, in the order in which they were done. A
run that was stopped goes on when the same command is given again. Of several processes each writes its own part,
`replies.rank0of8.jsonl.gz`: give the trainer `replies.rank*.jsonl.gz`. With a draft the tokens are the same, sooner.
"""

import hashlib
import os
import sys
import time
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.chats import parse_object, read_lines
from eagle3.config import load_config
from eagle3.errors import DataError, Eagle3Error, one_line
from eagle3_infer.config import EngineConfig, RuleConfig, SamplingConfig, TreeConfig
from eagle3_infer.loops import in_loop
from eagle3_infer.prompts import parse_prompt
from eagle3_infer.request import Request, Result
from eagle3_infer.settings import RunSettings
from eagle3_train.chats import Message, parse_chat
from eagle3_train.conversations import (
    Conversation,
    Tally,
    conversation,
    deduplicated,
    is_greedy,
    named,
    noise_key,
)
from eagle3_train.progress import Progress
from eagle3_train.regenerate_config import AUTO, CHAIN, RegenerateConfig
from eagle3_train.reply_file import ReplyFile, all_parts, check_manifest, part_path, read_ids
from eagle3_train.signals import TERMINATED, Terminated, Termination
from eagle3_train.turns import Turns

if TYPE_CHECKING:
    from eagle3.target import Target
    from eagle3_infer.engine import Engine

SHIPPED = "shipped"
# chats that one run of the engine takes, per slot: its last rounds have empty slots
CHATS_PER_SLOT = 16
# between progress lines, on a terminal and in a log
SHOW_SECONDS = {True: 0.5, False: 30.0}


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 2 on bad input or a full disk (one line on stderr), 130 or 143 when interrupted or terminated."""
    termination = Termination()
    try:
        regenerate(load_config(RegenerateConfig, argv, description=__doc__))
    except (Eagle3Error, OSError) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, Terminated) as stop:
        # files are closed by now
        print("\nstopped; finished replies are in the file, the same command goes on", file=sys.stderr)
        return TERMINATED if isinstance(stop, Terminated) else 130
    finally:
        termination.close()
    return 0


def regenerate(config: RegenerateConfig) -> None:
    """Load, take this process's share of what is not done, write."""
    chats, duplicates = to_write(config)
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    output = Path(config.output)
    # torch and transformers are loaded only once the input is known to be right
    target, engine = load(config)
    check_manifest(output, {**config.determines(), **fingerprints(config, target)}, {"argv": sys.argv})
    with ReplyFile(part_path(output, rank, world)) as file:
        done = set().union(*(read_ids(part)[0] for part in all_parts(output)))
        left = [chat for chat in chats[rank::world] if chat.id not in done]
        share = len(chats[rank::world])
        print(f"{file.path}: {share - len(left):,} of {share:,} chats done, {len(left):,} to write", flush=True)
        writer = Writer(config, target, engine, file, Progress(len(left), every=1, unit="chat", enabled=rank == 0))
        writer.tally.duplicates = duplicates
        writer.run(left)


def to_write(config: RegenerateConfig) -> tuple[list[Conversation], int]:
    """Every chat that is wanted, and how many duplicates were left out.

    Raises:
        DataError: a line is no prompt, naming it, or there is none.
    """
    if config.prompts is None:
        return [Conversation(f"self-{i}", self_written=True) for i in range(config.self or 0)], 0
    chats, duplicates = deduplicated(parse_line(line, where) for where, line in read_lines(config.prompts))
    if not chats:
        raise DataError(f"{config.prompts} holds no prompt, expected one JSON object per line")
    return chats[: config.limit], duplicates


def parse_line(line: str, where: str) -> Conversation:
    """A line of prompts as the runtime reads them, or of chats as the trainer does, whose replies are written anew."""
    row = parse_object(line, where)
    name, category = row.get("id", row.get("question_id")), row.get("category")
    name = None if name is None else str(name)
    if "messages" in row or "conversations" in row:
        return conversation(parse_chat(row, where), name, category if isinstance(category, str) else None)
    prompt = parse_prompt(line, where, "")
    history = [Message(m["role"], m["content"]) for m in prompt.history]
    return named(Conversation("", history, list(prompt.turns), category), name)


def fingerprints(config: RegenerateConfig, target: "Target") -> dict[str, Any]:
    """What the replies depend on besides settings."""
    prompts = config.prompts and hashlib.sha256(Path(config.prompts).read_bytes()).hexdigest()
    template = hashlib.sha256(str(target.tokenizer.chat_template).encode()).hexdigest()
    dtype = str(target.dtype).removeprefix("torch.")
    return {"target": target.fingerprint, "dtype": dtype, "chat_template": template[:16], "prompts": prompts}


def load(config: RegenerateConfig) -> tuple["Target", "Engine"]:
    """The target, and what decodes with it: plainly, or with a draft head."""
    import torch

    from eagle3_infer.engine import Engine
    from eagle3_infer.models import draft_folder, load_draft, load_target, pick_device

    draft = None if config.draft == SHIPPED else config.draft
    settings = RunSettings(target=config.target, draft=draft, dtype=config.dtype)
    if config.draft is not None:
        # a wrong path is told before the target is loaded
        draft_folder(settings)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    if device.type == "cuda" and config.device == AUTO:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    target = load_target(settings, device)
    slots = EngineConfig(slots=config.batch)
    if config.draft is None:
        return target, Engine(target, config=slots)
    # under the match rule shared noise changes no token: more drafts of sampled replies are accepted
    rule = RuleConfig(draft_noise="shared")
    return target, Engine(target, load_draft(settings, target), draft_tree(config), slots, rule)


def draft_tree(config: RegenerateConfig) -> TreeConfig:
    if config.mode == CHAIN:
        return TreeConfig.chain(config.tree_depth)
    nodes: Any = config.tree_nodes
    return TreeConfig(config.tree_depth, config.tree_top_k, nodes, adaptive=config.mode == AUTO)


class Writer:
    """Drives the engine until every chat is in the file: each pass asks for one turn of many chats."""

    def __init__(
        self, config: RegenerateConfig, target: "Target", engine: "Engine", file: ReplyFile, progress: Progress
    ):
        from eagle3_train.render import ChatRenderer

        self.config, self.target, self.engine, self.file, self.progress = config, target, engine, file, progress
        renderer = ChatRenderer(target.tokenizer, target.eos_ids, config.template_options)
        self.turns = Turns(renderer, config.template_options)
        self.user_turn = self.turns.user_turn(config.system) if config.self else None
        # a reply ends where its turn ends, whether or not the target's files call that an EOS
        self.eos_ids = tuple({*target.eos_ids, *self.turns.end_ids[-1:]})
        self.tally = Tally()
        self._settled, self._tokens, self._shown = 0, 0, time.monotonic()

    def run(self, chats: list[Conversation]) -> None:
        began, waiting, ongoing = time.monotonic(), deque(chats), []
        try:
            while waiting or ongoing:
                new = min(len(waiting), self.config.batch * CHATS_PER_SLOT - len(ongoing))
                ongoing = self._pass([*ongoing, *(waiting.popleft() for _ in range(new))])
        finally:
            self.progress.close()
            if self.progress.enabled or self.tally.failed:
                print(self.tally.report(time.monotonic() - began), flush=True)

    def _pass(self, chats: list[Conversation]) -> list[Conversation]:
        """Ask for the next turn of each chat; returns those that have another one."""
        asked = [(chat, request) for chat in chats if (request := self._request(chat)) is not None]
        onward: list[Conversation] = []
        with closing(self.engine.stream([request for _, request in asked])) as updates:
            for number, tokens, result in updates:
                self._tokens += len(tokens)
                if result is not None and self._goes_on(asked[number][0], result):
                    onward.append(asked[number][0])
                self._show()
        return onward

    def _request(self, chat: Conversation) -> Request | None:
        """What the engine is asked; None for a chat that ends here, as its next prompt cannot be read."""
        config = self.config
        if self.user_turn is not None and chat.self_written:
            sampling = SamplingConfig(config.self_temperature, config.self_top_k, seed=config.seed)
            ends = tuple({*self.eos_ids, *self.user_turn.end_ids})
            ids, stop = self.user_turn.prompt_ids, self.user_turn.stop
            return Request(ids, sampling, config.max_new_tokens, stop, noise_key(chat.id), eos_ids=ends, sample=1)
        try:
            ids = self.turns.prompt_ids(chat)
        except DataError as error:
            self.tally.fail(error)
            return self._settle(chat)
        if self._too_long(ids):
            self.tally.too_long += 1
            return self._settle(chat)
        sampling = SamplingConfig(self._temperature(chat), config.top_k, config.top_p, seed=config.seed)
        turn = len(chat.replies)
        return Request(ids, sampling, config.max_new_tokens, (), noise_key(chat.id), turn, eos_ids=self.eos_ids)

    def _too_long(self, ids: list[int]) -> bool:
        longest, most = self.target.max_positions - self.config.max_new_tokens + 1, self.config.max_prompt_tokens
        return len(ids) > (longest if most is None else min(most, longest))

    def _temperature(self, chat: Conversation) -> float:
        return 0.0 if is_greedy(chat.id, self.config.greedy_share) else self.config.temperature

    def _goes_on(self, chat: Conversation, result: Result) -> bool:
        """Take in a turn; whether the chat has another one."""
        ended = result.finish_reason == "eos"
        if self.user_turn is not None and chat.self_written:
            return self._take_user_turn(chat, result.token_ids)
        ids, finished = self.turns.reply_ids(result.token_ids, ended)
        chat.reply(self._decode(ids), ids, finished)
        self.tally.add_reply(len(result.token_ids), ended, any(in_loop(ids)))
        if not chat.turns:
            self._settle(chat)
        return bool(chat.turns)

    def _take_user_turn(self, chat: Conversation, ids: list[int]) -> bool:
        assert self.user_turn is not None
        self.tally.user_tokens += len(ids)
        text = self.user_turn.text(self._decode(ids))
        chat.self_written, chat.user_ids = False, ids
        if not text:
            self.tally.fail(f"{chat.id}: the target wrote an empty user turn")
            self._settle(chat)
            return False
        if self.config.system is not None:
            chat.messages.append(Message("system", self.config.system))
        chat.turns = [text]
        return True

    def _settle(self, chat: Conversation) -> None:
        """Write a chat that is done, as far as it was answered."""
        self._settled += 1
        if chat.replies:
            self.file.add(chat.row(self._temperature(chat), self.config.seed))
            self.tally.add(chat)

    def _decode(self, ids: list[int]) -> str:
        return self.target.tokenizer.decode(ids, skip_special_tokens=True)

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown >= SHOW_SECONDS[sys.stderr.isatty()]:
            self.progress.update(self._settled, self._tokens)
            self._tokens, self._shown = 0, now


if __name__ == "__main__":
    sys.exit(main())
