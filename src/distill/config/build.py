"""Read and build what a command works with: target, chat template, prompts and drafter."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers

from decode.errors import UserError
from decode.model.causal_lm import max_positions
from decode.model.files.tokenizer_files import check_rows
from decode.model.load import load_config, load_target, load_tokenizer, stop_at, stop_tokens
from decode.model.probe import check_packing
from decode.model.target import Target
from distill.options.answers import PromptOptions, TargetOptions
from distill.options.run import DrafterOptions, HeldOutOptions, RunOptions
from distill.prompts import split
from distill.prompts.chat_template import Chat
from distill.prompts.length import Limit, strictest
from distill.prompts.prompt import Prompt
from distill.prompts.templates import clock
from distill.utils.paths import bundled
from distill.utils.progress import bar, say
from drafters.base import Drafter


@dataclass(frozen=True)
class TargetSource:
    """Location of a target's files, and options to read them; methods raise UserError for invalid files."""

    options: TargetOptions

    @property
    def place(self) -> tuple[str, str | None, bool]:
        """Folder or hub id, revision, and whether its code is trusted: arguments of `load_config`."""
        return str(bundled(self.options.name)), self.options.revision, self.options.trust_remote_code

    def config(self) -> Any:
        """The configuration of its language model."""
        return load_config(*self.place).get_text_config()

    def chat(self, template: str, template_options: Any = None, moment: str | None = None) -> Chat:
        """Check the configuration, and read tokenizer and chat template.

        Args:
            template: chat | none.
            template_options: mapping for the chat template, or None.
            moment: date and time for the template; None: now.
        """
        config = self.config()
        tokenizer = load_tokenizer(*self.place)
        check_rows(tokenizer, config.vocab_size, f"target={self.options.name}")
        if not isinstance(template_options, dict | None):
            raise UserError(
                f"prompts.template_options={template_options}: write it as {{name: value}}, as in "
                "{enable_thinking: false}"
            )
        return Chat(tokenizer, template, template_options, moment)

    def limit(self, prompt_tokens: int | None, row_tokens: int | None = None) -> Limit:
        """Limit on prompt length in tokens; reads only the configuration.

        Args:
            prompt_tokens: maximum length of a prompt, if set.
            row_tokens: maximum length of a training row; None without training.
        """
        return strictest(prompt_tokens, row_tokens, max_positions(self.config()))

    def load(
        self,
        device: torch.device | None = None,
        packing: bool = False,
        decodes: bool = True,
        chat: Chat | None = None,
    ) -> Target:
        """Load and probe the model.

        Args:
            device: device of this process, one of several; None: the device in the options.
            packing: check that several texts packed into a row do not attend to each other.
            decodes: see `load_target`; prints a note if only an engine can decode the target.
            chat: tokenizer and chat template, whose end tokens also end answers (`join_ends`); None: unused.
        """
        options, (path, revision, trusted) = self.options, self.place
        with bar(1, f"loading target {options.name}", "", leave=False):
            target = load_target(
                path,
                options.dtype,
                str(device or options.device),
                revision,
                trusted,
                options.compile,
                options.placement,
                decodes,
                options.capture,
                max_memory=options.max_memory,  # pyright: ignore[reportArgumentType]
                offload_folder=options.offload_folder,
            )
        if reason := target.abilities.decode:
            say(f"target: only an engine can verify drafts for {type(target.model).__name__}: {reason}")
        if packing:
            check_packing(target)
        if chat:
            join_ends(target, chat)
        return target


def join_ends(target: Target, chat: Chat) -> None:
    """End answers at the end tokens of the model's files, its tokenizer and its template.

    Prints a note if these differ.
    """
    ends = chat.ends(stop_tokens(target), target.vocab_size)
    if remark := ends.remark(chat.tokenizer):
        stop_at(target, ends.ids)
        say(remark)


def quiet() -> None:
    """Silence progress bars, warnings and logs of libraries."""
    datasets.disable_progress_bars()
    for module in (r"lightning\.", r"torch\.distributed\."):  # DeepSpeed calls deprecated functions
        warnings.filterwarnings("ignore", module=module)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # httpx, used by huggingface_hub and openai, logs every request.
    for name in ("lightning.pytorch", "lightning.fabric", "datasets", "httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("WANDB_SILENT", "true")


@dataclass(frozen=True)
class PromptReader:
    """Reads the prompts of a command before its target is loaded.

    Args:
        target: options of the target, whose chat template renders the prompts.
        prompts: sources of the prompts.
        score: number of held-out prompts.
        answers: rollout.answers; None without rollouts.
        row_tokens: maximum length of a training row; None without training.
    """

    target: TargetOptions
    prompts: PromptOptions
    score: HeldOutOptions
    answers: str | None = None
    row_tokens: int | None = None

    @classmethod
    def of_run(cls, options: RunOptions) -> PromptReader:
        """The reader of a training run."""
        return cls(
            options.target, options.prompts, options.score, options.rollout.answers, options.max_tokens
        )

    def read(
        self, moment: str | None = None, folder: Path | None = None
    ) -> tuple[Chat, list[Prompt], list[Prompt]]:
        """Check the target's configuration, then read tokenizer and prompts.

        Args:
            moment: date and time for the chat template unless the options set it; None: now.
            folder: run folder that records the prompts.

        Returns:
            The chat template, the training prompts, and the held-out prompts to score (one answer each).
        """
        source, prompts, score = TargetSource(self.target), self.prompts, self.score
        chat = source.chat(prompts.template, prompts.template_options, prompts.moment or moment)
        limit = source.limit(prompts.max_tokens, self.row_tokens)
        result = split.read(prompts, chat, limit, self.answers, score.enabled)
        if score.enabled and not result.held:
            raise UserError(
                f"prompts: none are held out for scoring: {result.none_held}; set prompts.heldout to a file, "
                "or score.enabled=false"
            )
        if folder:
            split.keep_record(result, folder)
        split.describe(result, folder, prompts.self if self.answers == "write" else 0)
        return chat, result.train, result.held[: max(score.prompts, score.replay_prompts)]

    def read_for_run(
        self, folder: Path, moment: str | None = None
    ) -> tuple[Chat, list[Prompt], list[Prompt]]:
        """`read` for a training run, which records the prompts in its folder.

        A resumed run keeps the moment at which it began.

        Args:
            folder: folder of the run.
            moment: moment of a new run unless the options set it; None: now.
        """
        prompts, target = self.prompts, TargetSource(self.target)
        moment = clock.read_moment(folder) or prompts.moment or moment
        chat = target.chat(prompts.template, prompts.template_options, moment)
        if chat.moment:
            moment = clock.record_moment(folder, chat.moment)
        return replace(self, prompts=replace(prompts, moment=moment)).read(folder=folder)


def build_drafter(options: DrafterOptions, target: Target) -> Drafter:
    """Build the drafter of the options, with a confidence head if they ask for one."""
    drafter = options.build(target)
    if options.confidence:
        drafter.add_confidence()
    return drafter
