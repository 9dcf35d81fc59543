"""Norms: one rounding, and the rows that the task text names."""

from __future__ import annotations

import math

import pytest
import torch

from mkb_env.problems.contract import Problem, load

ADD_RMSNORM, RMSNORM = "fused_add_rmsnorm_h4096_llama31_8b_bf16", "rmsnorm_h128_qwen3_30b_bf16"


def heldout(slug: str) -> tuple[Problem, tuple[torch.Tensor, ...]]:
    """A problem and its last held-out inputs, which have zero, large and small rows."""
    problem = load(slug)
    return problem, problem.make_inputs(torch.Generator().manual_seed(5), problem.shapes("heldout")[-1])


def row_scales(x: torch.Tensor) -> torch.Tensor:
    """Root mean square of every row."""
    return x.double().square().mean(-1).sqrt()


def test_add_rmsnorm_rounds_once() -> None:
    problem, (hidden, residual, weight) = heldout(ADD_RMSNORM)
    s = hidden.double() + residual.double()
    want = torch.nn.functional.rms_norm(s, (4096,), weight.double(), eps=1e-5)
    # bf16 has 8 significant bits: one rounding errs by at most 2^-8 of the value, plus float32's own error.
    rounded = problem.reference(hidden, residual, weight)
    assert rounded.dtype is torch.bfloat16
    torch.testing.assert_close(rounded.double(), want, rtol=2**-8 * 1.001, atol=0)


def test_rmsnorm_rounds_once() -> None:
    problem, (hidden, weight) = heldout(RMSNORM)
    want = torch.nn.functional.rms_norm(hidden.double(), (128,), weight.double(), eps=1e-6)
    rounded = problem.reference(hidden, weight)
    assert rounded.dtype is torch.bfloat16
    torch.testing.assert_close(rounded.double(), want, rtol=2**-8 * 1.001, atol=0)


@pytest.mark.parametrize(("slug", "large"), [(ADD_RMSNORM, 1e4 * math.sqrt(2)), (RMSNORM, 3e4)])
def test_special_rows(slug: str, large: float) -> None:
    problem, inputs = heldout(slug)
    scales = row_scales(torch.stack(inputs[:-1]).double().sum(0))
    y = problem.reference(*inputs)
    zero = scales == 0
    assert int(zero.sum()) == 3 and not y[zero].any()
    assert int((scales > 0.5 * large).sum()) == 2
    assert int(((scales > 0) & (scales < 1e-3)).sum()) == 2
    assert y.isfinite().all()
