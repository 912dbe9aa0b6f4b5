"""Pieces of attention: scores, masks, softmax in several spellings, and the whole."""

from __future__ import annotations

from ..writer import Writer, statement


@statement("attention", 3)
def softmax(w: Writer) -> str:
    x = w.floating(1, lambda t: t.numel())
    d = w.pick(-1, -1, -1, w.dim(x))
    first = w.pick(x, x, f"{x} * 0.5", f"{x} / 3", f"({x} + {w.like(x)})", f"{x}.masked_fill({w.like(x)} > 0.5, {w.pick('-1e9', '-math.inf', '-1e4')})")
    if "-math.inf" in first and "infinite_rows" in w.avoid:
        first = x
    return w.pick(
        f"torch.softmax({first}, {d})", f"F.softmax({first}, dim={d})", f"({first}).log_softmax({d})", f"F.softmax({first}, dim={d}, dtype=torch.float32)",
        f"torch.exp({x} - {x}.logsumexp({d}, True))", f"(torch.exp({x} - {x}.amax({d}, keepdim=True)) / torch.exp({x} - {x}.amax({d}, keepdim=True)).sum({d}, keepdim=True))",
        f"torch.softmax({first}, {d}) * 2", f"torch.log(torch.softmax({first}, {d}) + 1e-6)",
    )  # fmt: skip


def heads(w: Writer) -> tuple[str, str, str]:
    """Queries, keys and values: values of the program, or new arguments."""
    if w.maybe(0.5):
        q = w.floating(2, lambda t: t.numel() and t.shape[-1] > 1)
        k = w.floating(2, lambda t: t.dtype == w[q].dtype and t.dim() == w[q].dim() and t.shape[:-2] == w[q].shape[:-2] and t.shape[-1] == w[q].shape[-1])
        v = w.floating(2, lambda t: t.dtype == w[q].dtype and t.dim() == w[q].dim() and t.shape[:-1] == w[k].shape[:-1])
        return q, k, v
    lead, length, width = w.pick([2], [2, 2], [1, 2]), w.pick(3, 4, 1), w.pick(4, 8)
    other = w.pick(length, length, 5)
    return w.given([*lead, length, width]), w.given([*lead, other, width]), w.given([*lead, other, w.pick(width, width, 4)])


@statement("attention", 4)
def attention(w: Writer) -> str:
    q, k, v = heads(w)
    rows, keys = w[q].shape[-2], w[k].shape[-2]
    scores = w.pick(f"{q} @ {k}.mT", f"torch.matmul({q}, {k}.transpose(-2, -1))", f"torch.einsum('...id,...jd->...ij', {q}, {k})")
    scores = w.pick(f"({scores})", f"({scores}) * 0.5", f"({scores}) / math.sqrt({w[q].shape[-1]})", f"({q} * 0.5) @ {k}.mT")
    if not w.dynamic:
        rank = w[q].dim()
        masks = {
            "bool": lambda: f"({scores}).masked_fill({w.given([rows, keys], 'bool')} & (torch.arange({keys}) > 0), {w.pick('-1e9', '-math.inf')})",
            "add": lambda: f"({scores} + {w.given([rows, keys])})",
            "causal": lambda: f"({scores}).masked_fill(torch.ones({rows}, {keys}).triu(1).bool(), -math.inf)",
            "where": lambda: f"torch.where(torch.arange({keys}) <= torch.arange({rows})[:, None], {scores}, -1e9)",
            "bias": lambda: f"({scores} + {w.given([*w[q].shape[:-2], 1, keys])})" if rank > 2 else scores,
            "none": lambda: scores,
        }
        scores = masks[w.pick(*masks, "none", "none")]()
    if not w.add(scores):
        raise LookupError
    s = w.order[-1]
    p = w.pick(
        f"torch.softmax({s}, -1)", f"F.softmax({s}, dim=-1, dtype=torch.float32).to({q}.dtype)", f"{s}.softmax(-1)",
        f"torch.exp({s} - {s}.amax(-1, keepdim=True)) / torch.exp({s} - {s}.amax(-1, keepdim=True)).sum(-1, keepdim=True)",
    )  # fmt: skip
    p = w.pick(p, p, f"F.dropout({p}, 0.0)", f"F.dropout({p}, 0.1, False)", f"F.dropout({p}, 0.2, True)")
    if w.maybe(0.4):
        w.add(p)
        p = w.order[-1]
    return w.pick(f"({p}) @ {v}", f"torch.matmul({p}, {v})", f"torch.einsum('...ij,...jd->...id', {p}, {v})", f"(({p}) @ {v}).transpose(-2, -3)")


@statement("attention", 2)
def fused(w: Writer) -> str:
    q, k, v = heads(w)
    rows, keys = w[q].shape[-2], w[k].shape[-2]
    mask = w.pick("", "", f", attn_mask=torch.ones({rows}, {keys}, dtype=torch.bool)", f", attn_mask=torch.ones({rows}, {keys}, dtype=torch.bool).tril()", ", is_causal=True", f", attn_mask={w.given([rows, keys])}")
    if w.dynamic and "ones" in mask:
        mask = ""
    return f"F.scaled_dot_product_attention({q}, {k}, {v}{mask}{w.pick('', '', ', scale=0.5')})"
