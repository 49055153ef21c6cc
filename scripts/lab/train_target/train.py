"""Train a model on a folder of text, and write a model folder."""

from __future__ import annotations

import os
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Timer
from omegaconf import DictConfig, OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from decode.errors import UserError
from decode.model.load import TOKENIZER_FILES, load_model
from distill.config.build import quiet
from distill.config.read import read_options
from distill.config.recorded import resolved
from distill.config.validate import refused
from distill.distributed.graceful_shutdown import Stop
from distill.distributed.watchdog import Watchdog
from distill.loggers.loggers import ending, loggers
from distill.options.run import LoggerOptions, TrainerOptions
from distill.training.checkpointing import STATE, TrainingBar
from distill.training.trainer import build_trainer, fit
from distill.utils.atomic_files import clean, write_json
from distill.utils.paths import bundled
from distill.utils.progress import say, switch
from distill.utils.provenance import commit, digest
from distill.utils.run_folder import checkpoints, name_new
from distill.utils.run_record import ResolvedOptions, RunRecord
from drafters.checkpoint.atomic import publish
from train_target.corpus import given_tokenizer, hold_out, read_corpus, train_tokenizer
from train_target.module import PretrainModule, Saver, TextData

SPECIAL_IDS = ("bos", "eos", "pad")  # token ids in a model's configuration


@ending()
def pretrain(cfg: DictConfig, folder: Path) -> float:
    """Train a tokenizer and a model, and write them to a folder.

    Args:
        cfg: composed from conf/lab/train_target.yaml.
        folder: of this run; checkpoints and logs are written below it.

    Returns:
        Nats per held-out token, over all sources; 0 if nothing is held out.

    Raises:
        UserError: bad input, before training starts.
    """
    quiet()
    switch["on"] = cfg.trainer.enable_progress_bar
    out = _check(cfg)
    documents = read_corpus(Path(cfg.data))
    train, held = hold_out(documents, cfg.val_share)
    option = "init_from" if cfg.init_from else "tokenizer"
    tokenizer_folder = Path(bundled(cfg[option])) if cfg[option] else None
    if tokenizer_folder:
        tokenizer = given_tokenizer(tokenizer_folder, option)
    else:
        tokenizer = train_tokenizer(train, cfg.vocab_size, cfg.model.context)
    L.seed_everything(cfg.seed, verbose=False)
    clean(folder / "checkpoints")
    state = next((c / STATE for c in checkpoints(folder)[-1:]), None)
    timer = Timer()  # its state is in checkpoints
    with refused():
        text = digest("".join(d.key for d in documents) + str(sorted(tokenizer.get_vocab().items())))
        module = PretrainModule(_model(cfg, tokenizer), text, cfg.rate)
    name_new(folder)
    stop = Stop()
    first_step = int(state.parents[1].name) if state else 0
    logger = read_options(LoggerOptions, cfg.logger)
    trainer = build_trainer(
        read_options(TrainerOptions, cfg.trainer),
        loggers(logger, RunRecord(folder, ResolvedOptions.of(resolved(cfg), {})), first_step),
        folder,
        state,
        callbacks=[timer, Saver(folder, cfg.every, stop), TrainingBar()],
        val_check_interval=cfg.every * cfg.trainer.accumulate_grad_batches,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )
    data = TextData(train, held, tokenizer, cfg.seq_length, cfg.batch_size, cfg.seed)
    sequences = trainer.max_steps * trainer.accumulate_grad_batches * trainer.world_size * cfg.batch_size
    say(
        f"model: {sum(p.numel() for p in module.parameters()) / 1e6:.1f} M parameters; text: "
        f"{len(train)} documents and {len(held)} held out, {data.tokens / 1e6:.2f} M tokens to train on; "
        f"{trainer.max_steps} steps are {sequences / len(data.rows):.2f} passes"
    )
    fit(trainer, module, data, state, stop, Watchdog(0, folder))
    trainer.loggers = []  # the last validation is not logged
    loss = trainer.validate(module, data, verbose=False)[0] if held else {}
    if trainer.is_global_zero:
        record = {
            "val_nll": {k.removeprefix("val/"): round(v, 4) for k, v in loss.items() if k != "val/loss"},
            "tokens": sequences * cfg.seq_length,
            "minutes": timer.time_elapsed() / 60,
            "commit": commit(),
        } | ({"init_from": str(cfg.init_from), "rate": cfg.rate} if cfg.init_from else {})
        write_model(out, module.model, tokenizer_folder or tokenizer, record)
        say(f"{out}: {record['tokens'] / 1e6:.1f} M tokens in {record['minutes']:.1f} minutes")
        for source, nll in record["val_nll"].items():
            say(f"  {nll:.3f} nats per held-out token of {source}")
    return float(loss.get("val/loss", 0.0))


