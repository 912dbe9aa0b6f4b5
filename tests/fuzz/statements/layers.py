"""Matrix products, linear layers and norms, with parameters, buffers and weights that are arguments."""

from __future__ import annotations

import torch

from ..writer import Writer, statement


def weight(w: Writer, *shape: int) -> str:
    """A weight of that shape: one that is there already, a new parameter, or a new argument."""
    if w.maybe(0.3):
        try:
            # not a buffer: a norm may update it, and torch's own order of that update and the reads is not eager's
            return w.value(lambda t: tuple(t.shape) == shape and t.dtype == torch.float32, but_not="b")
        except LookupError:
            pass
    return w.given(shape, letter=w.pick("p", "p", "x"))


def width(w: Writer) -> int:
    return w.pick(1, 2, 4, 4, 8)


@statement("products", 4)
def linear(w: Writer) -> str:
    x = w.floating(1, lambda t: t.dtype == torch.float32 and (not w.dynamic or t.shape[-1] % 7))
    out, inner = width(w), w[x].shape[-1]
    matrix = weight(w, out, inner)
    bias = w.pick("", f", {weight(w, out)}")
    return w.pick(f"F.linear({x}, {matrix}{bias})", f"F.linear({x}, {matrix}{bias})", f"{x} @ {matrix}.t()", f"torch.matmul({x}, {matrix}.mT){bias.replace(',', ' +')}")


@statement("products", 3)
def several_linears(w: Writer) -> str:
    """Layers over one input, joined or not."""
    x = w.floating(2, lambda t: t.dtype == torch.float32 and (not w.dynamic or t.shape[-1] % 7))
    inner, out = w[x].shape[-1], width(w)
    layers = []
    for _ in range(w.pick(2, 2, 3)):
        wide = w.pick(out, out, width(w))
        layers.append(f"F.linear({x}, {weight(w, wide, inner)}{w.pick('', ', ' + weight(w, wide))})")
    act = w.pick("{}", "{}", "torch.relu({})", "F.layer_norm({}, (" + str(out) + ",))", "torch.sigmoid({})")
    layers = [act.format(layer) for layer in layers]
    return w.pick(f"torch.cat([{', '.join(layers)}], -1)", f"({', '.join(layers)})", " + ".join(layers), f"torch.stack([{', '.join(layers)}])")


@statement("products", 3)
def matmul(w: Writer) -> str:
    x = w.floating(1)
    y = w.floating(1, lambda t: t.dtype == w[x].dtype and t.shape[-2 if t.dim() > 1 else -1] == w[x].shape[-1])
    forms = [f"{x} @ {y}", f"torch.matmul({x}, {y})"]
    if w[x].dim() == w[y].dim() == 2:
        forms += [f"torch.mm({x}, {y})", f"torch.einsum('ij,jk->ik', {x}, {y})", f"{x}.mm({y})"]
    if w[x].dim() == w[y].dim() == 3:
        forms += [f"torch.bmm({x}, {y})", f"torch.einsum('bij,bjk->bik', {x}, {y})"]
    return w.pick(*forms)


@statement("products", 3)
def matmul_transposed(w: Writer) -> str:
    x = w.floating(2)
    y = w.floating(2, lambda t: t.dtype == w[x].dtype and t.dim() == w[x].dim() and t.shape[-1] == w[x].shape[-1])
    scale = w.pick("", "", " * 0.5", " / 2.0")
    forms = [f"{x} @ {y}.mT{scale}", f"torch.matmul({x}, {y}.transpose(-2, -1)){scale}", f"torch.einsum('...ij,...kj->...ik', {x}, {y}){scale}"]
    if w[x].dim() == 2:
        forms.append(f"torch.einsum('ij,kj->ki', {x}, {y})")
        forms.append(f"({x}[:, None] * {y}[None]).sum(-1)")
    return w.pick(*forms)


@statement("products", 2)
def added_product(w: Writer) -> str:
    x = w.floating(2, lambda t: t.dim() in (2, 3))
    y = w.floating(2, lambda t: t.dtype == w[x].dtype and t.dim() == w[x].dim() and t.shape[-2] == w[x].shape[-1])
    z = w.floating(1, lambda t: t.dtype == w[x].dtype)
    name = "addmm" if w[x].dim() == 2 else "baddbmm"
    scale = w.pick("", f", beta={w.pick(1, 0.5, 2)}", f", alpha={w.pick(2, 0.5)}", f", beta={w.pick(1, 0.5)}, alpha={w.pick(1, -1)}")
    return w.pick(f"torch.{name}({z}, {x}, {y}{scale})", f"torch.add({z}, {x} @ {y}, alpha={w.pick(1, 2)})", f"{z} + {x} @ {y}", f"{x} @ {y} + {z}")


@statement("products", 2)
def einsum(w: Writer) -> str:
    x = w.floating(2, lambda t: t.dim() in (2, 3))
    y = w.like(x)
    if w[x].dim() == 2:
        return f"torch.einsum('{w.pick('ij,ij->i', 'ij,ij->', 'ij,ij->ij', 'ij,ik->jk', 'ij,ij->j', 'ij,kj->ik', 'ij,ij->ji')}', {x}, {y})"
    return f"torch.einsum('{w.pick('bij,bij->bi', 'bij,bkj->bik', 'bij,bij->b', 'bij,bik->bjk', 'bij,bij->ij', 'bij,cij->bc')}', {x}, {y})"


