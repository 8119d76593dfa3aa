"""The same sequences in two drafters of one model: one grows whole trees on the device by kinds of
sampling, the other scores each level by the requests' own parameters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from services.draft.drafters.eagle import EagleDrafter
from services.draft.drafters.standalone import StandaloneDrafter
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.heads.config import HeadKind
from shared.models.heads.head import DraftHead
from shared.models.heads.loader import load_head
from shared.models.heads.target_tensors import TargetFolder
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_draft import RequestScores
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import DecoderModel, HeadModel
from shared.runtime.tree_pass import GrowingTrees, OpenSequence, PassLimits
from shared.tokens import SamplingParams, TokenTree, TreeShape
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.draft_heads import HEADS, write_head
from tests.helpers.drafting import GREEDY, VOCAB_SIZE, committed, plain_grower, propose
from tests.helpers.head_oracle import Paths, path_values
from tests.helpers.poisoned import poison_padding

PAGE_SIZE = 4
NUM_PAGES = 240
CONTEXT = 96
MAX_SEQUENCES = 3
"""Most sequences of one pass."""
SHAPES = [
    TreeShape(1, 1, 2),
    TreeShape(4, 1, 5),
    TreeShape(6, 1, 3),
    TreeShape(1, 5, 4),
    TreeShape(3, 3, 9),
    TreeShape(5, 4, 14),
    TreeShape(3, 2, 30),
    TreeShape(2, 16, 257),
]
SAMPLED = SamplingParams(temperature=1.0, seed=1234)
CUT = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.02, seed=5)
SAMPLINGS = [GREEDY, SAMPLED, CUT, SamplingParams(temperature=0.6, seed=2**63 + 9)]


def load_heads(
    factory: pytest.TempPathFactory, device: torch.device, names: Sequence[str] = tuple(HEADS)
) -> dict[str, DraftHead]:
    """Returns some of `HEADS` in float32, by their names."""
    shape = TinyShape(vocab_size=VOCAB_SIZE, num_layers=4)
    folder = write_checkpoint(factory.mktemp("target"), shape=shape)
    target = TargetFolder(folder, dtype=torch.float32, device=device)
    token_map = torch.tensor(sorted(random.Random(5).sample(range(VOCAB_SIZE), 12)))
    return {
        name: load_head(
            write_head(factory.mktemp("head"), HEADS[name]),
            HeadKind(HEADS[name].kind),
            target,
            dtype=torch.float32,
            device=device,
            token_map=token_map if name == "mapped" else None,
        )
        for name in names
    }


def text(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


class OwnPaths:
    """See `PathOracle`: the head's own forward passes over whole sequences, without a cache."""

    def __init__(self, head: DraftHead) -> None:
        self._head, self._paths = head, Paths[tuple[list[int], Tensor, Tensor]]()
        self._pool = KvPool(head.kv_layout(PAGE_SIZE), NUM_PAGES, head.device)

    def known_tokens(self) -> list[int]:
        token_ids = self._head.vocabulary.token_ids
        return list(range(VOCAB_SIZE)) if token_ids is None else token_ids.tolist()

    def continue_path(
        self, token_ids: Sequence[int], features: Tensor, path: Sequence[int]
    ) -> Tensor:
        def longer(
            before: tuple[list[int], Tensor, Tensor], token: int
        ) -> tuple[list[int], Tensor, Tensor]:
            tokens, hidden, states = before
            return self._rows([*tokens, token], torch.cat((hidden, states[-1:])))

        start = partial(self._rows, list(token_ids[1:]), self._head.fuse(features))
        _, _, states = self._paths.find(token_ids, features, path, start, longer)
        return self._head.logits(states[-1:])[0].cpu()

    def _rows(self, tokens: list[int], hidden: Tensor) -> tuple[list[int], Tensor, Tensor]:
        rows = SequenceRows.causal(tokens, 0, range(1, NUM_PAGES))
        batch = build_batch([rows], page_size=PAGE_SIZE, device=self._head.device)
        return tokens, hidden, self._head.forward(batch, hidden, self._pool)


class CountingGrower(TreeGrower):
    """Counts trees.

    Attributes:
        num_sequences: trees grown by kinds of sampling.
    """

    num_sequences = 0

    @property
    def device(self) -> torch.device:
        return self.model.pool.device

    def begin(
        self,
        sequences: Sequence[OpenSequence],
        sources: Sequence[Tensor],
        tree: TreeShape,
        *,
        num_choices: int = 0,
        is_walk: bool = False,
        scores: RequestScores | None = None,
    ) -> GrowingTrees:
        if scores is None:
            self.num_sequences += len(sequences)
        return super().begin(
            sequences, sources, tree, num_choices=num_choices, is_walk=is_walk, scores=scores
        )


