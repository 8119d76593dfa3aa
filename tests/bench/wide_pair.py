"""The demo's target and drafts at real sizes, on the device, without files of their size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from shared.models.heads.config import HeadKind
from shared.models.heads.head import DraftHead
from shared.models.heads.loader import load_head
from tests.bench.wide_head import WideHead, WideHeadShape
from tests.bench.wide_model import SHAPE_1B, SHAPE_8B, SPARE_TOKEN, WideModel, WideShape
from tests.bench.wide_tensors import WideTensors
from tests.load.prompts import PROMPTS

DEMO = Path(__file__).parents[2] / "shared" / "demo"
TARGET, DRAFT, EAGLE3 = DEMO / "target", DEMO / "draft", DEMO / "heads" / "eagle3"


@dataclass(frozen=True, slots=True)
class PairShapes:
    """How wide target, draft and head become."""

    target: WideShape
    draft: WideShape
    head: WideHeadShape


PAIR_8B = PairShapes(SHAPE_8B, SHAPE_1B, WideHeadShape(SHAPE_8B.intermediate_size, 32_000))


class WidePair:
    """Wide models of one family; each is made when it is asked for."""

    def __init__(self, shapes: PairShapes, device: torch.device) -> None:
        make = {"spare_token": SPARE_TOKEN, "device": device}
        self.target = WideModel(TARGET, shapes.target, **make)  # type: ignore[arg-type]
        self.draft = WideModel(DRAFT, shapes.draft, **make)  # type: ignore[arg-type]
        self._shapes = shapes
        self._device = device

    def eagle3(self, scratch: Path, dtype: torch.dtype) -> DraftHead:
        """Returns the demo's EAGLE-3 head; `scratch` takes a file of its size, about 1 GB."""
        head = WideHead(EAGLE3, self.target, self._shapes.head, algorithm="EAGLE3")
        folder = head.write(scratch / "eagle3", dtype=dtype)
        tensors = WideTensors(self.target, dtype)
        return load_head(folder, HeadKind.EAGLE3, tensors, dtype=dtype, device=self._device)


def chat_prompts(count: int, num_tokens: int) -> list[list[int]]:
    """Returns conversations of exactly that many tokens, each ending where an answer begins.

    Earlier turns are the demo's own answers, so that the text is what its drafts were trained on.
    """
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    report = json.loads((DEMO / "training" / "evaluation.json").read_text(encoding="utf-8"))
    turns = list(report["answers"].items())
    return [_conversation(tokenizer, turns, index, num_tokens) for index in range(count)]


def _conversation(
    tokenizer: Tokenizer, turns: Sequence[tuple[str, str]], index: int, num_tokens: int
) -> list[int]:
    question = PROMPTS[index % len(PROMPTS)]
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    place = 7 * index
    token_ids: list[int] = tokenizer.encode(text).ids
    while len(token_ids) < num_tokens:
        asked, answer = turns[place % len(turns)]
        turn = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        text = turn + text
        token_ids = tokenizer.encode(text).ids
        place += 1
    return token_ids[-num_tokens:]
