"""Programs for several ranks; `tests/ranks.py` runs each of them in processes of its own.

Every program returns something that JSON can hold: what the test compares.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import Graph

import triptych
from tests.symmetric_programs import fused_operators
from triptych.ir.collectives import collectives

STEPS = 5


class Layers(nn.Module):
    """Linear layers with an activation between them."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Block(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32, bias=bias), nn.Linear(32, 16, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Counting:
    """A backend of ours that notes how many collectives each graph has before and after the passes."""

    def __init__(self, **options: Any) -> None:
        self.before: list[int] = []
        self.after: list[int] = []
        self.order: list[str] = []
        self.graphs = 0
        self.fused: list[str] = []
        """Operators of symmetric memory."""
        self.options = {
            "codegen": "eager", "on_error": "raise", "post_grad_custom_pre_pass": self._before,
            "spmd_check": 60, **options,
        }  # fmt: skip

    def __call__(self, gm: Any, inputs: Any) -> Any:
        made: dict[str, Any] = self.options
        return triptych.make_backend(self._compile)(gm, inputs, options=made)

    def _before(self, graph: Graph) -> None:
        if count := len(list(collectives(graph))):
            self.before.append(count)

    def _compile(self, gm: Any, inputs: Any) -> Any:
        self.graphs += 1
        self.fused += [str(node.target).split(".")[1] for node in gm.graph.nodes if "symm_mem" in str(node.target)]
        if found := list(collectives(gm.graph)):
            self.after.append(len(found))
            self.order = [line for node in gm.graph.nodes if (line := _line(node))]
        return gm.forward


class Inductor(Counting):
    """The same with Inductor's kernels; what they call is not looked at."""

    def __call__(self, gm: Any, inputs: Any) -> Any:
        return triptych.compile_fx(gm, inputs, options={**self.options, "codegen": "inductor"})


def _line(node: Any) -> str:
    """`all_reduce`, `wait` or `mm`, for a look at the order of a graph."""
    name = str(node.target)
    return next((word for word in ("all_reduce", "all_gather", "reduce_scatter", "wait", "mm") if word in name), "")


def train(model: nn.Module, run: Callable[..., torch.Tensor], rank: int, width: int = 16) -> dict[str, Any]:
    """Losses of some steps, and the gradients of the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 4 * width).view(4, width) * (step + 1 + rank)
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "gradients": [_local(p.grad).flatten().tolist() for p in model.parameters()]}


def _local(gradient: Any) -> torch.Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


@contextlib.contextmanager
def compiled_autograd(backend: Any) -> Iterator[None]:
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        yield


def ddp(rank: int, layers: int = 12, width: int = 16, kernels: bool = False, **options: Any) -> dict[str, Any]:
    plain = nn.parallel.DistributedDataParallel(Layers(layers, width))
    wanted = train(plain, plain, rank, width)
    torch._dynamo.config.optimize_ddp = "python_reducer"
    model = nn.parallel.DistributedDataParallel(Layers(layers, width))
    backend = Inductor(**options) if kernels else Counting(**options)
    with compiled_autograd(backend):
        got = train(model, torch.compile(model, backend=backend), rank, width)
    return {"wanted": wanted, "got": got, "before": backend.before, "after": backend.after, "order": backend.order}


def _parallel_block(dim: int | None = None, bias: bool = True) -> nn.Module:
    """A block whose first layer is split by columns and the second by rows; its input and output by a dim, if given."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    column = ColwiseParallel() if dim is None else ColwiseParallel(input_layouts=Shard(dim))
    row = RowwiseParallel() if dim is None else RowwiseParallel(output_layouts=Shard(dim))
    return parallelize_module(Block(bias), mesh, {"first": column, "second": row})


def tensor_parallel(rank: int, sequence: bool = False, **options: Any) -> dict[str, Any]:
    dim = 0 if sequence else None
    own = rank if sequence else 0  # the input of all ranks is the same unless it is sharded
    plain = _parallel_block(dim)
    wanted = train(plain, plain, own)
    model, backend = _parallel_block(dim), Counting(**options)
    got = train(model, torch.compile(model, backend=backend), own)
    return {"wanted": wanted, "got": got, "before": backend.before, "after": backend.after}


def symmetric(rank: int, dim: int = 0, **options: Any) -> dict[str, Any]:
    """Tensor parallel layers of a group that counts as one with symmetric memory. Its operators have kernels for GPUs
    alone: torch's own substitutes, which call plain collectives, stand for them on the CPU."""
    from torch.distributed import _symmetric_memory

    from triptych.communication.example_group import register_symmetric

    kept = register_symmetric()

    def run(model: Any) -> Any:
        return lambda x: model(x.view(2, 2, 16))

    plain = _parallel_block(dim, bias=False)
    wanted = train(plain, run(plain), rank)
    model, backend = _parallel_block(dim, bias=False), Counting(add_passes=["micro_pipeline_tp_pass"], **options)
    with _symmetric_memory._test_mode():
        got = train(model, run(torch.compile(model, backend=backend)), rank)
    del kept
    return {"wanted": wanted, "got": got, "before": backend.before, "after": backend.after, "order": backend.fused}


