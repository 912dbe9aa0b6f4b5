"""triptych::int_mm_mul, which scales a product of int8 matrices: the bits of torch's own operations, in the definition, in
the kernel, and where the rule `fused_int_mm_mul` puts it; and where that rule leaves the operations as they are."""

from __future__ import annotations

import functools
import itertools
import operator
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

import triptych
from tests.clock import clock_says
from tests.test_kernels import NEEDS_TRITON, ptx_of, run_interpreted
from triptych.cost import Operand
from triptych.kernels import int_mm_mul
from triptych.kernels.int_mm_mul import LARGEST_INNER, NAME_OF
from triptych.passes.session import watching
from triptych.post_grad import fused_int_mm_mul
from triptych.post_grad.fused_int_mm_mul import FusedIntMmMul
from triptych.post_grad.int_mm_mul_cost import Int8Product, ScaledProduct
from triptych.post_grad.pass_patterns import PostGradPatterns
from triptych.testing.check import compare_graphs, run_pass

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FLOATS = (f32, bf16, f16)
INT_MM, FUSED = torch.ops.aten._int_mm.default, torch.ops.triptych.int_mm_mul.default


def int_mm(a, b):
    return INT_MM(a, b)


def fused(a, b, scales, dtypes):
    return FUSED(a, b, scales, [NAME_OF[dtype] for dtype in dtypes])


def integers(*shape, least=-128, most=127):
    return torch.randint(least, most + 1, shape, dtype=torch.int8)


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def equal_bits(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape and got.is_contiguous()
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan) and torch.equal(bits(got)[~nan], bits(want)[~nan])


# ---- programs: what is written with torch's operations, and what the operator computes instead ----

MATRICES = {
    "odd": lambda: (integers(17, 40), integers(40, 23)),
    "one": lambda: (integers(1, 1), integers(1, 5)),
    "of whole tiles": lambda: (integers(64, 256), integers(256, 128)),
    "transposed": lambda: (integers(40, 33).t(), integers(9, 40).t()),
    "strided": lambda: (integers(66, 90)[::2, ::3], integers(60, 40)[::2, 1::2]),
    "no rows": lambda: (integers(0, 8), integers(8, 5)),
    "no columns": lambda: (integers(5, 8), integers(8, 0)),
    "nothing to sum": lambda: (integers(5, 0), integers(0, 8)),
    # beyond 2**24, int32 numbers are rounded in float32, and a second time in bfloat16
    "large sums": lambda: (integers(19, 2100, most=-100), integers(2100, 10, least=100) * torch.tensor(([1] * 9) + [-1], dtype=torch.int8)),
    "the largest sum": lambda: (torch.full((2, LARGEST_INNER), -128, dtype=torch.int8), torch.full((LARGEST_INNER, 3), -128, dtype=torch.int8)),
}  # fmt: skip


def twice_rounded():
    """Sums of 2**25 + 2**17 + 1 and the like: rounded to float32 they are halfway between two numbers of bfloat16."""
    a = torch.zeros(17, 2060, dtype=torch.int8)
    a[:, :2056], a[:, 2056] = -128, torch.arange(-8, 9, dtype=torch.int8)
    b = torch.full((2060, 5), -128, dtype=torch.int8)
    b[2056] = 1
    return a, b


MATRICES["sums that are rounded twice"] = twice_rounded
SHAPES = {
    "row": lambda m, n: (m, 1), "column": lambda m, n: (n,), "wide column": lambda m, n: (1, n),
    "number": lambda m, n: (), "one": lambda m, n: (1,), "matrix": lambda m, n: (m, n),
}  # fmt: skip


def scale_of(kind, m, n, dtype):
    scale = torch.randn(SHAPES[kind](m, n)) * 0.1
    if scale.numel() > 3:
        scale.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-41])
    return scale.to(dtype)


def scaled(a, b, *scales):
    """As torch promotes it."""
    return functools.reduce(operator.mul, scales, int_mm(a, b))


def cast_and_scaled(dtype):
    return lambda a, b, *scales: functools.reduce(operator.mul, scales, int_mm(a, b).to(dtype))


def scaled_and_cast(dtype):
    return lambda a, b, *scales: scaled(a, b, *scales).to(dtype)


