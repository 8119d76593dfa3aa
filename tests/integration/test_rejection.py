"""Chains drawn by an embedded draft: the target's distribution comes out, whatever the draft's is.

Target engine, link, draft rounds and drafters are the real ones; the draft's thread is left out,
so that all randomness comes from seeds in one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from services.draft.drafters.drafter import Drafter, Proposal
from services.draft.drafters.eagle import EagleDrafter
from services.draft.drafters.standalone import StandaloneDrafter
from services.draft.sequence import DraftSequence
from services.target.engine import Engine
from services.target.grammars.matcher import CompiledGrammar, GrammarMatcher
from services.target.requests.request import GenerationRequest
from services.target.scheduler import NO_CUT_TREE, CutTree
from services.target.verifier import VerificationMode
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.heads.config import HeadKind
from shared.models.heads.loader import load_head
from shared.models.heads.target_tensors import TargetFolder
from shared.models.loader import load_decoder
from shared.runtime.tree_model import HeadModel
from shared.speculation.rejection import DrawnChain
from shared.tokens import EMPTY_TREE, SamplingParams, StopParams, TokenTree, TreeShape
from tests.helpers.checkpoints import TinyShape, build_model
from tests.helpers.draft_heads import TinyHead, write_head
from tests.helpers.drafting import plain_grower
from tests.helpers.engines import (
    CPU,
    PAGE_SIZE,
    VOCAB_SIZE,
    build_engine,
    request,
    run,
    tiny_decoder,
)
from tests.helpers.grammars import EOS, regex, tree_tokens
from tests.helpers.hosted_draft import HostedDraft
from tests.helpers.standalone_drafts import standalone
from tests.shared.speculation.naive import chi_square_p_value, naive_distribution

PROMPT = [3, 1, 4, 1, 5]
NUM_TOKENS = 4
NUM_REQUESTS = 900
CHAIN = TreeShape(3, 1, 4)
RULES = [VerificationMode.REJECTION, VerificationMode.BLOCK]
SAMPLINGS = {
    "top-k": SamplingParams(temperature=0.5, top_k=3),
    "everything": SamplingParams(
        temperature=1.3,
        top_k=4,
        top_p=0.9,
        min_p=0.05,
        frequency_penalty=0.7,
        presence_penalty=-0.4,
        repetition_penalty=1.3,
        logit_bias={7: 1.5, 2: -1.0},
    ),
}
Outputs = dict[tuple[int, ...], float]
DistributionOf = Callable[[GenerationRequest], Outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return tiny_decoder(folder, num_layers=3)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A model that ranks tokens much as the target does, is less sure of them, and has a
    vocabulary padded further."""
    folder = tmp_path_factory.mktemp("draft")
    target = build_model("llama", TinyShape(vocab_size=VOCAB_SIZE), seed=3).state_dict()
    model = build_model("llama", TinyShape(vocab_size=VOCAB_SIZE + 6), seed=5)
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            known = target[name]
            noise = 0.02 * torch.randn(known.shape, generator=source)
            parameter[: len(known)] = (0.35 if "lm_head" in name else 1.0) * known + noise
    model.save_pretrained(folder)
    return load_decoder(folder, dtype=torch.float32, device=CPU)


class Sharpened(StandaloneDrafter):
    """Hands over other distributions than its tokens were drawn from."""

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        return [
            replace(each, tree=_sharpened(each.tree)) for each in super().propose(sequences, shape)
        ]


def _sharpened(tree: TokenTree) -> TokenTree:
    assert isinstance(tree, DrawnChain)
    return DrawnChain.of(tree.token_ids, (3.0 * tree.draft_log_probs).log_softmax(-1))


def _standalone(
    decoder: Decoder, drafter: type[StandaloneDrafter] = StandaloneDrafter
) -> StandaloneDrafter:
    generator = torch.Generator().manual_seed(6)
    return standalone(decoder, 600, max_context_tokens=128, generator=generator, drafter=drafter)


