"""Tensor parallel layers by `parallelize_module`, compiled.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --codegen eager --sequence

With `--sequence` activations between the blocks are sharded too: each block gathers them and scatters its result.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from triptych.ir.collectives import collectives


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--sequence", action="store_true", help="shard activations between the blocks")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def show(graph: torch.fx.Graph) -> None:
        if dist.get_rank() == 0 and (found := [c.signature() for c in collectives(graph)]):
            print("\n".join(found))

    def parallel() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(FeedForward(32), FeedForward(32))
        up = ColwiseParallel(input_layouts=Shard(0)) if arguments.sequence else ColwiseParallel()
        down = RowwiseParallel(output_layouts=Shard(0)) if arguments.sequence else RowwiseParallel()
        plan = {f"{block}.{name}": style for block in range(2) for name, style in (("up", up), ("down", down))}
        return parallelize_module(model, mesh, plan)

    plain, model = parallel(), parallel()
    options = {
        "codegen": arguments.codegen,
        "add_passes": ["overlap_scheduling"],
        "spmd_check": 120,
        "post_grad_custom_post_pass": show,
    }

    def run(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    compiled = torch.compile(run, backend="triptych", options=options)
    x = torch.randn(8, 32)
    loss, wanted = compiled(x).square().mean(), plain(x).square().mean()
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad.to_local(), theirs.grad.to_local())
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}; loss and gradients are those of the uncompiled model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