def _check(cfg: DictConfig) -> Path:
    for key in ("data", "out"):
        if not cfg[key]:
            raise UserError(f"{key}: not given; write data=/folder/of/text out=/folder/for/model")
    _check_numbers(cfg)
    out = Path(cfg.out)
    if out.exists():
        raise UserError(f"out={out}: exists already; give a new folder, or remove it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={out}: {error.strerror}") from None
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"out={out}: {out.parent} cannot be written to")
    return out


def _check_numbers(cfg: DictConfig) -> None:
    for key in ("seq_length", "batch_size", "every", "trainer.max_steps", "trainer.accumulate_grad_batches"):
        least = 2 if key == "seq_length" else 1
        if OmegaConf.select(cfg, key) < least:
            raise UserError(f"{key}={OmegaConf.select(cfg, key)}: must be at least {least}")
    if not cfg.init_from and cfg.seq_length > cfg.model.context:
        raise UserError(f"seq_length={cfg.seq_length}: longer than model.context={cfg.model.context}")
    if not cfg.rate > 0:
        raise UserError(f"rate={cfg.rate}: must be above 0")
    if cfg.init_from and cfg.tokenizer:
        raise UserError("tokenizer: init_from has its own; give one of the two")


def _model(cfg: DictConfig, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """What is trained: fresh weights, or those of `init_from`.

    Raises:
        UserError: no model there, one of another architecture, or sizes that `build_model` refuses.
    """
    if not cfg.init_from:
        return build_model(cfg.model, tokenizer)
    model = load_model(str(bundled(cfg.init_from)), "float32", what="init_from")
    if not isinstance(model, LlamaForCausalLM):
        raise UserError(f"init_from={cfg.init_from}: {type(model).__name__}; only Llama models can continue")
    if cfg.seq_length > (context := model.config.max_position_embeddings):
        raise UserError(f"seq_length={cfg.seq_length}: init_from={cfg.init_from} has {context} positions")
    return model


def build_model(cfg: DictConfig, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A Llama with fresh weights.

    Raises:
        UserError: sizes that are not divisible by the numbers of heads.
    """
    if cfg.hidden_size % (2 * cfg.heads) or cfg.heads % cfg.kv_heads:
        raise UserError(
            f"model: hidden_size={cfg.hidden_size} must be an even multiple of heads={cfg.heads}, "
            f"and those a multiple of kv_heads={cfg.kv_heads}"
        )
    ids: dict[str, Any] = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in SPECIAL_IDS}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=cfg.hidden_size,
        intermediate_size=cfg.intermediate_size,
        num_hidden_layers=cfg.layers,
        num_attention_heads=cfg.heads,
        num_key_value_heads=cfg.kv_heads,
        max_position_embeddings=cfg.context,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        **ids,
    )
    return LlamaForCausalLM(config)


def write_model(
    out: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase | Path,
    record: dict[str, Any],
) -> None:
    """Write a Hugging Face model folder atomically.

    Args:
        out: the folder.
        model: is converted to bfloat16.
        tokenizer: a trained one, or a folder whose files are copied.
        record: content of training.json.
    """
    with publish(out) as temporary:
        model.bfloat16().save_pretrained(temporary)
        if isinstance(tokenizer, Path):  # transformers would change some settings
            for path in chain(*(tokenizer.glob(pattern) for pattern in TOKENIZER_FILES)):
                shutil.copyfile(path, temporary / path.name)
        else:
            tokenizer.save_pretrained(temporary)
        write_json(temporary / "training.json", record)
