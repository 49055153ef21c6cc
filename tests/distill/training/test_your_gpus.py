"""docs/your_gpus.md: its experiments run in two processes, with tiny models of the classes they are for."""

import json
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from workbench import CONF, enlarge, make_tokenizer, ranks

from distill.config.compose import compose

CLASSES = {"qwen3_8b": (Qwen3Config, Qwen3ForCausalLM), "llama31_8b": (LlamaConfig, LlamaForCausalLM)}
TARGETS = {"qwen3_8b": "Qwen/Qwen3-8B", "llama31_8b": "meta-llama/Llama-3.1-8B-Instruct"}
TINY = """
    logger=csv rollout=hf rollout.max_new_tokens=10 rollout.shard_size=3 rollout.samples=1 score.every=2
    trainer.devices=2 trainer.accelerator=cpu trainer.max_steps=2 try_largest=false score.prompts=2
    score.audit_prompts=1 score.max_new_tokens=6 score.temperatures=[0.0] score.alternatives=[]
"""


def tiny(folder: Path, experiment: str) -> Path:
    """A random model of the experiment's class, as a model folder."""
    tokenizer, (configuration, model_class) = make_tokenizer(), CLASSES[experiment]
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    model = model_class(configuration(vocab_size=len(tokenizer), **sizes, **heads, **ends))
    enlarge(model, 6)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("experiment", CLASSES)
@pytest.mark.proof
def test_experiment_ends_with_a_scored_drafter_for_vllm(experiment, bench, tmp_path):
    target = tiny(tmp_path / "target", experiment)
    files = [f"prompts={bench.prompts}", f"prompts.heldout={bench.heldout}", f"output_dir={tmp_path / 'out'}"]
    done = ranks(2, [f"experiment={experiment}", f"target={target}", *files, *TINY.split()])
    assert [one.code for one in done] == [0, 0], done
    first = done[0]
    assert f"serve it: vllm serve {target}" in first.out
    best = first.folder / "checkpoints" / "best"
    assert json.loads((best / "score.json").read_text())["headline"]["tau"] >= 1
    assert json.loads((first.folder / "export" / "2-vllm" / "config.json").read_text())["architectures"]


@pytest.mark.parametrize("experiment", CLASSES)
def test_experiment_names_its_target_and_vllm(experiment):
    cfg = compose([f"experiment={experiment}"], CONF)
    assert cfg.target.path == TARGETS[experiment]
    assert (cfg.rollout.engine, cfg.trainer.devices, cfg.export.to) == ("vllm", "auto", "vllm")
    assert (cfg.drafter.depth, cfg.drafter.anchors, cfg.taps) == (7, 0, "online")


@pytest.mark.parametrize("experiment", [*CLASSES, "llama_cpp", "qwen_coder"])
def test_experiment_scores_the_chain_that_is_served(experiment):
    """The printed command drafts as many tokens as were trained, and these engines draft no trees."""
    cfg = compose([f"experiment={experiment}"], CONF)
    assert (cfg.decode.depth, cfg.decode.width) == (cfg.drafter.depth, 1)
