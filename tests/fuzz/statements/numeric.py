"""Pointwise operations, reductions, casts and random draws."""

from __future__ import annotations

from ..writer import Writer, statement

SMOOTH = ("tanh", "sigmoid", "sin", "cos", "relu", "neg", "abs", "square", "erf", "exp", "sqrt", "log1p", "sign", "floor", "reciprocal", "rsqrt", "round")
ACTIVATIONS = ("gelu", "silu", "leaky_relu", "elu", "softplus", "hardtanh", "hardswish", "mish", "relu6", "selu", "logsigmoid", "hardsigmoid", "softsign", "tanhshrink")


@statement("pointwise", 3)
def unary(w: Writer) -> str:
    x = w.floating()
    name = w.pick(*SMOOTH)
    argument = f"{x}.abs() + 0.5" if name in ("sqrt", "log1p", "reciprocal", "rsqrt") else x
    if name == "exp":
        argument = f"{x}.clamp(max=3.0)"
    return w.pick(f"torch.{name}({argument})", f"({argument}).{name}()" if argument != x else f"{x}.{name}()", f"F.{w.pick(*ACTIVATIONS)}({x})")


@statement("pointwise", 5)
def binary(w: Writer) -> str:
    x, y = w.value(), w.value()
    number = w.pick("0", "1", "2.0", "-0.5", "3", "0.125", "-1")
    y = w.pick(y, y, w.like(x), number)
    a, b = w.pick((x, y), (y, x))
    symbol = w.pick("+", "-", "*", "+", "*")
    return w.pick(
        f"{a} {symbol} {b}", f"{a} {symbol} {b}", f"torch.add({x}, {y}, alpha={w.pick(2, 0.5, 1)})", f"torch.sub({x}, {y})", f"{x}.mul({y})",
        f"{x} / ({y} * 0 + 2)", f"torch.maximum({x}, {w.like(x)})", f"torch.minimum({x}, {w.like(x)})", f"torch.rsub({x}, {y})",
        f"torch.pow({x}, {w.pick(2, 3, 1)})", f"{x} ** 2", f"torch.atan2({x}, {w.like(x)})", f"torch.true_divide({x}, 4)", f"({x} // 2)", f"torch.fmod({x}, 3)", f"{x} % 3",
    )  # fmt: skip


@statement("pointwise", 2)
def compare(w: Writer) -> str:
    x = w.value(lambda t: not t.is_complex())
    y = w.pick(w.like(x), "0", "0.5")
    mask = f"{x} {w.pick('>', '<', '>=', '<=', '==', '!=')} {y}"
    return w.pick(mask, f"torch.where({mask}, {x}, {w.pick('0.0', w.like(x), '1')})", f"({mask}).float()", f"({mask}) & ({x} == {x})", f"({mask}).logical_not()", f"~({mask})")


@statement("pointwise", 2)
def ternary(w: Writer) -> str:
    x = w.floating()
    y, z = w.like(x), w.like(x)
    return w.pick(
        f"torch.clamp({x}, -1, 1)", f"{x}.clamp(min=0)", f"torch.clamp({x}, max=0.5)", f"torch.lerp({x}, {y}, 0.25)", f"torch.addcmul({x}, {y}, {z}, value=0.5)",
        f"torch.addcdiv({x}, {y}, {z}.abs() + 1)", f"torch.nan_to_num({x})", f"torch.nn.functional.threshold({x}, 0.1, 0.0)", f"{x} * {y} + {z}", f"F.gelu({x} * {y}, approximate='tanh')",
        f"torch.relu({x}) + torch.relu({y})", f"F.glu({x}, -1)",
    )  # fmt: skip


@statement("reductions", 5)
def reduce(w: Writer) -> str:
    x = w.value()
    rank = w[x].dim()
    keep = w.pick("", "", ", keepdim=True")
    name = w.pick("sum", "mean", "amax", "amin", "logsumexp", "sum", "mean", "var", "std", "prod", "argmax", "all", "any", "norm", "count_nonzero", "median")
    if not rank:
        return f"{x}.{w.pick('sum', 'mean', 'amax')}()"
    dim = w.dim(x)
    if name in ("var", "std"):
        return w.pick(f"{x}.{name}({dim}, unbiased={w.pick(True, False)}{keep})", f"torch.{name}({x}, {dim}{keep})", f"torch.{name}_mean({x}, {dim}{keep})")
    if name == "norm":
        return w.pick(f"{x}.norm(dim={dim}{keep})", f"torch.linalg.vector_norm({x}, 2, {dim}{keep})", f"F.normalize({x}, dim={dim})")
    if name in ("count_nonzero", "prod", "argmax", "all", "any"):
        return f"torch.{name}({x}, {dim})"
    if name == "median":
        return f"torch.median({x}, {dim}{keep})[0]"
    several = w.dims(x, w.pick(*range(1, rank + 1)))
    return w.pick(f"{x}.{name}({dim}{keep})", f"torch.{name}({x}, dim={dim}{keep})", f"{x}.{name}({tuple(several)}{keep})", f"{x}.{name}({dim}, True)")


@statement("reductions", 2)
def scan(w: Writer) -> str:
    x = w.floating(1)
    dim = w.dim(x)
    return w.pick(
        f"{x}.cumsum({dim})", f"torch.cumsum({x}, dim={dim})", f"{x}.cumprod({dim})", f"{x}.max({dim})[0]", f"torch.sort({x}, {dim})[0]", f"{x}.max()", f"{x}.min({dim}, keepdim=True)[0]",
        f"torch.topk({x}, 1, {dim})[0]", f"{x}.sum()", f"{x}.mean()", f"torch.diff({x}, dim={dim})", f"torch.logcumsumexp({x}, {dim})", f"{x}.square().mean({dim}, True)",
    )  # fmt: skip


@statement("casts", 3)
def cast(w: Writer) -> str:
    x = w.value()
    name = w.pick("float32", "bfloat16", "float16", "float64", "int64", "int32", "bool", "float32", "float64", *["complex64"] * w.maybe(0.1))
    return w.pick(f"{x}.to(torch.{name})", f"{x}.to(torch.{name})", f"{x}.type(torch.{name})", f"{x}.to(dtype=torch.{name}, copy=True)")


@statement("casts", 2)
def cast_chain(w: Writer) -> str:
    x = w.value()
    names = [w.pick("float", "half", "bfloat16", "double") for _ in range(2)]
    return w.pick(f"{x}.{names[0]}().{names[1]}()", f"{x}.{names[0]}() + {w.like(x)}", f"({x}.{names[0]}() * 2).to({x}.dtype)")


@statement("draws")
def draw(w: Writer) -> str:
    x = w.floating()
    return w.pick(
        f"F.dropout({x}, {w.pick(0.5, 0.1)}, True)", f"torch.rand_like({x})", f"{x} + torch.rand({w.sizes(w[x].shape) or '()'})", f"F.dropout({x}, 0.0, True)", f"torch.randn_like({x}) * {x}",
        f"torch.bernoulli(torch.sigmoid({x}))", f"F.dropout({x}, 1.0, True)", f"torch.randint(0, 4, (3,)) + {x}.sum()", f"F.alpha_dropout({x}, 0.3, True)", f"F.feature_dropout({x}, 0.5, True)" if w[x].dim() > 1 else f"F.dropout({x})",
    )  # fmt: skip
