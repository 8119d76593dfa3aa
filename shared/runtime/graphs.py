"""CUDA graphs of forwards (plain decode, verification of trees, prompts), their fixed inputs and
the store that keeps them.

A graph fixes shapes and addresses, not contents. One graph serves every batch of up to its numbers
of rows and sequences, however rows are spread over sequences: queries are ragged inside a graph as
they are outside. Padding rows touch only the padding page. Forwards that fit no graph run eagerly.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from shared.kernels.split_plan import MAX_PLAIN_ROWS, num_part_rows, num_splits
from shared.kv.batch import ForwardBatch, empty_decode_batch
from shared.kv.pool import KvLayout, KvPool
from shared.kv.state_plan import StateInputs, StatePlan, StateSlots
from shared.layers.tensor_group import TensorGroup
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder, DecoderOutput
from shared.runtime.memory import CacheSize, Shortage
from shared.runtime.ring_memory import CudaMemory

logger = logging.getLogger(__name__)

# The fixed input tensors of CUDA graphs, and the copy of a batch into them.

_FEWEST_ROWS, _MOST_ROWS, _ROWS_A_SEQUENCE = 64, 512, 4
MAX_PROMPT_ROWS = 2048
"""Above, the device takes longer for the arithmetic than the host for the launches."""
MAX_PROMPT_SEQUENCES = 64
"""Most sequences of a forward with many prompt rows."""
_MANY_SEQUENCES_ROWS = 1280
"""Rows up to which a forward with prompts may have more sequences than that: attention holds
partial results for each decoding sequence."""


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Sizes of the largest graph.

    Attributes:
        max_rows: rows of a forward.
        max_sequences: sequences of a forward.
        max_tail_width: columns of the tail mask.
        max_context_tokens: longest sequence.
        max_prompt_rows: rows of a forward with prompts and no trees; 0 makes no graphs for them.
    """

    max_rows: int
    max_sequences: int
    max_tail_width: int
    max_context_tokens: int
    max_prompt_rows: int = 0

    @classmethod
    def of(
        cls,
        *,
        max_sequences: int,
        max_tree_nodes: int,
        max_context_tokens: int,
        max_prompt_rows: int = 0,
    ) -> GraphLimits:
        """Returns limits for steps of up to `max_sequences`, with a few rows for each sequence."""
        return cls(
            max_rows=min(_MOST_ROWS, max(_FEWEST_ROWS, _ROWS_A_SEQUENCE * max_sequences)),
            max_sequences=max_sequences,
            max_tail_width=max_tree_nodes + MAX_PLAIN_ROWS,
            max_context_tokens=max_context_tokens,
            max_prompt_rows=max_prompt_rows,
        )