def programs(a, b):
    """Programs, what the operator is given for the same, and their other inputs."""
    m, n = a.shape[0], b.shape[1]
    for kind, dtype in itertools.product(SHAPES, FLOATS):
        scale = scale_of(kind, m, n, dtype)
        yield scaled, [dtype, dtype], [scale]
        for first in FLOATS:
            result = torch.result_type(torch.empty(1, 1, dtype=first), scale)
            if result in (dtype, f32):  # otherwise torch rounds a number on some devices
                yield cast_and_scaled(first), [first, result], [scale]
    row, column = scale_of("row", m, n, f32), scale_of("column", m, n, f32)
    for short in (bf16, f16):
        yield scaled_and_cast(short), [f32, f32, short], [row, column]
        yield cast_and_scaled(short), [short] * 3, [column.to(short), column[:1].to(short)]
    yield scaled, [bf16, bf16, f32, f32], [row.to(bf16), column, column.to(f16)]


@pytest.mark.parametrize("matrices", MATRICES)
def test_the_definition_has_the_bits_of_torch(matrices):
    a, b = MATRICES[matrices]()
    for program, dtypes, scales in programs(a, b):
        equal_bits(fused(a, b, scales, dtypes), program(a, b, *scales))


@pytest.mark.parametrize("matrices", ["odd", "sums that are rounded twice"])
def test_the_rule_writes_the_operator_with_the_roundings_of_torch(matrices):
    a, b = MATRICES[matrices]()
    for program, dtypes, scales in programs(a, b):
        gm = make_fx(program, tracing_mode="fake")(a, b, *scales)
        before = make_fx(program, tracing_mode="fake")(a, b, *scales)
        assert run_pass(PostGradPatterns, gm).fired.total() == 0  # on a CPU
        run_rule(gm)
        (node,) = gm.graph.find_nodes(op="call_function", target=FUSED)
        assert list(node.args[3]) == [NAME_OF[dtype] for dtype in dtypes] and not gm.graph.find_nodes(op="call_function", target=INT_MM)
        compare_graphs(before, gm, [a, b, *scales])


def run_rule(gm, rule=None, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PostGradPatterns, "rules", lambda self: (rule or FusedIntMmMul(always=True),))
        return run_pass(PostGradPatterns, gm, options=options)


def test_twice_rounded_sums_are_what_they_say():
    """The exact sum rounded once to bfloat16 is another number for some."""
    sums = int_mm(*twice_rounded())
    once = torch.where(sums > 2**25 + 2**17, 2**25 + 2**18, 2**25)
    assert (sums.to(bf16) != once).any() and (sums.to(bf16) == once).any()


# ---- the operator ----


def test_gradients_of_scales():
    a, b = integers(3, 4), integers(4, 5)
    row, column = torch.randn(3, 1, dtype=f64, requires_grad=True), torch.randn(5, dtype=f64, requires_grad=True)

    def program(row, column):
        return fused(a, b, [row, column], [f64, f64, f64])

    gradcheck(program, (row, column))
    gradgradcheck(program, (row, column))
    gradcheck(lambda row: program(row, column.detach()), (row,))
    for dtype in (bf16, f32):
        ours, theirs = (torch.randn(5).to(dtype).requires_grad_() for _ in range(2))
        theirs.data.copy_(ours.data)
        fused(a, b, [ours], [dtype, dtype]).sin().sum().backward()
        (int_mm(a, b).to(dtype) * theirs).sin().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("scales, dtypes", [
    ([torch.randn(3, 1, requires_grad=True)], [f32, bf16]),
    ([torch.randn(3, 1, dtype=f64), torch.randn(6, dtype=f64, requires_grad=True), torch.randn((), dtype=f64)], [f64] * 4),
    ([torch.randn(3, 6, dtype=bf16)], [bf16, bf16]),
])  # fmt: skip
def test_registration(scales, dtypes):
    names = [NAME_OF[dtype] for dtype in dtypes]
    torch.library.opcheck(FUSED, (integers(3, 4), integers(6, 4).t(), scales, names))


