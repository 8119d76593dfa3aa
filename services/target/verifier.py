"""From the logits of a step to its decisions: what each sequence commits.

Glossary. A sequence contributes one row for its last committed token, the *root*, and one for
each tree node. Every row's law is the target's after that row's own path, sampling parameters
included; the rules over these laws are in `shared.speculation.verify`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.target.scheduler import ScheduledSequence
from shared.speculation.distributions import target_log_probs
from shared.speculation.logprobs import token_logprobs
from shared.speculation.penalties import TokenCounts, TokenHistory, count_tokens
from shared.speculation.row_sampling import RowSampling, row_sampling
from shared.speculation.tree import drawn_positions, row_depths, row_paths
from shared.speculation.verify import (
    EXACT,
    AcceptedPath,
    Thresholds,
    accept_path,
    accept_point_mass,
    draw_tokens,
    point_mass_draws,
)
from shared.tokens import TokenLogprobs


class VerificationMode(enum.Enum):
    """The rule by which trees are verified."""

    COUPLED = "coupled"
    POINT_MASS = "point-mass"


@dataclass(frozen=True, slots=True)
class Decision:
    """What one round of one sequence commits.

    Attributes:
        accepted_nodes: accepted path, the root's child first.
        token_ids: tokens of the path, then the bonus token.
        logprobs: one for each of `token_ids`; empty when the request wants none.
    """

    accepted_nodes: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


class Verifier:
    """Decides by one rule.

    Args:
        generator: on the host; the source of fresh randomness of the point-mass rule.
        thresholds: of the point-mass rule; below 1 they are lossy.
    """

    def __init__(
        self,
        mode: VerificationMode,
        *,
        generator: torch.Generator,
        thresholds: Thresholds = EXACT,
    ) -> None:
        self.mode = mode
        self.thresholds = thresholds
        self._generator = generator

    @torch.inference_mode()
    def decide(self, drawn: Sequence[ScheduledSequence], logits: Tensor) -> list[Decision]:
        """Returns one decision for each of `drawn`.

        Args:
            drawn: scheduled sequences whose last committed token this step computed.
            logits: `[L, V]`; for each of them the row of the root, then the rows of its nodes.
        """
        sampling = _sampling(drawn, logits.device)
        counts = count_tokens(
            [_history(entry) for entry in drawn],
            vocab_size=logits.shape[-1],
            device=logits.device,
        )
        paths = self._accepted(drawn, logits, sampling, counts)
        token_ids = [path.token_ids(entry.tree) for entry, path in zip(drawn, paths, strict=True)]
        logprobs = _logprobs(drawn, paths, token_ids, logits)
        return [
            Decision(path.node_indices, tokens, each)
            for path, tokens, each in zip(paths, token_ids, logprobs, strict=True)
        ]

    def _accepted(
        self,
        drawn: Sequence[ScheduledSequence],
        logits: Tensor,
        sampling: RowSampling,
        counts: TokenCounts | None,
    ) -> list[AcceptedPath]:
        if self.mode is VerificationMode.COUPLED:
            positions = [
                position
                for entry in drawn
                for position in drawn_positions(entry.tree, root_position=_root_position(entry))
            ]
            tokens = draw_tokens(
                logits, sampling, torch.tensor(positions, device=logits.device), counts
            ).tolist()
            return _walk(drawn, tokens)
        log_probs = target_log_probs(logits, sampling, counts)
        draws = point_mass_draws(log_probs, [entry.tree for entry in drawn], self._generator)
        return [
            accept_point_mass(entry.tree, each, self.thresholds)
            for entry, each in zip(drawn, draws, strict=True)
        ]


def _walk(drawn: Sequence[ScheduledSequence], tokens: Sequence[int]) -> list[AcceptedPath]:
    paths: list[AcceptedPath] = []
    row = 0
    for entry in drawn:
        end = row + 1 + len(entry.tree)
        paths.append(accept_path(entry.tree, tokens[row:end]))
        row = end
    return paths


def _root_position(entry: ScheduledSequence) -> int:
    return len(entry.sequence.token_ids) - 1


def _sampling(drawn: Sequence[ScheduledSequence], device: torch.device) -> RowSampling:
    return row_sampling(
        [entry.sequence.sampling for entry in drawn],
        [1 + len(entry.tree) for entry in drawn],
        device=device,
        banned_token_ids=_banned(drawn),
    )


def _banned(drawn: Sequence[ScheduledSequence]) -> list[tuple[int, ...]]:
    """Returns the banned tokens of each row, or nothing when no row has any."""
    if not any(entry.sequence.banned_token_ids(0) for entry in drawn):
        return []
    return [
        tuple(sorted(entry.sequence.banned_token_ids(depth)))
        for entry in drawn
        for depth in row_depths(entry.tree)
    ]


def _history(entry: ScheduledSequence) -> TokenHistory:
    has_penalties = entry.sequence.sampling.has_penalties
    return TokenHistory(
        prompt_ids=entry.sequence.request.prompt_token_ids,
        output_ids=entry.sequence.output_token_ids if has_penalties else (),
        row_paths=row_paths(entry.tree) if has_penalties else ((),) * (1 + len(entry.tree)),
        has_penalties=has_penalties,
    )


def _logprobs(
    drawn: Sequence[ScheduledSequence],
    paths: Sequence[AcceptedPath],
    token_ids: Sequence[tuple[int, ...]],
    logits: Tensor,
) -> list[tuple[TokenLogprobs, ...]]:
    """Returns log probabilities for the committed rows of the sequences that want them."""
    rows: list[int] = []
    tokens: list[int] = []
    num_top: list[int] = []
    first_row = 0
    for entry, path, committed in zip(drawn, paths, token_ids, strict=True):
        wanted = entry.sequence.request.top_logprobs
        if wanted is not None:
            rows += [first_row, *(first_row + 1 + node for node in path.node_indices)]
            tokens += committed
            num_top += [wanted] * len(committed)
        first_row += 1 + len(entry.tree)
    if not rows:
        return [()] * len(drawn)
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    found = iter(token_logprobs(logits.index_select(0, index), tokens, num_top))
    return [
        tuple(next(found) for _ in committed)
        if entry.sequence.request.top_logprobs is not None
        else ()
        for entry, committed in zip(drawn, token_ids, strict=True)
    ]
