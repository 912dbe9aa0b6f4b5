"""Random attention written by hand: every spelling of scores, masks, sinks and what follows, in random order.

A program is lines of source, so that one that goes wrong can be made smaller by leaving lines out.
"""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from triptych.pre_grad.fuse_attention import FuseAttention
from triptych.pre_grad.normalization_pass_aten import NormalizationPassAten
from triptych.pre_grad.remove_noop_pass import RemoveNoopPass
from triptych.testing.capture import capture_torch
from triptych.testing.check import run_pass

from .test_attention import as_double, in_double, run_with_gradients

LOW = ("-math.inf", "-math.inf", "torch.finfo(s.dtype).min", "-1e9", "-1e4", "-3e38")


@dataclass(frozen=True)
class Program:
    seed: int
    lines: tuple[str, ...]
    inputs: dict[str, tuple]
    """Name -> (kind, shape, wants a gradient)."""
    dtype: torch.dtype
    train: bool
    autocast: bool
    dynamic: bool
    strange: bool
    """Numbers that are not finite, or huge: only NaN and infinity in their places are compared."""

    def __str__(self):
        how = f"{self.dtype} train={self.train} autocast={self.autocast} dynamic={self.dynamic} strange={self.strange}"
        given = "".join(f"    # {n}: {kind}{list(shape)}{' grad' * g}\n" for n, (kind, shape, g) in self.inputs.items())
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"# seed {self.seed}, {how}\ndef program({', '.join(self.inputs)}):\n{given}{body}    return o"

    def function(self):
        names = {"torch": torch, "F": F, "math": math}
        exec(str(self), names)
        return names["program"]

    def tensors(self):
        generator = torch.Generator().manual_seed(self.seed)
        return [self._tensor(kind, shape, g and self.train, generator) for kind, shape, g in self.inputs.values()]

    def _tensor(self, kind, shape, gradient, generator):
        if kind in ("mask", "dead"):
            cut = torch.rand(shape, generator=generator) > 0.6
            if kind == "dead":
                return cut | (torch.rand((*shape[:-1], 1), generator=generator) > 0.6)
            cut[..., 0] = False
            return cut
        if kind.startswith("low"):
            cut = self._tensor("dead" if kind.endswith("dead") else "mask", shape, False, generator)
            low = {"inf": -math.inf, "min": torch.finfo(self.dtype).min}.get(kind.split("_")[1]) or float(kind.split("_")[1])
            return torch.zeros(shape, dtype=self.dtype).masked_fill(cut, low)
        made = torch.randn(shape, generator=generator)
        if kind == "factor":
            made = made.abs() + 0.3
        if kind.startswith("strange") and made.numel():
            number = {"nan": math.nan, "inf": math.inf, "zero": -0.0, "big": 1e4, "huge": 3e38}[kind.split("_")[1]]
            made.view(-1)[int(torch.randint(made.numel(), (), generator=generator))] = number
        return made.to(self.dtype).requires_grad_(gradient)


