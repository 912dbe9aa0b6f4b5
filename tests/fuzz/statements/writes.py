"""In-place writes to arguments, views, buffers and new memory; tensors made from numbers; operations that do nothing."""

from __future__ import annotations

import torch

from ..writer import Writer, statement


def target(w: Writer) -> str:
    """What is written to: any value, or a fresh copy of one so that autograd allows it."""
    x = w.value(lambda t: t.is_floating_point() or t.dtype == torch.int64)
    if w.maybe(0.45) and w.add(w.pick(f"{x}.clone()", f"{x} * 1.5", f"torch.zeros_like({x})", f"{x}.contiguous()")):
        return w.order[-1]
    return x


def view_of(w: Writer, x: str) -> str:
    rank = w[x].dim()
    forms = [x, x]
    if rank and w[x].numel():
        dim = w.chance.randrange(rank)
        forms += [f"{x}[0]", f"{x}[..., 0]", f"{x}[1:]", f"{x}[..., ::2]", f"{x}.select({dim}, 0)", f"{x}.transpose(0, {dim})"]
        forms += [f"{x}.narrow({dim}, 0, 1)", f"{x}.unsqueeze({dim})", f"{x}.unbind({dim})[0]"]
    return w.pick(*forms)


@statement("writes", 4)
def write_method(w: Writer) -> str:
    x = target(w)
    place, y = view_of(w, x), w.value()
    how = w.pick(
        "add_(1)", f"add_({y})", f"mul_({y})", "mul_(0.5)", "zero_()", f"fill_({w.pick(0, 3, -1.5)})", f"copy_({y})", f"sub_({y}, alpha=2)",
        "relu_()", "clamp_(min=0)", "neg_()", "sigmoid_()", "t_()" if w.maybe(0.1) else "abs_()", f"addcmul_({y}, {y}, value=0.5)", "div_(2)",
        f"copy_({w.like(x)})", f"lerp_({w.like(x)}, 0.3)", "tanh_()", f"masked_fill_({w.like(x)} > 0, {w.pick(0.0, -1.0, 'float(5)')})",
    )  # fmt: skip
    return w.pick("", "!", "!") + f"{place}.{how}"


@statement("writes", 4)
def write_index(w: Writer) -> str:
    x = target(w)
    if not w[x].dim() or not w[x].numel():
        raise LookupError
    y = w.value()
    index = w.pick("0", "-1", ":", "...", "1:", "..., 0", "::2", "..., 1:", "..., :1", f"{w.like(x)} > 0", "torch.tensor([0])", "[0, -1]", ":, 0", "0:1")
    how = w.pick("=", "=", "=", "+=", "*=")
    return f"{x}[{index}] {how} {w.pick(y, '1.5', '0', f'{y} * 2', f'{y}[{index}]', f'{x}[{index}] + 1', 'torch.tensor(2.0)')}"


@statement("writes", 2)
def write_many(w: Writer) -> str:
    x, y = target(w), w.value()
    if not w[x].dim() or not w[x].numel():
        raise LookupError
    return "!" + w.pick(
        f"{x}.index_put_((torch.tensor([0, 0]),), {w.pick('torch.tensor(1.0)', f'{x}[0]')}, accumulate={w.pick(True, False)})",
        f"{x}.index_add_(0, torch.tensor([0]), {x}[:1])", f"{x}.index_fill_({w.dim(x)}, torch.tensor([0]), 2.0)",
        f"{x}.index_copy_(0, torch.tensor([0]), {y}[:1])", f"{x}.scatter_(0, torch.zeros_like({x}, dtype=torch.int64), 1.0)",
        f"{x}.scatter_add_(-1, torch.zeros_like({x}, dtype=torch.int64), {w.like(x)})", f"{x}.squeeze_()", f"{x}.unsqueeze_(0)",
        f"torch.add({w.like(x)}, 1, out={x}.detach())", f"torch.relu_({x})", f"F.relu({x}, inplace=True)",
    )  # fmt: skip


@statement("writes", 1)
def augmented(w: Writer) -> str:
    x, y = target(w), w.value()
    return f"{x} {w.pick('+=', '*=', '-=')} {w.pick(y, '2', '0.5', w.like(x))}"


