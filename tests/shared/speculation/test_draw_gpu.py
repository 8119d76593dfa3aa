"""The draw's kernels take the tokens that plain torch takes, on either device."""

from __future__ import annotations

import pytest
import torch

from shared.speculation.distributions import gumbel_noise
from shared.speculation.row_sampling import row_sampling
from shared.speculation.verify import draw_tokens
from shared.tokens import SamplingParams
from tests.helpers.kernel_device import kernel_device

pytestmark = pytest.mark.gpu
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.6, seed=-(2**40)),
    SamplingParams(temperature=1e-4, seed=2**63 + 5),
]
ROWS = [3, 40, 40, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [10, 2048, 128_256])
def test_tokens_are_those_of_the_cpu(dtype: torch.dtype, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (3 * torch.randn((sum(ROWS), vocab_size), generator=generator)).to(dtype)
    positions = torch.randint(2**40, (sum(ROWS),), generator=generator)
    for params, rows in ((PARAMS, ROWS), (PARAMS[:1], [sum(ROWS)])):
        expected = draw_tokens(logits, row_sampling(params, rows, device=CPU), positions)
        sampling = row_sampling(params, rows, device=CUDA)
        found = draw_tokens(logits.to(CUDA), sampling, positions.to(CUDA))
        assert torch.equal(found.cpu(), expected)


def test_flat_rows_show_the_noise_itself() -> None:
    """Equal logits leave the choice to the noise, whose bits are so compared over all tokens."""
    params = SamplingParams(temperature=1.0, seed=77)
    sampling = row_sampling([params], [512], device=CUDA)
    positions = torch.arange(512, device=CUDA)
    found = draw_tokens(torch.zeros((512, 128_256), device=CUDA), sampling, positions)
    noise = gumbel_noise(sampling.seeds.cpu(), positions.cpu(), 128_256)
    assert torch.equal(found.cpu(), noise.argmax(dim=-1))
    assert len(set(found.tolist())) > 500


@pytest.mark.interpreter
def test_first_of_equal_logits_is_drawn() -> None:
    # Triton is not installed where there is no CUDA.
    from shared.speculation.draw_triton import fused_draw

    device, lowest = kernel_device(), float("-inf")
    rows = torch.full((5, 5000), lowest)
    rows[1, [17, 4000]] = 2.0
    rows[2, [2047, 2048]] = -3.5
    rows[3] = -0.0
    rows[3, 9] = 0.0
    rows[4, -1] = -1e30
    found = fused_draw(rows.to(device), None, torch.arange(5, device=device))
    assert found.tolist() == [0, 17, 2047, 0, 4999]
