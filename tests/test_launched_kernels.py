"""`launch_triton_kernels`: what generated code hands to a kernel that it launches is what the kernel was told about."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from tests.test_kernels import run_interpreted
from triptych import _private
from triptych.kernels.capture import is_launched
from triptych.options import Options
from triptych.post_grad import launch_triton_kernels
from triptych.post_grad.launch_triton_kernels import LaunchedKernel, LaunchTritonKernels
from triptych.post_grad.reinplace import Reinplace
from triptych.testing.check import run_pass

triptych_ops = torch.ops.triptych
LAUNCHES = (_private.triton_kernel_wrapper_functional, _private.triton_kernel_wrapper_mutation)


def on_cpu(monkeypatch):
    monkeypatch.setattr(LaunchTritonKernels, "rules", lambda self: (LaunchedKernel(device="cpu"),))


def a_slice(x, w):
    return triptych_ops.parallel_linear((x.relu() * 2)[:, :4], [w], [], None)[0] + 1


def test_operands_have_the_strides_that_the_kernel_is_told(monkeypatch):
    """Generated code computes a slice that it materialises without the gaps of the tensor it is a slice of, unless it
    is told to leave them. No kernel is run."""
    from torch._inductor import lowering

    told, given = [], []
    capture = launch_triton_kernels.capture

    def captured(kernel, grids, arguments):
        told.append({name: value.stride() for name, value in arguments.items()})
        return capture(kernel, grids, arguments)

    def lowered(*, kwargs, **others):
        given.append({name: tuple(map(int, value.get_stride())) for name, value in kwargs.items()})

    on_cpu(monkeypatch)
    monkeypatch.setattr(launch_triton_kernels, "capture", captured)
    monkeypatch.setitem(lowering.lowerings, _private.triton_kernel_wrapper_mutation, lowered)
    compiled = torch.compile(a_slice, backend="triptych", options={"on_error": "raise"})
    with torch.compiler.config.patch(force_disable_caches=True):
        compiled(torch.randn(8, 12), torch.randn(3, 4))
    assert told == given == [{"x": (12, 1), "w": (1, 4), "y": (3, 1)}]


def test_calls_with_equal_operands_are_traced_once(monkeypatch):
    """Not those with other strides, other arguments, or one operand twice."""
    on_cpu(monkeypatch)
    traced, trace = [], LaunchedKernel._traced
    monkeypatch.setattr(LaunchedKernel, "_traced", lambda *given: traced.append(1) or trace(*given))

    def program(x, y, w):
        f = triptych_ops.dot_compress
        return f(x, w), f(y, w), f(x.mT, w), f(x, x), f(y, y)

    inputs = [torch.randn(2, 4, 4) for _ in range(3)]
    gm = make_fx(program)(*inputs)
    assert run_pass(LaunchTritonKernels, gm, options={"codegen": "inductor"}).fired.total() == 5
    assert len(traced) == 3
    assert sum(n.target is LAUNCHES[0] for n in gm.graph.nodes) == 5


def test_a_launch_without_a_known_result_is_left_as_it_is(monkeypatch):
    """As it would be removed, since nobody uses it."""
    on_cpu(monkeypatch)
    monkeypatch.setattr(launch_triton_kernels, "NEW_MEMORY", ())
    gm = make_fx(a_slice, tracing_mode="fake")(torch.randn(8, 12), torch.randn(3, 4))
    with pytest.raises(Exception, match="whose result is not known"):
        run_pass(LaunchTritonKernels, gm)


@pytest.mark.parametrize("removed", ["launch_triton_kernels", "launched_kernel"])
def test_the_cost_model_knows_that_the_pass_was_removed(removed):
    operands = [torch.empty(8, 12)]
    assert is_launched(Options(), operands)
    assert not is_launched(Options(remove_passes=removed), operands)
    assert not is_launched(Options(codegen="eager"), operands)


# ---- the launches themselves, interpreted ----


class Launching(Interpreter):
    """Runs a graph on a CPU; kernels are launched with their last configuration, as they were written down."""

    def call_function(self, target, args, kwargs):
        if target not in LAUNCHES:
            return super().call_function(target, args, kwargs)
        kernel, written = _private.kernel_side_table.id_to_kernel[kwargs["kernel_idx"]], kwargs.get("tensors_to_clone", ())
        given = {name: v.clone() if name in written else v for name, v in kwargs["kwargs"].items()}
        kernel.fn[tuple(kwargs["grid"][-1])](**given, **kernel.configs[-1].all_kwargs())
        return {name: given[name] for name in written}


def _with_views(x, v, w):
    first, second = triptych_ops.parallel_linear(x, [v, w], [], None)
    return first, first[0], second.t(), first + second[:, :7]


def _in_a_row(x, v, w):
    first, second = triptych_ops.parallel_linear(x, [v, w], [], None)
    third, fourth = triptych_ops.parallel_linear(first, [v, w], [], None)
    return second, fourth, third + first


def _written_later(x, v, w):
    first, second = triptych_ops.parallel_linear(x, [v, w], [], None)
    return first.add_(1), second.mul_(first.sum())


def _both_ways(a, b, c):
    y = triptych_ops.b2b_gemm(a, b, c, None, "relu v0", True)
    return y, y.t(), y.t().contiguous()


def _scaled(a, b, row, column):
    """Rows of a scaled product of int8 matrices; the second scale is a slice, the third one number."""
    a, b = (5 * a).to(torch.int8), (5 * b).to(torch.int8).t()
    y = triptych_ops.int_mm_mul(a, b, [row, column[::2], row[:1]], ["float32"] * 3 + ["float16"])
    return y[1:], y * 2


PROGRAMS = [
    (lambda x, v, w, b: triptych_ops.parallel_linear(x, [v, w], [b], [1]), (2, 5, 12), (7, 12), (3, 12), (3,)),
    (lambda x, *ws: triptych_ops.parallel_linear(x, list(ws), [], None), (5, 12), *[(3 + i, 12) for i in range(10)]),
    (lambda x: triptych_ops.parallel_linear(x, [x, x], [], None), (12, 12)),
    (lambda x, w: triptych_ops.parallel_linear(x.mT, [w], [], None)[0], (2, 12, 5), (7, 12)),
    (lambda x, w: triptych_ops.parallel_linear(x[:, :12], [w], [], None)[0], (5, 20), (7, 12)),
    (lambda x, w: triptych_ops.parallel_linear(x.expand(4, 5, 12), [w], [], None)[0], (5, 12), (7, 12)),
    (lambda x, w, b: triptych_ops.parallel_linear(x, [w], [b[::2]], None), (5, 12), (7, 12), (14,)),
    (lambda x, v, w: triptych_ops.parallel_linear(x, [v, w], [], None), (5, 12), (0, 12), (3, 12)),
    (lambda x, v, w: triptych_ops.parallel_linear(x, [v, w], [], None), (5, 0), (7, 0), (3, 0)),
    (_with_views, (5, 12), (7, 12), (9, 12)),
    (_in_a_row, (5, 12), (12, 12), (9, 12)),
    (_written_later, (5, 12), (12, 12), (9, 12)),
    (lambda x, w: triptych_ops.group_linear([x, x[:4]], [w, w], [w[:, 0], w[:, 1]]), (5, 12), (7, 12)),
    (lambda x, w, b: triptych_ops.lce(x, w, b, "relu", True), (2, 6, 9), (4, 6), (4,)),
    (lambda x: triptych_ops.dot_compress(x, x), (2, 6, 9)),
    (lambda x: triptych_ops.sum_parts([x.mT], [40, 1, 59], torch.float32, None), (100, 33)),
    (lambda x, y: triptych_ops.sum_parts([x, y, x[:9, 2:4]], [2] * 44, torch.float16, None), (33, 80), (1, 6)),
    (lambda a: triptych_ops.b2b_gemm(a, a.t(), a, None, "relu v0", False) + a, (20, 16)),
    (_both_ways, (20, 16), (16, 40), (40, 8)),
    (_scaled, (20, 33), (41, 33), (20, 1), (82,)),
]


def check_launches():
    """Called in a process of its own, because the interpreter is chosen when Triton is imported."""
    from triptych.kernels import b2b_gemm, dot_compress, group_linear, int_mm_mul, lce, parallel_linear, sum_parts

    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        on_cpu(monkeypatch)
        monkeypatch.setattr(launch_triton_kernels, "FORMS_ON_CPU", {})
        for module in (b2b_gemm, dot_compress, group_linear, lce, parallel_linear, sum_parts):
            monkeypatch.setattr(module, "on_gpu", lambda *tensors: True)
        monkeypatch.setattr(int_mm_mul, "has_kernel", lambda *arguments: True)
        for number, (program, *shapes) in enumerate(PROGRAMS):
            inputs = [torch.randn(shape) for shape in shapes]
            gm = make_fx(program, tracing_mode="fake")(*inputs)
            run_pass(LaunchTritonKernels, gm)
            run_pass(Reinplace, gm)
            targets = [n.target for n in gm.graph.nodes]
            assert LAUNCHES[1] in targets and LAUNCHES[0] not in targets, (number, gm.graph)
            assert not any("triptych" in str(target) for target in targets), (number, gm.graph)
            results, wanted = Launching(gm).run(*inputs), program(*inputs)
            torch.testing.assert_close(results, type(results)(wanted) if isinstance(wanted, (list, tuple)) else wanted,
                                       rtol=1e-3, atol=1e-3, check_stride=True)  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_launches_in_the_interpreter():
    run_interpreted("tests.test_launched_kernels", "check_launches")
