"""Convert a composed configuration to option dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from decode.errors import UserError
from distill.config.choices import with_terms
from distill.config.recorded import resolved
from distill.config.target_size import fill_precision, fill_size_settings
from distill.config.validate import check_out, check_ranges, refused
from distill.losses.mix import terms_of
from distill.losses.trial import check_divergence
from distill.options.answers import (
    OpenAIRolloutOptions,
    RayRolloutOptions,
    RolloutOptions,
    VLLMRolloutOptions,
)
from distill.options.commands import HeldOutInputs
from distill.options.run import DrafterOptions, OptimizerOptions, RunOptions, TrainerOptions
from distill.utils.paths import CONF, bundled
from distill.utils.run_record import ResolvedOptions
from drafters.vocabulary import draft_vocab_size

Options = TypeVar("Options")
PARTS = ("first", "second")  # options of a drafter made of two
OF_ANY = ("init_from", "confidence")  # options of every drafter
FUSES = ("torch.optim.AdamW", "distill.training.optim.muon")  # take `fused`; not all of torch's do
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", tuple: "a list"}


def checked_options(
    cls: type[Options], cfg: DictConfig, announce: bool = True, ignored: Sequence[str] = ()
) -> Options:
    """Read a command's options and check the ranges that no constructor checks.

    Fills in settings that depend on the target's size or the machine, and prints them if `announce`. Keys in
    `ignored` may be there too.

    Raises:
        UserError: a value out of range, a divergence that fails, and see `read_options`.
    """
    check_ranges(cfg)
    if issubclass(cls, HeldOutInputs):
        check_out(cfg)
    chosen = fill_size_settings(cfg, announce) | fill_precision(cfg, announce)
    made = read_options(cls, cfg, ignored=ignored)
    if isinstance(made, RunOptions):
        for term in terms_of(made.objective, made.weights):
            check_divergence(term.divergence)
        return replace(made, config=ResolvedOptions.of(made.config.values, chosen))
    return made


def read_options(cls: type[Options], cfg: DictConfig, name: str = "", ignored: Sequence[str] = ()) -> Options:
    """Build a dataclass of `distill.options` from a configuration.

    Args:
        cls: dataclass with the configuration's keys as fields.
        cfg: composed configuration.
        name: dotted prefix of `cfg`, for messages.
        ignored: keys that need not be fields.

    Raises:
        UserError: an unknown or missing key, a value of another type, or one that a constructor rejects.
    """
    if reader := READERS.get(cls):
        return cast(Options, reader(cfg))
    if cls is RolloutOptions:
        cls = cast(type[Options], _rollout(cfg))
    _check_names(cls, {str(key) for key in cfg} - set(ignored), name)
    return _fill(cls, cfg, name)


def read_part(cls: type[Options], cfg: DictConfig) -> Options:
    """Like `read_options`, but ignores additional keys."""
    return _fill(cls, cfg, "")


def _fill(cls: type[Options], cfg: DictConfig, name: str) -> Options:
    cfg, hints = with_terms(CONF, cfg), get_type_hints(cls, include_extras=True)
    values = {key: _value(hint, cfg[key], _dotted(name, key)) for key, hint in hints.items() if key in cfg}
    if "config" in hints:
        values["config"] = ResolvedOptions.of(resolved(cfg), {})
    return cls(**values)


def _check_names(cls: type, given: set[str], name: str) -> None:
    expected = [field for field in fields(cls) if field.name != "config"]
    if unknown := sorted(given - {field.name for field in expected}):
        raise UserError(f"{_dotted(name, unknown[0])}: no such option")
    if missing := sorted({field.name for field in expected if field.default is MISSING} - given):
        raise UserError(f"{_dotted(name, missing[0])}: must be given")


def _dotted(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _value(hint: Any, node: Any, name: str) -> Any:
    """Convert a value to its field's type."""
    if get_origin(hint) is Annotated:
        with refused():
            return instantiate(node, _convert_="all")
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    nested = next((choice for choice in choices if is_dataclass(choice)), None)
    if nested and node is not None:
        return read_options(cast(type, nested), node, name)
    value = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    if str in choices and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # a name may look like a number
    types = tuple(get_origin(choice) or choice for choice in choices)
    if tuple in types and isinstance(value, list):
        return tuple(value)
    if not any(_fits(value, kind) for kind in types):
        raise UserError(f"{name}={value}: must be {KINDS.get(types[0], 'a mapping')}")
    return value


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if kind in (None, NoneType):
        return value is None
    if kind is float:
        kind = int | float
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _rollout(cfg: DictConfig) -> type[RolloutOptions]:
    """The options class by the group's settings, independent of rollout.engine."""
    if "url" in cfg:
        return OpenAIRolloutOptions
    if "workers" in cfg:
        return RayRolloutOptions
    return VLLMRolloutOptions if "engine_python" in cfg else RolloutOptions