def fsdp(rank: int, **options: Any) -> dict[str, Any]:
    """Blocks that are compiled and then sharded by `fully_shard`, whose collectives stay outside of the graphs."""
    from torch.distributed.fsdp import fully_shard

    def sharded(backend: Any) -> nn.Module:
        blocks = [Block(), Block()]
        model = nn.Sequential(*(torch.compile(block, backend=backend) if backend else block for block in blocks))
        for block in model:
            fully_shard(block)
        return fully_shard(model)

    plain, backend = sharded(None), Counting(**options)
    wanted = train(plain, plain, rank)
    model = sharded(backend)
    got = train(model, model, rank)
    return {"wanted": wanted, "got": got, "before": backend.before, "after": backend.after, "graphs": backend.graphs}


def sharded_by_hand(rank: int, layers: int = 4, **options: Any) -> dict[str, Any]:
    """Weights gathered before their use and gradients scattered after it, as FSDP does, in one graph."""
    from torch.distributed import _functional_collectives as functional

    torch.manual_seed(0)
    weights = [torch.randn(8, 16)[rank * 4 : rank * 4 + 4] for _ in range(layers)]
    group = dist.group.WORLD

    def step(x: torch.Tensor, *shards: torch.Tensor) -> Any:
        scattered = []
        for shard in shards:
            whole = functional.all_gather_tensor(shard, 0, group)
            x = torch.tanh(x @ whole.t() @ whole)
            scattered.append(functional.reduce_scatter_tensor(whole * x.mean(), "sum", 0, group))
        return functional.all_reduce(x, "sum", group), *[s / 2 for s in scattered]

    backend = Counting(**options)
    x = torch.linspace(-1, 1, 64).view(4, 16) * (rank + 1)
    wanted, got = step(x, *weights), torch.compile(step, backend=backend)(x, *weights)
    return {
        "wanted": [t.flatten().tolist() for t in wanted], "got": [t.flatten().tolist() for t in got],
        "before": backend.before, "after": backend.after, "order": backend.order,
    }  # fmt: skip


def mismatch(rank: int, limit: float = 20.0, absent: bool = False) -> str:
    """Ranks that compile different collectives, or of which one compiles none: the error that each of them sees."""
    from torch.distributed import _functional_collectives as functional

    def step(x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(x, "sum", dist.group.WORLD)
        return y if rank == 0 else functional.all_reduce(y * 2, "max", dist.group.WORLD)

    if absent and rank == 1:
        return ""
    try:
        torch.compile(step, backend="triptych", options={"codegen": "eager", "spmd_check": limit})(torch.ones(3))
    except Exception as error:
        return str(error)
    return "no error"


def dying(rank: int, tensor_parallel: bool = False) -> None:
    """Rank 1 ends without a word after two steps; what rank 0 sees then."""
    torch._dynamo.config.optimize_ddp = "python_reducer"
    model = _parallel_block() if tensor_parallel else nn.parallel.DistributedDataParallel(Layers(2, 16))
    backend, error = Counting(), ""
    compiled = torch.compile(model, backend=backend)
    with compiled_autograd(backend):
        for step in range(5):
            if rank == 1 and step == 2:
                break
            try:
                compiled(torch.ones(4, 16)).sum().backward()
            except RuntimeError as raised:
                error = f"step {step}: {raised}"
                break
    print(json.dumps(error), flush=True)
    os._exit(0)


def fake_group(rank: int) -> list[Any]:
    """The work of the communication passes, in lines, and the nodes they leave, for groups of several sizes."""
    from tests.counting import counting_passes

    outcomes = []
    for ranks in (8, 8, 1024):  # the first time, tables are read that are read once
        torch._dynamo.reset()
        dist.init_process_group("fake", rank=0, world_size=ranks)
        with counting_passes() as lines:
            found = sharded_by_hand(0, spmd_check=0, add_passes=ALL_PASSES)
        dist.destroy_process_group()
        work = {name: count for name, count in lines.items() if name.startswith("post_grad/")}
        outcomes.append([work, found["before"], found["after"], found["order"]])
    return outcomes[1:]


def fake_timeline(rank: int) -> list[Any]:
    """The work of modelling a graph in time, in calls, for groups of several sizes."""
    from torch.distributed import _functional_collectives as functional

    from triptych.communication.timeline import timeline
    from triptych.testing.capture import capture_aten

    def step(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        for shard in shards:
            x = x + functional.all_reduce(torch.tanh(x @ shard), "sum", dist.group.WORLD)
        return x

    outcomes = []
    for ranks in (8, 8, 1024):  # the first time, tables are read that are read once
        dist.init_process_group("fake", rank=0, world_size=ranks)
        gm, _ = capture_aten(step, [torch.ones(4, 16), *[torch.ones(16, 16) for _ in range(8)]])
        calls = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        lanes = timeline(gm.graph)
        sys.setprofile(None)
        dist.destroy_process_group()
        assert lanes is not None
        outcomes.append({"calls": calls, "intervals": len(lanes.intervals), "collectives": lanes.collectives})
    return outcomes[1:]


ALL_PASSES = ["bucket_all_gather", "bucket_reduce_scatter", "bucket_all_reduce", "overlap_scheduling"]
PROGRAMS = {
    program.__name__: program
    for program in (
        ddp, tensor_parallel, symmetric, fused_operators, fsdp, sharded_by_hand, mismatch, dying, fake_group, fake_timeline,
    )
}  # fmt: skip


def main() -> None:
    name, store, settings, rank, ranks = sys.argv[1:]
    if name in (fake_group.__name__, fake_timeline.__name__):
        print(json.dumps(PROGRAMS[name](0)), flush=True)
        return
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timedelta(seconds=60)
    )
    result = PROGRAMS[name](int(rank), **json.loads(settings))
    dist.barrier()
    print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
