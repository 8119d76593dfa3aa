"""What drafting ahead costs in accepted tokens: trees made before a verdict against those made
after it, on the same greedy text of the demo's target.

    python -m tests.bench.lookahead [--only EAGLE3 DFLASH …] [--budget 8]

No clock is read: rounds are walked along the text, and at each verdict the tree that was prepared
for it, if one was, is held against the one drafted from its features.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.draft.drafter_factory import build_drafter
from services.draft.drafters.drafter import Drafter, VerifiedTree
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from services.draft.settings import DraftSettings
from services.draft.settings_problems import DEMO_TARGET
from services.draft.training.frozen_target import FrozenTarget, write_answers
from shared.settings import load_settings
from shared.tokens import Outcome, SamplingParams, TokenTree, TreeShape, Verdict
from tests.bench.chat_prompts import chat_prompts
from tests.load.figures import table
from tests.load.prompts import PROMPTS

CHAIN, BLOCK = TreeShape(5, 1, 6), TreeShape(7, 1, 8)
SHAPES = {"STANDALONE": CHAIN, "EAGLE": CHAIN, "EAGLE3": CHAIN, "MTP": CHAIN, "DFLASH": BLOCK}


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with the target's greedy answer.

    Attributes:
        features: `[N, W]` of every token, as the drafter's target sends them; None for a drafter
            that reads tokens.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int
    features: Tensor | None

    def rows(self, start: int, end: int) -> FeatureRows | None:
        """Returns the features of the positions `[start, end)`."""
        return None if self.features is None else FeatureRows(start, self.features[start:end])


@dataclass(frozen=True, slots=True)
class Round:
    """A verdict and the two trees that may follow it.

    Attributes:
        after: tokens that the tree drafted after the verdict brings, bonus included.
        ahead: those of the tree prepared for it; None when there is none.
    """

    after: int
    ahead: int | None


def walk(drafter: Drafter, text: Text, shape: TreeShape, outcome_budget: int) -> Iterator[Round]:
    """Yields the rounds of one answer but the first, whose tree follows no verdict."""
    tokens, start = text.token_ids, text.num_prompt_tokens + 1
    greedy = SamplingParams(temperature=0.0)
    sequence = DraftSequence(
        SequenceKey(1, 1), list(tokens[:start]), start, greedy, 0, True, 2**31, 256
    )
    drafter.open(sequence)
    rows = text.rows(0, start - 1)
    if rows is not None:
        drafter.add_features(sequence, rows)
    prepared: dict[tuple[int, ...], TokenTree] | None = None
    committed: tuple[int, ...] = ()
    while sequence.num_tokens < len(tokens):
        num_tokens = sequence.num_tokens
        truth = tokens[num_tokens:]
        tree = _proposed(drafter, sequence, shape)
        if prepared is not None:
            ahead = prepared.get(committed)
            yield Round(_gain(tree, truth), None if ahead is None else _gain(ahead, truth))
        prepared = _prepared(drafter, sequence, tree, shape, outcome_budget)
        committed = tuple(truth[: _gain(tree, truth)])
        sequence.token_ids.extend(committed)
        verdict = Verdict(1, 0, Outcome.VERIFIED, (), committed, sequence.num_tokens)
        drafter.commit(sequence, verdict, text.rows(num_tokens - 1, sequence.num_tokens - 1))
    drafter.close(sequence)


def _proposed(drafter: Drafter, sequence: DraftSequence, shape: TreeShape) -> TokenTree:
    assert drafter.reserve(sequence, shape), "one sequence fits the demo's memory"
    while drafter.backlog(sequence) > 64 and drafter.catch_up([sequence], 512):
        pass
    [proposal] = drafter.propose([sequence], shape)
    return proposal.tree


def _prepared(
    drafter: Drafter,
    sequence: DraftSequence,
    tree: TokenTree,
    shape: TreeShape,
    outcome_budget: int,
) -> dict[tuple[int, ...], TokenTree]:
    """Returns the tree for each verdict that was prepared for, by what that commits."""
    lookahead = drafter.lookahead
    assert lookahead is not None
    lookahead.begin(VerifiedTree(sequence, tree, shape, outcome_budget))
    found: dict[tuple[int, ...], TokenTree] = {}
    while lookahead.has_work:
        for each in lookahead.advance():
            assert each.condition is not None
            node = each.condition.node_index
            path = [] if node is None else [tree.token_ids[place] for place in tree.path(node)]
            found[(*path, each.condition.bonus_token_id)] = each.tree
    return found


def _gain(tree: TokenTree, truth: Sequence[int]) -> int:
    """Returns the tokens a verdict on the tree commits, bonus included, as far as the text goes."""
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(
            zip(tree.parent_indices, tree.token_ids, strict=True)
        )
    }
    node, depth = None, 0
    while depth < len(truth) and (node, truth[depth]) in children:
        node, depth = children[node, truth[depth]], depth + 1
    return min(depth + 1, len(truth))


def _row(name: str, rounds: Sequence[Round]) -> tuple[str, ...]:
    foreseen = [each for each in rounds if each.ahead is not None]
    after = statistics.mean(each.after for each in foreseen)
    ahead = statistics.mean(each.ahead or 0 for each in foreseen)
    return (
        name,
        str(len(rounds)),
        f"{statistics.mean(each.after for each in rounds):.2f}",
        f"{len(foreseen) / len(rounds):.0%}",
        f"{after:.2f}",
        f"{ahead:.2f}",
        f"{ahead / after - 1:+.0%}",
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lookahead", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--budget", type=int, default=8)
    parser.add_argument("--num-prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--num-tokens", type=int, default=64)
    return parser.parse_args()


def _drafter(algorithm: str, budget: int) -> Drafter:
    arguments = ["--speculative-algorithm", algorithm, "--device", "cpu"]
    arguments += ["--max-total-tokens", "4096", "--disable-radix-cache"]
    drafter = build_drafter(
        load_settings(DraftSettings, service="draft", arguments=arguments, env={})
    )
    assert drafter.lookahead is not None
    drafter.lookahead.budget = budget
    return drafter


def _text(
    target: FrozenTarget, drafter: Drafter, prompt: Sequence[int], answer: Sequence[int]
) -> Text:
    token_ids, spec = [*prompt, *answer], drafter.limits.feature_spec
    if spec is None:
        return Text(token_ids, len(prompt), None)
    rows = target.read(torch.tensor([token_ids]), spec.layer_indices).features[0]
    return Text(token_ids, len(prompt), spec.projected(rows))


def main() -> None:
    options = _parse()
    target = FrozenTarget.load(DEMO_TARGET, device=torch.device("cpu"), dtype=torch.float32)
    prompts = asyncio.run(chat_prompts(DEMO_TARGET, PROMPTS[: options.num_prompts]))
    answers = write_answers(target, prompts, max_new_tokens=options.num_tokens, temperature=0.0)
    rows = []
    for name in options.only:
        drafter = _drafter(name, options.budget)
        rounds = [
            each
            for prompt, answer in zip(prompts, answers, strict=True)
            for each in walk(
                drafter,
                _text(target, drafter, prompt, answer),
                SHAPES[name],
                options.budget,
            )
        ]
        rows.append(_row(name, rounds))
    header = ("drafter", "verdicts", "tokens a round", "foreseen", "then: after", "ahead", "change")
    print(table(header, rows))


if __name__ == "__main__":
    main()
