"""Drafts with a smaller language model that has its own paged KV and prefix cache.

A round costs one forward a level for all sequences together: the first computes the tokens the
last verdict committed, and its logits are the first level; each further level computes the K
frontier nodes of the tree. Where the device can do without the host, it grows the whole trees in
one pass, see `standalone_contexts`. KV of the accepted path is kept: a chain's is in place already,
a tree's is moved to the front of its tail. So is what was drafted ahead level by level below it;
what passes drafted ahead is in pages of its own, see `branch_drafter`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from services.draft.draft_scores import LevelScores, level_scores
from services.draft.drafters.branch_drafter import BranchDrafter
from services.draft.drafters.draft_kv import Tail, TreeTail, beam_rows, learn_levels
from services.draft.drafters.drafter import DrafterLimits, Lookahead, Proposal, SharedHead
from services.draft.drafters.outcome_drafter import (
    JointLookahead,
    OutcomeDrafter,
    TailWork,
    learn_rows,
)
from services.draft.drafters.placement import (
    Host,
    allocate_kv,
    context_for,
    device_for,
    log_quantisation,
    pass_limits,
    reserved_for_model,
)
from services.draft.drafters.standalone_contexts import StandaloneContexts, StandaloneTrees
from services.draft.drafters.whole_trees import PassGraphs, grown_shape, grows_whole, split
from services.draft.events import FeatureRows
from services.draft.recurrent_drafts import check_no_states
from services.draft.sequence import DraftSequence
from services.draft.settings import DraftSettings
from services.draft.vocabulary import target_vocabulary
from services.draft.worker import MappedHeadLimits
from services.followers import Followers
from shared.kv.batch import SequenceRows
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.layers.tensor_group import TensorGroup
from shared.model_files import num_ids
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from shared.runtime.device import dtype_named
from shared.runtime.graphs import ForwardGraphs, GraphLimits, graph_memory_bytes
from shared.runtime.lockstep import Leader, TreeLeader
from shared.runtime.memory import CacheSize, fraction_in_force, refusing_shortage
from shared.runtime.outcome_chains import MAX_OUTCOMES
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import DecoderModel
from shared.speculation.noise import fresh_generator
from shared.speculation.tree import Children, TreeGrowth, choose_children
from shared.tokens import TreeShape, Verdict

log = logging.getLogger(__name__)

CONTEXT_MARGIN = 33
"""Tokens of the context kept for the deepest tree and the token it hangs off."""


class StandaloneDrafter:
    """See `Drafter`.

    Attributes:
        decoder: of the draft model.
    """

    def __init__(
        self,
        runner: ModelRunner,
        leases: KvLeases,
        *,
        max_context_tokens: int,
        grower: TreeGrower | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Args:
        grower: of the runner's model and pool; None grows all trees level by level.
        generator: of the host; the source of what is drawn for targets that verify by the
            draft's distributions. Seeded by the system when left out.
        """
        self.decoder, self._pool = runner.decoder, runner.pool
        self._vocab_size = runner.decoder.num_proposed
        self._generator = generator or fresh_generator()
        self._max_context_tokens = max_context_tokens
        self._contexts = StandaloneContexts(
            runner, leases, max_context_tokens=max_context_tokens, margin_tokens=CONTEXT_MARGIN
        )
        self._outcomes = OutcomeDrafter(
            self._tail, self._compute_tails, max_depth=CONTEXT_MARGIN - 1, keeps_rows=True
        )
        self._lookahead: Lookahead = self._outcomes
        self._branches: BranchDrafter | None = None
        if grower is not None:
            trees = StandaloneTrees(grower, self._contexts)
            self._branches = BranchDrafter(trees, self._contexts, vocab_size=self._vocab_size)
            self._lookahead = JointLookahead(self._branches, self._outcomes)

    @property
    def _graphs(self) -> PassGraphs | None:
        return None if self._branches is None else self._branches.graphs

    @property
    def lookahead(self) -> Lookahead:
        return self._lookahead

    @property
    def limits(self) -> DrafterLimits:
        return DrafterLimits(
            vocab_size=self.decoder.config.vocab_size,
            max_context_tokens=self._max_context_tokens,
            mapped_head=self._mapped_head,
        )

    @property
    def _mapped_head(self) -> MappedHeadLimits | None:
        """Sizes of the model in rounds of a target; None where several processes hold it."""
        if self.decoder.group is not None:
            return None
        return MappedHeadLimits(
            self._pool.page_size, self._vocab_size, self._longest, num_outcomes=MAX_OUTCOMES
        )

    @property
    def _longest(self) -> int:
        """Longest sequence that needs no window."""
        return self._max_context_tokens - CONTEXT_MARGIN

    def share_head(self) -> SharedHead:
        """Lends the model and most of the free pages, for good."""
        model = DecoderModel(self.decoder, self._pool)
        return SharedHead.of_most(model, self._contexts.leases, max_context_tokens=self._longest)

    def open(self, sequence: DraftSequence) -> None:
        self._contexts.open(sequence)

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        token_ids = verdict.committed_token_ids
        if self._branches is not None and grows_whole(sequence):
            self._branches.commit(sequence, token_ids)
            return
        self._outcomes.observe(sequence, token_ids)
        self._contexts.commit(sequence)
        self._outcomes.drop(sequence)

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        """Nothing to do: a language model reads tokens only."""

    def backlog(self, sequence: DraftSequence) -> int:
        return self._contexts.backlog(sequence)

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        shape = grown_shape(shape, self._vocab_size)
        # Where verdicts are prepared for, the leaves of trees are computed, too.
        num_levels = shape.num_steps if self._outcomes.budget else shape.num_steps - 1
        num_rows = num_levels * shape.topk
        has_room = self._contexts.reserve(sequence, num_rows)
        if not has_room and self._branches is not None and self._branches.make_room():
            has_room = self._contexts.reserve(sequence, num_rows)
        return has_room

    def catch_up(self, sequences: Sequence[DraftSequence], max_tokens: int) -> int:
        """Leaves the last token of each: its logits start a tree."""
        chunk: list[tuple[DraftSequence, int]] = []
        num_taken = 0
        for sequence in sequences:
            count = max(min(self.backlog(sequence) - 1, max_tokens - num_taken), 0)
            chunk.append((sequence, count))
            num_taken += count
        self._contexts.compute(chunk)
        return num_taken

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        shape = grown_shape(shape, self._vocab_size)
        branches = self._branches
        whole, rest = ([], sequences) if branches is None else split(sequences)
        return [
            *(self._grow(rest, shape) if rest else ()),
            *(branches.propose(whole, shape) if branches is not None and whole else ()),
        ]

    def _grow(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        """Grows trees level by level."""
        contexts, growth = self._contexts, TreeGrowth(shape)
        scores = level_scores(sequences, shape, contexts.device, self._generator)
        rows = [contexts.open_rows(sequence) for sequence in sequences]
        tails = [TreeTail(contexts.kv_of(s), s.token_ids[-1]) for s in sequences]
        levels = [self._children(scores, rows, tails, shape)]
        growth.add(levels[0].best(shape.topk))
        for sequence in sequences:
            contexts.publish(sequence)
        while not growth.is_complete:
            rows = beam_rows(growth.select_beam(), tails)
            levels.append(self._children(scores, rows, tails, shape))
            growth.add(levels[-1].best(shape.topk))
        if self._outcomes.budget:
            learn_levels(tails, levels)
        for sequence, tail in zip(sequences, tails, strict=True):
            contexts.kv_of(sequence).tail = tail.tail
        trees = scores.finished([result.tree for result in growth.finish()])
        return list(map(Proposal, sequences, trees))

    def close(self, sequence: DraftSequence) -> None:
        self._outcomes.drop(sequence)
        if self._branches is not None:
            self._branches.drop(sequence)
        self._contexts.close(sequence)

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        return self._graphs is None or self._graphs.is_prepared(shape, num_sequences)

    def prepare_for(self, shape: TreeShape, num_sequences: int) -> bool:
        """Captures a graph of trees that are grown in one pass."""
        return self._graphs is not None and self._graphs.prepare_for(shape, num_sequences)

    def prepare_next(self, shape: TreeShape) -> bool:
        """Captures a graph of trees that are grown in one pass."""
        return self._graphs is not None and self._graphs.prepare_next(shape)

    def flush_prefix_cache(self) -> int:
        return self._contexts.leases.flush()

    def retire_prefix_cache(self) -> None:
        self._contexts.leases.retire()

    def gauges(self) -> Mapping[str, float]:
        leases = self._contexts.leases
        return {
            "page_count": float(leases.num_pages),
            "free_page_count": float(leases.num_free_pages),
            "cached_page_count": float(leases.num_cached_pages),
            "held_page_count": float(leases.num_held_pages),
        }

    def check(self) -> None:
        self._contexts.leases.check()

    def _children(
        self,
        scores: LevelScores,
        rows: Sequence[SequenceRows],
        tails: Sequence[TreeTail],
        shape: TreeShape,
    ) -> Children:
        """As many as the tree needs, and those that verdicts may end in beside them."""
        logits = self._contexts.forward(rows)
        width = min(shape.topk + self._outcomes.budget, logits.shape[1])
        return choose_children(scores(logits, [tail.paths for tail in tails]), width)

    def _tail(self, sequence: DraftSequence) -> Tail | None:
        return self._contexts.kv_of(sequence).tail

    def _compute_tails(self, work: Sequence[TailWork]) -> list[DraftSequence]:
        """Computes nodes behind the committed tokens, one forward for all sequences."""
        contexts = self._contexts
        served = [each for each in work if contexts.reserve_tail(each.sequence, len(each.nodes))]
        if not served:
            return []
        pages = [contexts.kv_of(each.sequence).lease.pages for each in served]
        rows = [each.tail.lay_out(each.nodes, own) for each, own in zip(served, pages, strict=True)]
        learn_rows(served, contexts.forward(rows), contexts.device)
        return [each.sequence for each in served]


# Loads the draft model and its KV pool.

MOST_TAIL_ROWS = 512
"""Rows of trees behind the context that a graph reaches; larger forwards run without."""


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """The model runner and the tree grower of a standalone draft.

    Attributes:
        grower: None where trees grow level by level.
        max_context_tokens: that a forward can look back on.
    """

    runner: ModelRunner
    grower: TreeGrower
    leases: KvLeases
    max_context_tokens: int


def build_standalone(
    settings: DraftSettings, followers: Followers | None = None, host: Host | None = None
) -> StandaloneDrafter:
    """Returns the drafter with weights loaded.

    Args:
        followers: the other processes that hold a part of the model; None holds it all.
        host: the target of this process, if there is one.

    Raises:
        CheckpointError: the folder cannot be served.
        SettingsError: memory does not hold what the settings ask for.
    """
    if followers is None:
        built = build_model(settings, host=host)
    else:
        built = build_model(settings, followers.group, followers.leader)
    return StandaloneDrafter(
        built.runner,
        built.leases,
        max_context_tokens=built.max_context_tokens,
        grower=built.grower,
    )


def build_model(
    settings: DraftSettings,
    group: TensorGroup | None = None,
    leader: Leader | None = None,
    host: Host | None = None,
) -> BuiltModel:
    """Loads the model, or this process's part of it, and allocates its KV pool.

    Args:
        group: processes that share the model; all of them call this at the same time.
        leader: of rank 0.
        host: see `build_standalone`.

    Raises:
        CheckpointError: the folder cannot be served.
        SettingsError: memory does not hold what the settings ask for.
    """
    check_no_states(settings)
    folder = settings.model_folder
    device = device_for(settings)
    host = host or Host()
    config = ModelConfig.from_folder(folder)
    dtype = dtype_named(settings.dtype, config.dtype, device)
    context = context_for(settings, config.max_position_embeddings, margin_tokens=CONTEXT_MARGIN)
    vocabulary = target_vocabulary(settings)
    decoder = load_decoder(
        folder,
        dtype=dtype,
        device=device,
        options=settings.model_options,
        show_progress=leader is not None or group is None,
        group=group,
        vocabulary=vocabulary,
        vocab_size=host.vocab_size or num_ids(settings.target_tokenizer or folder),
    )
    config = decoder.config
    log.info("%s in %s on %s", folder.name, dtype, device)
    if vocabulary is not None:
        log.info(
            "%s has another tokenizer than its target; it drafts %s",
            *(folder.name, vocabulary.words()),
        )
    log_quantisation(settings, decoder)
    layout = decoder.kv_layout(settings.page_size, dtype)
    limits = _graph_limits(settings, context)
    passes = pass_limits(settings, device, max_context_tokens=context)
    reserved_bytes = 0 if limits is None else graph_memory_bytes(config, limits, dtype)
    reserved_bytes += reserved_for_model(settings, config, dtype, passes)
    pool, leases = allocate_kv(
        settings,
        layout,
        device,
        max_context_tokens=context,
        reserved_bytes=host.reserved_bytes(device, reserved_bytes),
        most_tokens=host.most_tokens,
        group=group,
    )
    graphs = None
    if limits is not None:
        cache = CacheSize(
            pool.storage.nbytes,
            fraction_in_force(settings.mem_fraction_static, device),
            settings.max_total_tokens,
        )
        is_first = leader is not None or group is None
        graphs = _captured(decoder, pool, limits, cache, show_progress=is_first)
    runner = ModelRunner(decoder, pool, graphs, leader=leader)
    tree_leader = None if leader is None else TreeLeader(leader)
    grower = TreeGrower(DecoderModel(decoder, pool), passes, leader=tree_leader)
    return BuiltModel(runner, grower, leases, context)


def _captured(
    decoder: Decoder, pool: KvPool, limits: GraphLimits, cache: CacheSize, *, show_progress: bool
) -> ForwardGraphs:
    """Returns all graphs; processes of a group capture the same one at the same time."""
    graphs = ForwardGraphs(decoder, pool, limits, cache)
    words = "no memory for CUDA graphs of {} rows: {} or --max-running-requests, or leave {} out"
    with refusing_shortage(
        lambda shortage: words.format(
            limits.max_rows, cache.advice(shortage), "--enable-cuda-graph"
        )
    ):
        graphs.capture(show_progress=show_progress)
    return graphs


def _graph_limits(settings: DraftSettings, max_context_tokens: int) -> GraphLimits | None:
    if not settings.enable_cuda_graph:
        return None
    return GraphLimits.of(
        max_sequences=settings.max_running_requests,
        max_tree_nodes=MOST_TAIL_ROWS,
        max_context_tokens=max_context_tokens + MOST_TAIL_ROWS,
    )
