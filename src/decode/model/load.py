"""Load targets, draft models and tokenizers, with one-line errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from decode.errors import UserError
from decode.model import gguf
from decode.model.abilities import Abilities, quantisation, why_elsewhere, why_undecodable
from decode.model.files.account import Account, report
from decode.model.files.config_keys import account_of_config, rope_warnings
from decode.model.files.folder import CONFIG, GENERATION, ModelFiles
from decode.model.files.generation import account_of_generation
from decode.model.files.stored import account_of_files, stored_tensors
from decode.model.files.tokenizer_files import account_of_tokenizer
from decode.model.files.weights import DEQUANTISED, add_tensors
from decode.model.placement.offload import load_offloaded
from decode.model.placement.sharded import load_sharded
from decode.model.probe import find_abilities
from decode.model.target import Target

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Files of a tokenizer; none of them is code.
TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.*",
    "chat_template.*",
    "*.model",
    "*.tiktoken",
)


def source_of(name: str, revision: str | None = None, what: str = "target") -> tuple[str | Path, str | None]:
    """Model source for transformers: a folder or a hub id; a GGUF file is converted to a folder.

    Args:
        name: a folder, a hub id, a GGUF file, or `package/file.gguf` of an installed package.
        revision: of a hub id; for a GGUF file its SHA-256, which is checked.
        what: option that names the model, for errors.

    Returns:
        The folder or hub id, and its revision.

    Raises:
        UserError: see `gguf.find` and `gguf.converted`; or the SHA-256 differs.
    """
    file = gguf.find(name, what)
    if file is None:
        folder = Path(name).expanduser()
        return (folder if folder.is_dir() else name), revision
    folder, sha = gguf.converted(file, what)
    if revision not in (None, sha):
        raise UserError(f"{what}={name}: its SHA-256 is {sha}, not {revision}; give the right file")
    return folder, sha


def load_config(
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    what: str = "target",
    masked: bool = False,
) -> Any:
    """Load a model's configuration and check it before reading weights.

    Args:
        name: folder, hub id or GGUF file; see `source_of`.
        revision: of a hub id, or the SHA-256 of a GGUF file.
        trust_remote_code: run Python code that comes with the model.
        what: option that names the model, for errors.
        masked: also accept a masked LM (bidirectional).

    Raises:
        UserError: no such model, or not a language model.
    """
    config, account, files = _read_config(name, revision, trust_remote_code, what, masked)
    report(account, files.name)
    return config


def _read_config(
    name: str, revision: str | None, trust_remote_code: bool, what: str = "target", masked: bool = False
) -> tuple[Any, Account, ModelFiles]:
    """Load a configuration, its file's account and the model's files; arguments as in `load_config`."""
    source, revision = source_of(name, revision, what)
    files = ModelFiles(source, revision, f"{what}={name}")
    if isinstance(source, Path):
        files.check_adapter()
        if not (source / "config.json").is_file():
            raise UserError(f"{what}={name}: no config.json in it, so this is no model folder")
    elif Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UserError(
            f"{what}={name}: no such folder; give a model folder, a GGUF file or a hub id (owner/name)"
        )
    if not isinstance(source, Path):
        files.check_adapter()
    try:
        with rope_warnings() as warnings:
            config = AutoConfig.from_pretrained(
                source, revision=revision, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise UserError(f"{what}={name}: {_first_line(error)}") from None
    except Exception as error:  # configuration classes may raise anything
        raise UserError(f"{what}={name}: config.json: {type(error).__name__}, {_first_line(error)}") from None
    remote = trust_remote_code and hasattr(config, "auto_map")
    if not (remote or _is_causal(config) or (masked and is_masked(config))):
        kind = "masked or causal" if masked else "causal"
        raise UserError(f"{what}={name}: a {config.model_type!r} model is no {kind} language model")
    return config, account_of_config(config, files.read(CONFIG), warnings), files


def accounts_of_files(
    name: str, revision: str | None, trust_remote_code: bool, tokenizer: Any
) -> list[Account]:
    """Accounts of a target's files except its weights, for printing; arguments as in `load_config`."""
    config, account, files = _read_config(name, revision, trust_remote_code)
    rows = config.get_text_config().vocab_size
    converted = [gguf.account_of(Path(files.source))] if gguf.find(name) else []
    return [
        *converted,
        account,
        *([account_of_tokenizer(tokenizer, files)] if tokenizer else []),
        account_of_generation(files.read(GENERATION), rows),
    ]


def _is_causal(config: Any) -> bool:
    # transformers' causal mapping contains encoders too.
    if getattr(config, "is_encoder_decoder", False) or is_masked(config):
        return False
    return config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def is_masked(config: Any) -> bool:
    """Whether this is a masked language model, i.e. bidirectional."""
    decodes = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not decodes