def _eagle3(folder: Path, target: Path) -> EagleDrafter:
    tiny = TinyHead(kind="EAGLE3", vocab_size=VOCAB_SIZE, draft_vocab_size=15, has_embedding=False)
    tensors = TargetFolder(target, dtype=torch.float32, device=CPU)
    head = load_head(
        write_head(folder, tiny), HeadKind.EAGLE3, tensors, dtype=torch.float32, device=CPU
    )
    pool = KvPool(head.kv_layout(PAGE_SIZE), 600, CPU)
    return EagleDrafter(
        HeadModel(head, pool),
        KvLeases(600, PAGE_SIZE),
        max_context_tokens=128,
        keeps_features=False,
        grower=plain_grower(HeadModel(head, pool), 128),
        generator=torch.Generator().manual_seed(6),
    )


@dataclass
class Service:
    """An engine with a draft it hosts."""

    engine: Engine
    draft: HostedDraft

    def sample(self, asked: GenerationRequest, count: int) -> tuple[Counter[tuple[int, ...]], int]:
        """Returns how often each output came, and how many tokens were accepted."""
        found: Counter[tuple[int, ...]] = Counter()
        num_accepted = 0
        for _ in range(0, count, 60):
            collector = run(self.engine, [asked] * 60)
            for key in collector.events:
                found[tuple(collector.token_ids(key))] += 1
                num_accepted += collector.finished(key).stats.num_accepted
        return found, num_accepted


def _asked(sampling: SamplingParams, grammar: CompiledGrammar | None = None) -> GenerationRequest:
    return request(PROMPT, sampling, StopParams(NUM_TOKENS), grammar=grammar)


def _service(
    decoder: Decoder, drafter: Drafter, mode: VerificationMode, shape: TreeShape = CHAIN
) -> Service:
    engine = build_engine(
        decoder,
        num_pages=600,
        max_running=60,
        max_step_rows=512,
        mode=mode,
        eos_token_ids=frozenset({EOS}),
    )
    draft = HostedDraft(engine, drafter, shape, mode)
    draft.attach("")
    return Service(engine, draft)


@pytest.fixture(scope="module")
def distribution_of() -> DistributionOf:
    """The exact distribution of the output, from the model in transformers."""
    model = build_model("llama", TinyShape(vocab_size=VOCAB_SIZE), seed=3)
    known: dict[str, Outputs] = {}

    def distribution_of(asked: GenerationRequest) -> Outputs:
        if asked.grammar is not None:
            return enumerated(asked)
        name = repr(asked.sampling)
        if name not in known:
            known[name] = enumerated(asked)
        return known[name]

    @torch.no_grad()
    def enumerated(asked: GenerationRequest) -> Outputs:
        distribution: Outputs = {}
        heads: Outputs = {(): 1.0}
        for _ in range(NUM_TOKENS):
            logits = model(torch.tensor([[*PROMPT, *head] for head in heads])).logits[:, -1]
            longer = {
                (*head, token): weight * prob
                for (head, weight), row in zip(heads.items(), logits, strict=True)
                for token, prob in enumerate(_row_distribution(asked, head, row.tolist()))
                if prob
            }
            distribution |= {
                head: weight for head, weight in longer.items() if _has_ended(asked, head)
            }
            heads = {head: weight for head, weight in longer.items() if head not in distribution}
            if not heads:
                break
        return distribution | heads

    return distribution_of


def _has_ended(asked: GenerationRequest, head: tuple[int, ...]) -> bool:
    return head[-1] == EOS or (asked.grammar is not None and _matcher(asked, head).has_ended)


def _matcher(asked: GenerationRequest, head: tuple[int, ...]) -> GrammarMatcher:
    assert asked.grammar is not None
    matcher = asked.grammar.matcher()
    for token in head:
        matcher.advance(token)
    return matcher