@pytest.mark.parametrize("call", [
    lambda a, b, s: fused(a, b.t(), [s], [f32, f32]),
    lambda a, b, s: fused(a[0], b, [s], [f32, f32]),
    lambda a, b, s: fused(a.to(torch.uint8), b, [s], [f32, f32]),
    lambda a, b, s: fused(a, b, [], [f32]),
    lambda a, b, s: fused(a, b, [s], [f32]),
    lambda a, b, s: FUSED(a, b, [s], ["int32", "float32"]),
    lambda a, b, s: fused(a, b, [s.int()], [f32, f32]),
    lambda a, b, s: fused(a, b, [s[:2]], [f32, f32]),
    lambda a, b, s: fused(a, b, [s.expand(2, 1, 5)], [f32, f32]),
    lambda a, b, s: fused(a[:1], b, [s.expand(3, 5)], [f32, f32]),
])  # fmt: skip
def test_wrong_arguments(call):
    with pytest.raises(RuntimeError):
        call(integers(3, 4), integers(4, 5), torch.randn(5))


# ---- the kernel ----


@NEEDS_TRITON
def test_the_kernel_in_the_interpreter():
    run_interpreted("tests.test_int_mm_mul", "check_kernel")


def check_kernel():
    """Called in a process of its own, because the interpreter is chosen when Triton is imported."""
    from triton.runtime import interpreter

    from triptych.kernels.triton_int_mm_mul import launch

    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", rounding_to_nearest(interpreter._convert_float))
        for name, matrices in MATRICES.items():
            if name == "the largest sum":
                continue  # thousands of steps of the interpreter
            a, b = matrices()
            for program, dtypes, scales in programs(a, b):
                equal_bits(launch(a, b, scales, dtypes), program(a, b, *scales))
        a, b = MATRICES["odd"]()
        a_row, b_column = integers(1, 40).expand(17, 40), integers(40, 1).expand(40, 23)  # torch misreads these on a CPU
        for scale in (torch.randn(23, 17).t(), torch.randn(17, 46)[:, ::2], torch.randn(17, 1).expand(17, 23), torch.randn(34)[::2, None]):
            equal_bits(launch(a, b, [scale], [f32, f32]), (int_mm(a, b) * scale).contiguous())
            equal_bits(launch(a_row, b_column, [scale], [f32, f32]), (int_mm(a_row.clone(), b_column.contiguous()) * scale).contiguous())


def rounding_to_nearest(convert):
    """Triton's interpreter cuts off the bits that bfloat16 does not have; a GPU rounds."""
    import numpy as np
    import triton.language as tl

    def converted(data, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return numbers.to(bf16).view(torch.int16).numpy().view(np.uint16).reshape(data.shape)

    return converted


@NEEDS_TRITON
@pytest.mark.parametrize("capability", [80, 90])
def test_what_the_kernel_is_compiled_to(capability):
    """Without a GPU: int8 tensor cores, and conversions and multiplications that round as torch's do. A compiler that
    knows that a number was an integer, or was extended, likes to skip the rounding to float32."""
    for dtype in FLOATS:
        code = compiled_to(("row", "column", "number"), (dtype,) * 3, (dtype,) * 4, capability)
        assert re.search(r"mma\S*\.s32\.s8\.s8", code)
        assert "cvt.rn.f32.s32" in code and not re.search(r"cvt\.rn\.b?f16\S*\.s32", code)
        assert not re.search(r"(mul|fma)\S*\.bf16|ftz|fma\S*\.f32", code)
        assert "mul.f32" in code or dtype == f16  # a product of two numbers of float16 is exact in float32


def compiled_to(kinds, scales, dtypes, capability):
    from triptych.kernels.triton_int_mm_mul import kernel_for

    pointer = {f32: "*fp32", bf16: "*bf16", f16: "*fp16"}
    constants = {"a_k": 1, "b_k": 1, "EVEN": False, "GROUP": 8, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}
    types = {"a": "*i8", "b": "*i8", "y": pointer[dtypes[-1]]}
    types |= {f"scale{i}": pointer[dtype] for i, dtype in enumerate(scales)}
    return ptx_of(kernel_for(kinds, dtypes).fn, types, constants, capability)


# ---- where the rule fires: on a GPU that need not be there ----


def on_fake_gpu(program, sizes, *scales, **options):
    """What the rule decides about a program, without the device."""
    m, k, n = sizes
    with FakeTensorMode(allow_non_fake_inputs=True):
        a, w = (torch.empty(shape, dtype=torch.int8, device="cuda") for shape in ((m, k), (n, k)))
        given = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in scales]
        gm = make_fx(program)(a, w, *given)
    return run_rule(gm, FusedIntMmMul(), **options)


