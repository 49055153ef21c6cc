"""A target whose layers lie on several devices, in host memory and on disk, in one process.

accelerate's hooks move what enters a layer to where it computes, and the weights of a layer that
lies on the host or on disk to the first device, for as long as it computes. Embedding, final norm
and head stay on the first device, since drafters and objectives read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from decode.errors import UserError
from decode.model.target import Target

FREE = 0.8  # share of what is free that weights get unasked; cache, drafter and activations need the rest
AWAY = ("cpu", "disk")
Place = int | str  # number of a GPU, or one of AWAY


class Spread(Target):
    """A target that accelerate has dispatched. Its weights cannot be merged, copied or tuned.

    Args:
        model: after `dispatch_model`.
        places: of every decoder layer.
    """

    movable = False

    def __init__(self, model: PreTrainedModel, places: list[Place]) -> None:
        super().__init__(model)
        at = [self.device if place in AWAY else torch.device("cuda", int(place)) for place in places]
        devices = list(dict.fromkeys(at))
        self._places = [devices.index(device) for device in at]

    @override
    def weights(self, part: nn.Module) -> dict[str, Tensor]:
        from accelerate.utils import align_module_device  # only who spreads a target needs it

        found: dict[str, Tensor] = {}
        for name, module in part.named_modules():
            with align_module_device(module):
                own = {key: value for key, value in module.state_dict().items() if "." not in key}
                found |= {
                    f"{name}.{key}".lstrip("."): value.to("cpu", copy=True) for key, value in own.items()
                }
        return found


def load_spread(
    load: Callable[..., PreTrainedModel],
    empty: PreTrainedModel,
    device: torch.device,
    max_memory: Mapping[Place, int | str] | None = None,
    offload_folder: str | None = None,
) -> Spread:
    """Load a model so that each layer is where there is room.

    Args:
        load: the model, given transformers' keyword arguments.
        empty: the same without memory.
        device: that comes first, and on which all computes that lies on the host or on disk.
        max_memory: device -> bytes, or text like 20GiB; None: a share of what is free.
        offload_folder: for weights whose form in memory is not that of their file.

    Raises:
        UserError: a `max_memory` that says nothing, or leaves no room for what is not a layer.
    """
    first: Place = "cpu" if device.type == "cpu" else device.index or 0
    room = _room(first, max_memory)
    whole = Target(empty)
    places = layout(whole, first, room)
    stack = next(name for name, module in empty.named_modules() if module is whole.layers)
    where: dict[str, Place] = dict.fromkeys(_beside(empty, whole.layers), first)
    where |= {f"{stack}.{number}": place for number, place in enumerate(places)}
    return Spread(load(device_map=where, offload_folder=offload_folder), places)


def layout(target: Target, first: Place, room: Mapping[Place, int]) -> list[Place]:
    """Where each decoder layer lies: devices are filled in order, the first one with all that is no layer.

    Args:
        target: weights may be without memory.
        first: the device of what is no layer.
        room: bytes on each device, in order; what has no room is left on disk.

    Raises:
        UserError: no room for what is no layer.
    """
    sizes = [sum(p.numel() * p.itemsize for p in layer.parameters()) for layer in target.layers]
    fixed = target.bytes - sum(sizes)
    left = dict(room)
    left[first] = left.get(first, 0) - fixed
    if first not in AWAY and sum(sizes) > sum(size for place, size in left.items() if place not in AWAY):
        left[first] -= max(sizes)  # for a layer that comes from elsewhere to compute
    if left[first] < 0 and first not in AWAY:
        raise UserError(
            f"target.max_memory: device {first} needs {(fixed + max(sizes)) / 2**30:.2f} GiB for embedding, "
            f"norm, head and a layer, and has {room.get(first, 0) / 2**30:.2f}; raise it"
        )
    order: Iterator[Place] = iter([*left, "disk"])
    places, place = [], next(order)
    for size in sizes:
        while place != "disk" and left[place] < size:
            place = next(order)
        if place != "disk":
            left[place] -= size
        places.append(place)
    return places


def _room(first: Place, given: Mapping[Place, int | str] | None) -> dict[Place, int]:
    """Bytes on each device, the first before all others and the host last."""
    from accelerate.utils import get_max_memory

    try:
        room = dict(get_max_memory(dict(given) if given else None))
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"target.max_memory={given}: {error}; write {{0: 20GiB, cpu: 60GiB}}") from None
    if not given:
        room = {place: int(FREE * size) for place, size in room.items()}
    order = [first, *(place for place in room if place not in (first, "cpu")), "cpu"]
    if first == "cpu":
        order = ["cpu"]
    return {place: int(room[place]) for place in dict.fromkeys(order) if place in room}


def _beside(module: nn.Module, stack: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of the largest parts without a layer in them."""
    for name, child in module.named_children():
        if child is stack:
            continue
        if any(part is stack for part in child.modules()):
            yield from _beside(child, stack, f"{prefix}{name}.")
        else:
            yield prefix + name