def _row_distribution(
    asked: GenerationRequest, head: tuple[int, ...], logits: list[float]
) -> list[float]:
    forbidden: list[int] = []
    if asked.grammar is not None:
        [allowed] = tree_tokens(_matcher(asked, head), EMPTY_TREE)
        assert allowed is not None
        forbidden = [i for i in range(VOCAB_SIZE) if i not in allowed]
    return naive_distribution(logits, asked.sampling, prompt=PROMPT, output=head, banned=forbidden)


def _p_value(found: Counter[tuple[int, ...]], distribution: Outputs) -> float:
    """Of whole outputs; those expected less than ten times share a cell."""
    total = found.total()
    assert set(found) <= set(distribution), "an output that the target cannot have drawn"
    common = [tokens for tokens, prob in distribution.items() if prob * total >= 10]
    observed = [found[tokens] for tokens in common]
    expected = [distribution[tokens] * total for tokens in common]
    return chi_square_p_value(
        [*observed, total - sum(observed)], [*expected, total - sum(expected)]
    )


def _position_p_values(found: Counter[tuple[int, ...]], distribution: Outputs) -> list[float]:
    """Of the token at each position; an output that has ended has none there."""
    p_values = []
    for position in range(NUM_TOKENS):
        counts: Counter[int | None] = Counter()
        probs: dict[int | None, float] = {}
        for tokens, count in found.items():
            counts[dict(enumerate(tokens)).get(position)] += count
        for tokens, prob in distribution.items():
            token = dict(enumerate(tokens)).get(position)
            probs[token] = probs.get(token, 0.0) + prob
        expected = [prob * found.total() for prob in probs.values()]
        p_values.append(chi_square_p_value([counts[token] for token in probs], expected))
    return p_values


def _assert_follows(found: Counter[tuple[int, ...]], distribution: Outputs) -> None:
    assert sum(distribution.values()) == pytest.approx(1.0)
    assert _p_value(found, distribution) > 1e-3
    assert min(_position_p_values(found, distribution)) > 1e-3


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        # The controls and the narrowed chains below are "top-k" by both rules.
        *((rule, "everything") for rule in RULES),
    ],
)
def test_output_follows_the_targets_distribution(
    decoder: Decoder,
    near: Decoder,
    distribution_of: DistributionOf,
    mode: VerificationMode,
    name: str,
) -> None:
    asked = _asked(SAMPLINGS[name])
    found, num_accepted = _service(decoder, _standalone(near), mode).sample(asked, NUM_REQUESTS)
    assert num_accepted > NUM_REQUESTS / 4
    _assert_follows(found, distribution_of(asked))


@pytest.mark.parametrize("mode", RULES)
def test_distributions_that_tokens_were_not_drawn_from_are_noticed(
    decoder: Decoder, near: Decoder, distribution_of: DistributionOf, mode: VerificationMode
) -> None:
    """Negative control of the statistics."""
    asked = _asked(SAMPLINGS["top-k"])
    service = _service(decoder, _standalone(near, Sharpened), mode)
    found, _ = service.sample(asked, NUM_REQUESTS)
    assert _p_value(found, distribution_of(asked)) < 1e-6


@pytest.mark.parametrize("mode", RULES)
def test_chains_of_requests_that_narrow_them_keep_the_distribution(
    decoder: Decoder, near: Decoder, distribution_of: DistributionOf, mode: VerificationMode
) -> None:
    asked = replace(_asked(SAMPLINGS["top-k"]), num_draft_tokens=2)
    service = _service(decoder, _standalone(near), mode)
    found, num_accepted = service.sample(asked, NUM_REQUESTS)
    assert num_accepted > NUM_REQUESTS / 4
    _assert_follows(found, distribution_of(asked))


def _without_odd_tokens(tree: TokenTree, num_draft_tokens: int | None) -> CutTree:
    """Verifies a chain only if its first token is even."""
    is_kept = num_draft_tokens is None or not tree.token_ids or tree.token_ids[0] % 2 == 0
    return (tree, tuple(range(len(tree)))) if is_kept else NO_CUT_TREE


