"""Drafting ahead in rounds: chains for the likeliest verdicts, grown while the target verifies.

A verdict on a chain of n nodes is a depth and a token: the number of accepted nodes, and the bonus
token behind them. While the target computes a round, the draft computes the same chains, takes the
likeliest verdicts of each lane and grows a chain of n nodes behind each of them. So the chain is
ready when the verdict is known. A lane with an unforeseen verdict has no tree in that round.

Source: Kumar, Dao, May, *Speculative speculative decoding*, arXiv 2603.03251.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shared.runtime.round_batches import RoundShape
from shared.runtime.round_state import LENGTH, OPEN, TAIL, RoundSampling, RoundState
from shared.runtime.tree_draft import DraftCode
from shared.sampling_defaults import MEASURED_WEIGHT, MEMORY_TOKENS, PRIOR_SHARE, PRIOR_TOKENS
from shared.speculation.tree import NO_TOKEN

MAX_OUTCOMES = 8
"""Most verdicts of a lane that chains are prepared for."""
_FREE_BRANCH_ROWS, _MAX_BRANCH_ROWS = 32, 256
MAX_LANES_AHEAD = _MAX_BRANCH_ROWS // 2
"""Most lanes of a round that drafts ahead. With more there would be rows for one verdict of each
lane, which is seldom the right one."""
# Length without a prepared chain: no sequence is that short.
_NO_LENGTH = -1


def num_outcomes(num_slots: int, num_steps: int, most: int) -> int:
    """Returns for how many verdicts of each lane a round of `num_slots` lanes prepares chains.

    One chain for each depth foresees nearly all verdicts. More chains cost nothing while a forward
    of all their rows takes little longer than a forward of one row.
    """
    usual = min(num_steps + 1, _MAX_BRANCH_ROWS // num_slots)
    return min(most, max(usual, _FREE_BRANCH_ROWS // num_slots))


class OutcomeChains:
    """Chains of the lanes of one shape of rounds.

    Attributes:
        verified: `[S, n]` int64, the nodes that the target verifies; -1 in lanes without a tree.
        decided: `[S, n]` int64, the nodes verified in the round before.
        starts: `[S]` int64, tokens of each lane when chains were prepared last; -1 if they never
            were, or another round came between.
        lengths: `[S, B]` int64, number of tokens after each foreseen verdict.
        last_tokens: `[S, B]` int64, the last token after each foreseen verdict.
        chains: `[S, B, n]` int64, the nodes behind each foreseen verdict.
        choices: `[S, 1 + n, B]` int64, the draft's best tokens after the last committed token and
            after each node; -1 where there are fewer.
        ranks: `[B]` float32, how often the target took the choice of each rank.
        num_ranked: `[1]` float32, number of tokens counted in `ranks`.
    """

    def __init__(self, shape: RoundShape, max_slots: int, device: torch.device) -> None:
        num_steps, count = shape.tree.num_steps, shape.num_outcomes

        def filled(value: int, *size: int) -> Tensor:
            return torch.full(size, value, device=device)

        self.verified = filled(NO_TOKEN, max_slots, num_steps)
        self.decided = filled(NO_TOKEN, max_slots, num_steps)
        self.starts = filled(_NO_LENGTH, max_slots)
        self.lengths = filled(_NO_LENGTH, max_slots, count)
        self.last_tokens = filled(0, max_slots, count)
        self.chains = filled(0, max_slots, count, num_steps)
        self.choices = filled(NO_TOKEN, max_slots, num_steps + 1, count)
        shares = PRIOR_SHARE ** torch.arange(1, count + 1, device=device, dtype=torch.float32)
        self.ranks = PRIOR_TOKENS * shares
        self.num_ranked = torch.full((1,), PRIOR_TOKENS, device=device)

    def begin(self, token_ids: Tensor) -> None:
        """Takes the trees `[S, 1 + n]`, roots included, of a round without prepared chains."""
        self.verified[: len(token_ids)] = token_ids[:, 1:]
        self.starts.fill_(_NO_LENGTH)

    def select(self, state: RoundState) -> Tensor:
        """Returns tokens and parents `[S, 2, 1 + n]` int64 of the chains that were prepared for the
        verdicts in a state."""
        num_slots = state.num_slots
        is_hit = self.lengths[:num_slots] == state.lengths.unsqueeze(1)
        is_hit &= self.last_tokens[:num_slots] == state.roots.unsqueeze(1)
        outcome = is_hit.int().argmax(dim=1)
        lanes = torch.arange(num_slots, device=outcome.device)
        chains = self.chains[lanes, outcome]
        chains = torch.where(is_hit.any(dim=1, keepdim=True), chains, NO_TOKEN)
        token_ids = torch.cat((state.roots.unsqueeze(1), chains), dim=1)
        self.decided.copy_(self.verified)
        self.verified[:num_slots] = chains
        parents = (torch.arange(token_ids.shape[1], device=lanes.device) - 1).clamp_min(0)
        return torch.stack((token_ids, parents.expand_as(token_ids)), dim=1)

    def prepare(self, code: DraftCode, state: RoundState, sampling: RoundSampling) -> None:
        """Grows chains for the verdicts on the round of a state, whose trees are `verified`."""
        self._count_ranks(state)
        num_slots, num_steps = state.num_slots, self.verified.shape[1]
        count = num_outcomes(num_slots, num_steps, self.lengths.shape[1])
        seen, verified = code.seen(state), self.verified[:num_slots]
        num_nodes = (verified != NO_TOKEN).sum(dim=1)
        num_behind = torch.arange(num_steps + 1, device=verified.device)
        batch, sources = code.open_rows(_with_nodes(seen, verified, num_nodes))
        # Rows of the last committed token of each lane, then of its nodes.
        rows = (batch.logit_rows - num_nodes).unsqueeze(1) + num_behind
        batch = replace(batch, logit_rows=rows.flatten())
        forwards = code.forwards(seen, batch, sources, keeps_states=False)
        scores = code.scores(_shifted(seen, num_behind.expand(num_slots, -1)), sampling, count)
        scores.add(forwards.first())
        children = scores.choices()
        choices = children.token_ids[:, 0].long().view(num_slots, num_steps + 1, count)
        shares = self.ranks[:count] / self.num_ranked
        probs = torch.lerp(children.log_probs[:, 0].exp(), shares, MEASURED_WEIGHT)
        log_probs = probs.log().view(choices.shape)
        depths, tokens = likeliest(choices, log_probs, verified, num_nodes)
        self.starts[:num_slots] = state.lengths
        self.choices[:num_slots] = NO_TOKEN
        self.choices[:num_slots, :, :count] = choices
        self.lengths[:num_slots] = _NO_LENGTH
        self.lengths[:num_slots, :count] = state.lengths.unsqueeze(1) + depths + 1
        self.last_tokens[:num_slots, :count] = tokens
        scores = code.scores(_shifted(seen, depths + 1), sampling, 1)
        parents = torch.arange(num_slots * count, device=tokens.device)
        for level in range(num_steps):
            batch = code.batches.of_branches(seen, depths, tokens, level, num_steps)
            scores.add(forwards.next(batch, parents))
            tokens = scores.choices().token_ids[:, level, 0].long().view(num_slots, count)
            self.chains[:num_slots, :count, level] = tokens

    def _count_ranks(self, state: RoundState) -> None:
        """Counts which of the draft's choices the verdicts took."""
        choices, starts = self.choices[: state.num_slots], self.starts[: state.num_slots]
        ends = (state.lengths - starts - 1).unsqueeze(1)
        is_verdict = (starts.unsqueeze(1) >= 0) & (ends >= 0) & (ends < choices.shape[1])
        rows = torch.arange(choices.shape[1], device=ends.device)
        roots = state.roots.unsqueeze(1)
        nodes = torch.cat((self.decided[: state.num_slots], roots), dim=1)
        taken = torch.where(rows < ends, nodes, roots)
        is_row = is_verdict & (rows <= ends)
        is_taken = is_row.unsqueeze(2) & (choices == taken.unsqueeze(2))
        num_rows = is_row.sum()
        memory = (1.0 - num_rows / MEMORY_TOKENS).clamp_min(0.5)
        self.ranks.mul_(memory).add_(is_taken.sum(dim=(0, 1)))
        self.num_ranked.mul_(memory).add_(num_rows)


