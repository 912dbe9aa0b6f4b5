"""Products are counted alike whatever their spelling: what a report says of them does not depend on how a pass writes them."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import triptych
from tests.clock import clock_says
from triptych.codegen.eager import EagerCodegen
from triptych.codegen.inductor import InductorCodegen
from triptych.cost.estimate import group_cost, operation_cost
from triptych.ir.work import PRODUCTS, WORK, ProductCount, declared_work, is_launch, product_name
from triptych.kernels.onednn import linear_arguments, linear_operator
from triptych.kernels.registry import CUDA_FORMS
from triptych.passes.node_lines import NodeLine
from triptych.pipeline import STAGES
from triptych.rewrite.examples import make_inputs
from triptych.rewrite.rule import Rule
from triptych.testing.capture import capture
from triptych.testing.check import apply_example
from triptych.testing.subjects import subjects

from .models import build

aten = torch.ops.aten


def gemms(gm):
    """In a graph and the graphs inside it."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    return sum(operation_cost(node).gemms for graph in graphs for node in graph.nodes)


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


# ---- our operators ----


def operands():
    x, w = torch.randn(3, 5, 8), [torch.randn(size, 8) for size in (4, 6)]
    a, b, c = torch.randn(7, 5), torch.randn(5, 9), torch.randn(9, 3)
    rows, row = torch.randn(6, 8), torch.randn(6, 1)
    small = torch.ones(5, 8, dtype=torch.int8)
    return {
        "after": (x, [x]),
        "b2b_gemm": (a, b, c, None, "relu v0", False),
        "cat": ([x, x], 1),
        "dot_compress": (x, torch.randn(5, 2)),
        "group_linear": ([x, rows], w, []),
        "int_mm_mul": (small, torch.ones(8, 4, dtype=torch.int8), [torch.ones(4)], ["float32"] * 2),
        "lce": (x, torch.randn(4, 5), None, "none", False),
        "norm_backward": (rows, None, rows.clone(), row, row.clone(), torch.randn(8), None, 4, False),
        "parallel_linear": (x, w, [], None),
        "sum_parts": ([rows], [8], torch.float32, None),
    }


def test_every_operator_of_ours_says_what_it_multiplies():
    assert set(operands()) == set(CUDA_FORMS)
    assert all(hasattr(getattr(torch.ops.triptych, name).default, PRODUCTS) for name in CUDA_FORMS)


@pytest.mark.parametrize("name", sorted(operands()))
def test_an_operator_multiplies_what_its_definition_does(name):
    """Torch's own count of the operations of the form for any device."""
    given = operands()[name]
    operator = getattr(torch.ops.triptych, name).default
    leaves, spec = pytree.tree_flatten(given)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors):
        now = dict(zip(places, tensors))
        return operator(*pytree.tree_unflatten([now.get(place, leaf) for place, leaf in enumerate(leaves)], spec))

    (node,) = [n for n in traced(call, *(leaves[place] for place in places)).graph.nodes if n.target is operator]
    work = declared_work(node)
    counter = FlopCounterMode(display=False)
    with counter:
        importlib.import_module(f"triptych.kernels.{name}").anywhere(*given)
    counted = counter.get_total_flops()
    if name == "int_mm_mul":  # which torch does not count
        counted = 2 * 5 * 8 * 4
    assert work.flops == counted
    assert operation_cost(node).gemms == work.gemms == (0 if not counted else {"b2b_gemm": 2, "dot_compress": 2,
        "group_linear": 2, "parallel_linear": 2}.get(name, 1))  # fmt: skip
    assert operation_cost(node).bytes > 0


# ---- spellings ----