def test_narrowing_by_what_was_drawn_is_noticed(
    decoder: Decoder,
    near: Decoder,
    distribution_of: DistributionOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: tokens must have no say in which of them are verified."""
    monkeypatch.setattr("services.target.drafts.assignments.narrowed", _without_odd_tokens)
    asked = replace(_asked(SAMPLINGS["top-k"]), num_draft_tokens=2)
    service = _service(decoder, _standalone(near), VerificationMode.REJECTION)
    found, _ = service.sample(asked, NUM_REQUESTS)
    assert _p_value(found, distribution_of(asked)) < 1e-6


def test_head_with_a_vocabulary_of_its_own_keeps_the_distribution(
    folder: Path, decoder: Decoder, distribution_of: DistributionOf, tmp_path: Path
) -> None:
    asked = _asked(SamplingParams(temperature=2.0, top_k=8))
    service = _service(decoder, _eagle3(tmp_path, folder), VerificationMode.BLOCK)
    found, num_accepted = service.sample(asked, 600)
    assert num_accepted > 60
    _assert_follows(found, distribution_of(asked))


@pytest.mark.parametrize("mode", RULES)
def test_grammar_keeps_the_distribution(
    decoder: Decoder, near: Decoder, distribution_of: DistributionOf, mode: VerificationMode
) -> None:
    """The draft does not know the grammar; some of its chains go on beyond the end."""
    asked = _asked(SamplingParams(), regex("(a|ab|bc|x)(0|1|12)?"))
    found, num_accepted = _service(decoder, _standalone(near), mode).sample(asked, 600)
    assert num_accepted > 0
    _assert_follows(found, distribution_of(asked))


@pytest.mark.parametrize("mode", RULES)
def test_trees_without_distributions_are_decided_as_point_masses(
    decoder: Decoder, near: Decoder, distribution_of: DistributionOf, mode: VerificationMode
) -> None:
    """Trees with branches are never drawn."""
    asked = _asked(SAMPLINGS["top-k"])
    service = _service(decoder, _standalone(near), mode, TreeShape(2, 2, 5))
    found, num_accepted = service.sample(asked, 600)
    assert num_accepted > 0
    _assert_follows(found, distribution_of(asked))


@pytest.mark.parametrize("mode", RULES)
def test_greedy_output_is_that_of_plain_decoding(
    decoder: Decoder, near: Decoder, mode: VerificationMode
) -> None:
    """Beside requests that draw."""
    stop, prompts = StopParams(24, ignore_eos=True), ([1, 2, 3], [11], [3] * 12)
    requests = [request(prompt, stop=stop) for prompt in prompts]
    expected = [run(build_engine(decoder), [each]).token_ids(0) for each in requests]
    drawing = [request(prompt, SamplingParams(), stop) for prompt in prompts]
    service = _service(decoder, _standalone(near), mode)
    collector = run(service.engine, [*requests, *drawing])
    assert [collector.token_ids(key) for key in range(3)] == expected
    assert sum(collector.finished(key).stats.num_accepted for key in range(3)) > 0
    assert all(collector.finished(key).stats.num_verified_rounds for key in range(3, 6))


def test_log_probabilities_come_with_drawn_chains(decoder: Decoder, near: Decoder) -> None:
    asked = request(PROMPT, SamplingParams(), StopParams(24, ignore_eos=True), top_logprobs=2)
    collector = run(_service(decoder, _standalone(near), RULES[1]).engine, [asked])
    assert collector.finished(0).stats.num_accepted > 0
    tokens, found = collector.token_ids(0), collector.logprobs(0)
    assert len(found) == len(tokens) == 24
    assert all(len(each.top) == 2 and each.log_prob <= each.top[0][1] for each in found)


def test_a_seed_has_no_effect(decoder: Decoder, near: Decoder) -> None:
    asked = request(PROMPT, SamplingParams(seed=1), StopParams(24))
    collector = run(_service(decoder, _standalone(near), RULES[0]).engine, [asked, asked])
    assert collector.token_ids(0) != collector.token_ids(1)
