"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.moe.router_dispatch_backward_qwen3_coder_30b_bf16.problem import logit_gradients

INDEPENDENT = "autograd through softmax, normalisation and dispatch in float64, with gradcheck; sort_pos by sorting"
COUNTED = (0.2, 0.3)  # the reference multiplies all 8 experts of small, of which 2 are chosen


def _forward(
    x: torch.Tensor, logits: torch.Tensor, chosen: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    p = logits.softmax(-1).gather(-1, chosen)
    return x[rows], p / p.sum(-1, keepdim=True)


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against derivatives of the forward pass, whose logits are moved to the values that were saved."""
    x, gate_w, logits, chosen, sort_pos, grad_dispatched, grad_weights = inputs
    pairs = sorted((e, t, j) for t, row in enumerate(chosen.tolist()) for j, e in enumerate(row))
    places = {(t, j): place for place, (_, t, j) in enumerate(pairs)}
    want = [[places[t, j] for j in range(chosen.shape[1])] for t in range(len(x))]
    assert sort_pos.tolist() == want, "sort_pos is not the place in the sorted order"
    rows = torch.tensor([t for _, t, _ in pairs], device=x.device)
    with torch.enable_grad():
        x64, w64 = x.double().requires_grad_(), gate_w.double().requires_grad_()
        product = x64 @ w64.T
        results = _forward(x64, product + (logits.double() - product).detach(), chosen.long(), rows)
        grads = torch.autograd.grad(results, (x64, w64), (grad_dispatched.double(), grad_weights.double()))
        for got, expected in zip(truth, grads, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        if 1 < len(x) <= 64:
            part, few = x[:2, :5].double().requires_grad_(), gate_w[:, :5].double().requires_grad_()
            twice = torch.tensor([1, 0, 0, 1], device=x.device)
            assert torch.autograd.gradcheck(lambda a, b: _forward(a, a @ b.T, chosen[:2].long(), twice), (part, few))


def _variant(
    gradients: Callable[..., torch.Tensor] = logit_gradients,
    router: float = 1.0,
    rounded: bool = False,
    inverse: bool = False,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Gathered rows, all choices at once, and one thing changed."""

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, gate_w, logits, chosen, sort_pos, grad_dispatched, grad_weights = inputs
        values = gradients(logits, chosen, grad_weights)
        d = torch.zeros_like(logits).scatter_(-1, chosen.long(), values) if values.shape != logits.shape else values
        d = d.bfloat16().float() if rounded else d
        places = sort_pos.flatten().argsort().view(sort_pos.shape) if inverse else sort_pos
        sums = grad_dispatched[places.flatten()].view(*sort_pos.shape, -1).float().sum(1)
        grad_x = (sums + router * (d @ gate_w.float())).bfloat16()
        return grad_x, (d.T @ x.float()).bfloat16()

    return run


def _no_mean(logits: torch.Tensor, chosen: torch.Tensor, grad_weights: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, chosen.long()).softmax(-1) * grad_weights


def _probabilities(logits: torch.Tensor, chosen: torch.Tensor, grad_weights: torch.Tensor) -> torch.Tensor:
    """The softmax over all experts in place of the normalised weights."""
    w = logits.softmax(-1).gather(-1, chosen.long())
    return w * (grad_weights - (grad_weights * w).sum(-1, keepdim=True))


def _unchosen_too(logits: torch.Tensor, chosen: torch.Tensor, grad_weights: torch.Tensor) -> torch.Tensor:
    """The gradient as if the weights were not normalised, which reaches the logits that were not chosen."""
    p = logits.softmax(-1)
    g = torch.zeros_like(p).scatter_(-1, chosen.long(), grad_weights)
    return p * (g - (g * p).sum(-1, keepdim=True))


def _through_both(logits: torch.Tensor, chosen: torch.Tensor, grad_weights: torch.Tensor) -> torch.Tensor:
    """Back through the quotient first, then through the softmax over all experts; zero where they cancel."""
    p = logits.softmax(-1)
    picked = p.gather(-1, chosen.long())
    total = picked.sum(-1, keepdim=True)
    inner = grad_weights / total - (grad_weights * picked).sum(-1, keepdim=True) / total.square()
    return picked * (inner - (inner * picked).sum(-1, keepdim=True))


WRONG = {
    "no mean subtracted from g": _variant(_no_mean),
    "probabilities not normalised over the choices": _variant(_probabilities),
    "gradients for logits that were not chosen": _variant(_unchosen_too),
    "grad_x without the router": _variant(router=0.0),
    "rows gathered by the inverse permutation": _variant(inverse=True),
}
SECOND = {
    "d rounded to bfloat16 before the products": _variant(rounded=True),
    "through the quotient and the whole softmax": _variant(_through_both),
}