def auto_class(config: Any, masked: bool = False) -> Any:
    """Auto class of transformers for a configuration; `masked` as in `load_config`."""
    return AutoModelForMaskedLM if masked and is_masked(config) else AutoModelForCausalLM


def load_target(
    name: str,
    dtype: str = "auto",
    device: str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    compiled: bool = False,
    placement: str = "replicated",
    decodes: bool = True,
    capture: bool = False,
    **memory: Any,
) -> Target:
    """Load, freeze and probe a causal LM.

    Args:
        name: folder, hub id or GGUF file; see `source_of`.
        dtype: `auto` keeps the checkpoint's dtype.
        device: device to load to.
        revision: of a hub id, or the SHA-256 of a GGUF file.
        trust_remote_code: run Python code that comes with the model.
        compiled: see `CausalLM.compile`; with `capture` rounds are compiled whole.
        placement: `replicated`: all on one device; `sharded`: each layer sharded over processes;
            `device_map`: layers spread over devices, host memory and disk.
        decodes: refuse a target that cannot verify drafts; False: only one that cannot be trained for either.
        capture: whether decoding is captured; see `decode.generation.capture`.
        **memory: for `device_map`; see `offload.load_offloaded`.

    Raises:
        UserError: see `load_model`, `probe` and `load_sharded`; `compiled` or `capture` with another
            placement.
    """
    config = load_config(name, revision, trust_remote_code)
    if torch.device(device).type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for every new text length
    if decodes:
        Abilities(decode=why_undecodable(config)).check_decode(f"target={name}:")
    if compiled and placement != "replicated":
        raise UserError(f"target.compile=true: layers of target.placement={placement} cannot be compiled")
    if capture and placement != "replicated":
        raise UserError(f"target.capture=true: rounds with target.placement={placement} cannot be captured")
    files = ModelFiles(*source_of(name, revision), f"target={name}")
    report(account_of_generation(files.read(GENERATION), config.get_text_config().vocab_size), files.name)
    load = partial(load_model, name, dtype, revision, trust_remote_code, quantised=True)
    if placement == "sharded":
        target = load_sharded(load, torch.device(device))
    elif placement == "device_map":
        with torch.device("meta"):
            empty = auto_class(config).from_config(
                config, trust_remote_code=trust_remote_code, dtype=DTYPES.get(dtype, config.dtype)
            )
        target = load_offloaded(load, empty, torch.device(device), **memory)
    else:
        target = Target(load().to(device))
    able = find_abilities(target)
    target.abilities = able._replace(decode=able.decode or why_elsewhere(config))
    if decodes or able.train:
        target.abilities.check_decode(f"target: {type(target.model).__name__}")
    target.capture, target.compiles = capture, compiled
    if compiled:
        reason = target.compile()
        if reason:
            print(f"target.compile=true: not compiled; {reason}", file=sys.stderr, flush=True)
    return target


def target_of(model: PreTrainedModel) -> Target:
    """Probe a causal LM that is loaded already; its mode and what needs gradients stay as they are.

    Raises:
        UserError: no causal language model, one on several devices, or one that cannot verify drafts.
    """
    config, name = model.config, f"target: {type(model).__name__}"
    if not (_is_causal(config) or hasattr(config, "auto_map")):
        raise UserError(f"{name}: a {config.model_type!r} model is no causal language model")
    if len({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}) > 1:
        raise UserError(
            f"{name} is spread over devices: load it by its name, with target.placement=device_map"
        )
    Abilities(decode=why_undecodable(config)).check_decode(name)
    training = [module for module in model.modules() if module.training]
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        target = Target(model)
        find_abilities(target).check_decode(name)
    finally:
        for module in training:
            module.training = True
        for weight in trained:
            weight.requires_grad_(True)
    return target


