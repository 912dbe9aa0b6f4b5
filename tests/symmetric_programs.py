"""Products and collectives of tensor parallel layers, for ranks of a group with symmetric memory.

On a GPU, which the ranks of a test share, the operators of symmetric memory run themselves; on the CPU torch's
substitutes for them do, which call plain collectives. Every rank knows what the others have, so that plain torch says
what must come out.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed import _symmetric_memory

import triptych
from triptych.communication.example_group import register_symmetric

DEVICE = "cuda" if torch.cuda.device_count() > 1 else "cpu"
"""Two ranks that share a GPU end with a segmentation fault in torch's symmetric memory."""
E4M3 = torch.float8_e4m3fn

Case = Callable[[int, int, Any], tuple[Callable[..., Any], list[Tensor], Any]]
"""Of a rank, the number of ranks and their group: a program, this rank's inputs, and what it must return."""


def parts(ranks: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """What each rank has."""
    generator = torch.Generator().manual_seed(sum(shape))
    return [(torch.randn(shape, generator=generator) / 4).to(dtype).to(DEVICE) for _ in range(ranks)]


def gather(dim: int, *shape: int, elsewhere: bool = False) -> Case:
    """Two products of one gathered tensor, which is used for something else too."""

    def case(rank: int, ranks: int, group: Any) -> Any:
        width = shape[-1] * (ranks if dim == len(shape) - 1 else 1)
        shards, (first, second) = parts(ranks, *shape), parts(2, width, 64)
        whole = torch.cat(shards, dim)

        def results(gathered: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return (gathered @ w, gathered @ v, *([gathered + 1] if elsewhere else []))

        def program(x: Tensor, w: Tensor, v: Tensor) -> Any:
            return results(functional.all_gather_tensor(x, dim, group), w, v)

        return program, [shards[rank], first, second], results(whole, first, second)

    return case


def scatter(dim: int, columns: int, *shape: int, how: str = "sum") -> Case:
    def case(rank: int, ranks: int, group: Any) -> Any:
        lefts, rights = parts(ranks, *shape), parts(ranks, shape[-1], columns)
        total = torch.stack([(a @ b).float() for a, b in zip(lefts, rights)]).sum(0) / (ranks if how == "avg" else 1)

        def program(x: Tensor, w: Tensor) -> Any:
            return functional.reduce_scatter_tensor(x @ w, how, dim, group)

        return program, [lefts[rank], rights[rank]], total.bfloat16().chunk(ranks, dim)[rank].contiguous()

    return case


def scaled_gather(by_rows: bool) -> Case:
    """8-bit floats, communicated as integers, with one scale or with one for each row of each rank."""

    def case(rank: int, ranks: int, group: Any) -> Any:
        shards, weight = [part.to(E4M3) for part in parts(ranks, 32, 64)], parts(1, 48, 64)[0].to(E4M3)
        scales = [part.abs() + 0.5 for part in parts(ranks, 32, 1, dtype=torch.float32)]
        columns, one = torch.ones(1, 48, device=DEVICE), torch.full((), 0.5, device=DEVICE)

        def product(whole: Tensor, w: Tensor, rows: Tensor | None) -> Tensor:
            left, right = (one, one) if rows is None else (rows, columns)
            return torch._scaled_mm(whole, w.t(), left, right, out_dtype=torch.bfloat16)

        def program(x: Tensor, w: Tensor, scale: Tensor) -> Any:
            gathered = functional.all_gather_tensor(x.view(torch.uint8), 0, group).view(E4M3)
            return product(gathered, w, functional.all_gather_tensor(scale, 0, group) if by_rows else None)

        whole = torch.cat([shard.view(torch.uint8) for shard in shards]).view(E4M3)
        expected = product(whole, weight, torch.cat(scales) if by_rows else None)
        return program, [shards[rank], weight, scales[rank]], expected

    return case


def scaled_scatter(dim: int) -> Case:
    def case(rank: int, ranks: int, group: Any) -> Any:
        lefts, rights = ([part.to(E4M3) for part in parts(ranks, *shape)] for shape in ((64, 64), (48, 64)))
        one = torch.full((), 0.5, device=DEVICE)

        def product(x: Tensor, w: Tensor) -> Tensor:
            return torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16).view(4, 16, 48)

        def program(x: Tensor, w: Tensor) -> Any:
            return functional.reduce_scatter_tensor(product(x, w), "sum", dim, group)

        total = torch.stack([product(a, b).float() for a, b in zip(lefts, rights)]).sum(0)
        return program, [lefts[rank], rights[rank]], total.bfloat16().chunk(ranks, dim)[rank].contiguous()

    return case


CASES = {
    "gather rows": gather(0, 32, 64),
    "gather rows of three dims, read elsewhere": gather(0, 8, 4, 64, elsewhere=True),
    "gather dim 1": gather(1, 4, 16, 64),
    "gather dim 1, read elsewhere": gather(1, 4, 16, 64, elsewhere=True),
    "gather columns": gather(1, 32, 1024),
    "scatter rows": scatter(0, 48, 64, 64),
    "scatter dim 1, averaged": scatter(1, 48, 4, 16, 64, how="avg" if DEVICE == "cuda" else "sum"),
    "scatter columns": scatter(1, 2048, 32, 64),
    "scatter scaled": scaled_scatter(0),
    "scatter scaled, dim 1": scaled_scatter(1),
}
"""Gloo, which stands behind the substitutes on the CPU, has no average, and no 8-bit floats."""
if DEVICE == "cuda":
    CASES |= {"gather scaled": scaled_gather(by_rows=False), "gather scaled by rows": scaled_gather(by_rows=True)}


@contextlib.contextmanager
def symmetric_memory(rank: int) -> Iterator[None]:
    """The default group has symmetric memory, or, on the CPU, counts as one that has it."""
    warnings.simplefilter("ignore")  # calls that torch announces to replace
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        _symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
        yield
        return
    kept = register_symmetric()
    with _symmetric_memory._test_mode():
        yield
    del kept


def fused_operators(rank: int, codegen: str = "eager") -> dict[str, Any]:
    """Of each case: the operators that communicate, and by how much results are off, in parts of the largest number."""
    with symmetric_memory(rank):
        return {name: _outcome(case, rank, codegen) for name, case in CASES.items()}


def _outcome(case: Case, rank: int, codegen: str) -> dict[str, Any]:
    program, inputs, expected = case(rank, dist.get_world_size(), dist.group.WORLD)
    operators: list[str] = []

    def look(graph: torch.fx.Graph) -> None:
        targets = [str(node.target) for node in graph.nodes]
        operators.extend(target.split(".")[1] for target in targets if target.startswith(("symm_mem", "_c10d")))

    torch._dynamo.reset()
    options: dict[str, Any] = {
        "codegen": codegen, "add_passes": ["micro_pipeline_tp_pass"], "post_grad_custom_post_pass": look,
        "on_error": "raise",
    }  # fmt: skip
    got = torch.compile(program, backend=triptych.compile_fx, options=options)(*inputs)
    pairs = list(zip(got, expected)) if isinstance(expected, tuple) else [(got, expected)]
    return {
        "operators": operators,
        "same_layout": all(g.shape == e.shape and g.stride() == e.stride() for g, e in pairs),
        "off": max(float((g.float() - e.float()).abs().max() / e.float().abs().max()) for g, e in pairs),
    }
