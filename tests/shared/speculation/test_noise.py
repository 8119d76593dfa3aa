"""The noise is Philox's, keyed by seed and position, finite, and Gumbel-distributed."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from shared.speculation.distributions import (
    fresh_coins,
    gumbel_noise,
    philox_4x32_10,
)

WORD = 2**32


def plain_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox-4x32-10 in Python integers, from the paper's definition."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high_0, low_0 = divmod(0xD2511F53 * c[0], WORD)
        high_1, low_1 = divmod(0xCD9E8D57 * c[2], WORD)
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B9) % WORD, (k[1] + 0xBB67AE85) % WORD]
    return tuple(c)


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c0, c1, c2, c3, k0, k1 = (torch.tensor([word]) for word in (*counter, *key))
    return tuple(int(word) for word in philox_4x32_10((c0, c1, c2, c3), (k0, k1)))


KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD - 1,) * 4, (WORD - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert philox(counter, key) == words
    assert plain_philox(counter, key) == words


def plain_noise(seed: int, position: int, token_id: int, stream: int) -> float:
    counter = (token_id // 4, stream, position % WORD, position // WORD)
    word = plain_philox(counter, (seed % WORD, (seed >> 32) % WORD))[token_id % 4]
    return -math.log(-math.log(float(Fraction(2 * word + 1, 2 * WORD))))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0])
@pytest.mark.parametrize("position", [0, 7, 2**31, 2**32 + 5])
def test_noise_matches_plain_integers_for_every_seed_and_position(seed: int, position: int) -> None:
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 11, stream=3)
    expected = [plain_noise(seed, position, token_id, 3) for token_id in range(11)]
    assert noise.dtype == torch.float32
    torch.testing.assert_close(noise[0], torch.tensor(expected), rtol=2e-7, atol=1e-9)


def rows(count: int) -> tuple[Tensor, Tensor]:
    return torch.arange(count) * 0x9E3779B97F4A7C1, torch.arange(count) + 1000


def test_a_tokens_noise_does_not_depend_on_vocabulary_or_other_rows() -> None:
    seeds, positions = rows(5)
    whole = gumbel_noise(seeds, positions, 103)
    assert torch.equal(gumbel_noise(seeds, positions, 10), whole[:, :10])
    for row in range(5):
        one = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 103)
        assert torch.equal(one[0], whole[row])


def test_seed_position_and_stream_each_change_every_value() -> None:
    def noise(seed: int, position: int, stream: int) -> Tensor:
        return gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 64, stream=stream)

    base = noise(5, 6, 7)
    for other in (noise(6, 6, 7), noise(5 + 2**40, 6, 7), noise(5, 7, 7), noise(5, 6, 8)):
        assert int((base == other).sum()) == 0


def test_extreme_words_give_finite_noise() -> None:
    """A float32 uniform would round the highest word to 1, whose noise is infinite."""
    from shared.speculation.distributions import _gumbel

    noise = _gumbel(torch.tensor([0, WORD - 1]))
    assert noise.tolist() == pytest.approx([-math.log(33 * math.log(2)), 33 * math.log(2)])
    uniform = torch.tensor(WORD - 1, dtype=torch.float32) / WORD
    assert torch.isinf(-torch.log(-torch.log(uniform)))


def test_noise_has_the_gumbel_distribution() -> None:
    """Kolmogorov-Smirnov distance at 2^20 values; a shift by 0.01 must be seen."""
    noise = gumbel_noise(*rows(128), 8192).flatten().to(torch.float64).sort().values

    def distance(values: Tensor) -> float:
        distribution = torch.exp(-torch.exp(-values))
        steps = torch.arange(1, len(values) + 1, dtype=torch.float64) / len(values)
        return float((distribution - steps).abs().max())

    limit = 1.95 / math.sqrt(len(noise))  # exceeded with a chance of 0.001
    assert distance(noise) < limit
    assert distance(noise + 0.01) > limit


def test_coins_lie_strictly_inside_the_unit_interval() -> None:
    coins = fresh_coins(10_000, torch.Generator().manual_seed(1))
    assert min(coins) > 0.0
    assert max(coins) < 1.0
    assert sum(coins) / len(coins) == pytest.approx(0.5, abs=0.01)
    highest, lowest = (2**52 - 1 + 0.5) / 2**52, 0.5 / 2**52
    assert 0.0 < lowest < highest < 1.0