class GraphInputs:
    """A `ForwardBatch` of the largest size at fixed addresses, with a plan for recurrent states if
    the layout has some.

    All graphs share these tensors: a bucket of R rows and B sequences reads their first elements.

    Attributes:
        num_pages: columns of the page table; a sequence may hold more pages than its rows need.
    """

    def __init__(self, limits: GraphLimits, layout: KvLayout, device: torch.device) -> None:
        num_tree_rows, num_sequences = limits.max_rows, limits.max_sequences
        num_rows = max(num_tree_rows, limits.max_prompt_rows)
        page_size, self._states = layout.page_size, None
        if layout.states is not None:
            # A path for each row, and the tokens that a sequence has committed since its last step.
            line = limits.max_tail_width + layout.states.window
            num_places = (num_tree_rows + num_sequences) * line
            self._states = StateSlots(num_tree_rows, num_sequences, num_places, device)
        self.num_pages = num_pages = -(-limits.max_context_tokens // page_size)
        self._largest = ForwardBatch(
            token_ids=torch.zeros(num_rows, dtype=torch.int64, device=device),
            positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
            slots=torch.zeros(num_rows, dtype=torch.int64, device=device),
            query_starts=torch.zeros(num_sequences + 1, dtype=torch.int32, device=device),
            kv_lengths=torch.zeros(num_sequences, dtype=torch.int32, device=device),
            prefix_lengths=torch.zeros(num_sequences, dtype=torch.int32, device=device),
            page_table=torch.zeros((num_sequences, num_pages), dtype=torch.int32, device=device),
            tail_mask=torch.zeros(
                num_tree_rows * limits.max_tail_width, dtype=torch.bool, device=device
            ).view(num_tree_rows, limits.max_tail_width),
            is_causal=torch.ones(num_sequences, dtype=torch.bool, device=device),
            logit_rows=torch.zeros(num_rows, dtype=torch.int64, device=device),
            max_query_length=1,  # see `bucket`
            max_kv_length=limits.max_context_tokens,
            page_size=page_size,
        )

    def bucket(self, key: GraphKey) -> ForwardBatch:
        """Returns the input batch of a graph."""
        whole, num_rows, num_sequences = self._largest, key.num_rows, key.num_sequences
        mask = whole.tail_mask
        assert mask is not None
        return replace(
            whole,
            token_ids=whole.token_ids[:num_rows],
            positions=whole.positions[:num_rows],
            slots=whole.slots[:num_rows],
            query_starts=whole.query_starts[: num_sequences + 1],
            kv_lengths=whole.kv_lengths[:num_sequences],
            prefix_lengths=whole.prefix_lengths[:num_sequences],
            page_table=whole.page_table[:num_sequences],
            tail_mask=mask[:num_rows] if key.has_tail else None,
            is_causal=whole.is_causal[:num_sequences],
            logit_rows=whole.logit_rows[:num_rows],
            # 1 keeps sequences out of the chunk kernel, for which only prompt graphs have blocks.
            max_query_length=num_rows if key.has_prompts else 1,
        )

    def states(self, key: GraphKey) -> StateInputs | None:
        """Returns the state plan that a graph reads; None if the layout has no states."""
        if self._states is None:
            return None
        return self._states.inputs.first(key.num_rows, key.num_sequences, has_tail=key.has_tail)

    def fits(self, plan: StatePlan | None) -> bool:
        """Whether a plan fits; one of sequences that lost their state and start anew does not."""
        return plan is None or (self._states is not None and self._states.fits(plan))

    def fill_empty(self, bucket: ForwardBatch) -> None:
        """Queues a batch without sequences, as input of a capture.

        Also clears the state plan of the forward before: a second run of that plan would advance
        states that are advanced already.
        """
        self.fill(bucket, empty_decode_batch(1, bucket.page_size, bucket.token_ids.device))
        if self._states is not None:
            self._states.clear()

    def fill_states(self, plan: StatePlan | None) -> None:
        """Queues one copy of a plan that fits; `plan` is None if the layout has no states."""
        if plan is not None:
            assert self._states is not None
            self._states.fill(plan)

    def fill(self, bucket: ForwardBatch, batch: ForwardBatch) -> None:
        """Copies `batch` to the front of `bucket` and pads the rest, in one launch."""
        from shared.kernels.padding_jit import pad_batch

        mask, target_mask = batch.tail_mask, bucket.tail_mask
        num_programs = max(len(bucket.token_ids), len(bucket.kv_lengths) + 1)
        # A batch of causal rows has no mask, and its rows read none.
        has_tail = mask is not None and target_mask is not None
        pad_batch[(num_programs,)](
            batch.token_ids, batch.positions, batch.slots, batch.logit_rows,
            batch.query_starts, batch.kv_lengths, batch.prefix_lengths, batch.is_causal,
            batch.page_table, batch.is_causal if mask is None else mask,
            bucket.token_ids, bucket.positions, bucket.slots, bucket.logit_rows,
            bucket.query_starts, bucket.kv_lengths, bucket.prefix_lengths, bucket.is_causal,
            bucket.page_table, bucket.is_causal if target_mask is None else target_mask,
            len(batch.token_ids), len(batch.logit_rows), len(batch.kv_lengths),
            batch.page_table.shape[1], 1 if mask is None else mask.shape[1],
            len(bucket.token_ids), len(bucket.kv_lengths), bucket.page_table.shape[1],
            1 if target_mask is None else target_mask.shape[1],
            HAS_TAIL=has_tail, BLOCK=128, num_warps=4,
        )  # fmt: skip


# Graphs by key, as many as memory holds.

# torch captures on one stream of the process, whichever thread asks.
_CAPTURE_LOCK = threading.Lock()


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    pool: Any,
    stream: torch.cuda.Stream | None = None,
    group: TensorGroup | None = None,
) -> Iterator[None]:
    """Captures into `graph` the work that the body queues.

    Another thread of the process may use the device meanwhile; to capture, it waits. It must not
    synchronize with the whole device, which breaks a capture; this function does so before it
    begins. Garbage collection is off, as the destruction of a graph breaks a capture, too.

    Args:
        pool: `torch.cuda.graph_pool_handle`.
        stream: stream on which the graph will run while others run elsewhere: libraries keep a
            workspace for each stream that captures. None is the stream of all other captures.
        group: group whose collectives may be in the graph.
    """
    if group is not None:
        group.graphs.append(graph)
    with _CAPTURE_LOCK:
        was_enabled = gc.isenabled()
        gc.disable()
        # torch leaves the thread on the capture stream when a capture fails to end.
        own_stream = torch.cuda.stream(torch.cuda.current_stream())
        try:
            with (
                own_stream,
                torch.cuda.graph(
                    graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ),
            ):
                yield
        finally:
            if was_enabled:
                gc.enable()


