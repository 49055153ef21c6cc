"""DeepSpeed and FSDP2 through Lightning, on a GPU or a CPU, and their states as one consolidated file."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
)
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.serialization import safe_globals
from typing_extensions import override

from decode.errors import UserError
from decode.model.sharded import GROUP_TIMEOUT
from distill.training.module import DistillModule
from distill.training.optim import Joint
from drafters.base import Drafter


class DDP(DDPStrategy):
    """Whole copies, averaged gradients; ranks wait for as long as the first one scores."""

    def __init__(self, **options: Any) -> None:
        super().__init__(timeout=GROUP_TIMEOUT, **options)


class FSDP(ModelParallelStrategy):
    """FSDP2 over all processes: weights, gradients and optimizer states in parts.

    What is gathered together is the module's to say (`DistillModule.configure_model`). The trainer's
    state is one file with everything whole, so that any number of processes can read it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(
            tensor_parallel_size=1, save_distributed_checkpoint=False, timeout=GROUP_TIMEOUT, **options
        )

    @override
    def setup_environment(self) -> None:
        # private API: the public argument is due before the number of processes is known.
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


class _OurPrecision(DeepSpeedPrecision):
    """Leaves batches as they are: the teacher's rows are not to be rounded with the drafter's inputs."""

    @override
    def convert_input(self, data: Any) -> Any:
        return data

    @override
    def backward(
        self, tensor: Tensor, model: L.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        # Lightning has divided the loss by the accumulation; the engine would do it again.
        super().backward(tensor, model, optimizer, *args, scale_wrt_gas=False, **kwargs)


class DeepSpeed(DeepSpeedStrategy):
    """ZeRO stages 1 to 3, with `bf16-mixed` as elsewhere: fp32 weights, bf16 products.

    `bf16-true` is DeepSpeed's own bf16: weights in two bytes, fp32 masters in the optimizer.

    Args:
        stage: 1 partitions optimizer states, 2 gradients too, 3 weights too.
        zero: more of DeepSpeed's `zero_optimization` section.
        **options: Lightning's.
    """

    def __init__(self, stage: int, zero: Mapping[str, Any] | None = None, **options: Any) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # Frozen weights are the target's, or the base of adapters: neither belongs into a checkpoint.
        fixed: dict[str, Any] = {"exclude_frozen_parameters": True, "timeout": GROUP_TIMEOUT}
        fixed["logging_level"] = logging.ERROR
        # The batch size is for DeepSpeed's own log; Lightning would look for it in the loader.
        super().__init__(stage=stage, logging_batch_size_per_gpu=1, **fixed, **options)
        self.zero = dict(zero or {})
        if self.zero:
            from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum

            # Refuses what is wrong before hours of rollouts.
            DeepSpeedZeroConfig(stage=ZeroStageEnum(stage), **self.zero)

    @property
    def on_cpu(self) -> bool:
        """Lightning refuses this; nothing but two checks of its own stands in the way."""
        return isinstance(self.accelerator, CPUAccelerator)

    @property
    @override
    def root_device(self) -> torch.device:
        # DeepSpeed wants an index, which the one CPU has not.
        return torch.device("cpu", 0) if self.on_cpu else super().root_device

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        chosen: Any = precision_plugin and precision_plugin.precision
        parent: Any = DeepSpeedStrategy.precision_plugin
        parent.fset(self, _OurPrecision(chosen) if chosen else None)

    @override
    def setup_environment(self) -> None:
        if not self.on_cpu:
            return super().setup_environment()
        if os.environ.get("DS_ACCELERATOR") != "cpu":
            raise UserError("trainer.accelerator=cpu: set DS_ACCELERATOR=cpu too, or DeepSpeed takes the GPU")
        return super(DeepSpeedStrategy, self).setup_environment()  # past the check for CUDA

    @override
    def setup_distributed(self) -> None:
        if not self.on_cpu:
            return super().setup_distributed()
        import deepspeed

        # It would try the linker on every op that it has, and compile its sum over shared memory.
        ops: Any = deepspeed.ops
        ops.__compatible_ops__ = {}
        # private API: Lightning's public `setup_distributed` refuses a CPU; these are its other lines.
        self._process_group_backend = "gloo"
        reset_seed()
        self.set_world_ranks()
        return self._init_deepspeed_distributed()  # private API: as above

    @override  # private API: a public `config` replaces all of Lightning's, and cannot be read back
    def _format_config(self) -> None:
        super()._format_config()  # private API: as above
        assert isinstance(self.config, dict)
        self.config["zero_optimization"] |= self.zero
        if self.precision_plugin.precision == "bf16-mixed":
            del self.config["bf16"]
            # No module's gradients travel in bf16: those of other strategies do not.
            low = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
            self.config["torch_autocast"] = low

    @override  # private API: parameters must be registered just before DeepSpeed's engine is made
    def _initialize_deepspeed_train(self, model: torch.nn.Module) -> None:
        if self.zero_stage_3:
            from deepspeed.runtime.zero import register_external_parameter

            assert isinstance(model, DistillModule)
            apart = {id(w) for block in model.drafter.shardable_modules() for w in block.parameters()}
            for weight in model.parameters():
                if id(weight) not in apart:  # gathered for the whole of a training step
                    register_external_parameter(model, weight)
        super()._initialize_deepspeed_train(model)  # private API: as above

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """DeepSpeed would make whatever a file says; here, tensors and the four classes that it saves."""
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        engine: Any = self.deepspeed_engine
        engine.checkpoint_engine.load = _load
        with safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            return super().load_checkpoint(checkpoint_path, weights_only)


def _load(path: str, map_location: Any = None) -> dict[str, Any]:
    return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only=True)


