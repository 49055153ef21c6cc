"""Export language models as Hugging Face folders: draft models and tuned targets."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.model.load import TOKENIZER_FILES
from decode.model.target import Target
from drafters.export.layout import Format, Layout, Refusal, Saved, serve_sglang, serve_vllm
from drafters.hf.build import build, portable_config
from drafters.hf.tokenizer_map import unpack
from drafters.hf.tuned_target import Lora
from drafters.hub import download

STEM = "model."  # prefix of the model's weights in a drafter
TOKENS = 5  # draft length for serving: the maximum of decode=auto
PLAIN = "A plain Hugging Face model, adapters merged; in transformers it is an assistant_model of generate()."
ENGINES = " For an engine write it with to=vllm or to=sglang, which give it the target's vocabulary size."
OWN_TOKENIZER = (
    "A plain Hugging Face model with its own tokenizer, adapters merged; in transformers it is an "
    "assistant_model of generate(), with tokenizer= of the target and assistant_tokenizer= of this folder."
)
ASSISTANT = (
    "In transformers: model.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained(<this "
    f"folder>)). A draft has {TOKENS} tokens; generation_config.json says so."
)
MASKED = "A plain Hugging Face model, adapters merged; no engine drafts with a masked language model."
MERGED = "The tuned target. Its heads are exported separately and fit only this target."


def _check_nothing(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    del settings, target
    yield from ()


def _check_vocabulary(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    """Check that the model can be resized to the target's vocabulary size, on torch's meta device."""
    if settings.get("tokenizer_bytes"):
        yield Refusal(
            "its draft model has its own tokenizer (drafter.vocabulary=map), and this format uses the "
            "target's"
        )
        return
    config, size = dict(settings["config"]), target.vocab_size
    model = _empty(config)
    try:
        _model_with(config, model.state_dict(), size)
    except RuntimeError:
        yield Refusal(
            f"a {type(model).__name__} has its vocabulary in more than an embedding and a head, and cannot "
            f"be resized to the target's {size} ids"
        )


def _hf(saved: Saved, target: Target) -> Layout:
    """A draft model, unchanged."""
    if "tokenizer" in saved.weights:
        return _with_tokenizer(saved)
    note = PLAIN if any(_check_vocabulary(saved.settings, target)) else PLAIN + ENGINES
    return _folder(_model(saved), target)._replace(note=note)


def _with_tokenizer(saved: Saved) -> Layout:
    """A draft model with its own tokenizer and end tokens."""
    model, tokenizer = _model(saved), unpack(saved.weights["tokenizer"])
    config = _config(model)
    ids = {name: config.get(f"{name}_id") for name in ("bos_token", "eos_token", "pad_token")}
    firsts = {name: i[0] if isinstance(i, list) else i for name, i in ids.items()}
    named = {name: tokenizer.id_to_token(i) for name, i in firsts.items() if i is not None}
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | named, indent=1),
    }
    content = {name: text.encode() for name, text in files.items()}
    return Layout(config, {}, files=content, model=model, note=OWN_TOKENIZER)


def _masked(saved: Saved, target: Target) -> Layout:
    """A masked language model, unchanged."""
    layout = _folder(_model(saved), target)._replace(note=MASKED)
    return layout._replace(config=layout.config | {"mask_token_id": saved.settings["mask_token"]})


def _vllm(saved: Saved, target: Target) -> Layout:
    """A draft model for vLLM's `draft_model`, which requires the target's vocabulary size."""
    return _folder(_model(saved, target.vocab_size), target)._replace(serve=serve_vllm("draft_model", TOKENS))


def _sglang(saved: Saved, target: Target) -> Layout:
    """A draft model for SGLang's `STANDALONE`, which requires the target's vocabulary size."""
    return _folder(_model(saved, target.vocab_size), target)._replace(
        serve=serve_sglang("STANDALONE", TOKENS)
    )


def _transformers(saved: Saved, target: Target) -> Layout:
    """A draft model for `generate`, which takes another vocabulary size for another tokenizer's.

    transformers reads the length of drafts from the draft model's generation config; its defaults are 20
    tokens, and an end where the model is unsure.
    """
    layout = _folder(_model(saved, target.vocab_size), target)
    assert layout.model is not None
    generation = copy.deepcopy(layout.model.generation_config)  # the target's own object
    generation.update(
        num_assistant_tokens=TOKENS,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    layout.model.generation_config = generation
    return layout._replace(note=ASSISTANT)


def _tuned(saved: Saved, target: Target) -> Layout:
    """The target tuned by `medusa2`, with merged weights."""
    lora = Lora(**saved.settings["lora"])
    part = "lora."
    lora.load_state_dict({n.removeprefix(part): w for n, w in saved.weights.items() if n.startswith(part)})
    return _folder(lora.to(target.device).merge(target).model, target)._replace(note=MERGED)


def _model(saved: Saved, size: int | None = None) -> PreTrainedModel:
    """The drafter's model with its weights, optionally resized to another vocabulary size."""
    assert not saved.settings["lora"], "loading has merged it"
    weights = {n.removeprefix(STEM): w for n, w in saved.weights.items() if n.startswith(STEM)}
    model = _model_with(dict(saved.settings["config"]), weights, size)
    model.tie_weights()
    return model.eval()