@statement("products", 1)
def convolution(w: Writer) -> str:
    x = w.floating(3, lambda t: t.dim() in (3, 4) and t.dtype == torch.float32 and t.numel() and (not w.dynamic or t.shape[1] % 7))
    rank = w[x].dim() - 2
    channels, out = w[x].shape[1], width(w)
    kernel = weight(w, out, channels, *[w.pick(1, 3)] * rank)
    bias = w.pick("", f", {weight(w, out)}")
    conv = f"F.conv{rank}d({x}, {kernel}{bias}, padding=1)"
    if w.maybe(0.4):
        mean, scale = w.given([out], letter="b"), weight(w, out)
        var = w.given([out], letter="b")
        return f"F.batch_norm({conv}, {mean}, {var}.abs() + 1, {scale}, {scale}, {w.pick(False, False, True)})" if w.maybe(0.5) else f"F.batch_norm({conv}, {mean}, {var}.abs() + 1)"
    return conv


@statement("layers", 3)
def layer_norm(w: Writer) -> str:
    x = w.floating(1, lambda t: t.dtype == torch.float32 and t.shape[-1] > 1 and (not w.dynamic or t.shape[-1] % 7))
    n = w[x].shape[-1]
    scale, shift = weight(w, n), weight(w, n)
    return w.pick(
        f"F.layer_norm({x}, ({n},))", f"F.layer_norm({x}, ({n},), {scale}, {shift})", f"F.layer_norm({x}, ({n},), {scale})", f"F.rms_norm({x}, ({n},), {scale}, 1e-5)", f"F.rms_norm({x}, ({n},), eps=1e-5)",
        f"{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-5) * {scale}", f"({x} - {x}.mean(-1, keepdim=True)) / ({x}.std(-1, keepdim=True) + 1e-5)", f"F.layer_norm({x}, ({n},), eps=0.1).relu()",
    )  # fmt: skip


@statement("layers", 2)
def batch_norm(w: Writer) -> str:
    x = w.floating(2, lambda t: t.dim() in (2, 3, 4) and t.dtype == torch.float32 and t.numel() and t.shape[0] > 1 and (not w.dynamic or t.shape[1] % 7))
    n = w[x].shape[1]
    mean, var = w.given([n], letter="b"), w.given([n], letter="b")
    scale = weight(w, n)
    return w.pick(
        f"F.batch_norm({x}, {mean}, {var}.abs() + 0.5, {scale}, {scale})", f"F.batch_norm({x}, {mean}, {var}, {scale}, {scale}, True, 0.1)", f"F.batch_norm({x}, None, None, training=True)",
        f"F.group_norm({x}, 1, {scale}, {scale})", f"F.group_norm({x}, {n})", f"F.instance_norm({x})" if w[x].dim() > 2 else f"F.group_norm({x}, 1)",
    )  # fmt: skip


@statement("layers", 2)
def buffer_update(w: Writer) -> str:
    b, x = w.pick(*[n for n in w.order if n[0] == "b"]), w.floating()
    return w.pick(f"!{b}.add_(1)", f"!{b}.mul_(0.9).add_({x}.detach().mean(), alpha=0.1)", f"{b}[...] = {x}.detach().sum()", f"!{b}.copy_({w.like(b)}.detach())", f"!{b}.lerp_({x}.detach().mean().expand_as({b}), 0.1)")


@statement("layers", 1)
def loss(w: Writer) -> str:
    x = w.floating(2, lambda t: t.numel())
    y = w.like(x)
    return w.pick(
        f"F.mse_loss({x}, {y})", f"F.l1_loss({x}, {y}, reduction='none')", f"F.smooth_l1_loss({x}, {y})", f"F.huber_loss({x}, {y}, reduction='sum')", f"F.cosine_similarity({x}, {y})",
        f"F.binary_cross_entropy_with_logits({x}, torch.sigmoid({y}))", f"F.kl_div({x}.log_softmax(-1), {y}.softmax(-1), reduction='batchmean')",
        f"F.cross_entropy({x}, torch.zeros({w.sizes([w[x].shape[0], *w[x].shape[2:]])}, dtype=torch.int64), label_smoothing={w.pick(0.0, 0.1)})", f"F.nll_loss({x}.log_softmax(1), torch.zeros({w.sizes([w[x].shape[0], *w[x].shape[2:]])}, dtype=torch.int64))",
    )  # fmt: skip


@statement("layers", 1)
def pool_or_pad(w: Writer) -> str:
    x = w.floating(3, lambda t: t.dim() in (3, 4) and t.numel())
    two = w[x].dim() == 4
    return w.pick(
        f"F.pad({x}, (1, 1))", f"F.pad({x}, (1, 0), value=2.0)", f"F.max_pool{2 if two else 1}d({x}, 2)", f"F.avg_pool{2 if two else 1}d({x}, 2)", f"F.adaptive_avg_pool{2 if two else 1}d({x}, 1)",
        f"F.interpolate({x}, scale_factor=2, mode='nearest')", f"{x}.repeat_interleave(2, 1)", f"{x}.repeat(1, 2{', 1' * (w[x].dim() - 2)})", f"torch.tile({x}, (2,))", f"F.pixel_shuffle({x}, 2)" if two else f"F.pad({x}, (0, 2), mode='replicate')",
    )  # fmt: skip
