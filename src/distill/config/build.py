"""Build the target, chat template, prompts and drafter from options."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import replace
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


def read_chat(
    target: TargetOptions, template: str, template_options: Any = None, moment: str | None = None
) -> Chat:
    """Check the target's configuration and read its tokenizer.

    Args:
        target: whose tokenizer and chat template these are.
        template: chat | none.
        template_options: mapping for the chat template, or None.
        moment: that the template is told; None: the present.

    Raises:
        UserError: see `load_config`, `load_tokenizer` and `check_rows`; or invalid options.
    """
    path = str(bundled(target.name))
    config = load_config(path, target.revision, target.trust_remote_code)
    tokenizer = load_tokenizer(path, target.revision, target.trust_remote_code)
    check_rows(tokenizer, config.get_text_config().vocab_size, f"target={target.name}")
    if not isinstance(template_options, dict | None):
        raise UserError(
            f"prompts.template_options={template_options}: write it as {{name: value}}, as in "
            "{enable_thinking: false}"
        )
    return Chat(tokenizer, template, template_options, moment)


def read_limit(target: TargetOptions, prompt_tokens: int | None, row_tokens: int | None = None) -> Limit:
    """Limit on prompt length in tokens; reads only the target's configuration.

    Args:
        target: whose context is a limit.
        prompt_tokens: of a prompt, where options set it.
        row_tokens: of a training row; None: nothing is trained.
    """
    config = load_config(str(bundled(target.name)), target.revision, target.trust_remote_code)
    return strictest(prompt_tokens, row_tokens, max_positions(config.get_text_config()))


def build_target(
    options: TargetOptions,
    device: torch.device | None = None,
    packing: bool = False,
    decodes: bool = True,
    chat: Chat | None = None,
) -> Target:
    """Load and probe a target.

    Args:
        options: of the target.
        device: of this process, one of several; None: the one that the options name.
        packing: check that it reads several texts of a row apart.
        decodes: see `load_target`; where it takes a target that an engine has to decode, one line says so.
        chat: its tokenizer and chat template, whose ends end its answers too, see `join_ends`; None where
            it writes none.
    """
    with bar(1, f"loading target {options.name}", "", leave=False):
        target = load_target(
            str(bundled(options.name)),
            options.dtype,
            str(device or options.device),
            options.revision,
            options.trust_remote_code,
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


def read_inputs(
    target: TargetOptions,
    prompts: PromptOptions,
    score: HeldOutOptions,
    *,
    answers: str | None = None,
    row_tokens: int | None = None,
    folder: Path | None = None,
    moment: str | None = None,
) -> tuple[Chat, list[Prompt], list[Prompt]]:
    """Check the target's configuration, then read tokenizer and prompts, before the target is loaded.

    Args:
        target: whose tokenizer it is.
        prompts: where they are read from.
        score: how many held-out prompts are used.
        answers: rollout.answers; None: no rollouts are made.
        row_tokens: of a training row; None: nothing is trained.
        folder: run folder in which the prompts are recorded.
        moment: that the chat template is told where the options name none; None: the present.

    Returns:
        The chat template, training prompts and the held-out prompts that are scored, these with one
        place to answer each.
    """
    chat = read_chat(target, prompts.template, prompts.template_options, prompts.moment or moment)
    limit = read_limit(target, prompts.max_tokens, row_tokens)
    result = split.read(prompts, chat, limit, answers, score.enabled)
    if score.enabled and not result.held:
        raise UserError(
            f"prompts: none are held out for scoring: {result.none_held}; set prompts.heldout to a file, or "
            "score.enabled=false"
        )
    if folder:
        split.keep_record(result, folder)
    split.describe(result, folder)
    return chat, result.train, result.held[: max(score.prompts, score.replay_prompts)]


def read_run_inputs(
    options: RunOptions, folder: Path, moment: str | None = None
) -> tuple[Chat, list[Prompt], list[Prompt]]:
    """`read_inputs` for a training run; the prompts are recorded in its folder.

    Its chat template is told the moment at which the run began.

    Args:
        options: of the run.
        folder: of the run.
        moment: of a run that begins, where the options name none; None: the present.
    """
    moment = clock.kept(folder) or options.prompts.moment or moment
    target, prompts = options.target, options.prompts
    chat = read_chat(target, prompts.template, prompts.template_options, moment)
    if chat.moment:
        moment = clock.keep(folder, chat.moment)
    return read_inputs(
        target,
        replace(prompts, moment=moment),
        options.score,
        answers=options.rollout.answers,
        row_tokens=options.max_tokens,
        folder=folder,
    )


def build_drafter(options: DrafterOptions, target: Target) -> Drafter:
    """The drafter that the options name, with a confidence head where they ask for one."""
    drafter = options.build(target)
    if options.confidence:
        drafter.add_confidence()
    return drafter
