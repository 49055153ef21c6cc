"""Export a checkpoint: foredraft export, and `export` at the end of a run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from decode.errors import FollowUpError, RemoteError, UserError
from decode.model.target import Target
from distill.config.build import TargetSource, quiet
from distill.options.commands import ExportCommandOptions
from distill.options.run import ExportOptions
from distill.prompts.split import RECORD as PROMPTS
from distill.rollouts.manifest import MANIFEST
from distill.utils.atomic_files import read_json
from distill.utils.paths import bundled
from distill.utils.progress import bar, first_rank, say
from distill.utils.redact import without_secrets
from distill.utils.run_folder import RECORD
from distill.utils.run_record import OLDER, read_options, read_packages
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint import pretrained
from drafters.checkpoint.folder import drafter_kind, target_name, target_origin
from drafters.checkpoint.model_card import portable
from drafters.checkpoint.published import fetch_card
from drafters.export import formats, layout
from drafters.export.formats import GGUF, NATIVE
from drafters.export.layout import Layout
from drafters.export.llama_cpp import file as gguf_file
from drafters.hub import upload
from drafters.registry import class_name, short_name

PARTS = ("drafter", "objective", "weights", "optimizer", "on_policy")
TRAINER = ("max_steps", "accumulate_grad_batches", "gradient_clip_val", "precision", "devices", "strategy")
PLAIN = ("batch_size", "max_tokens", "seed")
ROLLOUTS = ("answers", "sampler", "max_prompt_tokens", "max_new_tokens", "self_prompts", "samples", "seed")
ABOUT = "restore it, or remove it to export without what it says"


def export(options: ExportCommandOptions) -> float:
    """Write the exported folder, print how to serve it, and upload it to `push_to`, if set.

    Args:
        options: options of the command.

    Returns:
        0: there is nothing to optimise.

    Raises:
        UserError: no checkpoint, an unknown program, no format for the drafter, or an existing folder; and
            see `upload.upload`.
        RemoteError: see `upload.upload`.
    """
    quiet()
    check_options(options)
    checkpoint = checkpoint_io.fetch(options.checkpoint)
    out = Path(options.out) if options.out else _export_folder(checkpoint.resolve(), options.to)
    if out.is_dir() and options.push_to:
        if not (out / layout.FILES[0]).is_file():
            raise UserError(f"out={out}: exists already and is no drafter's; choose a new folder")
        say(f"{out} exists already and is uploaded unchanged; remove it to write it again")
    else:
        if (kind := drafter_kind(checkpoint)) and options.to != NATIVE:
            formats.check_format(kind, options.to)  # before the target is loaded
        known = target_origin(checkpoint)
        named = options.target
        if not named.path:
            named = replace(named, path=target_name(checkpoint), revision=known.revision)
        target = TargetSource(named).load(decodes=False)
        write(checkpoint, target, options.to, out, options.push_to, options)
    if options.push_to:
        push(out, options.push_to, options.private, options.dry_run)
    return 0.0


def check_options(options: ExportOptions) -> None:
    """Check the names of program, repository and folder, each of which may be None, and the login.

    Raises:
        UserError: an unknown or impossible name, or no token for an upload.
    """
    known = [NATIVE, *formats.FORMATS]
    for to in options.programs:
        if to not in known:
            raise UserError(f"to={to}: choose {', '.join(known[:-1])} or {known[-1]}")
    if options.to is not None and len(set(options.programs)) != max(len(options.programs), 1):
        raise UserError(f"to=[{','.join(options.programs)}]: name at least one program, each once")
    if options.push_to and len(options.programs) > 1:
        raise UserError("push_to: a repository holds one format; push each by foredraft export")
    gguf_file.check_kind(options.outtype)
    if GGUF in options.programs and options.target_gguf:
        gguf_file.check_named(options.target_gguf)
    if options.push_to:
        upload.check_repo(options.push_to)
        if first_rank() and not (options.dry_run or upload.logged_in()):
            raise UserError(
                f"push_to={options.push_to}: no token of the Hub is known here; {upload.LOGIN}; "
                "dry_run=true shows what would be uploaded"
            )


def write(
    checkpoint: Path,
    target: Target,
    to: str,
    out: Path,
    repo: str | None = None,
    options: ExportOptions | None = None,
) -> str:
    """Write a checkpoint in a program's format, with model card, scorecard and recipe.

    Args:
        checkpoint: folder of the checkpoint.
        target: target of the drafter.
        to: program.
        out: a new folder.
        repo: hub repository, for the model card.
        options: those of `to=gguf`.

    Returns:
        The command that serves it; "" if none does.

    Raises:
        UserError: see `checkpoint_io.load`, `formats.write_layout`, `gguf_file.target_file` and
            `pretrained.publish_folder`.
    """
    with bar(1, f"export to {out}", "", leave=False):
        drafter, theirs = _write(checkpoint, target, to, out, repo, options)
    say(str(out))
    card = pretrained.scorecard(checkpoint)
    if card and card.fastest.nodes and not card.pays and not card.conditions.elsewhere:
        say(
            "where it was scored, no draft was faster than plain decoding (the fastest, "
            f"{card.fastest.decode}, {card.fastest.speed:.2f}x); the command still drafts as deep as it "
            "was trained: measure on the serving machine with foredraft advise"
        )
    note, command = _served(theirs, drafter, target, out)
    say("\n".join(part for part in (note, command and f"serve it: {command}") if part))
    return command


def _write(
    checkpoint: Path, target: Target, to: str, out: Path, repo: str | None, options: ExportOptions | None
) -> tuple[Drafter, Layout | None]:
    """Write the folder; returns the drafter, and its layout in another program's format."""
    try:
        fetch_card(target)
    except (UserError, RemoteError) as error:
        say(f"the model card says nothing of the target's licence: {error}")
    drafter = checkpoint_io.load(checkpoint, target)
    assert drafter.origin is not None
    # Omits paths of this machine, since the folder may be uploaded later.
    origin = portable(drafter.origin)
    theirs = None if to == NATIVE else formats.write_layout(checkpoint_io.as_saved(drafter), target, to)
    if theirs and to == GGUF:
        assert options is not None
        served = gguf_file.target_file(options.target_gguf, target)
        theirs = gguf_file.write_on(theirs, served, options.outtype)
    with pretrained.publish_folder(out) as temporary:
        weights = None if theirs else checkpoint_io.weights_on_file(checkpoint, drafter, target)
        pretrained.write(drafter, temporary, origin, recipe_of(checkpoint), theirs, to, weights, repo or "")
    return drafter, theirs


