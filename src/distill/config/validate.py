"""Validate a configuration before work starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from decode.errors import UserError
from distill.utils.paths import bundled
from distill.utils.redact import PASSWORD

LEAST = {
    "batch_size": 1,
    "batch_sizes": 1,
    "contexts": 1,
    "new_tokens": 2,
    "max_tokens": 3,
    "logits_rows": 0,
    "drafter.depth": 1,
    "drafter.layers": 1,
    "drafter.anchors": 0,
    "drafter.lora.r": 1,
    "drafter.minutes": 0.01,
    "drafter.answers": 1,
    "drafter.tokens": 1,
    "prompts.self": 0,
    "prompts.limit": 0,
    "prompts.max_bytes": 1,
    "prompts.max_tokens": 1,
    "rollout.temperature": 0,
    "rollout.top_k": 0,
    "rollout.max_new_tokens": 1,
    "rollout.shard_size": 1,
    "rollout.samples": 1,
    "rollout.refresh_every": 0,
    "rollout.batch_size": 1,
    "rollout.concurrency": 1,
    "rollout.timeout": 0.001,
    "rollout.retries": 0,
    "rollout.patience": 0,
    "rollout.engine_patience": 0,
    "rollout.engine_timeout": 0.001,
    "rollout.engine_retries": 0,
    "rollout.workers": 1,
    "rollout.cpus_per_worker": 0,
    "rollout.gpus_per_worker": 0,
    "engine.concurrency": 1,
    "engine.timeout": 0.001,
    "engine.retries": 0,
    "engine.patience": 0,
    "score.temperatures": 0,
    "score.top_k": 0,
    "score.every": 1,
    "score.batch_sizes": 1,
    "score.prompts": 1,
    "score.replay_prompts": 0,
    "score.audit_prompts": 1,
    "score.max_new_tokens": 1,
    "score.repeats": 1,
    "score.patience": 1,
    "score.threads": 0,
    "score.engine_patience": 0,
    "score.judge_timeout": 0.001,
    "judge.timeout": 0.001,
    "max_new_tokens": 1,
    "timeout": 0.001,
    "timeout_minutes": 0,
    "requests": 1,
    "interval": 0.01,
    "windows": 1,
    "retries": 0,
    "patience": 0,
    "concurrency": 1,
    "seconds": 0,
    "tolerance": 0,
    "decode.depth": 0,
    "decode.width": 1,
    "decode.nodes": 0,
    "depth": 1,
    "threads": 0,
    "tokens": 3,
    "rows": 0,
    "sample": 0,
    "nodes": 1,
    "starts": 1,
    "turn": 1,
    "steps": 1,
    "processes": 1,
    "repeats": 1,
    "count": 1,
    "gemm": 1,
    **{
        f"shape.{name}": 1
        for name in ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "layers", "taps")
    },
    "shape.depth": 1,
    "memory.tokens": 3,
    "trainer.max_steps": 1,
    "trainer.accumulate_grad_batches": 1,
}
MOST = {"drafter.depth": 256}  # longer drafts are no drafts: each depth is a pass of training
SHARES = (  # 0 to 1
    *("optimizer.warmup", "optimizer.final_lr", "on_policy.share", "on_policy.cut"),
    *("prompts.heldout_share", "prompts.max_left_out"),
    *("rollout.top_p", "score.top_p", "score.min_p", "decode.min_confidence"),
)
POSITIVE = ("optimizer.optimizer.lr",)
FILES = {
    "target.path": "folder; give a model folder, a GGUF file or a hub id (owner/name)",
    "prompts.path": "file; give a JSONL file, one of conf/prompts, or a dataset of the Hub (owner/name)",
    "prompts.heldout": "file",
    "checkpoint": "folder; give a checkpoint's folder or a hub id (owner/name)",
    "drafter.path": "folder; give a model folder, a GGUF file or a hub id (owner/name)",
    "drafter.first": "drafter; give a name of conf/drafter, a checkpoint's folder or a hub id (owner/name)",
    "drafter.second": "drafter; give a name of conf/drafter, a checkpoint's folder or a hub id (owner/name)",
    "drafter.store": "file or folder of texts",
    "drafter.second.store": "file or folder of texts",
    "drafter.init_from": "folder; give a checkpoint's folder or a hub id (owner/name)",
    "rollout.drafter": "folder; give a checkpoint's folder or a hub id (owner/name)",
}
# Hydra's flags
FLAGS = (
    *("-m", "--multirun", "-c", "--cfg", "-r", "--run", "-p", "--package", "-i", "--info", "--resolve"),
    *("-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir", "--hydra-help"),
    *("-sc", "--shell-completion", "--experimental-rerun"),
)
CHOICES = {
    "target.placement": ("replicated", "sharded", "device_map"),
    "rollout.answers": ("write", "given"),
    "rollout.engine": ("hf", "openai", "ray", "vllm"),
    "prompts.template": ("chat", "none"),
    "prompts.answers": ("keep", "drop"),
    "rollout.until": ("answer", "length"),
    "rollout.decode": ("run", "auto"),
    "taps": ("auto", "online", "memory", "cache", "engine"),
    "taps_dtype": ("bfloat16", "int8"),
    "compile_objective": ("auto", "always", "never"),
    "audit": ("quick", "full"),
    "control": ("none", "shuffled_taps"),
    "drafter.exit": ("none", "linear"),
    "drafter.start": ("default", "first", "last"),
    "score.quantize": ("none", "int8"),
    "score.engine": ("none", "vllm"),
    "case": ("speed", "memory"),
}
FREE_TEXT = ("prompt", "row", "stop")


def check_ranges(cfg: DictConfig) -> None:
    """Check numbers and choices that no constructor checks.

    Raises:
        UserError: names the first invalid value.
    """
    parts = {
        key.replace("drafter", part): least
        for part in ("drafter.first", "drafter.second")
        if OmegaConf.is_dict(OmegaConf.select(cfg, part))
        for key, least in LEAST.items()
        if key.startswith("drafter.")
    }
    for key, least in (LEAST | parts).items():
        value = OmegaConf.select(cfg, key)
        values = value if OmegaConf.is_list(value) else [value]
        if any(not isinstance(v, int | float | None) for v in values):
            raise UserError(f"{key}={value}: must be a number")
        if any(v is not None and v < least for v in values):
            raise UserError(f"{key}={value}: must be at least {least}")
    _check_upper_ends(cfg)
    for key, names in CHOICES.items():
        group, _, name = key.rpartition(".")
        choices = OmegaConf.select(cfg, group)
        if choices is not None and name in choices and choices[name] not in names:  # not every command has it
            raise UserError(f"{key}={choices[name]}: choose {' or '.join(names)}")
    check_server(cfg)
    check_secrets(OmegaConf.to_container(cfg, resolve=False))


def _check_upper_ends(cfg: DictConfig) -> None:
    """Check numbers that have an upper end, or that must be more than 0."""
    for key, most in MOST.items():
        if isinstance(value := OmegaConf.select(cfg, key), int | float) and value > most:
            raise UserError(f"{key}={value}: must be at most {most}")
    for key in SHARES:
        value = OmegaConf.select(cfg, key)
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 <= value <= 1:
            raise UserError(f"{key}={value}: must be from 0 to 1")
    for key in POSITIVE:
        if isinstance(value := OmegaConf.select(cfg, key), int | float) and value <= 0:
            raise UserError(f"{key}={value}: must be more than 0, or nothing is trained")


def check_secrets(value: Any, key: str = "") -> None:
    """Reject addresses with a password, such as s3://KEY:SECRET@bucket, which a run would record.

    Args:
        value: a configuration or a part of it, unresolved.
        key: dotted key of `value`.

    Raises:
        UserError: names the first address with a secret.
    """
    if isinstance(value, dict):
        for name, part in value.items():
            check_secrets(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for part in value:
            check_secrets(part, key)
    elif isinstance(value, str) and key not in FREE_TEXT and PASSWORD.search(value):
        raise UserError(
            f"{key}: contains a secret, which the run would record; remove it, and give it in the "
            "environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the storage's own names)"
        )


def check_flags(arguments: Sequence[str], written: Callable[[str, str], str]) -> None:
    """Reject options written with dashes.

    Args:
        arguments: of the command line.
        written: how to write an option, by its name without dashes and its value.

    Raises:
        UserError: names the correct spelling.
    """
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, sign, value = word.partition("=")
        if word.startswith("-") and name not in FLAGS:
            value = value if sign else following * (following[:1] != "-" and "=" not in following)
            raise UserError(f"{word}: options have no dashes; write {written(name.lstrip('-'), value)}")


def check_paths(cfg: DictConfig) -> None:
    """Check that named files and folders exist, unless the name can be a hub id (owner/name).

    Raises:
        UserError: names the first missing path.
    """
    for key, advice in FILES.items():
        value = OmegaConf.select(cfg, key)
        if not isinstance(value, str) or not value or "://" in value:
            continue
        is_path = "hub id" not in advice or value.count("/") != 1 or value[0] in "/.~"
        if is_path and not Path(bundled(value)).expanduser().exists():
            raise UserError(f"{key.removesuffix('.path')}={value}: no such {advice}")


def check_out(cfg: DictConfig) -> None:
    """Check before any work that `out` is a writable file.

    Raises:
        UserError: it is a folder.
    """
    if cfg.out and Path(cfg.out).is_dir():
        raise UserError(f"out={cfg.out}: is a folder; name a file in it ({Path(cfg.out) / 'out.json'})")


def check_server(cfg: DictConfig) -> None:
    """Check a server's options before anything is written, so that no secret is recorded.

    Raises:
        UserError: no url, or a secret in an option that a run records.
    """
    if url := OmegaConf.select(cfg, "engine.url"):
        check_address(str(url), str(OmegaConf.select(cfg, "engine.api_key_env")), "engine.", "/v1")
    url, key = OmegaConf.select(cfg, "rollout.url"), OmegaConf.select(cfg, "rollout.api_key_env")
    if url is None:
        if OmegaConf.select(cfg, "rollout.engine") == "openai":
            raise UserError("rollout.engine=openai: choose it by rollout=openai, which has its settings")
        return
    check_address(str(url), str(key), "rollout.", "/v1")


def check_address(url: str, key: str, group: str, end: str) -> None:
    """Check a server's url and the variable that holds its key.

    Args:
        url: url as given.
        key: name of an environment variable.
        group: prefix of the options' names.
        end: end of the url in the error message.

    Raises:
        UserError: an invalid url, or a secret in the url or instead of the variable's name.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError
    except ValueError:  # also for an invalid port
        raise UserError(f"{group}url: not an address; write http://host:port{end}") from None
    if "@" in parts.netloc or parts.query:
        raise UserError(
            f"{group}url: contains a secret, which the run would record; put a key into an environment "
            f"variable and its name into {group}api_key_env"
        )
    if not key.isidentifier():
        raise UserError(
            f"{group}api_key_env: is the name of the environment variable with the key, not the key"
        )


@contextmanager
def refused() -> Iterator[None]:
    """Turn a constructor's errors about its arguments into a one-line UserError."""
    # Slow import, not needed for --help.
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    try:
        yield
    except UserError:
        raise
    except (InstantiationException, MisconfigurationException, TypeError, ValueError) as error:
        cause = (isinstance(error, InstantiationException) and error.__cause__) or error
        what = "" if isinstance(cause, UserError) else "configuration: "
        raise UserError(what + " ".join(str(cause).split())) from None


def processes(accelerator: str, devices: Any, num_nodes: int = 1) -> int:
    """Number of processes of a Lightning trainer with these settings on this machine."""
    if isinstance(devices, str):
        devices = (
            [part for part in devices.split(",") if part] if "," in devices else devices.replace("auto", "-1")
        )
    if OmegaConf.is_list(devices) or isinstance(devices, list):
        count = len(devices)
    elif (count := int(devices)) < 0:
        import torch

        count = 1 if accelerator == "cpu" else torch.cuda.device_count()
    return count * num_nodes
