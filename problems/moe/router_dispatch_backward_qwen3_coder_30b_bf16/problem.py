"""Backward of softmax top-k routing and of the dispatch of token rows to experts (Qwen3-Coder-30B-A3B).

There are T tokens of H channels, E experts and k choices per token (the model has H = 2048, E = 128, k = 8).
The forward pass was: logits = x gate_wᵀ; p = softmax(logits); the k experts of the largest p are chosen, topk_idx;
their weights are w_j = p_j / (sum of p over the k choices); dispatched[sort_pos[t, j]] = x[t]. Given the gradients of a
loss with respect to dispatched and w, wanted are those with respect to x and gate_w. The choice itself is constant.

Inputs, contiguous and row-major:
  x                [T, H]    bfloat16
  gate_w           [E, H]    bfloat16
  router_logits    [T, E]    float32   saved by the forward pass
  topk_idx         [T, k]    int32     experts of a token, all different, best first
  sort_pos         [T, k]    int32     row of choice j of token t in dispatched: its place when all T k choices are
                                       sorted by (expert, t, j); a permutation of 0 to T k - 1
  grad_dispatched  [T k, H]  bfloat16
  grad_weights     [T, k]    float32   g

Outputs, a tuple in this order, contiguous and row-major:
  grad_x           [T, H]    bfloat16
  grad_gate_w      [E, H]    bfloat16

For every token t, in float32, with e_j = topk_idx[t, j]:
  w = softmax over j of router_logits[t, e_j]          (what the normalised p comes to)
  d_j = w_j * (g[t, j] - sum_i g[t, i] * w_i)          the gradient of logit e_j; that of every other logit is 0
  grad_x[t] = bfloat16( sum_j grad_dispatched[sort_pos[t, j]] + sum_j d_j * gate_w[e_j] )
For every expert e:
  grad_gate_w[e] = bfloat16( sum over all (t, j) with topk_idx[t, j] = e of d_j of t * x[t] )

Numerics: inputs are widened to float32, sums are accumulated in float32, and each output is rounded once, to nearest
even. d is not rounded to bfloat16 here; doing so before a product is within the tolerance.

Rules:
- An expert that no token chose has a grad_gate_w row of 0.
- sort_pos and topk_idx are drawn with the data and not visible to host code.
- The inputs are not changed; each output is a new tensor.
"""

from __future__ import annotations

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal
from mkb_env.problems.moe.common import best, by_expert, large_normal, per_expert

TITLE = "Backward of top-8 routing and token dispatch"
NUMBER = 46
MODEL = "Qwen3-Coder-30B-A3B"
INPUTS = ("x", "gate_w", "router_logits", "topk_idx", "sort_pos", "grad_dispatched", "grad_weights")
OUTPUTS = ("grad_x", "grad_gate_w")
HOST_VISIBLE = ()
SIZES = {"H": 2048, "E": 128, "k": 8}
WORKLOADS = {
    "full": SIZES | {"T": 8192, "cold": [17, 90]},
    "small": {"T": 16, "H": 64, "E": 8, "k": 2, "cold": [5]},
    "heldout": [
        SIZES | {"T": 4097, "cold": [0, 1, 2, 3, 31, 32, 47, 48, 63, 64, 80, 99, 100, 101, 126, 127]},
        SIZES | {"T": 1, "cold": []},
        {"T": 45, "H": 96, "E": 13, "k": 3, "cold": [0, 12]},
    ],
}
"""``cold``: experts whose logits are 6 lower, so that no token chooses them."""


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    tokens, hidden, experts, k = (shape[key] for key in ("T", "H", "E", "k"))
    return (
        ((tokens, hidden), torch.bfloat16),
        ((experts, hidden), torch.bfloat16),
        ((tokens, experts), torch.float32),
        ((tokens, k), torch.int32),
        ((tokens, k), torch.int32),
        ((tokens * k, hidden), torch.bfloat16),
        ((tokens, k), torch.float32),
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return ((shape["T"], shape["H"]), torch.bfloat16), ((shape["E"], shape["H"]), torch.bfloat16)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Normal numbers and the routing they imply, in ``INPUTS``' order.

    A weight's gradient is a dot product over H channels, so it is drawn sqrt(H) times larger than a row's: otherwise
    the router's share of grad_x would vanish beside the rows'.
    """
    tokens, hidden, experts, k = (shape[key] for key in ("T", "H", "E", "k"))
    x = large_normal(generator, tokens, hidden, scale=1.0)
    gate_w = large_normal(generator, experts, hidden, scale=hidden**-0.5)
    logits = x.float() @ gate_w.float().T + per_expert(experts, [(shape["cold"], -6.0)], generator.device)
    chosen = best(logits, k)
    order, _ = by_expert(chosen.flatten(), experts)
    sort_pos = torch.empty_like(order)
    sort_pos[order] = torch.arange(len(order), device=order.device)
    grad_dispatched = large_normal(generator, tokens * k, hidden, scale=1.0)
    grad_weights = normal(generator, tokens, k, scale=hidden**0.5)
    return x, gate_w, logits, chosen.int(), sort_pos.int().view(tokens, k), grad_dispatched, grad_weights


def logit_gradients(router_logits: torch.Tensor, topk_idx: torch.Tensor, grad_weights: torch.Tensor) -> torch.Tensor:
    """Gradients of the chosen logits, [T, k]."""
    w = router_logits.gather(-1, topk_idx.long()).softmax(dim=-1)
    return w * (grad_weights - (grad_weights * w).sum(dim=-1, keepdim=True))


def reference(
    x: torch.Tensor,
    gate_w: torch.Tensor,
    router_logits: torch.Tensor,
    topk_idx: torch.Tensor,
    sort_pos: torch.Tensor,
    grad_dispatched: torch.Tensor,
    grad_weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula; float64 inputs are computed in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    d = torch.zeros_like(router_logits)
    d.scatter_(-1, topk_idx.long(), logit_gradients(router_logits, topk_idx, grad_weights))
    grad_x = d @ gate_w.to(wide)
    for position in sort_pos.T:
        grad_x += grad_dispatched[position].to(wide)
    return grad_x.to(x.dtype), (d.T @ x.to(wide)).to(x.dtype)


def COST(shape: Shape) -> Cost:
    """Rows, gradients and the chosen logits once; two multiply-adds per choice and channel (of E experts, k count)."""
    tokens, hidden, experts, k = (shape[key] for key in ("T", "H", "E", "k"))
    rows = 2 * hidden * (tokens * k + 2 * tokens + 2 * experts)
    return Cost(bytes=rows + 16 * tokens * k, flops=4 * tokens * k * hidden, unit="fp32")