def push(out: Path, repo: str, private: bool, dry_run: bool) -> None:
    """Upload a folder; with `dry_run`, print what would be uploaded.

    Raises:
        UserError, RemoteError: see `upload.upload`.
    """
    if dry_run:
        say(f"{upload.plan(out, repo, private)}\ndry run: nothing was uploaded")
    else:
        with bar(1, f"upload to {repo}", "", leave=False):
            place = upload.upload(out, repo, private)
        say(f"uploaded: {place}")


@dataclass(frozen=True)
class RunExport:
    """The export at the end of a training run."""

    options: ExportOptions

    def check_kind(self, factory: str) -> None:
        """Check what needs no target: the options' names, and that the program has a format for the drafter.

        Args:
            factory: see `DrafterOptions`.

        Raises:
            UserError: see `check_options` and `formats.check_format`.
        """
        check_options(self.options)
        for to in _formats(self.options):
            if to != NATIVE:
                formats.check_format(class_name(resolve_name(factory.rpartition(".")[0])), to)

    def check(self, drafter: Drafter, target: Target) -> None:
        """Check that the export will succeed, before the run's work starts; after `check_kind`.

        Args:
            drafter: the untrained drafter.
            target: target of the drafter.

        Raises:
            UserError: see `formats.check` and `gguf_file.target_file`.
        """
        for to in _formats(self.options):
            if to != NATIVE:
                formats.check(short_name(drafter), drafter.settings, target, to)
            if to == GGUF:
                gguf_file.target_file(self.options.target_gguf, target)

    def write(self, folder: Path, target: Target) -> None:
        """Export the best checkpoint of a run that has ended.

        Args:
            folder: folder of the run.
            target: target of the run.

        Raises:
            FollowUpError: it failed; the run is whole, and the message says how to export again.
        """
        if not _formats(self.options) or not first_rank():
            return
        # Without scores there is no best.
        links = [folder / "checkpoints" / name for name in ("best", "last")]
        checkpoint = next((link for link in links if link.exists()), None)
        if checkpoint is None:
            return
        failed = [self._write(checkpoint.resolve(), target, to) for to in _formats(self.options)]
        if any(failed):
            raise FollowUpError("; ".join(filter(None, failed)))

    def _write(self, checkpoint: Path, target: Target, to: str) -> str:
        """Export to one program; returns why it failed and how to export again, or ""."""
        options, out = self.options, _export_folder(checkpoint, to)
        try:
            if not out.is_dir():
                write(checkpoint, target, to, out, options.push_to, options)
            if options.push_to:
                push(out, options.push_to, options.private, options.dry_run)
        except (UserError, RemoteError, OSError) as error:
            words = ["foredraft", "export", f"checkpoint={checkpoint}", f"to={to}"]
            words += [f"target_gguf={options.target_gguf}"] if to == GGUF and options.target_gguf else []
            words += [f"outtype={options.outtype}"] if options.outtype else []
            if options.push_to:
                words += [f"push_to={options.push_to}", f"private={str(options.private).lower()}"]
            reason = " ".join(str(error).split())
            return (
                f"export: {reason}; the run itself is whole, and this exports it again: {shlex.join(words)}"
            )
        return ""