# Each size costs captures at start-up. Padding up to the next size costs little, because small
# matrix products are bound by reading their weights.
_ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 512)
_PROMPT_ROW_BUCKETS = (
    *(32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 576, 640, 768, 896, 1024),
    *(1152, 1280, 1536, 1792),
)
# A graph launches attention blocks for its largest number of sequences. Trees mostly have this many
# rows; room for one sequence for each row would make the launcher assume a full device.
_ROWS_A_TREE = 4
_FEWEST_ROWS_OF_TREES = 24


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The properties by which a graph is chosen.

    Attributes:
        num_rows: rows of the bucket.
        num_sequences: sequences of the bucket.
        has_tail: whether some sequence may be a tree.
        capture_layers: layers whose input the forward returns.
        has_prompts: whether some sequence may have more rows than `MAX_PLAIN_ROWS`. Few rows of
            such a forward have logits, which are computed behind the graph.
    """

    num_rows: int
    num_sequences: int
    has_tail: bool
    capture_layers: tuple[int, ...]
    has_prompts: bool = False


def sequence_buckets(num_rows: int, max_sequences: int, *, has_tail: bool) -> tuple[int, ...]:
    """Returns the numbers of sequences that graphs of `num_rows` rows have, ascending."""
    most, few = min(num_rows, max_sequences), num_rows // _ROWS_A_TREE
    has_trees = has_tail and num_rows >= _FEWEST_ROWS_OF_TREES
    return (few, most) if has_trees and few < most else (most,)


def prompt_sequence_buckets(num_rows: int, max_sequences: int) -> tuple[int, ...]:
    """Returns `sequence_buckets` of forwards with prompts."""
    most = min(num_rows, max_sequences)
    few = min(most, MAX_PROMPT_SEQUENCES)
    return (few, most) if few < most and num_rows <= _MANY_SEQUENCES_ROWS else (few,)


@cache  # called in every step
def row_buckets(max_rows: int, sizes: tuple[int, ...] = _ROW_BUCKETS) -> tuple[int, ...]:
    """Returns the numbers of rows that graphs are captured for, ascending, `max_rows` last."""
    return (*(rows for rows in sizes if rows < max_rows), max_rows)


def prompt_row_buckets(limits: GraphLimits) -> tuple[int, ...]:
    """Returns `row_buckets` of forwards with prompts."""
    most = limits.max_prompt_rows
    return row_buckets(most, _PROMPT_ROW_BUCKETS) if most else ()


def keys_of(limits: GraphLimits, capture_layers: tuple[int, ...]) -> list[GraphKey]:
    """Returns all keys for one set of captured layers, ascending; those with prompts come last."""
    sizes = row_buckets(limits.max_rows)
    most_plain = _bucket_of(limits.max_sequences, sizes) or sizes[-1]
    return [
        *(
            GraphKey(num_rows, num_sequences, has_tail, capture_layers)
            for num_rows in sizes
            for has_tail in (False, True)
            if has_tail or num_rows <= most_plain
            for num_sequences in sequence_buckets(num_rows, limits.max_sequences, has_tail=has_tail)
        ),
        *(
            GraphKey(num_rows, num_sequences, False, capture_layers, has_prompts=True)
            for num_rows in prompt_row_buckets(limits)
            for num_sequences in prompt_sequence_buckets(num_rows, limits.max_sequences)
        ),
    ]


def largest_keys(keys: Sequence[GraphKey]) -> list[GraphKey]:
    """Returns the keys, of `keys` in ascending order, that no larger one of the same kind covers;
    those with the most sequences first, then with the most rows. A key covers those with at most
    as many rows and sequences.

    Graphs share memory. A graph that needs a larger tensor than every graph before it allocates
    memory for it. If these keys are captured first, the others need none. The largest tensors are
    attention's partial results, which grow with the sequences.
    """
    largest: list[GraphKey] = []
    for key in reversed(keys):
        if not any(
            other.num_rows >= key.num_rows and other.num_sequences >= key.num_sequences
            for other in largest
            if (other.has_tail, other.has_prompts) == (key.has_tail, key.has_prompts)
        ):
            largest.append(key)
    return sorted(largest, key=lambda key: key.num_sequences, reverse=True)


def key_of(
    batch: ForwardBatch, limits: GraphLimits, capture_layers: tuple[int, ...]
) -> GraphKey | None:
    """Returns the key of the smallest graph for a batch; None if the batch is too large for every
    graph."""
    has_tail, most = batch.tail_mask is not None, limits.max_sequences
    has_prompts = not has_tail and batch.max_query_length > MAX_PLAIN_ROWS
    rows = prompt_row_buckets(limits) if has_prompts else row_buckets(limits.max_rows)
    num_rows = _bucket_of(len(batch.token_ids), rows)
    if num_rows is None:
        return None
    if has_prompts:
        sequences = prompt_sequence_buckets(num_rows, most)
    else:
        sequences = sequence_buckets(num_rows, most, has_tail=has_tail)
    num_sequences = _bucket_of(len(batch.kv_lengths), sequences)
    if num_sequences is None:
        return None
    return GraphKey(num_rows, num_sequences, has_tail, capture_layers, has_prompts=has_prompts)


def _bucket_of(count: int, buckets: Sequence[int]) -> int | None:
    return next((size for size in buckets if size >= count), None)


Key = TypeVar("Key", bound=Hashable)
Graph = TypeVar("Graph")


class GraphStore(Generic[Key, Graph]):
    """Graphs by key, each captured on first use.

    Args:
        capture: captures the graph of a key.
        is_shared: whether other ranks capture the same graph at the same time, and wait for this
            one in the middle of it.
        advise: returns the setting to change for a shortage of memory.

    Attributes:
        is_full: whether memory for another graph is lacking; the captured ones stay in use.
    """

    def __init__(
        self,
        capture: Callable[[Key], Graph],
        *,
        is_shared: bool,
        advise: Callable[[Shortage], str],
    ) -> None:
        self.is_full = False
        self._capture = capture
        self._is_shared = is_shared
        self._advise = advise
        self._graphs: dict[Key, Graph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def __iter__(self) -> Iterator[Key]:
        return iter(self._graphs)

    def of(self, key: Key) -> Graph | None:
        """Returns a graph; None if memory for it is lacking.

        Raises:
            RuntimeError: memory is lacking and other ranks share the graph: they would wait for
                ever if this one went on without it.
        """
        if key not in self._graphs and not self.is_full:
            try:
                self._graphs[key] = self._capture(key)
            except RuntimeError as error:
                advice = self._advise(Shortage.of(error))
                if self._is_shared:
                    logger.critical(
                        "no memory for CUDA graph %d of the group: %s", len(self) + 1, advice
                    )
                    raise
                self.is_full = True
                torch.cuda.empty_cache()
                logger.warning(
                    "no memory for more than %d CUDA graphs; other steps run without one: %s",
                    *(len(self), advice),
                )
        return self._graphs.get(key)


# Rows of a few sequences, or of one tree: the first requests need these graphs.
_FIRST_ROWS = 8
# Most sets of captured layers that have graphs; forwards with other sets run without.
_MAX_CAPTURE_KINDS = 3
# Largest planned step: computed rows, rows that draw, and bytes of such a row for each logit.
_STEP_ROWS, _DRAWN_ROWS, _DRAWN_BYTES = 8192, 256, 24


@dataclass(frozen=True, slots=True)
class CapturedForward:
    """A graph with its input and output tensors, all of bucket size.

    Attributes:
        logits: None if the forward has prompts.
    """

    graph: torch.cuda.CUDAGraph
    bucket: ForwardBatch
    logits: Tensor | None
    hidden: Tensor
    features: tuple[Tensor, ...]


class ForwardGraphs:
    """All graphs of one decoder over one pool.

    All graphs share the memory of intermediate values and results, so results are valid until the
    next run of any graph.

    Args:
        cache: cache settings that out-of-memory warnings give advice on; None names no settings.
    """

    def __init__(
        self, decoder: Decoder, pool: KvPool, limits: GraphLimits, cache: CacheSize | None = None
    ) -> None:
        assert pool.device.type == "cuda"
        self.limits = limits
        self._decoder = decoder
        self._pool = pool
        self._inputs = GraphInputs(limits, pool.layout, pool.device)
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs = GraphStore(
            self._capture,
            is_shared=decoder.group is not None,
            advise=(cache or CacheSize(pool.storage.nbytes)).advice,
        )
        self._uncaptured: list[GraphKey] = []

    def capture(
        self,
        capture_layers: tuple[int, ...] = (),
        *,
        has_trees: bool = True,
        show_progress: bool = False,
    ) -> None:
        """Captures every bucket; see `begin`.

        Args:
            has_trees: whether to capture graphs for trees, too.
        """
        self.begin(capture_layers, has_trees=has_trees, show_progress=show_progress)
        with tqdm(
            total=len(self._graphs) + len(self._uncaptured),
            initial=len(self._graphs),
            desc="CUDA graphs",
            unit="graph",
            disable=None if show_progress else True,
        ) as progress:
            while self.capture_next():
                progress.update()

    def begin(
        self,
        capture_layers: tuple[int, ...] = (),
        *,
        has_trees: bool = True,
        show_progress: bool = False,
    ) -> None:
        """Captures the largest buckets, whose memory the others reuse, and the buckets of a few
        rows, which the first requests need. `capture_next` captures the others; a forward that
        needs one of them earlier captures it itself.

        Args:
            capture_layers: the layers that nearly every forward will capture.
        """
        before = torch.cuda.mem_get_info(self._pool.device)[0]
        keys = keys_of(self.limits, capture_layers)
        keys = [key for key in keys if has_trees or not key.has_tail]
        first = largest_keys(keys)
        others = [key for key in reversed(keys) if key not in first]
        self._uncaptured = [key for key in others if key.num_rows > _FIRST_ROWS]
        first += [key for key in others if key.num_rows <= _FIRST_ROWS]
        if self._decoder.group is None:
            from shared.runtime.kernel_compiler import compile_kernels

            work = (partial(self._forward, self._inputs.bucket(key), key) for key in keys)
            compile_kernels(work, self._pool.device)
        for key in tqdm(
            first, desc="first CUDA graphs", unit="graph", disable=None if show_progress else True
        ):
            self._graph_of(key)
        taken = (before - torch.cuda.mem_get_info(self._pool.device)[0]) / 2**30
        logger.info(
            "%s CUDA graphs take %.2f GiB; %s are left for later",
            *(len(self._graphs), taken, len(self._uncaptured)),
        )

    def capture_next(self) -> bool:
        """Captures the smallest uncaptured bucket; returns whether it captured one."""
        while self._uncaptured:
            key = self._uncaptured.pop()
            if key not in self._graphs:
                return self._graph_of(key) is not None
        return False

    def fits(
        self, batch: ForwardBatch, capture_layers: Sequence[int], plan: StatePlan | None = None
    ) -> bool:
        """Whether a graph can compute `batch`, with the plan for its recurrent states."""
        limits, kinds = self.limits, {key.capture_layers for key in self._graphs}
        return (
            key_of(batch, limits, tuple(capture_layers)) is not None
            and batch.max_kv_length <= limits.max_context_tokens
            and batch.page_table.shape[1] <= self._inputs.num_pages
            and (batch.tail_mask is None or batch.tail_mask.shape[1] <= limits.max_tail_width)
            and (tuple(capture_layers) in kinds or len(kinds) < _MAX_CAPTURE_KINDS)
            and self._inputs.fits(plan)
        )

    @torch.inference_mode()
    def run(
        self, batch: ForwardBatch, capture_layers: tuple[int, ...], plan: StatePlan | None = None
    ) -> CapturedForward | None:
        """Computes a batch that fits; returns None if memory for its graph is lacking.

        The first run of a size, or with other captured layers, captures the graph, which takes
        about as long as a hundred steps.
        """
        key = key_of(batch, self.limits, capture_layers)
        assert key is not None, "the batch fits no graph"
        captured = self._graph_of(key)
        if captured is not None:
            self._inputs.fill(captured.bucket, batch)
            self._inputs.fill_states(plan)
            captured.graph.replay()
        return captured

    def _graph_of(self, key: GraphKey) -> CapturedForward | None:
        captured = self._graphs.of(key)
        if captured is None:
            self._uncaptured.clear()
        return captured

    @torch.inference_mode()
    def _capture(self, key: GraphKey) -> CapturedForward:
        bucket = self._inputs.bucket(key)
        self._inputs.fill_empty(bucket)
        # An eager run loads kernels and allocates the workspaces of products outside of the graph.
        self._forward(bucket, key)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._memory, group=self._decoder.group):
            output, logits = self._forward(bucket, key)
        return CapturedForward(
            graph,
            bucket,
            None if logits is None else unowned_view(logits),
            unowned_view(output.hidden),
            tuple(map(unowned_view, output.features)),
        )

    def _forward(self, bucket: ForwardBatch, key: GraphKey) -> tuple[DecoderOutput, Tensor | None]:
        """Returns the output, and the logits of all logit rows; None for a forward with prompts."""
        states = self._inputs.states(key)
        output = self._decoder.forward(
            bucket, self._pool, capture_layers=key.capture_layers, states=states
        )
        if key.has_prompts:
            return output, None
        logits = self._decoder.logits(output.hidden.index_select(0, bucket.logit_rows))
        return output, logits


def unowned_view(tensor: Tensor) -> Tensor:
    """Returns a view of a graph's result that does not keep its memory allocated. Graphs of other
    sizes, which never run at the same time, use that memory, too."""
    assert tensor.is_contiguous()
    elements = tensor.view(-1).view(torch.uint8)
    memory = CudaMemory(elements.data_ptr(), len(elements))
    elements = torch.as_tensor(memory, device=tensor.device)
    return elements.view(tensor.dtype).view(tensor.shape)


def graph_memory_bytes(config: ModelConfig, limits: GraphLimits, dtype: torch.dtype) -> int:
    """Estimates the memory of the largest graph beside weights and cache; other graphs share it."""
    rows, prompt_rows = limits.max_rows, limits.max_prompt_rows
    many_rows = min(max(rows, prompt_rows), _MANY_SEQUENCES_ROWS)
    context_tokens = limits.max_context_tokens
    attention = _partial_bytes(config, many_rows, limits.max_sequences, context_tokens)
    logits = rows * config.vocab_size * (4 + dtype.itemsize)
    blocks = max(rows, prompt_rows) * _row_elements(config) * dtype.itemsize
    masks = rows * limits.max_tail_width * 9
    return attention + logits + blocks + masks


def round_graph_bytes(
    decoder: Decoder, num_rows: int, num_sequences: int, max_context_tokens: int
) -> int:
    """Estimates the memory of the graphs of a round beside weights and caches. Those of smaller
    rounds share it."""
    config, shard = decoder.config, decoder.shard
    attention = _partial_bytes(config, num_rows, num_sequences, max_context_tokens)
    elements = config.vocab_size + _row_elements(config, shard.size)
    return attention // shard.of_attention.size + num_rows * elements * decoder.dtype.itemsize


def step_memory_bytes(decoder: Decoder) -> int:
    """Estimates the memory of the largest planned step beside graphs, weights and caches. Such a
    step fits no graph: it has trees, or prompts beside many decoding sequences. The engine ends if
    it lacks memory."""
    config, size = decoder.config, decoder.shard.size
    drawn = _DRAWN_ROWS * config.vocab_size * _DRAWN_BYTES
    return _STEP_ROWS * _row_elements(config, size) * 2 + drawn


def _partial_bytes(
    config: ModelConfig, num_rows: int, num_sequences: int, max_context_tokens: int
) -> int:
    """Returns the size of attention's partial results for plain rows and trees."""
    part_rows = num_part_rows(num_rows, num_sequences, config.num_heads // config.num_kv_heads)
    num_parts = part_rows * config.num_heads * num_splits(max_context_tokens)
    return num_parts * (config.head_dim + 2) * 4


def _row_elements(config: ModelConfig, num_ranks: int = 1) -> int:
    """Returns the elements of a row that a block of the decoder holds at once."""
    return 8 * config.hidden_size + 3 * config.intermediate_size // num_ranks
