"""The Triton kernels on a GPU: correct against float64 on any shape, stride and dtype.

How quick they are: `python bench/linear_kernels.py`.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import triptych
from tests.test_kernels import SHAPES, close
from tests.test_linears import CASES, Attention
from triptych import _private
from triptych.codegen.launches import is_ours
from triptych.kernels import dot_compress, group_linear, lce, parallel_linear
from triptych.passes.session import watching

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ops = torch.ops.triptych


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


def wide(*tensors):
    return [t.double() for t in tensors]


@pytest.fixture(params=["highest", "high"])
def precision(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def unmeasured(monkeypatch):
    """Each size gets the next configuration: to compile every kernel in all of them, and time them, takes minutes."""
    from triptych.kernels import tuning

    turn = itertools.count()

    def next_configuration(kernel, key, grid, args, constants):
        numbers = tuning._promising(kernel, constants)
        return kernel.configs[numbers[next(turn) % len(numbers)]].all_kwargs()

    monkeypatch.setattr(tuning, "_BEST", {})
    monkeypatch.setattr(tuning, "_stored", lambda *_: None)
    monkeypatch.setattr(tuning, "_tune", next_configuration)


@pytest.mark.parametrize("precision, count", [("ieee", 2), ("tf32", 5)])
def test_float32_without_tensor_cores_tries_small_blocks_only(precision, count):
    """The others take a minute to compile."""
    from triptych.kernels import tuning
    from triptych.kernels.triton_linears import kernel_for

    assert len(tuning._promising(kernel_for(1, many_rows=True), {"PRECISION": precision})) == count


def test_the_best_configuration_is_stored_and_used_by_generated_code(monkeypatch, tmp_path):
    from triptych.kernels import tuning

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "_BEST", {})
    x, w = random(600, 64, dtype=torch.bfloat16), random(64, 64, dtype=torch.bfloat16)
    close(ops.parallel_linear(x, [w], [], None)[0], *[torch.nn.functional.linear(*wide(x, w))] * 2)
    ((kernel, key), best) = tuning._BEST.popitem()
    assert best in [c.all_kwargs() for c in kernel.configs]
    constants = {"BIASED": 0, "PRECISION": tuning_precision()}
    assert tuning._stored(kernel, key, constants) == best
    (only,) = tuning._for_generated_code(kernel, key, constants).configs
    assert only.all_kwargs() == best


def tuning_precision():
    from triptych.kernels.registry import dot_precision

    return dot_precision(torch.bfloat16)


LARGER = [*SHAPES, (5, 129, 257, 127), (33, 512, 64, 64), (2, 64, 3, 200)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_lce(unmeasured, dtype):
    ways = itertools.cycle(itertools.product(lce.EPILOGUES, (False, True)))  # each is a kernel to compile: in turns
    for b, n, m, d in LARGER:
        inputs = (random(b, n, d), random(b, d, n).transpose(1, 2), random(b, 2 * n, d)[:, ::2], random(1, n, d))
        for x in (i.to(dtype) for i in (*inputs[:3], inputs[3].expand(b, n, d))):
            w, bias = random(n, m, dtype=dtype).t(), random(2 * m, dtype=dtype)[::2]
            epilogue, transposed = next(ways)
            got = ops.lce(x, w, bias, epilogue, transposed)
            close(got, lce.anywhere(*wide(x, w, bias), epilogue), lce.anywhere(*wide(x, w, bias)))
            assert got.stride() == lce.fake(x, w, bias, epilogue, transposed).stride()
        close(ops.lce(x, w.contiguous()), lce.anywhere(*wide(x, w)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_group_linear(unmeasured, dtype):
    sizes = [(1, 64, 32), (17, 40, 129), (300, 7, 5), (64, 512, 256), (0, 4, 4), (5, 33, 1)] * 3
    xs, ws = [random(m, k, dtype=dtype) for m, k, _ in sizes], [random(n, k, dtype=dtype) for _, k, n in sizes]
    xs[1], ws[3] = xs[1].t().contiguous().t(), ws[3].t().contiguous().t()
    for bs in ([], [random(n, dtype=dtype) for _, _, n in sizes]):
        want = group_linear.anywhere(*([t.double() for t in ts] for ts in (xs, ws, bs)))
        for got, one in zip(ops.group_linear(xs, ws, bs), want, strict=True):
            close(got, one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dot_compress(unmeasured, dtype):
    for b, n, k, d in (*LARGER, (2, 40, 5, 300)):  # beyond what stays in registers: two products
        for x in (random(b, n, d, dtype=dtype), random(b, d, n, dtype=dtype).transpose(1, 2)):
            for w in (random(n, k, dtype=dtype), random(b, k, n, dtype=dtype).transpose(1, 2)):
                close(ops.dot_compress(x, w), dot_compress.anywhere(*wide(x, w)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 8, 17, 64, 300])
def test_parallel_linear(unmeasured, rows, dtype):
    for inner in (1, 33, 512):
        x = random(rows, 1, inner, dtype=dtype)
        ws = [random(48, inner, dtype=dtype), random(inner, 7, dtype=dtype).t(), random(0, inner, dtype=dtype)]
        ws += [random(2 * n, inner, dtype=dtype)[::2] for n in range(100, 107)]  # ten: two launches
        biases, biased = [random(7, dtype=dtype), random(206, dtype=dtype)[::2]], [1, 6]
        got = ops.parallel_linear(x, ws, biases, biased)
        for one, want in zip(got, parallel_linear.anywhere(x.double(), wide(*ws), wide(*biases), biased), strict=True):
            close(one, want)
            assert one.is_contiguous()


def test_float32_is_float32(precision):
    """TF32 only where the user allows it."""
    x, w = random(4, 512, 64), random(256, 512)
    error = (ops.lce(x, w).double() - lce.anywhere(*wide(x, w))).abs().max().item()
    print(f"\nlce, float32 matmul precision {precision}: largest error {error:.1e}")
    assert precision == "high" or error < 2e-4


def test_offsets_beyond_32_bits():
    x = torch.zeros(2**31 // (4096 * 256) + 1, 4096, 256, device="cuda", dtype=torch.bfloat16)
    x[-1] = 1
    w = torch.ones(16, 4096, device="cuda", dtype=torch.bfloat16)
    y = ops.lce(x, w)
    assert (y[-1] == 4096).all() and (y[:-1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("epilogue", lce.EPILOGUES)
def test_gradients(epilogue, dtype):
    x, w, b = (random(*s, dtype=dtype).requires_grad_() for s in ((3, 40, 33), (24, 40), (24,)))
    wides = [t.detach().double().requires_grad_() for t in (x, w, b)]
    got, want = ops.lce(x, w, b, epilogue), lce.anywhere(*wides, epilogue)
    weights = random(*got.shape)
    given = torch.autograd.grad((got.float() * weights).sum(), (x, w, b))
    wanted = torch.autograd.grad((want * weights.double()).sum(), wides)
    for one, other in zip(given, wanted, strict=True):
        scale = other.abs().max().item()
        assert (one.double() - other).abs().max().item() <= (4e-2 if dtype == torch.bfloat16 else 1e-4) * scale


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_through_the_compiler(name, train, mode):
    if train and mode:
        pytest.skip("CUDA graphs are for inference here")
    model, shape, options, wanted, _ = CASES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = model.cuda()
    try:
        run = torch.compile(model, backend=triptych.compile_fx, options={**options, "mode": mode})
        x = torch.randn(shape, device="cuda", requires_grad=train)
        with torch.set_grad_enabled(train), watching() as sessions:
            for _ in range(3):
                got = run(x)
        fired = any(r.rewrites for s in sessions for r in s.records if r.name == wanted)
        assert fired or (train and name == "fused lce")  # there it may cost more
        want = model(x)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        if train:
            inputs = [x, *model.parameters()]
            for one, other in zip(*(torch.autograd.grad(y.sum(), inputs) for y in (want, got)), strict=True):
                torch.testing.assert_close(other, one, rtol=1e-2, atol=1e-2)
    finally:
        model.cpu()


def test_few_rows_take_the_kernel_and_many_do_not():
    """At decode the weights are read through their own pointers. Where sizes are not known, the kernel is launched by
    Python, and the host would be the slower for it."""
    model = Attention(width=512, heads=8, groups=2).cuda().to(torch.bfloat16)
    cases = [
        (8, False, "reduce-overhead", "own_pointers"), (8, False, "default", "own_pointers"),
        (8, True, "default", None), (4096, False, "default", "joined_weights"),
    ]  # fmt: skip
    for rows, dynamic, mode, wanted in cases:
        torch._dynamo.reset()
        run = torch.compile(model, backend=triptych.compile_fx, dynamic=dynamic, options={"mode": mode})
        x = random(1, rows, 512, dtype=torch.bfloat16)
        with torch.no_grad(), watching() as sessions:
            torch.testing.assert_close(run(x), model(x), rtol=5e-2, atol=5e-2)
            model.q.weight.data.mul_(1.5)  # nothing is stale
            torch.testing.assert_close(run(x), model(x), rtol=5e-2, atol=5e-2)
        (record,) = [r for s in sessions for r in s.records if r.name == "fuse_parallel_linear_pass"]
        print(f"\n{rows} rows: {dict(record.fired)}, {[str(d) for d in record.decisions]}, {dict(record.reasons)}")
        assert wanted == "joined_weights" or bool(record.fired["own_pointers"]) == (wanted == "own_pointers")


LAUNCHED = {
    "parallel_linear": lambda: (ops.parallel_linear, (random(8, 1, 96), [random(64, 96), random(40, 96)], [random(40)], [1])),
    "group_linear": lambda: (ops.group_linear, ([random(5, 32), random(7, 3)], [random(16, 32), random(9, 3)], [])),
    "lce": lambda: (ops.lce, (random(2, 40, 24), random(18, 40), random(18), "gelu", True)),
    "dot_compress": lambda: (ops.dot_compress, (random(3, 33, 20), random(33, 8))),
    "sum_parts": lambda: (ops.sum_parts, ([random(70, 100), random(9, 40)], [64, 1, 35, 40], torch.float32, None)),
    "b2b_gemm": lambda: (ops.b2b_gemm, (random(65, 16), random(16, 300), random(300, 5), None, "relu v0", True)),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_generated_code_launches_the_kernel_itself(name):
    operator, given = LAUNCHED[name]()

    def program(*given):
        made = operator(*given)
        return [y * 2 for y in made] if isinstance(made, list) else [made * 2]

    run = torch.compile(program, backend=triptych.compile_fx, dynamic=False)
    modules = _private.PyCodeCache.modules
    before = len(modules)
    with torch.no_grad(), watching() as sessions:
        each_time = [run(*given) for _ in range(3)]
        want = program(*given)
    assert sum(record.fired["launched_kernel"] for session in sessions for record in session.records) == 1
    assert any(record.fired["reinplace_triton_kernels"] for session in sessions for record in session.records)
    for results in each_time:
        for got, expected in zip(results, want, strict=True):
            assert got.stride() == expected.stride()
            close(got, expected.double())
    ours = [kernel for module in modules[before:] for kernel in vars(module).values() if is_ours(kernel)]
    assert ours and all(kernel.launchers[0]._is_static for kernel in ours)


PADDED = {  # rows of 1030 float32 numbers: memory that Inductor makes itself may have longer ones
    "a slice of parallel_linear": lambda x, w: ops.parallel_linear((x * 2)[:, :512], [w[:, :512], w[:40, 512:1024]], [], None),
    "padded parallel_linear": lambda x, w: ops.parallel_linear(x * 2, [w, w[:40]], [], None),
    "a slice of lce": lambda x, w: [ops.lce((x * 2).view(4, 2, 1030)[:, :, :515], w[:, :2])],
    "padded lce": lambda x, w: [ops.lce((x * 2).view(1, 8, 1030), w[:, :8])],
}  # fmt: skip


@pytest.mark.parametrize("name", PADDED)
def test_a_launched_kernel_reads_the_strides_it_was_told(unmeasured, name):
    program, given = PADDED[name], (random(8, 1030), random(64, 1030))
    run = torch.compile(program, backend=triptych.compile_fx, dynamic=False)
    with torch.no_grad(), watching() as sessions:
        results = run(*given)
    assert any(record.fired["launched_kernel"] for session in sessions for record in session.records)
    for got, expected in zip(results, program(*wide(*given)), strict=True):
        close(got, expected)
