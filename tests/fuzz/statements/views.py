"""Views, and taking tensors apart and putting them together again."""

from __future__ import annotations

from ..writer import Writer, statement


@statement("views", 3)
def reshape(w: Writer) -> str:
    x = w.value(lambda t: t.numel())
    shape = list(w[x].shape)
    rank = len(shape)
    forms = ["-1", w.sizes(shape), f"1, {w.sizes(shape)}" if rank else "1"]
    for i, n in enumerate(shape):
        if n % 2 == 0:
            forms.append(w.sizes([*shape[:i], 2, n // 2, *shape[i + 1 :]]))
            forms.append(", ".join([*map(w.size, shape[:i]), "2", "-1", *map(w.size, shape[i + 1 :])]))
    if rank > 1:
        at = w.chance.randrange(rank - 1)
        forms += [w.sizes([*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]])] * 2
        forms.append(", ".join([*map(w.size, shape[:at]), "-1", *map(w.size, shape[at + 2 :])]))
    form = w.pick(*forms)
    return w.pick(f"{x}.reshape({form})", f"torch.reshape({x}, ({form},))", f"{x}.view({form})")


@statement("views", 4)
def transpose(w: Writer) -> str:
    x = w.value(lambda t: t.dim() > 1)
    a, b = w.dims(x, 2)
    forms = [f"{x}.transpose({a}, {b})", f"torch.transpose({x}, {a}, {b})", f"{x}.swapaxes({a}, {b})", f"{x}.mT"]
    return w.pick(*forms, *[f"{x}.t()"] * (w[x].dim() == 2))


@statement("views", 3)
def permute(w: Writer) -> str:
    x = w.value(lambda t: t.dim() > 1)
    order = w.dims(x, w[x].dim())
    a, b = w.dims(x, 2)
    listed = ", ".join(map(str, order))
    return w.pick(f"{x}.permute({listed})", f"torch.permute({x}, ({listed}))", f"torch.movedim({x}, {a}, {b})")


@statement("views", 3)
def slice_one(w: Writer) -> str:
    x = w.value(lambda t: t.dim())
    dim = w.dim(x)
    size = w[x].shape[dim]
    start, length = w.chance.randrange(size + 1), w.chance.randrange(1, size + 2)
    piece = w.pick(f"{start}:", f":{length}", f"{start}:{start + length}", "::2", f"{start}::3", ":-1", "-2:", f"-{start + 1}:{length}", "1:-1", "::1")
    index = ":, " * (dim % w[x].dim()) + piece
    index = w.pick(index, index if dim >= 0 else "..., " + piece + ", :" * (-1 - dim))
    narrow = f"torch.narrow({x}, {dim}, {min(start, size)}, {max(0, min(length, size - start))})"
    return w.pick(f"{x}[{index}]", f"{x}[{index}]", narrow)


@statement("views", 2)
def select(w: Writer) -> str:
    x = w.value(lambda t: t.dim() and t.numel())
    dim = w.dim(x)
    at = w.chance.randrange(-w[x].shape[dim], w[x].shape[dim])
    return w.pick(f"{x}.select({dim}, {at})", f"{x}[{':, ' * (dim % w[x].dim())}{at}]", f"torch.select({x}, {dim}, {at})")


@statement("views", 3)
def add_or_drop_a_dim(w: Writer) -> str:
    x = w.value()
    rank = w[x].dim()
    new = w.chance.randrange(-rank - 1, rank + 1)
    ones = [d for d in range(rank) if w[x].shape[d] == 1]
    forms = [f"{x}.unsqueeze({new})", f"torch.unsqueeze({x}, {new})", f"{x}[None]", f"{x}[..., None]", f"{x}.squeeze()"]
    if ones:
        forms += [f"{x}.squeeze({w.pick(*ones)})", f"torch.squeeze({x}, {w.pick(*ones) - rank})"] * 3
    return w.pick(*forms)


@statement("views", 2)
def expand(w: Writer) -> str:
    x = w.value(lambda t: t.dim() < 4)
    shape = list(w[x].shape)
    wide = [w.pick(2, 3) if n == 1 else n for n in shape]
    kept = ["-1" if w.maybe(0.3) else w.size(n) for n in wide]
    forms = [f"{x}.expand({', '.join(map(w.size, wide))})", f"{x}.expand(2, {', '.join(kept)})" if shape else f"{x}.expand(2)"]
    return w.pick(*forms, f"torch.broadcast_to({x}, (2, {w.sizes(wide)}))")


@statement("views", 1)
def flatten(w: Writer) -> str:
    x = w.value()
    rank = w[x].dim()
    start = w.chance.randrange(max(rank, 1))
    forms = [f"{x}.flatten()", f"torch.flatten({x}, {start})", f"{x}.flatten({start}, {w.chance.randrange(start, max(rank, 1))})", f"{x}.ravel()"]
    if rank and (size := w[x].shape[-1]) and size % 2 == 0:
        forms += [f"{x}.unflatten(-1, (2, {w.size(size // 2)}))", f"torch.unflatten({x}, -1, (-1, 2))"]
    return w.pick(*forms)


@statement("views", 1)
def windows(w: Writer) -> str:
    x = w.value(lambda t: t.dim() and t.dim() < 4)
    dim = w.dim(x)
    return f"{x}.unfold({dim}, {w.pick(1, 2, 3)}, {w.pick(1, 2)})"


@statement("views", 1)
def diagonal(w: Writer) -> str:
    x = w.value(lambda t: t.dim() > 1)
    a, b = w.dims(x, 2)
    return w.pick(f"{x}.diagonal({w.pick(0, 0, 1, -1)}, {a}, {b})", f"torch.diagonal({x})", f"torch.diagonal({x}, dim1={a}, dim2={b})")


@statement("views", 1)
def as_strided(w: Writer) -> str:
    if w.dynamic:
        raise LookupError
    x = w.value(lambda t: t.numel() > 6)
    return f"torch.as_strided({x}, {w.pick('(2, 3), (1, 2)', '(3, 2), (2, 1)', '(2, 2), (1, 1)', '(4,), (1,)', '(2, 2), (2, 1), 1')})"


@statement("views", 1)
def swap_or_view_as(w: Writer) -> str:
    x = w.value()
    y = w.value(lambda t: t.numel() == w[x].numel())
    return w.pick(f"{x}.view_as({y})", f"{x}.reshape_as({y})", f"{x}.expand_as({w.like(x)})", f"torch.atleast_2d({x})")


@statement("views", 1)
def indexed(w: Writer) -> str:
    """Indexing with numbers from the program: copies, not views."""
    x = w.value(lambda t: t.dim() and t.numel())
    dim = w.dim(x)
    size = w[x].shape[dim]
    at = ", ".join(str(w.chance.randrange(size)) for _ in range(w.pick(1, 2, 3)))
    return w.pick(
        f"{x}.index_select({dim}, torch.tensor([{at}]))", f"{x}[{':, ' * (dim % w[x].dim())}torch.tensor([{at}])]",
        f"{x}[{':, ' * (dim % w[x].dim())}[{at}]]", f"torch.flip({x}, [{dim}])", f"torch.roll({x}, {w.pick(1, -1)}, {dim})",
        f"torch.take_along_dim({x}, torch.zeros_like({x}, dtype=torch.int64), {dim})",
    )  # fmt: skip


# ---- pieces ----


def take_apart(w: Writer, x: str) -> str:
    dim = w.dim(x)
    size = w[x].shape[dim]
    if size > 6:
        return w.pick(f"{x}.chunk({w.pick(2, 3)}, {dim})", f"torch.chunk({x}, 2, dim={dim})")
    cut = w.chance.randrange(size + 1)
    return w.pick(
        f"{x}.chunk({w.pick(1, 2, 2, 3)}, {dim})", f"torch.chunk({x}, 2, dim={dim})", f"{x}.unbind({dim})",
        f"torch.split({x}, {w.pick(1, 2, 3)}, {dim})", f"{x}.split([{cut}, {size - cut}], {dim})", f"torch.unbind({x}, {dim})",
        f"torch.tensor_split({x}, {w.pick(2, 3)}, {dim})", f"torch.split({x}, [{cut}, {size - cut}], dim={dim})",
    )  # fmt: skip


@statement("pieces", 2)
def split(w: Writer) -> str:
    return take_apart(w, w.value(lambda t: t.dim()))


@statement("pieces", 2)
def join(w: Writer) -> str:
    x = w.value()
    rank = w[x].dim()
    parts = [x, *(w.like(x) for _ in range(w.pick(0, 1, 1, 2)))]
    w.chance.shuffle(parts)
    listed = ", ".join(parts)
    if rank and w.maybe(0.6):
        dim = w.dim(x)
        if w.maybe(0.3):
            other = w.value(lambda t: t.dim() == rank and all(a == b for i, (a, b) in enumerate(zip(t.shape, w[x].shape)) if i != dim % rank))
            listed += f", {other}"
        return w.pick(f"torch.cat([{listed}], {dim})", f"torch.cat(({listed},), dim={dim})", f"torch.concat([{listed}], {dim})")
    at = w.chance.randrange(-rank - 1, rank + 1)
    return w.pick(f"torch.stack([{listed}], {at})", f"torch.stack(({listed},), dim={at})", *[f"torch.hstack([{listed}])"] * bool(rank))


@statement("pieces", 5)
def rejoin(w: Writer) -> str:
    """Take apart, do the same to each piece or not, and put together, in order or not."""
    x = w.value(lambda t: 0 < t.dim() < 5)
    first = len(w.order)
    if not w.add(take_apart(w, x)):
        raise LookupError
    pieces = w.order[first:]
    names = {n: n for n in pieces}
    for _ in range(w.pick(0, 0, 1, 1, 2)):
        form = w.pick("{}.relu()", "torch.tanh({})", "{}.unsqueeze(0)", "{}.squeeze()", "{}.reshape(-1)", "{}.transpose(0, -1)", "{} * 2", "{}.clone()", "{}.flatten()", "{} + 1", "{}.contiguous()", "{}.squeeze(0)", "{}.sigmoid()")
        names = {n: form.format(text) for n, text in names.items()}
    if w.maybe(0.2):
        w.add(f"!{w.pick(*pieces, x)}.{w.pick('add_(1)', 'mul_(2)', 'zero_()')}")
    parts = list(names.values())
    parts = w.pick(parts, parts, parts, parts[::-1], parts[1:], parts[::2], parts * 2, [*parts[1:], parts[0]]) or parts
    if w.maybe(0.2):
        parts.insert(w.chance.randrange(len(parts) + 1), w.like(pieces[0]))
    dim = w.chance.randrange(-w[pieces[0]].dim() - 1, w[pieces[0]].dim() + 1)
    join = w.pick("cat", "cat", "stack", "stack", "concat", "vstack", "hstack")
    rest = "" if join in ("vstack", "hstack") else f", {dim}"
    return f"torch.{join}([{', '.join(parts)}]{rest})"
