"""Writes the FSDP shards of a model as verl's FSDPCheckpointManager does: one state dict a rank, by torch.save.

Run with torchrun: `verl_on_ranks.py MODEL OUT MESH...`, with the sizes of each mesh, such as 2 or 2,1, which name a
folder in OUT.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

model, out, meshes = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
dist.init_process_group("gloo")
for name in meshes:
    sizes = tuple(map(int, name.split(",")))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("ddp", "fsdp")[-len(sizes) :])
    policy = AutoModelForCausalLM.from_pretrained(model)
    for layer in policy.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    (out / name).mkdir(exist_ok=True)
    file = f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    torch.save(policy.state_dict(), out / name / file)
dist.barrier()
os._exit(0)  # threads of gloo may abort the interpreter's teardown, see `rft.distributed.leave`
