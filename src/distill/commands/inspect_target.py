"""foredraft inspect: describe a target model, the files read from it, and what it can be used for here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decode.errors import UserError
from decode.model.files.account import Account, no_remarks
from decode.model.files.folder import GENERATION, ModelFiles
from decode.model.files.generation import PROCESSORS, SAMPLING, changing
from decode.model.load import accounts_of_files, load_config, load_tokenizer, source_of, stop_tokens
from decode.model.target import Target
from distill.commands.template_traits import traits
from distill.config.build import TargetSource, quiet
from distill.options.answers import TargetOptions
from distill.options.commands import InspectTargetOptions
from distill.prompts.chat_template import Chat
from distill.prompts.templates.ends import named_token
from distill.utils.atomic_files import write_json
from distill.utils.redact import printable

WIDE = 24  # columns of a label


def inspect(options: InspectTargetOptions) -> float:
    """Print a description of the target, and write it to `out`, if set.

    Returns:
        Number of parameters, in millions.

    Raises:
        UserError: see `load_target`; or the files hold a different model than the one that would be built.
    """
    quiet()
    with no_remarks():  # the accounts contain them
        found = look(options.target, options.prompts.template_options)
    print(printable("\n".join(lines(found))), flush=True)
    if options.out:
        write_json(Path(options.out), found)
    return found["sizes"]["parameters"] / 1e6


def look(options: TargetOptions, template_options: Any = None) -> dict[str, Any]:
    """Describe a target as plain values; arguments as in `TargetSource.chat`."""
    source = TargetSource(options)
    where = source.place
    config = load_config(*where)
    try:
        tokenizer: Any = load_tokenizer(*where)
    except UserError as error:
        tokenizer, missing = None, str(error)
    else:
        missing = ""
    template = "chat" if tokenizer and tokenizer.chat_template else "none"
    chat = source.chat(template, template_options) if tokenizer else None
    target = source.load(decodes=False)
    model: Any = target.model
    files = ModelFiles(*source_of(where[0], where[1]), f"target={options.name}")
    accounts = [*model.accounts, *accounts_of_files(*where, tokenizer)]
    able = target.abilities
    return {
        "target": options.name,
        "class": type(target.model).__name__,
        "sizes": _sizes(target),
        "files": [account.as_json() for account in accounts],
        "no tokenizer": missing,
        "ends": _ends(target, config, chat),
        "engines apply": changing(files.read(GENERATION), SAMPLING | PROCESSORS),
        "template": traits(chat) if chat and template == "chat" else {},
        "able": {"train": able.train, "replay": able.replay, "decode": able.decode},
    }


def _sizes(target: Target) -> dict[str, Any]:
    config = target.config
    weights = {id(weight): weight.numel() for weight in target.model.parameters()}
    return {
        "layers": len(target.layers),
        "hidden": target.hidden_size,
        "heads": getattr(config, "num_attention_heads", None),
        "heads of keys and values": getattr(config, "num_key_value_heads", None),
        "vocabulary": target.vocab_size,
        "context": target.max_positions,
        "parameters": sum(weights.values()),
        "dtype": str(target.dtype).removeprefix("torch."),
    }


def _ends(target: Target, config: Any, chat: Chat | None) -> dict[str, list[str]]:
    """Tokens that end an answer, by source, as text with their ids."""
    named = stop_tokens(target)
    found = chat.ends(named, target.vocab_size) if chat else None
    sources: Mapping[str, Any] = {
        "generation_config.json": getattr(target.model.generation_config, "eos_token_id", None),
        "config.json": config.get_text_config().eos_token_id,
        "tokenizer": found.tokenizer if found else (),
        "chat template": found.template if found else (),
        "here": found.ids if found else named,
    }
    return {source: _named_tokens(ids, chat) for source, ids in sources.items()}


def _named_tokens(ids: Any, chat: Chat | None) -> list[str]:
    ids = [ids] if isinstance(ids, int) else ids or []
    return [named_token(i, chat.tokenizer) if chat else str(i) for i in ids]


def lines(found: Mapping[str, Any]) -> list[str]:
    """Format the values of `look` as lines."""
    sizes = dict(found["sizes"])
    numbers = [f"{key} {value:,}" for key, value in sizes.items() if isinstance(value, int)]
    ends = found["ends"]
    rows = [
        ("target", f"{found['target']}: {found['class']} in {sizes['dtype']}"),
        ("sizes", ", ".join(numbers)),
        *(("files", line) for entry in found["files"] for line in Account.from_json(entry).lines()),
        *([("files", f"tokenizer: {found['no tokenizer']}")] if found["no tokenizer"] else []),
        *(("ends an answer", f"{file}: {', '.join(ids) or 'none'}") for file, ids in ends.items()),
    ]
    if missing := [token for token in ends["here"] if token not in ends["generation_config.json"]]:
        rows.append(
            ("ends an answer", f"an engine that reads only generation_config.json writes past {missing[0]}")
        )
    rows.append(("engines apply", ", ".join(found["engines apply"]) or "nothing by default"))
    template = found["template"] or {"": "none; prompts.template=none"}
    rows += [("chat template", f"{about}: {trait}" if about else trait) for about, trait in template.items()]
    rows += [
        ("can be used to", f"{use}: {'no: ' + why if why else 'yes'}") for use, why in found["able"].items()
    ]
    shown, before = [], ""
    for label, text in rows:
        shown.append(f"{label if label != before else '':{WIDE}}{text}".rstrip())
        before = label
    return shown
