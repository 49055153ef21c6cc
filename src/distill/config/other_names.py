"""Names that other programs give to options, and the options that mean the same here."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

# option, how to write it, a value -> names in transformers, TRL, Lightning, vLLM and their examples
OPTIONS = {
    ("target", "target={}", "/path/or/hub-id"): (
        *("model", "model_name", "model_path", "model_id", "model_name_or_path", "pretrained", "base_model"),
        *("target_model", "target_path", "pretrained_model_name_or_path", "llm"),
    ),
    ("checkpoint", "checkpoint={}", "outputs/<date>/<time>/checkpoints/best"): (
        *("draft", "draft_model", "speculative_model", "assistant_model", "ckpt", "checkpoint_path"),
    ),
    ("prompts", "prompts={}", "/path/to/prompts.jsonl"): (
        *("data", "dataset", "dataset_name", "data_path", "train_data", "train_file", "train_dataset"),
    ),
    ("trainer.max_steps", "trainer.max_steps=...: steps of the optimizer", ""): (
        *("epoch", "epochs", "num_epochs", "max_epochs", "num_train_epochs", "train_epochs"),
    ),
    ("trainer.devices", "trainer=ddp trainer.devices={}", "..."): (
        *("gpu", "gpus", "n_gpus", "num_gpus", "ngpu", "nproc_per_node", "num_processes", "world_size"),
        *("tensor_parallel_size", "data_parallel_size", "tp", "dp"),
    ),
    ("trainer.accelerator", "trainer.accelerator=gpu", ""): ("device", "gpu", "gpus", "cuda"),
    ("batch_size", "batch_size={}", "..."): (
        *("bs", "bsz", "train_batch_size", "micro_batch_size", "per_device_train_batch_size"),
    ),
    ("trainer.accumulate_grad_batches", "trainer.accumulate_grad_batches={}", "..."): (
        *("gradient_accumulation_steps", "accumulation_steps", "grad_accum", "accumulate"),
    ),
    ("optimizer.optimizer.lr", "optimizer.optimizer.lr={}", "..."): ("learning_rate",),
    ("max_tokens", "max_tokens={}", "..."): (
        *("max_length", "max_len", "max_seq_len", "max_seq_length", "seq_len", "seq_length", "cutoff_len"),
        *("max_model_len", "context_length", "block_size"),
    ),
    ("output_dir", "output_dir={}", "..."): ("output", "out_dir", "save_dir", "output_path", "run_dir"),
    ("resume", "resume={}", "..."): ("resume_from_checkpoint", "resume_from", "continue"),
    ("drafter.depth", "drafter.depth={}", "..."): (
        *("k", "draft_length", "num_speculative_tokens", "num_draft_tokens", "ttt_length", "ttt_steps"),
    ),
    ("max_new_tokens", "max_new_tokens={}", "..."): ("max_tokens", "max_length", "n_predict"),
}


def meant(name: str, cfg: DictConfig, value: str = "") -> str:
    """How to write what another program calls `name`; empty if this command has no such option.

    Args:
        name: the last part of an unknown option, with - or _.
        cfg: configuration of the command.
        value: that was given; empty: an example is shown.
    """
    name = name.lower().replace("-", "_")
    for (option, written, example), names in OPTIONS.items():
        if name in names and _has(cfg, option):
            return written.format(value or example)
    return ""


def _has(cfg: DictConfig, option: str) -> bool:
    group, _, key = option.rpartition(".")
    node = OmegaConf.select(cfg, group) if group else cfg
    return OmegaConf.is_dict(node) and key in set(map(str, node))  # `in` is false for a value that is unset