@dataclass
class Writer:
    """Chooses one program."""

    chance: random.Random
    lines: list[str] = field(default_factory=list)
    inputs: dict[str, tuple] = field(default_factory=dict)
    sink: str = ""
    masked: bool = False
    dead: bool = True
    last_mask: str = ""

    def pick(self, *of):
        return self.chance.choice(of)

    def given(self, kind, shape, gradient=False):
        name = f"{kind[0]}{len(self.inputs)}"
        self.inputs[name] = (kind, tuple(shape), gradient and not kind.startswith("low"))
        return name

    def write(self, seed):
        c = self.chance
        self.batch = self.pick((2, 3), (2, 3), (1, 2), (2, 1), (3,), (1,), ())
        self.L, self.M = self.pick((5, 5), (5, 5), (4, 6), (1, 5), (5, 1), (1, 1), (6, 3))
        self.D, self.E = self.pick((8, 8), (8, 8), (8, 4), (4, 8), (1, 3))
        train, dtype = c.random() < 0.6, self.pick(torch.float32, torch.float32, torch.bfloat16)
        autocast = dtype == torch.float32 and c.random() < 0.2
        strange = c.random() < 0.12
        # a finite number added to all of a row is known to lose the gradient of its keys
        self.sums_finite = not train or c.random() < 0.5
        self.dead = not (train and self.sums_finite) and c.random() < 0.7
        self.strange = strange
        for name, rows, width in (("q", self.L, self.D), ("k", self.M, self.D), ("v", self.M, self.E)):
            kind = "float"
            if strange and c.random() < 0.6:
                kind = "strange_" + self.pick("zero", "big", *["nan", "inf", "huge"] * (name == "v"))
            self.inputs[name] = (kind, (*self.batch, rows, width), True)
        self.product()
        for _ in range(self.pick(0, 1, 2, 3, 3, 4, 5, 6)):
            self.above()
        self.softmax()
        for _ in range(self.pick(0, 0, 0, 1, 1, 2)):
            self.below()
        if self.sink:
            self.lines.append(f"p = p[..., {'1:' if self.sink == 'first' else ':-1'}]")
        if not autocast:
            self.lines.append("p = p.to(v.dtype)")
        self.values()
        dynamic = c.random() < 0.15
        # what a mask hides of NaN is up to the kernel, and a shift by the highest of all scores carries it everywhere
        if strange and not self.masked and not any(part in line for line in self.lines for part in ("cat(", "clamp", "max(min", "s.max()")):
            for name in self.pick("", "q", "k", "qk"):
                self.inputs[name] = ("strange_" + self.pick("nan", "inf"), *self.inputs[name][1:])
        return Program(seed, tuple(self.lines), self.inputs, dtype, train, autocast, dynamic, strange)

    def product(self):
        if self.chance.random() < 0.3:
            which = self.pick("q", "k")
            factor = self.pick("0.35", "1.5", self.scalar(), self.given("factor", self.shape("factor")[:-2] + (1, 1)))
            self.lines.append(f"{which} = {which} {self.pick('*', '/')} {factor}")
        kinds = ["q @ k.mT", "torch.matmul(q, k.transpose(-1, -2))", "(k @ q.mT).mT", "torch.einsum('...id,...jd->...ij', q, k)"]
        if len(self.batch) == 1:
            kinds += ["torch.bmm(q, k.mT)"] + ["baddbmm"] * 2
        if len(self.batch) == 2:
            kinds += ["torch.einsum('bhid,bhjd->bhij', q, k)", "baddbmm",
                      "torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(*q.shape[:2], q.shape[2], k.shape[2])"]  # fmt: skip
        kind = self.pick(*kinds)
        if kind == "baddbmm":
            low = f"low_{self.pick('inf', '-1e9', '-1e4') if self.sums_finite else 'inf'}_{'dead' if self.dead else ''}"
            bias = self.given(self.pick("float", "float", low), (math.prod(self.batch), *self.pick((self.L, self.M), (1, self.M), (self.L, 1))), self.pick(True, False))
            alpha, beta = self.pick("1", "0.35", "-0.5", "2"), self.pick("1", "0.5", "0", "1")
            flat = ["q", "k"] if len(self.batch) == 1 else ["q.flatten(0, 1)", "k.flatten(0, 1)"]
            kind = f"torch.baddbmm({bias}, {flat[0]}, {flat[1]}.mT, alpha={alpha}, beta={beta})"
            if len(self.batch) == 2:
                kind += ".view(*q.shape[:2], q.shape[2], k.shape[2])"
        self.lines.append(f"s = {kind}")

    def scalar(self):
        # what a learned factor gets from rows without a key is all rounding: low numbers times a gradient of zero
        return self.pick(self.given("factor", ()), self.given("factor", (), not self.dead), "torch.tensor(0.7)", "math.sqrt(q.shape[-1])")

    def shape(self, what="bias"):
        """One that is broadcast to the scores."""
        columns = (1, self.M) if not self.sink else (1, 1, self.M + 1)
        last = self.pick(*columns, *[columns[-1]] * 2)
        rows = self.pick(1, self.L, self.L, self.L)
        if what == "factor":
            rows, last = self.pick((rows, 1), (1, last))
        lead = self.pick((), tuple(n if self.chance.random() < 0.5 else 1 for n in self.batch), (1,) * len(self.batch))
        if what == "factor" and len(lead) < len(self.batch):
            lead = (1,) * len(self.batch)
        return (*lead, rows, last) if rows != 1 or lead or self.chance.random() < 0.5 else (last,)

    def above(self):
        c = self.chance
        kind = self.pick("scale", "bias", "bias", "mask", "mask", "mask", "mask", "sum", "sum", "gate", "shift", "clamp", "cast", "sink", "number")
        if kind == "gate" and "inf" in " ".join((*self.lines, *(k for k, *_ in self.inputs.values()))):
            kind = "bias"  # infinity times zero is known not to be NaN
        if kind == "scale":
            factor = self.pick("0.35", "2.5", "0.35", "-1.5", self.scalar(), self.given("factor", self.shape("factor"), not self.dead))
            line = self.pick(f"s = s * {factor}", f"s = {factor} * s", f"s = s / {factor}", "s = -s", f"s = s * {factor}")
        elif kind == "bias":
            bias = self.given("float", self.shape(), self.pick(True, False, False))
            line = self.pick(f"s = s + {bias}", f"s = {bias} + s", f"s = s - {bias}", f"s = torch.add(s, {bias}, alpha=2)", f"s = {bias} - s", f"s += {bias}", f"s = torch.add({bias}, s, alpha=0.5)")
        elif kind == "mask":
            m, low = self.mask(), self.pick(*LOW)
            line = self.pick(
                f"s = s.masked_fill({m}, {low})", f"s = s.masked_fill({m}, {low})", f"s = torch.where(~{m}, s, {low})",
                f"s = torch.where({m}, torch.tensor({low}, dtype=s.dtype), s)", f"s = s.masked_fill_({m}, {low})",
                f"s = s.clone(); s[{m}.expand_as(s)] = {low}", f"s = s.masked_fill({m} == True, {low})",
            )  # fmt: skip
        elif kind == "sum":
            low = self.pick(*(LOW if self.sums_finite else LOW[:1]))
            m = self.mask()
            name = {"-math.inf": "inf", "-1e9": "-1e9", "-1e4": "-1e4"}.get(low, "min")
            a = self.given(f"low_{name}_{'dead' if self.dead else ''}", self.shape())
            line = self.pick(
                f"s = s + {a}", f"s = s + {a}", f"s = s + torch.zeros_like({m}, dtype=s.dtype).masked_fill({m}, {low})",
                f"s = s + torch.where({m}, {low}, 0.0)", f"s = s + {m}.to(s.dtype) * {low}" if low != "-math.inf" else f"s = s + {a}",
            )  # fmt: skip
            self.masked = True
        elif kind == "gate":
            m, low = self.mask(), self.pick("1e9", "1e4", "3e4", "torch.finfo(s.dtype).max")
            line = self.pick(f"f = (~{m}).to(s.dtype); s = s * f + (f - 1) * {low}", f"f = (~{m}).to(s.dtype); s = s * f - {low} * (1 - f)")
        elif kind == "shift":
            line = self.pick("s = s - s.amax(-1, keepdim=True).detach()", "s = s - s.max(-1, keepdim=True)[0]", "s = s - s.max()", "s = s - s.amax(-1, True)")
        elif kind == "clamp":
            line = self.pick("s = s.clamp(min=torch.finfo(s.dtype).min)", "s = torch.maximum(s, torch.tensor(torch.finfo(s.dtype).min))", "s = s.clamp(max=5.0)", "s = s.clamp(min=-torch.finfo(s.dtype).max, max=torch.finfo(s.dtype).max)")
        elif kind == "cast":
            line = self.pick("s = s.float()", "s = s.to(q.dtype)", "s = s.to(torch.float32)", "s = s.bfloat16()")
        elif kind == "number":
            line = self.pick("s = s + 3.0", "s = s - 2", "s = 1.0 - s")
        elif self.sink or not self.batch and c.random() < 0.5:
            return
        else:
            self.sink = self.pick("first", "last", "last")
            x = self.given("float", tuple(n if c.random() < 0.5 else 1 for n in (*self.batch, self.L)) + (1,), self.pick(True, False))
            column = self.pick(f"{x}.expand(*s.shape[:-1], 1)", f"{x}.expand(*s.shape[:-1], 1).to(s.dtype)", "torch.zeros_like(s[..., :1])", "s.new_zeros(*s.shape[:-1], 1)")
            line = f"s = torch.cat([{column}, s], -1)" if self.sink == "first" else f"s = torch.cat([s, {column}], dim=-1)"
        if not self.masked or not (line.endswith(("= -s", "- s")) or "-1.5" in line):  # what is masked stays low
            self.lines.append(line)

    def mask(self):
        self.masked = True
        if self.last_mask and self.chance.random() < 0.2:
            return self.last_mask
        if self.sink or self.L > self.M or self.chance.random() < 0.7:
            made = self.given("dead" if self.dead and self.chance.random() < 0.5 else "mask", self.shape())
        else:
            L, M = ("q.shape[-2]", "k.shape[-2]")
            name = f"t{len(self.lines)}"
            self.lines.append(f"{name} = " + self.pick(
                f"torch.ones({L}, {M}, dtype=torch.bool).tril().logical_not()", f"torch.ones({L}, {M}).triu(1).bool()",
                f"torch.arange({M})[None, :] > torch.arange({L})[:, None]", f"torch.tril(torch.ones({L}, {M})) == 0",
            ))  # fmt: skip
            made = name
        self.last_mask = made
        return made

    def softmax(self):
        by_logarithm = "p = torch.exp(s - s.logsumexp(-1, keepdim=True))"
        self.lines.append(self.pick(
            "p = s.softmax(-1)", "p = F.softmax(s, dim=-1)", "p = torch.softmax(s, -1, dtype=torch.float32)",
            "e = torch.exp(s - s.amax(-1, keepdim=True)); p = e / e.sum(-1, keepdim=True)",
            "e = (s - s.max(-1, keepdim=True)[0].detach()).exp(); p = e / e.sum(-1, True)",
            "p = s.log_softmax(-1).exp()", *[by_logarithm] * (not self.masked),
            "p = s.softmax(-1)", "p = F.softmax(s.float(), dim=-1)", "p = F.softmax(s, -1, dtype=torch.float32).to(s.dtype)",
            *["e = torch.exp(s); p = e / e.sum(-1, True)"] * (not self.strange), "p = F.softmin(-s, dim=-1)",
            *["e = torch.exp(s); p = e / (1 + e.sum(-1, True))"] * (not self.strange),
            "m = s.amax(-1, True).clamp(min=0); e = torch.exp(s - m); p = e / (torch.exp(-m) + e.sum(-1, True))",
        ))  # fmt: skip

    def below(self):
        kind = self.pick("dropout", "mask", "mask", "renormalise", "renormalise", "nan", "factor", "number", "cut sink")
        if kind == "dropout":
            line = "p = F.dropout(p, 0.0)"
        elif kind == "mask":
            m = self.mask()
            line = self.pick(f"p = p * (~{m})", f"p = p.masked_fill({m}, 0.0)", f"p = torch.where({m}, 0.0, p)", f"p = p * (~{m}).to(p.dtype)")
        elif kind == "renormalise":
            text = " ".join((*self.lines, *(k for k, *_ in self.inputs.values())))
            low = self.strange or any(part in text for part in ("-1e", "-3e", "finfo", "low_-", "low_min", "f - 1", "1 - f"))
            if not low and self.chance.random() < 0.6:  # what is left of low numbers alone is lost in eager
                m = self.mask()
                self.lines.append(self.pick(f"p = p * (~{m})", f"p = p.masked_fill({m}, 0)", f"p = p * (~{m}).to(p.dtype)"))
            line = self.pick("p = p / p.sum(-1, keepdim=True)", "p = p / p.sum(-1, keepdim=True)", "p = p / (p.sum(-1, keepdim=True) + 1e-6)")
        elif kind == "nan":
            line = self.pick("p = p.nan_to_num()", "p = p.nan_to_num(0.0)", "p = p.masked_fill(p.isnan(), 0.0)")
        elif kind == "factor":
            factor = self.given("factor", self.shape("factor"), self.pick(True, False))
            line = self.pick(f"p = p * {factor}", f"p = {factor} * p", f"p = p / {factor}")
        elif kind == "number":
            line = self.pick("p = p * 0.5", "p = p / 0.8", "p = p.to(q.dtype)")
        elif self.sink:
            line = f"p = p[..., {'1:' if self.sink == 'first' else ':-1'}]"
            self.sink = ""
        else:
            return
        self.lines.append(line)

    def values(self):
        kinds = ["p @ v", "p @ v", "torch.matmul(p, v)", "torch.einsum('...ij,...jd->...id', p, v)"]
        if len(self.batch) == 1:
            kinds += ["torch.bmm(p, v)"]
        if len(self.batch) == 2:
            kinds += ["torch.einsum('bhij,bhjd->bihd', p, v)", "(p @ v).transpose(1, 2).flatten(2)"]
        self.lines.append(f"o = {self.pick(*kinds)}")


