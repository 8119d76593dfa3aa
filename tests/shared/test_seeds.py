"""Seeds of sampling."""

from __future__ import annotations

from shared.sampling_defaults import choice_seed


def test_seeds_of_choices_differ_and_fit_the_wire() -> None:
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        seeds = [choice_seed(seed, choice) for choice in range(200)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 200
        assert all(-(2**63) <= each < 2**63 for each in seeds)
