"""A state is found when it is a sequence's own, and only then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.kv.states import StateStore
from shared.models.decoder import Decoder
from shared.runtime.runner import ModelRunner
from tests.helpers.engines import recurrent_decoder

CPU = torch.device("cpu")
PAGE_SIZE = 4
PAGES = [9, 4, 1, 7, 3, 8, 2, 6, 5]
OTHERS = [19, 14, 11, 17, 13, 18, 12, 16, 15]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return recurrent_decoder(tmp_path_factory.mktemp("recurrent"))


class Runs:
    """A runner that counts the tokens by which states were advanced before they were kept."""

    def __init__(self, decoder: Decoder, num_states: int = 4) -> None:
        pool = KvPool(decoder.kv_layout(PAGE_SIZE), 160, CPU, num_states=num_states)
        self.runner = ModelRunner(decoder, pool)
        self.num_advanced = 0
        assert pool.states is not None
        self.states, self._plan = pool.states, pool.states.plan
        pool.states.plan = self._counted  # type: ignore[method-assign]

    def _counted(self, *args):  # type: ignore[no-untyped-def]
        plan = self._plan(*args)
        self.num_advanced = int(plan.sequences[:, 3].sum() + plan.chunks[:, 1].sum())
        return plan

    def __call__(self, *rows: SequenceRows) -> Tensor:
        return self.runner.run(build_batch(rows, page_size=PAGE_SIZE, device=CPU)).logits


def causal(tokens: Sequence[int], start: int, pages: Sequence[int] = PAGES) -> SequenceRows:
    return SequenceRows.causal(tokens, start, pages, range(len(tokens)))


def fresh(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Returns the logits of the last token of a text that is computed at once."""
    return Runs(decoder)(causal(tokens, 0))[-1]


def test_each_token_is_advanced_by_once(decoder: Decoder) -> None:
    runs = Runs(decoder)
    runs(causal(PROMPT, 0), causal(PROMPT[:4], 0, OTHERS))
    assert runs.num_advanced == 14
    for step, token in enumerate((7, 8, 9)):
        logits = runs(causal([token], 10 + step), causal([token], 4 + step, OTHERS))
        assert runs.num_advanced == 2
    assert torch.equal(logits[0], fresh(decoder, [*PROMPT, 7, 8, 9]))
    assert torch.equal(logits[1], fresh(decoder, [*PROMPT[:4], 7, 8, 9]))


def test_a_chain_advances_by_what_stayed_of_it(decoder: Decoder) -> None:
    runs = Runs(decoder)
    runs(causal(PROMPT, 0))
    runs(causal([7, 8, 2, 2], 10))
    assert runs.num_advanced == 0
    logits = runs(causal([9, 1], 12))
    assert runs.num_advanced == 2
    assert torch.equal(logits[0], fresh(decoder, [*PROMPT, 7, 8, 9]))


def test_a_page_that_was_given_to_others_has_no_state(decoder: Decoder) -> None:
    runs = Runs(decoder)
    runs(causal(PROMPT, 0))
    other = [2] * 10
    runs(causal(other, 0))
    logits = runs(causal([7], 10))
    assert torch.equal(logits[0], fresh(decoder, [*other, 7]))
    # Half of it, in another order of pages.
    pages = [PAGES[1], PAGES[0], *PAGES[2:]]
    runs(causal(PROMPT[:5], 0, pages), causal(PROMPT[:2], 0, OTHERS))
    logits = runs(causal([7], 5, pages))
    assert torch.equal(logits[0], fresh(decoder, [*PROMPT[:5], 7]))


def test_sequences_that_share_a_prefix_part(decoder: Decoder) -> None:
    runs = Runs(decoder)
    runs(causal(PROMPT[:8], 0))
    shared = [*PAGES[:2], *OTHERS[2:]]
    for step in range(3):
        logits = runs(causal([7 + step], 8 + step), causal([17 + step], 8 + step, shared))
        assert runs.num_advanced == 2
    assert torch.equal(logits[0], fresh(decoder, [*PROMPT[:8], 7, 8, 9]))
    assert torch.equal(logits[1], fresh(decoder, [*PROMPT[:8], 17, 18, 19]))