def _drafter(cfg: DictConfig) -> DrafterOptions:
    """Options of a drafter; resolves `path` like the target's; a nested drafter may be a checkpoint."""
    given: dict[str, Any] = {"path": str(bundled(cfg.path))} if cfg.get("path") else {}
    parts = {key: _part(key, cfg[key]) for key in PARTS if key in cfg}
    given |= {key: part.build for key, part in parts.items()}
    settings = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in (*OF_ANY, *PARTS)])

    def build(target: Any) -> Any:
        sizes: dict[str, Any] = {}
        if "draft_vocab_size" in cfg:
            sizes["draft_vocab_size"] = draft_vocab_size(cfg.draft_vocab_size, target.vocab_size)
        if cfg.get("store"):
            sizes["store_key"] = _datastore(cfg.store, target)
        drafter = instantiate(settings, _convert_="all", **given, **sizes)(target)
        drafter.sizes_vocabulary = cfg.get("draft_vocab_size") == "auto" and drafter.d2t is not None
        return drafter

    return DrafterOptions(
        factory=cfg._target_,
        build=build,
        depth=cfg.get("depth", next((part.depth for part in parts.values() if part.depth), None)),
        init_from=cfg.get("init_from"),
        confidence=bool(cfg.get("confidence")),
    )


def _part(key: str, node: Any) -> DrafterOptions:
    """Options of a nested drafter: settings of a new one, or a checkpoint."""
    if isinstance(node, str):
        return DrafterOptions(factory=node, build=partial(_trained, node))
    if not OmegaConf.is_dict(node) or "_target_" not in node:
        raise UserError(
            f"drafter.{key}: give the name of one drafter of conf/drafter, or a checkpoint's folder or hub "
            f"id, as in drafter.{key}=outputs/<date>/<time>/checkpoints/best"
        )
    return _drafter(node)


def _trained(source: str, target: Any) -> Any:
    """Load the drafter of a checkpoint's folder or hub id, frozen."""
    # Slow import, not needed for --help.
    from drafters.checkpoint import io as checkpoint_io

    return checkpoint_io.load_as_saved(checkpoint_io.fetch(source), target)


def _datastore(source: str, target: Any) -> str:
    """Key of the datastore of these texts; makes it if it does not exist."""
    from distill.datastore.build import make_datastore  # slow import

    return make_datastore(source, target)


def _optimizer(cfg: DictConfig) -> OptimizerOptions:
    _value(float, cfg.optimizer.lr, "optimizer.optimizer.lr")

    def build(groups: Any, **more: Any) -> Any:
        return instantiate(cfg.optimizer, _convert_="all", **more)(groups)

    fuses = cfg.optimizer.get("_target_") in FUSES and "fused" not in cfg.optimizer
    return OptimizerOptions(build=build, fuses=fuses, warmup=cfg.warmup, final_lr=cfg.final_lr)


def _trainer(cfg: DictConfig) -> TrainerOptions:
    devices = OmegaConf.to_container(cfg.devices) if OmegaConf.is_config(cfg.devices) else cfg.devices
    return TrainerOptions(
        build=partial(instantiate, cfg),
        accelerator=cfg.accelerator,
        devices=devices,
        num_nodes=cfg.get("num_nodes", 1),
        accumulate_grad_batches=cfg.accumulate_grad_batches,
        enable_progress_bar=cfg.enable_progress_bar,
        max_steps=_value(int | None, cfg.max_steps, "trainer.max_steps"),
    )


# Groups that are passed unchanged to a constructor.
READERS: Mapping[type, Callable[[DictConfig], Any]] = {
    DrafterOptions: _drafter,
    OptimizerOptions: _optimizer,
    TrainerOptions: _trainer,
}