def join_others(trainer: L.Trainer, placement: str) -> None:
    """Start the other processes and join them before the fit, where they hold the target together.

    The fit does both again, and finds them done.

    Raises:
        UserError: a placement that is one process's, and there are several.
    """
    if trainer.world_size == 1 or placement == "replicated":
        return
    if placement == "device_map":
        raise UserError(
            "target.placement=device_map: is for one process; several have replicated and sharded"
        )
    strategy: Any = trainer.strategy
    # FSDP's mesh is the fit's, which has a module to give it to.
    # private API: Lightning has no public way to join the other processes before the fit.
    join = strategy._setup_distributed if isinstance(strategy, FSDP) else strategy.setup_environment
    if strategy.launcher:
        strategy.launcher.launch(join, trainer=trainer)
    else:
        join()
    strategy.barrier()  # or one that leaves at once with an error would trouble others in their greeting


def check_optimizer(trainer: L.Trainer, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that needs whole matrices where each process has but a part of them.

    Raises:
        UserError: Muon, and a strategy that partitions.
    """
    if isinstance(optimizer, Joint) and isinstance(trainer.strategy, DeepSpeed | FSDP):
        raise UserError("optimizer=muon needs whole matrices, and this trainer cuts them up; use trainer=ddp")


def check_strategy(trainer: L.Trainer, drafter: Drafter, on_policy: bool) -> None:
    """Refuse what the trainer's strategy cannot do, or would do in another way than the others.

    Args:
        trainer: with its strategy.
        drafter: that will be trained.
        on_policy: whether it answers prompts itself, between the weights' being cut up and put together.

    Raises:
        UserError: a confidence head, whose gradient DeepSpeed would clip with the others; answers of a
            drafter of which every process has but a part.
    """
    if on_policy and cuts_weights(trainer):
        raise UserError(
            "on_policy: the drafter writes with whole weights, and this trainer cuts them up; use "
            "trainer=ddp, deepspeed_1 or deepspeed_2"
        )
    if drafter.confidence and isinstance(trainer.strategy, DeepSpeed) and trainer.gradient_clip_val:
        raise UserError(
            "drafter.confidence=true: DeepSpeed clips its gradient together with the drafter's; set "
            "trainer.gradient_clip_val=null, or use trainer=ddp or fsdp"
        )


def cuts_weights(trainer: L.Trainer) -> bool:
    """Whether a process has but a part of the weights themselves between steps."""
    strategy = trainer.strategy
    return isinstance(strategy, FSDP) or (isinstance(strategy, DeepSpeed) and strategy.zero_stage_3)


def consolidated(trainer: L.Trainer, drafter: Drafter) -> Mapping[str, Tensor]:
    """Whole weights and buffers of a drafter, however they are cut up; to be called on every rank.

    Returns:
        The drafter's state dict, in fp32 where the optimizer has masters; what it borrows may be in parts,
        and other ranks than the first may get less.
    """
    strategy = trainer.strategy
    if isinstance(strategy, DeepSpeed):
        return _of_zero(drafter)
    if isinstance(strategy, FSDP):
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: Any = get_model_state_dict(drafter, options=whole)
        return weights
    return drafter.state_dict()


def _of_zero(drafter: Drafter) -> dict[str, Tensor]:
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    found = dict(drafter.state_dict())  # buffers, and names that share a weight
    known: dict[int, Tensor] = {}
    for name, value in drafter.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.nn.Parameter) or name in drafter.unsaved_names:
            continue
        if id(value) not in known:
            master = safe_get_full_fp32_param(value) if value.requires_grad else None
            if master is None:
                with GatheredParameters([value]):
                    master = value.detach().clone()
            known[id(value)] = master
        found[name] = known[id(value)]
    return found
