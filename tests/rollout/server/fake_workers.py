"""The workers of a fake server: they join real process groups, vLLM's with what it is really given for that."""

import base64
from contextlib import suppress
from datetime import timedelta
from math import prod

import torch
from torch.distributed import TCPStore

from rft.rollout.server.remote import rft_receiver
from rft.rollout.server.remote.rft_receiver import Receiver, join
from tests.rollout.server.vllm_plugin.nccl_over_gloo import VLLMNCCL


class Workers(Receiver):
    """One worker, whose "model" is the bytes of tensors by their names.

    Attributes:
        loads: the names of the tensors of every load.
        groups: those that it is in, by name.
        updating, broken: an update of vLLM's own transfer is open; one broke off, and no other has ended since.
    """

    def __init__(self):
        self.rank, self.device = 0, torch.device("cpu")
        self.held, self.loads = {}, []
        self.groups = {}
        self.updating = self.broken = False

    def rft_load(self, weights_iterator):
        found = {name: tensor.numpy().tobytes() for name, tensor in weights_iterator}
        self.held |= found
        self.loads.append(sorted(found))
        return []

    def message(self, path, body, seconds):
        """What SGLang does; whether it succeeds."""
        name = body["group_name"]
        if path == "/destroy_weights_update_group":
            return self.groups.pop(name, None) is not None
        with suppress(RuntimeError):
            if path == "/init_weights_update_group":
                limit = timedelta(seconds=seconds)
                store = TCPStore(body["master_address"], body["master_port"], is_master=False, timeout=limit)
                place = body["rank_offset"], body["world_size"], body["backend"]
                self.groups[name] = join(store, name, *place, seconds, "127.0.0.1")
                return True
            assert name in self.groups, "this ends an SGLang server"
            found = {}
            for tensor, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
                found[tensor] = torch.empty(shape, dtype=getattr(torch, dtype))
                rft_receiver.broadcast(self.groups[name], found[tensor], seconds)
            self.held |= {name: tensor.numpy().tobytes() for name, tensor in found.items()}
            self.loads.append(sorted(found))
            return True
        return False

    def transfer(self, path, body, seconds):
        """What vLLM's worker does with a message of its own weight transfer; raises RuntimeError where that raises."""
        if self.updating != (path in ("/update_weights", "/finish_weight_update")) and "init" not in path:
            raise RuntimeError(f"{path}: an update is {'open' if self.updating else 'not open'}")
        if path == "/shutdown_weight_transfer_engine":
            self.groups.clear()
        elif path == "/init_weight_transfer_engine":
            about = body["init_info"]
            identity = base64.b64decode(about["nccl_unique_id_b64"], validate=True)
            place = about["rank_offset"] + self.rank, about["world_size"]
            self.groups["own"] = VLLMNCCL(identity, *place, "cpu", timeout=timedelta(seconds=seconds)).group
        elif path == "/update_weights":
            self.updating, broken, self.broken = False, self.broken, True
            found = self.unpack(**body["update_info"], seconds=seconds)
            self.held |= {name: b"mixed up" for name in found} if broken else found
            self.loads.append(sorted(found))
            self.updating, self.broken = True, broken
        else:
            self.updating = path == "/start_weight_update"
            self.broken = self.broken and self.updating

    def unpack(self, names, dtype_names, shapes, seconds):
        """The bytes of the tensors of one message, by name."""
        dtypes = [getattr(torch, name) for name in dtype_names]
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        packed = torch.empty(sum(sizes), dtype=torch.uint8)
        rft_receiver.broadcast(self.groups["own"], packed, seconds)
        about = zip(names, packed.split(sizes), dtypes, shapes, strict=True)
        views = {name: part.view(dtype).view(shape) for name, part, dtype, shape in about}
        return {name: view.reshape(-1).view(torch.uint8).numpy().tobytes() for name, view in views.items()}
