"""Load a target from a name, or take a model of transformers that is loaded already."""

from __future__ import annotations

import copy
from os import PathLike
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.errors import UserError
from decode.model.files.tokenizer_files import check_rows
from decode.model.load import load_tokenizer, target_of
from distill.cli.main import rewrite
from distill.config.build import TargetSource, join_ends, quiet
from distill.config.compose import compose
from distill.config.read import checked_options
from distill.config.run_prompts import quoted
from distill.options.commands import GenerateOptions
from distill.prompts.chat_template import Chat
from distill.text_generation import Model
from distill.utils.paths import CONF
from drafters.checkpoint.folder import first_line

BUNDLED = "data/pocket"


def load_target(
    target: str | PathLike[str] | PreTrainedModel = BUNDLED,
    *options: str,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    template: str | None = None,
) -> Model:
    """Load a causal language model and its tokenizer, or take a model of transformers that is loaded already.

    Args:
        target: a folder, a GGUF file, a Hub id, `data/pocket` (the bundled one), or a model of transformers.
            A model is used as it is, on its device and in its dtype; it is put into evaluation mode.
        options: of `foredraft generate --help`, as in "target.compile=true".
        tokenizer: of the model, or its name; default: the one next to the model's files.
        device: as in "cpu" or "cuda:0"; default: the CPU.
        dtype: as in "float32" or torch.bfloat16; default: the files' dtype, bfloat16 of the bundled one.
        revision: of a Hub id.
        trust_remote_code: run Python code that comes with the model.
        template: "none" for a base model without a chat template; default: "chat".

    Raises:
        UserError: no such model or no tokenizer, one that drafts cannot be verified with, an unknown option.
    """
    quiet()
    given: Any = target
    named = {"target.device": device, "target.dtype": dtype, "target.revision": revision}
    settings = {name: _text(name, value) for name, value in named.items() if value is not None}
    if device is not None:
        _check_device(device)
    if trust_remote_code:
        settings["target.trust_remote_code"] = "true"
    if isinstance(given, PreTrainedModel):
        if not given.can_generate():
            raise UserError(
                f"target: a {type(given).__name__} has no head that predicts tokens; load it with "
                "AutoModelForCausalLM"
            )
        if settings or any(option.startswith("target") for option in options):
            name = [*settings, *(option for option in options if option.startswith("target"))][0]
            raise UserError(
                f"load_target(model): {name} is for a name; change the model itself, as in model.to(...)"
            )
    elif isinstance(given, str | PathLike):
        settings = {"target": str(given)} | settings if str(given) != BUNDLED else settings
    else:
        raise UserError(
            f"target: give a folder, a Hub id or a model of transformers, not {type(given).__name__}"
        )
    if template is not None:
        settings["prompts.template"] = _text("template", template)
    command = ["prompt=-", *(f"{name}={value}" for name, value in settings.items()), *options]
    chosen = checked_options(GenerateOptions, compose(rewrite(command, CONF), CONF, "generate"))
    source, prompts = TargetSource(chosen.target), chosen.prompts
    chat_options = prompts.template, prompts.template_options, prompts.moment
    if isinstance(given, PreTrainedModel):
        chat = Chat(_tokenizer_of(given, tokenizer), *chat_options)
        return Model(_target_of(given, chat), chat)
    chat = source.chat(*chat_options) if tokenizer is None else Chat(_tokenizer(tokenizer), *chat_options)
    return Model(source.load(chat=chat), chat)


def _target_of(model: PreTrainedModel, chat: Chat) -> Any:
    check_rows(chat.tokenizer, model.config.get_text_config().vocab_size, f"target={type(model).__name__}")
    # Shares weights and modules; end tokens of the tokenizer are added to its own generation config.
    mine = copy.copy(model.eval())
    mine.generation_config = copy.deepcopy(model.generation_config)
    target = target_of(mine)
    join_ends(target, chat)
    return target


def _tokenizer_of(model: PreTrainedModel, given: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a model."""
    if given is not None:
        return _tokenizer(given)
    name = model.name_or_path or ""
    try:
        return load_tokenizer(name)
    except UserError:
        raise UserError(f"load_target(model): no tokenizer at {name!r}; give tokenizer=") from None


def _tokenizer(given: Any) -> PreTrainedTokenizerBase:
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    if isinstance(given, str | PathLike):
        return load_tokenizer(str(given), what="tokenizer")
    raise UserError(f"tokenizer: give a tokenizer of transformers or its name, not {type(given).__name__}")


def _check_device(device: Any) -> None:
    try:
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        raise UserError(f"device={device}: not on this machine ({first_line(error)})"[:200]) from None


def _text(name: str, value: Any) -> str:
    """Value of an option as Hydra reads it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if not isinstance(value, str | torch.device):
        raise UserError(f"{name.rpartition('.')[2]}={value!r}: give a text"[:200])
    return quoted(str(value))