def _model_with(config: dict[str, Any], weights: dict[str, Tensor], size: int | None) -> Any:
    """A model with these weights, resized to another vocabulary size.

    Raises:
        RuntimeError: the vocabulary is in other weights too.
    """
    model = _empty(config)
    text = model.config.get_text_config()
    if size and size != text.vocab_size:
        weights |= _resized(model, weights, size)
        text.vocab_size = size
        config = json.loads(model.config.to_json_string())
        model = _empty(config)
    model.load_state_dict(weights, assign=True)
    return model


def _empty(config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return build(config, masked=True)


def _resized(model: Any, weights: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """Embedding and head resized to another number of ids; additional ids are padding.

    A new id gets the embedding of the last one, as in `lm.DraftLM`, and the mean of all logits, which is
    never the largest. If the head is tied, both are the mean.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is embedding.weight
    names = {id(module): name for name, module in model.named_modules()}

    def fitted(rows: Tensor, new: Tensor) -> Tensor:
        more = size - len(rows)
        return torch.cat([rows, new.expand(more, *rows.shape[1:])]) if more > 0 else rows[:size].clone()

    resized = {}
    for module in (embedding, head):
        for part, _ in module.named_parameters(recurse=False):
            name = f"{names[id(module)]}.{part}"
            rows = weights[name]
            mean = rows.float().mean(0, keepdim=True).to(rows.dtype)
            resized[name] = fitted(rows, rows[-1:] if module is embedding and not tied else mean)
    return resized


def _folder(model: Any, target: Target) -> Layout:
    """Files of the folder, with the target's tokenizer and generation config."""
    config, files = _config(model), target_files(target)
    if model.can_generate() and (generation := getattr(target.model, "generation_config", None)):
        model.generation_config = generation
    return Layout(config, {}, files=files, model=model)


def config_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a draft model with these settings and the model's own vocabulary size."""
    return _config(_empty(dict(settings["config"])))


def _config(model: Any) -> dict[str, Any]:
    config = portable_config(json.loads(model.config.to_json_string()))
    config |= {"architectures": [type(model).__name__], "torch_dtype": str(model.dtype).split(".")[1]}
    return config | _transformers_4_rope(config)


def _transformers_4_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rope settings under the names of transformers 4, which silently ignores the newer names."""
    rope = config.get("rope_parameters") or {}
    if "rope_theta" not in rope:  # none, or one per layer type under names that depend on the family
        return {}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    plain = scaling.get("rope_type", "default") == "default"
    return {"rope_theta": rope["rope_theta"], "rope_scaling": None if plain else scaling}


def target_files(target: Target, *more: str) -> dict[str, bytes]:
    """The target's tokenizer files, unchanged; none for a target without path or hub id.

    Args:
        target: a loaded target.
        more: names of further files.

    Raises:
        UserError, RemoteError: the files cannot be downloaded from the Hub.
    """
    name, patterns = target.model.name_or_path, (*TOKENIZER_FILES, *more)
    if not name:
        return {}
    folder = Path(name).expanduser()
    if not folder.is_dir():
        commit = getattr(target.model.config, "_commit_hash", None)
        folder = download.snapshot(name, commit, patterns)
    paths = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


HF = Format(_hf, _check_nothing)
MASKED_LM = Format(_masked, _check_nothing)
TUNED = Format(_tuned, _check_nothing)
VLLM = Format(_vllm, _check_vocabulary, lambda _: TOKENS)
SGLANG = Format(_sglang, _check_vocabulary, lambda _: TOKENS)
TRANSFORMERS = Format(_transformers, _check_vocabulary, lambda _: TOKENS)