@dataclass
class TwinDrafters:
    """Two drafters that get the same calls.

    Attributes:
        grower: grower of the drafter `whole`.
        is_exact: both order equal scores alike, and rounding cannot change their order.
        grows_whole: False makes the drafter `whole` score like the other one.
    """

    grower: CountingGrower
    whole: EagleDrafter | StandaloneDrafter
    scored: EagleDrafter | StandaloneDrafter
    is_exact: bool = False
    grows_whole: bool = True

    @classmethod
    def of_head(
        cls,
        head: DraftHead,
        *,
        has_graphs: bool = False,
        is_exact: bool = False,
        num_pages: int = NUM_PAGES,
    ) -> TwinDrafters:
        layout = head.kv_layout(PAGE_SIZE)
        pools = [poison_padding(KvPool(layout, num_pages, head.device)) for _ in range(2)]
        limits = PassLimits(MAX_SEQUENCES, CONTEXT, has_graphs)
        grower = CountingGrower(HeadModel(head, pools[0]), limits)
        plain = plain_grower(HeadModel(head, pools[1]), CONTEXT)
        drafters = [
            EagleDrafter(
                HeadModel(head, pool),
                KvLeases(num_pages, PAGE_SIZE),
                max_context_tokens=CONTEXT,
                keeps_features=True,
                grower=own,
            )
            for pool, own in zip(pools, (grower, plain), strict=True)
        ]
        return cls(grower, *drafters, is_exact)

    @classmethod
    def of_decoder(cls, decoder: Decoder, *, has_graphs: bool = False) -> TwinDrafters:
        layout = decoder.kv_layout(PAGE_SIZE)
        pools = [poison_padding(KvPool(layout, NUM_PAGES, decoder.device)) for _ in range(2)]
        limits = PassLimits(MAX_SEQUENCES, CONTEXT, has_graphs)
        grower = CountingGrower(DecoderModel(decoder, pools[0]), limits)
        plain = plain_grower(DecoderModel(decoder, pools[1]), CONTEXT)
        drafters = [
            StandaloneDrafter(
                ModelRunner(decoder, pool),
                KvLeases(NUM_PAGES, PAGE_SIZE),
                own,
                max_context_tokens=CONTEXT,
            )
            for pool, own in zip(pools, (grower, plain), strict=True)
        ]
        return cls(grower, *drafters)

    def open(self, *sequences: DraftSequence) -> None:
        for sequence in sequences:
            for drafter in (self.whole, self.scored):
                drafter.open(sequence)

    def close(self, sequence: DraftSequence) -> None:
        for drafter in (self.whole, self.scored):
            drafter.close(sequence)

    def send(self, sequence: DraftSequence, start: int, end: int) -> None:
        """Sends the features of positions `[start, end)`."""
        rows = self.features(sequence, start, end)
        assert rows is not None, "a language model reads no features"
        for drafter in (self.whole, self.scored):
            drafter.add_features(sequence, rows)

    def send_all(self, *sequences: DraftSequence) -> None:
        for sequence in sequences:
            self.send(sequence, 0, sequence.num_tokens - 1)

    def commit(self, sequence: DraftSequence, tokens: Sequence[int], *, is_late: bool) -> None:
        """Commits tokens, with their features unless these are late."""
        start = sequence.num_tokens - 1
        verdict = committed(sequence, tokens)
        rows = None if is_late else self.features(sequence, start, sequence.num_tokens - 1)
        for drafter in (self.whole, self.scored):
            drafter.commit(sequence, verdict, rows)

    def trees(self, shape: TreeShape, *sequences: DraftSequence) -> list[TokenTree]:
        """Returns the trees of `whole`, after comparing them with those of `scored`."""
        # Sequences with a shape of their own are scored by their requests' parameters.
        probes = [replace(sequence, shape=shape) for sequence in sequences]
        whole = propose(self.whole, shape, *(sequences if self.grows_whole else probes))
        for tree, expected in zip(whole, propose(self.scored, shape, *probes), strict=True):
            if self.is_exact:
                assert tree.token_ids == expected.token_ids
                assert tree.parent_indices == expected.parent_indices
            assert path_values(tree) == pytest.approx(path_values(expected), abs=1e-3)
        for drafter in (self.whole, self.scored):
            drafter.check()
        return whole

    def rounds(
        self, shape: TreeShape, count: int, draw: random.Random, *batch: DraftSequence
    ) -> int:
        """Runs rounds that commit a random part of each tree; returns the number of nodes."""
        num_nodes = 0
        for _ in range(count):
            for sequence, tree in zip(batch, self.trees(shape, *batch), strict=True):
                num_nodes += len(tree)
                path = tree.path(draw.randrange(len(tree)))
                accepted = [tree.token_ids[node] for node in path[: draw.randint(0, len(path))]]
                self.commit(sequence, [*accepted, *text(draw, 1)], is_late=False)
        return num_nodes

    def features(self, sequence: DraftSequence, start: int, end: int) -> FeatureRows | None:
        spec = self.whole.limits.feature_spec
        if spec is None:
            return None
        rows = []
        for position in range(start, end):
            place = (sequence.key.sequence_id, position, sequence.token_ids[position])
            draw = torch.Generator().manual_seed(hash(place) % 2**31)
            rows.append(torch.randn(spec.width, generator=draw))
        return FeatureRows(start, torch.stack(rows).to(self.grower.device))
