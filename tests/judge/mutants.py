"""Single faults to plant in our kernels: each must lose the verdict ``passed`` on ``small`` or a held-out workload."""

from __future__ import annotations

from dataclasses import dataclass

ADD_RMSNORM = "fused_add_rmsnorm_h4096_llama31_8b_bf16"
RMSNORM = "rmsnorm_h128_qwen3_30b_bf16"
DECODE = "gqa_paged_decode_h32_kv8_d128_ps1_bf16"


@dataclass(frozen=True)
class Mutant:
    """One fault: the only occurrence of ``old`` in the kernel's source becomes ``new``."""

    name: str
    old: str
    new: str
    race: bool = False
    """A missing barrier: wrong only where warps drift apart, so not in the simulator's first run of a plan."""

    def apply(self, source: str) -> str:
        """The faulty source.

        Raises:
            ValueError: if ``old`` does not occur exactly once.
        """
        if (times := source.count(self.old)) != 1:
            raise ValueError(f"mutant {self.name!r}: expected its text once in the kernel, found it {times} times")
        return source.replace(self.old, self.new)


MUTANTS: dict[tuple[str, str], list[Mutant]] = {
    (ADD_RMSNORM, "cute"): [
        Mutant("eps", "EPS = 1e-5", "EPS = 1e-6"),
        Mutant("dropped residual", " + residual_row[at].load().to(Float32)", ""),
        Mutant("subtracted residual", " + residual_row[at].load()", " - residual_row[at].load()"),
        Mutant("wrong weight", "weight_row[at].load()", "weight_row[None, thread].load()"),
        Mutant("fp16 square", "total += s[i] * s[i]", "total += (s[i] * s[i]).to(cutlass.Float16).to(Float32)"),
        Mutant("half a warp's sum", "warp_reduction_sum(total)", "warp_reduction_sum(total, threads_in_group=16)"),
        Mutant("last warp left out", "range_constexpr(WARPS)", "range_constexpr(WARPS - 1)"),
        Mutant("last row left out", "grid=[rows, 1, 1]", "grid=[cutlass.max(rows - 1, 1), 1, 1]"),
        Mutant("missing barrier", "    cute.arch.sync_threads()\n", "", race=True),
    ],
    (ADD_RMSNORM, "tirx"): [
        Mutant("eps", "EPS = 1e-5", "EPS = 1e-6"),
        Mutant("dropped residual", ' + T.Cast("float32", b[j])', ""),
        Mutant("wrong weight", "weight[(i * THREADS + thread)", "weight[(thread)"),
        Mutant(
            "fp16 square",
            "total[0] += s[i, j] * s[i, j]",
            'total[0] += T.Cast("float32", T.Cast("float16", s[i, j] * s[i, j]))',
        ),
        Mutant("half a warp's sum", "T.cuda.warp_sum(total[0])", "T.cuda.warp_sum(total[0], 16)"),
        Mutant("last warp left out", "T.unroll(WARPS)", "T.unroll(WARPS - 1)"),
        Mutant("square root instead of its inverse", "T.rsqrt(total[0]", "T.sqrt(total[0]"),
        Mutant("missing barrier", "    T.cuda.cta_sync()\n", "", race=True),
    ],
    (RMSNORM, "cute"): [
        Mutant("eps", "EPS = 1e-6", "EPS = 1e-5"),
        Mutant("dropped weight", "* r * w)", "* r)"),
        Mutant("wrong weight", "[None, lane].load().to(Float32)\n    x =", "[None, 0].load().to(Float32)\n    x ="),
        Mutant("half a row's sum", "threads_in_group=LANES", "threads_in_group=LANES // 2"),
        Mutant(
            "fp16 square",
            "total += x[j, i] * x[j, i]",
            "total += (x[j, i] * x[j, i]).to(cutlass.Float16).to(Float32)",
        ),
        Mutant(
            "last row left out",
            "if row < rows:\n            target",
            "if row < rows - 1:\n            target",
        ),
        Mutant(
            "tail block left out",
            "cute.ceil_div(cute.size(hidden, mode=[0]), ",
            "cutlass.max(1, cute.size(hidden, mode=[0]) // ",
        ),
    ],
    (RMSNORM, "tirx"): [
        Mutant("eps", "EPS = 1e-6", "EPS = 1e-5"),
        Mutant("dropped weight", ' * T.Cast("float32", w[j])', ""),
        Mutant("wrong weight", "weight[lane * VECTOR + j]", "weight[j]"),
        Mutant("half a row's sum", "warp_sum(total[0], LANES)", "warp_sum(total[0], LANES // 2)"),
        Mutant(
            "fp16 square",
            'total[0] += T.Cast("float32", x[i, j]) * T.Cast("float32", x[i, j])',
            'total[0] += T.Cast("float32", T.Cast("float16", T.Cast("float32", x[i, j] * x[i, j])))',
        ),
        Mutant(
            "last row left out",
            "< rows:\n            for j in T.vectorized(VECTOR):\n                y[",
            "< rows - 1:\n            for j in T.vectorized(VECTOR):\n                y[",
        ),
    ],
    (DECODE, "cute"): [
        Mutant("unscaled logits", "sm_scale * LOG2_E, chunk", "Float32(LOG2_E), chunk"),
        Mutant("natural exponent base", "sm_scale * LOG2_E, chunk", "sm_scale, chunk"),
        Mutant("swapped heads", "q[Int64(request), kv_head * GROUP + g,", "q[Int64(request), g * KV_HEADS + kv_head,"),
        Mutant("lse in natural units", "lse[request, head] = result_lse", "lse[request, head] = result_lse / LOG2_E"),
        Mutant("no rescale in the loop", "total[None, g].store(total[None, g].load() * rescale)\n", "pass\n"),
        Mutant("no rescale of half-warps", "own = total[c, g] * rescale", "own = total[c, g]"),
        Mutant("tail not masked", "dot if first + 2 * u + half < count else", "dot if count > 0 else"),
        Mutant("last token left out", "min(length - part * chunk, chunk)", "min(length - part * chunk - 1, chunk)"),
        Mutant("finite lse of empty requests", "Float32(0.0), Float32(-INFINITY)", "Float32(0.0), Float32(LOWEST)"),
        Mutant(
            "no rescale in the merge",
            "part.load() * cute.math.exp2(partial_lse[item, head] - highest, fastmath=True)",
            "part.load()",
        ),
        Mutant("lse of one part", "highest + cute.math.log2(weight, fastmath=True)", "highest"),
        Mutant("last part left out", "begin + cute.ceil_div(length, chunk)", "begin + length // chunk"),
        Mutant(
            "missing barrier of the slots", "    cute.arch.sync_threads()\n\n    if count", "    if count", race=True
        ),
        Mutant(
            "missing barrier of the merge",
            "        cute.arch.sync_threads()\n        channel",
            "        channel",
            race=True,
        ),
    ],
    (DECODE, "tirx"): [
        Mutant("unscaled logits", "(sm_scale * T.float32(LOG2_E))", "T.float32(LOG2_E)"),
        Mutant("swapped heads", "q[request, kv_head * GROUP + g,", "q[request, g * KV_HEADS + kv_head,"),
        Mutant(
            "lse in natural units",
            "        lse[request, kv_head * GROUP + g] = highest[0]",
            "        lse[request, kv_head * GROUP + g] = highest[0] / T.float32(LOG2_E)",
        ),
        Mutant("no rescale in the loop", "weight[g] *= rescale[0]\n                for c", "for c"),
        Mutant("tail not masked", "T.Select(first + 2 * u < count,", "T.Select(count > 0,"),
        Mutant("last token left out", "T.min(length - part * chunk, chunk)", "T.min(length - part * chunk - 1, chunk)"),
        Mutant(
            "finite lse of empty requests",
            'highest[0] + T.log2(weight[g]), T.float32(-float("inf"))',
            "highest[0] + T.log2(weight[g]), T.float32(LOWEST)",
        ),
        Mutant("no rescale in the merge", "own[c] += part[c] * scale[0]", "own[c] += part[c]"),
        Mutant("lse of one part", "highest[0] + T.log2(weight[0])", "highest[0]"),
        Mutant("last part left out", "T.truncdiv(length + chunk - 1, chunk)", "T.truncdiv(length, chunk)"),
        Mutant("missing barrier of the slots", "    T.cuda.cta_sync()\n\n    if count", "    if count", race=True),
        Mutant(
            "missing barrier of the merge", "        T.cuda.cta_sync()\n        merged", "        merged", race=True
        ),
    ],
}
"""(slug, DSL) -> the faults of that kernel."""
