"""Work as a sum of parts: what follows from one description, and when a form needs no measurement."""

from __future__ import annotations

import math

import pytest
import torch

from triptych.cost import UNKNOWN, Moved, Operand, OperatorCall, Product, Work, read_and_written
from triptych.cost.decision import choose
from triptych.cost.device import USUAL

pytestmark = pytest.mark.fast

GPU, CPU = torch.device("cuda"), torch.device("cpu")
bf16, f32 = torch.bfloat16, torch.float32


def test_one_description_gives_bytes_operations_launches_and_the_question():
    product = Product.sized(64, 128, 32, bf16)
    work = Work.of(GPU, product, Moved(1000.0))
    assert work.flops == 2 * 64 * 128 * 32
    assert work.bytes == 2 * (64 * 32 + 32 * 128 + 64 * 128) + 1000
    assert work.launches == 2
    assert product.question(GPU) == "Product(left=bf16[64, 32], right=bf16[32, 128]/[1, 32])"


def test_modelled_seconds_are_those_of_the_device_model():
    work = Work.of(GPU, Product.sized(512, 512, 512, bf16), Moved(4096.0))
    expected = USUAL.gemm(512, 512, 512, bf16) + USUAL.copy(4096)
    assert work.seconds(USUAL) == pytest.approx(expected)


def test_elements_of_an_expanded_dim_are_in_memory_once():
    expanded = Operand.of(torch.empty(1, 8).expand(4, 8))
    assert (expanded.elements, expanded.bytes, expanded.span) == (32, 32, 32)
    assert expanded.random(CPU).stride() == (0, 1)


@pytest.mark.parametrize("shape, strides", [((4, 8), (8, 1)), ((4, 8), (1, 4)), ((2, 4, 8), (64, 16, 2)), ((0, 8), (8, 1))])
def test_random_operands_are_laid_out_as_described(shape, strides):
    for dtype in (f32, bf16, torch.int8, torch.bool, torch.float8_e4m3fn):
        tensor = Operand(shape, strides, dtype).random(CPU)
        assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (shape, strides, dtype)


def test_a_transposed_operand_keeps_its_memory():
    matrix = Operand.contiguous((3, 4, 8), f32)
    assert matrix.mT == Operand.of(torch.empty(3, 4, 8).mT)
    assert matrix.mT.mT == matrix


def test_the_host_may_be_slower_than_the_device():
    call = OperatorCall("an operator", (Operand.contiguous((8,), f32),), through_python=True)
    assert Work.of(GPU, call).seconds(USUAL) == USUAL.operator
    assert Work.of(GPU, call, Moved(1e9)).seconds(USUAL) > USUAL.operator


@pytest.mark.parametrize(
    "rows, asked",
    [(1, 1), (2, 2), (5, 8), (1000, 1024), (1024, 1024)],
)
def test_products_that_differ_in_rows_are_one_question(rows, asked):
    like = Product.sized(rows, 128, 32, bf16).like()
    assert like == Product.sized(asked, 128, 32, bf16)


def test_rows_that_are_the_innermost_dim_are_not_rounded():
    """Their alignment decides which kernels exist."""
    left = Operand.contiguous((32, 1000), bf16).mT
    product = Product(left, Operand.contiguous((32, 64), bf16))
    assert product.like() == product


def test_a_batch_with_more_rows_is_still_contiguous():
    like = Product.sized(5, 16, 8, f32, batch=3).like()
    assert like.left == Operand.contiguous((3, 8, 8), f32)


def forms():
    copy = Moved(1 << 20)
    left, weight, bias = (Operand.contiguous(s, bf16) for s in ((64, 32), (32, 128), (128,)))
    product = Product(left, weight)
    return copy, product, Product(left, weight, bias), Product(left, Operand.contiguous((128, 32), bf16).mT)


def test_a_form_with_fewer_launches_and_no_more_of_anything_is_sure():
    copy, product, with_bias, transposed = forms()
    old = Work.of(GPU, product, copy)
    assert Work.of(GPU, product).is_part_of(old)
    assert Work.of(GPU, copy).is_part_of(3 * Work.of(GPU, copy))
    assert Work.of(GPU, with_bias).is_part_of(old)
    assert not Work.of(GPU, product, copy, copy).is_part_of(old)
    assert not Work.of(GPU, transposed).is_part_of(old), "another order of the operands may have another kernel"
    assert not Work.of(GPU, product, Moved(1 << 10)).is_part_of(old), "as many launches may be fused otherwise"
    assert not Work.of(GPU, Product.sized(64, 128, 32, bf16, error=UNKNOWN)).is_part_of(old)


def test_memory_that_is_saved_makes_up_for_a_little_time():
    copy = Moved(1 << 30)
    old, new = Work.of(GPU, copy, held=1 << 20), Work.of(GPU, Moved(1.03 * copy.moved))
    decision = choose(old, new, "off")
    assert decision.pays and decision.saves == 1 << 20 and decision.after > decision.before
    assert not choose(Work.of(GPU, copy), new, "off").pays


def test_what_takes_no_time_is_used_whichever_is_faster():
    old, new = Work.of(GPU, Moved(8.0)), Work.of(GPU, Moved(8.0), Moved(8.0), too_short=1e-3)
    assert choose(old, new, "all").negligible
    assert not choose(old, Work.of(GPU, Moved(8.0), Moved(8.0)), "off").pays


def test_every_rank_decides_alike():
    work = Work.of(CPU, read_and_written(torch.empty(1 << 20)), on_every_rank=True)
    threads = torch.get_num_threads()
    before = work.seconds()
    try:
        torch.set_num_threads(2)
        assert work.seconds() == before
    finally:
        torch.set_num_threads(threads)
    assert math.isfinite(before)


def test_a_call_may_do_the_work_of_other_parts():
    """The model knows those, and the clock times the call itself."""
    x, w = Operand.contiguous((64, 32), bf16), Operand.contiguous((128, 32), bf16)
    product, copy = Product(x, w.mT), Moved(1 << 20)
    call = OperatorCall("an operator", (x, (w,)), does=(product, copy), precision=bf16, rate=0.5)
    assert (call.bytes, call.flops) == (product.bytes + copy.bytes, product.flops)
    assert call.seconds(USUAL) == pytest.approx(2 * (product.seconds(USUAL) + copy.seconds(USUAL)))
    assert call.memory >= 2 * (call.bytes + x.span + w.span)
    assert call.question(GPU) == "OperatorCall(operator=an operator, operands=[bf16[64, 32], [bf16[128, 32]]])"


def test_a_matrix_for_each_of_a_batch_is_in_memory_once():
    x, w = Operand.contiguous((4, 16, 8), f32), Operand.contiguous((3, 16), f32).for_each(4)
    assert (w, w.bytes) == (Operand.of(torch.empty(3, 16).expand(4, 3, 16)), 3 * 16 * 4)
    assert Product(w, x).prepare(CPU)().shape == (4, 3, 8)