def test_what_finds_no_state_starts_at_the_first_token(decoder: Decoder) -> None:
    runs = Runs(decoder, num_states=1)
    runs(causal(PROMPT, 0), causal(PROMPT[:4], 0, OTHERS))
    for step in range(2):
        logits = runs(causal([7], 10 + step), causal([7], 4 + step, OTHERS))
        assert runs.num_advanced == 6 + step
    assert torch.equal(logits[0], fresh(decoder, [*PROMPT, 7, 7]))
    assert torch.equal(logits[1], fresh(decoder, [*PROMPT[:4], 7, 7]))


def test_a_prefix_may_be_in_the_same_forward(decoder: Decoder) -> None:
    """Parts of one prompt in several lanes, over pages with rows of another text."""
    runs = Runs(decoder)
    runs(causal([2] * 10, 0))
    runs(causal(PROMPT[:4], 0), causal(PROMPT[4:], 4))
    assert torch.equal(runs(causal([7], 10))[0], fresh(decoder, [*PROMPT, 7]))


def test_a_forward_that_fails_leaves_no_state(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(decoder)
    runs(causal(PROMPT, 0))
    with monkeypatch.context() as patch:
        patch.setattr(StateStore, "keep", lambda self, plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runs(causal([7], 10))
    logits = runs(causal([8], 10))
    assert runs.num_advanced == 11
    assert torch.equal(logits[0], fresh(decoder, [*PROMPT, 8]))


LONG = [(7 * index + index // 5) % 17 for index in range(200)]
LONG_PAGES, MORE_PAGES = range(20, 70), range(70, 120)


def test_a_long_prompt_is_its_tokens_one_after_another(decoder: Decoder) -> None:
    """A prompt that is taken in chunks, whole or in parts, and then plain tokens."""
    single = Runs(decoder)
    exact = torch.cat([single(causal([token], at, MORE_PAGES)) for at, token in enumerate(LONG)])
    whole, parts = Runs(decoder), Runs(decoder)
    found = whole(causal(LONG[:190], 0, LONG_PAGES), causal(PROMPT, 0))[:190]
    assert whole.num_advanced == 200
    torch.testing.assert_close(found, exact[:190], atol=1e-4, rtol=1e-4)
    for at in range(190, 200):
        logits = whole(causal([LONG[at]], at, LONG_PAGES))
        assert whole.num_advanced == 1
        torch.testing.assert_close(logits, exact[at : at + 1], atol=1e-4, rtol=1e-4)
    # Behind a part that ends anywhere, from its checkpoint.
    first = parts(causal(LONG[:67], 0, LONG_PAGES))
    rest = parts(causal(LONG[67:], 67, LONG_PAGES))
    assert parts.num_advanced == 133
    torch.testing.assert_close(torch.cat((first, rest)), exact, atol=1e-4, rtol=1e-4)


def test_parts_of_whole_chunks_have_the_bits_of_the_prompt(decoder: Decoder) -> None:
    whole, parts = Runs(decoder), Runs(decoder)
    expected = whole(causal(LONG, 0, LONG_PAGES))
    parts(causal(PROMPT, 0))
    first = parts(causal(LONG[:128], 0, LONG_PAGES), causal([7], 10))[:128]
    assert torch.equal(first, expected[:128])
    assert torch.equal(parts(causal(LONG[128:], 128, LONG_PAGES)), expected[128:])


def test_a_long_text_without_a_state_is_taken_in_chunks(decoder: Decoder) -> None:
    runs = Runs(decoder, num_states=1)
    runs(causal(LONG[:-1], 0, LONG_PAGES))
    runs(causal(PROMPT, 0))
    logits = runs(causal(LONG[-1:], 199, LONG_PAGES))
    assert runs.num_advanced == 200
    torch.testing.assert_close(
        logits[0], Runs(decoder)(causal(LONG, 0, LONG_PAGES))[-1], atol=1e-4, rtol=1e-4
    )
