"""DDP, DeepSpeed and FSDP2 through Lightning, on GPU or CPU; gather sharded weights for saving."""

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
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.serialization import safe_globals
from typing_extensions import override

from decode.errors import UserError
from decode.model.placement.sharded import GROUP_TIMEOUT
from distill.training.module import DistillModule
from distill.training.optim import CombinedOptimizer
from drafters import optional
from drafters.base import Drafter


class DDP(DDPStrategy):
    """DDP with a timeout long enough for rank 0 to score while the others wait.

    After its first step DDP would lay out gradients in the order in which they came, and with more than two
    processes the place of a gradient decides the order in which it is added up. So a resumed run would
    differ in its last bits. With `find_unused_parameters` the layout stays.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("find_unused_parameters", True)
        super().__init__(timeout=GROUP_TIMEOUT, **options)

    @override
    def configure_ddp(self) -> None:
        # DDP would warn of all runs that use all weights. It gets one that none uses, and no one else sees.
        module = self.lightning_module
        assert module is not None
        module.register_parameter("unused", nn.Parameter(torch.zeros(1, device=self.root_device)))
        super().configure_ddp()
        delattr(module, "unused")


class FSDP(ModelParallelStrategy):
    """FSDP2 over all processes: weights, gradients and optimizer states are sharded.

    `DistillModule.configure_model` decides which modules are sharded together. The trainer's state is
    saved unsharded in one file.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(
            tensor_parallel_size=1, save_distributed_checkpoint=False, timeout=GROUP_TIMEOUT, **options
        )

    @override
    def setup_environment(self) -> None:
        # private API: the public argument must be given before the number of processes is known.
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