def likeliest(
    choices: Tensor, log_probs: Tensor, verified: Tensor, num_nodes: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns depth and last token `[S, B]` of the likeliest verdicts on chains.

    Args:
        choices: `[S, 1 + n, B]`, candidates after the last committed token, then after each node.
        log_probs: `[S, 1 + n, B]`, log probabilities that the target takes each candidate.
        verified: `[S, n]`, the nodes of the chains.
        num_nodes: `[S]`, number of nodes of each chain.
    """
    num_rows, count = choices.shape[1:]
    is_node = choices[:, :-1] == verified.unsqueeze(2)
    # A node that is none of the choices is about as likely as the last choice.
    nodes = torch.where(is_node, log_probs[:, :-1], -torch.inf).amax(dim=2)
    nodes = torch.maximum(nodes, log_probs[:, :-1].amin(dim=2))
    paths = torch.cat((torch.zeros_like(nodes[:, :1]), nodes.cumsum(dim=1)), dim=1)
    # The bonus token of a verdict differs from the node at that depth.
    is_node = torch.nn.functional.pad(is_node, (0, 0, 0, 1))
    totals = torch.where(is_node, -torch.inf, paths.unsqueeze(2) + log_probs)
    depths = torch.arange(num_rows, device=choices.device)
    is_there = (depths <= num_nodes.unsqueeze(1)).unsqueeze(2)
    totals = torch.where(is_there, totals, -torch.inf)
    best = totals.flatten(1).topk(count, dim=1).indices
    return best // count, choices.flatten(1).gather(1, best)


def _with_nodes(seen: RoundState, verified: Tensor, num_nodes: Tensor) -> RoundState:
    """Returns a state with the nodes of each lane behind its open tokens."""
    own, num_open = seen.open_tokens, seen.num_open.unsqueeze(1)
    width = own.shape[1] + verified.shape[1]
    places = torch.arange(width, device=own.device).expand(len(own), -1)
    places = torch.where(places < num_open, places, places - num_open + own.shape[1])
    token_ids = torch.cat((own, verified.clamp_min(0)), dim=1)
    token_ids = token_ids.gather(1, places.clamp_max(width - 1))
    numbers = torch.cat((seen.numbers[:, :TAIL], token_ids), dim=1)
    numbers[:, LENGTH] += num_nodes
    numbers[:, OPEN] += num_nodes
    return replace(seen, numbers=numbers)


def _shifted(seen: RoundState, num_behind: Tensor) -> RoundState:
    """Returns a state of `S * N` lanes with the noise of the tokens `num_behind` `[S, N]` places
    after each lane's last committed token. Its pages are not read."""
    count = num_behind.shape[1]
    numbers = seen.numbers.repeat_interleave(count, dim=0)
    numbers[:, LENGTH] += num_behind.flatten()
    return replace(seen, numbers=numbers, sampling=seen.sampling.repeat_interleave(count, dim=0))