def _served(theirs: Layout | None, drafter: Drafter, target: Target, out: Path) -> tuple[str, str]:
    """The files' note, and the command that serves the drafter."""
    assert drafter.origin is not None
    if theirs is None and target.abilities.decode:
        return "serve it: its target is decoded by an engine; export it for one, as in to=vllm", ""
    native = Layout({}, {}, "foredraft generate checkpoint={drafter} target={target} prompt=...")
    found = theirs or native
    served = Path(bundled(drafter.origin.name)).expanduser()
    # The command may be run elsewhere.
    name = str(served.absolute()) if served.exists() else drafter.origin.name
    return found.note, found.command(name, str(out.absolute()))


def _formats(options: ExportOptions) -> tuple[str, ...]:
    """Formats to write at the end of a run: those that are named, or with only `push_to` the native one."""
    return options.programs or (NATIVE,) * bool(options.push_to)


def _export_folder(checkpoint: Path, to: str) -> Path:
    run = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None
    return run / "export" / f"{checkpoint.name}-{to}" if run else Path(f"{checkpoint}-{to}")


def recipe_of(checkpoint: Path) -> dict[str, Any] | None:
    """Collect the recipe from the folders around a checkpoint; None outside a run's folder.

    Folders of this machine are shortened to their last part, and secrets are hidden. `chosen` has the
    options that the run chose by itself, and by what.
    """
    folder = checkpoint.resolve().parent.parent
    if checkpoint.resolve().parent.name != "checkpoints" or not (folder / RECORD).is_file():
        return None
    options = read_options(folder)
    if options is None:
        say(f"{folder}: {OLDER}; the model card says nothing about data and training")
        return None
    config = options.values
    found = {part: _plain(config[part]) for part in PARTS if part in config}
    found["trainer"] = {name: config["trainer"][name] for name in TRAINER if name in config["trainer"]}
    found |= {name: config[name] for name in PLAIN if name in config}
    if template := config.get("prompts", {}).get("template"):
        found["template"] = template
    if packages := read_packages(folder):
        found["packages"] = packages
    if prompts := read_json(folder / PROMPTS, ABOUT):
        found["prompts"] = _plain(prompts)
    if rollouts := _rollouts(folder, config):
        found["rollouts"] = rollouts
    found["chosen"] = {name: by for name, by in options.chosen.items() if _is_shown(name, found)}
    return without_secrets(found)


def _is_shown(name: str, recipe: dict[str, Any]) -> bool:
    """Whether a recipe has a value of this option."""
    part: Any = recipe
    for key in name.split("."):
        part = part.get(key) if isinstance(part, dict) else None
    return part is not None


def _rollouts(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """Sampling, counts and versions of the run's first store."""
    began = read_json(folder / "rollouts.json", ABOUT, store=str)
    named = config["rollout"].get("store")
    if not began or (named and "://" in named):
        return {"store": began["store"]} if began else None
    path = (Path(named) if named else _root(folder, config) / began["store"]) / MANIFEST
    manifest = read_json(path, ABOUT, plan=dict)
    if not manifest:
        return {"store": began["store"]}
    plan = {name: manifest["plan"][name] for name in ROLLOUTS if name in manifest["plan"]}
    versions = {name: manifest[name] for name in ("versions", "counts") if name in manifest}
    return {"store": began["store"]} | plan | versions


def _root(folder: Path, config: dict[str, Any]) -> Path:
    """Folder of all rollouts: from the configuration, or next to a run folder that was moved."""
    configured = Path(config["output_dir"]) / "rollouts"
    return configured if configured.is_dir() else folder.parent.parent / "rollouts"


def _plain(value: Any) -> Any:
    """Remove unset values and paths."""
    if isinstance(value, dict):
        kept = {
            k: _plain(v) for k, v in value.items() if v is not None and k not in ("_partial_", "_convert_")
        }
        if target := kept.pop("_target_", None):
            kept = {"is": target.rpartition(".")[0 if target.endswith(".for_target") else 2], **kept}
        return kept
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, str) and (value.startswith(("/", "~", ".")) or Path(value).is_file()):
        return Path(value).name
    return value