def load_model(
    name: str,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    what: str = "target",
    masked: bool = False,
    quantised: bool = False,
    **more: Any,
) -> Any:
    """Load a language model of transformers; arguments as in `load_target` and `load_config`.

    `more` is passed to `from_pretrained`. `quantised` also accepts a quantised model, dequantised if
    transformers can do so.

    Raises:
        UserError: see `load_config`; damaged or missing weights; a quantised model.
    """
    config = load_config(name, revision, trust_remote_code, what, masked)
    method = quantisation(config)
    if method and not quantised:
        raise UserError(f"{what}={name}: quantised with {method}; use the unquantised weights")
    if dtype != "auto" and dtype not in DTYPES:
        raise UserError(f"{what}.dtype={dtype}: choose auto, {', '.join(DTYPES)}")
    if method in DEQUANTISED:
        config.quantization_config = {**_settings(config), "dequantize": True}
        more["config"] = config
    source, revision = source_of(name, revision, what)
    files = ModelFiles(source, revision, f"{what}={name}")
    account = account_of_files(files)
    account.check(files.name)
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    # Building so many layers takes hours before missing weights are noticed.
    if isinstance(files.source, Path) and 0 < (stored := len(stored_tensors(files)[0])) < layers:
        raise UserError(f"{files.name}: config.json has {layers:,} layers, and the files {stored:,} tensors")
    try:
        loaded: Any = auto_class(config, masked).from_pretrained(
            source,
            revision=revision,
            trust_remote_code=trust_remote_code,
            dtype=DTYPES.get(dtype, "auto"),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **kernels(config),
            **more,
            **({"experts_implementation": "eager"} if dtype == "float64" else {}),  # no grouped kernel
        )
    except Exception as error:  # model classes and packages may raise anything
        how = f"quantised with {method}: " if method else ""
        expected = isinstance(error, OSError | ValueError | ImportError | RuntimeError | SafetensorError)
        kind = "" if expected else f"{type(error).__name__} while the model was built, "
        raise UserError(f"{what}={name}: {how}{kind}{_first_line(error)}") from None
    model, info = loaded
    if method and method not in DEQUANTISED:
        model = _dequantised(model, f"{what}={name}: quantised with {method}")
    # transformers initialises missing weights at random, e.g. the head of a reward model.
    if missing := sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}):
        raise UserError(
            f"{what}={name}: its weights do not fit config.json ({len(missing)} missing or of another "
            f"shape, {missing[0]} first); is it a language model's checkpoint?"
        )
    add_tensors(account, model, info, files, method)
    report(account, files.name)
    model.accounts = [account]  # for `foredraft inspect`
    if gguf.find(name, what):
        # private API: transformers has no public place for a model's revision
        model.config._commit_hash = revision
    return model


def _dequantised(model: Any, name: str) -> Any:
    """The model with plain weights; unchanged if transformers cannot dequantise it.

    Raises:
        UserError: the quantisation package fails.
    """
    try:
        return model.dequantize()
    except NotImplementedError:
        return model
    except Exception as error:  # quantisation packages may raise anything
        raise UserError(
            f"{name}, which cannot be read here ({_first_line(error)}); use the unquantised weights"
        ) from None


def _settings(config: Any) -> dict[str, Any]:
    """A configuration's quantisation settings."""
    settings = config.quantization_config
    return dict(settings) if isinstance(settings, dict) else settings.to_dict()


def kernels(config: Any) -> dict[str, str]:
    """Keyword arguments of `from_pretrained` that select the attention kernel."""
    # Only the eager kernel has soft-capped attention.
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return {"attn_implementation": "eager"} if capped else {}


def load_tokenizer(
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    what: str = "target",
    fetch: bool = True,
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer; arguments as in `load_config`.

    With `fetch=False` only local files are used, without network access.

    Raises:
        UserError: the model has no tokenizer.
    """
    source, revision = source_of(name, revision, what)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source,
            revision=revision,
            trust_remote_code=trust_remote_code,
            local_files_only=not fetch,
        )
    except Exception as error:  # readers of damaged files raise anything
        raise UserError(f"{what}={name}: no tokenizer ({_first_line(error)})") from None
    # For some classes transformers creates an empty tokenizer if there is none.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"{what}={name}: no tokenizer (special tokens and nothing else)")
    files = ModelFiles(source, revision, f"{what}={name}", fetch=False)  # the call above fetched them
    report(account_of_tokenizer(tokenizer, files), files.name)
    return tokenizer


def stop_tokens(target: Target) -> list[int]:
    """End tokens from the model's generation config, or as set by `stop_at`."""
    return _ends(getattr(target.model, "generation_config", None), target.config)


def stop_at(target: Target, tokens: Sequence[int]) -> None:
    """Set the end tokens that `stop_tokens` returns for a target."""
    holder: Any = getattr(target.model, "generation_config", None) or target.config
    holder.eos_token_id = list(tokens)


def file_ends(name: str, revision: str | None = None, trust_remote_code: bool = False) -> list[int]:
    """End tokens from a model's files, without loading weights; arguments as in `load_config`."""
    config = load_config(name, revision, trust_remote_code)
    source, revision = source_of(name, revision, "target")
    try:
        generation = GenerationConfig.from_pretrained(source, revision=revision or "main")
    except OSError:  # there is none
        generation = None
    return _ends(generation, config.get_text_config())


def _ends(generation: Any, config: Any) -> list[int]:
    """End tokens within the vocabulary; files may name others, which their accounts list."""
    end = getattr(generation, "eos_token_id", None)
    end = getattr(config, "eos_token_id", None) if end is None else end
    ends = [] if end is None else [end] if isinstance(end, int) else list(end)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    return ends if rows is None else [token for token in ends if 0 <= token < rows]


def _first_line(error: BaseException) -> str:
    first, *rest = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first
