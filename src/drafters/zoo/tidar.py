"""TiDAR (Liu et al., arXiv:2511.08923): a target that drafts and verifies in one pass, trained for both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

from torch.nn import functional as F
from typing_extensions import override

from decode.errors import UserError
from decode.model.causal_lm import CausalLM
from decode.model.target import Target
from decode.transfer import upload
from drafters.base import Batch, DraftStep, ParamGroup
from drafters.hf.tuned_target import Lora
from drafters.zoo.prompt import Prompt


class Tidar(Prompt):
    """Prompts, and a LoRA of the target that is trained together with them.

    The prompts are the paper's masks: the LoRA learns to fill them in and to keep the target's predictions.
    The original target is the teacher of both (in the paper, the text):

        loss = divergence(original, tuned) + drafts * sum_j w_j divergence(original, prompt j).

    Decoding is lossless with respect to the tuned target, `verifier`, not to the original.

    Args:
        lora: arguments of `Lora`.
        drafts: weight of the prompts' loss; the tuned target's loss has weight 1.
        lora_lr: ratio of the LoRA's learning rate to the optimizer's.
        **options: of `Prompt`.

    Raises:
        UserError: see `Prompt`; a number out of range.
    """

    traits = replace(Prompt.traits, tunes_target=True)

    def __init__(self, lora: dict[str, Any], drafts: float, lora_lr: float, **options: Any) -> None:
        super().__init__(**options)
        self.lora = Lora(**lora)
        self.drafts, self.lora_lr = drafts, lora_lr
        self.settings |= {"lora": lora, "drafts": drafts, "lora_lr": lora_lr}
        for name in ("drafts", "lora_lr"):
            if self.settings[name] <= 0:
                raise UserError(f"drafter.{name}={self.settings[name]}: must be more than 0")

    @override
    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        lora = Lora.settings_for(target, options["lora"])
        return super().for_target(target, **options | {"lora": lora})

    @override
    def trained_model(self, target: Target) -> CausalLM:
        return self.lora.adapted(target)

    @override
    def unroll(self, batch: Batch, target: Target) -> Iterator[DraftStep]:
        chosen, weight = self.sample(batch)
        last, ahead = self.read(batch, target, chosen)
        written = F.pad(batch.loss_mask[:, 1:], (0, 1)).flatten().nonzero()[:, 0]  # (M,) on the host
        if len(written):
            place = upload(written.numpy(), last.device)
            yield DraftStep(last.flatten(0, 1)[place], written, 0, target.head, {}, copied=place)
        yield from self.depths(ahead, chosen, self.drafts * weight, batch, target)

    @override
    def checkpoint_gradients(self) -> None:
        self.lora.checkpointing = True

    @override
    def param_groups(self) -> list[ParamGroup]:
        (group,) = super().param_groups()
        return self.lora.split_group(group, self._lora_rate)

    def _lora_rate(self, progress: float) -> float:
        del progress
        return self.lora_lr

    @override
    def verifying(self, target: Target) -> Target:
        return self.lora.merge(target)