@statement("writes", 2)
def scatter(w: Writer) -> str:
    """Writes into a copy."""
    x = w.floating(1, lambda t: t.numel())
    return w.pick(
        f"torch.select_scatter({x}, {x}.select(0, 0) * 2, 0, -1)", f"torch.slice_scatter({x}, {x}[:1] + 1, 0, 0, 1)",
        f"torch.scatter({x}, -1, torch.zeros_like({x}, dtype=torch.int64), {w.pick('2.0', x)})", f"{x}.masked_fill({w.like(x)} > 0, 1.0)",
        f"torch.index_fill({x}, 0, torch.tensor([0]), 1.0)", f"{x}.index_put((torch.tensor([0]),), torch.tensor(2.0))",
        f"torch.masked_scatter({x}, {x} > 0, {w.like(x)})", f"torch.where({w.like(x)} > 0, {x}, {w.pick('0.0', 'torch.tensor(1.0)', w.like(x))})",
    )  # fmt: skip


# ---- constants ----


@statement("constants", 3)
def constant(w: Writer) -> str:
    shape = w.sizes(w.shape())
    n = w.pick(2, 3, 4)
    return w.pick(
        f"torch.tensor({w.pick(2.0, -0.5, 0.0, 1, 3, True)})", f"torch.tensor({[w.pick(-1.0, 0.5, 2.0) for _ in range(n)]})", f"torch.arange({w.pick(1, 4, 6)})",
        f"torch.full(({shape},), {w.pick(0.5, 2, 1.0, 0.0)})" if shape else "torch.full((), 2.0)", f"torch.eye({n})", f"torch.ones({shape or '()'})",
        f"torch.zeros({shape or '()'})", f"torch.arange(0, {n}, dtype=torch.float32)", f"torch.linspace(-1, 1, {n})", f"torch.tril(torch.ones({n}, {n}))",
        f"torch.ones({n}, {n}).triu(1).bool()", f"torch.empty({shape or '()'}).fill_(1.0)", "torch.tensor([[1.0, 2.0], [3.0, 4.0]])",
    )  # fmt: skip


@statement("constants", 2)
def constant_like(w: Writer) -> str:
    x = w.value()
    return w.pick(
        f"torch.zeros_like({x})", f"torch.ones_like({x})", f"torch.full_like({x}, 2)", f"{x}.new_zeros({w.sizes(w[x].shape) or '()'})",
        f"{x}.new_tensor([1.0, 2.0])", f"{x}.new_full((2, 2), 0.5)", f"torch.arange({w.size(w[x].shape[0])})" if w[x].dim() else f"torch.zeros_like({x})",
        f"torch.zeros_like({x}, dtype=torch.float64)", f"{x}.new_ones(2)",
    )  # fmt: skip


@statement("constants", 1)
def look_up(w: Writer) -> str:
    """A table of numbers read at places that come in."""
    i = w.value(lambda t: t.dtype == torch.int64 and t.numel())
    table = w.pick("torch.tensor([1.0, 2.0, 3.0])", "torch.arange(5.0)", "torch.eye(3)")
    return w.pick(f"{table}[{i}.clamp(0, 1)]", f"F.embedding({i}.clamp(0, 1), torch.eye(3))", f"F.one_hot({i}.clamp(0, 1), 3)")


# ---- what does nothing, or nearly ----


@statement("nothing", 3)
def nothing(w: Writer) -> str:
    x = w.value()
    rank, shape = w[x].dim(), w.sizes(w[x].shape)
    return w.pick(
        f"{x}.clone()", f"{x}.contiguous()", f"{x} + 0", f"{x} * 1", f"{x} / 1", f"{x} - 0", f"{x}.detach()", f"F.dropout({x}, 0.5, False)",
        f"{x}.to({x}.dtype)", f"torch.cat([{x}])" if rank else f"{x}.clone()", f"{x}.view({shape})" if rank else f"{x}.view(())",
        f"{x}.expand({shape})" if rank else f"{x}.clone()", f"{x}.permute({', '.join(map(str, range(rank)))})" if rank else f"{x}.clone()",
        f"{x}[:]" if rank else f"{x}[...]", f"{x}.type_as({x})", f"torch.stack([{x}])", f"{x}.pow(1)", f"-(-{x})", f"{x}.relu().relu()",
        f"{x}.clone(memory_format=torch.contiguous_format)", f"{x}.repeat({', '.join('1' * rank)})" if rank else f"{x}.clone()", f"torch.nn.Identity()({x})",
        f"{x}.transpose(0, -1).transpose(0, -1)" if rank else f"{x}.clone()", f"{x}.reshape({shape})" if rank else f"{x}.reshape(())", f"F.pad({x}, (0, 0))" if rank else f"{x} * 1.0",
        f"torch.clone({x})", f"0 + {x}", f"1 * {x}", f"{x} ** 2 / 1.0", f"{x}.float()", f"+{x}",
    )  # fmt: skip
