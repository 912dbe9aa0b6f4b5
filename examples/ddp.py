"""DistributedDataParallel with gradients reduced inside the compiled backward, in buckets.

    torchrun --nproc-per-node 2 examples/ddp.py
    torchrun --nproc-per-node 2 examples/ddp.py --codegen eager     # without kernels: no C++ compiler is needed

`python_reducer` and compiled autograd put the all-reduces into the graph; `fuse_ddp_communication` joins them.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from triptych.ir.collectives import collectives


class Network(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--megabytes", type=float, default=25.0, help="size of a bucket")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)

    def count(graph: torch.fx.Graph) -> None:
        if (number := len(list(collectives(graph)))) and dist.get_rank() == 0:
            print(f"{number} collectives in a graph")

    torch._dynamo.config.optimize_ddp = "python_reducer"  # before the model is wrapped
    torch._dynamo.config.compiled_autograd = True
    model = DistributedDataParallel(Network(layers=12, width=64))
    torch.manual_seed(1 + dist.get_rank())  # data of its own for each rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {
        "codegen": arguments.codegen,
        "fuse_ddp_communication.megabytes": arguments.megabytes,
        "spmd_check": 120,  # raise on every rank, rather than hang, if the ranks compile different programs
        "post_grad_custom_pre_pass": count,
        "post_grad_custom_post_pass": count,
    }

    @torch.compile(backend="triptych", options=options)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for number in range(5):
        optimizer.zero_grad()
        loss = step(torch.randn(8, 64))
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {number}: loss {loss.item():.6f}")
    total = sum(p.double().sum() for p in model.parameters())
    sums = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, total.detach())
    if dist.get_rank() == 0:
        print("all ranks have the same weights:", all(torch.equal(s, sums[0]) for s in sums))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
