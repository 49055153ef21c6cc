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
from distill.options import DrafterOptions, HeldOutOptions, PromptOptions, RunOptions, TargetOptions
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
    """Where a target's files are, and how they are read; its methods raise UserError for files at fault."""

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
            moment: passed to the template; None: the present.
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
            prompt_tokens: of a prompt, where options set it.
            row_tokens: of a training row; None: nothing is trained.
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
            device: of this process, one of several; None: the one that the options name.
            packing: check that it reads several texts of a row apart.
            decodes: see `load_target`; one line is printed where an engine has to decode the target.
            chat: its tokenizer and chat template, whose ends end its answers too, see `join_ends`; None: it
                writes no answers.
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
                max_memory=options.max_memory,  # pyright: ignore[reportArgumentType]
                offload_folder=options.offload_folder,
            )
        if reason := target.abilities.decode:
            say(f"target: drafts for {type(target.model).__name__} are verified only by an engine: {reason}")
        if packing:
            check_packing(target)
        if chat:
            join_ends(target, chat)
        return target


def join_ends(target: Target, chat: Chat) -> None:
    """Let answers end at every token that ends one by the model's files, its tokenizer or its template.

    Where these do not agree, one line says so.
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
    # httpx, and the client of huggingface_hub and openai: a line for every request.
    for name in ("lightning.pytorch", "lightning.fabric", "datasets", "httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("WANDB_SILENT", "true")


@dataclass(frozen=True)
class PromptReader:
    """Reads the prompts of a command before its target is loaded.

    Args:
        target: whose tokenizer and chat template render them.
        prompts: where they are read from.
        score: how many held-out prompts are used.
        answers: rollout.answers; None: no rollouts are made.
        row_tokens: of a training row; None: nothing is trained.
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
            moment: passed to the chat template where the options name none; None: the present.
            folder: run folder in which the prompts are recorded.

        Returns:
            The chat template, training prompts, and the held-out prompts that are scored, these with one
            answer each.
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
        split.describe(result, folder)
        return chat, result.train, result.held[: max(score.prompts, score.replay_prompts)]

    def read_for_run(
        self, folder: Path, moment: str | None = None
    ) -> tuple[Chat, list[Prompt], list[Prompt]]:
        """`read`, with the prompts and the moment at which the run began recorded in its folder.

        Args:
            folder: of the run.
            moment: of a new run, where the options name none; None: the present.
        """
        prompts, target = self.prompts, TargetSource(self.target)
        moment = clock.kept(folder) or prompts.moment or moment
        chat = target.chat(prompts.template, prompts.template_options, moment)
        if chat.moment:
            moment = clock.keep(folder, chat.moment)
        return replace(self, prompts=replace(prompts, moment=moment)).read(folder=folder)


def build_drafter(options: DrafterOptions, target: Target) -> Drafter:
    """The drafter that the options name, with a confidence head where they ask for one."""
    drafter = options.build(target)
    if options.confidence:
        drafter.add_confidence()
    return drafter