def quantized(a, w, s, t):
    return (int_mm(a, w.t()) * s * t).to(bf16)


SCALES = ((8192, 1), f32), ((4096,), f32)
MEMORY_BOUND, COMPUTE_BOUND = (8192, 512, 4096), (8192, 16384, 4096)


@pytest.fixture
def triton(monkeypatch):
    monkeypatch.setattr(fused_int_mm_mul, "multiplies_int8", lambda device: True)


def test_the_model_decides_where_nothing_can_be_measured(triton):
    """A product over few columns is worth it: most of its time is that of writing the result."""
    tally = on_fake_gpu(quantized, MEMORY_BOUND, *SCALES)
    (decision,) = tally.decisions
    assert tally.fired["fused_int_mm_mul"] == 1 and not decision.measured
    declined = on_fake_gpu(quantized, COMPUTE_BOUND, *SCALES)
    assert not declined.fired and "would cost" in reason(declined)


def reason(tally):
    (decline,) = tally.declines.values()
    return decline.reason


@pytest.mark.parametrize("kernel_seconds, fires", [(1e-4, True), (4e-4, False)])
def test_the_measurement_decides(triton, monkeypatch, kernel_seconds, fires):
    clock_says(monkeypatch, (2e-4, kernel_seconds))
    tally = on_fake_gpu(quantized, MEMORY_BOUND, *SCALES)
    assert bool(tally.fired) == fires
    assert ", measured" in (str(tally.decisions[0]) if fires else reason(tally))


def test_a_kernel_that_only_saves_reading_is_not_worth_it(triton):
    """What reads the result would scale the product while it reads it: with float32, as much is written and read."""
    def program(a, w, s, t, b):
        return (int_mm(a, w.t()) * s * t + b).relu()

    scales = *SCALES, ((4096,), f32)
    merged = on_fake_gpu(program, MEMORY_BOUND, *scales)
    assert "would cost" in reason(merged)
    assert on_fake_gpu(program, MEMORY_BOUND, *scales, codegen="eager").fired["fused_int_mm_mul"] == 1


@pytest.mark.parametrize("sizes, options, because", [
    ((16, 512, 4096), {}, "does not multiply matrices of these sizes"),
    ((8192, 516, 4096), {}, "does not multiply matrices of these sizes"),
    ((8192, 512, 4090), {}, "does not multiply matrices of these sizes"),
    (MEMORY_BOUND, {"mode": "max-autotune"}, "a generated one"),
    (MEMORY_BOUND, {"inductor.max_autotune_gemm": True}, "a generated one"),
    ((8192, LARGEST_INNER + 1, 4096), {}, "need not fit in int32"),
])  # fmt: skip
def test_what_is_left_to_torch(triton, sizes, options, because):
    m, _, n = sizes
    assert because in reason(on_fake_gpu(quantized, sizes, ((m, 1), f32), ((n,), f32), **options))


def test_max_autotune_is_of_no_matter_without_generated_code(triton):
    tally = on_fake_gpu(quantized, MEMORY_BOUND, *SCALES, codegen="eager", mode="max-autotune")
    assert tally.fired["fused_int_mm_mul"] == 1


