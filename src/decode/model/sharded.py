"""A target of which every process holds a part of each decoder layer.

FSDP2 gathers a layer when a pass gets to it and drops it behind the pass, in which all processes
have to take part. They need not read the same, nor equally often: one that has nothing to read
takes part in what the others read (`rest`, `wait`). Embedding, final norm and head are whole on
every process, since drafters and objectives read them. The weights are no part of a trained module,
so no checkpoint holds them.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from typing_extensions import override

from decode.errors import UserError
from decode.model.target import Target

# While one process scores a checkpoint, for hours perhaps, others wait; launchers end them when it dies.
PATIENCE = timedelta(days=1)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # that a run may have handlers of
NAP = 0.02  # seconds between two looks at whether somebody reads


class Together:
    """How processes that hold parts of the same layers agree on what comes next.

    Every step begins with sums over all of them: how many read now, and how many are busy, that is
    have not come to rest. While anybody reads, all gather each layer in turn.

    Args:
        layers: sharded; gathered in this order by every pass.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self._layers: Any = list(layers)
        # On the host: no device has to catch up, and a process that has died is noticed at once.
        self._group = distributed.new_group(backend="gloo", timeout=PATIENCE)
        # What the first gathering allocates is used by all others, in inference mode or not.
        with torch.inference_mode(False):
            self._gather()

    def read(self) -> None:
        """Said before a pass, whose layers then gather themselves."""
        self._agree(reads=1, busy=1)

    def see(self, look: Callable[[nn.Module], None]) -> None:
        """Gather all layers for one process or more, which look at each while it is whole."""
        self._agree(reads=1, busy=1)
        self._gather(look)

    def rest(self) -> None:
        """Nothing more to read: takes part in what others do, until all of them rest."""
        while self._take_part(busy=0)[1]:
            pass

    def wait(self, seconds: float) -> None:
        """For so long, and to the end of a pass."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self._take_part(busy=1)[0]:
                time.sleep(min(left, NAP))

    def _take_part(self, busy: int) -> list[int]:
        found = self._agree(0, busy)
        if found[0]:
            self._gather()
        return found

    def _agree(self, reads: int, busy: int) -> list[int]:
        sums = torch.tensor([reads, busy])
        distributed.all_reduce(sums, group=self._group)
        return sums.tolist()

    def _gather(self, look: Callable[[nn.Module], None] = lambda _: None) -> None:
        for layer in self._layers:
            layer.unshard()
            look(layer)
            layer.reshard()


class Calm:
    """Has handlers of signals wait until a pass is over: what they raise would leave others alone in it."""

    def __init__(self) -> None:
        self._handlers: dict[signal.Signals, Any] = {}
        self._heard: list[int] = []

    def begin(self) -> None:
        """Of a pass; nothing outside the main thread, where handlers run."""
        if threading.current_thread() is not threading.main_thread():
            return
        # What has no handler of ours raises nothing, and may end the process at once.
        self._handlers = {s: handler for s in SIGNALS if callable(handler := signal.getsignal(s))}
        for number in self._handlers:
            signal.signal(number, lambda number, _: self._heard.append(number))

    def end(self) -> None:
        """Let handlers hear what came meanwhile."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        heard, self._heard, self._handlers = self._heard, [], {}
        for number in heard:
            signal.raise_signal(number)


class Sharded(Target):
    """A target whose decoder layers `shard` has cut up; to be made on every process at once.

    Timings of the decoder include the gathering of layers. Weights cannot be merged, copied or tuned.

    Args:
        model: after `shard`.
        name: its fingerprint when it was whole.
    """

    movable = False

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        super().__init__(model)
        self._name = name
        self._together, self._calm = Together(self.layers), Calm()
        # Around FSDP's own hooks. A body with hooks is never `Fused`.
        self.base.register_forward_pre_hook(lambda *_: self._begin(), prepend=True)
        self.base.register_forward_hook(lambda *_: self._calm.end(), always_call=True)

    def _begin(self) -> None:
        self._calm.begin()
        self._together.read()

    @property
    @override
    def bytes(self) -> int:
        local = (p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters())
        return sum(p.numel() * p.itemsize for p in local)

    @override
    def fingerprint(self) -> str:
        return self._name

    @override
    def weights(self, part: nn.Module) -> dict[str, Tensor]:
        """Of a decoder layer; the other processes need not want them."""
        found: dict[str, Tensor] = {}

        def look(layer: nn.Module) -> None:
            if layer is part:
                whole = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
                found.update({name: whole[name].detach().clone() for name in names})

        names = part.state_dict().keys()
        self._calm.begin()
        try:
            self._together.see(look)
        finally:
            self._calm.end()
        return found

    @override
    def rest(self) -> None:
        self._together.rest()

    @override
    def wait(self, seconds: float) -> None:
        self._together.wait(seconds)


def load_sharded(load: Callable[[], PreTrainedModel], device: torch.device) -> Sharded:
    """Load a model on every process; those of one machine take turns, so it holds one whole copy at a time.

    Args:
        load: the model, on the host.
        device: of this process.

    Raises:
        UserError: there is one process alone, or they have no process group.
    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        raise UserError(
            "target.placement=sharded: needs train.py with several processes (trainer=ddp, fsdp or "
            "deepspeed_1 to _3, and trainer.devices); one process has replicated and device_map"
        )
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    rank = distributed.get_rank()
    hosts: list[Any] = [None] * mesh.size()
    distributed.all_gather_object(hosts, socket.gethostname())
    made: tuple[PreTrainedModel, str] | None = None
    for turn in range(max(Counter(hosts).values())):
        if turn == hosts[:rank].count(hosts[rank]):
            model = load()
            made = model, Target(model).fingerprint()
            shard(model, mesh, device)
        distributed.barrier()
    assert made
    return Sharded(*made)


def shard(model: Any, mesh: DeviceMesh, device: torch.device) -> None:
    """Cut up the decoder layers of a frozen model on the host, and move it to a device layer by layer.

    Communicates nothing: every process of the mesh keeps its part of weights that all have.
    """
    whole = Target(model)
    layers: Any = whole.layers
    outside = set(model.parameters()) - set(layers.parameters())
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    model.to(device)
    # A root without weights of its own: what gathers one layer while another computes is shared.
    fully_shard(whole.base, mesh=mesh, ignored_params=outside)
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