def random_attention(seed):
    return Writer(random.Random(seed)).write(seed)


def check(program):
    """How many attentions were fused, None if torch does not run it; AssertionError where results are others."""
    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=program.autocast), torch.set_grad_enabled(program.train):
        try:
            program.function()(*program.tensors())
        except (RuntimeError, UnboundLocalError):
            return None
        gm, args = capture_torch(program.function(), program.tensors(), program.dynamic)
        original = copy.deepcopy(gm)
        run_pass(NormalizationPassAten, gm)
        run_pass(RemoveNoopPass, gm)
        tally = run_pass(FuseAttention, gm)
        gm.graph.lint()
        if not tally.fired:
            return 0
        unfused, kinds = run_with_gradients(original, args)
        fused, fused_kinds = run_with_gradients(gm, args)
    assert kinds == fused_kinds, "other results require a gradient"
    with torch.set_grad_enabled(program.train):
        exact, _ = run_with_gradients(in_double(original), [as_double(a) for a in args])
    eps = torch.finfo(torch.bfloat16 if program.autocast else program.dtype).eps
    if any("bfloat16" in line for line in program.lines):
        eps = torch.finfo(torch.bfloat16).eps
    # a gradient that is zero but for rounding (of the one key of a row) is rounded as the others are
    largest = max((x.nan_to_num(0, 0, 0).abs().max().item() for x in exact if x.numel()), default=1.0)
    for number, (want, got, right) in enumerate(zip(unfused, fused, exact)):
        if number and unfused[0].isnan().any():  # then it may reach other gradients
            nowhere = want.isnan() | got.isnan()
            want, got, right = (torch.where(nowhere, math.nan, x) for x in (want, got, right))
        huge = "strange_huge" in [kind for kind, *_ in program.inputs.values()]
        if number and program.strange and (huge or not unfused[0].isfinite().all()):
            break
        compare(f"{'result' if number == 0 else f'gradient {number}'}", want, got, right, eps, program.strange, largest)
    return tally.fired["fuse_attention"]


