"""A target with layers on several devices, in host memory and on disk, in one process.

accelerate's hooks move a layer's input to its device. Weights of layers in host memory or on disk are
copied to the first device while the layer computes. Embedding, final norm and head stay on the first
device, because drafters and objectives use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from decode.errors import UserError
from decode.model.target import Target

WEIGHTS_SHARE = 0.8  # default share of free memory for weights; the rest is for cache, drafter, activations
OFFLOADED = ("cpu", "disk")
Place = int | str  # index of a GPU, or one of OFFLOADED


class Offloaded(Target):
    """A target dispatched by accelerate. Its weights cannot be merged, copied or trained.

    Args:
        model: after `dispatch_model`.
        places: place of every decoder layer.
    """

    movable = False

    def __init__(self, model: PreTrainedModel, places: list[Place]) -> None:
        super().__init__(model)
        of_layer = [
            self.device if place in OFFLOADED else torch.device("cuda", int(place)) for place in places
        ]
        devices = list(dict.fromkeys(of_layer))
        self._places = [devices.index(device) for device in of_layer]

    @override
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As `Target.tensors`; tensors in host memory or on disk are moved to the first device one by one."""
        from accelerate.utils import align_module_device  # only needed for offloaded targets

        for prefix, module in self.model.named_modules(remove_duplicate=False):
            children = {name for name, _ in module.named_children()}
            with align_module_device(module):
                for name, tensor in module.state_dict().items():
                    if name.split(".")[0] not in children:
                        yield f"{prefix}.{name}".lstrip("."), tensor

    @override
    def weights(self, part: nn.Module) -> dict[str, Tensor]:
        from accelerate.utils import align_module_device  # only needed for offloaded targets

        state: dict[str, Tensor] = {}
        for name, module in part.named_modules():
            with align_module_device(module):
                tensors = {key: value for key, value in module.state_dict().items() if "." not in key}
                state |= {
                    f"{name}.{key}".lstrip("."): value.to("cpu", copy=True) for key, value in tensors.items()
                }
        return state


def load_offloaded(
    load: Callable[..., PreTrainedModel],
    empty: PreTrainedModel,
    device: torch.device,
    max_memory: Mapping[Place, int | str] | None = None,
    offload_folder: str | None = None,
) -> Offloaded:
    """Load a model with each layer on the first device that has room.

    Args:
        load: loads the model, given keyword arguments of `from_pretrained`.
        empty: the same model on the meta device.
        device: first device; also computes the layers in host memory or on disk.
        max_memory: device -> bytes, or text such as 20GiB; None: a share of the free memory.
        offload_folder: for weights on disk in another format than their file.

    Raises:
        UserError: an invalid `max_memory`, or no room for embedding, norm, head and a layer.
    """
    first: Place = "cpu" if device.type == "cpu" else device.index or 0
    budget = _memory_budget(first, max_memory)
    target = Target(empty)
    places = assign_layers(target, first, budget)
    stack = next(name for name, module in empty.named_modules() if module is target.layers)
    device_map: dict[str, Place] = dict.fromkeys(_modules_without(empty, target.layers), first)
    device_map |= {f"{stack}.{number}": place for number, place in enumerate(places)}
    return Offloaded(load(device_map=device_map, offload_folder=offload_folder), places)


def assign_layers(target: Target, first: Place, budget: Mapping[Place, int]) -> list[Place]:
    """Place of each decoder layer. Devices are filled in order; layers without room go to disk.

    Args:
        target: may be on the meta device.
        first: device of embedding, norm and head.
        budget: bytes on each device, in order.

    Raises:
        UserError: no room for embedding, norm, head and a layer.
    """
    sizes = [sum(p.numel() * p.itemsize for p in layer.parameters()) for layer in target.layers]
    fixed = target.bytes - sum(sizes)
    free = dict(budget)
    free[first] = free.get(first, 0) - fixed
    if first not in OFFLOADED and sum(sizes) > sum(
        size for place, size in free.items() if place not in OFFLOADED
    ):
        free[first] -= max(sizes)  # buffer for an offloaded layer while it computes
    if free[first] < 0 and first not in OFFLOADED:
        raise UserError(
            f"target.max_memory: device {first} needs {(fixed + max(sizes)) / 2**30:.2f} GiB for embedding, "
            f"norm, head and a layer, and has {budget.get(first, 0) / 2**30:.2f}; raise it"
        )
    order: Iterator[Place] = iter([*free, "disk"])
    places, place = [], next(order)
    for size in sizes:
        while place != "disk" and free[place] < size:
            place = next(order)
        if place != "disk":
            free[place] -= size
        places.append(place)
    return places


def _memory_budget(first: Place, max_memory: Mapping[Place, int | str] | None) -> dict[Place, int]:
    """Bytes for weights on each device; `first` comes first, the host last."""
    from accelerate.utils import get_max_memory

    try:
        budget = dict(get_max_memory(dict(max_memory) if max_memory else None))
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"target.max_memory={max_memory}: {error}; write {{0: 20GiB, cpu: 60GiB}}") from None
    if not max_memory:
        budget = {place: int(WEIGHTS_SHARE * size) for place, size in budget.items()}
    order = [first, *(place for place in budget if place not in (first, "cpu")), "cpu"]
    if first == "cpu":
        order = ["cpu"]
    return {place: int(budget[place]) for place in dict.fromkeys(order) if place in budget}


def _modules_without(module: nn.Module, stack: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of the largest submodules that do not contain the list of decoder layers."""
    for name, child in module.named_children():
        if child is stack:
            continue
        if any(part is stack for part in child.modules()):
            yield from _modules_without(child, stack, f"{prefix}{name}.")
        else:
            yield prefix + name
