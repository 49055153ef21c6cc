"""Rounds timed in transformers' own assisted generation, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer
from typing_extensions import override

from distill.engine_costs.measure import Counted


class TransformersRounds:
    """A `TimedEngine`: a fresh copy of the target, as a user of transformers would load it.

    Args:
        source: folder or hub id of the target, and its revision.
        drafter: folder of the drafter, exported with `to=transformers`.
        kind: lm | dflash | mtp.
        dtype: of the weights.
        device: where to compute.
        sampler: temperature and filters.
        clock: seconds, as a clock.
    """

    def __init__(
        self,
        source: tuple[str | Path, str | None],
        drafter: Path,
        kind: str,
        dtype: torch.dtype,
        device: torch.device,
        sampler: dict[str, float],
        clock: Callable[[], float],
    ) -> None:
        self.name = f"transformers {transformers.__version__}"
        self.source, self.drafter, self.kind = source, drafter, kind
        self.dtype, self.device, self.sampler, self.clock = dtype, device, sampler, clock

    @contextmanager
    def plain(self) -> Iterator[TransformersDecoder]:
        """Load the target."""
        name, revision = self.source
        self.target = self._ready(
            AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=self.dtype)
        )
        yield TransformersDecoder(self.target, {}, self.sampler, self.clock)

    @contextmanager
    def drafting(self, length: int) -> Iterator[TransformersDecoder]:
        """Load the drafter; `plain` has loaded the target."""
        target, options = self.target, {}
        if self.kind == "mtp":  # a head of the target's own class
            name, revision = self.source
            config = AutoConfig.from_pretrained(self.drafter)
            target = self._ready(
                AutoModelForCausalLM.from_pretrained(name, revision=revision, config=config, dtype=self.dtype)
            )
            target.config.name_or_path = str(self.drafter)
            options = {"use_mtp": True}
        elif self.kind == "dflash":
            drafter = self._ready(AutoModel.from_pretrained(self.drafter, dtype=self.dtype))
            options = {"assistant_model": drafter, "speculation_type": "dflash"}
        else:
            drafter = self._ready(AutoModelForCausalLM.from_pretrained(self.drafter, dtype=self.dtype))
            drafter.generation_config.num_assistant_tokens = length
            options = {"assistant_model": drafter}
        yield TransformersDecoder(target, options, self.sampler, self.clock)

    def _ready(self, model: Any) -> Any:
        if model.can_generate():
            model.generation_config.eos_token_id = None  # answers of a fixed length
        return model.eval().to(self.device)


class TransformersDecoder:
    """`generate` of a model.

    Args:
        model: the target.
        options: arguments of `generate` that make it draft.
        sampler: temperature and filters.
        clock: seconds, as a clock.
    """

    def __init__(
        self, model: Any, options: dict[str, Any], sampler: dict[str, float], clock: Callable[[], float]
    ) -> None:
        self.model, self.options, self.clock = model, options, clock
        self.sampler = {"do_sample": True, **sampler} if sampler["temperature"] else {"do_sample": False}

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> Counted:
        """See `Decoder.answer`; prompts are answered one after another, as assisted generation does."""
        each = [self._answer(prompt, tokens) for prompt in prompts]
        return Counted(**{name: sum(getattr(one, name) for one in each) for name in Counted.__slots__})

    def _answer(self, prompt: Sequence[int], tokens: int) -> Counted:
        written, drafted = _Written(self.clock), []

        def count(module: Any, args: Any, kwargs: Any) -> None:
            del module
            ids = kwargs.get("input_ids", args[0] if args else None)
            drafted.append(ids.shape[1] - 1)

        ids = torch.tensor([prompt], device=self.model.device)
        handle = self.model.register_forward_pre_hook(count, with_kwargs=True)
        begun = self.clock()
        try:
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                streamer=written,
                pad_token_id=0,
                **self.sampler,
                **self.options,
            )
        finally:
            handle.remove()
        first, last = written.rounds[0][0], written.rounds[-1][0]
        return Counted(
            rounds=len(written.rounds) - 1,
            tokens=sum(n for _, n in written.rounds[1:]),
            drafted=sum(drafted[1:]),  # of the first pass the prompt
            seconds=last - first,
            prompt_tokens=len(prompt),
            prompt_seconds=first - begun,
        )

    @torch.no_grad()
    def pass_seconds(self, prompt: Sequence[int], tokens: int) -> float:
        """See `Decoder.pass_seconds`; all of its tokens get logits."""
        ids = torch.tensor([prompt], device=self.model.device)
        cache = self.model(ids, use_cache=True).past_key_values
        new = ids[:, -1:].expand(1, tokens).contiguous()
        begun = self.clock()
        logits = self.model(new, past_key_values=cache, use_cache=True).logits
        logits[0, -1].argmax().item()
        return self.clock() - begun


class _Written(BaseStreamer):
    """When tokens came, and how many.

    Args:
        clock: seconds, as a clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.prompt = clock, True
        self.rounds: list[tuple[float, int]] = []

    @override
    def put(self, value: torch.Tensor) -> None:
        if self.prompt:
            self.prompt = False
            return
        self.rounds.append((self.clock(), value.numel()))

    @override
    def end(self) -> None:
        pass