def compare(name, want, got, right, eps, strange, largest):
    assert want.dtype == got.dtype and want.shape == got.shape, f"{name}: {want.dtype} {got.dtype} {want.shape} {got.shape}"
    assert torch.equal(want.isnan(), got.isnan()), f"{name}: NaN in other places"
    finite = want.isfinite() & right.isfinite()
    assert torch.equal(want[want.isinf()], got[want.isinf()]), f"{name}: infinite in other places"
    if not finite.any():
        return
    want, got, right = (torch.where(finite, x.double(), 0) for x in (want, got, right))
    size = max(right.abs().max().item(), 1.0)
    before, after = ((x - right).abs().max().item() for x in (want, got))
    limit = 4 * before + 32 * eps * max(size, largest) * (1 if not strange else 1e6)
    assert after <= limit, f"{name}: an error of {before:.1e} became {after:.1e}"
    if eps < 1e-6 and not strange:  # nor may a large error in one place hide one in another
        apart = torch.minimum((got - right).abs(), (got - want).abs()) - 8 * (want - right).abs().amax(-1 if want.dim() else 0, True)
        assert apart.max().item() <= 200 * eps * size, f"{name}: {apart.max().item():.1e} from both"


def smaller(program, goes_wrong):
    """The same with as few lines as go wrong in the same way."""
    at = 0
    while at < len(program.lines):
        tried = replace(program, lines=program.lines[:at] + program.lines[at + 1 :])
        if goes_wrong(tried):
            program = tried
        else:
            at += 1
    return program