def test_not_without_triton_and_not_on_old_gpus(monkeypatch):
    monkeypatch.setattr(int_mm_mul, "triton_is_there", lambda: False)
    assert "on a GPU only" in reason(on_fake_gpu(quantized, MEMORY_BOUND, *SCALES))
    monkeypatch.setattr(int_mm_mul, "triton_is_there", lambda: True)
    assert on_fake_gpu(quantized, MEMORY_BOUND, *SCALES).fired
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((7, 5), (8, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert int_mm_mul.multiplies_int8(torch.device("cuda")) == (capability >= (8, 0))


def test_a_number_is_timed_as_float32_whatever_the_default_dtype_is(triton, monkeypatch):
    asked = clock_says(monkeypatch, None)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        on_fake_gpu(lambda a, w: (int_mm(a, w.t()).float() * 0.5).half(), MEMORY_BOUND)
    finally:
        torch.set_default_dtype(usual)
    ((_, new),) = asked
    assert new.parts[0].scales == (Operand((), (), f32),) and "scales=[f32[]]" in new.parts[0].question(new.device)


@pytest.mark.parametrize("dtypes", [(f32, f32, bf16), (f32, f16)])
def test_what_is_timed_computes_the_same(dtypes):
    """What the clock runs are the operators that the rule replaces and writes."""
    left, right = Operand.contiguous((32, 16), torch.int8), Operand.contiguous((8, 16), torch.int8).mT
    scales = tuple(Operand.contiguous(shape, f32) for shape in ((32, 1), (8,)))[: len(dtypes) - 1]
    apart, together = Int8Product(left, right), ScaledProduct(left, right, scales=scales, dtypes=dtypes)
    results = [part.prepare(torch.device("cpu"))() for part in (apart, together)]
    assert [(r.dtype, tuple(r.shape)) for r in results] == [(torch.int32, (32, 8)), (dtypes[-1], (32, 8))]
    assert [part.result_bytes for part in (apart, together)] == [r.nbytes for r in results]


def test_a_scale_on_the_cpu_is_not_read_by_the_kernel(triton):
    def program(a, w):
        return int_mm(a, w.t()) * torch.tensor(0.5)

    assert "is on cpu" in reason(on_fake_gpu(program, MEMORY_BOUND))


def test_a_write_between_the_two_is_not_crossed():
    """In a graph that is not functional."""
    graph = torch.fx.Graph()
    a, b, s = map(graph.placeholder, "abs")
    product = graph.call_function(INT_MM, (a, b))
    graph.call_function(torch.ops.aten.zero_.default, (a,))
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (product, s)))
    gm = torch.fx.GraphModule({}, graph)
    inputs = [integers(4, 8), integers(8, 5), torch.randn(5)]
    with FakeTensorMode() as mode:
        for node, value in zip(graph.nodes, [mode.from_tensor(x) for x in inputs]):
            node.meta["val"] = value
        product.meta["val"] = int_mm(a.meta["val"], b.meta["val"])
        graph.output_node().args[0].meta["val"] = product.meta["val"] * s.meta["val"]
    tally = run_rule(gm)
    assert not tally.fired, gm.graph
    assert "write" in reason(tally)


# ---- compiled programs ----


class QuantizedLinear(torch.nn.Module):
    """A linear layer of int8 weights, as dynamic quantization writes it."""

    def __init__(self, columns, rows):
        super().__init__()
        weight = torch.randn(rows, columns)
        scale = weight.abs().amax(1) / 127
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", torch.randn(rows))

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1]).float()
        scale = rows.abs().amax(1, keepdim=True) / 127
        product = torch._int_mm((rows / scale).round().to(torch.int8), self.weight.t())
        scaled = (product * scale * self.scale).reshape(*x.shape[:-1], -1).to(x.dtype)
        return (scaled + self.bias.to(x.dtype)).relu()


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_quantized_layer(monkeypatch, codegen, dynamic):
    patched = tuple(FusedIntMmMul(always=True) if isinstance(r, FusedIntMmMul) else r for r in PostGradPatterns().rules())
    monkeypatch.setattr(PostGradPatterns, "rules", lambda self: patched)
    layer = QuantizedLinear(24, 40)
    run = torch.compile(layer, backend=triptych.compile_fx, dynamic=dynamic, options={"codegen": codegen, "on_error": "raise"})
    with torch.no_grad(), watching() as sessions:
        for x in (torch.randn(3, 7, 24), torch.randn(3, 9, 24)):
            torch.testing.assert_close(run(x), layer(x))
    fired = [r.fired["fused_int_mm_mul"] for s in sessions for r in s.records if r.name == "pass_patterns" and r.stage == "post_grad"]
    assert all(count == 1 for count in fired) and len(fired) == (1 if dynamic else 2)
