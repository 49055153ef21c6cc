"""A target with decoder layers sharded over processes (FSDP2).

FSDP2 gathers a layer when the forward pass reaches it and frees it afterwards, so all processes must
take part in every pass. Processes may run different inputs and different numbers of passes: an idle
process takes part in the gathers of the others (`join`, `idle`). Embedding, final norm and head are full
copies on every process, because drafters and objectives use them. The weights do not belong to a trained
module, so checkpoints do not contain them.
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

# Other processes wait while one scores a checkpoint, possibly for hours; launchers end them if it dies.
GROUP_TIMEOUT = timedelta(days=1)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # signals that a run may handle
POLL_SECONDS = 0.02  # interval of checks whether another process runs a pass


class LayerGather:
    """Coordinates the gathers of sharded layers between processes.

    Each step begins with an all-reduce of two counts: processes that run a forward pass, and processes
    that are busy, i.e. have not joined. If any runs a pass, all gather each layer in turn.

    Args:
        layers: sharded layers, in the order of a forward pass.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self._layers: Any = list(layers)
        # On the host: no device synchronisation, and a dead process is noticed at once.
        self._group = distributed.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        # Buffers of the first gather are reused by all others, with and without inference mode.
        with torch.inference_mode(False):
            self._gather()

    def begin_pass(self) -> None:
        """Announce a forward pass; its hooks gather the layers."""
        self._agree(passes=1, busy=1)

    def visit(self, visitor: Callable[[nn.Module], None]) -> None:
        """Gather all layers and call `visitor` with each while it is unsharded."""
        self._agree(passes=1, busy=1)
        self._gather(visitor)

    def join(self) -> None:
        """Take part in the passes of other processes until all have joined."""
        while self._take_part(busy=0)[1]:
            pass

    def idle(self, seconds: float) -> None:
        """Take part in the passes of other processes for at least this long, until the current pass ends."""
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            if not self._take_part(busy=1)[0]:
                time.sleep(min(remaining, POLL_SECONDS))

    def _take_part(self, busy: int) -> list[int]:
        counts = self._agree(0, busy)
        if counts[0]:
            self._gather()
        return counts

    def _agree(self, passes: int, busy: int) -> list[int]:
        """Sums over processes: [running passes, busy processes]."""
        sums = torch.tensor([passes, busy])
        distributed.all_reduce(sums, group=self._group)
        return sums.tolist()

    def _gather(self, visitor: Callable[[nn.Module], None] = lambda _: None) -> None:
        for layer in self._layers:
            layer.unshard()
            visitor(layer)
            layer.reshard()


class DeferredSignals:
    """Defers signal handlers to the end of a forward pass.

    An exception raised by a handler within a pass would leave the other processes blocked in it.
    """

    def __init__(self) -> None:
        self._handlers: dict[signal.Signals, Any] = {}
        self._received: list[int] = []

    def begin(self) -> None:
        """Start deferring; does nothing outside the main thread, where handlers run."""
        if threading.current_thread() is not threading.main_thread():
            return
        # Signals without a Python handler raise no exception and keep their effect.
        self._handlers = {s: handler for s in SIGNALS if callable(handler := signal.getsignal(s))}
        for number in self._handlers:
            signal.signal(number, lambda number, _: self._received.append(number))

    def end(self) -> None:
        """Restore the handlers and raise the signals received meanwhile."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        received, self._received, self._handlers = self._received, [], {}
        for number in received:
            signal.raise_signal(number)


class Sharded(Target):
    """A target with layers sharded by `shard`; must be constructed on every process at the same time.

    Decoder timings include the gathers. Weights cannot be merged, copied or trained.

    Args:
        model: after `shard`.
        name: fingerprint of the unsharded model; it does not reflect in-place changes of shards.
    """

    movable = False

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        super().__init__(model)
        self._name = name
        self._gatherer, self._signals = LayerGather(self.layers), DeferredSignals()
        # Runs before FSDP's hooks. A model with hooks is never `Fused`.
        self.base.register_forward_pre_hook(lambda *_: self._begin(), prepend=True)
        self.base.register_forward_hook(lambda *_: self._signals.end(), always_call=True)

    def _begin(self) -> None:
        self._signals.begin()
        self._gatherer.begin_pass()

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
        """Full weights of a decoder layer; other processes take part through `join` or `idle`."""
        state: dict[str, Tensor] = {}

        def copy_weights(layer: nn.Module) -> None:
            if layer is part:
                full = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
                state.update({name: full[name].detach().clone() for name in names})

        names = part.state_dict().keys()
        self._signals.begin()
        try:
            self._gatherer.visit(copy_weights)
        finally:
            self._signals.end()
        return state

    @override
    def join(self) -> None:
        self._gatherer.join()

    @override
    def idle(self, seconds: float) -> None:
        self._gatherer.idle(seconds)


def load_sharded(load: Callable[[], PreTrainedModel], device: torch.device) -> Sharded:
    """Load and shard a model on every process.

    The processes of one machine take turns, so that a machine holds only one full copy at a time.

    Args:
        load: loads the model on the host.
        device: device of this process.

    Raises:
        UserError: there is no process group, or only one process.
    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        raise UserError(
            "target.placement=sharded: needs foredraft train with several processes (trainer=ddp, fsdp or "
            "deepspeed_1 to _3, and trainer.devices); one process has replicated and device_map"
        )
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    rank = distributed.get_rank()
    hosts: list[Any] = [None] * mesh.size()
    distributed.all_gather_object(hosts, socket.gethostname())
    loaded: tuple[PreTrainedModel, str] | None = None
    for turn in range(max(Counter(hosts).values())):
        if turn == hosts[:rank].count(hosts[rank]):
            model = load()
            loaded = model, Target(model).fingerprint()
            shard(model, mesh, device)
        distributed.barrier()
    assert loaded
    return Sharded(*loaded)


def shard(model: Any, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard the decoder layers of a frozen model on the host, then move it to a device.

    Needs no communication: every process of the mesh has all weights and keeps its shard.
    """
    target = Target(model)
    layers: Any = target.layers
    outside = set(model.parameters()) - set(layers.parameters())
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    model.to(device)
    # The root has no sharded weights, only the streams that its layers share for prefetching.
    fully_shard(target.base, mesh=mesh, ignored_params=outside)
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