SPELLINGS = {
    "mm": lambda c, a, b: aten.mm(a, b),
    "addmm": lambda c, a, b: aten.addmm(c, a, b),
    "addmm of one tensor": lambda c, a, b: aten.addmm(c, a, a),
    "addmm_": lambda c, a, b: aten.addmm_(c.clone(), a, b),
    "_addmm_activation": lambda c, a, b: aten._addmm_activation(c[0], a, b),
    "bmm": lambda c, a, b: aten.bmm(a[None], b[None]),
    "baddbmm_": lambda c, a, b: aten.baddbmm_(c[None].clone(), a[None], b[None]),
    "mv": lambda c, a, b: aten.mv(a, b[:, 0]),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_one_product(name):
    square = [torch.randn(8, 8) for _ in range(3)]
    gm = traced(SPELLINGS[name], *square)
    (node,) = [n for n in gm.graph.nodes if operation_cost(n).gemms]
    columns = 1 if name == "mv" else 8
    seconds = {n: group_cost([n], {n}, quick_memory).seconds for n in (node,)}[node]
    assert operation_cost(node).gemms == 1 and seconds == pytest.approx(2 * 8 * 8 * columns)


def quick_memory(device):
    """A device on which only arithmetic takes time, a second an operation."""

    class Device:
        bandwidth, launch, is_gpu = float("inf"), 0.0, False

        def flops(self, dtype):
            return 1.0

    return Device()


@pytest.mark.skipif(linear_operator() is None, reason="torch without oneDNN")
def test_a_product_of_onednn_is_one_product():
    x, w = torch.randn(4, 16), torch.randn(8, 16)
    gm = traced(lambda x, w: linear_operator()(*linear_arguments(x, w, None)), x, w)
    (node,) = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert operation_cost(node).gemms == 1
    assert group_cost([node], {node}, quick_memory).seconds == 2 * 4 * 16 * 8
    assert operation_cost(node).bytes == 4 * (4 * 16 + 8 * 16 + 4 * 8)


def test_operators_of_others_are_no_products_by_their_names():
    assert product_name("mkldnn._linear_pointwise") and product_name("addmm_") and product_name("matmul")
    assert not product_name("mylibrary.linear") and not product_name("relu_") and not product_name("addcmul")


def test_work_that_several_launches_share():
    assert ProductCount(3, 30.0).shared(2) == [ProductCount(2, 15.0), ProductCount(1, 15.0)]
    assert ProductCount(2, 10.0).without(1) == ProductCount(1, 5.0) and ProductCount(1, 4.0).without(3) == ProductCount(0, 0.0) == ProductCount().without(1)
    assert ProductCount.of([(2, 3, 4), (2, 0, 4)]) == ProductCount(1, 48.0)


# ---- rules ----

OTHER_COUNT = {
    "adapt_weights_to_batch_norm": "multiplies statistics into weights",
    "batch_aten": "joins", "batch_operations": "joins", "concat_linear_woq_int4": "joins", "fused_lce": "joins",
    "fuse_split_linear_add": "joins", "grouped_gemm": "joins", "joined_weights": "joins", "mm_plus_mm": "joins",
    "fuse_attention": "two products become an attention", "fuse_attention_aten": "two products become an attention",
    "chunk_rows": "splits", "recompute_between_products": "computes again", "layer_apart": "takes a layer apart",
    "contraction_by_hand": "writes a sum of products as one", "decompose_mem_bound_mm": "writes it as a sum",
    "einsum_to_product": "multiplies without a sum", "einsum_over_one": "multiplies without a sum",
    "einsum_to_sum": "sums without a product", "pointwise_again": "multiplies without a sum",
    "drop_unused": "drops", "merge_equal_values": "drops", "module_to_function": "a module is not read",
}  # fmt: skip
"""Rules that join, split, drop or add products. All others leave their number as it is."""


def rules():
    return [subject for subject in subjects() if isinstance(subject, Rule)]


RESPELL = (
    "products_by_onednn", "addmm", "addmm_to_linear", "launched_kernel", "reinplace_added_products", "bmm_to_mm",
    "unfuse_bias_add_to_pointwise", "fused_int_mm_mul", "fused_products", "dot_compress", "simple_lce", "normal_lce",
    "own_pointers", "group_linears", "fuse_all_gather_matmul", "fuse_matmul_reduce_scatter", "pad_mm",
)  # fmt: skip


@pytest.mark.parametrize(
    "rule",
    [pytest.param(r, id=r.name, marks=() if r.name in RESPELL else pytest.mark.slow) for r in rules()],
)
def test_a_rule_keeps_the_number_of_products(rule):
    for number, example in enumerate(rule.examples):
        if not example.fires:
            continue
        dialect = "aten" if "aten" in example.dialects else example.dialects[0]
        gm, _ = capture(example.program, make_inputs(example), dialect, example.dynamic)
        if example.prepare is not None:
            example.prepare(gm.graph)
        before = gemms(gm)
        apply_example(rule, gm, example)
        if rule.name not in OTHER_COUNT:
            assert gemms(gm) == before, f"example {number} of {rule.name}"


def test_the_rules_that_do_otherwise_exist():
    names = {rule.name for rule in rules()}
    assert set(OTHER_COUNT) <= names and set(RESPELL) <= names and not set(RESPELL) & set(OTHER_COUNT)


# ---- whole models ----

JOINS = frozenset(
    ("fuse_attention", "group_batch_fusion_passes", "fuse_parallel_linear_pass", "grouped_gemm_pass", "eliminate_dead_code",
     "eliminate_common_subexpressions", "auto_chunker", "recompute_between_products", "pass_patterns",
     "einsum_to_pointwise_pass")
)  # fmt: skip


@pytest.fixture
def every_product_by_onednn(monkeypatch):
    """And no kernels: passes run as for generated code, which PyTorch itself runs."""
    clock_says(monkeypatch, (2.0, 1.0))
    monkeypatch.setattr("triptych.post_grad.products_by_onednn.LEAST_WORK", 1)
    monkeypatch.setattr(InductorCodegen, "emit", lambda self, *given: EagerCodegen().emit(*given))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(self.norm(x))))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["small", "mlp", "conv_batchnorm", "encoder", "lstm_cell"])
def test_passes_over_whole_models_keep_the_number_of_products(name, train, every_product_by_onednn):
    if name == "small":
        model, args, kwargs = Small(), (torch.randn(8, 16),), {}
    else:
        case = build(name)
        model, args, kwargs = case.model, case.call.args, case.call.kwargs
    explanation = triptych.explain(model, *args, train=train, **kwargs)
    assert not explanation.warnings
    counted = 0
    for record in explanation.passes:
        if record.changed and record.name not in JOINS and record.listing is not None:
            versions = list(record.listing.versions())
            before, after = (gemms_of(versions[version]) for version in record.versions)
            assert before == after, record.name
            counted += 1
    assert counted
    if name == "small" and linear_operator() is not None:
        assert any(record.name == "products_by_onednn" and record.rewrites for record in explanation.passes)


def gemms_of(lines):
    return sum(line.cost.gemms for line in lines if isinstance(line, NodeLine))


def test_the_passes_that_do_otherwise_exist():
    names = {entry.name for entries in STAGES.values() for entry in entries}
    assert names >= JOINS


# ---- launches ----


def test_a_launch_keeps_what_its_operator_multiplies():
    (rule,) = [rule for rule in rules() if rule.name == "launched_kernel"]
    for example in rule.examples:
        if example.fires:
            gm, _ = capture(example.program, make_inputs(example), "aten", False)
            apply_example(rule, gm, example)
            launches = [node for node in gm.graph.nodes if is_launch(node)]
            assert launches and all(node.meta[WORK].gemms and operation_cost(node).gemms for node in launches)
