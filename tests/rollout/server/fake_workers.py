"""The workers of a fake server: they join real process groups, vLLM's with what it is really given for that."""

from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from rft.rollout.server.remote import rft_receiver
from rft.rollout.server.remote.rft_receiver import Receiver, join


class Workers(Receiver):
    """One worker, whose "model" is the bytes of tensors by their names.

    Attributes:
        loads: the names of the tensors of every load.
    """

    def __init__(self):
        self.rank, self.device = 0, torch.device("cpu")
        self.held, self.loads = {}, []
        self.groups = {}

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