class _Precision(DeepSpeedPrecision):
    """Does not cast batches: hidden states of the teacher keep their dtype."""

    @override
    def convert_input(self, data: Any) -> Any:
        return data

    @override
    def backward(
        self, tensor: Tensor, model: L.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        # Lightning has already divided the loss by the accumulation; the engine must not do it again.
        super().backward(tensor, model, optimizer, *args, scale_wrt_gas=False, **kwargs)


class DeepSpeed(DeepSpeedStrategy):
    """DeepSpeed ZeRO stages 1 to 3; `bf16-mixed` means fp32 weights and bf16 products, as elsewhere.

    `bf16-true` is DeepSpeed's own bf16 mode: bf16 weights, fp32 master weights in the optimizer.

    Args:
        stage: 1 shards optimizer states, 2 also gradients, 3 also weights.
        zero: further entries of DeepSpeed's `zero_optimization` section.
        **options: of Lightning's `DeepSpeedStrategy`.
    """

    def __init__(self, stage: int, zero: Mapping[str, Any] | None = None, **options: Any) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # Frozen weights belong to the target or the base of adapters, and are not saved.
        fixed: dict[str, Any] = {"exclude_frozen_parameters": True, "timeout": GROUP_TIMEOUT}
        fixed["logging_level"] = logging.ERROR
        # DeepSpeed logs the batch size; without it Lightning would search the data loader for it.
        super().__init__(stage=stage, logging_batch_size_per_gpu=1, **fixed, **options)
        self.zero = dict(zero or {})
        if self.zero:
            from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum

            # Validate now, not after hours of rollouts.
            DeepSpeedZeroConfig(stage=ZeroStageEnum(stage), **self.zero)

    @property
    def on_cpu(self) -> bool:
        """Whether DeepSpeed runs on a CPU, which Lightning rejects in two checks that are bypassed here."""
        return isinstance(self.accelerator, CPUAccelerator)

    @property
    @override
    def root_device(self) -> torch.device:
        # DeepSpeed needs a device index.
        return torch.device("cpu", 0) if self.on_cpu else super().root_device

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        precision: Any = precision_plugin and precision_plugin.precision
        parent: Any = DeepSpeedStrategy.precision_plugin
        parent.fset(self, _Precision(precision) if precision else None)

    @override
    def setup_environment(self) -> None:
        if not self.on_cpu:
            return super().setup_environment()
        if os.environ.get("DS_ACCELERATOR") != "cpu":
            raise UserError("trainer.accelerator=cpu: set DS_ACCELERATOR=cpu too, or DeepSpeed takes the GPU")
        return super(DeepSpeedStrategy, self).setup_environment()  # skips the check for CUDA

    @override
    def setup_distributed(self) -> None:
        if not self.on_cpu:
            return super().setup_distributed()
        import deepspeed

        # Otherwise DeepSpeed tests the compilation of all of its ops, and compiles a shared-memory reduce.
        ops: Any = deepspeed.ops
        ops.__compatible_ops__ = {}
        # private API: Lightning's public `setup_distributed` rejects a CPU; these are its other lines.
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
            # Reduce all gradients in fp32, as other strategies do.
            autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
            self.config["torch_autocast"] = autocast

    @override  # private API: parameters must be registered just before DeepSpeed's engine is made
    def _initialize_deepspeed_train(self, model: torch.nn.Module) -> None:
        if self.zero_stage_3:
            from deepspeed.runtime.zero import register_external_parameter

            assert isinstance(model, DistillModule)
            block_weights = {
                id(w) for block in optional.shardable_modules(model.drafter) for w in block.parameters()
            }
            for weight in model.parameters():
                if id(weight) not in block_weights:  # gathered during the whole training step
                    register_external_parameter(model, weight)
        super()._initialize_deepspeed_train(model)  # private API: as above

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load without arbitrary pickled objects: only tensors and the four classes that DeepSpeed saves."""
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        engine: Any = self.deepspeed_engine
        engine.checkpoint_engine.load = _load
        with safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            return super().load_checkpoint(checkpoint_path, weights_only)


def _load(path: str, map_location: Any = None) -> dict[str, Any]:
    return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only=True)


def check_placement(trainer: L.Trainer, placement: str) -> None:
    """Refuse a placement that is for one process.

    Raises:
        UserError: target.placement=device_map with several processes.
    """
    if trainer.world_size > 1 and placement == "device_map":
        raise UserError(
            "target.placement=device_map: is for one process; several have replicated and sharded"
        )


def join_processes(trainer: L.Trainer) -> None:
    """Start and join the other processes before the fit, so that they share the rollouts.

    `Trainer.fit` then finds them running. Does nothing if there is one process, or if they have joined.
    """
    if trainer.world_size == 1 or distributed.is_initialized():
        return
    strategy: Any = trainer.strategy
    # FSDP creates its device mesh in the fit, where there is a module.
    # private API: Lightning has no public way to join the other processes before the fit.
    join = strategy._setup_distributed if isinstance(strategy, FSDP) else strategy.setup_environment
    if strategy.launcher:
        strategy.launcher.launch(join, trainer=trainer)
    else:
        join()
    strategy.barrier()  # a process that fails right away must not disturb the handshake of the others


def check_optimizer(trainer: L.Trainer, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that needs whole matrices where weights are sharded.

    Raises:
        UserError: Muon with a strategy that shards.
    """
    if isinstance(optimizer, CombinedOptimizer) and isinstance(trainer.strategy, DeepSpeed | FSDP):
        raise UserError("optimizer=muon needs whole matrices, and this trainer cuts them up; use trainer=ddp")


def check_strategy(trainer: L.Trainer, drafter: Drafter, on_policy: bool) -> None:
    """Refuse options that the strategy does not support, or treats differently from the others.

    Args:
        trainer: with its strategy.
        drafter: that will be trained.
        on_policy: whether the drafter generates answers during training.

    Raises:
        UserError: on-policy answers of a sharded drafter; a confidence head under DeepSpeed, which
            would clip its gradient together with the others.
    """
    if on_policy and shards_weights(trainer):
        raise UserError(
            "on_policy: the drafter writes with whole weights, and this trainer cuts them up; use "
            "trainer=ddp, deepspeed_1 or deepspeed_2"
        )
    if drafter.confidence and isinstance(trainer.strategy, DeepSpeed) and trainer.gradient_clip_val:
        raise UserError(
            "drafter.confidence=true: DeepSpeed clips its gradient together with the drafter's; set "
            "trainer.gradient_clip_val=null, or use trainer=ddp or fsdp"
        )


def shards_weights(trainer: L.Trainer) -> bool:
    """Whether weights themselves are sharded between steps (FSDP, ZeRO-3)."""
    strategy = trainer.strategy
    return isinstance(strategy, FSDP) or (isinstance(strategy, DeepSpeed) and strategy.zero_stage_3)


def gather_weights(trainer: L.Trainer, drafter: Drafter) -> Mapping[str, Tensor]:
    """Unsharded weights and buffers of a drafter; must be called on every rank.

    Returns:
        The drafter's state dict, in fp32 where the optimizer has master weights. Weights that the drafter
        borrows may stay sharded; ranks other than 0 may get a part only.
    """
    strategy = trainer.strategy
    if isinstance(strategy, DeepSpeed):
        return _gather_zero_weights(drafter)
    if isinstance(strategy, FSDP):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: Any = get_model_state_dict(drafter, options=options)
        return weights
    return drafter.state_dict()


def _gather_zero_weights(drafter: Drafter) -> dict[str, Tensor]:
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    weights = dict(drafter.state_dict())  # includes buffers, and all names of shared weights
    gathered: dict[int, Tensor] = {}  # by id, so that a shared weight is gathered once
    for name, value in drafter.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.nn.Parameter) or name in optional.unsaved_names(drafter):
            continue
        if id(value) not in gathered:
            master = safe_get_full_fp32_param(value) if value.requires_grad else None
            if master is None:
                with GatheredParameters([value]):
                    master = value.detach().clone()
            gathered[id(value)] = master
        weights[name] = gathered[id(value)]
    return weights
